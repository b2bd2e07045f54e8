"""parallel.py: order, bounded look-ahead, errors, early close, and workers that stay small."""

import math
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from textwrap import indent

import numpy as np
import pyarrow as pa
import pytest

from scripts.parallel import WorkerPool, parallel_map

ROOT = Path(__file__).resolve().parents[1]


def batches_of(n: int) -> list[pa.RecordBatch]:
    rng = np.random.default_rng(0)
    return [pa.record_batch({"x": rng.integers(0, 9, rng.integers(1, 50))}) for _ in range(n)]


def doubled(batch: pa.RecordBatch) -> list[int]:
    time.sleep(0.01 * (batch.num_rows % 3))  # finish out of order
    return [2 * x for x in batch["x"].to_pylist()]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition, seconds: float = 30.0) -> bool:
    """Not conftest's: workers import this module, and must not import torch with it."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def worker_pid(_) -> int:
    return os.getpid()


def killed(_) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def slow(x: int) -> int:
    time.sleep(1)
    return x


def set_mark(value: str) -> None:
    os.environ["PARALLEL_TEST_MARK"] = value


def read_mark(_) -> str:
    return os.environ.get("PARALLEL_TEST_MARK", "")


def modules_loaded(_) -> list[str]:
    return [name for name in ("torch", "lancedb") if name in sys.modules]


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_results_come_in_input_order(workers):
    batches = batches_of(25)
    expected = [[2 * x for x in batch["x"].to_pylist()] for batch in batches]
    assert list(parallel_map(doubled, batches, workers)) == expected


def test_sliced_batches_arrive_as_their_slice():
    whole = pa.record_batch({"x": list(range(1000))})
    slices = [whole.slice(i, 7) for i in range(0, 1000, 100)]
    assert list(parallel_map(doubled, slices, 1)) == [
        [2 * x for x in range(i, i + 7)] for i in range(0, 1000, 100)
    ]


def test_input_is_drawn_lazily_and_bounded():
    drawn = []
    source = (drawn.append(i) or i for i in range(1000))
    results = parallel_map(worker_pid, source, 2)
    assert drawn == []
    for taken in range(1, 30):
        next(results)
        assert len(drawn) <= taken + 2 * 2
    results.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_exception_of_the_function_is_raised(workers):
    results = parallel_map(math.sqrt, iter([4, 9, -1, 16]), workers)
    with pytest.raises(ValueError, match=r"math domain error|nonnegative"):
        list(results)


def test_exception_of_the_input_is_raised():
    def failing():
        yield 4
        raise OSError("disk gone")

    with pytest.raises(OSError, match="disk gone"):
        list(parallel_map(math.sqrt, failing(), 2))


def test_workers_end_when_the_consumer_stops_early():
    results = parallel_map(worker_pid, iter(range(10_000)), 2)
    pids = {next(results) for _ in range(20)}
    assert os.getpid() not in pids
    results.close()
    assert wait_until(lambda: not any(alive(pid) for pid in pids))


@pytest.mark.parametrize("workers", [0, 2])
def test_initializer_runs_in_every_worker(workers, monkeypatch):
    monkeypatch.delenv("PARALLEL_TEST_MARK", raising=False)
    assert set(parallel_map(read_mark, range(8), workers, set_mark, ("seen",))) == {"seen"}


def test_a_worker_that_is_killed_ends_it_in_one_line():
    with pytest.raises(SystemExit, match="killed, maybe for want of memory: give fewer than .* 2;"):
        list(parallel_map(killed, range(8), 2))


def test_pool_serves_several_maps_with_the_same_workers():
    with WorkerPool(1) as pool:
        first, second = (set(pool.map(worker_pid, range(4))) for _ in range(2))
    assert first == second and len(first) == 1


def test_partial_functions_work():
    assert list(parallel_map(partial(pow, 2), range(6), 1)) == [1, 2, 4, 8, 16, 32]


def test_negative_workers_are_refused():
    with pytest.raises(ValueError, match=r"0 \(this process\) or more"):
        list(parallel_map(math.sqrt, [1], -1))


HEAVY_SCRIPT = """
import sys, time
sys.path[:0] = [{root!r}, {tests!r}]
import lancedb
from scripts.parallel import parallel_map
from test_parallel import modules_loaded, slow, worker_pid

def local(x):
    return x + 1

if __name__ == "__main__":
{body}
"""


def start_script(tmp_path: Path, body: str) -> subprocess.Popen:
    path = tmp_path / "script.py"
    tests = str(Path(__file__).parent)
    path.write_text(HEAVY_SCRIPT.format(root=str(ROOT), tests=tests, body=indent(body, "    ")))
    return subprocess.Popen([sys.executable, path], stdout=subprocess.PIPE, text=True)


def test_workers_do_not_import_the_running_script(tmp_path):
    process = start_script(tmp_path, "print(list(parallel_map(modules_loaded, [1], 1)))")
    assert process.communicate(timeout=60)[0].strip() == "[[]]"


def test_a_function_of_the_running_script_works(tmp_path):
    process = start_script(tmp_path, "print(list(parallel_map(local, [1, 2], 1)))")
    assert process.communicate(timeout=60)[0].strip() == "[2, 3]"


def test_workers_end_when_the_parent_is_killed(tmp_path):
    body = """
results = parallel_map(worker_pid, iter(int, 1), 1)
print(next(results), flush=True)
time.sleep(60)
"""
    process = start_script(tmp_path, body)
    pid = int(process.stdout.readline())
    assert alive(pid)
    process.kill()
    process.communicate()
    assert wait_until(lambda: not alive(pid))


def test_a_second_ctrl_c_ends_it_all(tmp_path):
    process = start_script(
        tmp_path, "for x in parallel_map(slow, range(99), 1): print(x, flush=True)"
    )
    try:
        process.stdout.readline()
        for _ in range(2):
            process.send_signal(signal.SIGINT)
            time.sleep(0.2)
        assert process.wait(30) != 0
    finally:
        process.kill()
        process.stdout.close()
