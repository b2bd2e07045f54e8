"""Inputs of ingest.py: files, datasets and streams as parts that yield records, lazily.

A part is one file, or what is read like one. Its records are the documents in it, or the reason why
something in it is no document, each with its position: the line or row, counted from 1.
"""

import glob
import io
import json
import os
import re
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain, takewhile
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

import common
from flags import require_package

MAX_DOCUMENT = 1 << 30  # bytes; Arrow counts the bytes of a string column in int32
READ_BYTES = 1 << 20
READ_ROWS = 1024
CODECS = {".jsonl": None, ".jsonl.gz": "gzip", ".jsonl.zst": "zstd"}
NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test"}


class Bad(Exception):
    """Why a document stays out: ``kind`` is what it is counted under, ``detail`` is only shown."""

    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(f"{kind} ({detail})" if detail else kind)
        self.kind = kind


class Fields(NamedTuple):
    text: str
    score: str | None


class Row(NamedTuple):
    text: str
    n_bytes: int  # of the text in UTF-8
    score: float | None


Record = tuple[int, int, Row | Bad]  # line or row from 1, bytes of the file read so far, document


@dataclass(frozen=True, slots=True)
class Part:
    """One file, or what is read like one. Progress is kept for each (source, name)."""

    source: str
    name: str
    where: str  # the path as the user can open it, for messages
    size: int | None  # bytes, where known
    many: bool  # a document per line or row, not one in all
    read: Callable[[int], Iterator[Record]]  # the records from this position on

    def at(self, position: int) -> str:
        return f"{self.where}:{position}" if self.many else self.where

    def origin(self, position: int) -> str:
        """The place as stored. A lone document is position 1, which only a name like a:7 needs."""
        plain = not self.many and not re.search(r":[0-9]{1,18}\Z", self.name)
        return self.name if plain else f"{self.name}:{position}"


# -----------------------------------------------------------------------------
# documents


def checked(text: object, score: object = None) -> Row:
    """The document as it goes into the table. Raises Bad."""
    if not isinstance(text, str):
        raise Bad("text is not a string", type(text).__name__)
    if not text or text.isspace():
        raise Bad("blank text")
    if score is not None:
        if isinstance(score, bool) or not isinstance(score, int | float):
            raise Bad("score is not a number", repr(score)[:40])
        if not abs(score) < 3.4e38:  # NaN and infinity would pass every filter score >= x
            raise Bad("score is not a finite float32", repr(score)[:40])
    try:
        n_bytes = len(text.encode())
    except UnicodeEncodeError:
        raise Bad("not UTF-8", "half of a surrogate pair") from None
    if n_bytes > MAX_DOCUMENT:
        raise Bad("over 1 GiB", f"{n_bytes:,} bytes; split it")
    return Row(text, n_bytes, None if score is None else float(score))


def parse_record(record: object, fields: Fields) -> Row:
    if not isinstance(record, dict):
        raise Bad("not a JSON object", type(record).__name__)
    if record.get(fields.text) is None:
        raise Bad("no text", f"field {fields.text!r} is missing or null; see --text-field")
    return checked(record[fields.text], record.get(fields.score))


def parse_line(line: bytes, fields: Fields) -> Row:
    text = line.decode("utf-8-sig")
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Bad("broken JSON", common.one_line(error)) from None
    return parse_record(record, fields)


def parse_scalars(scalars: dict[str, pa.Scalar], fields: Fields) -> Row:
    return parse_record({name: scalar.as_py() for name, scalar in scalars.items()}, fields)


def parse_file(data: bytes) -> Row:
    if b"\0" in data:
        raise Bad("binary file", "a NUL byte")
    return checked(data.decode("utf-8-sig"))


def attempt(parse: Callable[..., Row], *raw: object) -> Row | Bad:
    """What ``parse`` makes of it, or why it cannot: as a value, so that a reader can go on."""
    try:
        return parse(*raw)
    except Bad as bad:
        return bad
    except UnicodeDecodeError as error:
        return Bad("not UTF-8", f"byte {error.start}")


