"""The step: its arithmetic against one big batch, torch's own optimizer and plain loops."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import launch
from engine import Engine, check_compile_mode, learning_rate
from feed import targets_of
from loss import IGNORE
from model import GPT, GPTConfig
from tests.conftest import ragged_batch

CONFIG = GPTConfig(vocab_size=97, seq_len=16, n_layer=2, n_head=2, n_embd=32)


def double_model() -> GPT:
    return GPT(CONFIG, seed=3).double()


def split(batch, parts):
    return [
        dict(zip(batch, values, strict=True))
        for values in zip(*(t.chunk(parts) for t in batch.values()), strict=True)
    ]


def test_targets_are_the_next_tokens_and_end_with_the_document():
    batch = ragged_batch()
    ids, mask, targets = batch["input_ids"], batch["mask"], targets_of(batch)
    for b in range(6):
        for t in range(16):
            follows = t + 1 < 16 and mask[b, t] and mask[b, t + 1]
            assert targets[b, t] == (ids[b, t + 1] if follows else IGNORE)


@pytest.mark.parametrize("accumulation", [1, 2, 3, 6])
def test_gradients_of_unequal_micro_batches_equal_one_big_batch(accumulation):
    batch = ragged_batch()
    reference = double_model()
    targets = targets_of(batch)
    logits = reference(batch["input_ids"])
    F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE).backward()
    engine = Engine(double_model(), accumulation=accumulation)
    for micro in split(batch, accumulation):
        engine.micro_step(micro)
    gradients = engine.gradients()
    for name, p in reference.named_parameters():
        torch.testing.assert_close(gradients[name], p.grad, rtol=1e-9, atol=1e-14)


def test_update_is_torchs_adamw_on_clipped_mean_gradients():
    engine, reference = Engine(double_model()), double_model()
    matrices = [p for p in reference.parameters() if p.dim() >= 2]
    vectors = [p for p in reference.parameters() if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": 0.1},
        {"params": vectors, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), foreach=False)
    for step, lr in enumerate((1e-3, 2e-3, 5e-4)):
        batch = ragged_batch()
        batch["input_ids"] = (batch["input_ids"] + step) % 97
        engine.micro_step(batch)
        stats = engine.update(lr)

        for group in optimizer.param_groups:
            group["lr"] = lr
        targets = targets_of(batch)
        loss = reference(batch["input_ids"], targets).total / (targets != IGNORE).sum()
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        optimizer.step()
        assert stats["loss"].item() == pytest.approx(loss.item(), rel=1e-9)
        assert stats["grad_norm"].item() == pytest.approx(norm.item(), rel=1e-9)
        assert (stats["targets"].item(), stats["tokens"].item()) == (55, 60)
    for ours, theirs in zip(engine.model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-9)


def test_clipping_can_be_turned_off():
    engine, reference = Engine(double_model(), grad_clip=0.0), double_model()
    engine.micro_step(ragged_batch())
    norm = engine.update(1e-3)["grad_norm"]
    assert norm > 1.0  # or this test would say nothing
    optimizer = Engine(reference, grad_clip=2 * norm.item())
    optimizer.micro_step(ragged_batch())
    optimizer.update(1e-3)
    for ours, theirs in zip(engine.model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("where", ["gradient", "loss"])
def test_step_that_is_not_finite_changes_nothing_and_the_next_one_does(where):
    engine = Engine(double_model())
    engine.micro_step(ragged_batch())
    engine.update(1e-3)
    before = {k: t.clone() for k, t in engine.tensors().items() if "spikes" not in k}
    engine.micro_step(ragged_batch())
    if where == "gradient":
        engine.model.wpe.weight.grad[0, 0] = math.nan
    else:
        engine.sums[0] = math.inf
    assert engine.update(1e-3)["skipped"].item() == 1
    assert all(torch.equal(t, engine.tensors()[name]) for name, t in before.items())
    engine.micro_step(ragged_batch())
    assert engine.update(1e-3)["skipped"].item() == 0
    assert not torch.equal(before["wte.weight"], engine.tensors()["wte.weight"])


def test_batch_without_a_single_target_is_skipped():
    batch = ragged_batch()
    batch["mask"] = torch.zeros_like(batch["mask"])
    engine = Engine(double_model())
    before = engine.model.wte.weight.clone()
    engine.micro_step(batch)
    assert engine.update(1e-3)["skipped"].item() == 1
    assert torch.equal(before, engine.model.wte.weight)


def test_gradients_start_each_step_at_zero():
    once, twice = Engine(double_model()), Engine(double_model())
    twice.micro_step(ragged_batch())
    twice.update(0.0)  # a step that moves nothing, weight decay included
    for engine in (once, twice):
        engine.micro_step(ragged_batch())
    a, b = once.gradients(), twice.gradients()
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_calls_out_of_order_say_so():
    engine = Engine(double_model(), accumulation=2)
    with pytest.raises(RuntimeError, match="0 of 2 micro-steps"):
        engine.update(1e-3)
    engine.micro_step(ragged_batch())
    with pytest.raises(RuntimeError, match="1 of 2 micro-steps"):
        engine.gradients()
    engine.micro_step(ragged_batch())
    with pytest.raises(RuntimeError, match="update.. is due"):
        engine.micro_step(ragged_batch())


def test_validation_is_target_weighted_over_batches():
    batch, model = ragged_batch(), double_model()
    result = Engine(model).validate(split(batch, 3), torch.full((97,), 2))
    targets = targets_of(batch)
    loss = F.cross_entropy(model(batch["input_ids"]).flatten(0, 1), targets.flatten())
    assert result["loss"] == pytest.approx(loss.item(), rel=1e-12)
    assert result["bpb"] == pytest.approx(loss.item() / math.log(2) / 2, rel=1e-12)


def test_validation_restores_train_mode_after_an_exception():
    engine = Engine(double_model())

    def broken():
        yield ragged_batch()
        raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        engine.validate(broken())
    assert engine.model.training


def test_memory_report_counts_parameters_gradients_and_optimizer():
    engine = Engine(GPT(CONFIG))
    size = sum(p.numel() for p in engine.model.parameters()) * 4
    report = engine.memory_report()
    assert report["parameters"] == size and report["gradients"] == 0
    spikes = sum(t.nbytes for t in engine.spikes.tensors().values())
    assert report["optimizer"] == 2 * size + 4 * len(engine.names) + spikes
    engine.micro_step(ragged_batch())
    assert engine.memory_report()["gradients"] == size


def test_tensors_carry_plain_names_when_compiled():
    plain, compiled = Engine(GPT(CONFIG)), Engine(GPT(CONFIG), compile_mode="default")
    assert plain.tensors().keys() == compiled.tensors().keys()
    assert "wte.weight" in plain.tensors() and "optimizer.exp_avg.wte.weight" in plain.tensors()


@pytest.mark.slow
def test_compiled_step_equals_the_eager_one():
    eager, compiled = Engine(GPT(CONFIG)), Engine(GPT(CONFIG), compile_mode="default")
    for engine in (eager, compiled):
        engine.micro_step(ragged_batch())
    ours, theirs = compiled.gradients(), eager.gradients()
    for name in theirs:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-4, atol=1e-6)
    assert compiled.update(1e-3)["loss"].item() == pytest.approx(eager.update(1e-3)["loss"].item())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "recompute"),
    [({}, "none"), ({"arch": "llama", "n_kv_head": 1, "qk_norm": True}, "selective")],
    ids=["gpt2", "llama, document mask, recomputed"],
)
def test_compiled_step_is_one_graph_and_is_never_compiled_again(options, recompute):
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    gpt = GPT(replace(CONFIG, **options), seed=3, recompute=recompute)
    engine = Engine(gpt, accumulation=2, doc_mask=bool(options), compile_mode="default")
    engine.warm_up(3, 16)
    assert counters["stats"]["unique_graphs"] == 2  # training and validation
    for step in range(4):
        batch = ragged_batch() | {"doc_ids": torch.arange(96).view(6, 16) // (5 + step) % 3}
        batch["doc_ids"] = batch["doc_ids"].sort(dim=1).values
        if step == 2:
            batch["mask"] = torch.zeros_like(batch["mask"])
        for micro in split(batch, 2):
            engine.micro_step(micro)
        engine.update(1e-3, stop=step == 3, module_norms=step == 1)
        engine.validate(split(batch, 2), torch.ones(97, dtype=torch.int64))
    assert counters["stats"]["unique_graphs"] == 2
    assert not counters["graph_break"], counters["graph_break"]


def test_norms_by_module_are_those_of_weights_and_gradients():
    engine = Engine(double_model(), accumulation=2)
    for micro in split(ragged_batch(), 2):
        engine.micro_step(micro)
    weights = {name: p.detach().clone() for p, name in engine.names.items()}
    gradients = engine.gradients()
    stats = engine.update(1e-3, module_norms=True)
    for kind, tensors in (("weight", weights), ("gradient", gradients)):
        expected = [t for name, t in tensors.items() if name.startswith("h.1.mlp.c_fc.")]
        norm = torch.cat([t.flatten() for t in expected]).norm()
        torch.testing.assert_close(stats[f"{kind}_norm/h.1.mlp.c_fc"], norm)
    whole = sum(v**2 for k, v in stats.items() if k.startswith("gradient_norm/")) ** 0.5
    torch.testing.assert_close(whole, stats["grad_norm"])


def test_first_positions_of_long_blocks_have_a_loss_of_their_own(monkeypatch):
    monkeypatch.setattr("engine.FIRST", 5)
    batch, model = ragged_batch(), double_model()
    engine = Engine(model)
    targets = targets_of(batch)
    logits = model(batch["input_ids"])[:, :5].flatten(0, 1).detach()
    head = F.cross_entropy(logits, targets[:, :5].flatten()).item()
    result = engine.validate(split(batch, 2))
    engine.micro_step(batch)
    assert engine.update(1e-3)["loss_1024"].item() == pytest.approx(head, rel=1e-9)
    assert result["loss_1024"] == pytest.approx(head, rel=1e-9)


def test_learning_rate_warms_up_linearly_then_follows_the_cosine():
    rates = [learning_rate(s, peak=1.0, warmup=4, total=12, min_ratio=0.1) for s in range(1, 15)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    cosine = [0.1 + 0.45 * (1 + math.cos(math.pi * k / 9)) for k in range(1, 9)]
    assert rates[4:12] == pytest.approx(cosine) and rates[11] > 0.1  # the last step still learns
    assert rates[12] == rates[13] == pytest.approx(0.1)
    assert sorted(rates[3:], reverse=True) == rates[3:]


def test_a_step_draws_no_random_number():
    """Why a checkpoint holds no generator's state."""
    engine = Engine(double_model())
    before = torch.get_rng_state()
    engine.warm_up(6, 16)
    engine.micro_step(ragged_batch())
    engine.update(1e-3)
    engine.validate([ragged_batch()])
    assert torch.equal(torch.get_rng_state(), before)


