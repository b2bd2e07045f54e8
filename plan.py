"""Which documents an epoch has and in which order: flat arrays, built once per node and mapped.

A *scan* lists the rows that the filter keeps: where they are, their ids and token counts. An
*epoch's order* is a permutation of them with the cumulative token count. Both live in a node-local
cache, a directory each, written whole under another name and renamed; whoever comes first builds,
everybody maps the same files.
"""

import argparse
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import lance
import numpy as np

from common import crc32
from flags import not_negative

CHUNK = 1 << 20  # rows handled at once, which bounds the memory beside the arrays themselves
META = "meta.json"


def add_arguments(parser: argparse._ArgumentGroup) -> None:
    parser.add_argument(
        "--plan-cache",
        default=os.path.join(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "lance-pretrain"),
        help="node-local directory for the order of the documents",
    )
    parser.add_argument("--plan-cache-gb", type=not_negative, default=20, help="its size at most")


# -----------------------------------------------------------------------------
# the hash


def mix(x: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64 (Steele, Lea & Flood 2014): a bijection of uint64 arrays."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def shuffle_keys(ids: np.ndarray, seed: int, epoch: int) -> np.ndarray:
    """Sort keys uint64 of document ids: the same on every platform and version of anything.

    A bijection of the id for one (seed, epoch), so different ids never tie.
    """
    golden = 0x9E3779B97F4A7C15  # 2^64 / the golden ratio: SplitMix64's increment
    salt = mix(mix(np.array([seed % 2**64], np.uint64)) + np.uint64(epoch * golden % 2**64))
    return mix(ids.astype(np.uint64) ^ salt)


def document_hash(ids: np.ndarray, n_tokens: np.ndarray, positions: np.ndarray) -> list[int]:
    """Four sums mod 2^64 over the rows: two of (id, count), two of (position, id, count).

    The first two do not depend on the order of the rows, which compaction changes.
    """
    h = mix(mix(ids.astype(np.uint64)) + n_tokens.astype(np.uint64))
    p = mix(h + mix(positions.astype(np.uint64) + np.uint64(1)))
    return [int(x.sum(dtype=np.uint64)) for x in (h, mix(h + np.uint64(1)), p, mix(p))]


# -----------------------------------------------------------------------------
# scan and order


def scan_key(dataset: lance.LanceDataset, where: str, id_column: str) -> str:
    """Names the scan by the files that it would read: no other table can be taken for it."""
    digest = hashlib.sha256(f"1\n{where}\n{id_column}\n".encode())
    for fragment in dataset.get_fragments():
        digest.update(json.dumps(fragment.metadata.to_json(), sort_keys=True).encode())
    return digest.hexdigest()[:24]


def scan(dataset: lance.LanceDataset, where: str, id_column: str, folder: Path) -> dict:
    """Write ``offset`` uint64 (position in the table), ``id`` int64 and ``n_tokens`` int32 of the
    rows that ``where`` keeps, in table order. No token column is read. Returns what it found."""
    scanner = dataset.scanner(columns=["_rowoffset", id_column, "n_tokens"], filter=where)
    rows, tokens, sums = 0, 0, [0, 0, 0, 0]
    with writer(folder, offset=np.uint64, id=np.int64, n_tokens=np.int32) as write:
        for batch in scanner.to_batches():
            if batch.column(1).null_count:
                raise SystemExit(f"column {id_column} has NULLs: name another with --id-column")
            offsets, ids, counts = (batch.column(i).to_numpy() for i in range(3))
            write(offset=offsets, id=ids, n_tokens=counts)
            part = document_hash(ids, counts, np.arange(rows, rows + len(ids)))
            sums = [(a + b) % 2**64 for a, b in zip(sums, part, strict=True)]
            rows, tokens = rows + len(ids), tokens + int(counts.sum(dtype=np.int64))
    return {"rows": rows, "tokens": tokens, "hash": [f"{s:016x}" for s in sums]}


@dataclass(frozen=True)
class Order:
    """How an epoch is ordered: ``shuffle`` by hash in clumps of ``clump`` rows, else by id."""

    shuffle: bool
    seed: int
    clump: int

    @property
    def name(self) -> str:
        return f"{self.seed}-{self.clump}" if self.shuffle else "by-id"

    def permutation(self, ids: np.ndarray, epoch: int) -> np.ndarray:
        """Row numbers of a scan in the epoch's order. Raises SystemExit for an id that is twice."""
        if not self.shuffle:
            order = np.argsort(ids)
            _refuse_twins(ids, order)
            return order
        heads = ids[:: self.clump]
        keys = np.empty(len(heads), np.uint64)
        for i in range(0, len(heads), CHUNK):
            keys[i : i + CHUNK] = shuffle_keys(heads[i : i + CHUNK], self.seed, epoch)
        order = np.argsort(keys)
        _refuse_twins(heads, order)
        if self.clump == 1:
            return order
        begins = order * self.clump
        lengths = np.minimum(begins + self.clump, len(ids)) - begins
        ends = np.cumsum(lengths)
        return np.arange(len(ids)) + np.repeat(begins - (ends - lengths), lengths)


def _refuse_twins(ids: np.ndarray, order: np.ndarray) -> None:
    """Equal ids have equal keys, so they are neighbours in any order."""
    for i in range(0, len(order), CHUNK):
        near = ids[order[i : i + CHUNK + 1]]
        if (same := near[1:] == near[:-1]).any():
            raise SystemExit(
                f"id {near[1:][same][0]} occurs more than once: name a unique column with "
                "--id-column"
            )


def write_order(found: "Arrays", order: Order, epoch: int, folder: Path) -> dict:
    """Write an epoch's ``offset`` uint64 and ``end`` int64: after how many tokens, EOS counted,
    each document ends."""
    permutation, total = order.permutation(found["id"], epoch), 0
    with writer(folder, offset=np.uint64, end=np.int64) as write:
        for i in range(0, len(permutation), CHUNK):
            rows = permutation[i : i + CHUNK]
            ends = total + np.cumsum(found["n_tokens"][rows].astype(np.int64) + 1)
            write(offset=found["offset"][rows], end=ends)
            total = int(ends[-1])
    return {**found.meta, "total": total}


# -----------------------------------------------------------------------------
# the cache


@dataclass(frozen=True)
class Arrays:
    """Memory-mapped columns of one cache entry, and what its builder said of them."""

    meta: dict
    columns: dict[str, np.ndarray]

    def __getitem__(self, name: str) -> np.ndarray:
        return self.columns[name]


class Cache:
    """Directories of arrays by key, least recently used out first when over ``max_bytes``."""

    def __init__(self, root: Path, max_bytes: int) -> None:
        self.root, self.max_bytes = root, max_bytes
        try:
            root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SystemExit(f"--plan-cache {root}: {error}") from error

    def get(self, key: str, build: Callable[[Path], dict]) -> Arrays:
        """The entry of ``key``; ``build(folder)`` writes it where it is missing or damaged.

        One process at a time: the others wait for the lock, which ends with its owner. Raises
        SystemExit where it cannot be written.
        """
        folder, partial = self.root / key, self.root / "partial"  # nobody else's, under the lock
        with self._locked():
            entry = _load(folder)
            if entry is None:
                shutil.rmtree(folder, ignore_errors=True)
                shutil.rmtree(partial, ignore_errors=True)
                try:
                    partial.mkdir()
                    _seal(partial, build(partial))
                    partial.rename(folder)
                except OSError as error:
                    shutil.rmtree(partial, ignore_errors=True)
                    if error.errno is None:
                        raise  # Lance's, of the table
                    raise SystemExit(f"--plan-cache {self.root}: {error}") from error
                entry = _load(folder)
            os.utime(folder)
            self._evict(keep=folder)
            return entry

    @contextmanager
    def _locked(self) -> Iterator[None]:
        fd = os.open(self.root, os.O_RDONLY)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def _evict(self, keep: Path) -> None:
        """Files that somebody has mapped live on until they are unmapped."""
        entries = sorted((p for p in self.root.iterdir() if p.is_dir()), key=os.path.getmtime)
        sizes = {p: sum(f.stat().st_size for f in p.iterdir()) for p in entries}
        excess = sum(sizes.values()) - self.max_bytes
        for path in entries:
            if excess > 0 and path != keep:
                shutil.rmtree(path)
                excess -= sizes[path]


@contextmanager
def writer(folder: Path, **dtypes: type) -> Iterator[Callable[..., None]]:
    """A function that appends arrays to the columns of an entry: ``write(id=..., ...)``."""
    files = {name: open(folder / f"{name}.{np.dtype(t).name}", "wb") for name, t in dtypes.items()}

    def write(**columns: np.ndarray) -> None:
        for name, values in columns.items():
            files[name].write(np.ascontiguousarray(values, dtypes[name]).data)

    try:
        yield write
    finally:
        for file in files.values():
            file.close()


def _seal(folder: Path, meta: dict) -> None:
    """Checksum and sync the columns; the meta file says that they are whole."""
    files = {}
    for path in sorted(folder.iterdir()):
        files[path.name] = crc32(path)
        with open(path, "rb") as file:
            os.fsync(file.fileno())
    (folder / META).write_text(json.dumps({**meta, "files": files}))


def _load(folder: Path) -> Arrays | None:
    """The entry, or None where it is missing or not what was written."""
    try:
        meta = json.loads((folder / META).read_text())
        if any(crc32(folder / name) != crc for name, crc in meta["files"].items()):
            return None
    except (OSError, ValueError, KeyError):
        return None
    columns = {}
    for name in meta.pop("files"):
        column, dtype = name.split(".")
        size = (folder / name).stat().st_size
        columns[column] = np.memmap(folder / name, dtype, "r") if size else np.empty(0, dtype)
    return Arrays(meta, columns)
