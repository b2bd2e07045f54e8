"""The arms of the comparison: each gives the manifest's blocks, once an epoch, on any ranks."""

import json
from collections import Counter
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

import blocks_loaders
import launch
import train
from blocks_loaders import ARMS, IndexedBlocks
from distributed import World
from tests.conftest import PACKED_LENGTH as T
from tests.conftest import memmap_rows
from tokenizer import ByteTokenizer

REAL = [name for name in ARMS if name != "synthetic"]


def open_arm(name: str, path: Path, *flags: str, rank: int = 0, ranks: int = 1):
    args = launch.flag_parser().parse_args(
        ["--seq-len", str(T), "--blocks-mode", name, "--blocks-path", str(path), *flags]
    )
    size = args.global_batch or args.batch_size * ranks
    return ARMS[name](None, args, "", ByteTokenizer(), global_batch=size, world=World(rank, ranks))


def rows_of(step) -> list[list[int]]:
    return [row.tolist() for batch in step for row in batch["input_ids"][batch["mask"].all(1)]]


def take(arm, steps: int) -> list[list[int]]:
    rows = [row for step in islice(arm.steps(), steps) for row in rows_of(step)]
    arm.close()
    return rows


@pytest.mark.parametrize("name", REAL)
def test_an_epoch_is_the_manifests_blocks_once_each(packed, name):
    arm = open_arm(name, packed, "--batch-size", "7")
    steps = arm.blocks_per_epoch // 7
    found, expected = take(arm, steps), memmap_rows(packed / "memmap")
    # mosaic and the next step leave a tail of less than a step
    assert Counter(map(tuple, found)) <= Counter(map(tuple, expected))
    assert len(found) == 7 * steps > len(expected) - 7
    ordered = take(open_arm(name, packed, "--batch-size", "7", "--no-shuffle"), steps)
    assert ordered == expected[: 7 * steps]
    assert (found == ordered) == (name == "parquet-seq")  # shuffled when it was written


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
