"""Programs under measurement: launched, looked at and cleaned up after, by what Linux tells."""

import ctypes
import mmap
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

PROC, SHM = Path("/proc"), Path("/dev/shm")
EVERY = 0.5  # seconds between two looks at the processes of a measurement
TORCHRUN = re.compile(r"[EW]\d{4} \S+ \d+ \S*torch/distributed/")  # how its own lines begin
BYTES = ctypes.POINTER(ctypes.c_ubyte)


class Failed(Exception):
    """A program that did not come to its end, with the reason in one line."""


@contextmanager
def folder(parent: Path) -> Iterator[Path]:
    """A directory for one measurement, of which nothing stays."""
    out = Path(tempfile.mkdtemp(dir=parent))
    try:
        yield out
    finally:
        shutil.rmtree(out, ignore_errors=True)


def launch(script: list[str], ranks: int, out: Path, patience: float) -> dict[str, float]:
    """Run a Python script to its end, under torchrun for several ranks, with ``out/log`` for what
    it prints. Returns the peaks of its processes; what they leave in the temporary directory and in
    /dev/shm is removed.

    Raises Failed when it fails or takes more than ``patience`` seconds.
    """
    words = [sys.executable]
    if ranks > 1:
        words += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    there = shared_memory()
    # not in ``out``: the sockets of worker processes must have short paths
    with tempfile.TemporaryDirectory(prefix="ab-") as temporary, open(out / "log", "w") as log:
        process = subprocess.Popen(
            [*words, *script],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | {"TMPDIR": temporary},
            start_new_session=True,  # Ctrl-C reaches us alone, and we end them all
        )
        with Sampler(process.pid, launched=ranks > 1) as sampler:
            try:
                status = process.wait(patience)
            except subprocess.TimeoutExpired:
                raise Failed(f"not done after {patience:.0f} s") from None
            finally:
                kill(process.pid)
                process.wait()
                remove_shared_memory(sampler.mapped - there.keys())
    if status:
        raise Failed(reason(out, status))
    return {**sampler.peaks, "sampler": sampler.cost}


def reason(out: Path, status: int) -> str:
    """Why a launch failed: what the first rank that says so says, else the signal that torchrun
    saw one ended by, else the log's last line before torchrun's own."""
    for path in sorted(out.glob("failed-*")):
        if (text := path.read_text()) not in ("", "1"):
            return text
    lines = (out / "log").read_text(errors="replace").split("\n")
    said = [line.strip() for line in lines if line.strip()]
    end = next((i for i, line in enumerate(said) if TORCHRUN.match(line)), len(said))
    if killed := re.search(r"\(exitcode: -(\d+)\) local_rank: (\d+)", " ".join(said[end:])):
        return f"rank {killed[2]} was ended by signal {killed[1]}"
    said = said[:end] or ["it printed nothing"]
    return f"exit status {status}: {said[-1][:300]}"


def descendants(root: int) -> list[int]:
    """``root`` and the processes that it started, theirs and so on."""
    children: dict[int, list[int]] = {}
    for entry in PROC.glob("[0-9]*"):
        with suppress(OSError):  # it ended
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(entry.name))
    found = [root]
    for pid in found:
        found += children.get(pid, [])
    return found


def kill(root: int) -> None:
    """End ``root`` and its descendants, those in sessions of their own too."""
    for pid in descendants(root):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def bytes_read() -> tuple[int, int]:
    """Bytes that this process and its descendants have read: by read calls, and from storage."""
    called = stored = 0
    for pid in descendants(os.getpid()):
        with suppress(OSError):
            fields = dict(f.split(": ") for f in (PROC / f"{pid}/io").read_text().splitlines())
            called, stored = called + int(fields["rchar"]), stored + int(fields["read_bytes"])
    return called, stored


