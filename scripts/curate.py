"""Mark exact duplicates and score quality: the columns is_dup and score, where they are NULL.

    python scripts/curate.py [--db D] [--table T] [--report DIR]

What a duplicate is, and the memory it takes to find them, is in scripts/dedup.py; what a score
means is in scripts/quality.py. Finding duplicates reads all of the text, since a new document may
be a copy of an old one; scoring reads the text of unscored rows. Values that exist stay: a source's
own scores, and what an earlier run or an interrupted one has committed. A report of the result goes
to the terminal, and with figures to ``--report``.
"""

import argparse
import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import lancedb
import numpy as np
import pyarrow as pa
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import common
from flags import Parser, finite, interruptible, not_negative
from scripts import curate_report, dedup, quality
from scripts.columns import BATCH_ROWS, count_unfilled, fill_columns
from scripts.parallel import WorkerPool, pieces


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__)
    common.add_table_arguments(parser)
    group = parser.add_argument_group("curation")
    group.add_argument("--report", type=Path, default=Path("runs/curate"), help="its directory")
    group.add_argument(
        "--min-score", type=finite, default=1.0, help="threshold shown in the report (train.py's)"
    )
    group.add_argument(
        "--workers", type=not_negative, default=os.cpu_count(), help="processes (0: this one)"
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    table = common.open_table(args)
    check(table, args)
    try:
        args.report.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SystemExit(f"--report {args.report}: cannot create it: {error.strerror}") from None
    with interruptible("what is committed stays; the same command continues"):
        with WorkerPool(args.workers) as pool:
            fill_duplicates(table, args, pool)
            fill_scores(table, args, pool)
        curate_report.write(table, args)


def check(table: lancedb.table.Table, args: argparse.Namespace) -> None:
    """Raises SystemExit for a table that cannot be curated."""
    schema, name = table.schema, f"table {table.name!r}"
    if args.text_column not in schema.names:
        raise SystemExit(
            f"{name} has no column {args.text_column!r}: name its text with --text-column "
            f"(it has {', '.join(schema.names)})"
        )
    common.require_text(table, args)
    common.require_ids(table, args)
    if table.count_rows() == 0:
        build = common.command("ingest.py", args)
        raise SystemExit(f"{name} is empty: add documents with {build} FILES")
    if nulls := table.count_rows(f"`{args.id_column}` IS NULL"):
        raise SystemExit(f"{nulls:,} rows of {name} have no {args.id_column!r}: see --id-column")
    for column, fits in (("is_dup", pa.types.is_boolean), ("score", pa.types.is_floating)):
        if column in schema.names and not fits(schema.field(column).type):
            raise SystemExit(
                f"column {column!r} of {name} is {schema.field(column).type}: this script and "
                "the training filter need is_dup bool and score float; rename or drop it"
            )


# -----------------------------------------------------------------------------
# the two columns


def fill_duplicates(table: lancedb.table.Table, args: argparse.Namespace, pool: WorkerPool) -> None:
    """Set is_dup where it is NULL."""
    todo = announce(table, "is_dup")
    if todo == 0:
        return
    verdicts = find_duplicates(table, args, pool)
    progress = tqdm(total=todo, desc="is_dup", unit=" docs", unit_scale=True, disable=None)

    def compute(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            ids = batch[args.id_column].to_numpy().astype(np.int64)
            yield pa.record_batch({"_rowid": batch["_rowid"], "is_dup": verdicts.of(ids)})
            progress.update(batch.num_rows)

    with progress:
        try:
            fields = pa.schema([pa.field("is_dup", pa.bool_())])
            fill_columns(table, fields, [args.id_column], "is_dup", compute)
        except KeyError:
            raise SystemExit(
                f"table {table.name!r} was appended to meanwhile: run the same command again"
            ) from None


def find_duplicates(
    table: lancedb.table.Table, args: argparse.Namespace, pool: WorkerPool
) -> dedup.Verdicts:
    """One pass over all text of the table. Raises SystemExit when ids are not unique."""
    dataset = table.to_lance()
    columns = [args.id_column, args.text_column]
    columns += ["is_dup"] if "is_dup" in dataset.schema.names else []
    scan = dataset.scanner(columns=columns, batch_size=BATCH_ROWS, batch_readahead=2)
    prints, done = dedup.empty_fingerprints(dataset.count_rows()), 0
    with tqdm(
        total=len(prints.ids), desc="hashing", unit=" docs", unit_scale=True, disable=None
    ) as bar:
        for part in pool.map(dedup.hash_batch, pieces(scan.to_batches())):
            for whole, values in zip(prints, part, strict=True):
                whole[done : done + len(values)] = values
            done += len(part.ids)
            bar.update(len(part.ids))
    try:
        return dedup.judge(prints)
    except ValueError as error:
        raise SystemExit(
            f"{args.id_column} {error} of table {table.name!r} is not unique: see --id-column"
        ) from None


def fill_scores(table: lancedb.table.Table, args: argparse.Namespace, pool: WorkerPool) -> None:
    """Set score where it is NULL."""
    todo = announce(table, "score")
    if todo == 0:
        return
    present = "score" in table.schema.names
    field = table.schema.field("score") if present else pa.field("score", pa.float32())
    score = partial(quality.score_batch, text_column=args.text_column)
    progress = tqdm(total=todo, desc="scoring", unit=" docs", unit_scale=True, disable=None)

    def compute(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for row_ids, scores in pool.map(score, pieces(batches)):
            values = pa.array(scores).cast(field.type)
            yield pa.record_batch({"_rowid": row_ids, "score": values})
            progress.update(len(scores))

    with progress:
        fill_columns(table, pa.schema([field]), [args.text_column], "score", compute)


def announce(table: lancedb.table.Table, column: str) -> int:
    """Say how many rows ``column`` is NULL in, and return it."""
    todo, rows = count_unfilled(table, column), table.count_rows()
    state = f"{todo:,} of {rows:,} rows to fill" if todo else f"all {rows:,} rows are filled"
    print(f"{column:<8} {state}", flush=True)
    return todo


if __name__ == "__main__":
    main()
