"""Checkpoints: complete directories ``step_00000100`` or nothing.

A checkpoint holds ``shard-*.safetensors``, tensors by plain name with whole tensors spread over the
ranks, and ``checkpoint.json``: everything else, with size and SHA-256 of each shard. It is written
under a temporary name, fsynced and renamed; rename is the only atomicity relied upon. Nothing that
is read back is unpickled.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from distributed import World, agreed
from flags import not_negative

FORMAT = 1
MANIFEST = "checkpoint.json"
REQUIRED = {"format", "step", "files", "run_id"}
DEFAULT_ROOT = Path("checkpoints")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("checkpoints")
    group.add_argument(
        "--ckpt-every", type=not_negative, default=100, help="steps; 0: only the last"
    )
    group.add_argument("--ckpt-dir", help=f"default: ./{DEFAULT_ROOT}/<run id>")
    group.add_argument("--resume", default="", help="checkpoint directory, or auto: the newest")
    group.add_argument(
        "--resume-data",
        choices=["same", "new"],
        default="same",
        help="new: keep weights, optimizer and step; read today's table from its start",
    )


def save(
    root: Path, step: int, tensors: dict[str, torch.Tensor], record: dict, world: World
) -> Path:
    """Write ``root/step_<step>``; every rank calls it with equal tensors and record.

    ``record`` is what JSON holds of the run. Returns the directory. Raises SystemExit on all ranks
    when one cannot write; a checkpoint of that name is then absent.
    """
    final = root / f"step_{step:08d}"
    partial = root / f".partial_{final.name}"
    with agreed(world, f"cannot write checkpoint {final}"):
        if world.is_main:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
    with agreed(world, f"cannot write checkpoint {final}"), quiet():
        writer = dcp.HuggingFaceStorageWriter(str(partial), save_distributed=True)
        try:
            dcp.save(tensors, storage_writer=writer)
        except dcp.api.CheckpointException as error:  # one from each rank that failed, on all
            shutil.rmtree(partial, ignore_errors=True)
            raise OSError(next(iter(error.failures.values()))[0]) from error
    with agreed(world, f"cannot write checkpoint {final}"):
        if world.is_main:
            shards = sorted(partial.glob("*.safetensors"))
            files = {p.name: {"bytes": p.stat().st_size, "sha256": sha256(p)} for p in shards}
            manifest = {"format": FORMAT, "step": step, **record, "files": files}
            (partial / MANIFEST).write_text(json.dumps(manifest, indent=1))
            for path in [*shards, partial / MANIFEST, partial]:
                fsync(path)
            if final.exists():  # the run came back to a step after losing later ones
                shutil.rmtree(final)
            partial.rename(final)
            fsync(root)
    return final


def load_record(path: Path) -> dict:
    """The record of a checkpoint, after checking format and file sizes.

    Raises SystemExit naming the file that is missing or damaged.
    """
    manifest = path / MANIFEST
    try:
        record = json.loads(manifest.read_text())
    except (OSError, ValueError) as error:
        raise SystemExit(f"checkpoint {path}: no complete checkpoint: {error}") from None
    if not isinstance(record, dict) or not record.keys() >= REQUIRED:
        raise SystemExit(f"checkpoint {path}: {MANIFEST} lacks what belongs there")
    if record["format"] != FORMAT:
        raise SystemExit(
            f"checkpoint {path}: format {record['format']}, this version reads {FORMAT}"
        )
    for name, wanted in record["files"].items():
        size = (path / name).stat().st_size if (path / name).exists() else None
        if size != wanted["bytes"]:
            raise SystemExit(
                f"checkpoint {path}: {name} is damaged ({size} bytes, not {wanted['bytes']})"
            )
    return record


def load_tensors(path: Path, record: dict, tensors: dict[str, torch.Tensor], world: World) -> None:
    """Fill ``tensors`` in place. Raises SystemExit where names, shapes or checksums disagree."""
    with agreed(world, f"cannot load checkpoint {path}"):
        shards = sorted(record["files"])
        for name in shards[world.rank :: world.size]:  # each rank verifies its share
            if sha256(path / name) != record["files"][name]["sha256"]:
                raise SystemExit(f"checkpoint {path}: {name} is damaged (checksum differs)")
    with agreed(world, f"cannot load checkpoint {path}"), quiet():
        dcp.load(tensors, storage_reader=dcp.HuggingFaceStorageReader(str(path)))


@contextmanager
def quiet() -> Iterator[None]:
    """Without the warning that one process is one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def complete(root: Path) -> list[Path]:
    """Complete checkpoints below ``root``, oldest first."""
    found = [p for p in root.glob("step_*") if re.fullmatch(r"step_\d{8,}", p.name)]
    return sorted((p for p in found if (p / MANIFEST).is_file()), key=lambda p: int(p.name[5:]))


def find(resume: str, ckpt_dir: str | None) -> Path | None:
    """The checkpoint that ``--resume`` means, None to start afresh.

    ``auto`` is the newest one in ``--ckpt-dir`` or, where that is not given, of the newest run
    below ``checkpoints/``. Raises SystemExit for a fresh start where checkpoints are already.
    """
    if resume and resume != "auto":
        return Path(resume)
    if ckpt_dir is not None:
        found = complete(Path(ckpt_dir))
        if found and not resume:
            raise SystemExit(
                f"--ckpt-dir {ckpt_dir} holds {found[-1].name} of an earlier run: "
                "continue it with --resume auto, or name another directory"
            )
        return found[-1] if found else None
    if not resume:
        return None
    runs = [complete(root) for root in DEFAULT_ROOT.glob("*") if root.is_dir()]
    last = [run[-1] for run in runs if run]
    return max(last, key=lambda p: (p / MANIFEST).stat().st_mtime, default=None)


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fsync(path: Path) -> None:
    """Make a file, or the entries of a directory, survive a power cut."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
