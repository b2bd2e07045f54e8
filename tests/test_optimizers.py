"""Muon for layers' matrices and AdamW for the rest, against both of torch's by hand."""

import math

import pytest
import torch

from engine import Engine
from feed import targets_of
from loss import IGNORE
from model import GPT, GPTConfig
from tests.conftest import ragged_batch

CONFIG = GPTConfig(vocab_size=97, seq_len=16, n_layer=2, n_head=2, n_embd=32)


def test_a_muon_step_is_torchs_two_optimizers_on_clipped_mean_gradients():
    ours, reference = GPT(CONFIG, seed=3).double(), GPT(CONFIG, seed=3).double()
    engine = Engine(ours, optimizer="muon")
    named = dict(reference.named_parameters())
    hidden = [p for name, p in named.items() if name.startswith("h.") and p.dim() == 2]
    vectors = [p for p in named.values() if p.dim() < 2]
    groups = [
        {"params": [named["wte.weight"], named["wpe.weight"]], "weight_decay": 0.1},
        {"params": vectors, "weight_decay": 0.0},
    ]
    assert len(hidden) == 8
    adamw = torch.optim.AdamW(groups, betas=(0.9, 0.95), foreach=False)
    muon = torch.optim.Muon(hidden, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for step, lr in enumerate((1e-2, 2e-2, 5e-3)):
        batch = ragged_batch()
        batch["input_ids"] = (batch["input_ids"] + step) % 97
        engine.micro_step(batch)
        engine.update(lr)
        for group in [*adamw.param_groups, *muon.param_groups]:
            group["lr"] = lr
        targets = targets_of(batch)
        loss = reference(batch["input_ids"], targets).total / (targets != IGNORE).sum()
        reference.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        adamw.step()
        muon.step()
    for (name, theirs), p in zip(named.items(), ours.parameters(), strict=True):
        torch.testing.assert_close(p, theirs, rtol=1e-6, atol=1e-9, msg=name)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_skipped_step_leaves_all_state_alone(optimizer):
    engine = Engine(GPT(CONFIG, seed=3), optimizer=optimizer)
    engine.micro_step(ragged_batch())
    engine.update(1e-2)
    before = {
        k: t.clone() for k, t in engine.tensors().items() if not k.startswith("optimizer.spikes.")
    }
    engine.micro_step(ragged_batch())
    engine.model.wte.weight.grad[0, 0] = math.nan
    assert engine.update(1e-2)["skipped"].item() == 1
    assert all(torch.equal(before[k], engine.tensors()[k]) for k in before)
    assert all(p.grad is None for p in engine.names)


def test_all_state_is_there_from_the_start():
    for optimizer in ("adamw", "muon"):
        engine = Engine(GPT(CONFIG), optimizer=optimizer)
        names = set(engine.tensors())
        engine.micro_step(ragged_batch())
        engine.update(1e-2)
        assert names == set(engine.tensors())
    assert "optimizer.momentum_buffer.h.0.mlp.c_fc.weight" in names
    assert "optimizer.exp_avg.h.0.mlp.c_fc.weight" not in names
