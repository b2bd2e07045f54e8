"""The elastic stream: an epoch is an array, and every block of it is addressable.

The documents of an epoch, in its order and each followed by EOS, are one stream of tokens. Its
whole blocks are cut into S contiguous lanes; epoch block g is block g // S of lane g % S. A run is
one endless sequence of blocks, epoch after epoch, and step k trains blocks k G to (k + 1) G - 1 of
it, whatever the number of ranks: where a run is, is one number.
"""

import argparse
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import lance
import lancedb
import numpy as np
import torch

import plan
from distributed import World
from flags import positive
from plan import Arrays, Cache, Order, scan, scan_key, write_order
from tokenizer import Tokenizer

Batch = dict[str, torch.Tensor]

DEFAULT_SPLITS = 64
# flags that decide which tokens are in which block, compared on resume
FLAGS = (
    *("--pack", "--seq-len", "--no-shuffle", "--shuffle-seed", "--shuffle-clump"),
    *("--tokens-column", "--id-column"),
)
WINDOWS = 4  # the read-ahead is this many takes: one being consumed, the others under way


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("elastic stream")
    group.add_argument(
        "--shuffle-clump", type=positive, default=1, help="rows kept together by the shuffle"
    )
    group.add_argument("--no-shuffle", action="store_true", help="documents in id order")
    group.add_argument("--prefetch-mb", type=positive, default=64, help="read-ahead per rank")
    plan.add_arguments(group)


# -----------------------------------------------------------------------------
# where a block is


@dataclass(frozen=True)
class Lanes:
    """``blocks`` whole blocks cut into ``splits`` contiguous lanes, read round robin."""

    blocks: int
    splits: int

    def position(self, g: np.ndarray) -> np.ndarray:
        """Which block of the epoch's token stream epoch block ``g`` is: int64 (n,) both."""
        splits = min(self.splits, self.blocks)
        q, r = divmod(self.blocks, splits)
        lane, index = g % splits, g // splits
        return lane * q + np.minimum(lane, r) + index


