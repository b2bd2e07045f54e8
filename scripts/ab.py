"""Compare loaders under the same batches: what does each one cost a training?

    python scripts/ab.py --db my_db --seq-len 1024 --arms elastic,lancedb,mosaic,parquet-random
    python scripts/ab.py --from runs/ab/results.json

Packs one epoch of the table into each loader's format (build_packed_datasets.py), checks what every
loader delivers, then times them in turns, each in fresh processes, and writes report.md,
results.json and plots. A loader that fails is reported with its reason; the rest goes on. All other
flags are train.py's: which data, --seq-len, --batch-size, --num-workers, --prefetch-mb, --model.
"""

import argparse
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import common
import hardware
import launch as setup
from blocks_loaders import ARMS
from build_packed_datasets import OTHER
from flags import Parser, at_least_two, magnitude, not_negative, positive
from loaders import LOADERS
from packed_blocks import BLOCK_HASHES, MANIFEST
from scripts import ab_report
from scripts.ab_figures import RATE, combined, figures, trained, verdict
from scripts.processes import PROC, Failed, descendants, drop_page_cache, folder, kill, launch

ROOT = Path(__file__).resolve().parents[1]
OWN = ("--blocks-mode", "--blocks-path", "--loader", "--pack", "--run-dir", "--ckpt-dir")
OWN += ("--steps", "--epochs", "--global-batch", "--grad-accum", "--resume", "--plan-cache")
MODES, CACHES = ("loader", "sleep", "train"), ("warm", "cold")
PATIENCE = 180  # seconds that a measurement may take beside what it is asked to
LONGEST_STEP = 60  # seconds; of train.py, a larger model on a CPU


def main(argv: list[str] | None = None) -> None:
    parser = flag_parser()
    args, rest = parser.parse_known_args(argv)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # as nohup has it
            signal.signal(number, signal.default_int_handler)
    out = args.out or (args.redraw.parent if args.redraw else Path("runs/ab"))
    try:
        if args.redraw:
            ab_report.write(read_results(args.redraw), out)
        else:
            measure(Matrix(args, out, rest))
    except OSError as error:
        raise SystemExit(f"--out {out}: {error}") from None


def measure(matrix: "Matrix") -> None:
    """Run it; also when it is interrupted, the report has what was measured."""
    try:
        matrix.run()
    except BaseException as error:
        matrix.results["interrupted"] = True
        if not isinstance(error, KeyboardInterrupt):
            raise
        for pid in descendants(os.getpid())[1:]:  # one was just being launched
            kill(pid)
    finally:
        matrix.finish()
    if "interrupted" in matrix.results:
        done = (
            "what was measured is in the report" if matrix.results["cells"] else "nothing is done"
        )
        raise SystemExit(f"interrupted: {done}")
    if not matrix.results["cells"]:
        failed = [why for arm in matrix.results["arms"].values() for why in arm["failed"].values()]
        raise SystemExit(f"nothing could be measured: {failed[0]}")


def flag_parser() -> Parser:
    parser = Parser(__doc__, "%(prog)s [flags] [flags of train.py]")
    parser.add_argument("--out", type=Path, help="directory of the report (default: runs/ab)")
    parser.add_argument("--blocks", help="packed blocks, made where missing (default: OUT/blocks)")
    parser.add_argument(
        "--arms", type=names(LOADERS), default=list(LOADERS), help="with commas; one may come twice"
    )
    parser.add_argument("--ranks", type=numbers, default=[1], help="with commas, such as 1,2,4")
    parser.add_argument(
        "--modes", type=names(MODES), default=list(MODES[:2]), help=f"of {', '.join(MODES)}"
    )
    parser.add_argument(
        "--cache", type=names(CACHES), default=["warm"], help="page and plan cache: warm, cold"
    )
    parser.add_argument("--repeats", type=positive, default=5, help="turns of all arms")
    parser.add_argument("--seconds", type=magnitude, default=1.0, help="of each measured window")
    parser.add_argument(
        "--check-seconds", type=positive, default=60, help="most of checking what one delivers"
    )
    pace = parser.add_mutually_exclusive_group()
    pace.add_argument(
        "--consume-tok-s",
        type=positive,
        default=500_000,  # GPT-2 124M on an H100 at half its bf16 peak, 0.86 GFLOP a token
        help="sleep: tokens that a rank's device takes in a second",
    )
    pace.add_argument("--step-ms", type=not_negative, help="sleep: computing time of a step")
    parser.add_argument(
        "--train-steps", type=at_least_two, default=20, help="train: measured steps"
    )
    parser.add_argument(
        "--from", type=Path, dest="redraw", metavar="RESULTS", help="only write the report again"
    )
    return parser


