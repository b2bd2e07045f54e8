"""The arms of the comparison: each gives the manifest's blocks, once an epoch, on any ranks."""

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import combinations, islice
from pathlib import Path

import numpy as np
import pytest
import torch

import blocks_loaders
import build_packed_datasets
import launch
import train
from blocks_loaders import ARMS, IndexedBlocks
from blocks_writers import shard_size
from distributed import World
from elastic import FILTERS
from library_loaders import MOSAIC_SHM, LibraryBlocks
from packed_blocks import read_manifest
from scripts import processes, train_tokenizer
from tests.conftest import PACKED_LENGTH as T
from tests.conftest import ROOT, memmap_rows, wait_for
from tokenizer import ByteTokenizer, brief, load_tokenizer

REAL = [name for name in ARMS if name != "synthetic"]
LIBRARIES = [name for name, arm in ARMS.items() if issubclass(arm, LibraryBlocks)]
NEW = ["webdataset", "litdata"]  # that a test can open as several ranks in one process


def open_arm(name: str, path: Path, *flags: str, rank: int = 0, ranks: int = 1):
    args = launch.flag_parser().parse_args(
        ["--seq-len", str(T), "--blocks-mode", name, "--blocks-path", str(path), *flags]
    )
    size = args.global_batch or args.batch_size * ranks
    where, codec = read_manifest(path)["fingerprint"][FILTERS], ByteTokenizer()
    return ARMS[name](None, args, where, codec, global_batch=size, world=World(rank, ranks))


def rows_of(step) -> list[list[int]]:
    return [row.tolist() for batch in step for row in batch["input_ids"][batch["mask"].all(1)]]


def take(arm, steps: int) -> list[list[int]]:
    rows = [row for step in islice(arm.steps(), steps) for row in rows_of(step)]
    arm.close()
    return rows


def one_epoch(arm, epoch: int) -> Iterator[list[dict]]:
    """The steps of that epoch."""
    for step in arm.steps():
        if arm.epoch != epoch:
            break
        yield step
    arm.close()


@pytest.mark.parametrize("name", REAL)
def test_an_epoch_is_the_manifests_blocks_once_each(packed, name):
    arm = open_arm(name, packed, "--batch-size", "7")
    steps = arm.blocks_per_epoch // 7
    found, expected = take(arm, steps), memmap_rows(packed / "memmap")
    # a tail of less than a step is left out
    assert Counter(map(tuple, found)) <= Counter(map(tuple, expected))
    assert len(found) == 7 * steps > len(expected) - 7
    ordered = take(open_arm(name, packed, "--batch-size", "7", "--no-shuffle"), steps)
    assert ordered == expected[: 7 * steps]
    assert (found == ordered) == (name == "parquet-seq")  # shuffled when it was written


