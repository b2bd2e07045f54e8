"""Loaders of the blocks that build_packed_datasets.py wrote, for comparison: a small class for each
``--blocks-mode``, behind the interface that ``loaders.py`` describes."""

import argparse
import json
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property, lru_cache
from itertools import islice
from pathlib import Path

import lance
import lancedb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from distributed import World
from elastic import Slots
from feed import Batch, documents_by_eos
from flags import require_package
from tokenizer import Tokenizer, brief

MANIFEST = "manifest.json"
CACHED_GROUPS = 64  # row groups that parquet-random keeps, of 64 blocks each: 8 MB at T = 1,024


def read_manifest(path: Path) -> dict:
    """What build_packed_datasets.py says of the blocks in ``path``. Raises SystemExit."""
    try:
        return json.loads((path / MANIFEST).read_text())
    except (OSError, ValueError) as error:
        raise SystemExit(
            f"--blocks-path {path}: no {MANIFEST} to read ({error}): build the blocks with "
            "python build_packed_datasets.py"
        ) from None


class PackedBlocks:
    """Packed blocks as a run reads them: what all arms share. ``format`` is their directory."""

    format = ""

    def __init__(
        self,
        table: lancedb.table.Table,
        args: argparse.Namespace,
        where: str,
        tokenizer: Tokenizer,
        *,
        global_batch: int,
        world: World,
    ) -> None:
        root = Path(args.blocks_path)
        manifest = read_manifest(root)
        if self.format and self.format not in manifest["formats"]:
            raise SystemExit(
                f"--blocks-mode {args.blocks_mode}: {root} has no {self.format}: python "
                f"build_packed_datasets.py --out {root} --formats {self.format}"
            )
        for flag, was, ours in (
            ("--seq-len", manifest["seq_len"], args.seq_len),
            ("--tokenizer", manifest["tokenizer"], brief(tokenizer)),
        ):
            if was != ours:
                raise SystemExit(f"--blocks-path {root}: {flag} was {was}, is {ours}")
        self.path, self.manifest, self.args = root / self.format, manifest, args
        self.world, self.global_batch, self.consumed = world, global_batch, 0
        self.eos_id, self.dtype = tokenizer.eos_id, np.dtype(manifest["dtype"])
        self.blocks_per_epoch = manifest["blocks"]
        self.slots = Slots(global_batch, args.batch_size, args.seq_len, world)
        self.line = f"loader         {args.blocks_mode}, {self.blocks_per_epoch:,} packed blocks"
        self.plan_seconds = 0.0

    @property
    def epoch(self) -> int:
        return max(self.consumed - 1, 0) // self.blocks_per_epoch

    def state_dict(self) -> dict:
        return {
            "loader": self.args.blocks_mode,
            "consumed": self.consumed,
            "blocks": self.manifest["hash"],
            "shuffle_seed": self.args.shuffle_seed,
            "no_shuffle": self.args.no_shuffle,
        }

    def load_state_dict(self, state: dict) -> None:
        ours = self.state_dict()
        for field in ("loader", "blocks", "shuffle_seed", "no_shuffle"):
            if state.get(field) != ours[field]:
                raise SystemExit(
                    f"--resume: {field} was {state.get(field)}, is {ours[field]} "
                    "(--resume-data new begins with it)"
                )
        self.consumed = state["consumed"]

    def ledger(self) -> dict[str, int]:
        """Not kept: a whole epoch of blocks is all that there is."""
        return {}

    def queued_bytes(self) -> int:
        return 0

    def close(self) -> None:
        """Nothing is open."""

    def _step(self, blocks: np.ndarray) -> list[Batch]:
        """This rank's blocks (n, T) of a step as micro-batches."""
        ids = blocks.astype(np.int64)
        doc_ids = documents_by_eos(torch.from_numpy(ids), self.eos_id).numpy()
        return self.slots.micro_batches({"input_ids": ids, "doc_ids": doc_ids})


