"""What the tests share: real tables, and ways to run the programs."""

import os
import subprocess
import sys
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


def run(*command: str, cwd: Path, timeout: float = 240, **environ: str):
    """Run a program of the project with this Python. Returns the CompletedProcess, with text."""
    full = {k: v for k, v in os.environ.items() if k != "LANCE_PRETRAIN_DB"} | environ
    script = [sys.executable, str(ROOT / command[0]), *command[1:]]
    return subprocess.run(
        script, cwd=cwd, env=full, capture_output=True, text=True, timeout=timeout
    )


def torchrun(ranks: int, *command: str, cwd: Path, timeout: float = 240, **environ: str):
    """Run a program of the project under real torchrun with ``ranks`` processes on this node."""
    full = {k: v for k, v in os.environ.items() if k != "LANCE_PRETRAIN_DB"} | environ
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    script = [f"--nproc-per-node={ranks}", str(ROOT / command[0]), *command[1:]]
    return subprocess.run(
        [*launcher, *script], cwd=cwd, env=full, capture_output=True, text=True, timeout=timeout
    )
