"""Checkpoints: complete directories ``step_00000100`` or nothing.

A checkpoint holds ``shard-*.safetensors``, tensors by plain name with whole tensors spread over the
ranks by bytes, and ``checkpoint.json``: everything else, with size and CRC-32 of each shard. It is
written under a temporary name, fsynced and renamed; rename is the only atomicity relied upon.
Nothing that is read back is unpickled. There is no state of a random generator: after the weights
are drawn, training draws no random number (the shuffle is a hash).
"""

import argparse
import fcntl
import hashlib
import json
import os
import re
import shutil
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, TextIO

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from common import crc32
from distributed import World, agreed
from flags import not_empty, not_negative

FORMAT = 1
MANIFEST = "checkpoint.json"
LOCK = ".lock"
DEFAULT_ROOT = Path("checkpoints")
REQUIRED = {"format": int, "step": int, "files": dict, "run_id": str, "checksum": str}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("checkpoints")
    group.add_argument(
        "--ckpt-every", type=not_negative, default=100, help="steps; 0: only the last"
    )
    group.add_argument("--ckpt-dir", type=not_empty, help=f"default: ./{DEFAULT_ROOT}/<run id>")
    group.add_argument(
        "--ckpt-sync", action="store_true", help="train on only when a checkpoint is written"
    )
    group.add_argument(
        "--keep-last", type=not_negative, default=5, help="checkpoints kept; 0: all of them"
    )
    group.add_argument(
        "--keep-every", type=not_negative, default=0, help="also keep those of every so many steps"
    )
    group.add_argument("--resume", default="", help="checkpoint directory, or auto: the newest")
    group.add_argument(
        "--resume-data",
        choices=["same", "new"],
        default="same",
        help="new: keep weights, optimizer and step; read today's table from its start",
    )
    group.add_argument(
        "--init-from", type=not_empty, help="checkpoint whose weights a new run starts with"
    )


# -----------------------------------------------------------------------------
# the directory


def complete(root: Path) -> list[Path]:
    """Complete checkpoints below ``root``, oldest first."""
    found = [p for p in root.glob("step_*") if re.fullmatch(r"step_\d{8,}", p.name)]
    return sorted((p for p in found if (p / MANIFEST).is_file()), key=step_of)


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def take(root: Path, after: int, damaged: Sequence[Path] = ()) -> tuple[TextIO, list[str]]:
    """Make ``root`` this run's until the process ends. Returns the lock and what to say of it.

    The lock is an ``flock`` of a file: the kernel lets go of it when its owner dies, and NFS passes
    it on to the server, which lets go when a dead client's lease ends. Raises SystemExit where
    another run has it, or has checkpoints later than step ``after``. ``damaged`` ones are renamed,
    debris of saves is removed.
    """
    root.mkdir(parents=True, exist_ok=True)
    lock, notices = open(root / LOCK, "a+"), []
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        raise SystemExit(
            f"--ckpt-dir {root} is in use by {lock.read().strip() or 'another run'}: "
            "wait for it to end, or give another directory"
        ) from None
    except OSError as error:
        notices.append(f"{root} cannot be locked ({error}): see to it that no other run writes it")
    for path in damaged:
        path.rename(path.with_name(f"damaged_{path.name}_{int(time.time())}"))
    later = [path for path in complete(root) if step_of(path) > after]
    if later:
        raise SystemExit(
            f"--ckpt-dir {root} holds {later[-1].name}, later than step {after:,} where this run "
            "starts: continue with --resume auto, or give another directory"
        )
    lock.truncate(0)
    print(f"process {os.getpid()} on {socket.gethostname()}", file=lock, flush=True)
    for debris in root.glob(".partial_*"):
        shutil.rmtree(debris, ignore_errors=True)
    return lock, notices


def prune(root: Path, keep_last: int, keep_every: int) -> None:
    """Remove all but the last ``keep_last`` (0: none is removed) and those of every
    ``keep_every`` steps."""
    for path in complete(root)[: -keep_last or None] if keep_last else []:
        if not keep_every or step_of(path) % keep_every:
            doomed = path.rename(path.with_name(f".partial_{path.name}"))
            shutil.rmtree(doomed)


# -----------------------------------------------------------------------------
# saving


def shares(sizes: dict[str, int], ranks: int) -> list[list[str]]:
    """Tensor names for each rank to write, whole tensors, about equal in bytes: the largest first,
    each to the rank with the least so far (Graham's LPT rule)."""
    loads, names = [0] * ranks, [[] for _ in range(ranks)]
    for name in sorted(sizes, key=lambda n: (-sizes[n], n)):
        rank = loads.index(min(loads))
        names[rank].append(name)
        loads[rank] += sizes[name]
    return names


