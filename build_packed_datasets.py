"""Write one epoch's packed blocks, in one order, in the formats that other loaders read.

python build_packed_datasets.py --db my_db --seq-len 1024 --out blocks
python train.py --db my_db --seq-len 1024 --blocks-mode memmap --blocks-path blocks

The flags that decide which tokens are in which block are train.py's. A format is complete or
absent: each is written under another name and renamed when all of them are whole; a second call
writes those that are missing.
"""

import hashlib
import json
import shutil
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import lance
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tqdm import tqdm

import launch
from blocks_loaders import MANIFEST
from distributed import World
from elastic import ElasticStream
from flags import not_empty, require_package

READ = 64  # blocks read at once, and rows of a group of parquet-random
SHARD = 4096  # blocks of a Parquet shard or a Lance fragment; 8 MB at T = 1,024
GROUP = 1024  # rows of a group of parquet-seq


class Writer:
    """Writes blocks of ``dtype`` (n, T) into the directory ``to``; ``close`` makes them whole."""

    def __init__(self, to: Path, seq_len: int, dtype: np.dtype) -> None:
        self.to, self.seq_len, self.dtype = to, seq_len, dtype
        item = pa.from_numpy_dtype(dtype)
        self.schema = pa.schema([("input_ids", pa.list_(item, seq_len))])
        self.open()

    def open(self) -> None:
        raise NotImplementedError

    def write(self, blocks: np.ndarray) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    def arrow(self, blocks: np.ndarray) -> pa.Table:
        lists = pa.FixedSizeListArray.from_arrays(pa.array(blocks.ravel()), self.seq_len)
        return pa.table([lists], schema=self.schema)


class Buffered(Writer):
    """Writes ``size`` blocks at a time by ``flush(blocks)``."""

    size = SHARD

    def open(self) -> None:
        self.parts: list[np.ndarray] = []
        self.flushed = 0

    def write(self, blocks: np.ndarray) -> None:
        self.parts.append(blocks)
        if sum(map(len, self.parts)) >= self.size:
            self.close()

    def close(self) -> None:
        if self.parts:
            self.flush(np.concatenate(self.parts))
            self.flushed += 1
        self.parts = []

    def flush(self, blocks: np.ndarray) -> None:
        raise NotImplementedError


class LanceBlocksWriter(Buffered):
    def flush(self, blocks: np.ndarray) -> None:
        lance.write_dataset(self.arrow(blocks), self.to / "blocks.lance", mode="append")


class ParquetSeqWriter(Buffered):
    def flush(self, blocks: np.ndarray) -> None:
        shard = self.to / f"shard_{self.flushed:05}.parquet"
        pq.write_table(self.arrow(blocks), shard, row_group_size=GROUP, compression="none")


class ParquetRandomWriter(Writer):
    def open(self) -> None:
        self.file = pq.ParquetWriter(self.to / "blocks.parquet", self.schema, compression="none")

    def write(self, blocks: np.ndarray) -> None:
        self.file.write_table(self.arrow(blocks), row_group_size=READ)

    def close(self) -> None:
        self.file.close()


class MemmapWriter(Writer):
    def open(self) -> None:
        self.file = open(self.to / "blocks.bin", "wb")

    def write(self, blocks: np.ndarray) -> None:
        self.file.write(blocks.data)

    def close(self) -> None:
        self.file.close()


class MDSBlocksWriter(Writer):
    def open(self) -> None:
        streaming = require_package("streaming", "--formats mds", "mosaicml-streaming")
        columns = {"tokens": f"ndarray:{self.dtype.name}:{self.seq_len}"}
        self.mds = streaming.MDSWriter(out=str(self.to), columns=columns, progress_bar=False)

    def write(self, blocks: np.ndarray) -> None:
        for block in blocks:
            self.mds.write({"tokens": block})

    def close(self) -> None:
        self.mds.finish()


FORMATS: dict[str, type[Writer]] = {
    "lance": LanceBlocksWriter,
    "mds": MDSBlocksWriter,
    "parquet-random": ParquetRandomWriter,
    "parquet-seq": ParquetSeqWriter,
    "memmap": MemmapWriter,
}


