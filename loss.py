"""The loss of the output head, without ever holding all logits.

Of B T = 8,192 positions and V = 50,304 words the logits alone take 1.6 GB in float32, and autograd
holds them three times. Here they exist for ``CHUNK`` positions at once: the forward pass forms the
gradients as well, from the same logits, and the backward pass only hands them on.
"""

from typing import NamedTuple

import torch

IGNORE = -100  # a position without a target; F.cross_entropy's default ignore_index
CHUNK = 1024  # positions


class Loss(NamedTuple):
    """Scalars in float32 or better, over the positions that have a target.

    Only ``total`` has a gradient. Z is the log-sum-exp of a position's logits.
    """

    total: torch.Tensor  # nats + z_loss * sum of Z^2
    nats: torch.Tensor  # sum of the cross-entropies
    z_sum: torch.Tensor
    z_max: torch.Tensor  # -inf where there is no target


def linear_cross_entropy(
    x: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    vocab_size: int,
    z_loss: float = 0.0,
) -> Loss:
    """Cross-entropy of ``softmax(x weight^T)`` and, with ``z_loss``, PaLM's regularizer of the
    log-sum-exp (Chowdhery et al. 2022, section 5).

    ``x`` (N, C), ``weight`` (V, C), ``targets`` int64 (N,), some of them IGNORE; rows of ``weight``
    from ``vocab_size`` on are no words. Products are made in autocast's dtype where it is enabled.
    The gradient may be taken once.
    """
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    with_gradient = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    return Loss(
        *_LinearCrossEntropy.apply(x, weight, targets, vocab_size, z_loss, dtype, with_gradient)
    )


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, targets, vocab_size, z_loss, dtype, with_gradient):
        wide = torch.promote_types(dtype, torch.float32)
        total, nats, z_sum = (torch.zeros((), dtype=wide, device=x.device) for _ in range(3))
        z_max = torch.full((), -torch.inf, dtype=wide, device=x.device)
        grad_x = torch.empty_like(x) if with_gradient else None
        grad_weight = torch.zeros_like(weight) if with_gradient else None
        with torch.autocast(x.device.type, enabled=False):
            words = weight.to(dtype)
            for i in range(0, len(x), CHUNK):
                part, target = x[i : i + CHUNK].to(dtype), targets[i : i + CHUNK, None]
                scored = target != IGNORE
                target = target.clamp(min=0)
                logits = (part @ words.T).to(wide)  # (chunk, V)
                logits[:, vocab_size:] = -torch.inf
                z = logits.logsumexp(1, keepdim=True)
                nats += (z - logits.gather(1, target)).masked_fill(~scored, 0).sum()
                total += z_loss * z.square().masked_fill(~scored, 0).sum()
                z_sum += z.masked_fill(~scored, 0).sum()
                z_max = torch.maximum(z_max, z.masked_fill(~scored, -torch.inf).max())
                if not with_gradient:
                    continue
                # d loss / d logits = softmax (1 + 2 z_loss Z), less 1 at the target
                slope = logits.sub_(z).exp_().mul_(1 + 2 * z_loss * z)
                slope.scatter_add_(1, target, torch.full_like(z, -1))
                slope = slope.masked_fill_(~scored, 0).to(dtype)
                grad_x[i : i + CHUNK] = slope @ words
                if grad_weight.dtype == dtype:
                    grad_weight.addmm_(slope.T, part)
                else:
                    grad_weight += slope.T @ part
        ctx.gradients = grad_x, grad_weight
        ctx.mark_non_differentiable(nats, z_sum, z_max)
        return total + nats, nats, z_sum, z_max

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_total, *_others):
        (grad_x, grad_weight), ctx.gradients = ctx.gradients, None
        return grad_x.mul_(grad_total), grad_weight.mul_(grad_total), None, None, None, None, None
