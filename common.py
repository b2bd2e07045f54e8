"""The corpus table: opening it at a version, its filter and funnel, validation batches.

Everything that knows what a column of the table means lives here. The loaders and the scripts ask
this module; nothing here knows about torch models or the training loop.
"""

import argparse
import os
import re
import shlex
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import lancedb
import numpy as np
import pyarrow as pa
import torch

from distributed import World
from flags import finite, not_empty
from tokenizer import Tokenizer

DEFAULT_DB = "./lance_pretrain_db"
DEFAULT_TABLE = "corpus"
TABLE_FLAGS = {
    "--db": None,
    "--table": None,
    "--id-column": "id",
    "--text-column": "text",
    "--tokens-column": "input_ids",
}
# where a bracket is none, in SQL: strings, quoted names, comments
QUOTED = re.compile(r"""'[^']*'|"[^"]*"|`[^`]*`|--[^\n]*|/\*.*?\*/""", re.DOTALL)


# -----------------------------------------------------------------------------
# flags


def add_table_arguments(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Flags that say which table, shared by every script. Returns the group."""
    group = parser.add_argument_group("table")
    group.add_argument(
        "--db",
        type=not_empty,
        help=f"database directory or URI (default: $LANCE_PRETRAIN_DB, else {DEFAULT_DB})",
    )
    group.add_argument("--table", type=not_empty, help=f"table name (default: {DEFAULT_TABLE})")
    group.add_argument("--id-column", default="id", help="unique integer document id")
    group.add_argument("--text-column", default="text", help="the document, UTF-8")
    group.add_argument("--tokens-column", default="input_ids", help="token ids, without EOS")
    return group


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of train.py that say which data, and how it was tokenized."""
    group = add_table_arguments(parser)
    group.add_argument(
        "--tokenizer", default="byte", help="byte, hf:<name or directory> or bpe:<tokenizer.json>"
    )
    group.add_argument("--min-score", type=finite, default=1.0, help="train on score >= this")
    group.add_argument("--filter", default="", help="SQL predicate added to the standing terms")
    group.add_argument(
        "--no-pin-tag", action="store_true", help="do not tag the table version of the run"
    )
    group.add_argument(
        "--val-filter", help="SQL predicate of the validation split (default: <id> %% 100 = 0)"
    )


def is_default_database(args: argparse.Namespace) -> bool:
    """True when neither flag nor environment names a database or table."""
    return args.db is None and args.table is None and "LANCE_PRETRAIN_DB" not in os.environ


def database(args: argparse.Namespace) -> str:
    return args.db or os.environ.get("LANCE_PRETRAIN_DB") or DEFAULT_DB


# -----------------------------------------------------------------------------
# the table


def connect(uri: str, *, create: bool = False) -> lancedb.DBConnection:
    """Connect to a local directory or an object store.

    Raises SystemExit for ``db://`` (LanceDB Cloud serves queries, not the columns' files) and,
    unless ``create``, for a local directory that does not exist (lancedb would create it).
    """
    if uri.startswith("db://"):
        raise SystemExit(
            f"--db {uri}: LanceDB Cloud does not serve column files; "
            "give a directory or an object-store URI such as s3://bucket/path"
        )
    if "://" not in uri and not create and not Path(uri).is_dir():
        raise SystemExit(
            f"--db {uri}: no such database; build one with "
            f"python scripts/ingest.py --db {uri} FILES"
        )
    try:
        return lancedb.connect(uri)
    except (OSError, ValueError, RuntimeError) as error:
        raise SystemExit(f"--db {uri}: cannot open it: {one_line(error)}") from None


def command(script: str, args: argparse.Namespace, *more: str) -> str:
    """The command that runs a script on the table of ``args``, as it can be typed."""
    words = ["python", f"scripts/{script}", *more]
    for flag, default in TABLE_FLAGS.items():
        given = getattr(args, flag.removeprefix("--").replace("-", "_"))
        if given is not None and given != default:
            words += [flag, shlex.quote(given)]
    return " ".join(words)


def open_table(args: argparse.Namespace, version: int | None = None) -> lancedb.table.Table:
    """Open ``--table`` of ``--db``, checked out at ``version`` (None: the newest).

    Raises SystemExit when the table or the version is missing.
    """
    uri, name = database(args), args.table or DEFAULT_TABLE
    db = connect(uri)
    try:
        table = db.open_table(name)
    except (OSError, ValueError, RuntimeError) as error:
        if "was not found" not in str(error):
            raise SystemExit(f"table {name!r} in {uri}: {one_line(error)}") from None
        raise SystemExit(
            f"no table {name!r} in {uri}: build one with {command('ingest.py', args)} FILES"
        ) from None
    if version is not None:
        try:
            table.checkout(version)
        except (ValueError, RuntimeError):
            raise SystemExit(
                f"table {name!r} in {uri} has no version {version} any more (cleaned up?)"
            ) from None
    return table


def open_pinned(
    args: argparse.Namespace, version: int | None
) -> tuple[lancedb.table.Table, list[str]]:
    """``open_table``, or the newest version with a notice where ``version`` is gone: whether that
    will do is for the stream to say, which knows what was read."""
    table = open_table(args)
    if version is None or version == table.version:
        return table, []
    try:
        return open_table(args, version), []
    except SystemExit as gone:
        return table, [
            f"{gone}: trying version {table.version}, of which ids and lengths are compared, "
            "not the tokens"
        ]


class Pin:
    """Tags on the table versions that a run's checkpoints need: cleanup keeps their files."""

    def __init__(self, table: lancedb.table.Table, run_id: str, enabled: bool) -> None:
        self.table, self.prefix, self.enabled = table, f"train-{run_id}-v", enabled

    def hold(self, versions: set[int]) -> list[str]:
        """Tag the version read, if it is among ``versions``, and remove the run's tags of others.

        Returns what to say of it.
        """
        if not self.enabled:
            return []
        version, lines = self.table.version, []
        name = f"{self.prefix}{version}"
        try:
            ours = {tag for tag in self.table.tags.list() if tag.startswith(self.prefix)}
            if version in versions and name not in ours:
                self.table.tags.create(name, version)
                lines = [
                    f"tag {name} holds table version {version}, and any cleanup of the table, "
                    f"until the run is done; to remove it: table.tags.delete('{name}')"
                ]
            for tag in ours - {f"{self.prefix}{v}" for v in versions}:
                self.table.tags.delete(tag)
        except (OSError, ValueError, RuntimeError) as error:
            self.enabled = False
            return [f"table version {version} could not be tagged: {one_line(error)}"]
        return lines


def one_line(error: BaseException | str) -> str:
    """A message on one line, without the place in somebody's Rust source."""
    text = re.sub(r", /\S+\.rs:\d+:\d+", "", " ".join(str(error).split()))
    return text or type(error).__name__


def crc32(path: Path) -> int:
    """Checksum of a file's bytes: twice as fast as SHA-256, and what is feared is damage."""
    crc = 0
    with open(path, "rb") as file:
        while chunk := file.read(1 << 22):
            crc = zlib.crc32(chunk, crc)
    return crc


def require_column(table: lancedb.table.Table, column: str, flag: str) -> None:
    """Raise SystemExit, naming ``flag``, where the table lacks ``column``."""
    if column not in table.schema.names:
        raise SystemExit(f"table {table.name!r} has no column {column!r}: name it with {flag}")


def require_text(table: lancedb.table.Table, args: argparse.Namespace) -> None:
    """Raise SystemExit where ``--text-column`` is missing or not text."""
    require_column(table, args.text_column, "--text-column")
    kind = table.schema.field(args.text_column).type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        raise SystemExit(f"column {args.text_column!r} is {kind}, not text: see --text-column")


def require_ids(table: lancedb.table.Table, args: argparse.Namespace) -> None:
    """Raise SystemExit where ``--id-column`` is missing or not integer."""
    schema, ids = table.schema, args.id_column
    if ids not in schema.names or not pa.types.is_integer(schema.field(ids).type):
        found = schema.field(ids).type if ids in schema.names else "missing"
        raise SystemExit(
            f"table {table.name!r} needs an integer id column; {ids!r} is {found}: "
            "name one with --id-column"
        )


def require_token_lists(schema: pa.Schema, column: str) -> None:
    """Raise SystemExit where ``column`` does not hold lists of integers."""
    kind = schema.field(column).type
    is_list = (
        pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    )
    if not is_list or not pa.types.is_integer(kind.value_type):
        raise SystemExit(f"column {column} is {kind}, not a list of integers: see --tokens-column")


def recount(args: argparse.Namespace) -> str:
    """The command that makes n_tokens count the ids that there are."""
    return command("tokenize_corpus.py", args, "--count-only", "--overwrite")


def require_columns(table: lancedb.table.Table, args: argparse.Namespace) -> None:
    """Check that the table can be trained on: ids, tokens and lengths of usable types.

    Raises SystemExit naming the column and the command that adds it.
    """
    require_ids(table, args)
    schema, tokens = table.schema, args.tokens_column
    if tokens not in schema.names:
        raise SystemExit(
            f"table {table.name!r} has no column {tokens}: tokenize it first "
            f"({command('tokenize_corpus.py', args)})"
        )
    require_token_lists(schema, tokens)
    if "n_tokens" not in schema.names:
        raise SystemExit(
            f"table {table.name!r} has no column n_tokens: count them "
            f"({command('tokenize_corpus.py', args, '--count-only')})"
        )


# -----------------------------------------------------------------------------
# the filter


@dataclass(frozen=True)
class Term:
    """One term of the training filter. ``flag`` or column that it comes from, for messages."""

    label: str
    sql: str
    flag: str
    mend: str = ""  # the command that fills the NULLs


def validation_filter(args: argparse.Namespace) -> str:
    return args.val_filter or f"`{args.id_column}` % 100 = 0"


def training_terms(schema: pa.Schema, args: argparse.Namespace) -> list[Term]:
    """The terms of the training filter, in the funnel's order.

    A standing term applies only where its column exists. SQL's ``NOT x`` and ``x >= y`` are not
    true for NULL, so each of these terms drops NULL rows; the funnel counts them.
    """
    validation = bracketed(validation_filter(args), "--val-filter")
    terms = [Term("training split", f"NOT {validation}", "--val-filter")]
    curate = command("curate.py", args)
    if "is_dup" in schema.names:
        terms.append(Term("not duplicate", "NOT is_dup", "column is_dup", curate))
    if "score" in schema.names:
        sql = f"score >= {args.min_score}"
        number = f"{sql} AND NOT isnan(score)"  # Lance orders NaN above all numbers
        terms.append(Term(sql, number, "column score, --min-score", curate))
    if args.filter:
        terms.append(Term("--filter", bracketed(args.filter, "--filter"), "--filter"))
    mend = command("tokenize_corpus.py", args)
    terms.append(Term("tokenized", "n_tokens > 0", "column n_tokens", mend))
    return terms


def bracketed(sql: str, flag: str) -> str:
    """A user's predicate as one operand; a comment in it ends with its line.

    Lance reads a predicate as far as it is one and drops the rest without a word: text after its
    end is an error within brackets, and a bracket too many raises SystemExit here, naming ``flag``.
    """
    depth = 0
    for character in QUOTED.sub("", sql):
        depth += (character == "(") - (character == ")")
        if depth < 0:
            break
    if depth:
        raise SystemExit(f"{flag}: {one_line(sql)}: its brackets do not match")
    return f"({sql}\n)" if "--" in sql else f"({sql})"


def conjunction(terms: list[Term]) -> str:
    return " AND ".join(term.sql for term in terms)


@dataclass(frozen=True)
class Stage:
    """What one term of the filter left: ``rows`` kept, ``nulls`` dropped because NULL."""

    term: Term
    rows: int
    nulls: int


def count(table: lancedb.table.Table, sql: str, flag: str) -> int:
    """Rows where ``sql`` is true. Raises SystemExit, naming ``flag``, for one that is not valid."""
    try:
        return table.count_rows(sql)
    except (ValueError, RuntimeError) as error:
        raise SystemExit(f"{flag}: {one_line(sql)}: {one_line(error)}") from None


def funnel(table: lancedb.table.Table, terms: list[Term]) -> tuple[int, list[Stage]]:
    """Count what each term leaves. Returns (rows of the table, stages).

    Raises SystemExit for a filter that is not valid SQL or that leaves no row.
    """
    total, stages = table.count_rows(), []
    for i, term in enumerate(terms):
        before = " AND ".join(t.sql for t in terms[:i]) or "true"
        rows = count(table, f"{before} AND {term.sql}", term.flag)
        nulls = count(table, f"{before} AND ({term.sql}) IS NULL", term.flag)
        stages.append(Stage(term, rows, nulls))
    if stages[-1].rows == 0:
        emptied = next(stage for stage in stages if stage.rows == 0)
        fill = emptied.nulls and emptied.term.mend
        hint = f": fill the NULLs with {emptied.term.mend}" if fill else ""
        before = ([total] + [stage.rows for stage in stages])[stages.index(emptied)]
        raise SystemExit(
            f"the filter leaves no row of {total:,}: {one_line(emptied.term.sql)} drops the last "
            f"{before:,}{hint}"
        )
    return total, stages


def funnel_lines(total: int, stages: list[Stage]) -> list[str]:
    """The funnel as printable lines, with the command that fills NULLs where there are any."""
    lines = [f"{'funnel':<15}{'all rows':<24}{total:>14,}"]
    for stage in stages:
        note = ""
        if stage.nulls:
            fill = f": fill with {stage.term.mend}" if stage.term.mend else ""
            note = f"   {stage.nulls:,} NULL dropped{fill}"
        lines.append(f"{'':<15}{stage.term.label:<24}{stage.rows:>14,}{note}")
    return lines


# -----------------------------------------------------------------------------
# validation


def validation_batches(
    table: lancedb.table.Table,
    args: argparse.Namespace,
    eos_id: int,
    max_blocks: int,
    world: World,
) -> Iterator[dict[str, torch.Tensor]]:
    """This rank's share of the first ``max_blocks`` validation blocks, as the loaders' batches.

    The tokenized rows of ``--val-filter`` in id order, each followed by EOS, are one stream cut
    into blocks of ``--seq-len`` tokens. Yields dicts of ``input_ids`` int64 (B, T), ``mask`` bool
    (B, T) and ``doc_ids`` int64 (B, T) with B = ``--batch-size``; what is missing from the last
    block and the last batch is masked.
    """
    where = f"{bracketed(validation_filter(args), '--val-filter')} AND n_tokens > 0"
    scan = table.search().with_row_id(True).select([args.id_column, "n_tokens"]).where(where)
    rows = scan.to_arrow().sort_by(args.id_column)
    counts = rows["n_tokens"].to_numpy().astype(np.int64)
    starts = np.concatenate([[0], np.cumsum(counts + 1)])
    row_ids = rows["_rowid"].to_numpy()
    B, T = args.batch_size, args.seq_len
    n_blocks = min(max_blocks, -(-int(starts[-1]) // T))
    share = world.share(n_blocks)
    for first in share[::B]:
        begin, end = first * T, min(min(first + B, share.stop) * T, int(starts[-1]))
        lo = int(np.searchsorted(starts, begin, side="right")) - 1
        hi = int(np.searchsorted(starts, end, side="left"))
        lists = take_tokens(table, args.tokens_column, row_ids[lo:hi])
        if not np.array_equal(lists.value_lengths().fill_null(0), counts[lo:hi]):
            raise SystemExit(
                f"n_tokens does not count the ids in column {args.tokens_column}: "
                f"count them again with {recount(args)}"
            )
        stream, documents = eos_joined(lists, eos_id)
        cut, missing = slice(begin - starts[lo], end - starts[lo]), B * T - (end - begin)
        ids = np.pad(stream[cut], (0, missing), constant_values=eos_id).reshape(B, T)
        documents = np.pad(documents[cut], (0, missing), mode="edge").reshape(B, T)
        yield {
            "input_ids": torch.from_numpy(ids),
            "mask": torch.arange(B * T).view(B, T) < end - begin,
            "doc_ids": torch.from_numpy(documents - documents[:, :1]),
        }


def check_ids(ids: torch.Tensor, tokenizer: Tokenizer, args: argparse.Namespace) -> None:
    """Raise SystemExit for an id that is not one of the tokenizer's."""
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= tokenizer.vocab_size:
        raise SystemExit(
            f"column {args.tokens_column} holds token id {high if low >= 0 else low}, outside the "
            f"{tokenizer.vocab_size:,} ids of --tokenizer {args.tokenizer}"
        )


def take_tokens(table: lancedb.table.Table, column: str, row_ids: np.ndarray) -> pa.ListArray:
    """The token lists of these row ids, in this order (a take returns them sorted)."""
    order = np.argsort(row_ids, kind="stable")
    taken = table.take_row_ids(row_ids[order].tolist()).select([column]).to_arrow()
    lists = taken[column].combine_chunks()
    return lists.take(pa.array(np.argsort(order, kind="stable")))


def eos_joined(lists: pa.ListArray, eos_id: int) -> tuple[np.ndarray, np.ndarray]:
    """Join documents with one EOS after each. Returns (tokens, document index), int64 (N,)."""
    lengths = np.asarray(lists.value_lengths()).astype(np.int64)
    values = lists.flatten().to_numpy(zero_copy_only=False).astype(np.int64)
    tokens = np.insert(values, np.cumsum(lengths), eos_id)
    return tokens, np.repeat(np.arange(len(lengths)), lengths + 1)
