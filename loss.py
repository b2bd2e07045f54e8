"""The loss of the output head, without ever holding all logits.

Of B T = 8,192 positions and V = 50,304 words the logits alone take 1.6 GB in float32, and autograd
holds them three times. Here they exist for ``CHUNK`` positions at once: the forward pass forms the
gradients as well, from the same logits, and the backward pass only hands them on.
"""

from typing import NamedTuple

import torch

IGNORE = -100  # a position without a target; F.cross_entropy's default ignore_index
CHUNK = 1024  # positions; more where there would be more than MOST chunks
MOST = 16  # torch.compile unrolls the loop


class Loss(NamedTuple):
    """In float32 or better. Only ``total`` has a gradient."""

    total: torch.Tensor  # scalar: the sum of nats + z_loss * z^2
    nats: torch.Tensor  # each position's cross-entropy (B, T), 0 where there is no target
    z: torch.Tensor  # each position's log-sum-exp of the logits (B, T)


def linear_cross_entropy(
    x: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    vocab_size: int,
    z_loss: float = 0.0,
) -> Loss:
    """Cross-entropy of ``softmax(x weight^T)`` and, with ``z_loss``, PaLM's regularizer of the
    log-sum-exp (Chowdhery et al. 2022, section 5).

    ``x`` (B, T, C), ``weight`` (V, C), ``targets`` int64 (B, T), some of them IGNORE; rows of
    ``weight`` from ``vocab_size`` on are no words. Products are made in autocast's dtype where it
    is enabled. The gradient may be taken once.
    """
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    with_gradient = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    total, nats, z = _LinearCrossEntropy.apply(
        x.flatten(0, 1), weight, targets.flatten(), vocab_size, z_loss, dtype, with_gradient
    )
    return Loss(total, nats.view_as(targets), z.view_as(targets))


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, targets, vocab_size, z_loss, dtype, with_gradient):
        wide = torch.promote_types(dtype, torch.float32)
        nats, z = (torch.empty(len(x), dtype=wide, device=x.device) for _ in range(2))
        grad_x = torch.empty_like(x) if with_gradient else None
        grad_weight = None
        chunk = max(CHUNK, -(-len(x) // MOST))
        with torch.autocast(x.device.type, enabled=False):
            words = weight.to(dtype)
            for i in range(0, len(x), chunk):
                here = slice(i, i + chunk)
                part, target = x[here].to(dtype), targets[here, None]
                scored = target != IGNORE
                target = target.clamp(min=0)
                logits = (part @ words.T).to(wide)  # (chunk, V)
                logits[:, vocab_size:] = -torch.inf
                chosen = logits.gather(1, target)
                # each pass over the logits costs as much as a layer: the softmax takes their place
                largest = logits.amax(1, keepdim=True)
                exponentials = logits.sub_(largest).exp_()
                total = exponentials.sum(1, keepdim=True)
                log_sum = largest + total.log()
                nats[here] = (log_sum - chosen).masked_fill(~scored, 0)[:, 0]
                z[here] = log_sum[:, 0]
                if not with_gradient:
                    continue
                # d loss / d logits = softmax (1 + 2 z_loss z), less 1 at the target
                scale = ((1 + 2 * z_loss * log_sum) / total).masked_fill(~scored, 0)
                slope = exponentials.mul_(scale).scatter_add_(1, target, -scored.to(wide))
                slope = slope.to(dtype)
                grad_x[here] = slope @ words
                product = slope.T @ part
                if grad_weight is None:
                    grad_weight = product.to(weight.dtype)
                else:
                    grad_weight += product
            penalty = z_loss * z.square().masked_fill(targets == IGNORE, 0).sum()
        ctx.gradients = grad_x, grad_weight
        ctx.mark_non_differentiable(nats, z)
        return nats.sum() + penalty, nats, z

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_total, *_others):
        (grad_x, grad_weight), ctx.gradients = ctx.gradients, None
        return grad_x.mul_(grad_total), grad_weight.mul_(grad_total), None, None, None, None, None
