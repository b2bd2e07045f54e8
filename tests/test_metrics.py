"""Meters and logs: throughput that tells the truth, records that occur once."""

import json
import math
import time
from collections.abc import Callable

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from distributed import World
from metrics import Meter, RunLog, batch_hash, cut_back, duration, human, step_line

CPU = torch.device("cpu")


@pytest.fixture
def clock(monkeypatch) -> Callable[[float], None]:
    """A clock that stands still but for calls of this, with seconds."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return lambda seconds: now.__setitem__(0, now[0] + seconds)


def test_paused_time_is_not_in_the_throughput(clock):
    meter = Meter(CPU, tokens=1000, flops=100, peak=1e6)
    clock(0.5)
    with meter.pause():
        clock(8)
    with meter.span("data_wait"):
        clock(1.5)
    assert meter.elapsed() == 2 and meter.last_pause == 8
    values = meter.values(2000, World())
    assert values["tokens_per_second"] == 500 and values["mfu"] == 0.05
    assert meter.eta(done=1, left=3) == 30  # everything included


def test_waiting_is_a_share_of_the_interval(clock):
    meter = Meter(CPU, tokens=0, flops=100, peak=None)
    for wait in (1, 3):
        with meter.span("data_wait"):
            clock(wait)
    clock(12)
    values = meter.values(10, World())
    assert values["data_wait_share"] == 0.25 and values["data_wait_ms_p50"] == 2000
    assert values["data_wait_s"] == 2 and values["step_s"] == 8 and values["mfu"] is None
    meter.restart(10)
    with meter.span("data_wait"):
        clock(1)
    assert meter.values(20, World())["data_wait_share"] == 1


def test_batch_hash_tells_blocks_and_their_order_and_not_how_they_are_dealt():
    ids = torch.arange(12).view(4, 3)

    def hashed(ids: torch.Tensor, *sizes: int) -> str:
        whole = torch.ones_like(ids, dtype=torch.bool)
        dealt = zip(ids.split(sizes), whole.split(sizes), strict=True)
        return batch_hash([{"input_ids": i, "mask": m} for i, m in dealt], 4, World())

    assert hashed(ids, 4) == hashed(ids, 2, 2) == hashed(ids, 1, 3)
    padded = {"input_ids": ids.repeat(2, 1), "mask": torch.arange(8)[:, None].expand(8, 3) < 4}
    assert batch_hash([padded], 4, World()) == hashed(ids, 4)
    others = [ids[[1, 0, 2, 3]], ids + 1, ids[[0, 0, 2, 3]]]
    assert len({hashed(other, 4) for other in [ids, *others]}) == 4


def test_resume_cuts_metrics_back_to_the_checkpoint(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": s, "loss": 1.0}) for s in (1, 2, 3, 4)]
    path.write_text("\n".join(lines) + '\n{"step": 5, "lo')  # torn by a crash
    cut_back(path, 2)
    assert path.read_text() == "\n".join(lines[:2]) + "\n"
    assert list(tmp_path.iterdir()) == [path]


def test_records_reach_the_file_and_tensorboard(tmp_path):
    log = RunLog(tmp_path / "run", tmp_path)
    log.record({"step": 1, "loss": 2.5, "mfu": None, "skipped": 0})
    log.record({"step": 2, "loss": math.nan})
    log.close()
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert rows == [
        {"step": 1, "loss": 2.5, "mfu": None, "skipped": 0},
        {"step": 2, "loss": None},  # JSON has no NaN
    ]
    events = EventAccumulator(str(tmp_path / "run"))
    events.Reload()
    assert events.Scalars("loss")[0].value == 2.5 and "mfu" not in events.Tags()["scalars"]


def test_other_ranks_write_nothing(tmp_path):
    log = RunLog(tmp_path / "run", tmp_path, is_main=False)
    log.say("hello")
    log.record({"step": 1})
    log.write_json("x.json", {})
    log.close()
    assert list(tmp_path.iterdir()) == []


def test_step_line_has_mfu_only_where_it_is_known():
    values = {
        "step": 3, "epoch": 0, "tokens": 10, "loss": 1.5, "lr": 1e-3, "grad_norm": 0.5,
        "tokens_per_second": 12_345.0, "mfu": None, "data_wait_share": 0.021,
        "data_wait_ms_p99": 7.0, "skipped": 0,
        "memory_bytes": 1_500_000_000,
    }  # fmt: skip
    line = step_line(values, 10, 65)
    assert line.startswith("step  3/10  epoch 0  loss 1.5000") and "mfu" not in line
    assert "12.3k tok/s  wait  2.1%, p99 7 ms  mem 1.5GB  eta 1m05s" in line
    assert "mfu 43.2%" in step_line(values | {"mfu": 0.432}, 10, 65)
    assert step_line(values | {"skipped": 2}, 10, 65).endswith("skipped 2")


def test_numbers_for_people():
    assert [human(n) for n in (0, 999, 1234, 999_999, 2.5e9)] == ["0", "999", "1.23k", "1M", "2.5G"]
    assert [duration(s) for s in (7.4, 185, 3720)] == ["7s", "3m05s", "1h02m"]
