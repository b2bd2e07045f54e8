"""The GPT: sizes, initialisation, causality, and a vocabulary padded without a trace."""

import pytest
import torch
import torch.nn.functional as F

from loss import IGNORE
from model import GPT, PRESETS, GPTConfig

CONFIG = GPTConfig(vocab_size=97, seq_len=16, n_layer=2, n_head=2, n_embd=32)


@pytest.mark.parametrize(
    ("name", "published"),  # Radford et al. 2019 and the released weights, in millions
    [("small", 124.4), ("medium", 354.8), ("large", 774.0), ("xl", 1557.6)],
)
def test_presets_have_gpt2s_sizes(name, published):
    config = GPTConfig.preset(name, vocab_size=50257, seq_len=1024)
    L, C = config.n_layer, config.n_embd
    block = 12 * C * C + 13 * C  # 4 matrices, their biases, 2 LayerNorms
    count = L * block + 2 * C + (50257 + 1024) * C
    assert count / 1e6 == pytest.approx(published, abs=0.1)
    if name == "small":  # the formula above is the model
        padding = (config.padded_vocab_size - 50257) * C
        assert sum(p.numel() for p in GPT(config).parameters()) == count + padding


def test_tiny_has_about_a_million_parameters():
    gpt = GPT(GPTConfig.preset("tiny", vocab_size=257, seq_len=512))
    assert 0.8e6 < sum(p.numel() for p in gpt.parameters()) < 1.2e6
    assert set(PRESETS) == {"tiny", "small", "medium", "large", "xl"}


def test_seed_alone_decides_the_weights():
    torch.manual_seed(1)
    a = GPT(CONFIG, seed=7)
    torch.manual_seed(2)
    b, c = GPT(CONFIG, seed=7), GPT(CONFIG, seed=8)
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))
    assert not torch.equal(a.wte.weight, c.wte.weight)
    assert a.h[0].mlp.c_fc.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert a.h[0].mlp.c_proj.weight.std().item() == pytest.approx(0.01, rel=0.1)  # / sqrt(4)


def test_a_later_token_never_changes_an_earlier_logit():
    gpt, ids = GPT(CONFIG).eval(), torch.arange(16).view(1, 16)
    changed = ids.clone()
    changed[0, 9] = 50
    a, b = gpt(ids), gpt(changed)
    assert torch.equal(a[:, :9], b[:, :9]) and not torch.equal(a[:, 9:], b[:, 9:])


def test_padded_rows_of_the_vocabulary_are_neither_counted_nor_sampled():
    gpt = GPT(CONFIG).double().eval()
    assert gpt.wte.weight.shape[0] == 128
    with torch.no_grad():
        gpt.wte.weight[97:] = 100.0  # would win every product if it were looked at
    ids = torch.randint(0, 97, (2, 16))
    logits = gpt(ids)
    assert logits.shape == (2, 16, 97)
    loss = gpt(ids, ids).total
    expected = F.cross_entropy(logits.flatten(0, 1), ids.flatten(), reduction="sum")
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    loss.backward()
    assert gpt.wte.weight.grad[97:].abs().max() == 0
    sampled = gpt.generate(ids[:1], 40, temperature=5.0, top_k=None)
    assert sampled.shape == (1, 56) and sampled.max() < 97


def test_loss_is_a_sum_over_targets():
    gpt, ids = GPT(CONFIG).double(), torch.randint(0, 97, (2, 16))
    targets = ids.clone()
    targets[0] = IGNORE
    whole, second = gpt(ids, targets).total, gpt(ids[1:], ids[1:]).total
    torch.testing.assert_close(whole, second)


def test_generation_stops_before_eos_and_is_greedy_at_temperature_zero():
    gpt, prompt = GPT(CONFIG).eval(), torch.tensor([[5]])
    first = gpt(prompt)[0, -1].argmax().item()
    assert gpt.generate(prompt, 1, temperature=0)[0, -1].item() == first
    assert gpt.generate(prompt, 10, temperature=0, eos_id=first).shape == (1, 1)


def test_flops_per_token_is_the_palm_formula_at_124m():
    gpt = GPT(GPTConfig.preset("small", vocab_size=50257, seq_len=1024))
    multiplied = 124_475_904 - 1024 * 768
    assert gpt.flops_per_token() == 6 * multiplied + 12 * 12 * 768 * 1024