def rank_slots(global_batch: int, batch_size: int, world: World) -> tuple[range, int]:
    """Positions of the global batch that a rank takes, and the number of its micro-batches."""
    first = world.rank * global_batch // world.size
    last = (world.rank + 1) * global_batch // world.size
    return range(first, last), -(-global_batch // (batch_size * world.size))


# -----------------------------------------------------------------------------
# reading and packing


class Reader:
    """Reads documents of the pinned table and packs blocks of ``seq_len`` tokens."""

    def __init__(
        self,
        dataset: lance.LanceDataset,
        args: argparse.Namespace,
        eos_id: int,
        vocab_size: int,
    ) -> None:
        self.dataset, self.seq_len = dataset, args.seq_len
        self.tokens_column, self.id_column = args.tokens_column, args.id_column
        self.eos_id, self.vocab_size = eos_id, vocab_size

    def packed(
        self,
        epoch: Arrays,
        positions: np.ndarray,
        at: np.ndarray,
        ids: np.ndarray,
        docs: np.ndarray,
    ) -> None:
        """Write the blocks at ``positions`` (n,) of the epoch's token stream into rows ``at`` (n,)
        of ``ids``, and each token's document number within its block into ``docs``: int64 (., T).
        """
        T, ends = self.seq_len, epoch["end"]
        order = np.argsort(positions)
        ordered = positions[order]
        # runs of adjacent blocks are read as one piece of the stream
        breaks = np.flatnonzero(np.diff(ordered) != 1) + 1
        begins = ordered[np.append(0, breaks)] * T
        stops = (ordered[np.append(breaks - 1, len(ordered) - 1)] + 1) * T
        lo = np.searchsorted(ends, begins, side="right")
        hi = np.searchsorted(ends, stops, side="left") + 1
        rows = np.concatenate([np.arange(a, b) for a, b in zip(lo, hi, strict=True)])
        before = np.where(rows > 0, ends[rows - 1], 0)
        lengths = ends[rows] - before - 1
        stream = self._joined(epoch["offset"][rows], lengths)
        documents = np.repeat(np.arange(len(rows), dtype=np.int32), lengths + 1)
        # where each run begins in the stream that was read, which starts with a whole document
        first_row = np.cumsum(np.append(0, hi - lo))[:-1]
        read_before = np.cumsum(np.append(0, lengths + 1))[first_row]
        cuts = read_before + begins - before[first_row]
        run_begin = np.append(np.append(0, breaks), len(ordered))
        for j, cut in enumerate(cuts):
            to, n = at[order[run_begin[j] : run_begin[j + 1]]], stops[j] - begins[j]
            ids[to] = stream[cut : cut + n].reshape(-1, T)
            numbers = documents[cut : cut + n].reshape(-1, T)
            docs[to] = numbers - numbers[:, :1]

    def documents(
        self, epoch: Arrays, rows: np.ndarray, at: np.ndarray, ids: np.ndarray, masks: np.ndarray
    ) -> None:
        """Row mode: write documents ``rows`` (n,) with EOS, cut or padded, into rows ``at`` (n,) of
        ``ids`` int64 (., T), and what is real of them into ``masks`` bool (., T)."""
        T, ends = self.seq_len, epoch["end"]
        lengths = ends[rows] - np.where(rows > 0, ends[rows - 1], 0) - 1
        stream = self._joined(epoch["offset"][rows], lengths)
        starts = np.cumsum(np.append(0, lengths + 1))[:-1]
        mask = np.arange(T) < (lengths + 1)[:, None]
        index = np.minimum(starts[:, None] + np.arange(T), len(stream) - 1)
        ids[at], masks[at] = np.where(mask, stream[index], self.eos_id), mask

    def _joined(self, offsets: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """The documents at these table offsets, each followed by EOS, in one array.

        Raises SystemExit when a document is not as long as planned or an id is not a token's.
        """
        column = self.dataset.take(offsets.tolist(), columns=[self.tokens_column]).column(0)
        lists = column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)
        found = np.asarray(lists.value_lengths().fill_null(0), np.int64)
        if not np.array_equal(found, lengths):
            at = int(np.flatnonzero(found != lengths)[0])
            raise SystemExit(
                f"document {self._id(offsets[at])} has {found[at]:,} tokens where n_tokens said "
                f"{lengths[at]:,}: run scripts/tokenize_corpus.py --overwrite"
            )
        ids = lists.flatten()
        if ids.null_count:
            raise SystemExit(f"column {self.tokens_column} holds NULL ids: tokenize again")
        values = ids.to_numpy(zero_copy_only=False)
        self._check_ids(values, offsets, lengths)
        stream = np.full(len(values) + len(lengths), self.eos_id, self._dtype(values))
        is_token = np.ones(len(stream), bool)
        is_token[np.cumsum(lengths + 1) - 1] = False
        stream[is_token] = values
        return stream

    def _dtype(self, values: np.ndarray) -> np.dtype:
        """One that holds the values and EOS; the narrower it is, the less memory moves."""
        return np.result_type(values.dtype, np.min_scalar_type(self.eos_id))

    def _check_ids(self, values: np.ndarray, offsets: np.ndarray, lengths: np.ndarray) -> None:
        if values.max() < self.vocab_size and (values.dtype.kind == "u" or values.min() >= 0):
            return
        bad = int(np.flatnonzero((values < 0) | (values >= self.vocab_size))[0])
        row = int(np.searchsorted(np.cumsum(lengths), bad, side="right"))
        raise SystemExit(
            f"document {self._id(offsets[row])} holds token id {values[bad]} in column "
            f"{self.tokens_column}, outside the {self.vocab_size:,} ids of --tokenizer"
        )

    def _id(self, offset: int) -> int:
        return self.dataset.take([int(offset)], columns=[self.id_column]).column(0)[0].as_py()


# -----------------------------------------------------------------------------
# the stream


class ElasticStream:
    """The loader: see blocks_loaders.py for the interface.

    One background thread reads ahead, ``--prefetch-mb`` of batches at most; the next epoch's order
    is built by another, which ends with its work.
    """

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
        dataset = table.to_lance()
        self.args, self.global_batch, self.consumed = args, global_batch, 0
        self.slots, self.micro_batches = rank_slots(global_batch, args.batch_size, world)
        rows = self.micro_batches * args.batch_size
        self.step_bytes = rows * args.seq_len * 17  # two int64 and a bool
        full = torch.arange(rows) < len(self.slots)  # packed blocks have no padding
        self.full = full[:, None].expand(rows, args.seq_len).contiguous()
        self.reader = Reader(dataset, args, tokenizer.eos_id, tokenizer.vocab_size)
        self.order = Order(not args.no_shuffle, args.shuffle_seed, args.shuffle_clump)
        self.cache = Cache(Path(args.plan_cache).expanduser(), args.plan_cache_gb << 30)
        self.scan_key = scan_key(dataset, where, args.id_column)
        self.scan = self.cache.get(
            self.scan_key, lambda folder: scan(dataset, where, args.id_column, folder)
        )
        rows, tokens = self.scan.meta["rows"], self.scan.meta["tokens"]
        self.epoch_tokens = rows + tokens  # EOS counted
        self.blocks_per_epoch = self.epoch_tokens // args.seq_len if args.pack else rows
        if args.blocks_per_epoch:
            self.blocks_per_epoch = min(self.blocks_per_epoch, _cap(args.blocks_per_epoch))
        self.lanes = Lanes(self.blocks_per_epoch, args.num_splits or DEFAULT_SPLITS)
        sums = self.scan.meta["hash"]  # the first two do not depend on the rows' order
        self.fingerprint = {
            "documents": "-".join(sums if args.shuffle_clump > 1 else sums[:2]),
            "--filter, --min-score, --val-filter": where,
            "--tokenizer": f"{tokenizer.fingerprint}, EOS {tokenizer.eos_id}",
            "--num-splits": self.lanes.splits,
            "--blocks-per-epoch": self.blocks_per_epoch,
        }
        for flag in FLAGS:
            self.fingerprint[flag] = getattr(args, flag.removeprefix("--").replace("-", "_"))
        self.threads = (
            ThreadPoolExecutor(1, "elastic-reader"),
            ThreadPoolExecutor(1, "elastic-plan"),
        )
        self.plans: dict[int, Future[Arrays]] = {}
        self.pending: deque[Future[list[list[Batch]]]] = deque()

    @property
    def epoch(self) -> int:
        """Epoch of the last block that was consumed."""
        return max(self.consumed - 1, 0) // self.blocks_per_epoch

    def steps(self) -> Iterator[list[Batch]]:
        """Micro-batches of one step after the other, without end."""
        ahead, window = self.consumed, 1
        most = max(1, (self.args.prefetch_mb << 20) // (self.step_bytes * WINDOWS))
        while True:
            while len(self.pending) < WINDOWS:
                self.pending.append(self.threads[0].submit(self._read, ahead, window))
                ahead += window * self.global_batch
                window = min(2 * window, most)  # the first batch soon, then large takes
            for batches in self.pending.popleft().result():
                self.consumed += self.global_batch
                yield batches

    def state_dict(self) -> dict:
        """What was consumed: constant in size, equal on all ranks."""
        epoch, block = divmod(self.consumed, self.blocks_per_epoch)
        return {
            "loader": "elastic",
            "epoch": epoch,
            "block": block,
            "fingerprint": self.fingerprint,
        }

    def load_state_dict(self, state: dict) -> None:
        """Continue there. Raises SystemExit, naming what differs, for other data."""
        theirs = state.get("fingerprint", {"--loader": state["loader"]})
        names = theirs | self.fingerprint
        different = [
            f"{name} was {theirs.get(name)}, is {self.fingerprint.get(name)}"
            for name in names
            if theirs.get(name) != self.fingerprint.get(name)
        ]
        if different:
            raise SystemExit(
                f"--resume: other data: {'; '.join(different)} (--resume-data new begins with it)"
            )
        self.consumed = state["epoch"] * self.blocks_per_epoch + state["block"]

    def ledger(self) -> dict[str, int]:
        """Where the tokens of all epochs begun so far are, EOS counted: their sum is ``total``.

        ``consumed`` were in blocks given to the trainer, ``truncated`` were cut off in row mode,
        ``tails`` fill no whole block (or lie behind --blocks-per-epoch) and ``not_reached`` are
        those of the current epoch still to come.
        """
        whole, blocks = divmod(self.consumed, self.blocks_per_epoch)
        ledger = dict.fromkeys(("total", "consumed", "truncated", "not_reached", "tails"), 0)
        for epoch in range(whole + (blocks > 0)):
            taken = self.blocks_per_epoch if epoch < whole else blocks
            used, cut = self._used(epoch, taken)
            ledger["total"] += self.epoch_tokens
            ledger["consumed"] += used
            ledger["truncated"] += cut
            ledger["tails" if epoch < whole else "not_reached"] += self.epoch_tokens - used - cut
        return ledger

    def _used(self, epoch: int, blocks: int) -> tuple[int, int]:
        """Tokens in, and cut off by, the first ``blocks`` blocks of an epoch."""
        if self.args.pack:
            return blocks * self.args.seq_len, 0
        if blocks == len(self.scan["n_tokens"]):  # any order of them
            lengths = self.scan["n_tokens"].astype(np.int64) + 1
        else:
            ends = self._plan(epoch).result()["end"][:blocks]
            lengths = np.diff(ends, prepend=0)
        used = int(np.minimum(lengths, self.args.seq_len).sum())
        return used, int(lengths.sum()) - used

    def queued_bytes(self) -> int:
        """Bytes of batches that were read and not yet taken."""
        ready = [f for f in self.pending if f.done()]
        return sum(len(f.result()) for f in ready) * self.step_bytes

    def close(self) -> None:
        for threads in self.threads:
            threads.shutdown(wait=True, cancel_futures=True)

    def _plan(self, epoch: int) -> Future[Arrays]:
        """The epoch's order, being built or there."""
        if epoch not in self.plans:
            key = f"{self.scan_key}-{epoch}-{self.order.name}"
            self.plans[epoch] = self.threads[1].submit(
                self.cache.get, key, lambda to: write_order(self.scan, self.order, epoch, to)
            )
            self.plans.pop(epoch - 2, None)
        return self.plans[epoch]

    def _read(self, first: int, steps: int) -> list[list[Batch]]:
        """This rank's share of ``steps`` steps from block ``first`` of the endless sequence on."""
        n, rows = len(self.slots), self.micro_batches * self.args.batch_size
        each = first + np.arange(steps)[:, None] * self.global_batch + np.array(self.slots)
        epochs, blocks = np.divmod(each.ravel(), self.blocks_per_epoch)
        shape = (steps * rows, self.args.seq_len)
        ids, extra = (
            np.zeros(shape, np.int64),
            np.zeros(shape, np.int64 if self.args.pack else bool),
        )
        at = np.arange(steps)[:, None] * rows + np.arange(n)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            order, to = self._plan(int(epoch)).result(), at.ravel()[here]
            if self.args.pack:
                self.reader.packed(order, self.lanes.position(blocks[here]), to, ids, extra)
            else:
                self.reader.documents(order, blocks[here], to, ids, extra)
        if blocks[-1] > self.blocks_per_epoch // 2:
            self._plan(int(epochs[-1]) + 1)
        return [
            self._step(ids[k : k + rows], extra[k : k + rows]) for k in range(0, len(ids), rows)
        ]

    def _step(self, ids: np.ndarray, extra: np.ndarray) -> list[Batch]:
        """One step's blocks as micro-batches; slots beyond this rank's share are masked."""
        step = {"input_ids": torch.from_numpy(ids)}
        if self.args.pack:
            step |= {"mask": self.full, "doc_ids": torch.from_numpy(extra)}
        else:
            step["mask"] = torch.from_numpy(extra)
        parts = [tensor.split(self.args.batch_size) for tensor in step.values()]
        return [dict(zip(step, rows, strict=True)) for rows in zip(*parts, strict=True)]


def _cap(blocks: str) -> int:
    if not blocks.isdigit() or int(blocks) == 0:
        raise SystemExit(f"--blocks-per-epoch {blocks}: --loader elastic takes a number of blocks")
    return int(blocks)
