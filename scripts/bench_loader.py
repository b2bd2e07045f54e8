"""Time the elastic stream against lancedb.streaming, MosaicML Streaming and a memory-mapped file.

    python scripts/bench_loader.py --json runs/loader.json

Makes its own data below --work, once: 200,000 documents of log-normal length (median 400, mean 800,
longest 30,000 tokens), the same packed into blocks as MDS and as one flat uint16 file, 10 million
documents of 8 tokens, and documents of 1,000 and of 200,000 tokens. The plan of up to 30 million
rows is timed by itself. Every measurement is a fresh process, imports excluded; arms take turns,
and a ratio is the median of the ratios of each turn.
"""

import argparse
import contextlib
import json
import resource
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter as clock

import lance
import lancedb
import numpy as np
import pyarrow as pa
import torch
from lancedb.streaming import StreamingDataLoader

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import common
import launch
import plan
from distributed import World
from elastic import ElasticStream
from flags import Parser, positive
from lancedb_stream import LanceDBStream
from plan import Cache, Order
from scripts.benchmarking import Turn, figure, in_child, ratio, report, take_turns
from tokenizer import ByteTokenizer

T, BATCH, VOCABULARY = 1024, 8, 50_257
ROWS_10M, LONG_TOKENS = 10_000_000, 40_000_000
SPLITS = (1, 8, 64, 512)
PLAN_ROWS = (1_000_000, 10_000_000, 30_000_000)


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


def lancedb_batches(arm: dict) -> Iterator[torch.Tensor]:
    """lancedb.streaming by itself, without the checks that train.py adds to it.

    With 128 splits the state of batches of 8 is not exact, which train.py refuses: only timed here.
    """
    with tempfile.TemporaryDirectory() as cache:
        stream = open_stream(arm, Path(cache))
        dataset = stream.open_dataset(0, stream.blocks_per_epoch)
        for batch in StreamingDataLoader(dataset, batch_size=BATCH):
            yield batch["input_ids"]


def take_batches(arm: dict) -> Iterator[torch.Tensor]:
    """Lance by itself: takes of 2,048 rows in clumps, joined and never packed."""
    path, rng = f"{arm['table']}/corpus.lance", np.random.default_rng(0)
    dataset = lance.dataset(f"file+uring://{path}" if arm["ring"] else path)
    rows, clump = dataset.count_rows(), arm["clump"]
    while True:
        heads = rng.integers(0, rows // clump, 2048 // clump) * clump
        offsets = (heads[:, None] + np.arange(clump)).ravel().tolist()
        lists = dataset.take(offsets, columns=["input_ids"]).column(0).combine_chunks()
        yield torch.from_numpy(lists.flatten().to_numpy())


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
    "lancedb": lancedb_batches,
    "take": take_batches,
    "mosaic": mosaic_batches,
    "memmap": memmap_batches,
}


def measure_plan(arm: dict) -> dict[str, float]:
    """Seconds, bytes on disk and memory of the plan of ``rows`` rows of 8 tokens."""
    with tempfile.TemporaryDirectory(dir=arm["work"]) as folder:
        lengths = np.full(arm["rows"], 8, np.int32)
        columns = {"id": np.arange(arm["rows"]), "n_tokens": lengths}
        dataset = lance.write_dataset(pa.table(columns), f"{folder}/rows.lance")
        del columns
        before = resident_bytes()
        cache, order = Cache(Path(folder) / "cache", 1 << 40), Order(True, 0, arm["clump"])
        began = clock()
        found = cache.get("scan", lambda to: plan.scan(dataset, "n_tokens > 0", "id", to))
        scanned = clock()
        cache.get("order", lambda to: plan.write_order(found, order, 0, to))
        ordered = clock()
        files = [f.stat().st_size for f in (Path(folder) / "cache").rglob("*") if f.is_file()]
    scale = 1e9 / arm["rows"]
    return {
        "scan_ns_per_row": (scanned - began) * scale,
        "order_ns_per_row": (ordered - scanned) * scale,
        "bytes_per_row": sum(files) / arm["rows"],
        "memory_bytes_per_row": (peak_bytes() - before) / arm["rows"],
    }


def measure(arm: dict) -> dict[str, float]:
    """Run one arm in this process: seconds to the first batch, tokens per second, memory."""
    before = peak_bytes()
    began = clock()
    batches = ARMS[arm["loader"]](arm)
    next(batches)
    first = clock() - began
    if arm.get("first_only"):
        batches.close()
        return {"ttfb_s": first}
    end = clock() + arm["warm_up_s"]
    while clock() < end:
        next(batches)
    tokens, began = 0, clock()
    while (elapsed := clock() - began) < arm["seconds"]:
        tokens += next(batches).numel()
    memory = (peak_bytes() - before) / 2**20
    batches.close()
    return {"ttfb_s": first, "tokens_per_s": tokens / elapsed, "rss_mb": memory}


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


