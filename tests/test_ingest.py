"""Ingestion against real LanceDB tables, real files of every kind, and real kills."""

import io
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import lancedb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from scripts import ingest
from tests.conftest import ROOT, wait_for


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LANCE_PRETRAIN_DB", raising=False)
    return tmp_path


def run(*arguments):
    ingest.main(["--db", "db", *map(str, arguments)])


def refused(*arguments):
    """The one line that ends the run with a non-zero status."""
    with pytest.raises(SystemExit) as stop:
        run(*arguments)
    message = str(stop.value.code)
    assert isinstance(stop.value.code, str) and "\n" not in message
    return message


def rows(columns=("id", "text", "source", "origin"), db="db"):
    """The table as tuples, by id."""
    table = lancedb.connect(db).open_table("corpus").to_arrow().sort_by("id")
    return list(zip(*(table[name].to_pylist() for name in columns), strict=True))


def texts():
    return [text for (text,) in rows(["text"])]


def write_jsonl(path, documents, compression=None):
    data = "".join(json.dumps({"text": d} if isinstance(d, str) else d) + "\n" for d in documents)
    with pa.output_stream(str(path), compression=compression) as file:
        file.write(data.encode())


def numbered(n, start=0):
    return [f"document {i}" for i in range(start, start + n)]


def write_tree(root, files):
    for name, content in files.items():
        path = Path(root, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


def child(code, **kwargs):
    """A real process that has imported ingest and runs ``code``."""
    setup = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from scripts import ingest; "
    return subprocess.Popen([sys.executable, "-c", setup + code], text=True, **kwargs)


def wait_for_versions(n, process):
    """Wait until the table has that many versions, that is commits."""
    while len(list(Path("db/corpus.lance/_versions").glob("*.manifest"))) < n:
        assert process.poll() is None, "it ended before it could be stopped"
        time.sleep(0.002)


# -----------------------------------------------------------------------------
# inputs


def test_directory_is_read_in_order_with_each_file_by_its_kind(here):
    write_tree("books", {"b.txt": "bee", "a/x.py": "print()\n", "z": "zed"})
    write_tree("books", {".hidden": "no", ".git/config": "no", "t.lance/data.txt": "no"})
    write_jsonl("books/c.jsonl", ["one", "two"])
    pq.write_table(pa.table({"text": ["row"]}), "books/d.parquet")
    run("books")
    assert rows() == [
        (0, "print()\n", "books", "a/x.py"),
        (1, "bee", "books", "b.txt"),
        (2, "one", "books", "c.jsonl:1"),
        (3, "two", "books", "c.jsonl:2"),
        (4, "row", "books", "d.parquet:1"),
        (5, "zed", "books", "z"),
    ]
    schema = lancedb.connect("db").open_table("corpus").schema
    assert schema.names == ["id", "text", "source", "origin"]
    assert schema.field("id").type == pa.int64()


@pytest.mark.parametrize(
    ("name", "compression"), [("p.jsonl", None), ("p.jsonl.gz", "gzip"), ("p.jsonl.zst", "zstd")]
)
def test_jsonl_is_read_plain_and_compressed(here, name, compression):
    write_jsonl(name, numbered(5000), compression)
    run(name)
    assert rows()[4999] == (4999, "document 4999", "p", f"{name}:5000")
    assert texts() == numbered(5000)


def test_multi_member_gzip_is_read_to_its_end(here):
    write_jsonl("a.gz", ["one"], "gzip")
    write_jsonl("b.gz", ["two"], "gzip")
    Path("p.jsonl.gz").write_bytes(Path("a.gz").read_bytes() + Path("b.gz").read_bytes())
    run("p.jsonl.gz")
    assert texts() == ["one", "two"]


def test_parquet_counts_rows_across_row_groups_and_continues_there(here):
    def write(n):
        table = pa.table({"other": range(n), "body": numbered(n)})
        pq.write_table(table, "p.parquet", row_group_size=700)

    write(2000)
    run("--text-field", "body", "p.parquet")
    write(2500)
    run("--text-field", "body", "p.parquet")
    assert texts() == numbered(2500)
    assert rows()[2100][3] == "p.parquet:2101"


def test_glob_names_files_by_their_path_below_its_fixed_part(here):
    write_tree("data/en", {"a.txt": "A", "sub/b.txt": "B", "c.md": "C"})
    run("data/en/**/*.txt")
    assert rows() == [(0, "A", "en", "a.txt"), (1, "B", "en", "sub/b.txt")]


def test_stdlib_is_a_corpus_of_two_sources(here, capsys):
    run("stdlib")
    sources = [source for (source,) in rows(["source"])]
    assert len(sources) > 500 and set(sources) == {"python", "pydoc"}
    assert ("python", "json/decoder.py") in rows(["source", "origin"])
    assert ("pydoc", "topics/assert") in rows(["source", "origin"])
    assert not any("site-packages" in origin for (origin,) in rows(["origin"]))
    assert "skipped" not in capsys.readouterr().out
    run("stdlib")
    assert len(rows()) == len(sources)


def test_stdin_is_read_as_jsonl_and_continued(here, monkeypatch):
    script = [sys.executable, str(ROOT / "scripts/ingest.py"), "--db", "db", "-"]
    lines = [json.dumps({"text": text}) + "\n" for text in numbered(5)]
    first = subprocess.run(script, input="".join(lines[:3]), capture_output=True, text=True)
    assert first.returncode == 0 and "added      3 documents" in first.stdout
    assert first.stderr == ""  # no progress bar where there is no terminal
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("".join(lines).encode())))
    run("-")
    assert rows()[4] == (4, "document 4", "stdin", "stdin:5")
    assert texts() == numbered(5)


