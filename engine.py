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
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from feed import Batch, Feed, Inputs
from flags import fraction, given, magnitude, not_negative, positive
from loss import IGNORE, Loss
from model import GPT
from optimizers import Optimizers
from spikes import SpikeGuard

FIRST = 1024  # first positions, whose loss is told apart: runs of other lengths have them too
# what a step adds up over its micro-batches and ranks; "first": the first FIRST positions
SUMS = ("nats", "z", "targets", "tokens", "first_nats", "first_targets", "stop")


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
        "--optimizer", choices=("adamw", "muon"), default="adamw", help="muon: of layers' matrices"
    )
    group.add_argument("--weight-decay", type=magnitude, default=0.1, help="of matrices only")
    group.add_argument(
        "--grad-clip", type=magnitude, default=1.0, help="gradient norm (0: no clipping)"
    )
    group.add_argument(
        "--z-loss", type=magnitude, default=0.0, help="weight of PaLM's z-loss, such as 1e-4"
    )
    group.add_argument(
        "--skip-spikes",
        type=magnitude,
        default=0.0,
        metavar="K",
        help="skip steps whose loss or norm is K deviations above the last ones' (0: never)",
    )
    group.add_argument(
        "--max-skips", type=positive, default=20, help="end the run after so many in a row"
    )
    group.add_argument(
        "--ddp-bucket-mb", type=positive, default=25, help="gradients exchanged at once"
    )
    group.add_argument(
        "--ddp-bf16", action="store_true", help="exchange gradients in bf16, half the bytes"
    )
    group.add_argument("--compile", action="store_true", help="torch.compile the model")
    modes = ["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
    group.add_argument("--compile-mode", choices=modes, default="default")


def without_effect(
    args: argparse.Namespace, parser: argparse.ArgumentParser, ranks: int
) -> list[str]:
    """Flags that were given and that decide nothing."""
    unread = [] if args.compile else ["--compile-mode"]
    unread += [] if ranks > 1 else ["--ddp-bucket-mb", "--ddp-bf16"]
    unread += [] if args.schedule == "wsd" else ["--decay-ratio"]
    return given(args, parser, unread)


def check_compile_mode(args: argparse.Namespace, accumulation: int, device: torch.device) -> None:
    """Refuse (SystemExit) CUDA graphs where a second micro-batch adds to gradients that lie in the
    memory of the first one's graph, which torch forbids."""
    graphs = args.compile and args.compile_mode in ("reduce-overhead", "max-autotune")
    if graphs and accumulation > 1 and device.type == "cuda":
        raise SystemExit(
            f"--compile-mode {args.compile_mode}: CUDA graphs take one micro-batch a step, not "
            f"{accumulation}: raise --batch-size, or give max-autotune-no-cudagraphs"
        )


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


class Engine:
    """One model, its optimizers and the arithmetic of a step, on one rank or under DDP.

    ``model`` must be on its device already. DDP is used when torch.distributed is initialised.
    ``accumulation`` is the number of micro-batches of every step, equal on all ranks. Raises
    RuntimeError when the calls come out of order.
    """

    def __init__(
        self,
        model: GPT,
        *,
        accumulation: int = 1,
        optimizer: str = "adamw",
        weight_decay: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.95),
        grad_clip: float = 1.0,
        z_loss: float = 0.0,
        skip_spikes: float = 0.0,
        doc_mask: bool = False,
        autocast: torch.dtype | None = None,
        compile_mode: str | None = None,
        bucket_mb: int = 25,
        bf16_exchange: bool = False,
    ) -> None:
        self.model = model  # plain: its names go into checkpoints
        self.device = next(model.parameters()).device
        self.accumulation = accumulation
        self.grad_clip, self.z_loss = grad_clip, z_loss
        self.autocast = autocast
        self.names = {p: name for name, p in model.named_parameters()}  # tied weights once
        self.optimizers = Optimizers(self.names, optimizer, weight_decay, betas)
        self.spikes = SpikeGuard(skip_spikes, self.device)
        self.feed = Feed(self.device, doc_mask)
        self.world_size = dist.get_world_size() if dist.is_initialized() else 1
        self.compiled = model if compile_mode is None else torch.compile(model, mode=compile_mode)
        self.replica = self.compiled
        if dist.is_initialized():
            ids = [self.device.index] if self.device.type == "cuda" else None
            self.replica = DistributedDataParallel(
                self.compiled,
                device_ids=ids,
                forward_sync_buffers=False,
                bucket_cap_mb=bucket_mb,
                gradient_as_bucket_view=True,
            )
            if bf16_exchange:
                self.replica.register_comm_hook(None, bf16_compress_hook)
        self.micro_steps = 0  # of the step under way
        self.sums = torch.zeros(len(SUMS), dtype=torch.float64, device=self.device)
        self.z_max = self.sums.new_full((), -math.inf)
        self.reduced = False  # whether sums are those of all ranks

    def warm_up(self, batch_size: int, seq_len: int) -> None:
        """Forward and backward of an empty micro-batch, to no effect on the model.

        torch.compile compiles, and DDP puts its buckets into the order in which gradients come,
        which it does after its first backward and which decides the order of summation: done
        before the first step, a resumed run adds up like one that was never interrupted.
        """
        zeros = torch.zeros(batch_size, seq_len, dtype=torch.int64)
        empty = {"input_ids": zeros, "mask": zeros.bool(), "doc_ids": zeros}
        for _ in range(2 if self.world_size > 1 else 1):  # DDP reorders in the second forward
            self._loss(self.replica, self.feed(empty)).total.backward()
            self.optimizers.zero_grad()
        if self.compiled is not self.model:
            self.validate([empty])

    def micro_step(self, batch: Batch) -> None:
        """Forward and backward of one micro-batch: adds to the step's gradients."""
        if self.micro_steps == self.accumulation:
            raise RuntimeError(f"update() is due: {self.accumulation} micro-steps are done")
        inputs = self.feed(batch)
        # Gradients are exchanged in the last micro-step only. DDP reads the setting in forward.
        last = self.micro_steps == self.accumulation - 1
        local = self.world_size > 1 and not last
        with self.replica.no_sync() if local else contextlib.nullcontext():
            loss = self._loss(self.replica, inputs)
            loss.total.backward()
        scored = inputs.targets != IGNORE
        self.sums[:-1] += torch.stack(
            [
                loss.nats.sum(dtype=torch.float64),
                loss.z.masked_fill(~scored, 0).sum(dtype=torch.float64),
                scored.sum(),
                inputs.tokens,
                loss.nats[:, :FIRST].sum(dtype=torch.float64),
                scored[:, :FIRST].sum(),
            ]
        )
        largest = loss.z.masked_fill(~scored, -math.inf).max()
        self.z_max = torch.maximum(self.z_max, largest.double())
        self.micro_steps += 1

    def update(
        self, lr: float, stop: bool = False, module_norms: bool = False
    ) -> dict[str, torch.Tensor]:
        """Clip, step the optimizers at ``lr`` and zero the gradients.

        Returns float64 scalars on the device, equal on all ranks: ``loss`` (nats per target over
        the global batch) and ``loss_1024`` of its first FIRST positions, ``grad_norm`` (before
        clipping), ``targets``, ``tokens``, ``skipped``: 1 when loss or gradient was not finite or a
        spike, which leaves parameters and optimizers unchanged, ``skips_in_a_row``: the most since
        the launch, ``stop``: how many ranks gave ``stop``, ``z_mean``: the mean log-sum-exp of the
        logits, ``z_max``: the largest on this rank, and with ``module_norms``
        ``weight_norm/<module>`` before the step and ``gradient_norm/<module>`` before clipping.
        """
        if self.reduced and stop:
            raise RuntimeError("gradients() has counted the ranks that wish to stop: stop later")
        if stop:
            self.sums[-1] += 1
        sums = dict(zip(SUMS, self._reduced_sums(), strict=True))
        targets = sums["targets"]
        # DDP averaged the ranks' sums: world_size / targets turns that into the mean over targets.
        to_mean = self.world_size / targets
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.names]).double() * to_mean
        clip = (self.grad_clip / (norm + 1e-6)).clamp(max=1.0) if self.grad_clip else 1.0
        loss = sums["nats"] / targets
        skipped = self.spikes.judge(loss, norm)
        modules = self._module_norms(to_mean) if module_norms else {}
        self.optimizers.step(lr, to_mean * clip, skipped)
        stats = {
            "loss": loss,
            "loss_1024": sums["first_nats"] / sums["first_targets"],
            "grad_norm": norm,
            "targets": targets,
            "tokens": sums["tokens"],
            "skipped": skipped.double(),
            "skips_in_a_row": self.spikes.most_skips_in_a_row.double(),
            "stop": sums["stop"],
            "z_mean": sums["z"] / targets,
            "z_max": self.z_max,
            **modules,
        }
        self.micro_steps, self.reduced = 0, False
        self.sums = torch.zeros_like(self.sums)
        self.z_max = torch.full_like(self.z_max, -math.inf)
        return stats

    def gradients(self) -> dict[str, torch.Tensor]:
        """Gradient of the step's mean loss by parameter name, before clipping: between the last
        micro_step and update. A collective call under DDP."""
        scale = self.world_size / self._reduced_sums()[SUMS.index("targets")]
        return {name: p.grad * scale.to(p.grad.dtype) for p, name in self.names.items()}

    @torch.no_grad()
    def validate(
        self, batches: Iterable[Batch], token_bytes: torch.Tensor | None = None
    ) -> dict[str, float]:
        """Mean loss over the targets of every rank's ``batches`` (their number may differ).

        Returns ``loss`` in nats per target, ``loss_1024`` of the first FIRST positions where blocks
        are longer, and ``bpb``, bits per byte, where ``token_bytes`` int64 (V,) gives the UTF-8
        length of each id. A collective call under DDP.
        """
        sums = torch.zeros(5, dtype=torch.float64, device=self.device)
        training = self.model.training
        self.model.eval()
        try:
            for inputs in map(self.feed, batches):
                nats = self._loss(self.compiled, inputs).nats.double()
                scored = inputs.targets != IGNORE
                length = scored.new_zeros((), dtype=torch.int64)
                if token_bytes is not None:
                    length = token_bytes[inputs.targets.clamp(min=0)].masked_fill(~scored, 0).sum()
                counts = scored.sum(), length, nats[:, :FIRST].sum(), scored[:, :FIRST].sum()
                sums += torch.stack([nats.sum(), *counts])
        finally:
            self.model.train(training)
        if self.world_size > 1:
            dist.all_reduce(sums)
        loss, scored, length, loss_1024, first_scored = sums.tolist()
        result = {"loss": loss / scored if scored else math.nan}
        if self.model.config.seq_len > FIRST:
            result["loss_1024"] = loss_1024 / first_scored if first_scored else math.nan
        if token_bytes is not None:
            result["bpb"] = loss / math.log(2) / length if length else math.nan
        return result

    def memory_report(self) -> dict[str, int]:
        """Bytes on this rank by category; on a GPU also the allocator's peak."""
        gradients = [p.grad for p in self.names if p.grad is not None]
        report = {
            "parameters": _nbytes(self.names),
            "gradients": _nbytes(gradients),
            "optimizer": _nbytes(
                [*self.optimizers.tensors().values(), *self.spikes.tensors().values()]
            ),
        }
        if self.device.type == "cuda":
            report["peak"] = torch.cuda.max_memory_allocated(self.device)
        return report

    def tensors(self) -> dict[str, torch.Tensor]:
        """Everything that training changes, by plain name: parameters as the model names them, and
        ``optimizer.<state>.<parameter>`` and ``optimizer.spikes.<what>``. Not copies."""
        named = {name: p.detach() for p, name in self.names.items()}
        return named | self.optimizers.tensors() | self.spikes.tensors()

    def _loss(self, model: torch.nn.Module, inputs: Inputs) -> Loss:
        with self._autocast():
            return model(inputs.input_ids, inputs.targets, inputs.documents, self.z_loss)

    def _module_norms(self, to_mean: torch.Tensor) -> dict[str, torch.Tensor]:
        """Norms of weights and of the mean loss's gradients by module."""
        squares = {}
        for kind, tensors, scale in (
            ("weight", [p.detach() for p in self.names], 1.0),
            ("gradient", [p.grad for p in self.names], to_mean),
        ):
            for name, norm in zip(self.names.values(), torch._foreach_norm(tensors), strict=True):
                key = f"{kind}_norm/{name.rpartition('.')[0]}"
                squares[key] = squares.get(key, 0) + (norm.double() * scale).square()
        return {key: square.sqrt() for key, square in squares.items()}

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


def _nbytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(t.nbytes for t in tensors)
