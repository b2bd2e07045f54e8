"""Loaders of packed blocks by other libraries, each as its own documentation would have it used.

Only the loader that is asked for imports its package.
"""

import os
import re
import shutil
import tempfile
import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from itertools import chain, islice
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from distributed import World
from feed import Batch
from flags import require_package
from packed_blocks import PackedBlocks
from scripts.processes import mapped_shared_memory

MOSAIC_SHM = re.compile(r"\d{6}_")  # its names in /dev/shm
SHUFFLE_BUFFER = 1000  # blocks of webdataset's: what its documentation takes


class LibraryBlocks(PackedBlocks):
    """Blocks that another library deals to the ranks, in the order that it likes.

    An epoch has as many steps on every rank; what it leaves over is not trained on. ``package`` is
    how to install the library, ``module`` its name.
    """

    package, module = "", ""
    running: Generator[torch.Tensor] | None = None  # the epoch's batches

    def batches(self, epoch: int, first: int) -> Generator[torch.Tensor]:
        """This rank's blocks of an epoch from its micro-batch ``first`` on: int64 (batch, T)."""
        raise NotImplementedError

    @cached_property
    def library(self) -> ModuleType:
        return require_package(self.module, f"--blocks-mode {self.args.blocks_mode}", self.package)

    @property
    def epoch_steps(self) -> int:
        """Steps of an epoch: what all ranks have blocks for."""
        return self.blocks_per_epoch // self.global_batch

    @property
    def worker_options(self) -> dict:
        """What torch's DataLoader is told of ``--num-workers``."""
        workers = self.args.num_workers
        context = self.args.mp_context if workers else None
        return {"num_workers": workers, "multiprocessing_context": context}

    def steps(self) -> Iterator[list[Batch]]:
        self._check_steps()
        each, steps = self.slots.accumulation, self.epoch_steps
        while True:
            epoch, done = divmod(self.consumed, self.blocks_per_epoch)
            done //= self.global_batch
            self.running = self.batches(epoch, done * each)
            for _ in range(done, steps):
                blocks = torch.cat(list(islice(self.running, each)))
                self.consumed += self.global_batch
                yield self._step(blocks.numpy())
            self.consumed = (epoch + 1) * self.blocks_per_epoch

    def load_state_dict(self, state: dict) -> None:
        super().load_state_dict(state)
        done = self.consumed % self.blocks_per_epoch
        if done % self.global_batch:
            raise SystemExit(
                f"--resume: {done:,} blocks of the epoch are trained on, which is no multiple of "
                f"--global-batch {self.global_batch:,}: keep the checkpoint's"
            )

    def close(self) -> None:
        if self.running is not None:
            self.running.close()

    def _check_steps(self) -> None:
        """Raises SystemExit where the library cannot deal whole steps to the ranks."""
        size, ranks = self.args.batch_size, self.world.size
        here = f"--blocks-mode {self.args.blocks_mode}: --global-batch {self.global_batch}"
        if self.global_batch != size * ranks * self.slots.accumulation:
            raise SystemExit(f"{here} must be a multiple of --batch-size {size} x {ranks} ranks")
        if not self.epoch_steps:
            raise SystemExit(
                f"{here} is more than an epoch of {self.blocks_per_epoch:,} blocks has for "
                f"{ranks} ranks of {max(1, self.args.num_workers)} workers: lower it"
            )


class DealtBlocks(LibraryBlocks):
    """Blocks of which each rank and worker has a share of its own: other numbers of them, other
    shares, and no place in the epoch that both have in common."""

    def state_dict(self) -> dict:
        dealt = {"ranks": self.world.size, "num_workers": self.args.num_workers}
        return super().state_dict() | dealt | {"batch_size": self.args.batch_size}


class MosaicBlocks(LibraryBlocks):
    """MosaicML Streaming from MDS shards, in an object store or local. Its shuffle decides the
    order; one canonical node keeps that on any number of ranks."""

    format, remote = "mds", True
    package, module = "mosaicml-streaming", "streaming"

    def __init__(self, *args, **options) -> None:
        super().__init__(*args, **options)
        self.cache = ""
        if self.path.remote:  # a node's ranks share what they download
            name = f"mosaic-{os.getpid()}-{time.time_ns()}"
            self.cache = str(Path(tempfile.gettempdir(), self.world.broadcast(name)))

    @cached_property
    def dataset(self) -> Any:
        # whatever is there it takes for stale: also what a run beside this one works with
        others = mapped_shared_memory(apart_from=self.world.gather(os.getpid()))
        if not any(self.world.gather(any(map(MOSAIC_SHM.match, others)))):
            self.library.base.util.clean_stale_shared_memory()
        return self.library.StreamingDataset(
            remote=str(self.path) if self.cache else None,
            local=self.cache or str(self.path),
            shuffle=not self.args.no_shuffle,
            shuffle_seed=self.args.shuffle_seed,
            batch_size=self.args.batch_size,
            num_canonical_nodes=1,
        )

    @cached_property
    def loader(self) -> Any:
        return self.library.StreamingDataLoader(
            self.dataset,
            batch_size=self.args.batch_size,
            collate_fn=stack_tokens,
            drop_last=True,
            **self.worker_options,
        )

    def batches(self, epoch: int, first: int) -> Generator[torch.Tensor]:
        done = first * self.args.batch_size * self.world.size
        state = {"epoch": epoch, "sample_in_epoch": done, "num_canonical_nodes": 1}
        state |= {"shuffle_seed": self.args.shuffle_seed, "initial_physical_nodes": 1}
        self.dataset.load_state_dict(state)
        yield from self.loader

    def close(self) -> None:
        super().close()
        # nothing public stops its threads, which may be downloading; exit() waits for dead ones too
        if threads := getattr(vars(self).get("dataset"), "_executor", None):
            self.dataset._event.set()
            threads.shutdown()
        if self.cache and self.world.local_rank == 0:
            shutil.rmtree(self.cache, ignore_errors=True)


