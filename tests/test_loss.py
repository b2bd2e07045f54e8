"""The chunked loss of the head against the plain one and autograd."""

import pytest
import torch
import torch.nn.functional as F

import loss
from loss import IGNORE, linear_cross_entropy


def inputs(n, dtype=torch.float32, vocab=97, padded=128, channels=32):
    generator = torch.Generator().manual_seed(n)
    x = torch.randn(n, channels, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(padded, channels, generator=generator).to(dtype).requires_grad_()
    targets = torch.randint(0, vocab, (n,), generator=generator)
    targets[torch.rand(n, generator=generator) < 0.2] = IGNORE
    return x, weight, targets, vocab


def plain(x, weight, targets, vocab, z_loss=0.0):
    """(total, nats, sum of Z, largest Z) from all logits at once."""
    logits = F.linear(x, weight).float() if x.dtype != torch.float64 else F.linear(x, weight)
    logits = logits[:, :vocab]
    z = logits.logsumexp(1)[targets != IGNORE]
    nats = F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="sum")
    return nats + z_loss * z.square().sum(), nats, z.sum(), z.max()


def ours(x, weight, targets, vocab, z_loss=0.0):
    """The same of the chunked loss."""
    found = linear_cross_entropy(x[None], weight, targets[None], vocab, z_loss)
    assert (found.nats[targets[None] == IGNORE] == 0).all()
    z = found.z[targets[None] != IGNORE]
    return found.total, found.nats.sum(), z.sum(), z.max() if len(z) else None


@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
@pytest.mark.parametrize("n", [1, 9, 10, 31])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12)], ids=str
)
def test_loss_and_gradients_are_those_of_all_logits_at_once(
    monkeypatch, n, dtype, tolerance, z_loss
):
    monkeypatch.setattr(loss, "CHUNK", 10)
    monkeypatch.setattr(loss, "MOST", 100)
    x, weight, targets, vocab = inputs(n, dtype)
    targets[0] = 3
    found = ours(x, weight, targets, vocab, z_loss)
    (3 * found[0]).backward()
    mine = x.grad.clone(), weight.grad.clone()
    x.grad = weight.grad = None
    expected = plain(x, weight, targets, vocab, z_loss)
    (3 * expected[0]).backward()
    for a, b in zip((*found, *mine), (*expected, x.grad, weight.grad), strict=True):
        torch.testing.assert_close(a.detach(), b.detach(), rtol=tolerance, atol=10 * tolerance)
    assert (mine[1][vocab:] == 0).all()


def test_long_inputs_have_larger_chunks_and_the_same_loss(monkeypatch):
    x, weight, targets, vocab = inputs(31)
    whole = ours(x, weight, targets, vocab)
    monkeypatch.setattr(loss, "CHUNK", 1)
    monkeypatch.setattr(loss, "MOST", 4)  # of 8 positions
    for a, b in zip(whole, ours(x, weight, targets, vocab), strict=True):
        torch.testing.assert_close(a, b)


def test_no_target_is_no_loss_and_no_gradient():
    x, weight, targets, vocab = inputs(7)
    total, nats, _, _ = ours(x, weight, torch.full_like(targets, IGNORE), vocab, 1e-2)
    total.backward()
    assert total.item() == nats.item() == 0
    assert (x.grad == 0).all() and (weight.grad == 0).all()


def test_bf16_products_are_as_near_as_those_of_the_plain_loss():
    x, weight, targets, vocab = inputs(200)
    exact = plain(x, weight, targets, vocab)[0]
    exact.backward()
    reference, x.grad, weight.grad = (x.grad, weight.grad), None, None
    errors = []
    for function in (ours, plain):
        with torch.autocast("cpu", torch.bfloat16):
            total = function(x, weight, targets, vocab)[0]
        total.backward()
        assert total.dtype == x.grad.dtype == torch.float32
        error = [(total - exact).abs() / exact]
        pairs = zip((x.grad, weight.grad), reference, strict=True)
        errors.append(torch.stack(error + [(a - b).norm() / b.norm() for a, b in pairs]))
        x.grad = weight.grad = None
    assert (errors[0] < 1.1 * errors[1] + 1e-4).all(), errors


def test_validation_forms_no_gradient():
    x, weight, targets, vocab = inputs(20)
    with torch.no_grad():
        total, *_ = ours(x, weight, targets, vocab)
    assert not total.requires_grad
    torch.testing.assert_close(total, plain(x, weight, targets, vocab)[0].detach())
