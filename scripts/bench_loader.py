"""Time the elastic stream against lancedb.streaming, MosaicML Streaming and a memory-mapped file.

    python scripts/bench_loader.py --work /tmp/bench --json bench.json

Makes its own data below --work, once: 200,000 documents of log-normal length (median 400, mean 800,
longest 30,000 tokens), the same packed into blocks as MDS and as one flat uint16 file, 10 million
documents of 8 tokens, and documents of 1,000 and of 200,000 tokens. Every measurement is a fresh
process, imports excluded; arms take turns, and a ratio is the median of the ratios of each turn.
"""

import argparse
import contextlib
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import lancedb
import numpy as np
import pyarrow as pa
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import common
import hardware
import launch
from blocks_loaders import LanceDBStream
from distributed import World
from elastic import ElasticStream
from flags import Parser, positive
from tokenizer import ByteTokenizer

T, BATCH, VOCABULARY = 1024, 8, 50_257
ROWS_10M, LONG_TOKENS = 10_000_000, 40_000_000


class Codec(ByteTokenizer):
    """Only says how large the vocabulary of the made-up ids is."""

    spec, vocab_size, eos_id = "made up", VOCABULARY, VOCABULARY - 1


# -----------------------------------------------------------------------------
# data


def lognormal_lengths(rng: np.random.Generator) -> np.ndarray:
    """200,000 lengths: median 400, mean 400 exp(sigma^2 / 2) = 800, at most 30,000."""
    lengths = rng.lognormal(np.log(400), np.sqrt(2 * np.log(2)), 200_000)
    return lengths.astype(np.int64).clip(1, 30_000)


