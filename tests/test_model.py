"""The GPT: sizes, initialisation, causality, and a vocabulary padded without a trace."""

import pytest
import torch
import torch.nn.functional as F
import transformers

from loss import IGNORE
from model import GPT, PRESETS, RECOMPUTE, GPTConfig

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


LLAMAS = {  # options of the model, and of transformers' one
    "plain": ({}, {}),
    "grouped": ({"n_kv_head": 2}, {"num_key_value_heads": 2}),
    "untied": ({"tied": False}, {"tie_word_embeddings": False}),
}


@pytest.mark.parametrize("options", LLAMAS)
def test_llama_computes_what_transformers_llama_does(options):
    ours, theirs = LLAMAS[options]
    config = GPTConfig(97, 16, 2, 4, 96, arch="llama", **ours)
    gpt = GPT(config, seed=3).double()
    reference = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=128,
            hidden_size=96,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=16,
            rms_norm_eps=1e-5,
            rope_theta=10_000.0,
            **{"num_key_value_heads": 4, "tie_word_embeddings": True} | theirs,
        )
    ).double()
    with torch.no_grad():
        reference.model.embed_tokens.weight.copy_(gpt.wte.weight)
        reference.lm_head.weight.copy_(gpt.head)
        for layer, block in zip(reference.model.layers, gpt.h, strict=True):
            attention, kv = layer.self_attn, 24 * config.kv_heads
            q, k, v = block.attn.c_attn.weight.split((96, kv, kv))
            gate, up = block.mlp.c_fc.weight.chunk(2)
            for there, here in (
                *((attention.q_proj, q), (attention.k_proj, k), (attention.v_proj, v)),
                *((layer.mlp.gate_proj, gate), (layer.mlp.up_proj, up)),
                *((attention.o_proj, block.attn.c_proj.weight),),
                *((layer.mlp.down_proj, block.mlp.c_proj.weight),),
            ):
                there.weight.copy_(here)
    ids = torch.randint(0, 97, (2, 16), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(gpt(ids), reference(ids).logits[..., :97], rtol=1e-5, atol=1e-6)


def test_gpt2_computes_what_transformers_gpt2_does():
    gpt = GPT(CONFIG, seed=3).double()
    reference = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(128, 16, 32, 2, 2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    ).double()
    with torch.no_grad():
        for name, p in reference.transformer.named_parameters():
            ours = gpt.get_parameter(name)
            transposed = name.endswith("weight") and "c_" in name  # its Conv1D
            p.copy_(ours.T if transposed else ours)
    ids = torch.randint(0, 97, (2, 16), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(gpt(ids), reference(ids).logits[..., :97], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", PRESETS)
def test_llama_presets_have_the_sizes_of_gpt2s(monkeypatch, name):
    monkeypatch.setattr(GPT, "init_weights", lambda *_: None)  # there is nothing to fill
    with torch.device("meta"):
        gpts = [GPT(GPTConfig.preset(name, 50257, 1024, arch=arch)) for arch in ("gpt2", "llama")]
    gpt2, llama = (sum(p.numel() for p in gpt.parameters()) for gpt in gpts)
    assert llama == pytest.approx(gpt2, rel=0.03)


def test_heads_that_do_not_fit_are_refused():
    with pytest.raises(
        SystemExit, match="--kv-heads 3 does not divide the 4 heads of --model tiny"
    ):
        GPTConfig.preset("tiny", 257, 64, arch="llama", n_kv_head=3)


@pytest.mark.filterwarnings("ignore:A saved_tensors_hooks context")
@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_recomputing_a_layer_changes_no_gradient_and_saves_memory(recompute):
    config = GPTConfig(97, 16, 2, 4, 64, arch="llama")
    plain, saving = GPT(config, seed=3), GPT(config, seed=3, recompute=recompute)
    ids = torch.randint(0, 97, (2, 16), generator=torch.Generator().manual_seed(0))
    kept = []
    for gpt in (plain, saving):
        seen = {}

        def pack(t, seen=seen):
            seen[t.data_ptr()] = t.nbytes
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            loss = gpt(ids, ids)
        loss.total.backward()
        kept.append(sum(seen.values()))
    for p, q in zip(plain.parameters(), saving.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-7)
    assert kept[1] < kept[0] if recompute != "none" else kept[1] == kept[0]


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


def test_flops_do_not_count_what_is_looked_up():
    gpt = GPT(GPTConfig(97, 16, 2, 2, 32, arch="llama", tied=False))
    multiplied = sum(p.numel() for p in gpt.parameters()) - gpt.wte.weight.numel()
    assert gpt.flops_per_token() == 6 * multiplied + 12 * 2 * 32 * 16
