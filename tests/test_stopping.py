"""Stopping early: signals and time limits, on one process and under torchrun."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from stopping import SAME_SIGNAL
from tests.conftest import ROOT, launcher, processes_of, run, started, torchrun, wait_for

SMALL = ("--pack", "--seq-len", "64", "--batch-size", "4", "--eval-batches", "2", "--dtype", "fp32")


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def flags(corpus, *more):
    return ("--db", str(corpus), *SMALL, "--log-every", "1", "--run-dir", "r", *more)


def records(run_dir="r"):
    lines = Path(run_dir, "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines if line.endswith("}")]


def steps_done():
    return Path("r/metrics.jsonl").exists() and max((r["step"] for r in records()), default=0)


def state():
    return json.loads(Path("r/state.json").read_text())


def stopped_as_it_should():
    """The run is stopped after a step, of which there is a whole checkpoint."""
    assert state()["state"] == "stopped"
    step = state()["step"]
    assert step == steps_done() and Path(f"c/step_{step:08d}/checkpoint.json").exists()
    assert "stopped at step" in Path("r/train.log").read_text()
    return step


def weights(path):
    tensors = {}
    for shard in Path(path).glob("*.safetensors"):
        tensors |= load_file(shard)
    return tensors


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda s: s.name)
def test_signal_saves_and_leaves_and_the_run_goes_on_bit_for_bit(corpus, tmp_path, number):
    whole = ("--db", str(corpus), *SMALL, "--log-every", "1", "--run-dir", "w", "--steps", "60")
    assert run("train.py", *whole, "--ckpt-dir", "whole", cwd=tmp_path).returncode == 0
    words = flags(corpus, "--steps", "60", "--ckpt-dir", "c", "--resume", "auto")
    with started(sys.executable, str(ROOT / "train.py"), *words, cwd=tmp_path) as process:
        wait_for(lambda: steps_done() >= 5)
        process.send_signal(number)
        process.send_signal(number)  # a launcher's and a scheduler's: one wish
        assert process.wait(30) == 0
    step = stopped_as_it_should()
    assert step < 60 and f"({number.name})" in Path("r/train.log").read_text()
    done = run("train.py", *words, cwd=tmp_path)
    assert done.returncode == 0 and (state()["state"], state()["step"]) == ("finished", 60)
    assert "Traceback" not in Path("output").read_text() + done.stderr
    a, b = ({r["step"]: r["loss"] for r in records(d) if "loss" in r} for d in ("w", "r"))
    assert a == b
    a, b = weights("whole/step_00000060"), weights("c/step_00000060")
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.slow
@pytest.mark.parametrize("whom", ["rank", "launcher"])
@pytest.mark.parametrize("during", ["training", "evaluation", "save"])
def test_signal_to_one_rank_or_to_torchrun_stops_all_after_the_same_step(
    corpus, tmp_path, whom, during
):
    often = {"training": (), "evaluation": ("--eval-every", "1"), "save": ("--ckpt-every", "1")}
    words = flags(corpus, "--steps", "100000", "--ckpt-dir", "c", *often[during])
    with started(*launcher(2), str(ROOT / "train.py"), *words, cwd=tmp_path) as launch:
        wait_for(lambda: steps_done() >= 3)
        ranks = [pid for pid in processes_of(tmp_path) if pid != launch.pid]
        os.kill(ranks[-1] if whom == "rank" else launch.pid, signal.SIGTERM)
        code = launch.wait(60)
        assert (code == 0) == (whom == "rank")  # torchrun reports its own signal
        assert processes_of(tmp_path) == {}
    stopped_as_it_should()


@pytest.mark.slow
def test_time_limit_stops_like_a_signal(corpus, tmp_path):
    words = flags(corpus, "--steps", "100000", "--ckpt-dir", "c", "--time-limit", "0.1")
    began = time.monotonic()
    done = torchrun(2, "train.py", *words, cwd=tmp_path)
    assert done.returncode == 0 and time.monotonic() - began < 120
    stopped_as_it_should()
    assert "(--time-limit)" in Path("r/train.log").read_text()


def test_second_signal_ends_the_process_at_once(tmp_path):
    code = (
        "import sys, time; sys.path.insert(0, sys.argv[1]); import torch\n"
        "from stopping import Stopping\n"
        "stopping = Stopping(0, 0, torch.device('cpu'), lambda: False)\n"
        "print('ready', flush=True)\n"
        "while True: time.sleep(0.01)"
    )
    command = [sys.executable, "-c", code, str(ROOT)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        process.terminate()
        try:
            time.sleep(2 * SAME_SIGNAL)
            assert process.poll() is None
            process.terminate()
            assert process.wait(30) == -signal.SIGTERM
        finally:
            process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_end_when_their_launcher_is_killed(corpus, tmp_path, ranks):
    words = flags(corpus, "--steps", "100000", "--ckpt-dir", f"c{ranks}", "--log-every", "1000")
    with started(*launcher(ranks), str(ROOT / "train.py"), *words, cwd=tmp_path) as launch:
        wait_for(lambda: "first batch" in Path("output").read_text())
        launch.kill()
        wait_for(lambda: not processes_of(tmp_path), 30)


@pytest.mark.slow
def test_group_that_grows_and_loses_a_node_goes_on_by_itself(corpus, tmp_path, monkeypatch):
    """Two launchers, as on two nodes: one joins late, one is lost."""
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")  # see the README
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    elastic = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2"]
    elastic += ["--nproc-per-node", "1", "--max-restarts", "5", "--rdzv-backend", "c10d"]
    elastic += ["--rdzv-endpoint", f"localhost:{port}", "--local-addr", "localhost"]
    elastic += ["--rdzv-conf", "last_call_timeout=1,keep_alive_interval=1"]
    words = [*elastic, str(ROOT / "train.py"), *flags(corpus, "--steps", "100000")]
    words += ["--ckpt-dir", "c", "--resume", "auto", "--ckpt-every", "5", "--keep-last", "2"]
    words += ["--global-batch", "8"]
    (tmp_path / "late").mkdir()

    def log_says(text: str) -> bool:
        return Path("r/train.log").exists() and text in Path("r/train.log").read_text()

    with started(*words, cwd=tmp_path) as first:
        wait_for(lambda: log_says("on 1 ranks x 4") and steps_done() > 5)
        with started(*words, cwd=tmp_path / "late", here=tmp_path):
            wait_for(lambda: log_says("on 2 ranks x 4") and log_says("stopped at step"))
            grown = steps_done()
            wait_for(lambda: steps_done() > grown + 5)
            before = Path("r/train.log").read_text().count("on 1 ranks x 4")
        # the late node and its rank were killed
        wait_for(lambda: Path("r/train.log").read_text().count("on 1 ranks x 4") > before)
        shrunk = steps_done()
        wait_for(lambda: steps_done() > shrunk + 5)
        first.terminate()
        first.wait(60)
    losses = [r["step"] for r in records() if "loss" in r]
    assert losses == list(range(1, len(losses) + 1))
    stopped_as_it_should()


@pytest.mark.slow
def test_failed_save_in_the_background_stops_all_ranks_with_its_cause(corpus, tmp_path):
    words = flags(corpus, "--steps", "100000", "--ckpt-dir", "c", "--ckpt-every", "5")
    with started(*launcher(2), str(ROOT / "train.py"), *words, cwd=tmp_path) as launch:
        wait_for(Path("c/step_00000010").exists)
        Path("c").rename("elsewhere")
        assert launch.wait(60) != 0
    output = Path("output").read_text()
    assert output.count("cannot write checkpoint c/step_") == 1 and "not the one it was" in output
    assert state()["state"] == "failed" and "not the one it was" in state()["error"]
