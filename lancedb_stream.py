"""``lancedb.streaming`` behind the loaders' interface: the reference, an arm of the comparison."""

import argparse
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import closing
from itertools import islice

import lancedb
import numpy as np
import pyarrow as pa
import torch
from lancedb.streaming import StreamingDataLoader, StreamingDataset

from common import check_ids
from distributed import World
from feed import Batch, documents_by_eos
from tokenizer import Tokenizer

# lancedb.streaming can mark padding only by an id. One past the vocabulary would hide an id that is
# off by one; this one no token column of up to 32 bits can hold.
PAD_ID = -(1 << 40)


class LanceDBStream:
    """``lancedb.streaming`` as it comes: the reference, and an arm of the comparison.

    Its limits are refused with SystemExit: splits must be a multiple of ranks x workers and divide
    batch x ranks, the global batch is batch x ranks x accumulation, and a resume needs the same
    world size. An epoch is cut to whole steps; short splits are padded and surplus rows dropped.
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
        self.table, self.args, self.world, self.where = table, args, world, where
        self.tokenizer, self.eos_id = tokenizer, tokenizer.eos_id
        self.global_batch = global_batch
        self.accumulation = global_batch // (args.batch_size * world.size)
        self.num_splits = args.num_splits or args.batch_size * world.size
        self._check_splits()
        self.epoch, self.steps_done, self._resume_state = 0, 0, None
        self.dataset, self._running = None, None
        rows = table.count_rows(where)
        if rows < self.num_splits:
            raise SystemExit(
                f"--loader lancedb: {rows:,} documents do not fill {self.num_splits} splits: lower "
                "--batch-size or --num-splits"
            )
        self.blocks_per_epoch = self._count_blocks()
        self.steps_per_epoch = self.blocks_per_epoch // self.global_batch
        self.line = f"loader         lancedb.streaming, {self.num_splits:,} splits"

    def steps(self) -> Iterator[list[Batch]]:
        """Micro-batches of one step after the other, epoch after epoch, without end."""
        self._running = self._steps()
        return self._running

    def _steps(self) -> Iterator[list[Batch]]:
        while True:
            if self.steps_done < self.steps_per_epoch:
                yield from self._epoch_steps()
            self.epoch, self.steps_done, self._resume_state = self.epoch + 1, 0, None

    def state_dict(self) -> dict:
        """What the trainer consumed. A collective call: each rank knows only its own splits."""
        dataset = self._resume_state
        if self.dataset is not None:
            states = self.world.gather(self.dataset.state_dict())
            dataset = StreamingDataset.merge_state_dicts(states)
        return {
            "loader": "lancedb",
            "world_size": self.world.size,
            "global_batch": self.global_batch,
            "where": self.where,
            "pack": self.args.pack,
            "epoch": self.epoch,
            "steps_done": self.steps_done,
            "dataset": dataset,
        }

    def load_state_dict(self, state: dict) -> None:
        for field, ours in (
            ("loader", "lancedb"),
            ("world_size", self.world.size),
            ("global_batch", self.global_batch),
            ("where", self.where),
            ("pack", self.args.pack),
        ):
            if state[field] != ours:
                raise SystemExit(
                    f"--loader lancedb cannot resume with {field} {ours}: "
                    f"the checkpoint has {state[field]}"
                )
        self.epoch, self.steps_done = state["epoch"], state["steps_done"]
        self._resume_state = state["dataset"]

    def ledger(self) -> dict[str, int]:
        """Not kept: lancedb.streaming does not say what it padded and dropped."""
        return {}

    plan_seconds = 0.0  # it makes its plan in the first step's wait

    def queued_bytes(self) -> int:
        """Not known: its raw queues are not to be looked into."""
        return 0

    def close(self) -> None:
        if self._running is not None:
            self._running.close()

    def _epoch_steps(self) -> Iterator[list[Batch]]:
        self.dataset = self.open_dataset(self.epoch, self.blocks_per_epoch)
        if self._resume_state is not None:
            try:
                self.dataset.load_state_dict(self._resume_state)
            except ValueError as error:
                raise SystemExit(f"--loader lancedb cannot resume: {error}") from None
        with closing(self._micro_batches(self.dataset)) as micro_batches:
            for _ in range(self.steps_done, self.steps_per_epoch):
                batches = list(islice(micro_batches, self.accumulation))
                if len(batches) < self.accumulation:
                    raise RuntimeError(f"lancedb.streaming ended epoch {self.epoch} early")
                self.steps_done += 1
                yield batches

    def _micro_batches(self, dataset: StreamingDataset) -> Iterator[Batch]:
        """Batches of ``--batch-size``, composed alike for any number of workers.

        The DataLoader deals whole batches to its workers in turn and each worker reads its own
        splits, so a micro-batch is one share from each, put back into the splits' order.
        """
        workers, size = self.args.num_workers, self.args.batch_size
        shares = max(workers, 1)
        loader = StreamingDataLoader(
            dataset,
            batch_size=size // shares,
            num_workers=workers,
            multiprocessing_context=self.args.mp_context if workers else None,
            worker_init_fn=leave_with_parent,
        )
        batches = iter(loader)
        while parts := list(islice(batches, shares)):
            if len(parts) < shares or len(parts[-1]["input_ids"]) < size // shares:
                return  # rows that do not fill a batch, at an epoch's end in row mode
            stacked = {k: torch.stack([part[k] for part in parts]) for k in parts[0]}
            ordered = {name: self._in_split_order(v) for name, v in stacked.items()}
            yield self._contract(ordered)

    def _in_split_order(self, parts: torch.Tensor) -> torch.Tensor:
        """(workers, blocks per worker, T) to (batch, T): cycle by cycle over all splits."""
        workers, _, T = parts.shape
        cycles = self.args.batch_size * self.world.size // self.num_splits
        return parts.view(workers, cycles, -1, T).transpose(0, 1).reshape(-1, T)

    def _contract(self, batch: Batch) -> Batch:
        """Mark padding by the mask and check the ids. Raises SystemExit for an unknown id."""
        ids = batch["input_ids"]
        mask = batch.get("mask", ids != PAD_ID)
        ids = ids.masked_fill(~mask, self.eos_id)
        check_ids(ids, self.tokenizer, self.args)
        batch = {**batch, "input_ids": ids, "mask": mask}
        if self.args.pack:  # it does not say where documents end, but by EOS
            batch["doc_ids"] = documents_by_eos(ids, self.eos_id)
        return batch

    def open_dataset(self, epoch: int, blocks: int | str | None) -> StreamingDataset:
        args = self.args
        packing = {
            "pack_sequences": args.seq_len,
            "eos_id": self.eos_id,
            "pad_id": PAD_ID,
            "blocks_per_epoch": blocks,
        }
        rows = {"transform": DocumentBlocks(args.seq_len, self.eos_id)}
        return StreamingDataset(
            self.table,
            num_splits=self.num_splits,
            shuffle_seed=args.shuffle_seed,
            epoch=epoch,
            rank=self.world.rank,
            world_size=self.world.size,
            read_batch_size=args.read_batch_size,
            io_queue_depth=args.io_queue_depth,
            transform_parallelism=args.transform_parallelism,
            transform_queue_depth=args.transform_queue_depth or None,
            columns=[args.tokens_column],
            filter=self.where,
            **(packing if args.pack else rows),
        )

    def _check_splits(self) -> None:
        batch, world, workers = self.args.batch_size, self.world.size, self.args.num_workers
        unit = world * max(workers, 1)
        if self.num_splits % unit or batch * world % self.num_splits:
            raise SystemExit(
                f"--loader lancedb: --num-splits {self.num_splits} must be a multiple of {world} "
                f"ranks x {max(workers, 1)} workers and divide {batch} blocks x {world} ranks: "
                f"change --num-splits, --batch-size or --num-workers"
            )
        if self.global_batch != batch * world * self.accumulation:
            raise SystemExit(
                f"--loader lancedb: --global-batch {self.global_batch} must be a multiple of "
                f"--batch-size {batch} x {world} ranks"
            )

    def _count_blocks(self) -> int:
        """Blocks of an epoch: documents in row mode, else from n_tokens or as the flag says."""
        if not self.args.pack:
            rows = self.table.count_rows(self.where)
            return rows - rows % self.num_splits
        if self.args.blocks_per_epoch == "auto":
            return self.open_dataset(0, "auto").state_dict()["blocks_per_epoch"]
        if self.args.blocks_per_epoch:
            return self._blocks_flag()
        scan = self.table.search().select(["n_tokens"]).where(self.where).to_batches()
        lengths = (batch.column("n_tokens").to_numpy() for batch in scan)
        tokens = sum(int(n.sum(dtype=np.int64)) + len(n) for n in lengths)  # + 1 EOS each
        blocks = tokens // self.args.seq_len
        return blocks - blocks % self.global_batch

    def _blocks_flag(self) -> int:
        given = self.args.blocks_per_epoch
        if not given.isdigit() or int(given) == 0 or int(given) % self.num_splits:
            raise SystemExit(
                f"--blocks-per-epoch {given}: give auto or a multiple of {self.num_splits} splits"
            )
        return int(given)


def leave_with_parent(worker: int) -> None:
    """End this loader process when its rank is gone: after a SIGKILL nobody else would."""

    def wait() -> None:
        multiprocessing.parent_process().join()
        os.kill(os.getpid(), signal.SIGKILL)  # lancedb's threads would hold up any other exit

    threading.Thread(target=wait, daemon=True).start()


class DocumentBlocks:
    """Row mode's transform: one document's tokens and EOS, cut or padded to ``seq_len``."""

    def __init__(self, seq_len: int, eos_id: int) -> None:
        self.seq_len, self.eos_id = seq_len, eos_id

    def __call__(self, batch: pa.RecordBatch) -> list[Batch]:
        lists, T = batch.column(0), self.seq_len
        blocks = []
        for tokens in lists:
            ids = np.full(T, self.eos_id, np.int64)
            values = tokens.values.to_numpy(zero_copy_only=False)[:T]
            ids[: len(values)] = values
            mask = np.arange(T) <= len(values)  # EOS included, where it fits
            blocks.append({"input_ids": torch.from_numpy(ids), "mask": torch.from_numpy(mask)})
        return blocks
