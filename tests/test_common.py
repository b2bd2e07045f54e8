"""The table: what is refused, what the filter keeps, and the validation stream."""

import argparse

import numpy as np
import pyarrow as pa
import pytest

import common
from distributed import World
from flags import Parser
from scripts import tokenize_corpus
from tests.conftest import documents, make_table


def flags(path, *more: str) -> argparse.Namespace:
    parser = Parser("test")
    common.add_arguments(parser)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=32)
    return parser.parse_args(["--db", str(path), *more])


def curated(path, n=400):
    """A table with NULL, true and false in is_dup, and NULL and values in score."""
    rng = np.random.default_rng(1)
    dup = [None if x < 0.1 else bool(x < 0.3) for x in rng.random(n)]
    score = [None if x < 0.1 else 5 * x for x in rng.random(n)]
    table = make_table(
        path, documents(n), is_dup=pa.array(dup), score=pa.array(score, pa.float32())
    )
    tokenize_corpus.main(["--db", str(path), "--workers", "0"])
    table.checkout_latest()
    return table, dup, np.array([np.nan if s is None else s for s in score], np.float32)


def test_filter_and_funnel_agree_with_a_loop_over_rows(tmp_path):
    table, dup, score = curated(tmp_path)
    args = flags(tmp_path, "--min-score", "2", "--filter", "length(text) > 20 OR id = 1")
    terms = common.training_terms(table.schema, args)
    total, stages = common.funnel(table, terms)
    texts = documents(400)
    kept = [i for i in range(400) if i % 100]
    counts, nulls = [len(kept)], [0]
    nulls.append(sum(dup[i] is None for i in kept))
    kept = [i for i in kept if dup[i] is False]
    counts.append(len(kept))
    nulls.append(int(sum(np.isnan(score[i]) for i in kept)))
    kept = [i for i in kept if score[i] >= 2]
    counts.append(len(kept))
    kept = [i for i in kept if len(texts[i]) > 20 or i == 1]
    counts += [len(kept), len(kept)]  # the last stage: all of them are tokenized
    assert total == 400 and [s.rows for s in stages] == counts
    assert [s.nulls for s in stages] == [*nulls, 0, 0]
    ids = table.search().select(["id"]).where(common.conjunction(terms)).limit(400).to_arrow()
    assert sorted(ids["id"].to_pylist()) == kept
    lines = "\n".join(common.funnel_lines(total, stages))
    assert f"{nulls[1]} NULL dropped: fill with python scripts/curate.py --db {tmp_path}" in lines


def test_a_score_that_is_no_number_is_not_trained_on(tmp_path):
    scores = pa.array([3.0, np.nan, None, 0.5, 2.0], pa.float32())
    make_table(tmp_path, documents(5), score=scores)
    tokenize_corpus.main(["--db", str(tmp_path), "--workers", "0"])
    args = flags(tmp_path, "--val-filter", "false")
    table = common.open_table(args)
    stages = common.funnel(table, common.training_terms(table.schema, args))[1]
    assert [stage.rows for stage in stages] == [5, 2, 2] and stages[1].nulls == 1


def test_standing_terms_apply_only_where_their_column_exists(tmp_path, corpus):
    table = common.open_table(flags(corpus))
    terms = common.training_terms(table.schema, flags(corpus))
    assert [t.label for t in terms] == ["training split", "tokenized"]


def test_half_tokenized_table_trains_on_its_half_and_says_so(tmp_path):
    table = make_table(tmp_path, documents(50))
    tokenize_corpus.main(["--db", str(tmp_path), "--workers", "0"])
    table.checkout_latest()
    table.add(pa.table({"id": pa.array(range(50, 80)), "text": documents(30)}))
    stages = common.funnel(table, common.training_terms(table.schema, flags(tmp_path)))
    assert stages[1][-1].rows == 49
    assert "30 NULL dropped: fill with python scripts/tokenize_corpus.py" in "\n".join(
        common.funnel_lines(*stages)
    )


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--filter", "bogus > 1"], "--filter: NOT (`id` % 100 = 0) AND (bogus > 1): "),
        (["--filter", "id >"], "--filter: NOT (`id` % 100 = 0) AND (id >): "),
        (["--val-filter", "nope"], "--val-filter: true AND NOT (nope): "),
        # Lance reads up to a bracket too many: the terms behind it would be gone
        (["--filter", "id > 3)"], "--filter: id > 3): its brackets do not match"),
        (["--filter", "id < 3) OR (id > 5"], "its brackets do not match"),
        (["--val-filter", "(id = 3"], "--val-filter: (id = 3: its brackets do not match"),
        (["--filter", "id < 0"], "the filter leaves no row of 300"),
        (["--val-filter", "true"], "the filter leaves no row of 300"),
    ],
)
def test_bad_filter_is_refused_in_one_line(corpus, more, words):
    args = flags(corpus, *more)
    table = common.open_table(args)
    with pytest.raises(SystemExit) as refusal:
        common.funnel(table, common.training_terms(table.schema, args))
    assert words in str(refusal.value) and "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "predicate",
    ["text <> ')'", "text <> 'it''s ('", "`id` > 3 -- :)", "(id > 3) /* ( */", "id IN (4, 5)"],
)
def test_brackets_in_strings_and_comments_are_none(corpus, predicate):
    args = flags(corpus, "--filter", predicate)
    table = common.open_table(args)
    assert common.funnel(table, common.training_terms(table.schema, args))[1][-1].rows > 0


