"""Token columns: exact values, only NULL rows written, nothing else rewritten."""

import lance
import numpy as np
import pyarrow as pa
import pytest

import tokenizer
from scripts import columns, tokenize_corpus
from tests.conftest import documents, make_table, run


def tokenize(path, *flags):
    tokenize_corpus.main(["--db", str(path), "--workers", "0", *flags])


def data_bytes(path):
    return {p.name: p.stat().st_size for p in path.glob("corpus.lance/data/*")}


def row_ids(table):
    rows = table.search().with_row_id(True).select(["id"]).to_arrow()
    return dict(zip(rows["id"].to_pylist(), rows["_rowid"].to_pylist(), strict=True))


def check_bytes(table):
    """Every row's ids are its text's bytes, and counted."""
    for row in table.search().select(["text", "input_ids", "n_tokens"]).to_list():
        assert bytes(row["input_ids"]) == (row["text"] or "").encode()
        assert row["n_tokens"] == len(row["input_ids"])


def test_new_column_writes_only_itself_and_keeps_row_ids(tmp_path):
    noise = np.random.default_rng(0)  # text that does not compress: 1 MB stays 1 MB
    texts = ["".join(map(chr, noise.integers(0x4E00, 0x9FFF, 500))) for _ in range(700)]
    table = make_table(tmp_path, texts)
    table.delete("id % 10 = 3")
    before, ids = data_bytes(tmp_path), row_ids(table)
    tokenize(tmp_path)
    table.checkout_latest()
    check_bytes(table)
    added = {k: v for k, v in data_bytes(tmp_path).items() if k not in before}
    raw = table.to_lance().to_table(["input_ids", "n_tokens"]).nbytes
    assert sum(added.values()) < 1.05 * raw  # uint16 ids, lengths, offsets: no byte of text
    assert row_ids(table) == ids
    assert before.items() <= data_bytes(tmp_path).items()


def test_appended_rows_are_filled_for_the_price_of_their_tokens(tmp_path):
    texts = documents(2000, longest=2000)
    table = make_table(tmp_path, texts)
    tokenize(tmp_path)
    table.checkout_latest()
    table.add(pa.table({"id": pa.array([5000, 5001]), "text": ["appended", None]}))
    before, ids = data_bytes(tmp_path), row_ids(table)
    tokenize(tmp_path)
    table.checkout_latest()
    check_bytes(table)
    added = {k: v for k, v in data_bytes(tmp_path).items() if k not in before}
    assert 0 < sum(added.values()) < 5_000 < sum(before.values())
    assert row_ids(table) == ids


def test_second_run_changes_nothing(tmp_path):
    table = make_table(tmp_path, documents(20))
    tokenize(tmp_path)
    table.checkout_latest()
    version = table.version
    tokenize(tmp_path)
    table.checkout_latest()
    assert table.version == version


def test_slices_and_fragments_add_up(tmp_path, monkeypatch):
    monkeypatch.setattr(columns, "SLICE_BYTES", 20_000)
    monkeypatch.setattr(columns, "BATCH_ROWS", 16)
    table = make_table(tmp_path, documents(300))
    table.add(pa.table({"id": pa.array(range(300, 400)), "text": documents(100, seed=1)}))
    before = table.version
    tokenize(tmp_path)
    table.checkout_latest()
    assert table.version > before + 3  # the column, and several commits
    check_bytes(table)


def test_rows_mixed_by_compaction_are_filled(tmp_path):
    table = make_table(tmp_path, documents(50))
    tokenize(tmp_path)
    table.checkout_latest()
    table.add(pa.table({"id": pa.array(range(50, 60)), "text": documents(10, seed=1)}))
    table.optimize()
    assert len(table.to_lance().get_fragments()) == 1
    tokenize(tmp_path)
    table.checkout_latest()
    check_bytes(table)
    assert tokenizer.stored_identity(table.schema, "input_ids").spec == "byte"