class Saver:
    """Writes checkpoints below ``root`` in the background, one at a time.

    All ranks make the same calls in the same order. ``lock`` is the main rank's from ``take``. A
    save that fails does so on all ranks: ``failed`` says so, ``finish`` raises its SystemExit.
    """

    def __init__(
        self, root: Path, world: World, lock: TextIO | None, keep_last: int, keep_every: int
    ) -> None:
        self.root, self.world, self.lock = root, world.apart(), lock
        self.keep = keep_last, keep_every
        self.buffers: dict[str, torch.Tensor] = {}  # this rank's share in host memory
        self.pending: Future[tuple[Path, float]] | None = None
        self.stood_still = 0.0  # seconds of the last save

    def start(self, step: int, tensors: dict[str, torch.Tensor], record: dict) -> None:
        """Copy this rank's share; the rest is done while training goes on.

        ``record`` is what JSON holds of the run, equal on all ranks. ``finish`` comes first.
        """
        began = time.perf_counter()
        if not self.buffers:
            sizes = {name: t.nbytes for name, t in tensors.items()}
            for name in shares(sizes, self.world.size)[self.world.rank]:
                on_gpu = tensors[name].is_cuda
                self.buffers[name] = torch.empty_like(
                    tensors[name], device="cpu", pin_memory=on_gpu
                )
        for name, buffer in self.buffers.items():
            buffer.copy_(tensors[name], non_blocking=True)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        self.pending, total = Future(), sum(t.nbytes for t in tensors.values())
        # a daemon: a rank whose peers died must not wait for them at its exit
        work = (self.pending, step, record, total)
        threading.Thread(target=self._run, args=work, daemon=True).start()
        self.stood_still = time.perf_counter() - began

    def failed(self) -> bool:
        return self._done() and self.pending.exception() is not None

    def written(self) -> bool:
        return self._done() and self.pending.exception() is None

    def _done(self) -> bool:
        return self.pending is not None and self.pending.done()

    def finish(self) -> list[str]:
        """Wait for the save under way, if there is one. Returns what to say of it."""
        if self.pending is None:
            return []
        pending, self.pending = self.pending, None
        path, seconds = pending.result()
        return [
            f"step {step_of(path)}: saved {path} in {seconds:.2f} s, "
            f"training stood still {self.stood_still:.3f} s"
        ]

    def close(self) -> None:
        """Let go of the directory."""
        if self.lock is not None:
            self.lock.close()

    def table_versions(self) -> set[int]:
        """Of the table, which the checkpoints that there are need; a damaged one needs none."""
        versions = set()
        for path in complete(self.root):
            with suppress(OSError, ValueError, KeyError, TypeError):
                versions.add(json.loads((path / MANIFEST).read_text())["table_version"])
        return versions

    def _run(self, pending: Future, step: int, record: dict, total: int) -> None:
        began = time.perf_counter()
        try:
            path = self._write(step, record, total)
        except BaseException as error:
            pending.set_exception(error)
        else:
            pending.set_result((path, time.perf_counter() - began))

    def _write(self, step: int, record: dict, total: int) -> Path:
        final = self.root / f"step_{step:08d}"
        partial, world = final.with_name(f".partial_{final.name}"), self.world
        doing = f"cannot write checkpoint {final}"
        try:
            with agreed(world, doing):
                if world.is_main:
                    self._check_directory(total)
                    partial.mkdir()
            with agreed(world, doing):
                files = self._write_share(partial)
            files = world.gather(files)
            with agreed(world, doing):
                if world.is_main:
                    listed = {name: file for part in files for name, file in part.items()}
                    write_manifest(partial, {"step": step, **record, "files": listed})
                    fsync(partial)
                    partial.rename(final)
                    fsync(self.root)
                    prune(self.root, *self.keep)
        except BaseException:
            if world.is_main:
                shutil.rmtree(partial, ignore_errors=True)
            raise
        return final

    def _check_directory(self, total: int) -> None:
        """Raise OSError where a save cannot end well, before it begins."""
        there = self.root / LOCK
        if not there.exists() or not os.path.samestat(os.fstat(self.lock.fileno()), there.stat()):
            raise OSError("the directory is not the one it was: unmounted or replaced?")
        free = shutil.disk_usage(self.root).free
        if free < total * 1.01 + (1 << 20):
            raise OSError(
                f"No space left on device: it takes {total:,} bytes, {free:,} are free: free some "
                "(or lower --keep-last) and continue with --resume auto"
            )

    def _write_share(self, folder: Path) -> dict[str, dict]:
        """Write this rank's tensors. Returns size and checksum of the file, by its name."""
        if not self.buffers:
            return {}  # more ranks than tensors
        rank, size = self.world.rank + 1, self.world.size
        path = folder / f"shard-{rank:05d}-of-{size:05d}.safetensors"
        try:
            save_file(self.buffers, path)
        except SafetensorError as error:  # of the file system
            raise OSError(str(error)) from error
        fsync(path)
        return {path.name: {"bytes": path.stat().st_size, "crc32": crc32(path)}}


# -----------------------------------------------------------------------------
# loading


class Found(NamedTuple):
    """The checkpoint to start from, None to start afresh, and newer ones that are damaged."""

    path: Path | None
    record: dict
    damaged: list[Path]
    notes: list[str]


