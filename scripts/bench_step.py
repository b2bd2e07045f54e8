"""Time the training step against plain torch, its own matrix products and two lone processes.

python scripts/bench_step.py --json runs/step.json                   # on this CPU: 25 minutes
python scripts/bench_step.py --ddp-options --json runs/ddp.json      # on two of its processes
python scripts/bench_step.py --gpu --json runs/gpu.json              # MFU on one GPU: a few minutes

Each measurement is a fresh process; arms take turns, a figure is the median over them.
"""

import argparse
import contextlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import lancedb
import numpy as np
import pyarrow as pa
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import distributed
import engine as engine_module
import hardware
import train
from engine import Engine
from flags import Parser, positive
from loss import linear_cross_entropy
from model import GPT, GPTConfig
from scripts.benchmarking import figure, ratio, report, take_turns

VOCAB = 50_257
# options of DDP to compare in a step that mostly exchanges gradients, one short block a rank
EXCHANGES = {
    "as_it_is": {},
    "buckets_5_mb": {"bucket_cap_mb": 5},
    "buckets_100_mb": {"bucket_cap_mb": 100},
    "without_views": {"gradient_as_bucket_view": False},
    "static_graph": {"static_graph": True},
    "unused_parameters": {"find_unused_parameters": True},
    "bf16": {"bf16": True},
}
LOSS_POSITIONS = 8_192


def main(argv: list[str] | None = None) -> None:
    parser = Parser(__doc__)
    parser.add_argument("--repeats", type=positive, default=5)
    parser.add_argument("--only", default="", help="arms whose name begins so")
    parser.add_argument("--ddp-options", action="store_true", help="options of DDP instead")
    parser.add_argument("--gpu", action="store_true", help="MFU of small and xl instead")
    parser.add_argument("--work", type=Path, default=Path("runs/bench_step"), help="files go here")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.child:
        arm = json.loads(args.child)
        print(json.dumps(globals()[f"time_{arm.pop('what')}"](**arm)))
        return
    if args.gpu:
        hardware.choose_device("cuda", 0)  # or says why not
    args.work.mkdir(parents=True, exist_ok=True)
    work = str(args.work.resolve())
    arms = gpu_arms() if args.gpu else ddp_arms(work) if args.ddp_options else cpu_arms(work)
    arms = {name: arm for name, arm in arms.items() if name.startswith(args.only)}
    turns = take_turns(__file__, arms, args.repeats)
    report(figures(turns, set(arms)), args.json)


def cpu_arms(work: str) -> dict[str, dict]:
    step = {"model": "small", "seq_len": 256, "batch": 4}
    ddp = {"seq_len": 256, "accumulation": 4}
    return {
        "eager_fp32": {"what": "eager", **step},
        "fp32": {"what": "step", "compiled": True, "bf16": False, **step},
        "fp32_eager_engine": {"what": "step", "compiled": False, "bf16": False, **step},
        "bf16": {"what": "step", "compiled": True, "bf16": True, **step},
        "gemms": {"what": "gemms", **step},
        **{
            f"loss_{kind}_{dtype}": {"what": "loss", "chunked": kind == "ours", "dtype": dtype}
            for dtype in ("fp32", "bf16")
            for kind in ("ours", "plain")
        },
        "loop": {"what": "loop", "work": work},
        "ddp_together": {"what": "pair", "together": True, "work": work, **ddp},
        "ddp_apart": {"what": "pair", "together": False, "work": work, **ddp},
    }


def ddp_arms(work: str) -> dict[str, dict]:
    pair = {"what": "pair", "together": True, "work": work, "seq_len": 64, "accumulation": 1}
    return {f"exchange_{name}": {**pair, "options": o} for name, o in EXCHANGES.items()}


def gpu_arms() -> dict[str, dict]:
    step = {"what": "step", "compiled": True, "bf16": True, "seq_len": 1024, "steps": 20}
    return {
        "gpu_small": {"model": "small", "batch": 32, **step},
        "gpu_xl": {"model": "xl", "batch": 8, **step},
    }


