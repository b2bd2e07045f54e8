"""The elastic stream: an epoch is an array, and every block of it is addressable.

The documents of an epoch, in its order and each followed by EOS, are one stream of tokens. Its
whole blocks are cut into S contiguous lanes; epoch block g is block g // S of lane g % S. A run is
one endless sequence of blocks, epoch after epoch, and step k trains blocks k G to (k + 1) G - 1 of
it, whatever the number of ranks: where a run is, is one number.
"""

import argparse
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import lancedb
import numpy as np
import torch

import plan
import reader
from distributed import World
from feed import Batch
from flags import dest, positive
from plan import Arrays, Cache, Order, scan, scan_key, write_order
from reader import Blocks, Reader
from tokenizer import Tokenizer, brief

DEFAULT_SPLITS = 64
# flags that decide which tokens are in which block, compared on resume
FLAGS = (
    *("--pack", "--seq-len", "--no-shuffle", "--shuffle-seed", "--shuffle-clump"),
    *("--tokens-column", "--id-column"),
)
FILTERS = "--filter, --min-score, --val-filter"  # decide which documents there are
WINDOWS = 3  # in memory: one being consumed, one ready, one under way


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("elastic stream")
    group.add_argument(
        "--shuffle-clump", type=positive, default=1, help="rows kept together by the shuffle"
    )
    group.add_argument("--no-shuffle", action="store_true", help="documents in id order")
    group.add_argument("--prefetch-mb", type=positive, default=64, help="read-ahead per rank")
    reader.add_arguments(group)
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


