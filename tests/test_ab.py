"""The comparison: real processes, loaders with known faults, reports, interruptions."""

import argparse
import json
import signal
import sys
from collections import Counter
from itertools import count
from pathlib import Path

import numpy as np
import pytest

from distributed import World
from scripts import ab
from scripts.ab_cell import take
from scripts.ab_figures import (
    RATE,
    combined,
    displacement,
    figures,
    in_words,
    surplus,
    trained,
    verdict,
)
from scripts.ab_report import Report, percent, spread
from tests.conftest import ROOT, processes_of, run, small_disk, started, wait_for
from tests.odd_arms import LEFT_BEHIND, PAUSE

BATCH, T = 4, 32
PNG = b"\x89PNG\r\n"
FILES = {"blocks", "results.json", "report.md"}
FILES |= {f"{name}.png" for name in ("throughput", "wait", "start", "timeline")}


def compare(corpus: Path, out: Path, *flags: str, **environ: str):
    data = ("--db", str(corpus), "--seq-len", str(T), "--batch-size", str(BATCH))
    words = ("scripts/ab.py", "--out", str(out), "--repeats", "1", "--seconds", "0.2")
    return run(*words, *data, *flags, cwd=out.parent, **environ)


@pytest.fixture(scope="module")
def odd(corpus, tmp_path_factory) -> Path:
    """A comparison of loaders with a fault each."""
    out = tmp_path_factory.mktemp("odd") / "ab"
    site = tmp_path_factory.mktemp("site")
    (site / "sitecustomize.py").write_text("import tests.odd_arms\ntests.odd_arms.register()\n")
    arms = "memmap,memmap,slow,twice,forgetful,foreign,crashing,webdataset"
    done = compare(corpus, out, "--arms", arms, PYTHONPATH=f"{site}:{ROOT}")
    left = LEFT_BEHIND.exists()
    LEFT_BEHIND.unlink(missing_ok=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not left
    return out


@pytest.fixture(scope="module")
def results(odd) -> dict:
    return json.loads((odd / "results.json").read_text())


@pytest.mark.slow
def test_what_a_loader_does_wrong_is_in_the_report(odd, results):
    rows = (odd / "report.md").read_text().partition("## What it delivers")[2].splitlines()
    rows = {line.split("`")[1]: line for line in rows if line.startswith("| `")}
    blocks = f"{results['manifest']['blocks']:,}"
    for name in ("memmap", "memmap (2)", "slow"):
        assert "each block once" in rows[name]
        assert results["arms"][name]["checks"]["1"]["displacement"] > 0.8
    assert f"1 repeated, 1 dropped of {blocks}" in rows["twice"]
    resumes = {
        n: arm["checks"]["1"]["resumes"] for n, arm in results["arms"].items() if arm["checks"]
    }
    assert resumes == dict.fromkeys(resumes, True) | {"forgetful": False}


@pytest.mark.slow
def test_a_slow_loader_shows_as_slow(results):
    rates = {n: f for n, f in results["figures"].items() if n.endswith("loader_tokens_per_second")}
    assert {f["unit"] for f in rates.values()} == {"tok/s"}
    assert rates["slow.warm.1.loader_tokens_per_second"]["value"] <= BATCH * T / PAUSE
    waits = results["figures"]["slow.warm.1.sleep_wait_ms_p50"]
    assert waits["value"] >= 1e3 * PAUSE and waits["unit"] == "ms"


@pytest.mark.slow
def test_failed_loaders_are_named_with_their_reason_and_leave_nothing(odd, results):
    arms, report = results["arms"], (odd / "report.md").read_text()
    missing = arms["webdataset"]["failed"]["blocks"]
    assert missing.startswith("--formats webdataset needs the package: pip install webdataset")
    assert arms["foreign"]["failed"] == {"blocks": "1 of its blocks are not the packing's"}
    assert not any(name.startswith("foreign.") for name in results["figures"])
    assert set(arms["crashing"]["failed"]) == {"check, warm, 1 rank", "speed, warm, 1 rank"}
    assert "exit status -9" in arms["crashing"]["failed"]["speed, warm, 1 rank"]
    assert all(
        why in report
        for name in ("webdataset", "foreign", "crashing")
        for why in arms[name]["failed"].values()
    )
    assert {path.name for path in odd.iterdir()} == FILES


@pytest.mark.slow
def test_a_report_is_drawn_again_from_its_results(odd, tmp_path, capsys):
    tmp_path = tmp_path / "new"
    ab.main(["--from", str(odd / "results.json"), "--out", str(tmp_path)])
    report = (tmp_path / "report.md").read_text()
    assert report == (odd / "report.md").read_text()
    assert "One turn of all loaders" in report  # --repeats 1: no medians, no spread
    for name in ("throughput", "wait", "start", "timeline"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(PNG)
    assert str(tmp_path / "report.md") in capsys.readouterr().out


@pytest.mark.slow
def test_ranks_under_torchrun_and_real_training_are_compared(corpus, tmp_path):
    flags = ("--arms", "elastic,litdata", "--ranks", "1,2", "--cache", "cold")
    done = compare(corpus, tmp_path / "ab", *flags, "--modes", "sleep,train", "--train-steps", "3")
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "ab/results.json").read_text())
    assert not any(arm["failed"] for arm in results["arms"].values()), results["arms"]
    assert results["arms"]["elastic"]["checks"]["2"]["same_as_first"]
    assert not results["arms"]["litdata"]["checks"]["2"]["same_as_first"]
    for label in ("elastic", "litdata"):
        for ranks in (1, 2):
            share = results["figures"][f"{label}.cold.{ranks}.train_wait_share"]["value"]
            assert 0 < share < 1
            assert results["figures"][f"{label}.cold.{ranks}.resume_50_s"]["value"] > 0
    assert all(cell["stayed"] < 0.5 for cell in results["cells"] if "stayed" in cell)
    whole = results["manifest"]["blocks"] // (2 * BATCH)  # an epoch has no more: the next is warm
    steps = [f["repeats"] for n, f in results["figures"].items() if n.endswith("sleep_steps")]
    assert all(0 < n < whole for repeats in steps for n in repeats)


