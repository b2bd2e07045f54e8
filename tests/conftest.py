"""What the tests share: real tables, and ways to run the programs."""

import logging
import multiprocessing.util
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import lancedb
import numpy as np
import pyarrow as pa
import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
# One thread each: the models are tiny, and threads of several processes would wait for one another.
os.environ["OMP_NUM_THREADS"] = "1"
torch.set_num_threads(1)
# Programs that the tests start inherit whether SIGINT is ignored, as it is below a shell's "&".
signal.signal(signal.SIGINT, signal.default_int_handler)


def documents(n: int, seed: int = 0, longest: int = 400) -> list[str]:
    """``n`` documents of 1 to ``longest`` ASCII characters."""
    rng = np.random.default_rng(seed)
    alphabet = np.array(list("abcdefghijklmnopqrstuvwxyz     \n"))
    return ["".join(rng.choice(alphabet, rng.integers(1, longest))) for _ in range(n)]


def make_table(path: Path, texts: list[str], **columns: pa.Array) -> lancedb.table.Table:
    """A corpus table with ids 0, 1, ... and whatever ``columns`` are given."""
    ids = pa.array(range(len(texts)), pa.int64())
    table = pa.table({"id": ids, "text": pa.array(texts, pa.string()), **columns})
    return lancedb.connect(path).create_table("corpus", table)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    """A database whose table ``corpus`` holds 300 tokenized documents."""
    path = tmp_path_factory.mktemp("corpus") / "db"
    from scripts import tokenize_corpus

    make_table(path, documents(300))
    tokenize_corpus.main(["--db", str(path), "--workers", "0"])
    return path


@pytest.fixture(scope="session", autouse=True)
def plan_cache(tmp_path_factory):
    """The tests' own plan cache, also for the programs that they start."""
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session", autouse=True)
def temporary(tmp_path_factory) -> Iterator[None]:
    """The tests' own temporary directory: MosaicML leaves lock files there. Its path is short, as
    those of sockets must be."""
    tmp_path_factory.getbasetemp()  # not in there
    multiprocessing.util.get_temp_dir()  # nor this one, which goes when the process does
    with tempfile.TemporaryDirectory(prefix="tests-") as path:
        os.environ["TMPDIR"] = tempfile.tempdir = path
        yield


PACKED_LENGTH = 32  # tokens of a block


@pytest.fixture(scope="session")
def packed(corpus, tmp_path_factory) -> Path:
    """The corpus's blocks in every format."""
    import build_packed_datasets
    from blocks_writers import FORMATS

    out = tmp_path_factory.mktemp("packed") / "blocks"
    flags = ["--seq-len", str(PACKED_LENGTH), "--out", str(out), "--formats", ",".join(FORMATS)]
    build_packed_datasets.main(["--db", str(corpus), *flags])
    return out


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """The address of an S3 of our own, moto's, on a free port of this machine."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    yield "http://{}:{}".format(*server.get_host_and_port())
    server.stop()


@pytest.fixture
def bucket(s3_server, monkeypatch) -> str:
    """A bucket's address, with the variables set that the libraries look for it by."""
    import boto3

    for name in [name for name in os.environ if name.startswith(("AWS_", "S3_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "tests")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "tests")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server)
    boto3.client("s3").create_bucket(Bucket="blocks")
    return "s3://blocks"


def memmap_rows(path: Path) -> list[list[int]]:
    """The packed blocks of the flat file, in their order."""
    return np.fromfile(path / "blocks.bin", np.uint16).reshape(-1, PACKED_LENGTH).tolist()


def run(*command: str, cwd: Path, timeout: float = 500, **environ: str):
    """Run a program of the project with this Python. Returns the CompletedProcess, with text."""
    script = [sys.executable, str(ROOT / command[0]), *command[1:]]
    return finished(script, cwd, timeout, environ)


def launcher(ranks: int) -> list[str]:
    """The words of a torchrun with ``ranks`` processes on this node."""
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*words, f"--nproc-per-node={ranks}"]


def torchrun(ranks: int, *command: str, cwd: Path, timeout: float = 500):
    """Run a program of the project under real torchrun with ``ranks`` processes on this node."""
    words = [*launcher(ranks), str(ROOT / command[0]), *command[1:]]
    return finished(words, cwd, timeout, {})


def finished(words: list[str], cwd: Path, timeout: float, environ: dict[str, str]):
    """The CompletedProcess of a command; one that does not end is killed with all it started."""
    full = {k: v for k, v in os.environ.items() if k != "LANCE_PRETRAIN_DB"} | environ
    full |= {"STARTED_BY_TEST": str(cwd)}
    try:
        return subprocess.run(
            words, cwd=cwd, env=full, capture_output=True, text=True, timeout=timeout
        )
    except BaseException:
        kill_all(cwd)
        raise


@contextmanager
def started(*words: str, cwd: Path, here: Path | None = None) -> Iterator[subprocess.Popen]:
    """A running command, which is killed at the end with all its descendants.

    It works in ``here`` (default: ``cwd``) and its output goes to ``cwd/output``. torchrun's
    workers have sessions of their own, so that processes are told by an environment variable.
    """
    with open(cwd / "output", "w") as output:
        process = subprocess.Popen(
            words,
            cwd=here or cwd,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | {"STARTED_BY_TEST": str(cwd)},
        )
        try:
            yield process
        finally:
            kill_all(cwd)
            process.wait()


def kill_all(cwd: Path) -> None:
    """Kill what runs of the commands that were started there."""
    for pid in processes_of(cwd):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def processes_of(cwd: Path) -> dict[int, list[str]]:
    """Command lines, by process id, of what runs of a command ``started`` there."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it ended
            if f"STARTED_BY_TEST={cwd}\0".encode() in (entry / "environ").read_bytes() + b"\0":
                words = (entry / "cmdline").read_bytes().decode().split("\0")
                found[int(entry.name)] = words[:-1]
    return found


def wait_for(condition: Callable[[], object], seconds: float = 90) -> None:
    """Return when ``condition`` holds; AssertionError when it does not in time."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


@contextmanager
def small_disk(path: Path, size: str) -> Iterator[Path]:
    """A file system of that size at ``path``, or the test is skipped."""
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a tmpfs is not allowed here")
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


def ragged_batch() -> dict[str, torch.Tensor]:
    """Six blocks with 15, 8, 0, 15, 15 and 2 targets."""
    ids = torch.randint(0, 97, (6, 16), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(6, 16, dtype=torch.bool)
    mask[1, 9:], mask[2], mask[5, 3:] = False, False, False
    return {"input_ids": ids, "mask": mask}