def test_huggingface_datasets_from_local_directories(here, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    data = datasets.Dataset.from_dict({"text": numbered(4), "score": [1.0, 2.0, 3.0, 4.0]})
    data.save_to_disk("saved")
    datasets.DatasetDict({"validation": data}).save_to_disk("splits")
    write_tree("plain", {"train.jsonl": '{"text": "a", "score": 5}\n{"text": "b", "score": 6}\n'})
    for _ in range(2):  # the second run adds nothing
        run("--score-field", "score", "hf:./saved", "hf:splits::validation", "hf:./plain")
        assert texts() == [*numbered(4), *numbered(4), "a", "b"]
    assert rows(["source", "origin", "score"])[7:9] == [
        ("splits", "splits/validation:4", 4.0),
        ("plain", "plain/train:1", 5.0),
    ]
    assert "cannot load it" in refused("hf:splits::test")
    assert "hf:NAME[:CONFIG][:SPLIT]" in refused("hf:a:b:c:d")


def test_missing_datasets_package_is_named(here, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert "pip install 'datasets" in refused("hf:some/thing")
    assert not Path("db").exists()


def test_source_is_derived_from_the_input_or_given(here):
    write_jsonl("web.v2.jsonl.gz", ["x"], "gzip")
    write_tree("d", {"note.md": "y"})
    run("web.v2.jsonl.gz", "d/note.md")
    run("--source", "mine", "d")
    assert [source for (source,) in rows(["source"])] == ["web.v2", "note", "mine"]


def test_two_files_that_would_share_an_origin_are_refused(here):
    write_tree(".", {"a/x.txt": "1", "b/x.txt": "2"})
    message = refused("a/x.txt", "b/x.txt")
    assert "a/x.txt and b/x.txt" in message and "--source" in message
    assert not Path("db").exists()


def test_file_name_that_looks_like_a_line_number_is_not_taken_for_one(here):
    write_tree("d", {"x:7": "seven", "x:9": "nine"})
    run("d")
    write_tree("d", {"x:8": "eight", "x": "none"})
    run("d")
    run("d")
    assert [r[1:4:2] for r in rows()] == [
        ("seven", "x:7:1"),
        ("nine", "x:9:1"),
        ("none", "x"),
        ("eight", "x:8:1"),
    ]


# -----------------------------------------------------------------------------
# columns of the table


def test_score_is_written_only_on_request_and_may_be_missing(here):
    write_jsonl("a.jsonl", [{"text": "x", "q": 2.5}, {"text": "y"}, {"text": "z", "q": 3}])
    write_jsonl("b.jsonl", ["no score here"])
    run("b.jsonl")
    run("--score-field", "q", "a.jsonl")
    assert rows(["score"]) == [(None,), (2.5,), (None,), (3.0,)]
    table = lancedb.connect("db").open_table("corpus")
    assert table.schema.field("score").type == pa.float32()


def test_columns_of_later_stages_are_null_in_new_rows(here):
    write_jsonl("a.jsonl", numbered(2))
    run("a.jsonl")
    table = lancedb.connect("db").open_table("corpus")
    later = [("is_dup", pa.bool_()), ("input_ids", pa.list_(pa.uint16())), ("n_tokens", pa.int32())]
    table.to_lance().add_columns(pa.schema(later))
    write_jsonl("a.jsonl", numbered(3))
    run("a.jsonl")
    assert rows(["id", "is_dup", "input_ids", "n_tokens"])[2] == (2, None, None, None)


def test_users_own_table_gets_source_and_origin_and_keeps_its_types(here):
    own = pa.table(
        {"key": pa.array([7, 40], pa.int32()), "body": pa.array(["a", "b"], pa.large_string())}
    )
    lancedb.connect("db").create_table("corpus", own)
    write_jsonl("a.jsonl", ["c"])
    columns = ["--id-column", "key", "--text-column", "body"]
    for _ in range(2):
        run(*columns, "a.jsonl")
    table = lancedb.connect("db").open_table("corpus")
    assert table.schema.field("key").type == pa.int32()
    assert table.schema.field("body").type == pa.large_string()
    found = table.to_arrow().sort_by("key").to_pylist()
    assert [list(row.values()) for row in found] == [
        [7, "a", None, None],
        [40, "b", None, None],
        [41, "c", "a", "a.jsonl:1"],
    ]


def test_progress_is_found_in_large_string_columns(here):
    kinds = [("id", pa.int64()), ("text", pa.large_string())]
    kinds += [("source", pa.large_string()), ("origin", pa.large_string())]
    lancedb.connect("db").create_table("corpus", schema=pa.schema(kinds))
    write_jsonl("it's.jsonl", numbered(3))
    for _ in range(2):
        run("it's.jsonl")
    assert texts() == numbered(3)


@pytest.mark.parametrize(
    ("own", "words"),
    [
        ({"key": [1], "text": ["a"]}, ["no column 'id'", "--id-column"]),
        ({"id": ["k"], "text": ["a"]}, ["column 'id' is string", "--id-column"]),
        ({"id": [1], "text": [b"a"]}, ["column 'text' is binary", "--text-column"]),
        ({"id": [1], "text": ["a"], "source": [3]}, ["column 'source' is int64", "rename"]),
    ],
)
def test_table_of_other_types_is_refused(here, own, words):
    lancedb.connect("db").create_table("corpus", pa.table(own))
    write_jsonl("a.jsonl", ["c"])
    message = refused("a.jsonl")
    assert all(word in message for word in words), message


# -----------------------------------------------------------------------------
# bad documents

LINES = [
    b'{"text": "good 1"}',
    b'{"text": "cut of',
    b'["a list"]',
    b'{"body": "elsewhere"}',
    b'{"text": 5}',
    b'{"text": " \\n"}',
    b'{"text": "\xff\xfe"}',
    b'{"text": "half \\ud800"}',
    b"[" * 100_000,
    b"",
    b'{"text": "good 2", "q": "high"}',
    b'{"text": "good 3", "q": NaN}',
    b'{"text": "good 4"}',
]


def test_bad_lines_are_counted_by_kind_and_the_rest_goes_in(here, capsys):
    Path("a.jsonl").write_bytes(b"\n".join(LINES))
    run("a.jsonl")
    out, err = capsys.readouterr()
    assert [(r[1], r[3][-2:]) for r in rows()] == [
        ("good 1", ":1"),
        ("good 2", "11"),
        ("good 3", "12"),
        ("good 4", "13"),
    ]
    for kind in ["2 broken JSON", "2 not UTF-8", "1 not a JSON object", "1 no text"]:
        assert kind in out
    assert "skipped    8: " in out and "1 text is not a string, 1 blank text" in out
    shown = [line for line in err.splitlines() if line.startswith("skipped ")]
    assert len(shown) == ingest.SHOWN
    assert shown[0].startswith("skipped a.jsonl:2: broken JSON")
    assert "--text-field" in shown[2]


def test_score_that_is_no_finite_number_is_bad(here, capsys):
    Path("a.jsonl").write_bytes(b"\n".join(LINES))
    run("--score-field", "q", "a.jsonl")
    assert texts() == ["good 1", "good 4"]
    out = capsys.readouterr().out
    assert "1 score is not a number" in out and "1 score is not a finite float32" in out


@pytest.mark.parametrize(("line", "kind"), [(1, "broken JSON"), (6, "not UTF-8"), (4, "string")])
def test_strict_stops_at_the_first_bad_line_and_keeps_earlier_commits(
    here, monkeypatch, line, kind
):
    monkeypatch.setattr(ingest, "COMMIT_ROWS", 10)
    good = [json.dumps({"text": text}).encode() for text in numbered(25)]
    Path("a.jsonl").write_bytes(b"\n".join([*good, LINES[line], *good]))
    message = refused("--strict", "a.jsonl")
    assert message.startswith("a.jsonl:26: ") and kind in message and "--strict" in message
    assert texts() == numbered(20)


def test_binary_undecodable_and_empty_files_are_skipped(here, capsys):
    write_tree("d", {"a.bin": b"x\0y", "b.txt": b"caf\xe9", "c.txt": "", "d.txt": "good"})
    run("d")
    out = capsys.readouterr().out
    assert texts() == ["good"]
    assert "1 binary file" in out and "1 not UTF-8" in out and "1 blank text" in out
    assert "d/a.bin: binary file" in refused("--strict", "d")


def test_byte_order_mark_is_dropped(here):
    write_tree("d", {"a.txt": b"\xef\xbb\xbftext", "b.jsonl": b'\xef\xbb\xbf{"text": "line"}\n'})
    run("d")
    assert texts() == ["text", "line"]


def test_file_cut_in_the_middle_gives_a_prefix_and_a_failure_until_it_is_mended(here, capsys):
    documents = [random.Random(i).randbytes(500).hex() for i in range(6000)]
    write_jsonl("a.jsonl.gz", documents, "gzip")
    whole = Path("a.jsonl.gz").read_bytes()
    Path("a.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    assert "read to its end" in refused("a.jsonl.gz")
    assert "1 unreadable" in capsys.readouterr().out
    assert 0 < len(rows()) < 6000 and texts() == documents[: len(rows())]
    Path("a.jsonl.gz").write_bytes(whole)
    run("a.jsonl.gz")
    assert texts() == documents


def test_parquet_without_the_column_or_of_bytes_is_named(here):
    pq.write_table(pa.table({"body": ["x"], "raw": [b"x"]}), "p.parquet")
    write_tree("d", {"broken.parquet": "not parquet"})
    assert "--text-field" in refused("--strict", "p.parquet")
    assert "1 text is not a string" in refused("--text-field", "raw", "p.parquet")
    assert "1 unreadable" in refused("d")
    assert not Path("db").exists()


def test_input_without_documents_is_refused_and_leaves_no_database(here):
    Path("empty").mkdir()
    write_tree(".", {"blank/a.txt": " \n", "blank.jsonl": "\n"})
    assert "no files in it" in refused("empty")
    assert "matches no file" in refused("none/*.txt")
    assert "missing.jsonl: no such file" in refused("missing.jsonl")
    assert "no documents in blank: 1 blank text" in refused("blank")
    assert "no documents in blank.jsonl" in refused("blank.jsonl")
    assert not Path("db").exists()


def test_directory_that_cannot_be_listed_is_named(here, monkeypatch):
    write_tree("d", {"a.txt": "A", "sub/b.txt": "B"})
    scandir = os.scandir

    def forbid(path):
        if str(path) == "d/sub":
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", forbid)
    assert "d/sub: cannot list" in refused("d")
    assert not Path("db").exists()


def test_cloud_database_is_refused(here):
    write_jsonl("a.jsonl", ["x"])
    with pytest.raises(SystemExit, match="LanceDB Cloud"):
        ingest.main(["--db", "db://mine", "a.jsonl"])


# -----------------------------------------------------------------------------
# re-runs and interruptions


def test_completed_ingest_run_again_adds_nothing_and_says_so(here, capsys):
    write_jsonl("a.jsonl", numbered(10))
    write_tree("d", {"x.txt": "X", "y.txt": "Y"})
    run("a.jsonl", "d")
    before = lancedb.connect("db").open_table("corpus").version
    capsys.readouterr()
    run("a.jsonl", "d")
    out = capsys.readouterr().out
    assert "added      0 documents" in out and "12 documents already in the table" in out
    assert lancedb.connect("db").open_table("corpus").version == before


def test_corpus_mounted_elsewhere_is_recognised(here):
    write_tree("one/books", {"a.txt": "A", "sub/b.txt": "B"})
    run("one/books")
    os.rename("one", "two")
    run(here / "two" / "books/")
    assert len(rows()) == 2


def test_appended_lines_and_new_files_are_picked_up(here):
    write_jsonl("a.jsonl", [*numbered(3), {"no": "text"}])
    write_tree("d", {"m.txt": "M"})
    run("a.jsonl", "d")
    write_jsonl("a.jsonl", [*numbered(3), {"no": "text"}, *numbered(2, 3)])
    write_tree("d", {"b.txt": "B", "z.txt": "Z"})
    run("a.jsonl", "d")
    expected = [*numbered(3), "M", *numbered(2, 3), "B", "Z"]
    assert [(i, text) for i, text, *_ in rows()] == list(enumerate(expected))


@pytest.mark.parametrize(
    "now", [numbered(2), [*numbered(2), "other", "more"], [*numbered(2), {"no": "text"}, "more"]]
)
def test_other_lines_under_the_same_name_are_refused(here, now):
    write_jsonl("a.jsonl", numbered(3))
    run("a.jsonl")
    write_jsonl("a.jsonl", now)
    message = refused("a.jsonl")
    assert "a.jsonl:3" in message and "changed since" in message and "--source" in message
    assert texts() == numbered(3)
    run("--source", "b", "a.jsonl")
    assert len(rows()) == 3 + sum(isinstance(document, str) for document in now)


def test_changed_lone_file_is_told_and_left_as_it_was(here, capsys):
    write_tree("d", {"a.txt": "A", "b.txt": "B"})
    run("d")
    write_tree("d", {"a.txt": "other", "c.txt": "C"})
    run("d")
    assert texts() == ["A", "B", "C"]
    assert "1 changed since it was ingested" in capsys.readouterr().out


def test_odd_names_and_whole_scores_are_taken(here):
    write_tree("g", {"a.txt": "A"})
    os.symlink("/nonexistent", "g/b.txt")
    odd = os.fsdecode(b"caf\xe9.txt")
    write_tree(".", {odd: "odd"})
    write_jsonl("s.jsonl", [{"text": "scored", "quality": 123456789}])
    run("--score-field", "quality", "g/*.txt", odd, "s.jsonl")
    assert texts() == ["A", "odd", "scored"]
    assert [s for (s,) in rows(["source"])] == ["g", r"caf\xe9", "s"]
    run(odd)  # once more, and nothing new
    assert texts() == ["A", "odd", "scored"]


def test_ids_count_on_across_runs_inputs_and_sources(here):
    write_jsonl("a.jsonl", numbered(3))
    write_jsonl("b.jsonl", numbered(3))
    run("a.jsonl", "b.jsonl")
    lancedb.connect("db").open_table("corpus").delete("id = 1")
    run("--source", "again", "a.jsonl")
    assert [i for (i,) in rows(["id"])] == [0, 2, 3, 4, 5, 6, 7, 8]


def test_killed_at_any_moment_leaves_a_prefix_and_continues_without_duplicates(here):
    write_jsonl("a.jsonl", numbered(12_000))
    write_tree("d", {f"{i:03}.txt": f"file {i}" for i in range(50)})
    expected = numbered(12_000) + [f"file {i}" for i in range(50)]
    done = 0
    for commits in (1, 40):
        code = "ingest.COMMIT_ROWS = 50; ingest.main(['--db', 'db', 'a.jsonl', 'd'])"
        process = child(code, stderr=subprocess.DEVNULL)
        wait_for_versions(commits + done // 50, process)
        time.sleep(random.random() * 0.02)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        # a first commit after others has one row less: the last row there is read to compare
        least = done + 50 * (commits - 1) - (done > 0)
        assert texts() == expected[: len(rows())] and len(rows()) >= least
        done = len(rows())
    run("a.jsonl", "d")
    assert [(i, text) for i, text, *_ in rows()] == list(enumerate(expected))


def test_ctrl_c_ends_with_130_and_keeps_the_commits(here):
    write_jsonl("a.jsonl", numbered(12_000))
    code = "ingest.COMMIT_ROWS = 50; ingest.main(['--db', 'db', 'a.jsonl'])"
    process = child(code, stderr=subprocess.PIPE)
    wait_for_versions(3, process)
    process.send_signal(signal.SIGINT)
    error = process.communicate()[1]
    assert process.returncode == 130 and error.count("\n") == 1 and "interrupted" in error
    assert texts() == numbered(len(rows()))
    run("a.jsonl")
    assert texts() == numbered(12_000)


def test_input_is_read_lazily_batch_after_batch(here, monkeypatch):
    """From a pipe without an end so far, the first commits are in the table."""
    reader, writer = os.pipe()
    monkeypatch.setattr(ingest, "COMMIT_ROWS", 10)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(open(reader, "rb")))
    with open(writer, "wb") as pipe:
        thread = threading.Thread(target=run, args=["-"])
        thread.start()
        pipe.write("".join(json.dumps({"text": t}) + "\n" for t in numbered(2000)).encode())
        pipe.flush()
        wait_for(lambda: Path("db/corpus.lance/_versions").exists() and len(rows()) >= 10)
        assert thread.is_alive()
    thread.join()
    assert texts() == numbered(2000)


def test_commit_is_bounded_by_rows_and_by_bytes(monkeypatch):
    part = ingest.Part("s", "n", "w", None, True, None)
    made = [
        ingest.Document(part, i, ingest.Row("x", size, None), None)
        for i, size in enumerate([1, 1, 1, 1, 50, 200, 1])
    ]
    monkeypatch.setattr(ingest, "COMMIT_ROWS", 3)
    monkeypatch.setattr(ingest, "COMMIT_BYTES", 50)
    sizes = [[document.row.n_bytes for document in batch] for batch in ingest.batched(made)]
    assert sizes == [[1, 1, 1], [1, 50], [200], [1]]


def test_another_writer_in_between_stops_the_ingest_before_it_writes(here, monkeypatch):
    monkeypatch.setattr(ingest, "COMMIT_ROWS", 10)
    write_jsonl("a.jsonl", numbered(30))
    new_documents = ingest.new_documents

    def intrude(batch, corpus, skipped):
        if corpus.next_id == 20:
            other = lancedb.connect("db").open_table("corpus")
            other.add(pa.table({"id": [20], "text": ["intruder"]}))
        return new_documents(batch, corpus, skipped)

    with monkeypatch.context() as patch:
        patch.setattr(ingest, "new_documents", intrude)
        message = refused("a.jsonl")
    assert "something else wrote to it" in message and "alone" in message
    run("a.jsonl")
    assert [i for (i,) in rows(["id"])] == list(range(31))


def test_writer_in_the_very_moment_of_the_commit_is_told_with_the_double_ids(here, monkeypatch):
    write_jsonl("a.jsonl", numbered(3))
    run("a.jsonl")
    write_jsonl("a.jsonl", numbered(5))
    expect_version = ingest.Corpus._expect_version

    def intrude(corpus, version, otherwise):
        expect_version(corpus, version, otherwise)
        if "nothing" in otherwise:
            other = lancedb.connect("db").open_table("corpus")
            other.add(pa.table({"id": [3], "text": ["intruder"]}))

    monkeypatch.setattr(ingest.Corpus, "_expect_version", intrude)
    message = refused("a.jsonl")
    assert "ids from 3 on may be double" in message and "id >= 3" in message


def test_script_fails_with_one_line_and_status_1(here):
    script = [sys.executable, str(ROOT / "scripts/ingest.py"), "--db", "db"]
    process = subprocess.run([*script, "missing"], capture_output=True, text=True)
    assert process.returncode == 1 and process.stderr == "missing: no such file\n"