def figures(turns: list[dict], names: set[str]) -> dict[str, dict]:
    """Every figure whose arms were measured."""
    of: dict[str, tuple[str, str, str]] = {  # name: (arm, arm it is compared with, what)
        "gemm_share": ("gemms", "fp32", "step_s"),
        "vs_eager_fp32": ("fp32", "eager_fp32", "tokens_per_s"),
        "uncompiled_vs_eager_fp32": ("fp32_eager_engine", "eager_fp32", "tokens_per_s"),
        "bf16_vs_eager_fp32": ("bf16", "eager_fp32", "tokens_per_s"),
        "loss_memory": ("loss_ours_fp32", "loss_plain_fp32", "peak_mb"),
        "loss_memory_bf16": ("loss_ours_bf16", "loss_plain_bf16", "peak_mb"),
        "loss_time_fp32": ("loss_ours_fp32", "loss_plain_fp32", "step_s"),
        "loss_time_bf16": ("loss_ours_bf16", "loss_plain_bf16", "step_s"),
        "ddp_2": ("ddp_together", "ddp_apart", "tokens_per_s"),
    }
    for name in EXCHANGES:
        of[f"ddp_{name}"] = (f"exchange_{name}", "exchange_as_it_is", "tokens_per_s")
    found = {name: ratio(turns, a, b, what) for name, (a, b, what) in of.items() if {a, b} <= names}
    units = {"step_s": "s", "tokens_per_s": "tok/s", "peak_mb": "MB", "mfu": "of peak"}
    units |= {"loop_overhead": "of a step", "warm_up_s": "s"}
    for arm in sorted(names):
        for what in turns[0][arm]:
            name = what if what == "loop_overhead" else f"{arm}_{what}"
            found[name] = figure(turns, units[what], lambda turn, a=arm, w=what: turn[a][w])
    return found


def timed(step: Callable[[], object], tokens: int, steps: int) -> dict[str, float]:
    """Seconds a step and tokens a second, after one untimed step."""
    step()
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    wait()
    began = time.perf_counter()
    for _ in range(steps):
        step()
    wait()
    seconds = (time.perf_counter() - began) / steps
    return {"step_s": seconds, "tokens_per_s": tokens / seconds}


def random_batch(batch: int, seq_len: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, VOCAB, (batch, seq_len), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "mask": torch.ones_like(ids, dtype=torch.bool)}


def time_step(
    model: str, seq_len: int, batch: int, compiled: bool, bf16: bool, steps: int = 3
) -> dict[str, float]:
    """The project's own step, on the GPU where there is one."""
    device = hardware.choose_device("auto", 0)
    hardware.keep_freed_memory(device)
    gpt = GPT(GPTConfig.preset(model, VOCAB, seq_len)).to(device)
    engine = Engine(
        gpt,
        autocast=torch.bfloat16 if bf16 else None,
        compile_mode="default" if compiled else None,
    )
    began = time.perf_counter()
    engine.warm_up(batch, seq_len)
    warm_up = time.perf_counter() - began
    micro = random_batch(batch, seq_len)

    def step() -> None:
        engine.micro_step(micro)
        engine.update(1e-4)

    result = timed(step, batch * seq_len, steps) | {"warm_up_s": warm_up}
    peak = hardware.device_peak_flops(device)
    if peak:
        result["mfu"] = result["tokens_per_s"] * gpt.flops_per_token() / peak
        result["peak_mb"] = torch.cuda.max_memory_allocated() / 1e6
    return result