class WebDatasetBlocks(DealtBlocks):
    """WebDataset from local tar shards, of which every rank has every world-size-th one.

    Shards are not cut: a rank with fewer blocks than an epoch has for it begins its shards again,
    and one with more leaves some out. Shards and a buffer of blocks are shuffled within the rank.
    On one rank without workers ``--no-shuffle`` gives the manifest's order; workers take turns.
    """

    format = "webdataset"
    package = module = "webdataset"

    @cached_property
    def shards(self) -> list[str]:
        found = sorted(map(str, Path(self.path).glob("*.tar")))
        if len(found) < self.world.size:
            raise SystemExit(
                f"--blocks-mode webdataset: {len(found)} shards do not go round "
                f"{self.world.size} ranks: start fewer, or build more blocks"
            )
        return found

    def loader(self, epoch: int) -> Any:
        """An epoch's, of lists of at most a micro-batch."""
        shuffle, T = not self.args.no_shuffle, self.args.seq_len
        seed = int(np.random.SeedSequence((self.args.shuffle_seed, epoch)).generate_state(1)[0])
        dataset = self.library.WebDataset(
            self.shards,
            nodesplitter=partial(every, first=self.world.rank, step=self.world.size),
            shardshuffle=len(self.shards) if shuffle else False,
            seed=seed,
            empty_check=False,  # a worker without a shard is idle
        )
        if shuffle:
            dataset = dataset.shuffle(SHUFFLE_BUFFER, seed=seed)
        dataset = dataset.map(partial(decode_bin, dtype=self.dtype.newbyteorder("<"), seq_len=T))
        dataset = dataset.batched(self.args.batch_size, collation_fn=stack_blocks)
        return self.library.WebLoader(dataset, batch_size=None, **self.worker_options)

    def batches(self, epoch: int, first: int) -> Generator[torch.Tensor]:
        """What was consumed is read once more: webdataset cannot skip."""
        size = self.args.batch_size
        blocks = chain.from_iterable(self.loader(epoch).repeat())
        blocks = islice(blocks, first * size, None)
        while batch := list(islice(blocks, size)):
            yield torch.stack(batch)


class LitDataBlocks(DealtBlocks):
    """LitData from local chunks of tokens, dealt out whole to ranks and workers.

    Its order depends on both numbers; ``drop_last`` cuts all of them to what the poorest has. On
    one rank without workers ``--no-shuffle`` gives the manifest's order.
    """

    format = "litdata"
    package = module = "litdata"

    def loader(self) -> Any:
        """A new one. Its dataset learns here which rank it is, and takes that to the workers."""
        with litdata_rank(self.world):
            dataset = self.library.StreamingDataset(
                str(self.path),
                item_loader=self.library.TokensLoader(self.args.seq_len),
                shuffle=not self.args.no_shuffle,
                seed=self.args.shuffle_seed,
                drop_last=True,
            )
        return self.library.StreamingDataLoader(
            dataset,
            batch_size=self.args.batch_size,
            collate_fn=stack_blocks,
            drop_last=True,
            **self.worker_options,
        )

    @cached_property
    def epoch_steps(self) -> int:
        return min(len(self.loader()) // self.slots.accumulation, super().epoch_steps)

    def batches(self, epoch: int, first: int) -> Generator[torch.Tensor]:
        loader = self.loader()  # one that has resumed would do so again in its next epoch
        loader.current_epoch = epoch  # it counts from 1, and up as an epoch begins
        if first:
            state = loader.state_dict()
            for part in (state, state["dataset"]):
                part["current_epoch"] = epoch + 1
                part["num_samples_yielded"] = first * self.args.batch_size
            state["latest_worker_idx"] = (first - 1) % max(1, self.args.num_workers)
            with litdata_rank(self.world):
                loader.load_state_dict(state)
        yield from loader


@contextmanager
def litdata_rank(world: World) -> Iterator[None]:
    """Inside, litdata finds this rank: it asks the environment, for other names than torchrun's."""
    ours = {"WORLD_SIZE": world.size, "GLOBAL_RANK": world.rank}
    ours["NNODES"] = max(1, world.size // world.local_size)
    before = {name: os.environ.get(name) for name in ours}
    os.environ.update({name: str(value) for name, value in ours.items()})
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def stack_tokens(samples: list[dict]) -> torch.Tensor:
    """Mosaic's collate function: int64 (B, T)."""
    return stack_blocks([s["tokens"] for s in samples])


def stack_blocks(blocks: list[np.ndarray]) -> torch.Tensor:
    """WebDataset's and LitData's collate function: int64 (B, T)."""
    return torch.from_numpy(np.stack(blocks).astype(np.int64))


def decode_bin(sample: dict, dtype: np.dtype, seq_len: int) -> np.ndarray:
    """The block (T,) of a WebDataset sample."""
    return np.frombuffer(sample["bin"], dtype, seq_len)


def every(things: Iterable, first: int, step: int) -> Iterator:
    """Every ``step``-th of them from number ``first`` on."""
    return islice(things, first, None, step)
