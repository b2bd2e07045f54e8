"""What a run says about itself: meters, the console line, train.log, metrics.jsonl, TensorBoard."""

import argparse
import hashlib
import json
import math
import os
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from torch.utils.tensorboard import SummaryWriter

from distributed import World
from flags import not_empty, not_negative, positive, require_package
from profiling import device_readings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("logging")
    group.add_argument("--run-dir", type=not_empty, help="logs go here (default: ./runs/<run id>)")
    group.add_argument("--log-every", type=positive, default=10, help="steps")
    group.add_argument(
        "--eval-every", type=not_negative, default=0, help="steps (0: only at the end)"
    )
    group.add_argument(
        "--eval-batches", type=positive, default=8, help="global batches of validation blocks"
    )
    group.add_argument(
        "--hash-batches", action="store_true", help="log a hash of each logged step's global batch"
    )
    group.add_argument(
        "--log-params",
        type=not_negative,
        default=0,
        metavar="N",
        help="log norms of weights and gradients by module every N steps (0: never)",
    )
    group.add_argument("--wandb", metavar="PROJECT", help="also log to Weights & Biases")


class Meter:
    """Time and tokens since the last log line, without saving, evaluation and compilation.

    ``flops`` are a token's; ``peak`` is FLOP/s of one rank's device, None where not known.
    """

    def __init__(self, device: torch.device, tokens: float, flops: float, peak: float | None):
        self.device, self.flops, self.peak = device, flops, peak
        self.began, self.last_pause = time.perf_counter(), 0.0
        self.restart(tokens)

    def restart(self, tokens: float) -> None:
        """Start an interval at ``tokens`` trained so far."""
        self.started, self.paused = time.perf_counter(), 0.0
        self.tokens = tokens
        self.spans: dict[str, list[Callable[[], float]]] = {}

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Leave what runs inside out of the throughput, and what is queued on the device in it."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        began = time.perf_counter()
        yield
        self.last_pause = time.perf_counter() - began
        self.paused += self.last_pause

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Count the device's time for what runs inside as a step's ``name``: a wait of the host
        that the device spends on the step before is none."""
        if self.device.type == "cuda":
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            yield
            last.record()

            def seconds() -> float:
                last.synchronize()
                return first.elapsed_time(last) / 1e3
        else:
            began = time.perf_counter()
            yield
            elapsed = time.perf_counter() - began

            def seconds() -> float:
                return elapsed

        self.spans.setdefault(name, []).append(seconds)

    def seconds(self, name: str) -> list[float]:
        """The interval's spans of that name, once the device is done with them."""
        return [span() for span in self.spans[name]]

    def elapsed(self) -> float:
        """Seconds of the interval that count, at least a microsecond."""
        return max(time.perf_counter() - self.started - self.paused, 1e-6)

    def values(self, tokens: float, world: World) -> dict[str, float | None]:
        """The interval's figures for the log, at ``tokens`` trained so far. A collective call."""
        elapsed, each = self.elapsed(), {name: self.seconds(name) for name in self.spans}
        rate, waits = (tokens - self.tokens) / elapsed, each["data_wait"]
        p50, p95, p99 = world.maximum((1e3 * np.percentile(waits, (50, 95, 99))).tolist())
        return {
            "tokens_per_second": rate,
            "mfu": rate * self.flops / (self.peak * world.size) if self.peak else None,
            "step_s": elapsed / len(waits),
            **{f"{name}_s": sum(spans) / len(waits) for name, spans in each.items()},
            "data_wait_share": sum(waits) / elapsed,
            "data_wait_ms_p50": p50,
            "data_wait_ms_p95": p95,
            "data_wait_ms_p99": p99,
            "memory_bytes": peak_memory(self.device),
            **device_readings(self.device),
        }

    def eta(self, done: int, left: int) -> float:
        """Seconds that ``left`` steps take at the mean pace of ``done``, everything included."""
        return (time.perf_counter() - self.began) / done * left


