"""Which steps are skipped, against the same rule in plain Python."""

import math
import statistics

import pytest
import torch

from engine import Engine
from model import GPT, GPTConfig
from spikes import SpikeGuard
from tests.conftest import ragged_batch

CPU = torch.device("cpu")


def reference(values: list[tuple[float, float]], deviations: float) -> list[bool]:
    good, skipped = [], []
    for loss, norm in values:
        recent = good[-SpikeGuard.WINDOW :]
        spike = not (math.isfinite(loss) and math.isfinite(norm))
        if deviations and len(recent) >= SpikeGuard.LEAST and not spike:
            for value, past in zip((loss, norm), zip(*recent, strict=True), strict=True):
                spike |= value - statistics.fmean(past) > deviations * statistics.pstdev(past)
        skipped.append(spike)
        if not spike:
            good.append((loss, norm))
    return skipped


@pytest.mark.parametrize("deviations", [0.0, 3.0])
def test_the_rule_is_that_of_plain_python(deviations):
    generator = torch.Generator().manual_seed(1)
    values = (2 + torch.randn(400, 2, generator=generator, dtype=torch.float64)).tolist()
    values[10] = [50.0, 2.0]  # too early to judge
    values[200] = [9.0, 2.0]
    values[201] = [2.0, 30.0]
    values[250] = [math.nan, 2.0]
    values[251] = [2.0, math.inf]
    guard = SpikeGuard(deviations, CPU)
    found, in_a_row = [], []
    for loss, norm in values:
        found.append(guard.judge(*map(torch.tensor, (loss, norm))).item())
        in_a_row.append(guard.skips_in_a_row.item())
    assert found == reference(values, deviations)
    assert found[250] and found[251] and in_a_row[251] == 2 and in_a_row[252] == found[252]
    assert (found[200], found[201], found[10]) == (bool(deviations), bool(deviations), False)


def test_a_spike_changes_neither_weights_nor_optimizer_and_is_counted():
    gpt = GPT(GPTConfig(vocab_size=97, seq_len=16, n_layer=2, n_head=2, n_embd=32), seed=3)
    engine = Engine(gpt, skip_spikes=6.0)
    for _ in range(SpikeGuard.LEAST + 1):
        engine.micro_step(ragged_batch())
        assert engine.update(1e-3)["skipped"].item() == 0
    before = {
        k: t.clone() for k, t in engine.tensors().items() if not k.startswith("optimizer.spikes.")
    }
    for n in (1, 2):
        engine.micro_step(ragged_batch())
        for p in engine.names:
            p.grad *= 1e3
        stats = engine.update(1e-3)
        assert (stats["skipped"].item(), stats["skips_in_a_row"].item()) == (1, n)
    assert all(torch.equal(before[k], engine.tensors()[k]) for k in before)
    engine.micro_step(ragged_batch())
    stats = engine.update(1e-3)
    assert (stats["skipped"].item(), engine.spikes.skips_in_a_row.item()) == (0, 0)
    assert stats["skips_in_a_row"].item() == 2  # the most so far