def test_database_or_table_that_is_missing_names_the_command_to_build_one(tmp_path, corpus):
    missing = tmp_path / "nowhere"
    for args in (flags(missing), flags(corpus, "--table", "other")):
        with pytest.raises(SystemExit) as refusal:
            common.open_table(args)
        assert f"python scripts/ingest.py --db {args.db}" in str(refusal.value)
    assert not missing.exists()  # connecting would have created it


def test_damaged_table_is_told_in_one_line(tmp_path):
    make_table(tmp_path / "db", ["one"])
    for manifest in (tmp_path / "db/corpus.lance/_versions").iterdir():
        manifest.write_bytes(b"x")
    with pytest.raises(SystemExit, match="table 'corpus' in ") as refusal:
        common.open_table(flags(tmp_path / "db"))
    assert "\n" not in str(refusal.value)


def test_cloud_database_is_refused():
    with pytest.raises(SystemExit, match="db://corp: LanceDB Cloud does not serve column files"):
        common.connect("db://corp")


def test_version_that_is_gone_is_refused(corpus):
    with pytest.raises(SystemExit, match="has no version 99 any more"):
        common.open_table(flags(corpus), version=99)


def test_table_that_cannot_be_trained_on_names_the_mending_command(tmp_path):
    table = make_table(tmp_path, ["a"], toks=pa.array([[1]]), words=pa.array([["x"]]))
    for more, words in (
        ([], "no column input_ids: tokenize it first (python scripts/tokenize_corpus.py --db"),
        (["--tokens-column", "words"], "not a list of integers: see --tokens-column"),
        (["--tokens-column", "toks"], "no column n_tokens: count them (python scripts/tok"),
        (["--id-column", "text"], "'text' is string: name one with --id-column"),
        (["--id-column", "key"], "'key' is missing: name one with --id-column"),
    ):
        with pytest.raises(SystemExit) as refusal:
            common.require_columns(table, flags(tmp_path, *more))
        assert words in str(refusal.value) and "\n" not in str(refusal.value)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_validation_is_one_eos_joined_stream_in_id_order(tmp_path, world_size):
    texts = [*documents(120, longest=90), "", "x"]
    order = np.random.default_rng(0).permutation(122)
    ids = pa.array(order, pa.int64())  # row order is not id order
    table = pa.table({"id": ids, "text": [texts[i] for i in order]})
    import lancedb

    lancedb.connect(tmp_path).create_table("corpus", table)
    tokenize_corpus.main(["--db", str(tmp_path), "--workers", "0"])
    args = flags(tmp_path, "--val-filter", "id % 2 = 0")
    opened = common.open_table(args)
    chosen = [list(t.encode()) for t in texts[::2] if t]
    stream = [i for doc in chosen for i in (*doc, 256)]
    labels = [k for k, doc in enumerate(chosen) for _ in range(len(doc) + 1)]
    for max_blocks in (7, 10_000):
        got, docs = [], []
        for rank in range(world_size):
            for b in common.validation_batches(
                opened, args, 256, max_blocks, World(rank, world_size)
            ):
                assert b["input_ids"].shape == b["mask"].shape == (4, 32)
                real = b["mask"].any(1)
                got += b["input_ids"][b["mask"]].tolist()
                for row, mask in zip(b["doc_ids"][real], b["mask"][real], strict=True):
                    docs.append(row[mask].tolist())
        expected = stream[: max_blocks * 32]
        assert got == expected
        blocks = [labels[i : i + 32] for i in range(0, len(expected), 32)]
        assert docs == [[label - block[0] for label in block] for block in blocks]


def test_no_validation_rows_is_no_batches(corpus):
    args = flags(corpus, "--val-filter", "id < 0")
    assert list(common.validation_batches(common.open_table(args), args, 256, 10, World())) == []