def time_eager(model: str, seq_len: int, batch: int, steps: int = 3) -> dict[str, float]:
    """The step as a short script has it: all logits, mean loss, AdamW by its defaults."""
    gpt = GPT(GPTConfig.preset(model, VOCAB, seq_len))
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=1e-4, betas=(0.9, 0.95))
    ids = random_batch(batch, seq_len)["input_ids"]
    targets = ids.roll(-1, 1)

    def step() -> None:
        loss = F.cross_entropy(gpt(ids).flatten(0, 1), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(gpt.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()

    return timed(step, batch * seq_len, steps)


def time_gemms(model: str, seq_len: int, batch: int, steps: int = 3) -> dict[str, float]:
    """The step's own matrix products alone, forward and both backward, on operands of their own.

    Attention's are over half the keys, which is what a causal mask leaves of them.
    """
    hardware.keep_freed_memory(torch.device("cpu"))
    config = GPTConfig.preset(model, VOCAB, seq_len)
    C, n = config.n_embd, batch * seq_len
    layer = [(C, 3 * C), (C, C), (C, 4 * C), (4 * C, C)]
    shapes = layer * config.n_layer + [(C, config.padded_vocab_size)]
    weights = [torch.randn(b, a) for a, b in shapes]
    xs = {a: torch.randn(n, a) for a, _ in shapes}
    ys = {b: torch.randn(n, b) for _, b in shapes}
    heads, D = batch * config.n_head, C // config.n_head
    q, k = torch.randn(heads, seq_len, D), torch.randn(heads, seq_len // 2, D)
    p = torch.randn(heads, seq_len, seq_len // 2)

    def step() -> None:
        for (a, b), weight in zip(shapes, weights, strict=True):
            xs[a] @ weight.T
            ys[b] @ weight
            ys[b].T @ xs[a]
        for _ in range(config.n_layer):
            for _ in range(2):  # q k^T and p v; in backward the slopes of p, q, k and v
                q @ k.mT
                p @ k
                p.mT @ q

    return timed(step, n, steps)


def time_loss(chunked: bool, dtype: str, steps: int = 2) -> dict[str, float]:
    """The head's loss, forward and backward, with the peak of memory that it adds."""
    config = GPTConfig.preset("small", VOCAB, 1024)
    x = torch.randn(8, LOSS_POSITIONS // 8, config.n_embd).requires_grad_()
    weight = (0.02 * torch.randn(config.padded_vocab_size, config.n_embd)).requires_grad_()
    targets = torch.randint(0, VOCAB, x.shape[:2])

    def step() -> None:
        x.grad = weight.grad = None
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bf16"):
            if chunked:
                loss = linear_cross_entropy(x, weight, targets, VOCAB).total
            else:
                logits = F.linear(x, weight).flatten(0, 1)[:, :VOCAB].float()
                loss = F.cross_entropy(logits, targets.flatten(), reduction="sum")
        loss.backward()

    small = torch.zeros(2, 2, requires_grad=True)
    (small @ small).sum().backward()  # what torch allocates once
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result = timed(step, LOSS_POSITIONS, steps)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return result | {"peak_mb": (after - before) / 1e3}


def time_loop(work: str) -> dict[str, float]:
    """The share of a step of train.py that is neither forward and backward nor the optimizer."""
    db = Path(work) / "loop_db"
    if not db.exists():
        rng = np.random.default_rng(0)
        ids = [rng.integers(32, 127, 800).astype(np.uint16) for _ in range(2_000)]
        table = {"id": np.arange(1, 2_001), "n_tokens": np.full(2_000, 800, np.int32)}
        table["input_ids"] = pa.array(ids, pa.list_(pa.uint16()))
        lancedb.connect(db).create_table("corpus", pa.table(table))
    with tempfile.TemporaryDirectory(dir=work) as run, open(os.devnull, "w") as nowhere:
        with contextlib.redirect_stdout(nowhere):
            train.main(
                [
                    *("--db", str(db), "--pack", "--model", "tiny", "--steps", "40"),
                    *("--val-filter", "id % 1000 = 0", "--ckpt-every", "0", "--no-pin-tag"),
                    *("--run-dir", f"{run}/log", "--ckpt-dir", f"{run}/checkpoints"),
                ]
            )
        records = map(json.loads, Path(run, "log", "metrics.jsonl").read_text().splitlines())
        steps = [r for r in records if "step_s" in r][1:]
    inside = sum(r["forward_backward_s"] + r["optimizer_s"] for r in steps)
    whole = sum(r["step_s"] for r in steps)
    return {"loop_overhead": 1 - inside / whole, "step_s": whole / len(steps)}


def time_pair(
    together: bool, work: str, seq_len: int, accumulation: int, options: dict | None = None
) -> dict[str, float]:
    """Two processes of one thread each: ranks of one run, or each alone, at the same time."""
    arm = {"what": "one_of_pair", "seq_len": seq_len, "accumulation": accumulation}
    start, environ = [sys.executable], os.environ | {"OMP_NUM_THREADS": "1"}
    if together:
        start += ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    with tempfile.TemporaryDirectory(dir=work) as folder:
        arm |= {"folder": folder, "options": options or {}}
        command = [*start, __file__, "--child", json.dumps(arm)]
        processes = [subprocess.Popen(command, env=environ) for _ in range(1 if together else 2)]
        if any(status := [process.wait() for process in processes]):
            raise SystemExit(f"a process of the pair ended with {status}")
        results = [json.loads(path.read_text()) for path in Path(folder).glob("*.json")]
    return {"tokens_per_s": sum(result["tokens_per_s"] for result in results)}


def time_one_of_pair(
    folder: str, seq_len: int, accumulation: int, options: dict
) -> dict[str, float]:
    torch.set_num_threads(1)
    hardware.keep_freed_memory(torch.device("cpu"))
    bf16, ddp = options.pop("bf16", False), engine_module.DistributedDataParallel
    engine_module.DistributedDataParallel = lambda model, **own: ddp(model, **own | options)
    world = distributed.join(distributed.world_from_environ(), torch.device("cpu"), 300)
    gpt = GPT(GPTConfig.preset("small", VOCAB, seq_len))
    engine = Engine(gpt, accumulation=accumulation, bf16_exchange=bf16)
    micro = random_batch(1, seq_len)

    def step() -> None:
        for _ in range(accumulation):
            engine.micro_step(micro)
        engine.update(1e-4)

    step()
    ready = Path(folder) / f"{os.getpid()}.ready"
    ready.touch()
    deadline = time.monotonic() + 120
    while len(list(Path(folder).glob("*.ready"))) < 2:  # both at the same time
        if time.monotonic() > deadline:
            raise SystemExit("the other process is gone")
        time.sleep(0.05)
    result = timed(step, seq_len * accumulation, 2)
    (Path(folder) / f"{os.getpid()}.json").write_text(json.dumps(result))
    distributed.leave()
    return result | {"ranks": world.size}


if __name__ == "__main__":
    main()