class IndexedBlocks(PackedBlocks):
    """Blocks that can be read by number, read ahead by one thread.

    Shuffled all together anew in every epoch or, with ``--no-shuffle``, in the manifest's order:
    the order of the packing, which is a shuffle of the documents.
    """

    def __init__(self, *args, **options) -> None:
        super().__init__(*args, **options)
        self.pending: deque[Future[np.ndarray]] = deque()
        self.thread = ThreadPoolExecutor(1, "blocks-reader")

    def read(self, numbers: np.ndarray) -> np.ndarray:
        """Blocks ``numbers`` int64 (n,), as (n, T)."""
        raise NotImplementedError

    def steps(self) -> Iterator[list[Batch]]:
        step_bytes = len(self.slots.mine) * self.args.seq_len * self.dtype.itemsize
        ahead = max(1, min(64, (self.args.prefetch_mb << 20) // step_bytes))
        first = self.consumed
        while True:
            while len(self.pending) < ahead:
                self.pending.append(self.thread.submit(self._read_step, first))
                first += self.global_batch
            blocks = self.pending.popleft().result()
            self.consumed += self.global_batch
            yield self._step(blocks)

    def queued_bytes(self) -> int:
        return sum(f.result().nbytes for f in self.pending if f.done())

    def close(self) -> None:
        self.thread.shutdown(wait=True, cancel_futures=True)

    def _read_step(self, first: int) -> np.ndarray:
        """This rank's share of the step that begins with block ``first`` of all epochs."""
        B, seed = self.blocks_per_epoch, self.args.shuffle_seed
        epochs, numbers = np.divmod(first + np.array(self.slots.mine), B)
        if not self.args.no_shuffle:
            for epoch in np.unique(epochs):
                here = epochs == epoch
                numbers[here] = shuffled(B, seed, int(epoch))[numbers[here]]
        return self.read(numbers)


@lru_cache(maxsize=2)  # a step may lie in two epochs
def shuffled(blocks: int, seed: int, epoch: int) -> np.ndarray:
    """A permutation of the blocks: the same on every rank."""
    return np.random.default_rng((seed, epoch)).permutation(blocks)


class LanceBlocks(IndexedBlocks):
    """A Lance table of fixed-size lists, taken by row number."""

    format = "lance"

    @cached_property
    def dataset(self) -> lance.LanceDataset:
        return lance.dataset(self.path / "blocks.lance")

    def read(self, numbers: np.ndarray) -> np.ndarray:
        column = self.dataset.take(numbers.tolist(), columns=["input_ids"]).column(0)
        return fixed_size_rows(column, self.args.seq_len)


class MemmapBlocks(IndexedBlocks):
    """A flat file of token ids, mapped."""

    format = "memmap"

    @cached_property
    def data(self) -> np.ndarray:
        flat = np.memmap(self.path / "blocks.bin", self.dtype, "r")
        return flat.reshape(-1, self.args.seq_len)

    def read(self, numbers: np.ndarray) -> np.ndarray:
        return self.data[numbers]


class ParquetRandomBlocks(IndexedBlocks):
    """One Parquet file of small row groups: a row costs its group, so groups are kept a while."""

    format = "parquet-random"

    @cached_property
    def file(self) -> pq.ParquetFile:
        return pq.ParquetFile(self.path / "blocks.parquet", memory_map=True)

    @cached_property
    def begins(self) -> np.ndarray:
        """The first block of each row group."""
        rows = [self.file.metadata.row_group(i).num_rows for i in range(self.file.num_row_groups)]
        return np.cumsum(rows) - rows

    @cached_property
    def group(self) -> Callable[[int], np.ndarray]:
        return lru_cache(CACHED_GROUPS)(self._group)

    def read(self, numbers: np.ndarray) -> np.ndarray:
        groups = np.searchsorted(self.begins, numbers, side="right") - 1
        begins = self.begins[groups]
        return np.stack(
            [self.group(int(g))[n - b] for g, n, b in zip(groups, numbers, begins, strict=True)]
        )

    def _group(self, number: int) -> np.ndarray:
        column = self.file.read_row_group(number, columns=["input_ids"]).column(0)
        return fixed_size_rows(column, self.args.seq_len)


class ParquetSeqBlocks(PackedBlocks):
    """Parquet shards that were shuffled when they were written, read from the first to the last.

    Every rank reads every row group and keeps its blocks of each step: the same steps on any
    number of ranks, at the price of reading what other ranks train on.
    """

    format = "parquet-seq"

    def steps(self) -> Iterator[list[Batch]]:
        blocks = self._blocks(self.consumed)
        while True:
            step = list(islice(blocks, self.global_batch))
            self.consumed += self.global_batch
            yield self._step(np.stack([step[i] for i in self.slots.mine]))

    def _blocks(self, first: int) -> Iterator[np.ndarray]:
        """All blocks (T,) from number ``first`` of all epochs on; whole shards and groups before it
        are skipped unread."""
        skip = first % self.blocks_per_epoch
        while True:
            for shard in sorted(self.path.glob("*.parquet")):
                with pq.ParquetFile(shard, memory_map=True) as file:
                    for group in range(file.num_row_groups):
                        rows = file.metadata.row_group(group).num_rows
                        if skip < rows:
                            column = file.read_row_group(group, columns=["input_ids"]).column(0)
                            yield from fixed_size_rows(column, self.args.seq_len)[skip:]
                        skip = max(0, skip - rows)


class MosaicBlocks(PackedBlocks):
    """MosaicML Streaming from local MDS shards. Its shuffle decides the order; one canonical node
    keeps that on any number of ranks."""

    format = "mds"

    def steps(self) -> Iterator[list[Batch]]:
        streaming = require_package("streaming", "--blocks-mode mosaic", "mosaicml-streaming")
        args = self.args
        if self.global_batch != args.batch_size * self.world.size * self.slots.accumulation:
            raise SystemExit(
                f"--blocks-mode mosaic: --global-batch {self.global_batch} must be a multiple of "
                f"--batch-size {args.batch_size} x {self.world.size} ranks"
            )
        streaming.base.util.clean_stale_shared_memory()
        dataset = streaming.StreamingDataset(
            local=str(self.path),
            shuffle=not args.no_shuffle,
            shuffle_seed=args.shuffle_seed,
            batch_size=args.batch_size,
            num_canonical_nodes=1,
        )
        loader = streaming.StreamingDataLoader(
            dataset,
            batch_size=args.batch_size,
            collate_fn=stack_tokens,
            num_workers=args.num_workers,
            multiprocessing_context=args.mp_context if args.num_workers else None,
            drop_last=True,
        )
        steps = self.blocks_per_epoch // self.global_batch
        while True:
            epoch, done = divmod(self.consumed, self.blocks_per_epoch)
            state = {"epoch": epoch, "sample_in_epoch": done, "num_canonical_nodes": 1}
            state |= {"shuffle_seed": args.shuffle_seed, "initial_physical_nodes": 1}
            dataset.load_state_dict(state)
            batches = iter(loader)
            for _ in range(done // self.global_batch, steps):
                blocks = torch.cat(list(islice(batches, self.slots.accumulation)))
                self.consumed += self.global_batch
                yield self._step(blocks.numpy())
            # the epoch's last blocks, fewer than a step takes, are not trained on
            self.consumed = (self.consumed // self.blocks_per_epoch + 1) * self.blocks_per_epoch


class SyntheticBlocks(PackedBlocks):
    """Random ids made once and given again and again: what a loader that costs nothing reaches."""

    def steps(self) -> Iterator[list[Batch]]:
        rng = np.random.default_rng(self.args.shuffle_seed)
        shape = (len(self.slots.mine), self.args.seq_len)
        step = self._step(rng.integers(0, self.eos_id, shape))
        while True:
            self.consumed += self.global_batch
            yield step


def fixed_size_rows(column: pa.ChunkedArray, seq_len: int) -> np.ndarray:
    """The rows (n, T) of a column of fixed-size lists."""
    values = column.combine_chunks()
    values = values.chunk(0) if isinstance(values, pa.ChunkedArray) else values
    return values.flatten().to_numpy().reshape(-1, seq_len)


def stack_tokens(samples: list[dict]) -> torch.Tensor:
    """Mosaic's collate function: int64 (B, T)."""
    return torch.from_numpy(np.stack([s["tokens"] for s in samples]).astype(np.int64))


ARMS: dict[str, type[PackedBlocks]] = {
    "lance": LanceBlocks,
    "mosaic": MosaicBlocks,
    "parquet-random": ParquetRandomBlocks,
    "parquet-seq": ParquetSeqBlocks,
    "memmap": MemmapBlocks,
    "synthetic": SyntheticBlocks,
}