@pytest.mark.slow
def test_an_interrupted_comparison_keeps_what_it_measured(corpus, tmp_path):
    data = ["--db", str(corpus), "--seq-len", str(T), "--batch-size", str(BATCH)]
    words = [sys.executable, str(ROOT / "scripts/ab.py"), "--arms", "memmap", "--seconds", "0.2"]
    left = tmp_path / "runs/ab/scratch-99999999-killed"
    left.mkdir(parents=True)
    with started(*words, *data, "--repeats", "9", cwd=tmp_path) as process:
        wait_for((tmp_path / "runs/ab/results.json").exists)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 1
        assert not processes_of(tmp_path)
    assert "interrupted: what was measured is in the report" in (tmp_path / "output").read_text()
    report = (tmp_path / "runs/ab/report.md").read_text()
    assert "interrupted" in report and "of 9 turns" not in report
    assert {path.name for path in (tmp_path / "runs/ab").iterdir()} == FILES


@pytest.mark.slow
def test_a_full_disk_is_one_line(corpus, tmp_path):
    with small_disk(tmp_path / "small", "100k") as small:
        done = compare(corpus, small / "ab", "--arms", "memmap")
        assert done.returncode == 1
        assert len(done.stderr.splitlines()) == 1 and "No space left" in done.stderr
        assert not list((small / "ab").glob("scratch-*"))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--arms", "memmap,csv"], "'csv': there are elastic, lancedb"),
        (["--pack"], "--pack is set for each loader here"),
        (["--global-batch=8"], "--global-batch is set for each loader here"),
        (["--ranks", "0"], "0: give at least 1"),
        (["--step", "5"], "unrecognized arguments: --step"),
        (["--train-steps", "1"], "1: give at least 2"),
        (["--blocks", "s3://bucket/blocks"], "--blocks s3://bucket/blocks: give a directory"),
        (["--no-such-flag"], "unrecognized arguments: --no-such-flag"),
        (["--from", "none.json"], "--from none.json: "),
        (["--from", str(ROOT / "pyproject.toml")], "pyproject.toml: "),
    ],
)
def test_bad_flags_are_refused_in_one_line(flags, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as refused:
        ab.main(flags)
    said = capsys.readouterr().err or str(refused.value)
    assert words in said and len(said.splitlines()) == 1
    assert refused.value.code != 0 and not list(tmp_path.iterdir())


@pytest.mark.slow
def test_blocks_of_other_data_are_refused_once(corpus, packed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = ["--db", str(corpus), "--seq-len", str(2 * T), "--blocks", str(packed)]
    with pytest.raises(SystemExit, match="holds blocks of other data: give another --blocks or"):
        ab.main([*flags, "--arms", "memmap,parquet-seq"])
    assert not list(Path("runs/ab").iterdir())


# -----------------------------------------------------------------------------
# figures


def test_surplus_is_the_difference_of_multisets():
    rng = np.random.default_rng(0)
    for _ in range(50):
        a, b = (rng.integers(0, 9, rng.integers(0, 20)).astype(np.uint64) for _ in range(2))
        assert surplus(a, b) == (Counter(a.tolist()) - Counter(b.tolist())).total()


def test_displacement_is_none_in_order_and_one_at_random():
    rng = np.random.default_rng(0)
    manifest = rng.integers(0, 5000, 10_000).astype(np.uint64)  # most contents are there twice
    assert displacement(manifest, manifest) == 0
    distinct = rng.permutation(10_000).astype(np.uint64)
    assert displacement(rng.permutation(distinct), distinct) == pytest.approx(1, abs=0.03)
    assert displacement(distinct[::-1], distinct) == pytest.approx(1.5, abs=0.01)


def delivered(steps: list[list[int]], whole: int, ranks: int = 1, **more) -> tuple[dict, list]:
    """The verdict on these steps of blocks of 10 tokens, of which an epoch has 0 to 9."""
    dealt = [np.array_split(np.array(step, np.uint64), ranks) for step in steps]
    shares = [[parts[rank] for parts in dealt] for rank in range(ranks)]
    results = [
        {"whole_steps": whole, "tokens": 10 * sum(map(len, share[:whole])), "resumes": True}
        | {"blocks": [len(s) for s in share]}
        | more
        for share in shares
    ]
    return verdict(results, [np.concatenate(s) for s in shares], np.arange(10, dtype=np.uint64), 10)


def test_verdicts_tell_exact_dropped_repeated_and_foreign_blocks():
    def words(*arguments, **more):
        return in_words(delivered(*arguments, **more)[0], 10, 100)

    exact = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 3, 1]]  # the last begins the next epoch
    assert words(exact, 2) == "each block once"
    assert words([[0, 1, 2, 3], [4, 5, 6, 7], [3, 1, 9, 8]], 2) == "2 dropped of 10"
    assert words([[0, 1, 2, 3], [4, 5, 6, 3], [8, 9, 3, 1]], 2) == "1 repeated, 3 dropped of 10"
    assert words([[0, 1, 2, 3]], 2) == "each block once (in 1 of 2 steps)"
    foreign = words([[0, 1, 20, 3], [4, 5, 6, 7]], 2, tokens=75)
    assert foreign == "packs by itself, 75.00% of the tokens, 5 padding"
    found, steps = delivered(exact, 2, ranks=2)
    assert found["repeated"] == found["dropped"] == found["unknown"] == 0
    assert [step.tolist() for step in steps] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_ranks_are_combined_by_sums_and_by_the_slowest():
    names = ("seconds", "steps", "wait_share", "wait_ms_p50", "wait_ms_p95", "wait_ms_p99")
    names += ("read_bytes", "storage_bytes", "timeline_ms")
    ranks = [dict(zip(names, values, strict=True)) for values in (
        (2.0, 10, 0.25, 1, 5, 6, 100, 0, [1]),
        (1.0, 10, 0.5, 2, 4, 9, 300, 10, [2]),
    )]  # fmt: skip
    assert combined("sleep", ranks, 8.0) == {
        "sleep_tokens_per_second": 8 * (5 + 10),
        "sleep_steps": 10,
        "sleep_wait_share": 0.5,
        "sleep_wait_ms_p50": 2,
        "sleep_wait_ms_p95": 5,
        "sleep_wait_ms_p99": 9,
        "sleep_read_bytes_per_token": 400 / 160,
        "sleep_storage_bytes_per_token": 10 / 160,
        "sleep_timeline_ms": [2],
    }


