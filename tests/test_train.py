"""train.py end to end: runs, their logs, resume, and every refusal a user can meet."""

import gzip
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import lancedb
import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file

import launch
import model
import train
from scripts import demo, inspect_checkpoint, sample, tokenize_corpus, train_tokenizer
from tests.conftest import (
    ROOT,
    documents,
    launcher,
    make_table,
    processes_of,
    run,
    small_disk,
    started,
    torchrun,
    wait_for,
)

SMALL = ("--pack", "--seq-len", "64", "--batch-size", "4", "--eval-batches", "2", "--dtype", "fp32")
KEYS = {
    *("step", "epoch", "tokens", "loss", "lr", "grad_norm", "tokens_per_second", "mfu"),
    *("data_wait_share", "data_wait_ms_p50", "data_wait_ms_p95", "data_wait_ms_p99"),
    *("queued_bytes", "skipped", "memory_bytes", "z_mean", "z_max"),
    *("step_s", "data_wait_s", "forward_backward_s", "optimizer_s"),
}


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LANCE_PRETRAIN_DB", raising=False)


def go(corpus, *flags):
    train.main(["--db", str(corpus), *SMALL, "--log-every", "1", *flags])


def records(run_dir):
    return [json.loads(line) for line in Path(run_dir, "metrics.jsonl").read_text().splitlines()]


def losses(run_dir):
    return {r["step"]: r["loss"] for r in records(run_dir) if "loss" in r}


def weights(checkpoint):
    tensors = {}
    for shard in Path(checkpoint).glob("*.safetensors"):
        tensors |= load_file(shard)
    return tensors


def refusal(*flags):
    """The one line with which train.py refuses ``flags``."""
    with pytest.raises(SystemExit) as refused:
        train.main([*SMALL, *flags])
    line = str(refused.value)
    assert line and "\n" not in line and refused.value.code != 0
    return line


# -----------------------------------------------------------------------------
# a run and what it leaves behind


def test_run_learns_and_writes_its_directory(corpus, capsys):
    go(corpus, "--steps", "30", "--run-dir", "r", "--eval-every", "10", "--warmup-steps", "5")
    rows = records("r")
    steps = [r for r in rows if "loss" in r]
    assert [r["step"] for r in steps] == list(range(1, 31)) and set(steps[0]) == KEYS
    assert steps[0]["loss"] == pytest.approx(math.log(257), abs=0.3)
    assert steps[-1]["loss"] < steps[0]["loss"] - 1
    assert [r["tokens"] for r in steps] == [256 * s for s in range(1, 31)]
    assert all(r["mfu"] is None and r["skipped"] == 0 for r in steps)
    assert steps[4]["lr"] == 6e-4 and 0 < steps[-1]["lr"] < 1e-5
    validation = [r for r in rows if "val_loss" in r]
    assert [r["step"] for r in validation] == [10, 20, 30]
    assert all(set(r) == {"step", "val_loss", "val_bpb", "validation_s"} for r in validation)
    parts = [r["data_wait_s"] + r["forward_backward_s"] + r["optimizer_s"] for r in steps]
    assert all(0.5 < part / r["step_s"] <= 1 for part, r in zip(parts, steps, strict=True))
    # one byte is one token here, and only EOS has no bytes
    assert 1.0 < validation[-1]["val_bpb"] / (validation[-1]["val_loss"] / math.log(2)) < 1.05
    config = json.loads(Path("r/config.json").read_text())
    assert config["flags"]["steps"] == 30 and config["derived"]["global_batch"] == 4
    environment = json.loads(Path("r/environment.json").read_text())
    assert environment["lancedb"].startswith("0.40") and environment["device"] == "cpu"
    assert list(Path("r").glob("events.out.tfevents.*"))
    printed = capsys.readouterr().out
    assert "funnel" in printed and "step 30/30  epoch 0  loss" in printed
    assert Path("r/train.log").read_text() == printed
    (checkpoint,) = Path("checkpoints").glob("*/step_00000030")
    assert "wte.weight" in weights(checkpoint)


def test_other_model_optimizer_and_mask_train_and_resume_bit_for_bit(corpus):
    flags = ("--arch", "llama", "--kv-heads", "2", "--qk-norm", "--untied", "--doc-mask")
    flags += ("--optimizer", "muon", "--skip-spikes", "8", "--recompute", "full")
    flags += ("--lr-total-steps", "12", "--warmup-steps", "2")
    go(corpus, *flags, "--steps", "12", "--run-dir", "a", "--ckpt-dir", "ca")
    go(corpus, *flags, "--steps", "7", "--run-dir", "b", "--ckpt-dir", "cb")
    go(corpus, *flags, "--steps", "12", "--ckpt-dir", "cb", "--resume", "auto")
    assert losses("a") == losses("b") and losses("a")[12] < losses("a")[1] - 0.5
    whole, resumed = weights("ca/step_00000012"), weights("cb/step_00000012")
    assert whole.keys() == resumed.keys() and "lm_head.weight" in whole
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    sample.main(["--ckpt-dir", "ca", "--tokens", "5"])


def test_sample_refuses_another_tokenizer_than_the_runs(corpus, tmp_path):
    go(corpus, "--steps", "1", "--ckpt-dir", "c")
    out = tmp_path / "t.json"
    train_tokenizer.main(["--db", str(corpus), "--vocab-size", "300", "--out", str(out)])
    with pytest.raises(SystemExit, match="ids of another tokenizer .257 ids, .* than bpe:.*--tok"):
        sample.main(["--ckpt-dir", "c", "--tokens", "5", "--tokenizer", f"bpe:{out}"])