def shared_memory() -> dict[str, int]:
    """Names and bytes in /dev/shm."""
    found = {}
    for path in SHM.glob("*") if SHM.is_dir() else ():
        with suppress(OSError):
            found[path.name] = path.stat().st_size
    return found


def mapped_by(pid: int | str) -> set[str]:
    """Names in /dev/shm that a process has mapped; OSError when it is gone."""
    lines = (PROC / f"{pid}/maps").read_text().splitlines()
    paths = (Path(line.split(maxsplit=5)[-1]) for line in lines if f" {SHM}/" in line)
    return {path.name for path in paths}


def mapped_shared_memory(apart_from: Collection[int] = ()) -> set[str]:
    """Names in /dev/shm that any living process has mapped, but for some processes."""
    mapped: set[str] = set()
    for entry in PROC.glob("[0-9]*"):
        with suppress(OSError):
            mapped |= mapped_by(entry.name) if int(entry.name) not in apart_from else set()
    return mapped


def remove_shared_memory(names: set[str]) -> None:
    """Remove these from /dev/shm, but what a living process has mapped."""
    for name in names - mapped_shared_memory() if names else ():
        with suppress(OSError):
            (SHM / name).unlink()


class Sampler(threading.Thread):
    """Peaks of ``pids``' and their descendants' memory, threads, descriptors, and of /dev/shm.

    Looks every half second while it is entered as a context; ``cost`` is the CPU time that took, as
    a share of one core.
    """

    def __init__(self, root: int, launched: bool) -> None:
        super().__init__(daemon=True)
        self.root, self.skip, self.ended = root, int(launched), threading.Event()
        self.before, self.cost = sum(shared_memory().values()), 0.0
        self.mapped: set[str] = set()  # what they had in /dev/shm
        self.peaks = dict.fromkeys(("pss_bytes", "threads", "descriptors", "shm_bytes"), 0)

    def __enter__(self) -> "Sampler":
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.ended.set()
        self.join()

    def run(self) -> None:
        began, cpu = time.monotonic(), time.thread_time()
        while not self.ended.wait(EVERY):
            for name, value in self.look().items():
                self.peaks[name] = max(self.peaks[name], value)
        self.cost = (time.thread_time() - cpu) / (time.monotonic() - began)

    def look(self) -> dict[str, int]:
        now = dict.fromkeys(self.peaks, 0)
        for pid in descendants(self.root)[self.skip :]:  # torchrun itself is not the loader
            with suppress(OSError):
                rollup = (PROC / f"{pid}/smaps_rollup").read_text()
                now["pss_bytes"] += 1024 * int(rollup.partition("\nPss:")[2].split()[0])
                now["threads"] += len(os.listdir(PROC / f"{pid}/task"))
                now["descriptors"] += len(os.listdir(PROC / f"{pid}/fd"))
                self.mapped |= mapped_by(pid)
        now["shm_bytes"] = max(0, sum(shared_memory().values()) - self.before)
        return now


def drop_page_cache(files: Iterable[Path]) -> float:
    """Ask the kernel to forget the pages of ``files``, which everybody may. Returns the share of
    them that stayed."""
    pages = stayed = 0
    for path in filter(lambda path: path.stat().st_size, files):
        with open(path, "rb") as file:
            os.fsync(file.fileno())  # pages that are not written yet stay
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        here = in_page_cache(path)
        pages, stayed = pages + len(here), stayed + int(here.sum())
    return stayed / max(1, pages)


def in_page_cache(path: Path) -> np.ndarray:
    """Which pages of a file are in the page cache, as mincore(2) says: bool (pages,)."""
    data = np.memmap(path, np.uint8, "r")
    state = np.zeros(-(-len(data) // mmap.PAGESIZE), np.uint8)
    address, length = ctypes.c_void_p(data.ctypes.data), ctypes.c_size_t(len(data))
    if ctypes.CDLL(None, use_errno=True).mincore(address, length, state.ctypes.data_as(BYTES)):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(path))
    return state & 1 == 1
