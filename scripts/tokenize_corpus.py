"""Tokenize the text of the corpus: columns input_ids (ids without EOS) and n_tokens.

    python scripts/tokenize_corpus.py --db DB --tokenizer byte
    python scripts/tokenize_corpus.py --db DB --tokenizer bpe:tokenizer.json
    python scripts/tokenize_corpus.py --db DB --count-only    # ids are there, n_tokens is not
    python scripts/tokenize_corpus.py --db DB --overwrite     # all again, texts have changed

Only rows that have no tokens yet are tokenized: run it again after adding documents, or after an
interruption. The tokenizer's identity is stored with the column, and another one is refused.
"""

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import lancedb
import pyarrow as pa
import pyarrow.compute as pc
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import common
import tokenizer
from flags import Parser, interruptible, not_negative
from scripts.columns import count_unfilled, fill_columns
from scripts.parallel import WorkerPool, pieces

N_TOKENS = pa.field("n_tokens", pa.int32())  # NULL: not tokenized yet


def main(argv: list[str] | None = None) -> None:
    parser = Parser(__doc__)
    common.add_table_arguments(parser)
    group = parser.add_argument_group("tokens")
    group.add_argument(
        "--tokenizer",
        help="byte, hf:<name or directory> or bpe:<tokenizer.json> (default: the column's own; "
        "byte for a new column)",
    )
    group.add_argument("--count-only", action="store_true", help="only fill n_tokens from the ids")
    group.add_argument("--overwrite", action="store_true", help="first drop what it fills")
    group.add_argument("--workers", type=not_negative, default=os.cpu_count(), help="processes")
    args = parser.parse_args(argv)
    table = common.open_table(args)
    with interruptible("what is tokenized stays, run it again for the rest"):
        done = count_tokens(table, args) if args.count_only else tokenize(table, args)
    report(table, args, done)


def tokenize(table: lancedb.table.Table, args: argparse.Namespace) -> int:
    """Fill the token column and n_tokens where n_tokens is NULL. Returns the rows filled."""
    common.require_text(table, args)
    spec = choose_tokenizer(table, args)
    codec = tokenizer.load_tokenizer(spec)
    present = [c for c in (args.tokens_column, "n_tokens") if c in table.schema.names]
    if args.overwrite and present:
        table.drop_columns(present)
    elif present == ["n_tokens"]:
        raise SystemExit(
            f"n_tokens counts the ids of another column than {args.tokens_column}: a table has one "
            "token column; name it with --tokens-column, or drop the counts with --overwrite"
        )
    field = tokenizer.token_field(args.tokens_column, codec)
    if args.tokens_column in table.schema.names:
        tokenizer.check_tokenizer(table.schema, args.tokens_column, codec)
        field = table.schema.field(args.tokens_column)
    fields = pa.schema([field, counts_field(table)])
    with (
        progress(table, "tokenize") as bar,
        WorkerPool(args.workers, tokenizer.start_worker, (spec,)) as pool,
    ):

        def compute(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            for row_ids, ids in pool.map(tokenizer.encode_rows, pieces(batches)):
                bar.update(len(row_ids))
                lengths = ids.value_lengths().cast(fields.field("n_tokens").type)
                yield filled(row_ids, fields, ids.cast(field.type), lengths)

        fill_columns(table, fields, [args.text_column], N_TOKENS.name, compute)
        return bar.total


def choose_tokenizer(table: lancedb.table.Table, args: argparse.Namespace) -> str:
    """``--tokenizer``, else the one that wrote the column, else ``byte``. Raises SystemExit where
    the column holds no tokens, or those of nobody knows whom, which only both ``--tokenizer`` and
    ``--overwrite`` replace."""
    if args.tokens_column not in table.schema.names:
        return args.tokenizer or "byte"
    common.require_token_lists(table.schema, args.tokens_column)
    stored = tokenizer.stored_identity(table.schema, args.tokens_column)
    if stored is None and not (args.tokenizer and args.overwrite):
        raise SystemExit(
            f"column {args.tokens_column} does not say who tokenized it: --count-only keeps its "
            "ids, --tokenizer NAME --overwrite drops them, --tokens-column names another"
        )
    return args.tokenizer or stored.spec


def count_tokens(table: lancedb.table.Table, args: argparse.Namespace) -> int:
    """Fill n_tokens from a token column that somebody else wrote. Returns the rows filled."""
    common.require_column(table, args.tokens_column, "--tokens-column")
    common.require_token_lists(table.schema, args.tokens_column)
    if args.overwrite and N_TOKENS.name in table.schema.names:
        table.drop_columns([N_TOKENS.name])
    fields = pa.schema([counts_field(table)])
    with progress(table, "count") as bar:

        def compute(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            for batch in batches:
                bar.update(batch.num_rows)
                lengths = pc.list_value_length(batch.column(args.tokens_column)).fill_null(0)
                lengths = lengths.cast(fields.field("n_tokens").type)
                yield filled(batch.column("_rowid"), fields, lengths)

        fill_columns(table, fields, [args.tokens_column], N_TOKENS.name, compute)
        return bar.total


def counts_field(table: lancedb.table.Table) -> pa.Field:
    """n_tokens as the table has it. Raises SystemExit where it is no integer."""
    if N_TOKENS.name not in table.schema.names:
        return N_TOKENS
    field = table.schema.field(N_TOKENS.name)
    if not pa.types.is_integer(field.type):
        raise SystemExit(f"column n_tokens is {field.type}, not an integer: --overwrite drops it")
    return field


def filled(row_ids: pa.Array, fields: pa.Schema, *values: pa.Array) -> pa.RecordBatch:
    return pa.record_batch([row_ids, *values], ["_rowid", *fields.names])


def progress(table: lancedb.table.Table, what: str) -> tqdm:
    todo = count_unfilled(table, N_TOKENS.name)
    return tqdm(total=todo, desc=what, unit=" docs", disable=None)


def report(table: lancedb.table.Table, args: argparse.Namespace, done: int) -> None:
    table.checkout_latest()
    batches = table.search().select(["n_tokens"]).to_batches()
    tokens = sum(pc.sum(batch.column("n_tokens")).as_py() or 0 for batch in batches)
    width = table.schema.field(args.tokens_column).type
    print(
        f"{done:,} documents {'counted' if args.count_only else 'tokenized'}; the table has "
        f"{table.count_rows():,} documents, {tokens:,} tokens in {args.tokens_column} ({width})"
    )


if __name__ == "__main__":
    main()