def test_profile_and_norms_are_written_for_the_steps_asked_for(corpus, capsys):
    go(corpus, "--steps", "5", "--run-dir", "r", "--profile", "2:2", "--log-params", "2")
    with gzip.open("r/trace_step_00000002.json.gz") as trace:
        names = {event.get("name") for event in json.load(trace)["traceEvents"]}
    assert "aten::addmm" in names
    assert "profile        r/trace_step_00000002.json.gz" in capsys.readouterr().out
    norms = [r for r in records("r") if "weight_norm/h.0.attn.c_attn" in r]
    assert [r["step"] for r in norms] == [2, 4]
    assert all(r["gradient_norm/wte"] > 0 for r in norms)


def test_run_that_skips_too_often_ends_in_one_line(corpus):
    flags = ("--lr", "1e6", "--warmup-steps", "0", "--grad-clip", "0", "--max-skips", "3")
    line = refusal("--db", str(corpus), "--steps", "200", "--log-every", "1", *flags)
    assert line.startswith("3 steps in a row were skipped (--max-skips 3), the last at loss nan")
    (state,) = Path("runs").glob("*/state.json")
    assert json.loads(state.read_text())["state"] == "failed"


def test_too_many_skips_between_two_log_lines_end_the_run_at_the_next(corpus):
    flags = ("--lr", "1e6", "--warmup-steps", "0", "--grad-clip", "0", "--max-skips", "3")
    line = refusal("--db", str(corpus), "--steps", "60", "--log-every", "50", *flags)
    assert "(--max-skips 3)" in line and line.endswith("go on from a checkpoint at a lower --lr")


def test_trace_that_cannot_be_written_saves_and_stops_in_one_line(corpus):
    Path("r/trace_step_00000002.json.gz").mkdir(parents=True)
    line = refusal("--db", str(corpus), "--steps", "9", "--run-dir", "r", "--profile", "2:1")
    assert line.startswith("--run-dir r: ") and "trace_step_00000002.json.gz" in line
    assert len(list(Path("checkpoints").glob("*/step_*"))) == 1


def test_row_mode_trains_on_documents_cut_and_padded(corpus):
    train.main(
        ["--db", str(corpus), "--steps", "3", "--seq-len", "64", "--batch-size", "4"]
        + ["--run-dir", "r", "--log-every", "1"]
    )
    tokens = [r["tokens"] for r in records("r") if "loss" in r]
    assert 0 < tokens[0] <= 256 and tokens[2] > tokens[1] > tokens[0]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["packed", "rows"])
def test_worker_processes_give_the_same_losses(corpus, mode):
    flags = ["--db", str(corpus), "--steps", "2", "--seq-len", "64", "--batch-size", "4"]
    flags += ["--pack"] * (mode == "packed") + ["--log-every", "1", "--loader", "lancedb"]
    for workers in ("0", "2"):
        done = run(
            "train.py", *flags, "--num-workers", workers, "--run-dir", workers, cwd=Path.cwd()
        )
        assert done.returncode == 0, done.stderr
    assert losses("0") == losses("2")


def test_length_in_epochs_is_whole_passes(corpus, capsys):
    flags = ("--epochs", "2", "--seq-len", "512", "--batch-size", "16", "--run-dir", "r")
    go(corpus, *flags)
    rows = [r for r in records("r") if "loss" in r]
    blocks = json.loads(Path("r/config.json").read_text())["derived"]["blocks_per_epoch"]
    assert len(rows) == 2 * blocks // 16 and {r["epoch"] for r in rows} == {0, 1}


def test_notices_name_flags_of_the_step_that_decide_nothing(corpus, capsys):
    go(corpus, "--steps", "1", "--decay-ratio", "0.5", "--ddp-bf16", "--compile-mode", "default")
    assert "without effect here: --ddp-bf16, --decay-ratio\n" in capsys.readouterr().out


def test_notices_name_what_is_ignored_or_shortened(corpus, capsys):
    go(corpus, "--steps", "2", "--epochs", "3", "--blocks-path", "x", "--eval-batches", "1")
    printed = capsys.readouterr().out
    assert "--epochs 3 is ignored: --steps 2 decides" in printed
    assert "after 0 steps of warm-up (--warmup-steps 200 do not fit), cosine to 0 at" in printed
    assert "without effect here: --blocks-path" in printed


@pytest.mark.slow
def test_compiled_run_follows_the_eager_one(corpus):
    for flags in (("--run-dir", "eager"), ("--compile", "--run-dir", "compiled")):
        go(corpus, "--steps", "3", *flags)
    eager, compiled = losses("eager"), losses("compiled")
    assert compiled == pytest.approx(eager, rel=1e-4)


# -----------------------------------------------------------------------------
# resume


@pytest.mark.parametrize("loader", ["elastic", "lancedb"])
def test_resumed_run_is_the_uninterrupted_one(corpus, capsys, loader):
    schedule = (
        "--loader",
        loader,
        "--steps",
        "8",
        "--seq-len",
        "512",
        "--batch-size",
        "16",
    )  # across an epoch's end
    go(corpus, *schedule, "--run-dir", "whole", "--ckpt-dir", "a")
    go(corpus, *schedule, "--run-dir", "part", "--ckpt-dir", "b", "--ckpt-every", "3")
    for later in ("step_00000006", "step_00000008"):
        shutil.rmtree(f"b/{later}")
    go(corpus, *schedule, "--run-dir", "part", "--ckpt-dir", "b", "--resume", "auto")
    assert losses("part") == losses("whole") and list(losses("part")) == list(range(1, 9))
    whole, part = weights("a/step_00000008"), weights("b/step_00000008")
    assert whole.keys() == part.keys()
    assert all(torch.equal(whole[name], part[name]) for name in whole)
    assert "resumed        b/step_00000003 at step 3" in capsys.readouterr().out


