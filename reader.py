"""Reads documents of the pinned table at random and makes blocks of them, in narrow integers.

What a window of many steps needs is read in one take; ``elastic.py`` makes batches of it.
"""

import argparse
import ctypes
import os
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import lance
import numpy as np
import pyarrow as pa

from common import recount
from plan import Arrays

PART = 1 << 20  # tokens read at once: bounds the memory beside the blocks that are cut from them


def add_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--no-io-uring",
        action="store_true",
        help="read a local table by threads, as where io_uring is not permitted",
    )


@dataclass(frozen=True)
class Blocks:
    """``ids`` (n, T) in an integer dtype that holds them all; where packed, the ``doc_ids`` (n, T)
    likewise, else the ``mask`` bool (n, T) of what is not padding."""

    ids: np.ndarray
    doc_ids: np.ndarray | None = None
    mask: np.ndarray | None = None

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in vars(self).values() if a is not None)

    @classmethod
    def joined(cls, parts: list["Blocks"]) -> "Blocks":
        if len(parts) == 1:
            return parts[0]
        columns = {name: [vars(p)[name] for p in parts] for name in vars(parts[0])}
        return cls(**{k: np.concatenate(v) for k, v in columns.items() if v[0] is not None})


class Reader:
    """Documents by their place in the epoch's order. Raises SystemExit for what is not as planned:
    a length, a NULL, an id that is not a token's.

    A thread of its own waits for Lance while the caller packs what was read before.
    """

    def __init__(
        self, dataset: lance.LanceDataset, args: argparse.Namespace, eos_id: int, vocab_size: int
    ) -> None:
        self.by_ring = not args.no_io_uring and "://" not in dataset.uri and ring_permitted()
        if self.by_ring:
            uri = f"file+uring://{Path(dataset.uri).resolve()}"
            dataset = lance.dataset(uri, version=dataset.version)
        self.dataset, self.seq_len = dataset, args.seq_len
        self.thread = ThreadPoolExecutor(1, "elastic-take")
        self.tokens_column, self.id_column = args.tokens_column, args.id_column
        self.recount = recount(args)
        self.eos_id, self.vocab_size = eos_id, vocab_size
        ids = dataset.schema.field(args.tokens_column).type.value_type.to_pandas_dtype()
        self.dtype = np.result_type(ids, np.min_scalar_type(eos_id))
        self.doc_dtype = np.min_scalar_type(args.seq_len)
        extra = self.doc_dtype.itemsize if args.pack else 1
        self.block_bytes = args.seq_len * (self.dtype.itemsize + extra)

    def packed(self, epoch: Arrays, positions: np.ndarray) -> Blocks:
        """The blocks at ``positions`` int64 (n,), ascending, of the epoch's token stream."""
        T, ends = self.seq_len, epoch["end"]
        ids, heads = np.empty(len(positions) * T, self.dtype), []
        # runs of adjacent blocks are pieces of the stream
        breaks = np.flatnonzero(np.diff(positions) != 1) + 1
        begins = positions[np.append(0, breaks)] * T
        stops = (positions[np.append(breaks, len(positions)) - 1] + 1) * T
        # a run's documents are rows lo to hi of the order, tokens before to ends[hi - 1]
        lo = np.searchsorted(ends, begins, side="right")
        hi = np.searchsorted(ends, stops, side="left") + 1
        before = _before(ends, lo)
        sizes = ends[hi - 1] - before
        out = np.cumsum(stops - begins)  # where in ids each run ends
        parts = _parts(sizes)
        rows = [np.concatenate([np.arange(lo[j], hi[j]) for j in runs]) for runs in parts]
        for runs, (lengths, stream) in zip(parts, self._streams(epoch, rows), strict=True):
            # where each run begins in what was read, which starts with a whole document
            cuts = np.cumsum(sizes[runs]) - sizes[runs] + begins[runs] - before[runs]
            n = stops[runs] - begins[runs]
            pieces = [stream[a : a + k] for a, k in zip(cuts, n, strict=True)]
            np.concatenate(pieces, out=ids[out[runs[0]] - n[0] : out[runs[-1]]])
            run = np.repeat(np.arange(len(runs)), hi[runs] - lo[runs])
            begin = np.cumsum(lengths) - lengths - cuts[run]  # of each document, in its run
            heads.append((out[runs] - n)[run] + begin)
            heads[-1] = heads[-1][(begin >= 0) & (begin < n[run])]
        return Blocks(ids.reshape(-1, T), doc_ids=self._numbered(np.concatenate(heads), len(ids)))

    def _numbered(self, heads: np.ndarray, size: int) -> np.ndarray:
        """Each token's document number in its block (size / T, T), from where documents begin."""
        at = np.union1d(heads, np.arange(0, size, self.seq_len))  # or go on from the block before
        numbers = np.arange(len(at)) - np.searchsorted(at, at // self.seq_len * self.seq_len)
        numbers = np.repeat(numbers.astype(self.doc_dtype), np.diff(at, append=size))
        return numbers.reshape(-1, self.seq_len)

    def documents(self, epoch: Arrays, rows: np.ndarray) -> Blocks:
        """Row mode: documents ``rows`` (n,) of the order with EOS, each cut or padded to T."""
        T, ends = self.seq_len, epoch["end"]
        ids, mask = np.empty((len(rows), T), self.dtype), np.empty((len(rows), T), bool)
        parts = _parts(ends[rows] - _before(ends, rows))
        streams = self._streams(epoch, [rows[part] for part in parts])
        for part, (lengths, stream) in zip(parts, streams, strict=True):
            starts = np.cumsum(lengths) - lengths
            mask[part] = np.arange(T) < lengths[:, None]
            index = np.minimum(starts[:, None] + np.arange(T), len(stream) - 1)
            ids[part] = np.where(mask[part], stream[index], self.eos_id)
        return Blocks(ids, mask=mask)

    def _streams(
        self, epoch: Arrays, parts: Iterable[np.ndarray]
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Of each part, rows of the order, its documents' lengths with EOS and their tokens joined.
        The next part is read meanwhile."""
        taken = None
        for rows in parts:
            offsets = epoch["offset"][rows]
            lengths = epoch["end"][rows] - _before(epoch["end"], rows)
            ahead = self.thread.submit(self._take, offsets), offsets, lengths
            if taken:
                yield taken[2], self._joined(*taken)
            taken = ahead
        yield taken[2], self._joined(*taken)

    def _take(self, offsets: np.ndarray) -> pa.Array:
        column = self.dataset.take(offsets.tolist(), columns=[self.tokens_column]).column(0)
        return column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)

    def _joined(
        self, taken: Future[pa.Array], offsets: np.ndarray, lengths: np.ndarray
    ) -> np.ndarray:
        """The documents at these table offsets, each followed by EOS, in one array."""
        lists, lengths = taken.result(), lengths - 1
        found = np.asarray(lists.value_lengths().fill_null(0), np.int64)
        if not np.array_equal(found, lengths):
            at = int(np.flatnonzero(found != lengths)[0])
            raise SystemExit(
                f"document {self._id(offsets[at])} has {found[at]:,} tokens where n_tokens said "
                f"{lengths[at]:,}: count them again with {self.recount}"
            )
        ids = lists.flatten()
        if ids.null_count:
            raise SystemExit(f"column {self.tokens_column} holds NULL ids: tokenize again")
        values = ids.to_numpy(zero_copy_only=False)
        self._check_ids(values, offsets, lengths)
        return np.insert(values.astype(self.dtype, copy=False), np.cumsum(lengths), self.eos_id)

    def _check_ids(self, values: np.ndarray, offsets: np.ndarray, lengths: np.ndarray) -> None:
        if values.max() < self.vocab_size and (values.dtype.kind == "u" or values.min() >= 0):
            return
        bad = int(np.flatnonzero((values < 0) | (values >= self.vocab_size))[0])
        row = int(np.searchsorted(np.cumsum(lengths), bad, side="right"))
        raise SystemExit(
            f"document {self._id(offsets[row])} holds token id {values[bad]} in column "
            f"{self.tokens_column}, outside the {self.vocab_size:,} ids of --tokenizer"
        )

    def close(self) -> None:
        self.thread.shutdown(wait=True, cancel_futures=True)

    def _id(self, offset: int) -> int:
        return self.dataset.take([int(offset)], columns=[self.id_column]).column(0)[0].as_py()


def _parts(sizes: np.ndarray) -> list[np.ndarray]:
    """Indices of ``sizes``, in tokens, cut into parts of about PART."""
    cuts = np.flatnonzero(np.diff(np.cumsum(sizes) // PART)) + 1
    return np.split(np.arange(len(sizes)), cuts)


def _before(ends: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Tokens of the epoch's stream before each of these documents."""
    return np.where(rows > 0, ends[rows - 1], 0)


def ring_permitted() -> bool:
    """Whether this process may make an io_uring as large as Lance's: many containers forbid it.

    Lance reads local files through one under ``file+uring://``; it does not fall back by itself.
    """
    if sys.platform != "linux":
        return False
    io_uring_setup, entries = 425, 16384  # the same number on all architectures; Lance's default
    parameters = ctypes.create_string_buffer(120)  # struct io_uring_params
    fd = ctypes.CDLL(None).syscall(io_uring_setup, entries, parameters)
    if fd < 0:
        return False
    os.close(fd)
    return True
