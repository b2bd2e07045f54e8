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
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import NamedTuple, NoReturn

import lancedb
import pyarrow as pa
import pyarrow.compute as pc
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import common
from flags import Parser, interruptible, not_empty
from scripts.inputs import Bad, Fields, Part, Row, parts_of

COMMIT_ROWS = 100_000
COMMIT_BYTES = 64 << 20  # UTF-8 text to a commit: bounds memory, and what an interruption loses
SHOWN = 5  # bad documents that are shown; the others are only counted
KINDS = (
    pa.types.is_integer,
    pa.types.is_floating,
    lambda kind: pa.types.is_string(kind) or pa.types.is_large_string(kind),
)
ORIGIN = r"(?s)^(?P<name>.*?)(?::(?P<position>[0-9]{1,18}))?$"


# -----------------------------------------------------------------------------
# the table


class Document(NamedTuple):
    part: Part
    position: int
    row: Row
    row_id: int | None  # of the table's row that holds it already; None: it is new


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
            # empty first: two that create it at once then meet at the check below
            database = common.connect(self.uri, create=True)
            self.table = database.create_table(self.name, schema=self.schema)
            self.version = self.table.version
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
    parser = Parser(__doc__, "%(prog)s [flags] INPUT [INPUT ...]")
    common.add_table_arguments(parser)
    group = parser.add_argument_group("input")
    group.add_argument("inputs", nargs="+", metavar="INPUT", help="see above")
    group.add_argument(
        "--source", type=not_empty, help="name of the source (default: from the input's name)"
    )
    group.add_argument("--text-field", default="text", help="field or column with the document")
    group.add_argument("--score-field", help="field or column with a quality score, 0-5")
    group.add_argument("--strict", action="store_true", help="stop at the first bad document")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse_arguments(argv)
    with interruptible("commits so far stay; the same command goes on there"):
        ingest(args)


if __name__ == "__main__":
    main()