def test_finished_run_resumed_does_nothing(corpus, capsys):
    go(corpus, "--steps", "2", "--ckpt-dir", "c")
    before = {p: p.stat().st_mtime_ns for p in Path("c").rglob("step*/*")}
    go(corpus, "--steps", "2", "--ckpt-dir", "c", "--resume", "auto")
    assert "nothing to do: 2 of 2 steps are done" in capsys.readouterr().out
    assert {p: p.stat().st_mtime_ns for p in Path("c").rglob("step*/*")} == before


def test_resume_auto_starts_fresh_and_says_so_where_there_is_nothing(corpus, capsys):
    go(corpus, "--steps", "1", "--ckpt-dir", "c", "--resume", "auto")
    assert "no checkpoint there yet, starting at step 0" in capsys.readouterr().out


def test_resume_keeps_run_id_and_directory_and_pinned_version(tmp_path, capsys):
    table = make_table(tmp_path / "db", documents(120))
    tokenize_corpus.main(["--db", str(tmp_path / "db"), "--workers", "0"])
    go(tmp_path / "db", "--steps", "2")
    (run_dir,) = Path("runs").iterdir()
    table.checkout_latest()
    version = table.version
    table.add(pa.table({"id": pa.array([500]), "text": ["later"]}))
    go(tmp_path / "db", "--steps", "4", "--resume", "auto", "--lr-total-steps", "4")
    assert list(Path("runs").iterdir()) == [run_dir] and len(losses(run_dir)) == 4
    record = json.loads(next(Path("checkpoints").glob("*/step_00000004/*.json")).read_text())
    assert record["run_id"] == run_dir.name and record["table_version"] == version


def ledger(run_dir):
    """The ledger line as numbers: (total, sum of its parts, parts by name)."""
    (line,) = [x for x in Path(run_dir, "train.log").read_text().splitlines() if "ledger" in x][-1:]
    total, parts = line.removeprefix("ledger").split(" tokens with EOS = ")
    named = {p.split(maxsplit=1)[1]: int(p.split()[0].replace(",", "")) for p in parts.split(" + ")}
    return int(total.replace(",", "")), sum(named.values()), named


@pytest.mark.parametrize("mode", [("--pack",), ()])
def test_ledger_accounts_for_every_token_of_the_epochs_begun(corpus, mode):
    flags = ["--db", str(corpus), "--seq-len", "64", "--batch-size", "16", *mode]
    train.main([*flags, "--steps", "30", "--run-dir", "r", "--eval-batches", "1"])
    texts = documents(300)
    epoch = sum(len(texts[i]) + 1 for i in range(300) if i % 100)
    total, parts, named = ledger("r")
    assert total == parts and total % epoch == 0
    assert named["trained"] == [r["tokens"] for r in records("r") if "tokens" in r][-1]
    assert ("truncated" in named) == (not mode)


def test_skipped_steps_have_their_place_in_the_ledger(corpus):
    flags = ("--lr", "1e6", "--warmup-steps", "0", "--grad-clip", "0", "--max-skips", "100")
    go(corpus, "--steps", "12", "--run-dir", "r", *flags)
    total, parts, named = ledger("r")
    skipped = [r["skipped"] for r in records("r") if "skipped" in r][-1]
    assert total == parts and skipped > 0
    assert named["skipped steps"] == skipped * 4 * 64
    assert named["trained"] == (12 - skipped) * 4 * 64


def test_ckpt_sync_trains_on_when_the_checkpoint_is_written(corpus):
    go(corpus, "--steps", "4", "--run-dir", "r", "--ckpt-every", "1", "--ckpt-sync")
    log = [line.split() for line in Path("r/train.log").read_text().splitlines()]
    lines = [words[1] for words in log if words[0] == "step" and "validation" not in words]
    assert lines == ["1/4", "1:", "2/4", "2:", "3/4", "3:", "4/4", "4:"]


def test_run_tags_its_version_until_it_is_done(tmp_path, capsys):
    table = make_table(tmp_path / "db", documents(120))
    tokenize_corpus.main(["--db", str(tmp_path / "db"), "--workers", "0"])
    with pytest.raises(SystemExit):
        go(tmp_path / "db", "--steps", "4", "--ckpt-every", "2", "--ckpt-dir", "c", "--wandb", "p")
    assert table.tags.list() == {}  # nothing to resume yet
    go(tmp_path / "db", "--steps", "4", "--ckpt-every", "2", "--ckpt-dir", "c")
    printed = capsys.readouterr().out
    assert printed.count("holds table version") == 1 and "table.tags.delete('train-" in printed
    assert table.tags.list() == {}  # done
    go(tmp_path / "db", "--steps", "2", "--no-pin-tag")
    assert "holds table version" not in capsys.readouterr().out


