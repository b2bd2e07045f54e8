"""Map a function over batches in worker processes: in order, lazily, with bounded work in flight.

Workers come from a fork server, never from a fork of this process: lancedb's threads do not survive
one. They do not import the running script again unless the function lives there: torch and lancedb
would cost each worker 0.7 GB and 3 seconds. Keep the function in a module that imports neither.
"""

import atexit
import multiprocessing
import os
import signal
import sys
import threading
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, nullcontext
from typing import Any

import pyarrow as pa

PIECE_BYTES = 1 << 20  # text per task: small against a slice of columns.py, large against a pipe
IN_FLIGHT_PER_WORKER = 2  # one being worked on, one waiting in the queue


def parallel_map(
    function: Callable[[Any], Any],
    batches: Iterable,
    workers: int,
    initializer: Callable | None = None,
    initargs: tuple = (),
) -> Iterator:
    """Yield ``function(batch)`` for each batch, in order.

    At most ``2 * workers`` batches are drawn ahead of what the consumer took. ``workers=0`` runs
    in this process. ``function`` and ``initializer`` must be importable by name. An exception in a
    worker is raised here, a SystemExit where one was killed; the workers end with the generator,
    also when it is closed early.
    """
    with WorkerPool(workers, initializer, initargs) as pool:
        yield from pool.map(function, batches)


class WorkerPool:
    """Workers that outlive one map: for callers with many short streams of batches.

    ``workers=0`` means this process. ``initializer(*initargs)`` runs once in every worker.
    """

    def __init__(
        self, workers: int, initializer: Callable | None = None, initargs: tuple = ()
    ) -> None:
        if workers < 0:
            raise ValueError(f"workers must be 0 (this process) or more, not {workers}")
        self.workers, self.initializer, self.executor = workers, initializer, None
        if workers == 0:
            _run(initializer, initargs)
            return
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([])  # the default is the script: lancedb before a fork
        self.executor = ProcessPoolExecutor(
            workers, mp_context=context, initializer=_start_worker, initargs=(initializer, initargs)
        )

    def __enter__(self) -> "WorkerPool":
        return self

    def __exit__(self, *_: object) -> None:
        if self.executor is not None:
            self.executor.shutdown(wait=True, cancel_futures=True)

    def map(self, function: Callable[[Any], Any], batches: Iterable) -> Iterator:
        """As :func:`parallel_map`. Closing the iterator early cancels what has not begun."""
        if self.executor is None:
            yield from map(function, batches)
            return
        pending: deque[Future] = deque()
        try:
            for batch in batches:
                pending.append(self._submit(function, batch))
                if len(pending) >= IN_FLIGHT_PER_WORKER * self.workers:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        except BrokenProcessPool:
            raise SystemExit(
                "a worker process was killed, maybe for want of memory: give fewer than --workers "
                f"{self.workers}; the same command continues"
            ) from None
        finally:
            for future in pending:
                future.cancel()

    def _submit(self, function: Callable[[Any], Any], batch: Any) -> Future:
        needs_main = "__main__" in (_module_of(function), _module_of(self.initializer))
        # the executor starts its workers here, one by one as work comes in
        with nullcontext() if needs_main else _main_hidden():
            packed = _Packed(batch) if isinstance(batch, pa.RecordBatch) else batch
            return self.executor.submit(function, packed)


def pieces(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Cut batches to about PIECE_BYTES, at least one row each."""
    for batch in batches:
        rows = max(1, batch.num_rows * PIECE_BYTES // max(batch.nbytes, 1))
        for start in range(0, batch.num_rows, rows):
            yield batch.slice(start, rows)


@contextmanager
def _main_hidden() -> Iterator[None]:
    """Workers started in here do not import the script that is running."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _module_of(function: Callable | None) -> str:
    while hasattr(function, "func"):  # functools.partial
        function = function.func
    return getattr(function, "__module__", "") or ""


class _Packed:
    """Pickles a record batch in IPC form: a slice would else travel with its whole parent."""

    def __init__(self, batch: pa.RecordBatch) -> None:
        self.batch = batch

    def __reduce__(self) -> tuple:
        return pa.ipc.read_record_batch, (self.batch.serialize(), self.batch.schema)


def _run(initializer: Callable | None, initargs: tuple) -> None:
    if initializer is not None:
        initializer(*initargs)


def _start_worker(initializer: Callable | None, initargs: tuple) -> None:
    # Ctrl-C reaches the whole process group; the parent alone decides what to do about it
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    _run(initializer, initargs)


def _leave_with_parent() -> None:
    """End this worker when its parent is gone: after a SIGKILL nobody else would."""
    multiprocessing.parent_process().join()
    os.kill(os.getpid(), signal.SIGKILL)


@atexit.register
def _kill_workers() -> None:
    """A second Ctrl-C while a pool waits for its workers keeps it from telling them to end, and
    Python would wait for them for ever."""
    for process in multiprocessing.active_children():
        process.kill()