# -----------------------------------------------------------------------------
# readers: lazily, the records of one part from position ``start`` on


def read_file(path: str, start: int) -> Iterator[Record]:
    if os.path.getsize(path) > MAX_DOCUMENT:
        raise Bad("over 1 GiB", f"{os.path.getsize(path):,} bytes; split it")
    data = Path(path).read_bytes()
    yield (1, len(data), attempt(parse_file, data))


def read_text(text: str, start: int) -> Iterator[Record]:
    yield (1, len(text.encode()), attempt(checked, text))


def read_lines(
    lines: BinaryIO, tell: Callable[[], int], fields: Fields, start: int
) -> Iterator[Record]:
    for position, line in enumerate(lines, 1):
        if position >= start and not line.isspace():
            yield (position, tell(), attempt(parse_line, line, fields))


def read_jsonl(path: str, codec: str | None, fields: Fields, start: int) -> Iterator[Record]:
    with open(path, "rb", READ_BYTES) as raw:
        lines = raw
        if codec:
            lines = io.BufferedReader(pa.CompressedInputStream(raw, codec), READ_BYTES)
        yield from read_lines(lines, raw.tell, fields, start)


def present_columns(names: list[str], fields: Fields) -> list[str]:
    if fields.text not in names:
        raise Bad("no text", f"no column {fields.text!r} in {', '.join(names)}; see --text-field")
    return [name for name in names if name in fields]


def read_parquet(path: str, fields: Fields, start: int) -> Iterator[Record]:
    # without pre_buffer and with a buffer it reads pages, not whole row groups
    with (
        open(path, "rb") as raw,
        pq.ParquetFile(raw, pre_buffer=False, buffer_size=READ_BYTES) as file,
    ):
        columns = present_columns(file.schema_arrow.names, fields)
        scale, first = os.path.getsize(path) / max(1, file.metadata.num_rows), 1
        for group in range(file.num_row_groups):
            rows = file.metadata.row_group(group).num_rows
            if first + rows > start:
                batches = file.iter_batches(READ_ROWS, [group], columns)
                scalars = chain.from_iterable(zip(*b.columns, strict=True) for b in batches)
                for position, values in enumerate(scalars, first):
                    if position >= start:
                        record = dict(zip(columns, values, strict=True))
                        row = attempt(parse_scalars, record, fields)
                        yield (position, int(position * scale), row)
            first += rows


def read_hf(dataset: Any, fields: Fields, start: int) -> Iterator[Record]:
    if dataset.column_names:
        dataset = dataset.select_columns(present_columns(dataset.column_names, fields))
    try:
        for position, record in enumerate(dataset.skip(start - 1), start):
            yield (position, 0, attempt(parse_record, record, fields))
    except Exception as error:  # of the library, of the network, of a file format: any type
        raise Bad("unreadable", common.one_line(error)) from None


def load_hf(name: str, config: str, split: str) -> Any:
    datasets = require_package("datasets", "hf:", "'datasets>=4,<5'")
    try:
        if Path(name, "dataset_dict.json").exists():  # written by DatasetDict.save_to_disk
            return datasets.load_from_disk(str(Path(name, split))).to_iterable_dataset()
        if Path(name, "state.json").exists():  # written by Dataset.save_to_disk
            return datasets.load_from_disk(name).to_iterable_dataset()
        return datasets.load_dataset(name, config or None, split=split, streaming=True)
    except Exception as error:
        raise SystemExit(f"hf:{name}: cannot load it: {common.one_line(error)}") from None


# -----------------------------------------------------------------------------
# inputs


