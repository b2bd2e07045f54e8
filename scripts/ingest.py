"""Text into one LanceDB table, one row per document.

    python scripts/ingest.py [--db D] [--table T] [--source NAME] INPUT [INPUT ...]

An INPUT is one of
    a directory    every file below it, sorted by name; hidden ones are skipped
    a glob         the same for what it matches (quote it, or the shell expands it)
    a file         .jsonl, .jsonl.gz, .jsonl.zst, .parquet: a document per line or row;
                   any other file is one document, text or code
    stdlib         this Python's library and language reference: a corpus without a download
    hf:NAME[:CONFIG][:SPLIT]   a Hugging Face dataset, streamed, or a local directory of one;
                   the split is train unless named (hf:NAME::SPLIT)
    -              JSONL on standard input

Every document gets the next free id, its source, and its origin: the file's path below the given
directory and, where a file holds many documents, the line or row counted from 1. Documents go in
in order, about 64 MB to a commit, and a commit is all or nothing. So whenever the script is stopped
the table holds a prefix of the input, and origin says where the same command has to go on: behind
the last line there, so a bad line before it that was mended since stays out.
"""

import argparse
import glob
import io
import json
import os
import re
import sys
import sysconfig
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, takewhile
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, NoReturn

import lancedb
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import common

COMMIT_ROWS = 100_000
COMMIT_BYTES = 64 << 20  # UTF-8 text to a commit: bounds memory, and what an interruption loses
MAX_DOCUMENT = 1 << 30  # bytes; Arrow counts the bytes of a string column in int32
READ_BYTES = 1 << 20
READ_ROWS = 1024
SHOWN = 5  # bad documents that are shown; the others are only counted
CODECS = {".jsonl": None, ".jsonl.gz": "gzip", ".jsonl.zst": "zstd"}
NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
KINDS = (
    pa.types.is_integer,
    pa.types.is_floating,
    lambda kind: pa.types.is_string(kind) or pa.types.is_large_string(kind),
)
ORIGIN = r"(?s)^(?P<name>.*?)(?::(?P<position>[0-9]{1,18}))?$"


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


class Document(NamedTuple):
    part: Part
    position: int
    row: Row
    row_id: int | None  # of the table's row that holds it already; None: it is new


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
    return Row(text, n_bytes, score)


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
    try:
        import datasets
    except ImportError:
        raise SystemExit("hf: needs an extra package: pip install 'datasets>=4,<5'") from None
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
        source = source or stem(path.name)
    elif is_magic:
        root = Path(*takewhile(lambda step: not glob.has_magic(step), path.parts))
        files = glob_files(spec)
    else:
        what = "not a regular file: pipe it in with -" if path.exists() else "no such file"
        raise SystemExit(f"{spec}: {what}")
    if not files:
        raise SystemExit(f"{spec}: {'matches no file' if is_magic else 'no files in it'}")
    source = source or root.resolve().name or "files"
    return [file_part(source, root, file, fields) for file in sorted(files)]


def stem(name: str) -> str:
    """``part-0`` for ``part-0.jsonl.gz``."""
    return re.sub(r"(?i)\.jsonl(\.gz|\.zst)?\Z", "", name) if ".jsonl" in name else Path(name).stem


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
    return {f for m in matches for f in (files_below(m) if os.path.isdir(m) else [m])}


def file_part(source: str, root: Path, path: str, fields: Fields) -> Part:
    name = os.fsencode(Path(path).relative_to(root).as_posix()).decode(errors="backslashreplace")
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


def all_parts(args: argparse.Namespace) -> list[Part]:
    """Parts of all inputs. Raises SystemExit where two of them could not be told apart later."""
    fields = Fields(args.text_field, args.score_field)
    parts = [part for spec in args.inputs for part in parts_of(spec, args.source, fields)]
    taken: dict[tuple[str, str], Part] = {}
    for part in parts:
        other = taken.setdefault((part.source, part.name), part)
        if other is not part:
            raise SystemExit(
                f"{other.where} and {part.where} would both be {part.name!r} of source "
                f"{part.source!r}: give the directory above both, or run twice with two --source"
            )
    return parts


