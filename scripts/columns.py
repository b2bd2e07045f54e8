"""Fill columns of a Lance table where they are NULL, writing those columns and nothing else.

A column that does not exist yet is first added as all NULL, which only touches metadata. New
columns and rows appended later are then the same case: values are computed for the NULL rows of one
fragment after the other and committed slice by slice. Row ids stay as they are, text is never
rewritten, and an interrupted run continues where its last commit was.
"""

from collections.abc import Callable, Iterator
from itertools import chain

import lance
import lancedb
import pyarrow as pa
from lance.commit import CommitConflictError

SLICE_BYTES = 128 << 20  # input per commit: bounds memory, and the work an interruption loses
BATCH_ROWS = 256  # of a scan: Arrow holds less than 2 GB of text in a batch

Compute = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]


def count_unfilled(table: lancedb.table.Table, marker: str) -> int:
    """Rows whose ``marker`` column is NULL or does not exist yet."""
    table.checkout_latest()
    if marker not in table.schema.names:
        return table.count_rows()
    return table.count_rows(f"{marker} IS NULL")


def fill_columns(
    table: lancedb.table.Table, fields: pa.Schema, read: list[str], marker: str, compute: Compute
) -> None:
    """Fill ``fields`` in every row whose ``marker`` (one of them) is NULL.

    ``compute`` maps an iterator of batches with the ``read`` columns and ``_rowid`` to an iterator
    of batches with ``_rowid`` (uint64) and ``fields``; it must set ``marker`` in every row. What it
    raises is raised here.
    """
    table.checkout_latest()
    missing = [field for field in fields if field.name not in table.schema.names]
    if missing:
        try:
            table.to_lance().add_columns(pa.schema(missing))
        except CommitConflictError:
            raise _not_alone(table) from None
        table.checkout_latest()
    ours = [table.schema.field(name) for name in fields.names]
    output = pa.schema([pa.field("_rowid", pa.uint64()), *fields])
    for fragment_id in [f.fragment_id for f in table.to_lance().get_fragments()]:
        while _fill_slice(table, fragment_id, output, read, marker, compute):
            table.checkout_latest()
            if not _has(table, ours):  # such as the column of another tokenizer
                raise _not_alone(table)


def _fill_slice(
    table: lancedb.table.Table,
    fragment_id: int,
    output: pa.Schema,
    read: list[str],
    marker: str,
    compute: Compute,
) -> bool:
    """Fill up to SLICE_BYTES of one fragment in one commit. False when nothing was left to do."""
    dataset = table.to_lance()
    unfilled = dataset.scanner(
        columns=read,
        filter=f"{marker} IS NULL",
        fragments=[dataset.get_fragment(fragment_id)],
        with_row_id=True,
        batch_size=BATCH_ROWS,
        batch_readahead=2,
    )
    batches = _up_to(SLICE_BYTES, unfilled.to_batches())
    first = next(batches, None)
    if first is None:
        return False
    raised: list[BaseException] = []  # Lance hands on no more than their text

    def computed() -> Iterator[pa.RecordBatch]:
        try:
            yield from compute(chain([first], batches))
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            raised.append(error)
            raise

    values = pa.RecordBatchReader.from_batches(output, computed())
    # a second handle: update_columns holds its fragment while it draws from the scan above
    fragment = table.to_lance().get_fragment(fragment_id)
    try:
        updated, modified = fragment.update_columns(values)
    except Exception:
        if raised:
            raise raised[0] from None
        raise
    change = lance.LanceOperation.Update(updated_fragments=[updated], fields_modified=modified)
    try:
        lance.LanceDataset.commit(dataset, change, read_version=dataset.version)
    except CommitConflictError:
        raise _not_alone(table) from None
    return True


def _has(table: lancedb.table.Table, fields: list[pa.Field]) -> bool:
    found = [table.schema.field(f.name) for f in fields if f.name in table.schema.names]
    return pa.schema(found).equals(pa.schema(fields), check_metadata=True)


def _not_alone(table: lancedb.table.Table) -> SystemExit:
    return SystemExit(
        f"something else wrote to table {table.name!r} meanwhile: run this again, alone; what was "
        "committed stays"
    )


def _up_to(limit: int, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Batches until ``limit`` bytes of them were seen."""
    for batch in batches:
        if batch.num_rows:
            yield batch
            limit -= batch.nbytes
        if limit <= 0:
            return