def names(known: Collection[str]) -> Callable[[str], list[str]]:
    """An argparse type: some of ``known`` with commas between."""

    def parse(text: str) -> list[str]:
        given = text.split(",")
        if unknown := [name for name in given if name not in known]:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r}: there are {', '.join(known)}")
        return given

    return parse


def numbers(text: str) -> list[int]:
    return sorted({positive(word) for word in text.split(",")})


def read_results(path: Path) -> dict:
    try:
        results = json.loads(path.read_text())
        if not {"figures", "arms", "settings", "manifest"} <= results.keys():
            raise ValueError("not what this script writes as results.json")
        return results
    except (OSError, ValueError, AttributeError) as error:
        raise SystemExit(f"--from {path}: {error}") from None


class Matrix:
    """What is measured, every loader under every setting; ``results`` is saved after each turn."""

    def __init__(self, args: argparse.Namespace, out: Path, rest: list[str]) -> None:
        if own := [flag for flag in OWN if flag in {word.partition("=")[0] for word in rest}]:
            raise SystemExit(f"{own[0]} is set for each loader here: leave it out")
        if "://" in (args.blocks or ""):
            raise SystemExit(f"--blocks {args.blocks}: give a directory")
        trainer = setup.flag_parser().parse_args(rest)  # one line for what train.py would refuse
        self.args, self.out, self.rest, self.steps, self.states = args, out, rest, {}, {}
        self.blocks = Path(args.blocks or out / "blocks")
        self.global_batch = trainer.batch_size * math.lcm(*args.ranks)
        self.block_tokens = trainer.seq_len
        out.mkdir(parents=True, exist_ok=True)
        for old in out.glob("scratch-*-*"):
            if not (PROC / old.name.split("-")[1]).exists():  # its process was killed
                shutil.rmtree(old, ignore_errors=True)
        self.scratch = Path(tempfile.mkdtemp(prefix=f"scratch-{os.getpid()}-", dir=out)).resolve()
        self.table = self.table_files(trainer)
        arms = {}
        for name in args.arms:
            again = sum(arm["arm"] == name for arm in arms.values())
            label = f"{name} ({again + 1})" if again else name
            arms[label] = {"arm": name, "failed": {}, "checks": {}}
        self.results = {
            "machine": hardware.describe_environment(torch.device("cpu")),
            "settings": {
                **{k: v for k, v in vars(args).items() if k not in ("redraw", "out", "blocks")},
                "train_flags": rest,
                "global_batch": self.global_batch,
                **{k: getattr(trainer, k) for k in ("seq_len", "batch_size", "num_workers")},
                "prefetch_mb": trainer.prefetch_mb,
                "model": trainer.model,
            },
            "arms": arms,
            "cells": [],
        }

    def run(self) -> None:
        self.build()
        for label, arm in self.results["arms"].items():
            for ranks in self.args.ranks if arm["arm"] != "synthetic" else ():
                self.attempt(label, ranks, "warm", self.check)
        for repeat in range(self.args.repeats):
            for cache in self.args.cache:
                for ranks in self.args.ranks:
                    for label in self.results["arms"]:
                        self.attempt(label, ranks, cache, self.speed)
                        if "train" in self.args.modes:
                            self.attempt(label, ranks, cache, self.train)
            self.save()
            print(f"turn {repeat + 1} of {self.args.repeats} done", flush=True)
        with suppress(Failed):  # the report then leaves it out
            self.measure_overhead()

    def attempt(self, label: str, ranks: int, cache: str, measure: Callable) -> None:
        """Measure, unless it failed before; a failure is noted and the rest goes on."""
        arm = self.results["arms"][label]
        key = f"{measure.__name__}, {cache}, {ranks} rank{'s' * (ranks > 1)}"
        if "blocks" in arm["failed"] or key in arm["failed"]:
            return
        try:
            measure(label, ranks, cache)
        except (Failed, OSError) as error:
            arm["failed"][key] = common.one_line(str(error))
            print(f"{label}: {key}: {arm['failed'][key]}", flush=True)

    # -------------------------------------------------------------------------
    # data

    def table_files(self, trainer: argparse.Namespace) -> list[Path]:
        folder = Path(common.database(trainer)) / f"{trainer.table or common.DEFAULT_TABLE}.lance"
        return [path for path in folder.rglob("*") if path.is_file()]

    def build(self) -> None:
        """Pack the blocks: all formats in one pass, or one by one where that fails."""
        formats = {ARMS[a["arm"]].format for a in self.results["arms"].values() if a["arm"] in ARMS}
        wanted, failed = sorted(formats - {""}) or ["memmap"], {}  # all need the manifest
        try:
            self.pack(wanted)
        except Failed as error:
            if str(error) == OTHER.format(self.blocks):
                raise SystemExit(
                    f"--blocks {self.blocks} holds blocks of other data: give another --blocks or "
                    "--out"
                ) from None
            for name in wanted:
                try:
                    self.pack([name])
                except Failed as error:
                    failed[name] = str(error)
                    print(f"{name}: {error}", flush=True)
        if len(failed) == len(wanted):
            raise SystemExit(f"nothing to compare: {failed[wanted[0]]}")
        for arm in self.results["arms"].values():
            if reason := failed.get(getattr(ARMS.get(arm["arm"]), "format", None)):
                arm["failed"]["blocks"] = reason
        self.manifest = json.loads((self.blocks / MANIFEST).read_text())
        self.hashes = np.load(self.blocks / BLOCK_HASHES)
        if self.manifest["blocks"] < self.global_batch:
            raise SystemExit(
                f"an epoch has {self.manifest['blocks']:,} blocks, a step takes "
                f"{self.global_batch:,}: lower --batch-size or --seq-len, or give more data"
            )
        self.results["manifest"] = self.manifest
        for arm in self.results["arms"].values():
            arm |= self.manifest["formats"].get(getattr(ARMS.get(arm["arm"]), "format", ""), {})
            if arm["arm"] in ("elastic", "lancedb"):
                arm |= {"bytes": sum(path.stat().st_size for path in self.table), "seconds": 0.0}

    def pack(self, formats: list[str]) -> None:
        script = str(ROOT / "build_packed_datasets.py")
        words = [sys.executable, script, "--out", str(self.blocks), "--formats", ",".join(formats)]
        words += ["--plan-cache", str(self.scratch / "plans")]
        done = subprocess.run([*words, *self.rest], stderr=subprocess.PIPE, text=True)
        if done.returncode:
            raise Failed((done.stderr.splitlines() or ["no reason given"])[-1])

    # -------------------------------------------------------------------------
    # measurements

    def check(self, label: str, ranks: int, cache: str) -> None:
        """What an epoch delivers; the states for resuming are kept for the timings."""
        with folder(self.scratch) as out:
            spec = {"task": "check", "dtype": self.manifest["dtype"]}
            spec |= {"seconds": self.args.check_seconds}
            results, _ = self.cell(label, ranks, out, spec)
            parts = [np.load(out / f"hashes-{rank}.npy") for rank in range(ranks)]
        arm = self.results["arms"][label]
        found, steps = verdict(results, parts, self.hashes, self.block_tokens)
        if found["unknown"] and arm["arm"] == "elastic":
            raise SystemExit(f"{self.blocks} holds blocks of other tokens: give another --blocks")
        if found["unknown"] and arm["arm"] != "lancedb":  # which packs by itself
            arm["failed"]["blocks"] = f"{found['unknown']:,} of its blocks are not the packing's"
            return
        first = self.steps.setdefault(label, steps)
        both = zip(first, steps, strict=False)  # as far as both were checked
        found["same_as_first"] = all(np.array_equal(a, b) for a, b in both)
        arm["checks"][ranks] = found
        self.states[label, ranks] = results[0]["states"]

    def speed(self, label: str, ranks: int, cache: str) -> None:
        args, arm = self.args, self.results["arms"][label]
        pause = 1e-3 * args.step_ms if args.step_ms is not None else self.pause(ranks)
        modes = {mode: pause * (mode == "sleep") for mode in args.modes if mode != "train"}
        cold = cache == "cold"
        # what one mode has read is no longer cold for the next: a process each
        for together in [{mode: modes[mode]} for mode in modes] if cold else [modes]:
            with folder(self.scratch) as out:
                spec = {"task": "speed", "seconds": args.seconds, "modes": together}
                spec |= {"states": self.states.get((label, ranks), {}), "warm_up": not cold}
                spec["drop"] = [str(path) for path in self.files_of(arm)] if cold else []
                results, peaks = self.cell(label, ranks, out, spec, cold)
            self.results["cells"].append(
                self.speed_cell(label, ranks, cache, together, results) | peaks
            )

    def speed_cell(
        self, label: str, ranks: int, cache: str, modes: dict[str, float], results: list[dict]
    ) -> dict:
        """The figures of one launch."""
        cell = {"label": label, "ranks": ranks, "cache": cache}
        for key in results[0].keys() - modes.keys():  # seconds: the slowest rank's
            cell[key] = max(result[key] for result in results)
        tokens = self.global_batch * self.block_tokens
        if check := self.results["arms"][label]["checks"].get(ranks):  # some are padding
            tokens = check["tokens"] / check["steps"]
        for mode in modes:
            cell |= combined(mode, [result[mode] for result in results], tokens / ranks)
        return cell

    def pause(self, ranks: int) -> float:
        """Seconds that a device takes for its share of a step."""
        return self.global_batch * self.block_tokens / ranks / self.args.consume_tok_s

    def train(self, label: str, ranks: int, cache: str) -> None:
        """Real steps of train.py, as its log has them; the first quarter warms up."""
        arm, steps = self.results["arms"][label], self.args.train_steps
        with folder(self.scratch) as out:
            if cache == "cold":
                drop_page_cache(self.files_of(arm))
            flags = ["--steps", str(steps + steps // 3), "--run-dir", str(out / "run")]
            flags += ["--ckpt-dir", str(out / "ckpt"), "--ckpt-every", "0", "--log-every", "1"]
            script = [str(ROOT / "train.py"), *self.flags(arm, out, cache == "cold"), *flags]
            launch(script, ranks, out, PATIENCE + LONGEST_STEP * (steps + steps // 3))
            log = (out / "run/metrics.jsonl").read_text().splitlines()
        cell = {"label": label, "ranks": ranks, "cache": cache}
        self.results["cells"].append(cell | trained([json.loads(line) for line in log], steps))

    def measure_overhead(self) -> None:
        """What the clock costs the fastest loader that reads anything, in one process, and the
        sampler any."""
        ranks = min(self.args.ranks)
        rates = {
            cell["label"]: cell[RATE]
            for cell in self.results["cells"]
            if RATE in cell
            and cell["ranks"] == ranks
            and self.results["arms"][cell["label"]]["arm"] != "synthetic"
        }
        if not rates:
            return
        label = max(rates, key=rates.get)
        with folder(self.scratch) as out:
            spec = {"task": "overhead", "seconds": self.args.seconds}
            (result,), _ = self.cell(label, 1, out, spec)
        sampler = [cell["sampler"] for cell in self.results["cells"] if "sampler" in cell]
        self.results["overhead"] = {
            "label": label,
            "share": result["share"],
            "sampler": float(np.median(sampler)),
        }

    # -------------------------------------------------------------------------
    # processes

    def flags(self, arm: dict, out: Path, cold: bool) -> list[str]:
        plans = out / "plans" if cold else self.scratch / "plans"
        flags = ["--blocks-mode", arm["arm"], "--pack", "--no-pin-tag", "--plan-cache", str(plans)]
        flags += ["--global-batch", str(self.global_batch)]
        if arm["arm"] in ARMS:
            flags += ["--blocks-path", str(self.blocks)]
        return [*self.rest, *flags]

    def files_of(self, arm: dict) -> list[Path]:
        if arm["arm"] not in ARMS:
            return self.table
        if not (name := ARMS[arm["arm"]].format):
            return []
        root = self.blocks / name
        return [path for path in root.rglob("*") if path.is_file()]

    def cell(
        self, label: str, ranks: int, out: Path, spec: dict, cold: bool = False
    ) -> tuple[list[dict], dict]:
        """Every rank's result, and the peaks. Raises Failed."""
        flags = self.flags(self.results["arms"][label], out, cold)
        spec = {**spec, "flags": flags, "out": str(out)}
        (out / "spec").write_text(json.dumps(spec))
        script = [str(ROOT / "scripts/ab_cell.py"), str(out / "spec")]
        patience = PATIENCE + 10 * spec["seconds"]
        peaks = launch(script, ranks, out, patience)
        return [json.loads((out / f"result-{r}").read_text()) for r in range(ranks)], peaks

    # -------------------------------------------------------------------------

    def save(self) -> None:
        """Write results.json, whole or not at all."""
        self.results["figures"] = figures(self.results["cells"])
        partial = self.out / "results.json.partial"
        partial.write_text(json.dumps(self.results, indent=1, default=str) + "\n")
        partial.rename(self.out / "results.json")

    def finish(self) -> None:
        """Write the report of what there is; nothing else stays."""
        shutil.rmtree(self.scratch, ignore_errors=True)
        if self.results["cells"]:
            self.save()
            ab_report.write(read_results(self.out / "results.json"), self.out)


if __name__ == "__main__":
    main()
