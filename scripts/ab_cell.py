"""One measurement of scripts/ab.py: one loader, in processes of its own.

    python scripts/ab_cell.py SPEC        (or under torchrun, for several ranks)

SPEC is a JSON file: ``task`` (speed, check or overhead), ``flags`` of train.py, ``out``, the
directory for each rank's result, ``seconds``, ``drop``, the files that the page cache is to forget,
and what else the task takes. Imports and opening the table are over before a clock starts.
"""

# ruff: noqa: E402 (the time of the imports is measured)
import importlib
import json
import math
import statistics
import sys
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from itertools import islice
from pathlib import Path
from time import perf_counter as clock

BEGAN = clock()

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import common
import distributed
import hardware
import launch
from distributed import World
from feed import Batch
from loaders import LOADERS, Stream, loader_name
from packed_blocks import block_hashes
from scripts.processes import bytes_read, drop_page_cache

Steps = Iterator[list[Batch]]
PARTS = (1, 50, 99)  # percent of an epoch at which a run is resumed
TIMELINE = 300  # steps whose times are kept, for the plot
RESUMED_STEPS = 3  # compared with those of the run that was not interrupted
PAIRS = 100  # turns of a bare loop and a measured one
AGREE = 64  # steps of a check between two looks at the clock, on which all ranks agree


def take(
    steps: Steps,
    world: World,
    *,
    seconds: float = math.inf,
    most: float = math.inf,
    pause: float = 0.0,
) -> tuple[array, float]:
    """Take steps, at least one, for about ``seconds`` or ``most`` of them: how long each was waited
    for, and how long it took in all. ``pause`` seconds of computing are pretended after each, as by
    a GPU: the cores are free for the loader meanwhile.

    All ranks take equally many, as in training: mosaic begins an epoch on all of them or on none.
    They agree in between, off the clock and seldom: a turn at most doubles what was done before.
    """
    waits = array("d")  # the fastest loaders take millions of steps
    elapsed, turn = 0.0, 1
    while turn > 0:
        began = now = clock()
        for _ in range(turn):
            next(steps)
            came = clock()
            waits.append(came - now)
            now = came
            if pause:
                time.sleep(pause)
                now = clock()
        elapsed += now - began
        done, slowest = len(waits), world.maximum([elapsed])[0]
        turn = math.ceil(min(most, 2 * done, done * seconds / slowest)) - done
    return waits, elapsed


def measured(
    steps: Steps, world: World, seconds: float, pause: float, warm_up: bool, most: float
) -> dict:
    """The figures of this rank over ``seconds`` or ``most`` steps; ``warm_up`` takes a quarter of
    that first."""
    if warm_up:
        take(steps, world, seconds=seconds / 4, pause=pause)
    before = bytes_read()
    waits, elapsed = take(steps, world, seconds=seconds, most=most, pause=pause)
    read = [after - was for after, was in zip(bytes_read(), before, strict=True)]
    p50, p95, p99 = (1e3 * np.percentile(waits, (50, 95, 99))).tolist()
    return {
        "seconds": elapsed,
        "steps": len(waits),
        "wait_share": sum(waits) / elapsed,
        "wait_ms_p50": p50,
        "wait_ms_p95": p95,
        "wait_ms_p99": p99,
        "read_bytes": read[0],
        "storage_bytes": read[1],
        "timeline_ms": [1e3 * (wait + pause) for wait in waits[:TIMELINE]],
    }


def speed(open_stream: Callable[[], Stream], spec: dict, world: World) -> dict:
    """Time to the first batch, a window for each mode, and what a resume takes."""
    began = clock()
    with closing(open_stream()) as stream:
        steps = stream.steps()
        next(steps)
        result = {"first_batch_s": clock() - began, "plan_s": stream.plan_seconds}
        # what a second epoch reads is no longer cold
        left = math.inf if spec["warm_up"] else stream.blocks_per_epoch // stream.global_batch - 1
        for mode, pause in spec["modes"].items():
            result[mode] = measured(steps, world, spec["seconds"], pause, spec["warm_up"], left)
    for part, state in spec["states"].items():
        began = clock()
        with closing(open_stream()) as stream:
            stream.load_state_dict(state)
            next(stream.steps())
            result[f"resume_{part}_s"] = clock() - began
    return result


def rows_of(batches: list[Batch], dtype: np.dtype) -> np.ndarray:
    """The blocks (n, T) in a step; padding is 0."""
    rows = [
        batch["input_ids"].where(batch["mask"], 0)[batch["mask"].any(1)].numpy()
        for batch in batches
    ]
    return np.concatenate(rows).astype(dtype)