# -----------------------------------------------------------------------------
# the table


class Seen(NamedTuple):
    """What the table holds of one part."""

    rows: int = 0
    last: int = 0  # the highest position
    row_id: int = -1  # of the row at that position


class Corpus:
    """The table as ingest sees it: where it got to, and appending. Created by the first batch."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.uri, self.name = common.database(args), args.table or common.DEFAULT_TABLE
        self.ids, self.texts = args.id_column, args.text_column
        fields = [(self.ids, pa.int64()), (self.texts, pa.string())]
        fields += [("source", pa.string()), ("origin", pa.string())]
        self.schema = pa.schema(fields + [("score", pa.float32())] * bool(args.score_field))
        self.table, self.next_id, self.missing = self._existing(), 0, []
        if self.table is not None:
            self._adopt(self.table.schema)
            self.version = self.table.version
            scan = self.table.search().select([self.ids]).to_batches()
            highest = [pc.max(batch[0]).as_py() for batch in scan]
            self.next_id = max((i + 1 for i in highest if i is not None and i >= 0), default=0)

    def _existing(self) -> lancedb.table.Table | None:
        if "://" not in self.uri and not Path(self.uri).is_dir():
            return None  # connecting would create the directory
        try:
            return common.connect(self.uri, create=True).open_table(self.name)
        except (OSError, ValueError, RuntimeError) as error:
            if "was not found" in str(error):
                return None
            self._refuse(error)

    def _refuse(self, what: object) -> NoReturn:
        reason = common.one_line(what) if isinstance(what, BaseException) else what
        raise SystemExit(f"table {self.name!r} in {self.uri}: {reason}") from None

    def _adopt(self, found: pa.Schema) -> None:
        """Take over the types of an existing table; what it lacks comes with the first batch."""
        mend = {self.ids: "--id-column names another", self.texts: "--text-column names another"}
        for i, ours in enumerate(self.schema):
            is_there = ours.name in found.names
            if not is_there and ours.name in mend:
                self._refuse(f"no column {ours.name!r}: {mend[ours.name]}")
            theirs = found.field(ours.name) if is_there else ours
            if not any(kind(theirs.type) and kind(ours.type) for kind in KINDS):
                hint = mend.get(ours.name, "rename it")
                self._refuse(f"column {ours.name!r} is {theirs.type}, not {ours.type}: {hint}")
            self.schema = self.schema.set(i, theirs)
        self.missing = [field for field in self.schema if field.name not in found.names]

    def seen(self, sources: set[str]) -> dict[tuple[str, str], Seen]:
        """What is there of these sources, by (source, part). One scan, a dict entry per part."""
        if self.table is None or not {"source", "origin"} <= set(self.table.schema.names):
            return {}
        names = ", ".join("'" + source.replace("'", "''") + "'" for source in sorted(sources))
        scan = self.table.search().with_row_id(True).select(["source", "origin"])
        scan = scan.where(f"source IN ({names}) AND origin IS NOT NULL")
        seen: dict[tuple[str, str], Seen] = {}
        for batch in scan.to_batches():
            for part, new in last_positions(batch):
                old = seen.get(part, Seen())
                newest = max((old.last, old.row_id), (new.last, new.row_id))
                seen[part] = Seen(old.rows + new.rows, *newest)
        return seen

    def stored(self, row_ids: list[int]) -> dict[int, str]:
        """The texts in these rows of the table."""
        if not row_ids:
            return {}
        rows = self.table.take_row_ids(row_ids).select([self.texts]).with_row_id().to_arrow()
        return dict(zip(rows["_rowid"].to_pylist(), rows[self.texts].to_pylist(), strict=True))

    def append(self, documents: list[Document]) -> None:
        """Add the documents in one commit, with the next ids. Raises SystemExit when it cannot."""
        ids = range(self.next_id, self.next_id + len(documents))
        columns = [ids, [d.row.text for d in documents]]
        columns += [[d.part.source for d in documents]]
        columns += [[d.part.origin(d.position) for d in documents]]
        columns += [[d.row.score for d in documents]]
        try:
            arrays = [pa.array(c, f.type) for c, f in zip(columns, self.schema, strict=False)]
            self._commit(pa.Table.from_arrays(arrays, schema=self.schema))
        except (OSError, ValueError, RuntimeError) as error:
            self._refuse(error)
        self.next_id = ids.stop

    def _commit(self, rows: pa.Table) -> None:
        if self.table is None:
            self.table = common.connect(self.uri, create=True).create_table(self.name, rows)
            self.version = self.table.version
            return
        self._expect_version(self.version, "nothing of this batch was written")
        if self.missing:
            self.table.to_lance().add_columns(pa.schema(self.missing))
            self.table.checkout_latest()
            self.version, self.missing = self.table.version, []
        self.table.add(rows)
        first = rows[self.ids][0]
        mend = f"ids from {first} on may be double: table.delete('{self.ids} >= {first}')"
        self._expect_version(self.version + 1, mend)
        self.version += 1

    def _expect_version(self, version: int, otherwise: str) -> None:
        """Two writers would count on from the same id, so this one stops when it is not alone."""
        self.table.checkout_latest()
        if self.table.version != version:
            self._refuse(f"something else wrote to it; {otherwise}; then run this again, alone")


def last_positions(rows: pa.RecordBatch) -> Iterator[tuple[tuple[str, str], Seen]]:
    """Per (source, part) of these rows: how many, the highest position and its row id."""
    place = pc.extract_regex(rows["origin"], ORIGIN)
    digits = pc.struct_field(place, "position")
    table = pa.table(
        {
            "source": rows["source"],
            "part": pc.struct_field(place, "name"),
            "position": pc.if_else(pc.equal(digits, ""), "1", digits).cast(pa.int64()),
            "row": rows["_rowid"],
        }
    ).sort_by("position")
    # single-threaded, or "last" is not the last of the sorted order
    groups = table.group_by(["source", "part"], use_threads=False)
    last = groups.aggregate([("row", "count"), ("position", "last"), ("row", "last")])
    for group in last.to_pylist():
        counts = Seen(group["row_count"], group["position_last"], group["row_last"])
        yield (group["source"], group["part"]), counts


# -----------------------------------------------------------------------------
# ingestion


@dataclass
class Skipped:
    """Counts what stays out, shows the first few, and under --strict stops at the first."""

    strict: bool
    kinds: Counter = field(default_factory=Counter)

    def add(self, where: str, bad: Bad) -> None:
        if self.strict:
            raise SystemExit(f"{where}: {bad}; stopped by --strict, commits so far stay")
        self.kinds[bad.kind] += 1
        if self.kinds.total() <= SHOWN:
            tqdm.write(f"skipped {where}: {bad}", file=sys.stderr)

    def __str__(self) -> str:
        return ", ".join(f"{count:,} {kind}" for kind, count in self.kinds.most_common())


def changed(part: Part, position: int) -> SystemExit:
    return SystemExit(
        f"{part.at(position)} is not what source {part.source!r} holds from there: it changed "
        f"since it was ingested; give another --source, or delete that source's rows first"
    )


def documents_of(part: Part, seen: Seen, skipped: Skipped, bar: tqdm) -> Iterator[Document]:
    """The part's documents from the last one in the table on, which is read again to compare."""
    expected, offset = seen.last if part.many else 0, 0
    try:
        for position, end, row in part.read(max(seen.last, 1)):
            bar.update(end - offset if bar.total else 1)
            offset = end
            if expected and (isinstance(row, Bad) or position != expected):
                raise changed(part, expected)
            expected = 0
            if isinstance(row, Bad):
                skipped.add(part.at(position), row)
            else:
                yield Document(part, position, row, seen.row_id if position == seen.last else None)
        if expected:
            raise changed(part, expected)
    except (OSError, pa.ArrowException) as error:
        skipped.add(part.where, Bad("unreadable", common.one_line(error)))
    except Bad as bad:
        skipped.add(part.where, bad)


