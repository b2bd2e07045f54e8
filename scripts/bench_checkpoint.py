"""Time checkpoints against torch.save and torch.load of the same state.

    python scripts/bench_checkpoint.py --json runs/checkpoint.json

The state is that of GPT-2 124M and its AdamW (1.5 GB) on two ranks of this machine. One launch
measures everything in turns: a save in the background, torch.save by one rank, a load with
verification, torch.load, both by both ranks at once. A figure is the median of the turns. Then
train.py is launched to resume, until its first step is done.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import checkpoints
import distributed
from distributed import World
from engine import Engine
from flags import Parser, positive
from model import GPT, GPTConfig
from scripts.benchmarking import Turn, figure, report

RANKS = 2


def timed(action: Callable[[], object], world: World) -> float:
    """Seconds until all ranks are done."""
    world.gather(None)
    began = time.perf_counter()
    action()
    return world.maximum([time.perf_counter() - began])[0]


def measure(work: Path, repeats: int) -> list[Turn]:
    """All turns, on the ranks of this launch."""
    world = distributed.join(distributed.world_from_environ(), torch.device("cpu"), 600.0)
    torch.set_num_threads(1)
    engine = Engine(GPT(GPTConfig.preset("small", 50_257, 1024), seed=0))
    tensors, root = engine.tensors(), work / "checkpoints"
    saver = checkpoints.Saver(
        root, world, checkpoints.take(root, 0)[0] if world.is_main else None, 1, 0
    )

    def save(step: int) -> dict[str, float]:
        stall = timed(lambda: saver.start(step, tensors, {"run_id": "bench"}), world)
        return {"stall": stall, "save": stall + timed(saver.finish, world)}

    def load() -> None:
        record = checkpoints.check(path, world)
        checkpoints.load_tensors(path, record, tensors, world)

    def torch_save() -> None:
        if world.is_main:
            torch.save(tensors, plain)

    turns, plain = [], work / "plain.pt"
    save(1)  # makes the host buffers
    for step in range(2, 2 + repeats):
        turn = save(step)
        path = root / f"step_{step:08d}"
        turn["torch_save"] = timed(torch_save, world)
        turn["load"] = timed(load, world)
        turn["torch_load"] = timed(lambda: torch.load(plain), world)
        turns.append({"both": turn})
    saver.close()
    distributed.leave()
    return turns if world.is_main else []


def resume_seconds(work: Path, repeat: int) -> float:
    """From launch to the first step after the resume: GPT-2 124M, one process, short blocks."""
    flags = ["--model", "small", "--seq-len", "64", "--batch-size", "1", "--db", str(work / "db")]
    flags += ["--run-dir", str(work / "run"), "--ckpt-dir", str(work / "resumed")]
    flags += ["--lr-total-steps", "1000", "--ckpt-every", "0", "--eval-batches", "1"]
    script = str(Path(__file__).resolve().parents[1] / "train.py")
    steps = ["--steps", str(repeat + 1), *["--resume", "auto"] * (repeat > 0)]
    began = time.time()
    command = [sys.executable, script, *flags, *steps, "--log-every", "1"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return first_step_time(work) - began


def first_step_time(work: Path) -> float:
    """When the last launch logged its first step: TensorBoard's events carry the time."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(work / "run"))
    events.Reload()
    return events.Scalars("loss")[-1].wall_time


def make_table(work: Path) -> None:
    import lancedb
    import pyarrow as pa

    from scripts import tokenize_corpus

    texts = [f"document {i} " * 50 for i in range(300)]
    table = pa.table({"id": pa.array(range(300)), "text": texts})
    lancedb.connect(work / "db").create_table("corpus", table)
    tokenize_corpus.main(["--db", str(work / "db"), "--workers", "0"])


def main(argv: list[str] | None = None) -> None:
    parser = Parser(__doc__)
    parser.add_argument("--json", type=Path, help="write every figure by name here")
    parser.add_argument("--repeats", type=positive, default=5, help="turns")
    parser.add_argument("--work", type=Path, help="8 GB are written here (default: temporary)")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.child:
        turns = measure(args.child.parent, args.repeats)
        if turns:
            args.child.write_text(json.dumps(turns))
        return
    with tempfile.TemporaryDirectory(dir=args.work) as folder:
        work = Path(folder)
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        launch += [f"--nproc-per-node={RANKS}", __file__, "--repeats", str(args.repeats)]
        subprocess.run([*launch, "--child", str(work / "turns.json")], check=True)
        turns = json.loads((work / "turns.json").read_text())
        make_table(work)
        resumes = [resume_seconds(work, repeat) for repeat in range(args.repeats + 1)][1:]
    figures = {
        "stall_ratio": figure(turns, "x", lambda t: t["both"]["stall"] / t["both"]["torch_save"]),
        "save_ratio": figure(turns, "x", lambda t: t["both"]["save"] / t["both"]["torch_save"]),
        "load_ratio": figure(turns, "x", lambda t: t["both"]["load"] / t["both"]["torch_load"]),
    }
    for name in turns[0]["both"]:
        figures[f"{name}_s"] = figure(turns, "s", lambda t, name=name: t["both"][name])
    seconds = [{"resume": {"s": s}} for s in resumes]
    figures["resume_s"] = figure(seconds, "s", lambda t: t["resume"]["s"])
    report(figures, args.json)


if __name__ == "__main__":
    main()