@pytest.mark.parametrize("name", LIBRARIES)
def test_epochs_that_the_steps_divide_follow_one_another_in_other_orders(packed, name):
    expected = memmap_rows(packed / "memmap")
    size = max(n for n in range(1, 40) if len(expected) % n == 0)
    arm = open_arm(name, packed, "--batch-size", str(size))
    epochs, rows = [], []
    for step in islice(arm.steps(), 3 * len(expected) // size):
        rows += rows_of(step)
        epochs.append(arm.epoch)
    arm.close()
    assert epochs == sorted([0, 1, 2] * (len(expected) // size))
    parts = [rows[i : i + len(expected)] for i in range(0, len(rows), len(expected))]
    assert all(sorted(part) == sorted(expected) for part in parts)
    assert parts[0] != parts[1] != parts[2] != parts[0]
    other = open_arm(name, packed, "--batch-size", str(size), "--shuffle-seed", "7")
    assert take(other, len(expected) // size) != parts[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", NEW)
def test_with_workers_an_epoch_is_every_block_once_and_the_order_the_same_again(packed, name):
    expected = memmap_rows(packed / "memmap")
    flags = ("--batch-size", "7", "--num-workers", "2")
    steps = len(expected) // 7
    found = take(open_arm(name, packed, *flags), steps)
    assert len(found) == 7 * steps > len(expected) - 7
    assert Counter(map(tuple, found)) <= Counter(map(tuple, expected))
    arm = open_arm(name, packed, *flags)
    arm.load_state_dict(arm.state_dict() | {"consumed": 7 * (steps - 5)})
    assert take(arm, 5) == found[-35:]


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("name", NEW)
def test_ranks_of_other_libraries_have_the_same_steps(packed, name, shuffle, ranks):
    flags = ("--batch-size", "5", "--global-batch", str(10 * ranks), *["--no-shuffle"][shuffle:])
    expected = memmap_rows(packed / "memmap")
    counts, steps_of = [], []
    for rank in range(ranks):
        arm = open_arm(name, packed, *flags, rank=rank, ranks=ranks)
        steps = [rows_of(step) for step in one_epoch(arm, 0)]
        assert {len(rows) for rows in steps} == {10}
        counts.append(Counter(tuple(row) for rows in steps for row in rows))
        steps_of.append(len(steps))
    assert len(set(steps_of)) == 1 and steps_of[0] <= len(expected) // (10 * ranks)
    both = sum((a & b).total() for a, b in combinations(counts, 2))
    together, lost = sum(counts, Counter()), Counter(map(tuple, expected))
    lost.subtract(together)
    missed = sum(n for n in lost.values() if n > 0)
    repeated = -sum(n for n in lost.values() if n < 0)
    most = shard_size(len(expected)) * ranks  # a shard is of one rank: one more is what it has
    assert both == 0 and missed <= most and repeated <= most
    assert repeated == 0 or name == "webdataset"
    print(f"{name}, {ranks} ranks: {missed} left out, {repeated} repeated of {len(expected)}")


@pytest.mark.parametrize("name", NEW)
def test_a_rank_of_two_goes_on_behind_what_was_consumed(packed, name):
    flags = ("--batch-size", "8")
    whole = open_arm(name, packed, *flags, rank=1, ranks=2)
    rows = [rows_of(step) for step in one_epoch(whole, 0)]
    again = open_arm(name, packed, *flags, rank=1, ranks=2)
    again.load_state_dict(again.state_dict() | {"consumed": 16 * (len(rows) - 3)})
    steps = again.steps()
    assert [rows_of(step) for step in islice(steps, 3)] == rows[-3:]
    second = rows_of(next(steps))
    at_end = open_arm(name, packed, *flags, rank=1, ranks=2)
    at_end.load_state_dict(at_end.state_dict() | {"consumed": 16 * len(rows)})
    assert rows_of(next(at_end.steps())) == second
    assert at_end.epoch == 1


@pytest.mark.parametrize("name", REAL)
def test_a_resumed_arm_goes_on_behind_what_was_consumed(packed, name):
    flags = ("--batch-size", "9")
    whole = take(open_arm(name, packed, *flags), 5)
    arm = open_arm(name, packed, *flags)
    steps = arm.steps()
    first = [row for step in islice(steps, 2) for row in rows_of(step)]
    state = json.loads(json.dumps(arm.state_dict()))
    arm.close()
    again = open_arm(name, packed, *flags)
    again.load_state_dict(state)
    assert first + take(again, 3) == whole
    with pytest.raises(SystemExit, match="--resume: loader was "):
        again.load_state_dict(state | {"loader": "elastic"})
    with pytest.raises(SystemExit, match="--resume: shuffle_seed was 42, is 7 "):
        open_arm(name, packed, *flags, "--shuffle-seed", "7").load_state_dict(state)
    if name in NEW:  # their shares are of ranks, workers and batches
        with pytest.raises(SystemExit, match="--resume: ranks was 1, is 3 "):
            open_arm(name, packed, "--batch-size", "3", ranks=3).load_state_dict(state)
    elif name in LIBRARIES:
        with pytest.raises(SystemExit, match="18 blocks of the epoch .* no multiple of --global-b"):
            open_arm(name, packed, "--batch-size", "4").load_state_dict(state)


@pytest.mark.parametrize("name", [n for n, arm in ARMS.items() if issubclass(arm, IndexedBlocks)])
def test_ranks_divide_the_same_global_batches(packed, name):
    flags = ("--global-batch", "11", "--batch-size", "2")
    whole = [rows_of(s) for s in islice(open_arm(name, packed, *flags).steps(), 4)]
    for ranks in (2, 3, 4):
        arms = [open_arm(name, packed, *flags, rank=r, ranks=ranks) for r in range(ranks)]
        parts = [[rows_of(step) for step in islice(arm.steps(), 4)] for arm in arms]
        for arm in arms:
            arm.close()
        joined = [[row for rows in step for row in rows] for step in zip(*parts, strict=True)]
        assert joined == whole
    again = [rows_of(s) for s in islice(open_arm("parquet-seq", packed, *flags).steps(), 4)]
    ordered = [
        rows_of(s) for s in islice(open_arm(name, packed, *flags, "--no-shuffle").steps(), 4)
    ]
    assert again == ordered


@pytest.mark.parametrize("name", ["lance", "mosaic"])
def test_arms_read_from_an_object_store_what_they_read_from_a_disk(corpus, packed, bucket, name):
    out = f"{bucket}/arms"
    build_packed_datasets.main(
        ["--db", str(corpus), "--seq-len", str(T), "--out", out, "--formats", "lance,mds"]
    )
    flags = ("--batch-size", "9")
    arm = open_arm(name, out, *flags)
    assert take(arm, 250) == take(open_arm(name, packed, *flags), 250)  # into the second epoch
    assert name == "lance" or (arm.cache and not Path(arm.cache).exists())
    ordered = take(open_arm(name, out, *flags, "--no-shuffle"), 5)
    assert ordered == memmap_rows(packed / "memmap")[:45]
    with pytest.raises(SystemExit, match="memmap: reads no object store"):
        open_arm("memmap", out)


@pytest.mark.parametrize("name", LIBRARIES)
def test_steps_that_a_library_cannot_deal_are_refused(packed, name):
    for flags, words in (
        (("--global-batch", "10"), "--global-batch 10 must be a multiple of --batch-size 4 x 2"),
        (("--global-batch", "8000"), "--global-batch 8000 is more than an epoch of"),
    ):
        arm = open_arm(name, packed, "--batch-size", "4", *flags, ranks=2)
        with pytest.raises(SystemExit, match=words) as refused:
            next(arm.steps())
        assert "\n" not in str(refused.value)


def test_more_ranks_than_shards_are_refused(packed):
    with pytest.raises(SystemExit, match="17 shards do not go round 18 ranks"):
        next(open_arm("webdataset", packed, ranks=18).steps())


def test_importing_the_arms_imports_none_of_their_packages():
    code = "import sys, loaders, build_packed_datasets; print(sorted(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert "'blocks_loaders'" in found.stdout
    assert not any(f"'{name}'" in found.stdout for name in ("streaming", "webdataset", "litdata"))


@pytest.mark.slow
def test_arms_in_the_manifests_order_train_alike(corpus, packed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    losses = {}
    for name in ("elastic", *REAL):
        flags = ["--blocks-path", str(packed)] if name in REAL else ["--pack"]
        train.main(
            ["--db", str(corpus), "--seq-len", str(T), "--batch-size", "4", "--steps", "5"]
            + ["--blocks-mode", name, "--dtype", "fp32", "--log-every", "1", "--run-dir", name]
            + flags
            + (["--no-shuffle"] if name in REAL else [])
        )
        rows = [json.loads(line) for line in Path(name, "metrics.jsonl").read_text().splitlines()]
        losses[name] = [r["loss"] for r in rows if "loss" in r]
    assert len(losses["elastic"]) == 5
    assert all(found == losses["elastic"] for found in losses.values()), losses


def test_synthetic_blocks_cost_nothing_and_never_end(packed):
    arm = open_arm("synthetic", packed, "--batch-size", "3")
    first, second = (step[0]["input_ids"] for step in islice(arm.steps(), 2))
    assert first.shape == (3, T) and first is second and first.dtype == torch.int64


def test_synthetic_blocks_are_of_all_ids_whichever_ends_a_text(corpus, packed, tmp_path):
    path = tmp_path / "tokenizer.json"
    train_tokenizer.main(["--db", str(corpus), "--vocab-size", "300", "--out", str(path)])
    codec, manifest = load_tokenizer(f"bpe:{path}"), read_manifest(packed)
    (tmp_path / "manifest.json").write_text(json.dumps(manifest | {"tokenizer": brief(codec)}))
    args = launch.flag_parser().parse_args(["--seq-len", str(T), "--blocks-path", str(tmp_path)])
    where = manifest["fingerprint"][FILTERS]
    arm = ARMS["synthetic"](None, args, where, codec, global_batch=200, world=World())
    ids = np.concatenate([batch["input_ids"] for batch in next(arm.steps())])
    assert codec.eos_id == 0 and set(np.unique(ids)) == set(range(codec.vocab_size))


@pytest.mark.slow
def test_mosaic_lets_the_memory_of_a_run_beside_it_be(packed, tmp_path):
    shutil.copytree(packed / "mds", tmp_path / "mds")
    code = (
        "import sys, time; from streaming import StreamingDataset\n"
        "dataset = StreamingDataset(local=sys.argv[1], batch_size=1)\n"
        "next(iter(dataset)); open('ready', 'w'); time.sleep(99)"
    )
    words = [sys.executable, "-c", code, str(tmp_path / "mds")]
    # its lock files there decide on the names: the first ones, with which the clean-up begins
    environ = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(words, cwd=tmp_path, env=environ) as beside:
        try:
            wait_for((tmp_path / "ready").exists)
            theirs = processes.mapped_by(beside.pid)
            assert any(map(MOSAIC_SHM.match, theirs)), theirs
            take(open_arm("mosaic", packed), 2)
            assert theirs <= processes.shared_memory().keys()
        finally:
            beside.kill()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--blocks-mode", "memmap"), "--blocks-mode memmap needs --blocks-path"),
        (("--loader", "elastic", "--blocks-mode", "lancedb"), "elastic and --blocks-mode lancedb"),
        (("--blocks-mode", "memmap", "--blocks-path", "none"), "no manifest.json to read"),
    ],
)
def test_bad_modes_are_refused_in_one_line(corpus, tmp_path, monkeypatch, flags, words):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=words) as refused:
        train.main(["--db", str(corpus), "--steps", "1", "--pack", *flags])
    assert "\n" not in str(refused.value)


def test_blocks_of_other_documents_are_refused(corpus, packed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = ["--db", str(corpus), "--seq-len", str(T), "--steps", "1", "--blocks-mode", "memmap"]
    with pytest.raises(SystemExit, match="--filter, --min-score, --val-filter was .*, is .*id > 9"):
        train.main([*flags, "--blocks-path", str(packed), "--filter", "id > 9"])


def test_blocks_of_another_length_or_tokenizer_and_missing_formats_are_refused(packed, tmp_path):
    with pytest.raises(SystemExit, match=f"--seq-len was {T}, is 64"):
        open_arm("memmap", packed, "--seq-len", "64")
    manifest = json.loads((packed / "manifest.json").read_text())
    manifest["formats"].pop("lance")
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(SystemExit, match="has no lance: python build_packed_datasets.py"):
        open_arm("lance", tmp_path)


def test_shuffles_differ_by_epoch_and_seed_and_are_permutations():
    orders = [blocks_loaders.shuffled(100, *key) for key in ((1, 0), (1, 1), (2, 0))]
    assert all(np.array_equal(np.sort(order), np.arange(100)) for order in orders)
    assert len({order.tobytes() for order in orders}) == 3
