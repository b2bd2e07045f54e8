"""What the benchmark scripts share: fresh processes, turns, figures by name, the JSON report."""

import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import hardware

Turn = dict[str, dict[str, float]]  # what each arm measured in one turn


def in_child(script: str, arm: dict) -> dict[str, float]:
    """What ``python script --child ARM`` prints as JSON on its last line.

    Raises SystemExit with the end of its error output when it fails.
    """
    command = [sys.executable, script, "--child", json.dumps(arm)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{arm}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def take_turns(script: str, arms: dict[str, dict], repeats: int) -> list[Turn]:
    """Every arm once, then every arm again, ``repeats`` times: what is slow for a while is slow for
    all of them."""
    turns = []
    for repeat in range(repeats):
        turns.append({name: in_child(script, arm) for name, arm in arms.items()})
        print(f"turn {repeat + 1} of {repeats} done", flush=True)
    return turns


def figure(turns: list[Turn], unit: str, of: Callable[[Turn], float]) -> dict:
    """The median over the turns of what ``of`` makes of one, and each turn's value."""
    repeats = [of(turn) for turn in turns]
    return {"value": statistics.median(repeats), "unit": unit, "repeats": repeats}


def ratio(turns: list[Turn], a: str, b: str, what: str) -> dict:
    return figure(turns, "x", lambda turn: turn[a][what] / turn[b][what])


def report(figures: dict[str, dict], path: Path | None) -> None:
    """Print every figure with its lowest and highest turn, and write them all as JSON."""
    for name, f in figures.items():
        low, high = min(f["repeats"]), max(f["repeats"])
        print(f"{name:<28} {f['value']:>14,.3g} {f['unit']:<9} {low:,.3g} .. {high:,.3g}")
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        device = hardware.choose_device("auto", 0)
        machine = hardware.describe_environment(device)
        path.write_text(json.dumps({"machine": machine, "figures": figures}, indent=1) + "\n")