def make_table(path: Path, lengths: np.ndarray) -> None:
    """A table of documents of these lengths, random ids."""
    rng = np.random.default_rng(0)
    fields = [("id", pa.int64()), ("input_ids", pa.list_(pa.uint16())), ("n_tokens", pa.int32())]
    schema = pa.schema(fields)

    def batches() -> Iterator[pa.RecordBatch]:
        step = max(1, int(10_000_000 // lengths.mean()))
        for i in range(0, len(lengths), step):
            part = lengths[i : i + step]
            offsets = np.append(0, np.cumsum(part)).astype(np.int32)
            ids = pa.array(rng.integers(0, VOCABULARY - 1, offsets[-1], dtype=np.uint16))
            lists = pa.ListArray.from_arrays(pa.array(offsets), ids)
            columns = [pa.array(np.arange(i, i + len(part))), lists, pa.array(part, pa.int32())]
            yield pa.record_batch(columns, schema=schema)

    table = lancedb.connect(path).create_table("corpus", schema=schema)
    table.add(pa.RecordBatchReader.from_batches(schema, batches()))


def make_blocks(path: Path, source: Path) -> None:
    """One epoch of the packed blocks of ``source``: as MDS and as a flat file of uint16."""
    from streaming import MDSWriter

    stream = open_stream({"loader": "elastic", "table": str(source)}, path / "cache")
    steps = stream.steps()
    with (
        MDSWriter(out=str(path / "mds"), columns={"tokens": f"ndarray:uint16:{T}"}) as mds,
        open(path / "flat.bin", "wb") as flat,
    ):
        for _ in range(stream.blocks_per_epoch // BATCH):
            for row in next(steps)[0]["input_ids"].numpy().astype(np.uint16):
                mds.write({"tokens": row})
                flat.write(row.data)
    stream.close()


def make(work: Path) -> None:
    """All data sets that are not there yet; each is made under another name and renamed."""
    ones = np.ones(1, np.int64)
    makers: dict[str, Callable[[Path], None]] = {
        "corpus": lambda to: make_table(to, lognormal_lengths(np.random.default_rng(0))),
        "blocks": lambda to: make_blocks(to, work / "corpus"),
        "rows10m": lambda to: make_table(to, np.repeat(8 * ones, ROWS_10M)),
        "short": lambda to: make_table(to, np.repeat(1000 * ones, LONG_TOKENS // 1000)),
        "long": lambda to: make_table(to, np.repeat(200_000 * ones, LONG_TOKENS // 200_000)),
    }
    for name, maker in makers.items():
        if not (work / name).exists():
            print(f"making {work / name}", flush=True)
            with tempfile.TemporaryDirectory(dir=work) as partial:
                target = Path(partial) / name
                target.mkdir()
                maker(target)
                target.rename(work / name)


# -----------------------------------------------------------------------------
# arms: each yields batches int64 (8, T) of one rank


def open_stream(arm: dict, cache: Path) -> ElasticStream | LanceDBStream:
    flags = ["--db", arm["table"], "--pack", "--seq-len", str(T), "--batch-size", str(BATCH)]
    args = launch.flag_parser().parse_args(
        [*flags, "--plan-cache", str(cache), *arm.get("flags", [])]
    )
    loader = ElasticStream if arm["loader"] == "elastic" else LanceDBStream
    world = World(0, arm.get("ranks", 1))
    return loader(
        common.open_table(args),
        args,
        "n_tokens > 0",
        Codec(),
        global_batch=args.batch_size * world.size,
        world=world,
    )


def stream_batches(arm: dict) -> Iterator[torch.Tensor]:
    with contextlib.ExitStack() as stack:
        cache = arm.get("cache") or stack.enter_context(tempfile.TemporaryDirectory())
        stream = open_stream(arm, Path(cache))
        stack.callback(stream.close)
        stream.consumed = int(arm.get("resume_at", 0) * getattr(stream, "blocks_per_epoch", 0))
        for (batch,) in stream.steps():
            yield batch["input_ids"]


def stack_tokens(samples: list[dict]) -> torch.Tensor:
    return torch.from_numpy(np.stack([s["tokens"] for s in samples]).astype(np.int64))


def mosaic_batches(arm: dict) -> Iterator[torch.Tensor]:
    from streaming import StreamingDataLoader, StreamingDataset
    from streaming.base.util import clean_stale_shared_memory

    clean_stale_shared_memory()
    dataset = StreamingDataset(
        local=arm["path"], shuffle=True, batch_size=BATCH, num_canonical_nodes=1
    )

    workers = arm["workers"]
    loader = StreamingDataLoader(
        dataset,
        batch_size=BATCH,
        collate_fn=stack_tokens,
        num_workers=workers,
        multiprocessing_context="forkserver" if workers else None,
    )
    while True:
        yield from loader


def memmap_batches(arm: dict) -> Iterator[torch.Tensor]:
    """nanoGPT's way: random windows of a flat file."""
    data, rng = np.memmap(arm["path"], np.uint16, "r"), np.random.default_rng(0)
    while True:
        starts = rng.integers(0, len(data) - T, BATCH)
        yield torch.from_numpy(np.stack([data[i : i + T] for i in starts]).astype(np.int64))


ARMS = {
    "elastic": stream_batches,
    "lancedb": stream_batches,
    "mosaic": mosaic_batches,
    "memmap": memmap_batches,
}


def measure(arm: dict) -> dict[str, float]:
    """Run one arm in this process: seconds to the first batch, tokens per second, memory."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.perf_counter()
    batches = ARMS[arm["loader"]](arm)
    next(batches)
    first = time.perf_counter() - began
    if arm.get("first_only"):
        batches.close()
        return {"ttfb_s": first}
    end = time.perf_counter() + arm["warm_up_s"]
    while time.perf_counter() < end:
        next(batches)
    tokens, began = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - began) < arm["seconds"]:
        tokens += next(batches).numel()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    batches.close()
    return {"ttfb_s": first, "tokens_per_s": tokens / elapsed, "rss_mb": (peak - before) / 1024}


# -----------------------------------------------------------------------------
# the comparison


def arms(work: Path, seconds: float) -> dict[str, dict]:
    corpus, cache = str(work / "corpus"), str(work / "cache")
    timed = {"seconds": seconds, "warm_up_s": 1.0}
    elastic = {"loader": "elastic", "table": corpus, "cache": cache, **timed}
    lance = {"loader": "lancedb", "table": corpus, **timed}
    flat, mds = str(work / "blocks" / "flat.bin"), str(work / "blocks" / "mds")
    first = {"first_only": True}
    found = {
        "rows": elastic,
        "clumps": elastic | {"flags": ["--shuffle-clump", "64"]},
        "lancedb_8": lance | {"flags": ["--loader", "lancedb", "--num-splits", "8"]},
        "lancedb_128": lance
        | {"flags": ["--loader", "lancedb", "--num-splits", "128", "--batch-size", "128"]},
        "mosaic_0": {"loader": "mosaic", "path": mds, "workers": 0, **timed},
        "mosaic_2": {"loader": "mosaic", "path": mds, "workers": 2, **timed},
        "memmap": {"loader": "memmap", "path": flat, **timed},
        "rank_of_8": elastic | {"ranks": 8},
        "short": elastic | {"table": str(work / "short")},
        "long": elastic | {"table": str(work / "long")},
        "ttfb_200k": elastic | first | {"cache": None},
        "ttfb_10m": elastic | first | {"cache": None, "table": str(work / "rows10m")},
        "ttfb_start": elastic | first,
        "ttfb_resume": elastic | first | {"resume_at": 0.99},
    }
    for splits in (1, 8, 64, 512):
        found[f"splits_{splits}"] = elastic | {"flags": ["--num-splits", str(splits)]}
    return found


def run_child(arm: dict) -> dict[str, float]:
    command = [sys.executable, __file__, "--child", json.dumps(arm)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{arm}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def figures(turns: list[dict[str, dict[str, float]]]) -> dict[str, dict]:
    """Every figure by name: the median over the turns, its unit, and each turn's value."""

    def figure(unit: str, of: Callable[[dict], float]) -> dict:
        repeats = [of(turn) for turn in turns]
        return {"value": statistics.median(repeats), "unit": unit, "repeats": repeats}

    def ratio(a: str, b: str, what: str = "tokens_per_s") -> dict:
        return figure("x", lambda turn: turn[a][what] / turn[b][what])

    found = {
        "vs_lancedb_8_rows": ratio("rows", "lancedb_8"),
        "vs_lancedb_8_clumps": ratio("clumps", "lancedb_8"),
        "vs_lancedb_128": ratio("rows", "lancedb_128"),
        "vs_mosaic": figure(
            "x",
            lambda turn: (
                turn["rows"]["tokens_per_s"]
                / max(turn[m]["tokens_per_s"] for m in ("mosaic_0", "mosaic_2"))
            ),
        ),
        "vs_memmap_rows": ratio("rows", "memmap"),
        "vs_memmap_clumps": ratio("clumps", "memmap"),
        "rank_of_8": ratio("rank_of_8", "rows"),
        "long_docs": ratio("long", "short"),
        "ttfb_200k_s": figure("s", lambda turn: turn["ttfb_200k"]["ttfb_s"]),
        "ttfb_10m_s": figure("s", lambda turn: turn["ttfb_10m"]["ttfb_s"]),
        "ttfb_resume_ratio": ratio("ttfb_resume", "ttfb_start", "ttfb_s"),
        "rss_mb": figure("MB", lambda turn: turn["rows"]["rss_mb"]),
        "splits_spread": figure(
            "x",
            lambda turn: (
                min(turn[f"splits_{s}"]["tokens_per_s"] for s in (1, 8, 64, 512))
                / max(turn[f"splits_{s}"]["tokens_per_s"] for s in (1, 8, 64, 512))
            ),
        ),
    }
    for arm in turns[0]:
        if "tokens_per_s" in turns[0][arm]:
            found[f"{arm}_tokens_per_s"] = figure(
                "tokens/s", lambda turn, arm=arm: turn[arm]["tokens_per_s"]
            )
    return found


def compare(args: argparse.Namespace) -> None:
    args.work.mkdir(parents=True, exist_ok=True)
    make(args.work)
    chosen = arms(args.work, args.seconds)
    run_child(chosen["ttfb_start"])  # builds the cached plan
    turns = []
    for repeat in range(args.repeats):
        turns.append({name: run_child(arm) for name, arm in chosen.items()})
        print(f"turn {repeat + 1} of {args.repeats} done", flush=True)
    report = {
        "machine": hardware.describe_environment(torch.device("cpu")),
        "figures": figures(turns),
    }
    for name, figure in report["figures"].items():
        low, high = min(figure["repeats"]), max(figure["repeats"])
        print(f"{name:<26} {figure['value']:>14,.3g} {figure['unit']:<9} {low:,.3g} .. {high:,.3g}")
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")


def main(argv: list[str] | None = None) -> None:
    parser = Parser(__doc__)
    parser.add_argument("--work", type=Path, default=Path("runs/bench_loader"), help="data, kept")
    parser.add_argument("--json", type=Path, help="write every figure by name here")
    parser.add_argument("--repeats", type=positive, default=5, help="turns of all arms")
    parser.add_argument("--seconds", type=float, default=3.0, help="per arm and turn")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.child:
        print(json.dumps(measure(json.loads(args.child))))
    else:
        compare(args)


if __name__ == "__main__":
    main()
