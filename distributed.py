"""The ranks of a run: joining, leaving, and failing together."""

import ctypes
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import NoReturn, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")

PATIENCE = timedelta(days=7)  # for a rank that is late: see Board
PR_SET_PDEATHSIG = 1  # prctl(2): the signal to get when the parent dies


@dataclass(frozen=True)
class World:
    """This process among the ranks of the run."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    board: "Board | None" = field(default=None, compare=False, repr=False)  # from join()

    @property
    def is_main(self) -> bool:
        """Whether this rank prints and writes what is written once."""
        return self.rank == 0

    def share(self, total: int) -> range:
        """This rank's of ``total`` things in a row: all are dealt, as evenly as possible."""
        return range(self.rank * total // self.size, (self.rank + 1) * total // self.size)

    def gather(self, value: T) -> list[T]:
        """Every rank's ``value``, in rank order, on all ranks. All ranks call it, in one order."""
        return [value] if self.board is None else self.board.gather(value)

    def broadcast(self, value: T) -> T:
        """The main rank's ``value``, on all ranks. All ranks call it, in one order."""
        return self.gather(value if self.is_main else None)[0]

    def apart(self) -> "World":
        """The same ranks with a board of their own, for another thread of each."""
        return self if self.board is None else replace(self, board=self.board.apart())

    def maximum(self, values: list[float]) -> list[float]:
        """The largest of all ranks, value by value. All ranks call it, in one order."""
        return [max(column) for column in zip(*self.gather(values), strict=True)]


class Board:
    """Values passed between ranks through the store of their rendezvous.

    Not a collective of the process group: it holds up no device, and a rank may be as late as it
    takes to build something, however short ``--dist-timeout`` is. Ranks that die are torchrun's
    business, which then ends the others.
    """

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self.store, self.rank, self.size, self.rounds, self.others = store, rank, size, 0, 0

    def apart(self) -> "Board":
        """Another one with its own connection: a wait on this one does not hold it up."""
        self.others += 1  # a name of its own: keys of the one before may still be there
        store = dist.PrefixStore(f"apart{self.others}", self.store.clone())
        return Board(store, self.rank, self.size)

    def gather(self, value: T) -> list[T]:
        keys = [f"{self.rounds}/{rank}" for rank in range(self.size)]
        try:
            self.store.set(keys[self.rank], pickle.dumps(value))
            self.store.wait(keys, PATIENCE)
            values = [pickle.loads(self.store.get(key)) for key in keys]
            if self.rounds:  # whoever wrote this round has read the last one
                self.store.delete_key(f"{self.rounds - 1}/{self.rank}")
        except dist.DistError as error:
            reason = " ".join(str(error).split())[:150]
            raise SystemExit(f"rank {self.rank} lost the other ranks: {reason}") from None
        self.rounds += 1
        return values


@contextmanager
def agreed(world: World, doing: str = "") -> Iterator[None]:
    """Leave together: when the block fails on one rank, it fails on all of them.

    Nobody then waits in a later collective for a rank that is gone. The main rank raises SystemExit
    with the one line that a user sees, the others exit silently; an error that is not the user's
    (neither SystemExit nor OSError) keeps its traceback on the rank where it happened. ``doing`` is
    put before an OSError. A collective call inside must fail on all ranks or on none.
    """
    failure: BaseException | None = None
    try:
        yield
    except (Exception, SystemExit) as error:
        failure = error
    line = None
    if isinstance(failure, OSError):
        line = f"{doing}: {failure}" if doing else str(failure)
    elif failure is not None:
        line = str(failure) if isinstance(failure, SystemExit) else repr(failure)
    lines = world.gather(line)
    failed = [rank for rank, line in enumerate(lines) if line is not None]
    if not failed:
        return
    if failure is not None and not isinstance(failure, OSError | SystemExit):
        raise failure
    first = failed[0]
    if world.is_main:
        raise SystemExit(lines[0] if first == 0 else f"rank {first}: {lines[first]}") from failure
    raise SystemExit(1) from failure


def world_from_environ(environ: Mapping[str, str] = os.environ) -> World:
    """The World in torchrun's variables; one rank where there are none. SystemExit if they clash.

    Without LOCAL_WORLD_SIZE (mpirun, srun) all ranks are taken to be on one node.
    """
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    if not any(name in environ for name in names):
        return World()
    values = {n: environ.get(n, "") for n in (*names, "LOCAL_WORLD_SIZE")}
    values["LOCAL_WORLD_SIZE"] = values["LOCAL_WORLD_SIZE"] or values["WORLD_SIZE"]
    if all(value.isdecimal() for value in values.values()):
        world = World(*map(int, values.values()))
        if world.rank < world.size and world.local_rank < world.local_size <= world.size:
            return world
    shown = " ".join(f"{name}={value}" for name, value in values.items())
    raise SystemExit(
        f"{shown} do not fit together: launch with torchrun, or unset them for one rank"
    )


def join(world: World, device: torch.device, timeout_s: float) -> World:
    """Join the process group, or none without RANK. SystemExit if the ranks cannot meet.

    nccl (RCCL on ROCm) or gloo; ``timeout_s`` seconds bounds the rendezvous and each collective.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)  # first, or every rank opens a context on GPU 0
    if "RANK" not in os.environ:
        return world
    if sys.platform == "linux":  # a rank must not train on when its launcher was killed
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    backend, device_id = ("nccl", device) if device.type == "cuda" else ("gloo", None)
    timeout = timedelta(seconds=timeout_s)
    try:
        store, _, _ = next(dist.rendezvous("env://", timeout=timeout))
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("group", store),
            rank=world.rank,
            world_size=world.size,
            timeout=timeout,
            device_id=device_id,
        )
    except (dist.DistNetworkError, dist.DistStoreError, ValueError) as error:
        where = " ".join(f"{n}={os.environ.get(n)}" for n in ("MASTER_ADDR", "MASTER_PORT"))
        reason = " ".join(str(error).split())
        raise SystemExit(
            f"rank {world.rank} cannot meet the others at {where} ({reason}): "
            "choose a free port with torchrun --master-port or --rdzv-endpoint HOST:PORT"
        ) from None
    board = Board(dist.PrefixStore("board", store), world.rank, world.size)
    return replace(world, board=board if world.size > 1 else None)


@contextmanager
def joined(world: World, device: torch.device, timeout_s: float) -> Iterator[World]:
    """join() and, when all went well, leave(). A rank that fails says why and is gone.

    It must not leave: nccl does so together with all ranks (pytorch/pytorch pull request 141510),
    and they wait for this one in a collective until torchrun sees that it has ended.
    """
    world = join(world, device, timeout_s)
    try:
        yield world
    except BaseException as error:
        if dist.is_initialized():
            _exit(error)
        raise
    leave()


def _exit(error: BaseException) -> NoReturn:
    """End the process as ``error`` would, but by nothing that could wait."""
    status = 1
    if not isinstance(error, SystemExit):
        traceback.print_exception(error)
    elif isinstance(error.code, int):
        status = error.code
    else:
        print(error.code, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def leave() -> None:
    """Leave the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()
        # gloo's threads outlive it where DDP refers to the group. One that gives up the tensor of
        # the last collective while the interpreter ends aborts it (pytorch/pytorch issue 190489).
        time.sleep(0.1)
