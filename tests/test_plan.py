"""The plan cache: built once, whole or absent, rebuilt when damaged, bounded."""

import multiprocessing
import os
import signal
from pathlib import Path

import numpy as np
import pytest

from plan import Cache, Order, writer
from tests.conftest import small_disk


def build(folder: Path, rows: int = 1000) -> dict:
    """An entry of two columns; leaves a mark of each build beside the cache."""
    with writer(folder, id=np.int64, n=np.int32) as write:
        write(id=np.arange(rows), n=np.arange(rows) % 7)
    with open(folder.parent.parent / "builds", "a") as log:
        log.write("x")
    return {"rows": rows}


def builds(tmp_path) -> int:
    return len((tmp_path / "builds").read_text())


def get_in_another_process(root: Path) -> None:
    entry = Cache(root, 1 << 30).get("k", build)
    assert entry["id"][-1] == 999


def build_and_die(root: Path) -> None:
    def die(folder: Path) -> dict:
        build(folder)
        os.kill(os.getpid(), signal.SIGKILL)

    Cache(root, 1 << 30).get("k", die)


def test_entry_is_built_once_and_mapped_read_only(tmp_path):
    cache = Cache(tmp_path / "c", 1 << 30)
    first, second = cache.get("k", build), cache.get("k", build)
    assert builds(tmp_path) == 1 and second.meta == {"rows": 1000}
    assert np.array_equal(first["n"], np.arange(1000) % 7) and first["n"].dtype == np.int32
    with pytest.raises(ValueError, match="read-only"):
        first["n"][0] = 1


@pytest.mark.parametrize("damage", ["truncated", "flipped", "missing", "meta"])
def test_damaged_entry_is_rebuilt(tmp_path, damage):
    cache = Cache(tmp_path / "c", 1 << 30)
    cache.get("k", build)
    file = tmp_path / "c/k" / ("meta.json" if damage == "meta" else "id.int64")
    whole = file.read_bytes()
    if damage == "missing":
        file.unlink()
    else:
        cut = whole[:-8] if damage != "flipped" else whole[:100] + b"\xff" + whole[101:]
        file.write_bytes(cut)
    assert np.array_equal(cache.get("k", build)["id"], np.arange(1000))
    assert builds(tmp_path) == 2


def test_builder_that_fails_leaves_nothing_and_the_next_one_builds(tmp_path):
    cache = Cache(tmp_path / "c", 1 << 30)

    def broken(folder: Path) -> dict:
        (folder / "id.int64").write_bytes(b"half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        cache.get("k", broken)
    assert not (tmp_path / "c/k").exists()
    assert cache.get("k", build)["id"][5] == 5
    assert os.listdir(tmp_path / "c") == ["k"]


def test_builder_that_is_killed_leaves_neither_entry_nor_lock(tmp_path):
    job = multiprocessing.get_context("spawn").Process(target=build_and_die, args=(tmp_path / "c",))
    job.start()
    job.join(60)
    assert job.exitcode == -signal.SIGKILL and os.listdir(tmp_path / "c") == ["partial"]
    assert Cache(tmp_path / "c", 1 << 30).get("k", build)["id"][5] == 5
    assert os.listdir(tmp_path / "c") == ["k"]


def test_full_disk_names_the_cache_and_leaves_nothing(tmp_path):
    with small_disk(tmp_path / "small", "64k") as disk:
        with pytest.raises(SystemExit, match="--plan-cache .*No space left") as refusal:
            Cache(disk / "c", 1 << 30).get("k", lambda folder: build(folder, 100_000))
        assert "\n" not in str(refusal.value) and os.listdir(disk / "c") == []
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(SystemExit, match="--plan-cache .*file"):
        Cache(tmp_path / "file/c", 1 << 30)


def test_two_jobs_on_one_host_build_once(tmp_path):
    context = multiprocessing.get_context("spawn")
    jobs = [
        context.Process(target=get_in_another_process, args=(tmp_path / "c",)) for _ in range(3)
    ]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join(60)
        assert job.exitcode == 0
    assert builds(tmp_path) == 1


def test_least_recently_used_entries_go_first(tmp_path):
    cache = Cache(tmp_path / "c", 40_000)  # three entries of 12 kB
    kept = cache.get("a", build)
    for i, key in enumerate("abcad"):
        cache.get(key, build)
        os.utime(tmp_path / "c" / key, (i, i))
    assert sorted(p.name for p in (tmp_path / "c").iterdir()) == ["a", "c", "d"]
    assert kept["id"][999] == 999  # mapped before, and still there for whoever mapped it


def test_epochs_are_different_permutations():
    order, ids = Order(True, 42, 1), np.arange(1000) * 3
    epochs = [order.permutation(ids, epoch) for epoch in range(4)]
    assert all(np.array_equal(np.sort(p), np.arange(1000)) for p in epochs)
    for i in range(4):
        for j in range(i):
            assert np.mean(epochs[i] == epochs[j]) < 0.02


@pytest.mark.parametrize("order", [Order(True, 1, 1), Order(False, 1, 1)])
def test_id_that_occurs_twice_is_refused(order):
    with pytest.raises(SystemExit, match="id 5 occurs more than once"):
        order.permutation(np.array([3, 5, 4, 5]), 0)