def batched(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """What goes into one commit."""
    batch, size = [], 0
    for document in documents:
        batch.append(document)
        size += document.row.n_bytes
        if len(batch) >= COMMIT_ROWS or size >= COMMIT_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def new_documents(batch: list[Document], corpus: Corpus, skipped: Skipped) -> list[Document]:
    """Those that the table lacks; the others must be what it holds."""
    known = [document for document in batch if document.row_id is not None]
    stored = corpus.stored([document.row_id for document in known])
    for part, position, row, row_id in known:
        if row.text != stored[row_id]:
            if part.many:  # another file under the same name: its lines would be mixed with ours
                raise changed(part, position)
            skipped.add(part.where, Bad("changed since it was ingested"))
    return [document for document in batch if document.row_id is None]


def ingest(args: argparse.Namespace) -> None:
    start = time.perf_counter()
    corpus, parts = Corpus(args), all_parts(args)
    seen = corpus.seen({part.source for part in parts})
    there = [seen.get((part.source, part.name), Seen()) for part in parts]
    sizes = [part.size for part in parts]
    total = None if None in sizes else sum(sizes)
    skipped, rows, n_bytes = Skipped(args.strict), 0, 0
    with tqdm(total=total, unit="B" if total else "doc", unit_scale=True, disable=None) as bar:
        streams = (documents_of(p, s, skipped, bar) for p, s in zip(parts, there, strict=True))
        for batch in batched(chain.from_iterable(streams)):
            new = new_documents(batch, corpus, skipped)
            if new:
                corpus.append(new)
            rows += len(new)
            n_bytes += sum(document.row.n_bytes for document in new)
    already = sum(s.rows for s in there)
    if not rows and not already:
        why = f": {skipped}" if skipped.kinds else ""
        raise SystemExit(f"no documents in {' '.join(args.inputs)}{why}")
    report(corpus, rows, n_bytes, already, time.perf_counter() - start, skipped)


def report(
    corpus: Corpus, rows: int, n_bytes: int, already: int, seconds: float, skipped: Skipped
) -> None:
    """Print what happened. Raises SystemExit when a file could not be read to its end."""
    rate = f"{n_bytes / 1e6 / seconds:.1f} MB/s"
    print(f"added      {rows:,} documents, {n_bytes:,} bytes in {seconds:.1f} s ({rate})")
    if already:
        note = "" if rows else ": nothing new in the input"
        print(f"present    {already:,} documents already in the table{note}")
    if skipped.kinds:
        print(f"skipped    {skipped.kinds.total():,}: {skipped}")
    print(f"table      {corpus.name!r} in {corpus.uri}: {corpus.table.count_rows():,} rows")
    if skipped.kinds["unreadable"]:
        raise SystemExit("not every file could be read to its end; mend them and run this again")


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    common.add_table_arguments(parser)
    group = parser.add_argument_group("input")
    group.add_argument("inputs", nargs="+", metavar="INPUT", help="see above")
    group.add_argument("--source", help="name of the source (default: from the input's name)")
    group.add_argument("--text-field", default="text", help="field or column with the document")
    group.add_argument("--score-field", help="field or column with a quality score, 0-5")
    group.add_argument("--strict", action="store_true", help="stop at the first bad document")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    try:
        ingest(parse_arguments(argv))
    except KeyboardInterrupt:
        print("interrupted: commits so far stay; the same command goes on there", file=sys.stderr)
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
