"""The ranks of a run: who they are, how they meet, and how they fail together."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from distributed import World, world_from_environ
from tests.conftest import launcher

ROOT = Path(__file__).resolve().parents[1]


def test_world_is_one_rank_without_torchrun():
    assert world_from_environ({}) == World(0, 1, 0, 1)
    assert world_from_environ({}).is_main


def test_world_is_read_from_torchruns_variables():
    ranks = {"RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1"}
    world = world_from_environ(ranks | {"LOCAL_WORLD_SIZE": "8"})
    assert world == World(9, 16, 1, 8) and not world.is_main
    assert world_from_environ(ranks).local_size == 16


@pytest.mark.parametrize(
    "ranks",
    [
        {"RANK": "0"},
        {"RANK": "0", "WORLD_SIZE": "2"},
        {"RANK": "2", "WORLD_SIZE": "2", "LOCAL_RANK": "0"},
        {"RANK": "-1", "WORLD_SIZE": "2", "LOCAL_RANK": "0"},
        {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "1"},
        {"RANK": "0", "WORLD_SIZE": "two", "LOCAL_RANK": "0"},
    ],
)
def test_clashing_ranks_are_refused_in_one_line(ranks):
    with pytest.raises(SystemExit, match="RANK=.*torchrun") as refusal:
        world_from_environ(ranks)
    assert "\n" not in str(refusal.value)


def run_init(code_after="", **ranks):
    code = (
        "import torch, distributed\n"
        "world = distributed.world_from_environ()\n"
        "world = distributed.join(world, torch.device('cpu'), 30.0)\n"
        f"{code_after}\ndistributed.leave()\n"
        "print(world, torch.distributed.is_initialized())"
    )
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    environ = {k: v for k, v in os.environ.items() if k not in names}
    command = [sys.executable, "-c", code]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=environ | ranks,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def test_port_in_use_is_refused_in_one_line_within_seconds():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        start = time.monotonic()
        ranks = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
        process = run_init(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, **ranks)
        _, errors = process.communicate(timeout=120)
    assert process.returncode == 1 and "Traceback" not in errors
    line = errors.strip().splitlines()[-1]
    for part in (
        "MASTER_ADDR=127.0.0.1",
        f"MASTER_PORT={port}",
        "--master-port",
        "--rdzv-endpoint",
    ):
        assert part in line
    assert time.monotonic() - start < 60


def test_plain_python_joins_no_process_group():
    process = run_init("assert not torch.distributed.is_initialized()")
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert output.strip() == f"{World()} False"


def test_two_ranks_meet_and_reduce():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    reduce = (
        "x = torch.tensor([world.rank + 1.0])\n"
        "torch.distributed.all_reduce(x)\nassert x.item() == 3.0"
    )
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    processes = [run_init(reduce, RANK=r, LOCAL_RANK=r, **shared) for r in ("0", "1")]
    for rank, process in enumerate(processes):
        output, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
        assert output.strip() == f"{World(rank, 2, rank, 2)} False"


@pytest.mark.slow
def test_a_rank_that_fails_says_why_and_does_not_wait_for_the_others(tmp_path):
    (tmp_path / "fails.py").write_text(
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import torch, distributed\n"
        "world = distributed.world_from_environ()\n"
        "with distributed.joined(world, torch.device('cpu'), 60.0):\n"
        "    if world.rank == 1:\n"
        "        raise {'line': SystemExit('mend this'), 'bug': KeyError('bug')}[sys.argv[2]]\n"
        "    torch.distributed.all_reduce(torch.ones(1))\n"
    )
    for how, said in (("line", "mend this"), ("bug", "KeyError: 'bug'")):
        command = [*launcher(2), "fails.py", str(ROOT), how]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
        assert done.returncode == 1 and said in done.stderr.splitlines(), done.stderr