def main(argv: list[str] | None = None) -> None:
    parser = launch.flag_parser(__doc__)
    group = parser.add_argument_group("packed blocks")
    group.add_argument("--out", type=not_empty, default="packed_blocks", help="directory to write")
    group.add_argument("--formats", default=",".join(FORMATS), help="names with commas between")
    args = parser.parse_args(argv)
    args.pack, args.batch_size = True, READ
    names = args.formats.split(",")
    if unknown := [name for name in names if name not in FORMATS]:
        raise SystemExit(f"--formats {unknown[0]}: there are {', '.join(FORMATS)}")
    world, out = World(), Path(args.out)
    data = launch.open_data(args, launch.find_start(args, world), world)
    print(*data.lines, sep="\n", flush=True)
    stream = ElasticStream(
        data.table, args, data.where, data.tokenizer, global_batch=READ, world=world
    )
    with closing(stream):
        build(out, names, stream, data)


def build(out: Path, names: list[str], stream: ElasticStream, data: launch.Data) -> None:
    """Write the formats that ``out`` lacks. Raises SystemExit where it holds other blocks."""
    dtype = np.dtype(np.uint16 if data.tokenizer.vocab_size <= 1 << 16 else np.uint32)
    about = {
        "blocks": stream.blocks_per_epoch,
        "seq_len": stream.args.seq_len,
        "dtype": dtype.name,
        "tokenizer": stream.fingerprint["--tokenizer"],
        "table_version": data.table.version,
        "fingerprint": stream.fingerprint,
    }
    if not stream.blocks_per_epoch:
        raise SystemExit("no whole block in an epoch: lower --seq-len, or train on more data")
    manifest = {"formats": {}, **about}
    if (out / MANIFEST).exists():
        manifest = json.loads((out / MANIFEST).read_text())
        for key in ("fingerprint", "seq_len", "blocks"):
            if manifest[key] != about[key]:
                raise SystemExit(f"--out {out} holds blocks of other data: give another directory")
    missing = [name for name in names if name not in manifest["formats"]]
    if not missing:
        print(f"nothing to do: {out} has {', '.join(names)}")
        return
    partial = out / "partial"
    try:
        shutil.rmtree(partial, ignore_errors=True)
        written = write(partial, missing, stream, dtype, manifest)
        for name in missing:
            shutil.rmtree(out / name, ignore_errors=True)  # one that no manifest names
            (partial / name).rename(out / name)
        manifest["formats"] |= written
        (partial / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
        (partial / MANIFEST).rename(out / MANIFEST)
    except OSError as error:
        raise SystemExit(f"--out {out}: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    for name, made in written.items():
        print(f"{out / name}: {made['bytes']:,} bytes in {made['seconds']:.1f} s")


def write(
    to: Path, names: list[str], stream: ElasticStream, dtype: np.dtype, manifest: dict
) -> dict[str, dict]:
    """Write the epoch's blocks into a directory for each format. Returns bytes and seconds of each;
    ``manifest["hash"]`` is that of all blocks, and is compared where it is there."""
    writers, seconds, left = {}, dict.fromkeys(names, 0.0), stream.blocks_per_epoch
    for name in names:
        (to / name).mkdir(parents=True)
        writers[name] = FORMATS[name](to / name, stream.args.seq_len, dtype)

    def timed(name: str, action: Callable, *arguments: np.ndarray) -> None:
        began = time.perf_counter()
        action(*arguments)
        seconds[name] += time.perf_counter() - began

    digest, steps = hashlib.sha256(), stream.steps()
    with tqdm(total=left, unit="block", desc="packing") as progress:
        while left:
            (batch,) = next(steps)
            blocks = np.ascontiguousarray(batch["input_ids"][:left].numpy().astype(dtype))
            digest.update(blocks.data)
            for name, writer in writers.items():
                timed(name, writer.write, blocks)
            left -= len(blocks)
            progress.update(len(blocks))
    for name, writer in writers.items():
        timed(name, writer.close)
    if manifest.setdefault("hash", digest.hexdigest()) != digest.hexdigest():
        raise SystemExit("the table's tokens have changed since the other formats were written")
    sizes = {n: sum(f.stat().st_size for f in (to / n).rglob("*") if f.is_file()) for n in names}
    return {name: {"bytes": sizes[name], "seconds": seconds[name]} for name in names}


if __name__ == "__main__":
    main()