def batch_hash(batches: list[dict[str, torch.Tensor]], global_batch: int, world: World) -> str:
    """Hash of a global batch: equal for equal blocks in equal order, however they are dealt.

    The sum mod 2^64 of the blocks' SHA-256, each hashed with its position. A collective call.
    """
    position, total = world.share(global_batch).start, 0
    for batch in batches:
        for ids, mask in zip(batch["input_ids"], batch["mask"], strict=True):
            if mask.any():
                text = f"{position} {ids[mask].tolist()}".encode()
                total += int.from_bytes(hashlib.sha256(text).digest()[:8], "little")
                position += 1
    return f"{sum(world.gather(total)) % 2**64:016x}"


def step_line(values: dict, last: int, eta: float) -> str:
    """The console's line for one record of metrics.jsonl."""
    parts = [
        f"step {values['step']:>{len(str(last))}}/{last}",
        f"epoch {values['epoch']}",
        f"loss {values['loss']:.4f}",
        f"lr {values['lr']:.2e}",
        f"norm {values['grad_norm']:5.2f}",
        f"{human(values['tokens_per_second']):>5} tok/s",
        f"wait {values['data_wait_share']:5.1%}, p99 {values['data_wait_ms_p99']:.0f} ms",
        f"mem {human(values['memory_bytes'])}B",
        f"eta {duration(eta)}",
    ]
    if values["mfu"] is not None:
        parts.insert(6, f"mfu {values['mfu']:.1%}")
    if values["skipped"]:
        parts.append(f"skipped {values['skipped']}")
    return "  ".join(parts)


class RunLog:
    """The run directory's log files, written by the main rank only.

    ``metrics.jsonl`` is cut back to records up to ``resume_step`` before anything is appended, so
    that each step is in it once. Training goes on without a console that is gone; ``error`` is set
    when the directory cannot be written any more. As a context, says in state.json when it is left
    by an error.
    """

    def __init__(
        self,
        run_dir: Path,
        ckpt_dir: Path,
        is_main: bool = True,
        resume_step: int = 0,
        wandb: str | None = None,
    ) -> None:
        self.is_main, self.step, self.console = is_main, resume_step, True
        self.error: OSError | None = None
        self.about = {"checkpoints": str(ckpt_dir.resolve())}
        if not is_main:
            return
        run_dir.mkdir(parents=True, exist_ok=True)
        self.run_dir = run_dir
        threading.excepthook = self._background_error  # TensorBoard writes in a thread
        self.metrics = open(cut_back(run_dir / "metrics.jsonl", resume_step), "a")
        self.text = open(run_dir / "train.log", "a")
        self.board = SummaryWriter(run_dir, purge_step=resume_step + 1)
        self.wandb = start_wandb(wandb, run_dir) if wandb else None

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.state("failed", self.step, error=" ".join(str(error).split()))
        self.close()

    def say(self, *lines: str) -> None:
        """Print lines and keep them in train.log."""
        if not self.is_main:
            return
        for line in lines:
            if self.console:
                try:
                    print(line, flush=True)
                except OSError:  # such as `| head`
                    self.console, sys.stdout = False, open(os.devnull, "w")
            with self.noted():
                print(line, file=self.text, flush=True)

    def record(self, values: dict) -> None:
        """Append one record to metrics.jsonl and the other sinks; ``values`` names its ``step``.

        A value that is not finite, which JSON cannot spell, is written as null.
        """
        if not self.is_main:
            return
        self.step = values["step"]
        finite = {k: None if _not_finite(v) else v for k, v in values.items()}
        with self.noted():
            print(json.dumps(finite), file=self.metrics, flush=True)
            for name, value in values.items():
                if name != "step" and isinstance(value, int | float):
                    self.board.add_scalar(name, value, self.step)
        if self.wandb:
            self.wandb.log(values, step=self.step)

    def write_json(self, name: str, content: dict) -> None:
        """Write a file of the run directory, whole or not at all."""
        if not self.is_main:
            return
        partial = self.run_dir / f"{name}.partial"
        with self.noted():
            try:
                partial.write_text(json.dumps(content, indent=1, default=str) + "\n")
                partial.rename(self.run_dir / name)
            finally:
                partial.unlink(missing_ok=True)

    def state(self, state: str, step: int, **more: str) -> None:
        """Say in state.json how the run is: running (or killed), stopped, finished or failed."""
        self.write_json("state.json", {"state": state, "step": step, **self.about, **more})

    def close(self) -> None:
        if self.is_main:
            for file in (self.metrics, self.text, self.board):
                with self.noted():
                    file.close()
            threading.excepthook = threading.__excepthook__
            if self.wandb:
                self.wandb.finish()

    def _background_error(self, args: threading.ExceptHookArgs) -> None:
        if isinstance(args.exc_value, OSError):
            self.error = self.error or args.exc_value
        else:
            threading.__excepthook__(args)

    @contextmanager
    def noted(self) -> Iterator[None]:
        """An error of the disk is kept for the loop to see, which saves before it stops."""
        try:
            yield
        except OSError as error:
            self.error = self.error or error


