"""The training step: micro_step, update, validate. Driven by train.py, tests and notebooks alike.

    engine = Engine(model, accumulation=2)
    for batches in steps:                # each a list of 2 micro-batches
        for batch in batches:
            engine.micro_step(batch)
        stats = engine.update(lr)        # device tensors; read them only when you log

The loss of a step is the mean over all targets of the *global* batch. Every micro-batch adds the
gradient of its loss *sum*; ``update`` divides once by the number of targets on all ranks. Padding,
a ragged batch or another split over ranks and micro-batches therefore never changes a weight.
"""

import argparse
import contextlib
import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from flags import fraction, magnitude, not_negative
from loss import IGNORE
from model import GPT

Batch = dict[str, torch.Tensor]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("optimizer and step")
    group.add_argument("--lr", type=magnitude, default=6e-4, help="peak learning rate")
    group.add_argument("--min-lr-ratio", type=fraction, default=0.0, help="last LR / peak LR")
    group.add_argument(
        "--warmup-steps", type=not_negative, default=200, help="linear warm-up, steps"
    )
    group.add_argument(
        "--schedule",
        choices=["cosine", "wsd", "constant"],
        default="cosine",
        help="of the LR after the warm-up; wsd: constant, then a decay",
    )
    group.add_argument(
        "--decay-ratio", type=fraction, default=0.2, help="wsd: the decay's share of the schedule"
    )
    group.add_argument(
        "--lr-total-steps",
        type=not_negative,
        default=0,
        help="schedule horizon, steps (0: the run's length)",
    )
    group.add_argument(
        "--weight-decay", type=magnitude, default=0.1, help="AdamW, on matrices only"
    )
    group.add_argument(
        "--grad-clip", type=magnitude, default=1.0, help="gradient norm (0: no clipping)"
    )
    group.add_argument(
        "--z-loss", type=magnitude, default=0.0, help="weight of PaLM's z-loss, such as 1e-4"
    )
    group.add_argument("--compile", action="store_true", help="torch.compile the model")
    modes = ["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
    group.add_argument("--compile-mode", choices=modes, default="default")


def learning_rate(
    step: int,
    peak: float,
    warmup: int,
    total: int,
    min_ratio: float,
    schedule: str = "cosine",
    decay: int = 0,
) -> float:
    """LR of step ``step`` (1, 2, ...): linear warm-up, then down to ``min_ratio * peak``.

    ``cosine``: SGDR (Loshchilov & Hutter 2017) without restarts. ``wsd``: at the peak up to the
    last ``decay`` steps, over which it falls as 1 - sqrt (Haegele et al. 2024). ``constant``: at
    the peak. The minimum is reached behind the last step, ``total``, so that this one still
    learns, and kept from there on.
    """
    if step <= warmup:
        return peak * step / warmup
    if schedule == "constant":
        return peak
    begin = warmup if schedule == "cosine" else max(warmup, total - decay)
    progress = min(1.0, max(0, step - begin) / (total + 1 - begin))
    shape = 0.5 * (1 + math.cos(math.pi * progress)) if schedule == "cosine" else 1 - progress**0.5
    return peak * (min_ratio + (1 - min_ratio) * shape)


def targets_of(batch: Batch) -> torch.Tensor:
    """Next-token targets int64 (B, T): IGNORE at the last position and where no token follows."""
    ids, mask = batch["input_ids"], batch["mask"]
    targets = torch.full_like(ids, IGNORE)
    has_next = mask[:, :-1] & mask[:, 1:]
    targets[:, :-1] = torch.where(has_next, ids[:, 1:], IGNORE)
    return targets


class Engine:
    """One model, its AdamW and the arithmetic of a step, on one rank or under DDP.

    ``model`` must be on its device already. DDP is used when torch.distributed is initialised.
    ``accumulation`` is the number of micro-batches of every step, equal on all ranks. Raises
    RuntimeError when the calls come out of order.
    """

    def __init__(
        self,
        model: GPT,
        *,
        accumulation: int = 1,
        weight_decay: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.95),
        grad_clip: float = 1.0,
        z_loss: float = 0.0,
        autocast: torch.dtype | None = None,
        compile_mode: str | None = None,
    ) -> None:
        self.model = model  # plain: its names go into checkpoints
        self.device = next(model.parameters()).device
        self.accumulation = accumulation
        self.grad_clip, self.z_loss = grad_clip, z_loss
        self.autocast = autocast
        self.names = {p: name for name, p in model.named_parameters()}  # tied weights once
        self.optimizer = adamw(self.names, weight_decay, betas)
        self.world_size = dist.get_world_size() if dist.is_initialized() else 1
        self.compiled = model if compile_mode is None else torch.compile(model, mode=compile_mode)
        self.replica = self.compiled
        if dist.is_initialized():
            ids = [self.device.index] if self.device.type == "cuda" else None
            self.replica = DistributedDataParallel(
                self.compiled, device_ids=ids, gradient_as_bucket_view=True
            )
        self.micro_steps = 0  # of the step under way
        # of the step under way: nats, sum of Z, targets, tokens, ranks that wish to stop
        self.sums = torch.zeros(5, dtype=torch.float64, device=self.device)
        self.z_max = self.sums.new_full((), -math.inf)
        self.reduced = False  # whether sums are those of all ranks

    def warm_up(self, batch_size: int, seq_len: int) -> None:
        """Forward and backward of an empty micro-batch, to no effect on the model.

        torch.compile compiles, and DDP puts its buckets into the order in which gradients come,
        which it does after its first backward and which decides the order of summation: done
        before the first step, a resumed run adds up like one that was never interrupted.
        """
        ids = torch.zeros(batch_size, seq_len, dtype=torch.int64, device=self.device)
        for _ in range(2 if self.world_size > 1 else 1):  # DDP reorders in the second forward
            with self._autocast():
                loss = self.replica(ids, ids, self.z_loss)
            loss.total.backward()
            self.optimizer.zero_grad(set_to_none=True)

    def micro_step(self, batch: Batch) -> None:
        """Forward and backward of one micro-batch: adds to the step's gradients."""
        if self.micro_steps == self.accumulation:
            raise RuntimeError(f"update() is due: {self.accumulation} micro-steps are done")
        batch = self.to_device(batch)
        targets = targets_of(batch)
        # Gradients are exchanged in the last micro-step only. DDP reads the setting in forward.
        last = self.micro_steps == self.accumulation - 1
        local = self.world_size > 1 and not last
        with self.replica.no_sync() if local else contextlib.nullcontext():
            with self._autocast():
                loss = self.replica(batch["input_ids"], targets, self.z_loss)
            loss.total.backward()
        tokens, scored = batch["mask"].sum(), (targets != IGNORE).sum()
        counts = (loss.nats, loss.z_sum, scored, tokens)
        self.sums[:4] += torch.stack([count.double() for count in counts])
        self.z_max = torch.maximum(self.z_max, loss.z_max.double())
        self.micro_steps += 1

    def update(self, lr: float, stop: bool = False) -> dict[str, torch.Tensor]:
        """Clip, step the optimizer at ``lr`` and zero the gradients.

        Returns float64 scalars on the device, equal on all ranks: ``loss`` (nats per target over
        the global batch), ``grad_norm`` (before clipping), ``targets``, ``tokens``, ``skipped``: 1
        when loss or gradient was not finite, which leaves parameters and optimizer unchanged,
        ``stop``: how many ranks gave ``stop``, ``z_mean``: the mean log-sum-exp of the logits, and
        ``z_max``: the largest on this rank.
        """
        if stop:
            self.sums[4] += 1
        nats, z_sum, targets, tokens, stops = self._reduced_sums()
        gradients = [p.grad for p in self.names]
        # DDP averaged the ranks' sums: world_size / targets turns that into the mean over targets.
        to_mean = self.world_size / targets
        norm = torch.nn.utils.get_total_norm(gradients).double() * to_mean
        clip = (self.grad_clip / (norm + 1e-6)).clamp(max=1.0) if self.grad_clip else 1.0
        skipped = ~(torch.isfinite(norm) & torch.isfinite(nats))
        # The fused optimizer divides by grad_scale, and does nothing where found_inf is 1: scaling
        # costs no pass over the gradients and skipping no wait for the device.
        self.optimizer.grad_scale = (1 / (to_mean * clip)).float()
        self.optimizer.found_inf = skipped.float()
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        stats = {
            "loss": nats / targets,
            "grad_norm": norm,
            "targets": targets,
            "tokens": tokens,
            "skipped": skipped.double(),
            "stop": stops,
            "z_mean": z_sum / targets,
            "z_max": self.z_max,
        }
        self._start_step()
        return stats

    def gradients(self) -> dict[str, torch.Tensor]:
        """Gradient of the step's mean loss by parameter name, before clipping: between the last
        micro_step and update. A collective call under DDP."""
        targets = self._reduced_sums()[2]
        scale = self.world_size / targets
        return {name: p.grad * scale.to(p.grad.dtype) for p, name in self.names.items()}

    @torch.no_grad()
    def validate(
        self, batches: Iterable[Batch], token_bytes: torch.Tensor | None = None
    ) -> dict[str, float]:
        """Mean loss over the targets of every rank's ``batches`` (their number may differ).

        Returns ``loss`` in nats per target and, where ``token_bytes`` int64 (V,) gives the UTF-8
        length of each id, ``bpb``, bits per byte. A collective call under DDP.
        """
        sums = torch.zeros(3, dtype=torch.float64, device=self.device)
        training = self.model.training
        self.model.eval()
        try:
            for batch in map(self.to_device, batches):
                targets = targets_of(batch)
                with self._autocast():
                    loss = self.compiled(batch["input_ids"], targets).nats.double()
                scored = targets[targets != IGNORE]
                length = (
                    token_bytes[scored].sum() if token_bytes is not None else scored.new_zeros(())
                )
                sums += torch.stack([loss, torch.tensor(scored.numel()).to(loss), length.double()])
        finally:
            self.model.train(training)
        if self.world_size > 1:
            dist.all_reduce(sums)
        loss, scored, length = sums.tolist()
        result = {"loss": loss / scored if scored else math.nan}
        if token_bytes is not None:
            result["bpb"] = loss / math.log(2) / length if length else math.nan
        return result

    def memory_report(self) -> dict[str, int]:
        """Bytes on this rank by category; on a GPU also the allocator's peak."""
        state = [t for s in self.optimizer.state.values() for t in s.values()]
        gradients = [p.grad for p in self.names if p.grad is not None]
        report = {
            "parameters": _nbytes(self.names),
            "gradients": _nbytes(gradients),
            "optimizer": _nbytes(state),
        }
        if self.device.type == "cuda":
            report["peak"] = torch.cuda.max_memory_allocated(self.device)
        return report

    def tensors(self) -> dict[str, torch.Tensor]:
        """Everything that training changes, by plain name: parameters as the model names them, and
        ``optimizer.<state>.<parameter>``. The tensors themselves, not copies."""
        named = {name: p.detach() for p, name in self.names.items()}
        for p, name in self.names.items():
            for key, value in self.optimizer.state[p].items():
                named[f"optimizer.{key}.{name}"] = value
        return named

    def to_device(self, batch: Batch) -> Batch:
        return {name: t.to(self.device, non_blocking=True) for name, t in batch.items()}

    def _autocast(self) -> contextlib.AbstractContextManager:
        if self.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, self.autocast)

    def _reduced_sums(self) -> torch.Tensor:
        """The sums over all ranks; the step's one scalar all-reduce."""
        if self.micro_steps != self.accumulation:
            raise RuntimeError(
                f"{self.micro_steps} of {self.accumulation} micro-steps are done: "
                "call micro_step() for each before update() or gradients()"
            )
        if not self.reduced and self.world_size > 1:
            dist.all_reduce(self.sums)
        self.reduced = True
        return self.sums

    def _start_step(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.micro_steps, self.reduced = 0, False
        self.sums = torch.zeros_like(self.sums)
        self.z_max = torch.full_like(self.z_max, -math.inf)


def adamw(
    names: dict[torch.nn.Parameter, str], weight_decay: float, betas: tuple[float, float]
) -> torch.optim.AdamW:
    """Fused AdamW, decaying matrices only, its state allocated from the start.

    (Loshchilov & Hutter 2019.) With its state always there, checkpoints have one shape from step 0
    on and the memory report is true before the first step.
    """
    groups = [
        {"params": [p for p in names if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in names if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=betas, fused=True)
    for p in names:
        optimizer.state[p] = {
            "step": torch.zeros((), dtype=torch.float32, device=p.device),
            "exp_avg": torch.zeros_like(p),
            "exp_avg_sq": torch.zeros_like(p),
        }
    return optimizer


def _nbytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(t.nbytes for t in tensors)