def test_resume_after_cleanup_of_its_version_continues_on_equal_data_only(tmp_path, capsys):
    table = make_table(tmp_path / "db", documents(120))
    tokenize_corpus.main(["--db", str(tmp_path / "db"), "--workers", "0"])
    flags = ("--lr-total-steps", "8", "--ckpt-dir", "c", "--run-dir", "r", "--no-pin-tag")
    go(tmp_path / "db", *flags, "--steps", "4")
    table.checkout_latest()
    table.add(pa.table({"id": [901], "text": ["x"]}))  # no tokens: the same documents
    table.optimize(cleanup_older_than=timedelta(0), delete_unverified=True)
    go(tmp_path / "db", *flags, "--steps", "8", "--resume", "auto")
    assert "has no version" in capsys.readouterr().out
    assert list(losses("r")) == list(range(1, 9))
    tokenize_corpus.main(["--db", str(tmp_path / "db"), "--workers", "0"])  # one document more
    table.checkout_latest()
    table.optimize(cleanup_older_than=timedelta(0), delete_unverified=True)
    line = refusal("--db", str(tmp_path / "db"), *flags, "--steps", "9", "--resume", "auto")
    assert "other data: documents was" in line and "--resume-data new" in line
    go(tmp_path / "db", *flags, "--steps", "9", "--resume", "auto", "--resume-data", "new")
    total, parts, named = ledger("r")
    assert total == parts and named["trained"] == 9 * 4 * 64
    record = json.loads(Path("c/step_00000009/checkpoint.json").read_text())
    assert len(record["segments"]) == 2 and record["stream"]["block"] == 4


@pytest.mark.slow
def test_killed_run_continues_on_its_version_after_update_deletion_append_and_compaction(tmp_path):
    make_table(tmp_path / "db", documents(120))
    tokenize_corpus.main(["--db", str(tmp_path / "db"), "--workers", "0"])
    flags = ["--db", str(tmp_path / "db"), *SMALL, "--log-every", "1", "--ckpt-every", "2"]
    train.main([*flags, "--steps", "60", "--run-dir", "whole", "--ckpt-dir", "w"])
    flags += ["--steps", "60", "--run-dir", "r", "--ckpt-dir", "c"]
    with started(sys.executable, str(ROOT / "train.py"), *flags, cwd=tmp_path) as process:
        wait_for(Path("c/step_00000004").exists)
        process.kill()
    table = lancedb.connect(tmp_path / "db").open_table("corpus")
    assert len(table.tags.list()) == 1
    table.update(where="id % 7 = 1", values={"input_ids": [1, 2, 3], "n_tokens": 3})
    table.delete("id % 11 = 1")
    table.add(pa.table({"id": [901], "text": ["x"], "input_ids": [[5] * 900], "n_tokens": [900]}))
    table.optimize()  # compaction
    with pytest.raises(RuntimeError, match="tag"):
        table.optimize(cleanup_older_than=timedelta(0), delete_unverified=True)
    train.main([*flags, "--resume", "auto"])
    assert losses("r") == losses("whole")
    assert table.tags.list() == {}


def test_fresh_start_keeps_another_runs_log(corpus):
    go(corpus, "--steps", "2", "--run-dir", "r")
    before = Path("r/metrics.jsonl").read_text()
    line = refusal("--db", str(corpus), "--steps", "1", "--run-dir", "r")
    assert "--run-dir r holds the log of another run" in line
    assert Path("r/metrics.jsonl").read_text() == before


def test_branch_from_a_checkpoint_is_a_run_of_its_own(corpus):
    go(corpus, "--steps", "6", "--ckpt-every", "2", "--ckpt-dir", "a", "--run-dir", "r")
    log = Path("r/metrics.jsonl").read_text()
    branch = ("--steps", "4", "--lr-total-steps", "6", "--resume", "a/step_00000002")
    line = refusal("--db", str(corpus), *branch)
    assert "--ckpt-dir a holds step_00000006, later than step 2" in line
    go(corpus, *branch, "--ckpt-dir", "b")
    assert Path("r/metrics.jsonl").read_text() == log
    old, new = (
        json.loads(Path(p, "checkpoint.json").read_text())
        for p in ("a/step_00000006", "b/step_00000004")
    )
    assert old["run_id"] != new["run_id"] and new["run_dir"] == f"runs/{new['run_id']}"
    line = refusal("--db", str(corpus), *branch, "--ckpt-dir", "d", "--run-dir", "r")
    assert "--run-dir r holds the log of another run, whose checkpoints are in /" in line
    line = refusal("--db", str(corpus), "--resume", "auto", "--ckpt-dir", "e", "--run-dir", "r")
    assert "--run-dir r holds the log of another run" in line
    assert Path("r/metrics.jsonl").read_text() == log


def test_damaged_old_checkpoint_does_not_stop_a_run(tmp_path):
    table = make_table(tmp_path / "db", documents(120))
    tokenize_corpus.main(["--db", str(tmp_path / "db"), "--workers", "0"])
    flags = ("--lr-total-steps", "8", "--ckpt-every", "2", "--ckpt-dir", "c", "--run-dir", "r")
    go(tmp_path / "db", *flags, "--steps", "4")
    assert len(table.tags.list()) == 1  # of a schedule that goes on
    Path("c/step_00000002/checkpoint.json").write_text("{")
    go(tmp_path / "db", *flags, "--steps", "8", "--resume", "auto")
    assert list(losses("r")) == list(range(1, 9)) and table.tags.list() == {}


def test_new_data_begin_once_however_often_the_flag_is_given(corpus, tmp_path, capsys):
    flags = ("--lr-total-steps", "9", "--ckpt-dir", "c", "--run-dir", "r", "--resume", "auto")
    go(corpus, *flags, "--steps", "3")
    new = ("--resume-data", "new", "--filter", "id % 3 = 0")
    for steps in ("6", "9"):
        go(corpus, *flags, *new, "--steps", steps)
    assert "these are the checkpoint's data, going on in them" in capsys.readouterr().out
    record = json.loads(Path("c/step_00000009/checkpoint.json").read_text())
    assert record["stream"]["block"] == 6 * 4 and len(record["segments"]) == 2


