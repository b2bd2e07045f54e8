"""Kill a real run at random, resume it on another number of ranks, and compare with a whole one.

    python tests/chaos.py --kills 20 --seed 1

At the end every global batch was trained once and in order (hashes of its blocks), the loss is that
of the uninterrupted run, and no process or half-written file is left.
"""

import argparse
import json
import math
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from itertools import cycle, islice
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from scripts import tokenize_corpus
from tests.conftest import (
    ROOT,
    documents,
    launcher,
    make_table,
    processes_of,
    run,
    small_disk,
    started,
    wait_for,
)

STEPS = 200
KINDS = ("a rank", "all ranks", "the launcher", "SIGTERM", "a failing writer", "a full disk")


class Chaos:
    """One run below ``work``, killed and resumed until it is done."""

    def __init__(self, work: Path, checkpoints: Path, rng: random.Random, pace: int) -> None:
        self.work, self.checkpoints, self.rng, self.pace = work, checkpoints, rng, pace
        self.flags = [
            *("--db", str(work / "db"), "--pack", "--seq-len", "32", "--batch-size", "2"),
            *("--dtype", "fp32"),
            *("--global-batch", "7", "--num-splits", "8", "--steps", str(STEPS)),
            *("--log-every", "1", "--hash-batches", "--eval-batches", "1", "--eval-every", "50"),
        ]

    def reference(self) -> dict[int, dict]:
        """The records of the uninterrupted run, on one process."""
        flags = (*self.flags, "--run-dir", "whole", "--ckpt-dir", "whole-checkpoints")
        done = run("train.py", *flags, "--ckpt-every", "0", cwd=self.work)
        assert done.returncode == 0, done.stderr
        return self.records("whole")

    def records(self, run_dir: str) -> dict[int, dict]:
        """Step records; a step that is there twice is an error."""
        found, path = {}, self.work / run_dir / "metrics.jsonl"
        for line in path.read_text().splitlines() if path.exists() else []:
            record = json.loads(line) if line.endswith("}") else {}
            if "loss" in record:
                assert record["step"] not in found, f"step {record['step']} is there twice"
                found[record["step"]] = record
        return found

    def step(self) -> int:
        return max(self.records("run"), default=0)

    def launch(self, kind: str | None) -> None:
        """Train until ``kind`` happens at a random moment, or to the end."""
        ranks, ckpt_every = self.rng.randint(1, 4), self.rng.choice((3, 5, 10))
        flags = [*self.flags, "--run-dir", "run", "--ckpt-dir", str(self.checkpoints)]
        flags += ["--ckpt-every", str(ckpt_every), "--keep-last", "2", "--resume", "auto"]
        words = [*launcher(ranks), str(ROOT / "train.py"), *flags]
        ballast = self.checkpoints / "ballast"
        if kind == "a failing writer":
            words = ["bash", "-c", 'ulimit -f 2000; exec "$@"', "bash", *words]
        if kind == "a full disk":
            self.checkpoints.mkdir(exist_ok=True)
            free = shutil.disk_usage(self.checkpoints).free
            ballast.write_bytes(b"x" * max(0, free - (4 << 20)))
        until = self.step() + self.rng.randint(1, self.pace)
        in_save = self.rng.random() < 0.5
        began = time.monotonic()
        with started(*words, cwd=self.work) as process:
            if kind in KINDS[:4]:
                self.wait_for_moment(process, until, in_save)
                self.strike(process, kind)
            code = process.wait(120)
            wait_for(lambda: not processes_of(self.work), 60)
        ballast.unlink(missing_ok=True)
        output = (self.work / "output").read_text()
        if kind is None:
            assert code == 0, output
        if kind in KINDS[4:]:
            assert code and output.count("cannot write checkpoint") == 1, output
        moment = " inside a save" if in_save and kind in KINDS[:4] else ""
        print(
            f"{kind or 'to the end'}{moment}: {ranks} ranks, to step {self.step()}, exit {code}, "
            f"{time.monotonic() - began:.0f} s",
            flush=True,
        )

    def wait_for_moment(self, process, until: int, in_save: bool) -> None:
        end = time.monotonic() + 90
        while process.poll() is None and time.monotonic() < end:
            if self.step() >= until:
                if not in_save or any(self.checkpoints.glob(".partial_*")):
                    return
                if self.step() >= until + 25:
                    return  # it saves too fast to be caught
            else:
                time.sleep(0.02)

    def strike(self, process, kind: str) -> None:
        ranks = [p for p, words in processes_of(self.work).items() if "train.py" in " ".join(words)]
        ranks = [p for p in ranks if p != process.pid]
        signals = {"a rank": ranks[-1:], "all ranks": ranks, "the launcher": [process.pid]}
        number = signal.SIGTERM if kind == "SIGTERM" else signal.SIGKILL
        for pid in signals.get(kind, [self.rng.choice([process.pid, *ranks])]):
            with suppress(ProcessLookupError):  # it was done before
                os.kill(pid, number)

    def compare(self, whole: dict[int, dict]) -> None:
        mine = self.records("run")
        assert list(mine) == list(whole) == list(range(1, STEPS + 1))
        assert len({record["batch_hash"] for record in whole.values()}) == STEPS
        for step, record in whole.items():
            assert mine[step]["batch_hash"] == record["batch_hash"], f"other data in step {step}"
            assert math.isclose(mine[step]["loss"], record["loss"], abs_tol=1e-5), step
        state = json.loads((self.work / "run/state.json").read_text())
        assert (state["state"], state["step"]) == ("finished", STEPS)
        names = {p.name.split("_")[0] for p in self.checkpoints.iterdir()}
        assert names == {".lock", "step"}, names


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--work", type=Path)
    args = parser.parse_args(argv)
    print(f"seed {args.seed}", flush=True)
    os.environ["OMP_NUM_THREADS"] = "1"
    with ExitStack() as stack:
        work = args.work or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        work.mkdir(exist_ok=True)
        os.environ["XDG_CACHE_HOME"] = str(work / "cache")
        kinds, checkpoints = KINDS, work / "checkpoints"
        try:
            disk = stack.enter_context(small_disk(work / "disk", "64m"))
            checkpoints = disk / "checkpoints"
        except pytest.skip.Exception:
            print("mounting a tmpfs is not allowed here: no full disk", flush=True)
            kinds = KINDS[:-1]
        make_table(work / "db", documents(300))
        tokenize_corpus.main(["--db", str(work / "db"), "--workers", "0"])
        rng = random.Random(args.seed)
        pace = max(2, int(1.5 * STEPS / (args.kills + 1)))  # steps to a kill, at most
        chaos = Chaos(work, checkpoints, rng, pace)
        whole = chaos.reference()
        for kind in islice(cycle(rng.sample(kinds, len(kinds))), args.kills):
            if chaos.step() < STEPS - 20:  # so that there is a save to come
                chaos.launch(kind)
        chaos.launch(None)
        chaos.compare(whole)
        print(f"the same {STEPS} steps after {args.kills} kills", flush=True)


if __name__ == "__main__":
    main()