def test_training_figures_leave_the_first_steps_out():
    rows = [{"step": 1, "first_batch_s": 7.0, "plan_s": 1.0}]
    rows += [
        {"step": s, "tokens": 100 * s, "step_s": 9.0 if s < 3 else 0.5, "data_wait_ms_p50": 125}
        for s in range(1, 7)
    ]
    found = trained(rows, 4)
    assert found["train_tokens_per_second"] == 200 and found["train_wait_share"] == 0.25
    assert found["train_wait_ms_p99"] == 125 and found["train_first_batch_s"] == 7
    assert found["train_timeline_ms"] == [500.0] * 4


def test_figures_are_medians_by_name_with_units():
    cells = [{"label": "a", "cache": "warm", "ranks": 2, "first_batch_s": s} for s in (3, 1, 2)]
    found = figures([*cells, {"label": "a", "cache": "cold", "ranks": 1, "threads": 4}])
    assert found == {
        "a.warm.2.first_batch_s": {"value": 2, "unit": "s", "repeats": [3, 1, 2]},
        "a.cold.1.threads": {"value": 4, "unit": "", "repeats": [4]},
    }


def test_tables_have_medians_spread_and_the_ratio_of_each_turn():
    turns = {"elastic": (300, 200, 900), "memmap": (100, 100, 600)}
    cells = [
        {"label": label, "cache": "warm", "ranks": 2, RATE: rate, "sleep_wait_share": 1 / rate}
        for label, rates in turns.items()
        for rate in rates
    ]
    arms = {label: {"arm": label, "failed": {}, "checks": {}} for label in turns}
    results = {"arms": arms, "settings": {}, "cells": cells, "figures": figures(cells)}
    report = Report(results)
    assert report.table("tok/s", spread, RATE) == [
        "| loader | tok/s, warm, 2 ranks |",
        "|---|---:|",
        "| `elastic` | 300 (200 – 900) |",
        "| `memmap` | 100 (100 – 600) |",
    ]
    assert (
        report.table("waits", percent, "sleep_wait_share")[-1]
        == "| `memmap` | 1.0% (0.2% – 1.0%) |"
    )
    assert list(report.ratios())[-1] == "| `memmap` | 2x |"  # of 3, 2 and 1.5
    assert report.turns().startswith("Medians of 3 turns")


def test_a_pretended_device_takes_its_tokens_a_second_on_each_rank():
    args = argparse.Namespace(consume_tok_s=64)
    matrix = argparse.Namespace(args=args, global_batch=8, block_tokens=32)
    assert [ab.Matrix.pause(matrix, ranks) for ranks in (1, 2, 4)] == [4, 2, 1]


def test_steps_are_taken_for_a_time_or_a_number_and_at_least_one():
    alone = World()
    for most in (1, 2, 3, 7, 8, 9):
        assert len(take(iter(range(9)), alone, most=most)[0]) == most
    for least in ({"seconds": 0}, {"most": 0}):
        assert len(take(iter(range(9)), alone, **least)[0]) == 1
    waits, elapsed = take(iter(range(9)), alone, most=5, pause=0.01)
    assert elapsed >= 0.05 and sum(waits) <= elapsed - 0.05
    waits, elapsed = take(count(), alone, seconds=0.1, pause=0.01)
    assert len(waits) <= 10 and elapsed >= 0.1