def test_warming_up_changes_nothing():
    warm, cold = Engine(double_model()), Engine(double_model())
    warm.warm_up(6, 16)
    for engine in (warm, cold):
        engine.micro_step(ragged_batch())
        engine.update(1e-3)
    for name, tensor in cold.tensors().items():
        assert torch.equal(tensor, warm.tensors()[name]), name


@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
def test_z_loss_is_trained_on_and_the_log_sum_exp_reported_beside_the_plain_loss(z_loss):
    engine, reference, batch = Engine(double_model(), z_loss=z_loss), double_model(), ragged_batch()
    engine.micro_step(batch)
    targets = targets_of(batch)
    logits = reference(batch["input_ids"])
    z = logits.logsumexp(-1)[targets != IGNORE]
    nats = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE)
    (nats + z_loss * z.square().mean()).backward()
    gradients, stats = engine.gradients(), engine.update(1e-3)
    for name, p in reference.named_parameters():
        torch.testing.assert_close(gradients[name], p.grad, rtol=1e-9, atol=1e-14)
    for name, expected in (("loss", nats), ("z_mean", z.mean()), ("z_max", z.max())):
        torch.testing.assert_close(stats[name], expected.detach(), rtol=1e-12, atol=0)


def test_cuda_graphs_take_one_micro_batch_a_step():
    parse = launch.flag_parser().parse_args
    graphs = parse(["--compile", "--compile-mode", "reduce-overhead"])
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    with pytest.raises(SystemExit, match="reduce-overhead: CUDA graphs take one .* not 2: raise"):
        check_compile_mode(graphs, 2, gpu)
    check_compile_mode(graphs, 1, gpu)
    check_compile_mode(graphs, 2, cpu)
    check_compile_mode(parse(["--compile"]), 2, gpu)
    without = parse(["--compile", "--compile-mode", "max-autotune-no-cudagraphs"])
    check_compile_mode(without, 2, gpu)


def test_wsd_stays_at_the_peak_and_then_falls_as_one_minus_the_root():
    options = {"peak": 2.0, "warmup": 3, "total": 20, "min_ratio": 0.1, "schedule": "wsd"}
    rates = [learning_rate(s, **options, decay=5) for s in range(1, 25)]
    assert rates[:3] == pytest.approx([2 / 3, 4 / 3, 2.0]) and rates[3:15] == [2.0] * 12
    for k in range(1, 6):  # the last five steps: the minimum lies behind them
        assert rates[14 + k] == pytest.approx(2.0 * (0.1 + 0.9 * (1 - math.sqrt(k / 6))))
    assert rates[20:] == pytest.approx([0.2] * 4)
    constant = [learning_rate(s, **options | {"schedule": "constant"}) for s in range(4, 25)]
    assert constant == [2.0] * 21