def parts_of(spec: str, source: str | None, fields: Fields) -> list[Part]:
    """What an INPUT consists of, in the order of ingestion. Raises SystemExit for none."""
    if spec == "-":
        if sys.stdin is None:
            raise SystemExit("-: there is no standard input")
        read = partial(read_lines, sys.stdin.buffer, int, fields)
        return [Part(source or "stdin", "stdin", "stdin", None, True, read)]
    if spec == "stdlib":
        return stdlib_parts(source)
    if spec.startswith("hf:"):
        return [hf_part(spec, source, fields)]
    path, is_magic = Path(spec), glob.has_magic(spec)
    if path.is_dir():
        root, files = path, files_below(spec)
    elif path.is_file():
        root, files = path.parent, [spec]
        source = source or stem(printable(path.name))
    elif is_magic:
        root = Path(*takewhile(lambda step: not glob.has_magic(step), path.parts))
        files = glob_files(spec)
    else:
        what = "not a regular file: pipe it in with -" if path.exists() else "no such file"
        raise SystemExit(f"{spec}: {what}")
    if not files:
        raise SystemExit(f"{spec}: {'matches no file' if is_magic else 'no files in it'}")
    source = source or printable(root.resolve().name) or "files"
    return [file_part(source, root, file, fields) for file in sorted(files)]


def stem(name: str) -> str:
    """``part-0`` for ``part-0.jsonl.gz``."""
    return re.sub(r"(?i)\.jsonl(\.gz|\.zst)?\Z", "", name) if ".jsonl" in name else Path(name).stem


def printable(name: str) -> str:
    """A file's name, of which not every byte need be UTF-8."""
    return os.fsencode(name).decode(errors="backslashreplace")


def cannot_list(error: OSError) -> None:
    raise SystemExit(f"{error.filename}: cannot list this directory: {error.strerror}")


def files_below(root: str, skip: set[str] | frozenset[str] = frozenset()) -> list[str]:
    """Regular files below ``root``, neither hidden nor part of a Lance table."""
    found = []
    for folder, folders, files in os.walk(root, onerror=cannot_list):  # silent by default
        folders[:] = [f for f in folders if not f.startswith(".") and f not in skip]
        folders[:] = [f for f in folders if not f.endswith(".lance")]
        found += [os.path.join(folder, f) for f in files if not f.startswith(".")]
    return [file for file in found if os.path.isfile(file)]


def glob_files(pattern: str) -> set[str]:
    matches = glob.glob(pattern, recursive=True)
    below = [file for match in matches if os.path.isdir(match) for file in files_below(match)]
    return {*below, *filter(os.path.isfile, matches)}


def file_part(source: str, root: Path, path: str, fields: Fields) -> Part:
    name = printable(Path(path).relative_to(root).as_posix())
    suffix = re.search(r"\.(jsonl(\.gz|\.zst)?|parquet)\Z", name.lower())
    if suffix is None:
        read = partial(read_file, path)
    elif suffix[0] == ".parquet":
        read = partial(read_parquet, path, fields)
    else:
        read = partial(read_jsonl, path, CODECS[suffix[0]], fields)
    return Part(source, name, path, os.path.getsize(path), suffix is not None, read)


def stdlib_parts(source: str | None) -> list[Part]:
    """The standard library's modules, then the language reference's topics."""
    from pydoc_data.topics import topics

    root = sysconfig.get_path("stdlib")
    files = [f for f in files_below(root, NOT_LIBRARY) if f.endswith(".py")]
    sources = sorted(f for f in files if os.path.getsize(f))  # many an __init__.py is empty
    parts = [file_part(source or "python", Path(root), f, Fields("", None)) for f in sources]
    for name, text in sorted(topics.items()):
        read = partial(read_text, text)
        name = f"topics/{name}"
        parts.append(Part(source or "pydoc", name, f"pydoc {name}", len(text), False, read))
    return parts


def hf_part(spec: str, source: str | None, fields: Fields) -> Part:
    name, config, split, *rest = [*spec.removeprefix("hf:").split(":"), "", ""]
    if not name or any(rest):
        raise SystemExit(f"{spec}: not of the form hf:NAME[:CONFIG][:SPLIT]")
    split = split or "train"
    read = partial(read_hf, load_hf(name, config, split), fields)
    name = Path(name).resolve().name if Path(name).exists() else name
    inside = "/".join(filter(None, [name, config, split]))
    return Part(source or name, inside, spec, None, True, read)