def test_fresh_start_over_checkpoints_is_refused(corpus):
    go(corpus, "--steps", "1", "--ckpt-dir", "c")
    assert "--resume auto" in refusal("--db", str(corpus), "--steps", "1", "--ckpt-dir", "c")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--seq-len", "32"), "--seq-len was 64, is 32"),
        (("--filter", "id > 5"), "documents was"),
        (("--model", "small"), "--model was tiny 4x128, is small 12x768"),
        (("--steps", "3"), "--lr-total-steps was 2, is 3"),
        (("--shuffle-seed", "7"), "--shuffle-seed was 42, is 7"),
    ],
)
def test_resume_of_another_run_lists_old_and_new(corpus, flags, words):
    go(corpus, "--steps", "2", "--ckpt-every", "1", "--ckpt-dir", "c")
    line = refusal("--db", str(corpus), "--steps", "2", "--resume", "c/step_00000001", *flags)
    assert words in line


def test_empty_validation_split_is_said_at_the_start(corpus, capsys):
    go(corpus, "--steps", "1", "--val-filter", "id < 0", "--run-dir", "r")
    assert "validation     none: no tokenized row where id < 0" in capsys.readouterr().out
    assert all("val_loss" not in row for row in records("r"))


def test_id_that_occurs_twice_is_refused(tmp_path):
    make_table(tmp_path / "db", documents(30), twin=pa.array([i // 2 for i in range(30)]))
    tokenize_corpus.main(["--db", str(tmp_path / "db"), "--workers", "0"])
    line = refusal("--db", str(tmp_path / "db"), "--steps", "1", "--id-column", "twin")
    assert "occurs more than once: name a unique column with --id-column" in line


def test_changed_schedule_flags_are_said_and_global_batch_may_change_on_purpose(corpus, capsys):
    go(corpus, "--steps", "2", "--ckpt-dir", "c", "--run-dir", "r")
    flags = ("--lr-total-steps", "4", "--lr", "1e-3", "--global-batch", "6")
    go(corpus, "--steps", "4", "--ckpt-dir", "c", "--run-dir", "r", "--resume", "auto", *flags)
    printed = capsys.readouterr().out
    assert "changed        --lr 0.0006 -> 0.001" in printed
    # the validation stays the one of the first global batches
    tokens = [line for line in printed.splitlines() if line.startswith("validation     ")]
    assert len(tokens) == 2 and tokens[0] == tokens[1]
    record = json.loads(Path("c/step_00000004/checkpoint.json").read_text())
    assert record["global_batch"] == 6 and record["stream"]["block"] == 2 * 4 + 2 * 6
    assert record["tokens"] == (2 * 4 + 2 * 6) * 64


def test_resume_with_another_batch_size_trains_the_same_steps(corpus):
    go(corpus, "--steps", "6", "--run-dir", "whole")
    flags = ("--lr-total-steps", "6", "--ckpt-dir", "c", "--run-dir", "r")
    go(corpus, "--steps", "3", *flags)
    go(corpus, "--steps", "6", *flags, "--resume", "auto", "--batch-size", "3")
    record = json.loads(Path("c/step_00000006/checkpoint.json").read_text())
    assert record["global_batch"] == 4 and record["stream"]["block"] == 6 * 4
    assert losses("r") == pytest.approx(losses("whole"), abs=1e-5)


def test_auto_continues_the_newest_run(corpus):
    go(corpus, "--steps", "3", "--run-dir", "a")
    go(corpus, "--steps", "2", "--lr-total-steps", "4", "--run-dir", "b")
    go(corpus, "--steps", "4", "--resume", "auto")
    assert list(losses("a")) == [1, 2, 3] and list(losses("b")) == [1, 2, 3, 4]


def test_new_run_may_start_from_the_weights_of_another(corpus, capsys):
    go(corpus, "--steps", "2", "--ckpt-dir", "a")
    init = ("--init-from", "a/step_00000002")
    go(corpus, "--steps", "1", "--ckpt-dir", "b", "--lr", "0", *init)
    old, new = weights("a/step_00000002"), weights("b/step_00000001")
    assert all(torch.equal(old[n], new[n]) for n in old if not n.startswith("optimizer."))
    assert new["optimizer.step.wpe.weight"].item() == 1
    assert "weights        those of a/step_00000002" in capsys.readouterr().out
    # an unattended restart has both flags, and continues its own
    go(corpus, "--steps", "1", "--ckpt-dir", "b", "--lr", "0", *init, "--resume", "auto")
    assert "nothing to do" in capsys.readouterr().out
    line = refusal("--db", str(corpus), "--model", "small", "--steps", "1", *init)
    assert line.startswith("--init-from a/step_00000002: --model was tiny ") and "small" in line
    line = refusal("--db", str(corpus), "--seq-len", "32", "--steps", "1", *init)
    assert line == "--init-from a/step_00000002: --seq-len was 64, is 32"


def test_checkpoints_are_kept_as_told(corpus):
    go(corpus, "--steps", "9", "--ckpt-every", "2", "--ckpt-dir", "c", "--keep-last", "2",
       "--keep-every", "4")  # fmt: skip
    kept = sorted(p.name for p in Path("c").glob("step_*"))
    assert kept == [f"step_{s:08d}" for s in (4, 8, 9)]


def test_two_runs_on_one_directory_refuse_each_other(corpus, tmp_path):
    flags = ("--db", str(corpus), *SMALL, "--steps", "100000", "--ckpt-every", "2")
    flags += ("--ckpt-dir", "c", "--run-dir", "r")
    with started(sys.executable, str(ROOT / "train.py"), *flags, cwd=tmp_path) as first:
        wait_for(Path("c/step_00000002").exists)
        line = refusal(*flags, "--resume", "auto")
        assert f"--ckpt-dir c is in use by process {first.pid} on " in line
        first.kill()
        first.wait()
    # the dead owner left no lock
    train.main([*flags, "--resume", "auto", "--time-limit", "0.001"])


def test_inspection_says_what_a_checkpoint_holds(corpus, capsys):
    go(corpus, "--steps", "2", "--ckpt-dir", "c")
    capsys.readouterr()
    inspect_checkpoint.main(["--ckpt-dir", "c"])
    printed = capsys.readouterr().out
    table = lancedb.connect(corpus).open_table("corpus")
    assert "step           2, 512 tokens, 0 steps skipped" in printed
    texts = documents(300)
    blocks = sum(len(texts[i]) + 1 for i in range(300) if i % 100) // 64
    where = f"epoch 0, block 8 of {blocks:,}, table version {table.version}"
    assert f"position       {where}" in printed
    parameters = sum(
        p.numel() for p in model.GPT(model.GPTConfig.preset("tiny", 257, 64)).parameters()
    )
    assert f"{parameters:,} parameters" in printed and "checksums right" in printed
    (shard,) = Path("c/step_00000002").glob("*.safetensors")
    os.truncate(shard, 100)
    with pytest.raises(SystemExit, match=f"{shard.name} is damaged"):
        inspect_checkpoint.main(["c/step_00000002"])


def test_damaged_checkpoint_is_refused_by_file_name(corpus):
    go(corpus, "--steps", "1", "--ckpt-dir", "c")
    (shard,) = Path("c/step_00000001").glob("*.safetensors")
    flags = ("--db", str(corpus), "--steps", "1", "--resume", "c/step_00000001")
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert f"{shard.name} is damaged (checksum differs)" in refusal(*flags)
    shard.write_bytes(whole[:-1])
    assert f"{shard.name} is damaged" in refusal(*flags)
    shard.unlink()
    assert f"{shard.name} is damaged (missing)" in refusal(*flags)
    assert "no complete checkpoint" in refusal(*flags[:-1], "c/step_00000009")
    line = refusal(*flags[:-1], "c")
    assert "take a directory step_<number>, such as c/step_00000001, --resume auto" in line


# -----------------------------------------------------------------------------
# several ranks


@pytest.mark.slow
def test_two_ranks_train_save_and_resume_like_one(corpus, tmp_path):
    shared = ("--db", str(corpus), *SMALL, "--global-batch", "5", "--log-every", "1")
    one = (*shared, "--steps", "4", "--run-dir", "one")
    assert run("train.py", *one, cwd=tmp_path).returncode == 0
    two = (*shared, "--batch-size", "2", "--run-dir", "two", "--ckpt-dir", "c")
    for steps, resume in (("2", ()), ("4", ("--resume", "auto"))):
        flags = ("--steps", steps, "--lr-total-steps", "4", *resume)
        done = torchrun(2, "train.py", *two, *flags, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    assert losses("two") == pytest.approx(losses("one"), abs=1e-5)
    assert len(list(Path("c/step_00000004").glob("*.safetensors"))) == 2
    (a, b) = ([r for r in records(d) if "val_loss" in r][-1] for d in ("one", "two"))
    assert b["val_loss"] == pytest.approx(a["val_loss"], abs=1e-5)


@pytest.mark.slow
def test_resume_on_as_many_ranks_is_bit_identical(corpus, tmp_path):
    """Three: the sum of two does not depend on their order."""
    flags = ("--db", str(corpus), *SMALL, "--global-batch", "7", "--steps", "4")
    whole = ("--ckpt-dir", "c", "--ckpt-every", "2")
    resumed = ("--ckpt-dir", "b", "--resume", "c/step_00000002")
    for more in (whole, resumed):
        done = torchrun(3, "train.py", *flags, *more, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    a, b = weights("c/step_00000004"), weights("b/step_00000004")
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.slow
def test_killed_rank_ends_the_launch_and_leaves_no_process(corpus, tmp_path):
    flags = ("--db", str(corpus), *SMALL, "--steps", "100000", "--run-dir", "r")
    with started(*launcher(2), str(ROOT / "train.py"), *flags, cwd=tmp_path) as launch:
        wait_for(lambda: Path("r/metrics.jsonl").exists() and len(records("r")) > 3)
        ranks = [pid for pid in processes_of(tmp_path) if pid != launch.pid]
        os.kill(ranks[-1], signal.SIGKILL)
        assert launch.wait(45) != 0
        assert processes_of(tmp_path) == {}


@pytest.mark.slow
def test_document_that_one_rank_cannot_read_ends_all_ranks(tmp_path):
    table = make_table(tmp_path / "db", documents(300))
    tokenize_corpus.main(["--db", str(tmp_path / "db"), "--workers", "0"])
    table.checkout_latest()
    table.update(where="id = 77", values={"n_tokens": 5})
    flags = ("--db", str(tmp_path / "db"), *SMALL, "--steps", "100000", "--prefetch-mb", "1")
    done = torchrun(2, "train.py", *flags, cwd=tmp_path, timeout=90)
    assert done.returncode and "document 77 has" in done.stderr


@pytest.mark.slow
def test_refusal_under_torchrun_is_one_line_of_ours(corpus, tmp_path):
    flags = ("--db", str(corpus), *SMALL, "--steps", "1", "--global-batch", "1")
    done = torchrun(2, "train.py", *flags, cwd=tmp_path)
    ours = "--global-batch 1 on 2 ranks leaves ranks without a block: give at least 2"
    assert done.returncode != 0 and done.stderr.count(ours) == 1
    assert not Path("runs").exists() and not Path("checkpoints").exists()


# -----------------------------------------------------------------------------
# bad input


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--filter", "bogus > 1"), "No field named bogus"),
        (("--filter", "id < 0"), "the filter leaves no row of 300"),
        (("--tokenizer", "bpe:/nowhere.json"), "--tokenizer bpe:/nowhere.json: cannot load it"),
        (("--table", "other"), "no table 'other'"),
        (("--loader", "lancedb", "--global-batch", "6"), "--global-batch 6 must be a multiple"),
        (("--loader", "lancedb", "--num-splits", "3"), "--num-splits 3 must be a multiple of"),
        (("--blocks-per-epoch", "ten"), "--blocks-per-epoch ten: --loader elastic takes a number"),
        (("--seq-len", "60000"), "no step to train: an epoch has 0 blocks, a step takes 4"),
        (("--batch-size", "2000"), "an epoch has 918 blocks, a step takes 2,000"),
        (("--device", "cuda"), "--device cuda"),
        (("--resume", "nowhere"), "checkpoint nowhere: no complete checkpoint"),
        (
            (
                "--resume",
                "auto",
                "--schedule",
                "wsd",
                "--decay-ratio",
                "1",
                "--steps",
                "0",
                "--epochs",
                "1",
                "--global-batch",
                "9000",
            ),
            "no step to train",
        ),
        (("--wandb", "p"), "--wandb needs the package: pip install wandb"),
    ],
)
def test_bad_flag_is_refused_in_one_line(corpus, flags, words):
    assert words in refusal("--db", str(corpus), "--steps", "0", *flags)
    assert not Path("checkpoints").exists()


@pytest.mark.parametrize(
    "flags",
    [
        *(("--epochs", "0"), ("--batch-size", "0"), ("--steps", "-1"), ("--blocks-mode", "foo")),
        *(("--lr", "nan"), ("--lr", "-1"), ("--grad-clip", "-1"), ("--min-lr-ratio", "7")),
        *(("--weight-decay", "nan"), ("--seq-len", "1"), ("--min-score", "nan")),
        *(("--seed", "-1"), ("--shuffle-seed", str(10**30)), ("--compile-mode", "foo")),
    ],
)
def test_bad_number_is_refused_in_one_line(corpus, capsys, flags):
    with pytest.raises(SystemExit) as refused:
        go(corpus, *flags)
    message = capsys.readouterr().err
    assert refused.value.code == 2 and flags[0] in message and message.count("\n") == 1


def test_missing_database_names_the_command_to_build_one(tmp_path):
    line = refusal("--db", str(tmp_path / "none"), "--steps", "1")
    assert "python scripts/ingest.py --db" in line and not (tmp_path / "none").exists()
    assert "LanceDB Cloud" in refusal("--db", "db://corp", "--steps", "1")


def test_tokenizer_of_another_table_is_refused_with_both_identities(tmp_path):
    ids = pa.array([[1, 2, 3]] * 300)
    make_table(tmp_path / "db", documents(300), input_ids=ids)
    tokenize_corpus.main(["--db", str(tmp_path / "db"), "--count-only"])
    go(tmp_path / "db", "--steps", "1", "--run-dir", "r")  # nobody says who wrote it
    assert "does not say who wrote it: trusting --tokenizer byte" in Path("r/train.log").read_text()
    train_tokenizer.main(["--db", str(tmp_path / "db"), "--vocab-size", "300"])
    tokenize_corpus.main(
        ["--db", str(tmp_path / "db"), "--workers", "0", "--overwrite"]
        + ["--tokenizer", "bpe:tokenizer.json"]
    )
    line = refusal("--db", str(tmp_path / "db"), "--steps", "1")
    assert "(300 ids, " in line and "byte (257 ids, " in line
    assert f"use --tokenizer bpe:{Path('tokenizer.json').resolve()}" in line


@pytest.mark.parametrize("bad", [257, 70_000, -1])
def test_id_outside_the_vocabulary_stops_the_run(tmp_path, bad):
    ids = pa.array([[1, 2, bad]] * 300, pa.list_(pa.int32()))
    make_table(tmp_path / "db", documents(300), input_ids=ids)
    tokenize_corpus.main(["--db", str(tmp_path / "db"), "--count-only"])
    line = refusal("--db", str(tmp_path / "db"), "--steps", "2", "--val-filter", "id < 0")
    assert f"holds token id {bad} in column input_ids, outside the 257 ids of --tok" in line


def test_id_outside_the_vocabulary_in_validation_is_found_at_the_start(tmp_path):
    ids = pa.array([[1, 2, 300 if i % 100 == 0 else 3] for i in range(300)])
    make_table(tmp_path / "db", documents(300), input_ids=ids)
    tokenize_corpus.main(["--db", str(tmp_path / "db"), "--count-only"])
    line = refusal("--db", str(tmp_path / "db"), "--steps", "1")
    assert "holds token id 300, outside the 257 ids" in line and not Path("runs").exists()


def test_columns_of_any_name_can_be_used(tmp_path):
    table = {"Doc ID": range(300), "select": documents(300)}
    lancedb.connect(tmp_path / "db").create_table("corpus", pa.table(table))
    names = ("--db", str(tmp_path / "db"), "--id-column", "Doc ID", "--text-column", "select")
    tokenize_corpus.main([*names, "--tokens-column", "Token Ids", "--workers", "0"])
    train.main([*names, *SMALL, "--tokens-column", "Token Ids", "--steps", "2"])


@pytest.mark.slow
def test_full_disk_is_one_line_and_leaves_nothing_half_written(corpus, tmp_path):
    with small_disk(tmp_path / "small", "8m") as small:
        line = refusal("--db", str(corpus), "--steps", "2", "--ckpt-dir", str(small / "c"))
        assert "cannot write checkpoint" in line and "No space left" in line
        assert [p.name for p in (small / "c").iterdir()] == [".lock"]


@pytest.mark.slow
def test_rank_with_other_flags_is_refused(corpus, tmp_path):
    code = (
        "import os, sys; sys.path.insert(0, sys.argv[1]); import train\n"
        "train.main(sys.argv[2:] + ['--seq-len', '3' + os.environ['RANK']])"
    )
    (tmp_path / "other.py").write_text(code)
    command = [*launcher(2), "other.py", str(ROOT), "--db", str(corpus), *SMALL]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode and "flag seq_len is 31 on rank 1, 30 on rank 0" in done.stderr


def test_run_directory_that_cannot_be_written_is_refused(corpus):
    Path("file").write_text("in the way")
    line = refusal("--db", str(corpus), "--steps", "1", "--run-dir", "file")
    assert line.startswith("--run-dir file: ")
    line = refusal("--db", str(corpus), "--steps", "9", "--ckpt-dir", "file/c")
    assert line.startswith("--ckpt-dir file/c: ") and not Path("runs").exists()


@pytest.mark.slow
def test_run_goes_on_when_its_console_is_gone(corpus, tmp_path):
    flags = f"--db {corpus} {' '.join(SMALL)} --steps 30 --log-every 1 --run-dir r --ckpt-dir c"
    script = f"{sys.executable} {ROOT / 'train.py'} {flags} | head -n 2; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    assert list(losses("r")) == list(range(1, 31)) and Path("c/step_00000030").is_dir()


@pytest.mark.slow
def test_full_disk_under_the_log_saves_and_stops_in_one_line(corpus, tmp_path):
    with small_disk(tmp_path / "small", "1m") as small:
        flags = ("--db", str(corpus), *SMALL, "--steps", "100000", "--log-every", "1")
        flags += ("--run-dir", str(small / "r"), "--ckpt-dir", "c")
        with started(sys.executable, str(ROOT / "train.py"), *flags, cwd=tmp_path) as process:
            wait_for(lambda: (small / "r/metrics.jsonl").exists() and len(records(small / "r")) > 3)
            with suppress(OSError):
                (small / "ballast").write_bytes(b"x" * (2 << 20))
            assert process.wait(60) == 1
        output = Path("output").read_text()
        assert f"--run-dir {small / 'r'}: [Errno 28] No space left" in output
        assert "Traceback" not in output and list(Path("c").glob("step_*"))


def test_out_of_memory_names_the_batch_size(corpus, tmp_path):
    """A real allocation failure: the address space is capped before training starts."""
    code = (
        "import resource, sys; sys.path.insert(0, sys.argv[1]); import train\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + (6 << 30),) * 2)\n"
        "train.main(sys.argv[2:])"
    )
    flags = ["--db", str(corpus), "--batch-size", "64", "--seq-len", "512", "--steps", "1"]
    flags += ["--model", "small", "--pack"]
    command = [sys.executable, "-c", code, str(ROOT), *flags]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1 and last.startswith("out of memory: lower --batch-size 64"), last


# -----------------------------------------------------------------------------
# the smoke command and the flags


@pytest.mark.slow
def test_demo_corpus_is_not_built_over_another_database(corpus):
    with pytest.raises(SystemExit, match="is there already: remove it, or name another"):
        demo.build(f"{corpus}/")


def test_smoke_command_builds_the_demo_corpus_once(tmp_path):
    smoke = ("train.py", "--model", "tiny", "--steps", "2", "--batch-size", "2")
    smoke += ("--seq-len", "64", "--eval-batches", "1")
    first = run(*smoke, cwd=tmp_path, timeout=290)
    assert first.returncode == 0, first.stderr
    assert "building the demo corpus in ./lance_pretrain_db" in first.stdout
    again = run(*smoke, cwd=tmp_path)
    assert again.returncode == 0 and "building" not in again.stdout
    assert len(os.listdir("runs")) >= 2 and not Path("lance_pretrain_db.partial").exists()


def test_flags_have_the_missions_names_and_defaults():
    flags = launch.flag_parser().parse_args([])
    expected = {
        "tokenizer": "byte", "model": "tiny", "seq_len": 512, "batch_size": 8, "pack": False,
        "num_splits": 0, "shuffle_seed": 42, "min_score": 1.0, "blocks_per_epoch": "",
        "num_workers": 0, "mp_context": "forkserver", "read_batch_size": 8, "io_queue_depth": 1,
        "transform_parallelism": 2, "transform_queue_depth": 0, "grad_accum": 1, "epochs": 1,
        "steps": 0, "lr": 6e-4, "warmup_steps": 200, "lr_total_steps": 0, "compile": False,
        "compile_mode": "default", "log_every": 10, "eval_every": 0, "eval_batches": 8,
        "ckpt_every": 100, "resume": "", "blocks_mode": "off", "blocks_path": "",
        "weight_decay": 0.1, "grad_clip": 1.0, "seed": 1234, "min_lr_ratio": 0.0, "filter": "",
        "global_batch": 0, "loader": None, "device": "auto", "id_column": "id",
        "text_column": "text", "tokens_column": "input_ids",
    }  # fmt: skip
    assert {name: getattr(flags, name) for name in expected} == expected
    assert all(hasattr(flags, name) for name in ("db", "table", "val_filter", "dist_timeout"))