# -----------------------------------------------------------------------------
# the comparison


def arms(work: Path, seconds: float) -> dict[str, dict]:
    work = work.resolve()
    corpus, cache = str(work / "corpus"), str(work / "cache")
    timed = {"seconds": seconds, "warm_up_s": 1.0}
    elastic = {"loader": "elastic", "table": corpus, "cache": cache, **timed}
    lance = {"loader": "lancedb", "table": corpus, **timed}
    flat, mds = str(work / "blocks" / "flat.bin"), str(work / "blocks" / "mds")
    first = {"first_only": True}
    found = {
        "rows": elastic,
        "clumps": elastic | {"flags": ["--shuffle-clump", "64"]},
        "rows_threads": elastic | {"flags": ["--no-io-uring"]},
        "clumps_threads": elastic | {"flags": ["--shuffle-clump", "64", "--no-io-uring"]},
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
    for splits in SPLITS:
        found[f"splits_{splits}"] = elastic | {"flags": ["--num-splits", str(splits)]}
    for ring in (True, False):
        for clump in (1, 64):
            name = f"take_{'ring' if ring else 'threads'}_{'clumps' if clump > 1 else 'rows'}"
            found[name] = {"loader": "take", "table": corpus, "ring": ring, "clump": clump, **timed}
    for rows in PLAN_ROWS:
        plan = {"loader": "plan", "rows": rows, "clump": 1, "work": str(work)}
        found[f"plan_{rows // 10**6}m"] = plan
    found[f"plan_{rows // 10**6}m_clumps"] = plan | {"clump": 64}
    return found


def figures(turns: list[Turn]) -> dict[str, dict]:
    """Every figure by name: the median over the turns, its unit, and each turn's value."""
    speed, first = "tokens_per_s", "ttfb_s"

    def vs_mosaic(turn: Turn) -> float:
        return turn["rows"][speed] / max(turn[m][speed] for m in ("mosaic_0", "mosaic_2"))

    def splits_spread(turn: Turn) -> float:
        speeds = [turn[f"splits_{s}"][speed] for s in SPLITS]
        return min(speeds) / max(speeds)

    found = {
        "vs_lancedb_8_rows": ratio(turns, "rows", "lancedb_8", speed),
        "vs_lancedb_8_clumps": ratio(turns, "clumps", "lancedb_8", speed),
        "vs_lancedb_128": ratio(turns, "rows", "lancedb_128", speed),
        "vs_mosaic": figure(turns, "x", vs_mosaic),
        "vs_memmap_rows": ratio(turns, "rows", "memmap", speed),
        "vs_memmap_clumps": ratio(turns, "clumps", "memmap", speed),
        "rank_of_8": ratio(turns, "rank_of_8", "rows", speed),
        "long_docs": ratio(turns, "long", "short", speed),
        "ttfb_200k_s": figure(turns, "s", lambda turn: turn["ttfb_200k"][first]),
        "ttfb_10m_s": figure(turns, "s", lambda turn: turn["ttfb_10m"][first]),
        "ttfb_resume_ratio": ratio(turns, "ttfb_resume", "ttfb_start", first),
        "rss_mb": figure(turns, "MB", lambda turn: turn["rows"]["rss_mb"]),
        "splits_spread": figure(turns, "x", splits_spread),
        "vs_memmap_rows_threads": ratio(turns, "rows_threads", "memmap", speed),
        "vs_memmap_clumps_threads": ratio(turns, "clumps_threads", "memmap", speed),
    }
    for arm, measured in turns[0].items():
        if speed in measured:
            found[f"{arm}_{speed}"] = figure(turns, "tokens/s", lambda t, arm=arm: t[arm][speed])
        if arm.startswith("plan_"):
            for name in measured:
                unit = "bytes" if "bytes" in name else "ns"
                found[f"{arm}_{name}"] = figure(turns, unit, lambda t, a=arm, n=name: t[a][n])
    return found


def compare(args: argparse.Namespace) -> None:
    args.work.mkdir(parents=True, exist_ok=True)
    make(args.work)
    chosen = arms(args.work, args.seconds)
    in_child(__file__, chosen["ttfb_start"])  # builds the cached plan
    report(figures(take_turns(__file__, chosen, args.repeats)), args.json)


def main(argv: list[str] | None = None) -> None:
    parser = Parser(__doc__)
    parser.add_argument("--work", type=Path, default=Path("runs/bench_loader"), help="data, kept")
    parser.add_argument("--json", type=Path, help="write every figure by name here")
    parser.add_argument("--repeats", type=positive, default=5, help="turns of all arms")
    parser.add_argument("--seconds", type=float, default=3.0, help="per arm and turn")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.child:
        arm = json.loads(args.child)
        print(json.dumps((measure_plan if arm["loader"] == "plan" else measure)(arm)))
    else:
        compare(args)


if __name__ == "__main__":
    main()
