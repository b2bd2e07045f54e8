"""Loaders of the blocks that build_packed_datasets.py wrote, for comparison.

A small class for each ``--blocks-mode``, behind the interface that ``loaders.py`` describes; those
of other libraries are in ``library_loaders.py``.
"""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property, lru_cache
from itertools import islice
from pathlib import Path

import lance
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from elastic import WINDOWS
from feed import Batch
from library_loaders import LitDataBlocks, MosaicBlocks, WebDatasetBlocks
from packed_blocks import PackedBlocks
from stores import lance_options

CACHED_GROUPS = 64  # row groups that parquet-random keeps, of 64 blocks each: 8 MB at T = 1,024


class IndexedBlocks(PackedBlocks):
    """Blocks that can be read by number: one thread reads ahead, many steps at once.

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
        most = (self.args.prefetch_mb << 20) // (step_bytes * WINDOWS)
        most = max(1, min(most, self.blocks_per_epoch // self.global_batch))
        first, steps = self.consumed, 1
        while True:
            while len(self.pending) < WINDOWS - 1:
                self.pending.append(self.thread.submit(self._read_steps, first, steps))
                first += steps * self.global_batch
                steps = min(2 * steps, most)  # the first batch soon, then large reads
            for blocks in self.pending.popleft().result():
                self.consumed += self.global_batch
                yield self._step(blocks)

    def queued_bytes(self) -> int:
        return sum(f.result().nbytes for f in self.pending if f.done())

    def close(self) -> None:
        self.thread.shutdown(wait=True, cancel_futures=True)

    def _read_steps(self, first: int, steps: int) -> np.ndarray:
        """This rank's share (steps, n, T) of the steps from block ``first`` of all epochs on."""
        B, seed, mine = self.blocks_per_epoch, self.args.shuffle_seed, np.array(self.slots.mine)
        begins = first + self.global_batch * np.arange(steps)
        epochs, numbers = np.divmod(begins[:, None] + mine, B)
        if not self.args.no_shuffle:
            for epoch in np.unique(epochs):
                here = epochs == epoch
                numbers[here] = shuffled(B, seed, int(epoch))[numbers[here]]
        return self.read(numbers.ravel()).reshape(*numbers.shape, -1)


@lru_cache(maxsize=2)  # a read may lie in two epochs
def shuffled(blocks: int, seed: int, epoch: int) -> np.ndarray:
    """A permutation of the blocks: the same on every rank."""
    return np.random.default_rng((seed, epoch)).permutation(blocks)


class LanceBlocks(IndexedBlocks):
    """A Lance table of fixed-size lists, taken by row number."""

    format, remote = "lance", True

    @cached_property
    def dataset(self) -> lance.LanceDataset:
        options = lance_options() if self.path.remote else None
        return lance.dataset(str(self.path / "blocks.lance"), storage_options=options)

    def read(self, numbers: np.ndarray) -> np.ndarray:
        column = self.dataset.take(numbers.tolist(), columns=["input_ids"]).column(0)
        return fixed_size_rows(column, self.args.seq_len)


class MemmapBlocks(IndexedBlocks):
    """A flat file of token ids, mapped."""

    format = "memmap"

    @cached_property
    def data(self) -> np.ndarray:
        flat = np.memmap(str(self.path / "blocks.bin"), self.dtype, "r")
        return flat.reshape(-1, self.args.seq_len)

    def read(self, numbers: np.ndarray) -> np.ndarray:
        return self.data[numbers]


class ParquetRandomBlocks(IndexedBlocks):
    """One Parquet file of small row groups. A row costs its whole group: the rows that are read
    together are sorted by group, and the last groups are kept."""

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
        blocks = np.empty((len(numbers), self.args.seq_len), self.dtype)
        by_group = np.argsort(groups, kind="stable")
        for rows in np.split(by_group, np.flatnonzero(np.diff(groups[by_group])) + 1):
            group = int(groups[rows[0]])  # read once for all of its rows
            blocks[rows] = self.group(group)[numbers[rows] - self.begins[group]]
        return blocks

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
            for shard in sorted(Path(self.path).glob("*.parquet")):
                with pq.ParquetFile(shard, memory_map=True) as file:
                    for group in range(file.num_row_groups):
                        rows = file.metadata.row_group(group).num_rows
                        if skip < rows:
                            column = file.read_row_group(group, columns=["input_ids"]).column(0)
                            yield from fixed_size_rows(column, self.args.seq_len)[skip:]
                        skip = max(0, skip - rows)


class SyntheticBlocks(PackedBlocks):
    """Random ids made once and given again and again: what a loader that costs nothing reaches."""

    remote = True  # only the manifest is read

    def steps(self) -> Iterator[list[Batch]]:
        rng = np.random.default_rng(self.args.shuffle_seed)
        shape = (len(self.slots.mine), self.args.seq_len)
        step = self._step(rng.integers(0, self.vocab_size, shape))
        while True:
            self.consumed += self.global_batch
            yield step


def fixed_size_rows(column: pa.ChunkedArray, seq_len: int) -> np.ndarray:
    """The rows (n, T) of a column of fixed-size lists."""
    values = column.combine_chunks()
    values = values.chunk(0) if isinstance(values, pa.ChunkedArray) else values
    return values.flatten().to_numpy().reshape(-1, seq_len)


ARMS: dict[str, type[PackedBlocks]] = {
    "lance": LanceBlocks,
    "mosaic": MosaicBlocks,
    "webdataset": WebDatasetBlocks,
    "litdata": LitDataBlocks,
    "parquet-random": ParquetRandomBlocks,
    "parquet-seq": ParquetSeqBlocks,
    "memmap": MemmapBlocks,
    "synthetic": SyntheticBlocks,
}