def find(resume: str, ckpt_dir: str | None, world: World) -> Found:
    """The checkpoint that ``--resume`` means, whole. A collective call.

    ``auto`` is the newest whole one in ``--ckpt-dir`` or, where that is not given, of the newest
    run below ``checkpoints/``. Raises SystemExit on all ranks for a named one that is damaged,
    where all are, and for a fresh start where checkpoints are already.
    """
    with agreed(world):
        candidates = _candidates(resume, ckpt_dir) if world.is_main else None
    candidates, damaged, notes = world.broadcast(candidates), [], []
    for path in candidates:
        try:
            return Found(path, check(path, world), damaged, notes)
        except SystemExit as damage:  # with its reason on the main rank
            if resume != "auto":
                raise
            damaged.append(path)
            notes.append(f"passed over: {damage}")
    if candidates:
        raise SystemExit(f"--resume auto: none of {len(notes)} is whole: {notes[0]}")
    return Found(None, {}, [], [])


def _candidates(resume: str, ckpt_dir: str | None) -> list[Path]:
    """In the order in which they are tried."""
    if resume and resume != "auto":
        return [Path(resume)]
    if ckpt_dir is not None:
        found = complete(Path(ckpt_dir))
        if found and not resume:
            raise SystemExit(
                f"--ckpt-dir {ckpt_dir} holds {found[-1].name} of an earlier run: "
                "continue it with --resume auto, or name another directory"
            )
        return found[::-1]
    if not resume:
        return []
    runs = [complete(root) for root in DEFAULT_ROOT.glob("*") if root.is_dir()]
    newest = max(filter(None, runs), key=lambda r: (r[-1] / MANIFEST).stat().st_mtime, default=[])
    return newest[::-1]


def check(path: Path, world: World) -> dict:
    """The record of a checkpoint all of whose files are whole; the ranks divide the checksums.

    Raises SystemExit on all ranks, naming the file that is missing or damaged.
    """
    with agreed(world, f"cannot read checkpoint {path}"):
        record = load_record(path)
        for name in sorted(record["files"])[world.rank :: world.size]:
            if crc32(path / name) != record["files"][name]["crc32"]:
                raise SystemExit(f"checkpoint {path}: {name} is damaged (checksum differs)")
    return record


def load_record(path: Path) -> dict:
    """What a checkpoint says of the run, after checking format, manifest and file sizes.

    Raises SystemExit naming the file that is missing or damaged.
    """
    try:
        record = json.loads((path / MANIFEST).read_text())
    except ValueError as error:
        raise SystemExit(f"checkpoint {path}: {MANIFEST} is damaged: {error}") from None
    except OSError:
        inside = complete(path) if path.is_dir() else []
        such = f", such as {inside[-1]}" if inside else ""
        raise SystemExit(
            f"checkpoint {path}: no complete checkpoint: --resume and --init-from take a directory "
            f"step_<number>{such}, --resume auto the newest of --ckpt-dir"
        ) from None
    if not isinstance(record, dict) or any(
        not isinstance(record.get(key), kind) for key, kind in REQUIRED.items()
    ):
        raise SystemExit(f"checkpoint {path}: {MANIFEST} lacks what belongs there")
    if record["format"] != FORMAT:
        raise SystemExit(
            f"checkpoint {path}: format {record['format']}, this version reads {FORMAT}"
        )
    if record.pop("checksum") != digest(record):
        raise SystemExit(f"checkpoint {path}: {MANIFEST} is damaged (checksum differs)")
    for name, wanted in record["files"].items():
        size = (path / name).stat().st_size if (path / name).exists() else None
        if size != wanted["bytes"]:
            found = "missing" if size is None else f"{size:,} bytes, not {wanted['bytes']:,}"
            raise SystemExit(f"checkpoint {path}: {name} is damaged ({found})")
    return record


def write_manifest(folder: Path, record: dict) -> None:
    record = {"format": FORMAT, **record}
    record = json.loads(json.dumps(record))  # as it will be read: the checksum is of that
    text = json.dumps({**record, "checksum": digest(record)}, indent=1)
    with open(folder / MANIFEST, "w") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())


def load_tensors(path: Path, record: dict, tensors: dict[str, torch.Tensor], world: World) -> None:
    """Fill ``tensors`` in place; others in the checkpoint are left.

    Raises SystemExit on all ranks where one is missing or of another shape or dtype.
    """
    with agreed(world, f"cannot load checkpoint {path}"):
        missing = set(tensors)
        for shard in record["files"]:
            with safe_open(path / shard, "pt") as file:
                for name in missing.intersection(file.keys()):
                    _fill(tensors[name], file.get_tensor(name), f"checkpoint {path}: {name}")
                missing -= set(file.keys())
        if missing:
            raise SystemExit(f"checkpoint {path}: has no tensor {min(missing)}")


def _fill(tensor: torch.Tensor, found: torch.Tensor, name: str) -> None:
    if (tensor.shape, tensor.dtype) != (found.shape, found.dtype):
        was, wanted = (f"{tuple(t.shape)} {t.dtype}" for t in (found, tensor))
        raise SystemExit(f"{name} is {was}, the model's is {wanted}")
    tensor.copy_(found)


def digest(record: dict) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def fsync(path: Path) -> None:
    """Make a file, or the entries of a directory, survive a power cut."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