def checkpoints_of(run_dir: Path) -> str | None:
    """The checkpoint directory of the run that logged there, None where none did."""
    if not (run_dir / "metrics.jsonl").exists():
        return None
    try:
        return json.loads((run_dir / "state.json").read_text())["checkpoints"]
    except (OSError, ValueError, KeyError):
        return "unknown"


def cut_back(path: Path, step: int) -> Path:
    """Drop the records after ``step`` from a JSON Lines file, atomically. Returns ``path``."""
    if path.exists():
        kept = [line for line in path.read_text().splitlines() if _step_of(line) <= step]
        partial = path.with_suffix(".partial")
        partial.write_text("".join(f"{line}\n" for line in kept))
        partial.rename(path)
    return path


def require_wandb() -> ModuleType:
    """The Weights & Biases package. Raises SystemExit where it is missing."""
    return require_package("wandb", "--wandb", "wandb")


def start_wandb(project: str, run_dir: Path):
    """A Weights & Biases run."""
    return require_wandb().init(project=project, dir=run_dir, name=run_dir.name, resume="allow")


def first_batch_line(first_batch_s: float, plan_s: float, warm_up_s: float) -> str:
    warm_up = f", warm-up and compilation in {warm_up_s:.1f} s" if warm_up_s else ""
    return f"first batch    after {first_batch_s:.2f} s, plans in {plan_s:.2f} s{warm_up}"


def validation_line(step: int, result: dict[str, float]) -> str:
    return (
        f"step {step}: validation loss {result['loss']:.4f} nats per target, "
        f"{result['bpb']:.4f} bits per byte"
    )


def ledger_lines(segments: list[dict[str, int]], skipped_tokens: int) -> list[str]:
    """Where every token of the epochs begun is; the parts add up to the total exactly."""
    if not all(segments):
        return []  # a loader that does not keep one
    total = {key: sum(segment[key] for segment in segments) for key in segments[0]}
    parts = {
        "trained": total["consumed"] - skipped_tokens,
        "skipped steps": skipped_tokens,
        "truncated": total["truncated"],
        "not reached": total["not_reached"],
        "tails": total["tails"],
    }
    listed = " + ".join(f"{count:,} {name}" for name, count in parts.items() if count)
    return [f"ledger         {total['total']:,} tokens with EOS = {listed}"]


def human(n: float) -> str:
    """1234567 -> '1.23M'."""
    for unit in ("", "k", "M", "G", "T"):
        if abs(n) < 999.5:
            return f"{n:.3g}{unit}"
        n /= 1000
    return f"{n:.3g}P"


def duration(seconds: float) -> str:
    """Seconds as 1h02m, 3m05s or 7s."""
    s = round(seconds)
    if s >= 3600:
        return f"{s // 3600}h{s % 3600 // 60:02d}m"
    return f"{s // 60}m{s % 60:02d}s" if s >= 60 else f"{s}s"


def peak_memory(device: torch.device) -> int:
    """Bytes at the peak: the allocator's on a GPU, else resident memory of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts kibibytes


def _not_finite(value) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _step_of(line: str) -> float:
    """Step of a record; a line torn by a crash belongs to no step that is kept."""
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError):
        return math.inf