def check(open_stream: Callable[[], Stream], spec: dict, world: World) -> dict:
    """Hashes of an epoch's blocks and of the step that leaves it, as far as ``seconds`` go, and the
    loader's state on the way.

    ``hashes-RANK.npy`` holds them in order; ``blocks`` says how many each step has.
    """
    dtype, tokens, began = np.dtype(spec["dtype"]), 0, clock()
    hashes: list[np.ndarray] = []
    states: dict[int, dict] = {}  # by steps done
    with closing(open_stream()) as stream:
        whole = stream.blocks_per_epoch // stream.global_batch
        parts = {part: max(1, whole * part // 100) for part in PARTS}
        wanted = {*parts.values(), *(2**i for i in range(whole.bit_length()))}
        for step, batches in enumerate(stream.steps(), 1):
            hashes.append(block_hashes(rows_of(batches, dtype)))
            if stream.epoch > 0:
                whole = step - 1
                break
            tokens += sum(int(batch["mask"].sum()) for batch in batches)
            if step in wanted:
                states[step] = stream.state_dict()
            if step % AGREE == 0 and world.maximum([clock() - began])[0] > spec["seconds"]:
                break
    np.save(Path(spec["out"]) / f"hashes-{world.rank}.npy", np.concatenate(hashes))
    middle = max(s for s in states if s == 1 or s <= len(hashes) / 2)
    after = hashes[middle : min(middle + RESUMED_STEPS, whole)]
    return {
        "whole_steps": whole,
        "tokens": tokens,
        "blocks": [len(h) for h in hashes],
        "states": {part: states[step] for part, step in parts.items() if step in states},
        "resumes": resumed(open_stream, states[middle], after, dtype) if after else None,
    }


def resumed(
    open_stream: Callable[[], Stream], state: dict, after: list[np.ndarray], dtype: np.dtype
) -> bool:
    """Whether a loader with ``state`` gives the steps with the hashes ``after``."""
    with closing(open_stream()) as stream:
        stream.load_state_dict(json.loads(json.dumps(state)))
        again = [block_hashes(rows_of(b, dtype)) for b in islice(stream.steps(), len(after))]
    return all(np.array_equal(a, b) for a, b in zip(after, again, strict=True))


def overhead(open_stream: Callable[[], Stream], spec: dict, world: World) -> dict:
    """What measuring adds to a loop over the loader, in one process: the median over turns of
    both, as a share."""
    with closing(open_stream()) as stream:
        steps, ratios = stream.steps(), []
        waits, elapsed = take(steps, world, seconds=spec["seconds"] / 4)
        turn = max(1, round(len(waits) / elapsed * spec["seconds"] / PAIRS))
        for _ in range(PAIRS):
            began = clock()
            for _ in range(turn):
                next(steps)
            bare = clock() - began
            ratios.append(take(steps, world, most=turn)[1] / bare)
    return {"share": statistics.median(ratios) - 1}


TASKS = {"speed": speed, "check": check, "overhead": overhead}


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    out, world = Path(spec["out"]), distributed.world_from_environ()
    try:
        result = measure(spec, world)
    except BaseException as error:
        line = str(error) if isinstance(error, SystemExit) else repr(error)
        (out / f"failed-{world.rank}").write_text(common.one_line(line))
        raise
    (out / f"result-{world.rank}").write_text(json.dumps(result))


def measure(spec: dict, world: World) -> dict:
    args = launch.flag_parser().parse_args(spec["flags"])
    torch.set_num_threads(hardware.cpu_threads(world.local_size) or torch.get_num_threads())
    hardware.keep_freed_memory(torch.device("cpu"))
    world = distributed.join(world, torch.device("cpu"), args.dist_timeout)
    if package := getattr(LOADERS[loader_name(args)], "module", ""):
        with suppress(ImportError):  # the loader itself says so
            importlib.import_module(package)
    imports = clock() - BEGAN
    data = launch.open_data(args, launch.find_start(args, world), world)
    # opening read some pages too
    dropped = map(Path, spec.get("drop", [])) if world.is_main else []
    stayed = world.broadcast(drop_page_cache(dropped))

    def open_stream() -> Stream:
        return LOADERS[loader_name(args)](
            data.table,
            args,
            data.where,
            data.tokenizer,
            global_batch=args.global_batch,
            world=world,
        )

    try:
        about = {"import_s": imports, "stayed": stayed}
        return about | TASKS[spec["task"]](open_stream, spec, world)
    finally:
        distributed.leave()


if __name__ == "__main__":
    main()