def test_worker_processes_give_the_same_column(tmp_path):
    texts = documents(3000)
    make_table(tmp_path / "a", texts)
    make_table(tmp_path / "b", texts)
    done = run(
        "scripts/tokenize_corpus.py", "--db", str(tmp_path / "a"), "--workers", "2", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert "3,000 documents tokenized" in done.stdout
    tokenize(tmp_path / "b")
    a, b = (lance.dataset(tmp_path / x / "corpus.lance").to_table() for x in "ab")
    assert a.sort_by("id") == b.sort_by("id")


def test_ids_of_a_70000_word_vocabulary_survive_the_table(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{i}": i for i in range(70_000)} | {"</s>": 70_000}
    model = Tokenizer(models.WordLevel(words, unk_token="</s>"))
    model.pre_tokenizer = pre_tokenizers.Whitespace()
    model.save(str(tmp_path / "t.json"))
    rng = np.random.default_rng(0)
    ids = [rng.integers(0, 70_000, 50).tolist() for _ in range(40)]
    table = make_table(tmp_path / "db", [" ".join(f"w{i}" for i in doc) for doc in ids])
    tokenize(tmp_path / "db", "--tokenizer", f"bpe:{tmp_path / 't.json'}")
    table.checkout_latest()
    rows = table.search().select(["id", "input_ids"]).to_arrow().sort_by("id")
    assert rows["input_ids"].to_pylist() == ids
    assert rows.schema.field("input_ids").type == pa.list_(pa.uint32())


def test_another_tokenizer_is_refused_until_overwrite(tmp_path):
    from scripts import train_tokenizer

    table = make_table(tmp_path / "db", documents(30))
    tokenize(tmp_path / "db")
    out = tmp_path / "t.json"
    train_tokenizer.main(["--db", str(tmp_path / "db"), "--vocab-size", "300", "--out", str(out)])
    with pytest.raises(SystemExit, match=r"was tokenized by byte \(257 ids, .* not by bpe:"):
        tokenize(tmp_path / "db", "--tokenizer", f"bpe:{out}")
    tokenize(tmp_path / "db", "--tokenizer", f"bpe:{out}", "--overwrite")
    table.checkout_latest()
    assert tokenizer.stored_identity(table.schema, "input_ids").vocab_size == 300
    # without --tokenizer it is the column's own
    table.add(pa.table({"id": pa.array([30]), "text": ["appended"]}))
    for more in ((), ("--overwrite",)):
        tokenize(tmp_path / "db", *more)
        table.checkout_latest()
        assert tokenizer.stored_identity(table.schema, "input_ids").spec == f"bpe:{out}"
        assert table.count_rows("n_tokens IS NULL") == 0


def test_count_only_adds_lengths_to_somebody_elses_tokens(tmp_path):
    ids = pa.array([[1, 2, 3], [], None, [4]], pa.large_list(pa.int64()))
    table = make_table(tmp_path, list("abcd"), toks=ids)
    tokenize(tmp_path, "--count-only", "--tokens-column", "toks")
    table.checkout_latest()
    assert table.to_arrow().sort_by("id")["n_tokens"].to_pylist() == [3, 0, 0, 1]


def test_tokens_of_somebody_else_are_never_overwritten_unasked(tmp_path):
    theirs = pa.array([[7, 8, 9]] * 4, pa.list_(pa.int32()))
    table = make_table(tmp_path, list("abcd"), input_ids=theirs)
    with pytest.raises(SystemExit, match="does not say who tokenized it: --count-only keeps"):
        tokenize(tmp_path)
    table.checkout_latest()
    assert table.to_arrow()["input_ids"].to_pylist() == [[7, 8, 9]] * 4
    tokenize(tmp_path, "--count-only")
    with pytest.raises(SystemExit, match="n_tokens counts the ids of another column"):
        tokenize(tmp_path, "--tokens-column", "second")
    with pytest.raises(SystemExit, match="--tokenizer NAME --overwrite drops them"):
        tokenize(tmp_path, "--overwrite")
    tokenize(tmp_path, "--overwrite", "--tokenizer", "byte")
    table.checkout_latest()
    check_bytes(table)


@pytest.mark.parametrize("how", ["--overwrite", "--count-only"])
@pytest.mark.parametrize("column", ["text", "id"])
def test_column_that_holds_no_tokens_is_left_alone(tmp_path, column, how):
    table = make_table(tmp_path, list("abcd"))
    with pytest.raises(SystemExit, match=f"column {column} is .*, not a list of integers: see --"):
        tokenize(tmp_path, "--tokens-column", column, how)
    table.checkout_latest()
    assert table.version == 1 and table.schema.names == ["id", "text"]


def test_wrong_counts_are_counted_again_and_no_id_is_touched(tmp_path):
    theirs = pa.array([[7, 8, 9]] * 4, pa.list_(pa.int32()))
    counts = pa.array([3, 3, 2, 3], pa.int32())
    table = make_table(tmp_path, list("abcd"), input_ids=theirs, n_tokens=counts)
    tokenize(tmp_path, "--count-only", "--overwrite")
    table.checkout_latest()
    assert table.to_arrow()["n_tokens"].to_pylist() == [3] * 4
    assert table.to_arrow()["input_ids"].to_pylist() == [[7, 8, 9]] * 4


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--text-column", "body"], "no column 'body': name it with --text-column"),
        (["--table", "other"], "no table 'other'"),
        (["--tokenizer", "nonsense"], "--tokenizer nonsense"),
        (["--count-only"], "no column 'input_ids': name it with --tokens-column"),
    ],
)
def test_bad_input_is_refused_in_one_line(tmp_path, flags, words):
    table = make_table(tmp_path, documents(3))
    with pytest.raises(SystemExit) as refusal:
        tokenize(tmp_path, *flags)
    assert words in str(refusal.value) and "\n" not in str(refusal.value)
    table.checkout_latest()
    assert table.schema.names == ["id", "text"]