class Slots:
    """A rank's places in a global batch, dealt to micro-batches of ``batch_size`` blocks.

    All ranks have as many micro-batches; ``mine`` are the positions in the global batch that this
    one fills, and what is left of its last micro-batches is masked.
    """

    def __init__(self, global_batch: int, batch_size: int, seq_len: int, world: World) -> None:
        self.mine = world.share(global_batch)
        self.accumulation = -(-global_batch // (batch_size * world.size))
        self.batch_size, self.shape = batch_size, (self.accumulation * batch_size, seq_len)
        filled = torch.arange(self.shape[0]) < len(self.mine)
        self.filled = filled[:, None].expand(self.shape).contiguous()

    def micro_batches(self, columns: dict[str, np.ndarray]) -> list[Batch]:
        """From arrays (n, T) of this rank's blocks of a step; integers become int64. A block
        without a ``mask`` has no padding."""
        step = {"mask": self.filled} | {name: self._padded(a) for name, a in columns.items()}
        parts = {name: tensor.split(self.batch_size) for name, tensor in step.items()}
        return [{name: part[i] for name, part in parts.items()} for i in range(self.accumulation)]

    def _padded(self, values: np.ndarray) -> torch.Tensor:
        """``values`` and zeros in the places that this rank does not fill."""
        padded = np.zeros(self.shape, bool if values.dtype == bool else np.int64)
        padded[: len(values)] = values
        return torch.from_numpy(padded)


# -----------------------------------------------------------------------------
# the stream


class Window(NamedTuple):
    """Blocks read ahead, and which of them each step takes: int64 (steps, blocks of a step)."""

    blocks: Blocks
    rows: np.ndarray


class ElasticStream:
    """The loader: see loaders.py for the interface.

    One background thread packs ahead, ``--prefetch-mb`` of blocks at most, and has another wait for
    Lance; the next epoch's order is built by a third.
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
        self.slots = Slots(global_batch, args.batch_size, args.seq_len, world)
        self.reader = Reader(dataset, args, tokenizer.eos_id, tokenizer.vocab_size)
        self.order = Order(not args.no_shuffle, args.shuffle_seed, args.shuffle_clump)
        self.cache = Cache(Path(args.plan_cache).expanduser(), args.plan_cache_gb << 30)
        self.scan_key = scan_key(dataset, where, args.id_column)
        self.plan_seconds = 0.0  # spent on building plans, or on reading and checking cached ones
        self.scan = self._cached(
            self.scan_key, lambda folder: scan(dataset, where, args.id_column, folder)
        )
        rows, tokens = self.scan.meta["rows"], self.scan.meta["tokens"]
        self.epoch_tokens = rows + tokens  # EOS counted
        self.blocks_per_epoch = self.epoch_tokens // args.seq_len if args.pack else rows
        if args.blocks_per_epoch:
            self.blocks_per_epoch = min(self.blocks_per_epoch, _cap(args.blocks_per_epoch))
        self.lanes = Lanes(self.blocks_per_epoch, args.num_splits or DEFAULT_SPLITS)
        way = "io_uring" if self.reader.by_ring else "threads"
        self.line = f"loader         elastic, {self.lanes.splits:,} lanes, reads by {way}"
        sums = self.scan.meta["hash"]  # the first two do not depend on the rows' order
        self.fingerprint = {
            "documents": "-".join(sums if args.shuffle_clump > 1 else sums[:2]),
            FILTERS: where,
            "--tokenizer": brief(tokenizer),
            "--num-splits": self.lanes.splits,
            "--blocks-per-epoch": self.blocks_per_epoch,
        }
        for flag in FLAGS:
            self.fingerprint[flag] = getattr(args, dest(flag))
        self.threads = (
            ThreadPoolExecutor(1, "elastic-reader"),
            ThreadPoolExecutor(1, "elastic-plan"),
        )
        self.plans: dict[int, Future[Arrays]] = {}
        self.pending: deque[Future[Window]] = deque()

    @property
    def epoch(self) -> int:
        """Epoch of the last block that was consumed."""
        return max(self.consumed - 1, 0) // self.blocks_per_epoch

    def steps(self) -> Iterator[list[Batch]]:
        """Micro-batches of one step after the other, without end."""
        step_bytes = len(self.slots.mine) * self.reader.block_bytes
        most = (self.args.prefetch_mb << 20) // (step_bytes * WINDOWS)
        most = max(1, min(most, self.blocks_per_epoch // self.global_batch))
        ahead, steps = self.consumed, 1
        while True:
            while len(self.pending) < WINDOWS - 1:
                self.pending.append(self.threads[0].submit(self._read, ahead, steps))
                ahead += steps * self.global_batch
                steps = min(2 * steps, most)  # the first batch soon, then large takes
            window = self.pending.popleft().result()
            for rows in window.rows:
                self.consumed += self.global_batch
                yield self._step(window.blocks, rows)

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
        """Bytes of blocks that were read ahead, beside the window being consumed."""
        return sum(f.result().blocks.nbytes for f in self.pending if f.done())

    def close(self) -> None:
        for threads in self.threads:
            threads.shutdown(wait=True, cancel_futures=True)
        self.reader.close()

    def _cached(self, key: str, build: Callable[[Path], dict]) -> Arrays:
        began = time.perf_counter()
        entry = self.cache.get(key, build)
        self.plan_seconds += time.perf_counter() - began
        return entry

    def _plan(self, epoch: int) -> Future[Arrays]:
        """The epoch's order, being built or there."""
        if epoch not in self.plans:
            key = f"{self.scan_key}-{epoch}-{self.order.name}"
            self.plans[epoch] = self.threads[1].submit(
                self._cached, key, lambda to: write_order(self.scan, self.order, epoch, to)
            )
            self.plans.pop(epoch - 2, None)
        return self.plans[epoch]

    def _read(self, first: int, steps: int) -> "Window":
        """This rank's share of ``steps`` steps from block ``first`` of the endless sequence on."""
        each = first + np.arange(steps)[:, None] * self.global_batch + np.array(self.slots.mine)
        epochs, blocks = np.divmod(each.ravel(), self.blocks_per_epoch)
        rows, parts, done = np.empty(len(blocks), np.int64), [], 0
        for epoch in np.unique(epochs):
            here = np.flatnonzero(epochs == epoch)
            order = self._plan(int(epoch)).result()
            if self.args.pack:
                positions = self.lanes.position(blocks[here])
                here = here[np.argsort(positions)]
                parts.append(self.reader.packed(order, np.sort(positions)))
            else:
                parts.append(self.reader.documents(order, blocks[here]))
            rows[here] = done + np.arange(len(here))
            done += len(here)
        if blocks[-1] > self.blocks_per_epoch // 2:
            self._plan(int(epochs[-1]) + 1)
        return Window(Blocks.joined(parts), rows.reshape(steps, -1))

    def _step(self, blocks: Blocks, rows: np.ndarray) -> list[Batch]:
        """Blocks ``rows`` as micro-batches; slots beyond this rank's share are masked."""
        columns = {name: a[rows] for name, a in vars(blocks).items() if a is not None}
        columns["input_ids"] = columns.pop("ids")
        return self.slots.micro_batches(columns)


def _cap(blocks: str) -> int:
    if not blocks.isdigit() or int(blocks) == 0:
        raise SystemExit(f"--blocks-per-epoch {blocks}: --loader elastic takes a number of blocks")
    return int(blocks)
