"""curate.py: duplicates against brute force, scores that make sense, NULLs filled and no others."""

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import sysconfig
import time
import unicodedata
from collections import Counter
from itertools import pairwise
from pathlib import Path

import lancedb
import numpy as np
import pyarrow as pa
import pytest
from matplotlib.figure import Figure

from scripts import columns, curate, curate_report, dedup, quality
from scripts.quality import explain, score_document

ROOT = Path(__file__).resolve().parents[1]
PROSE = (
    "The library lends most of its books for three weeks, and readers may renew a loan twice "
    "unless somebody else has asked for the title. Maps and older prints stay in the reading "
    "room, where the light is kept low. Visitors who have no card can sign the register at the "
    "desk, leave a coat with the porter, and be shown to a free table by the window. On most "
    "afternoons there is a talk about one of the collections that nobody has to book ahead."
)


def curate_table(db: Path, *flags: str) -> lancedb.table.Table:
    curate.main(["--db", str(db), "--report", str(db / "report"), "--workers", "0", *flags])
    return open_table(db)


def open_table(db: Path) -> lancedb.table.Table:
    return lancedb.connect(db).open_table("corpus")


def create(db: Path, texts: list[str | None], first_id: int = 0, **columns) -> lancedb.table.Table:
    return lancedb.connect(db).create_table("corpus", rows(texts, first_id, **columns))


def rows(texts: list[str | None], first_id: int = 0, **columns) -> pa.Table:
    ids = pa.array(range(first_id, first_id + len(texts)), pa.int64())
    return pa.table({"id": ids, "text": pa.array(texts, pa.string()), **columns})


def column_by_id(table: lancedb.table.Table, column: str) -> dict[int, object]:
    values = table.to_lance().to_table(["id", column])
    return dict(zip(values["id"].to_pylist(), values[column].to_pylist(), strict=True))


def row_ids(table: lancedb.table.Table) -> dict[int, int]:
    values = table.to_lance().to_table(["id"], with_row_id=True)
    return dict(zip(values["id"].to_pylist(), values["_rowid"].to_pylist(), strict=True))


def data_bytes(db: Path) -> int:
    return sum(path.stat().st_size for path in (db / "corpus.lance/data").iterdir())


def random_document(rng: random.Random) -> str:
    words = ["alpha", "Beta", "straße", "x=1", "naïve", "(f)", "42", "été"]
    return " ".join(rng.choices(words, k=rng.randrange(1, 6)))


def disguised(text: str, rng: random.Random) -> str:
    """The same document in the sense of the docstring of dedup.py."""
    changes = (
        lambda t: t.upper() if t.upper().lower() == t.lower() else t,
        lambda t: t.replace(" ", rng.choice(["  ", "\n", "\t ", "\u00a0", "\r\n"])),
        lambda t: f"\n {t}  ",
        lambda t: unicodedata.normalize("NFD", t),
        lambda t: t.replace("42", "４２"),  # full-width digits
    )
    return rng.choice(changes)(text)


def brute_force(texts: dict[int, str | None]) -> dict[int, bool]:
    """Quadratic in spirit: the lowest id of each normalised text, by another road."""
    keys = {
        at: re.sub(r"\s+", " ", unicodedata.normalize("NFKC", text or "").lower()).strip()
        for at, text in texts.items()
    }
    return {at: any(keys[other] == key for other in keys if other < at) for at, key in keys.items()}


# -----------------------------------------------------------------------------
# duplicates


def test_duplicates_agree_with_brute_force(tmp_path):
    rng = random.Random(0)
    texts = [random_document(rng) for _ in range(250)]
    texts += [disguised(rng.choice(texts), rng) for _ in range(150)] + ["", None, " \n", ""]
    rng.shuffle(texts)
    create(tmp_path, texts)
    table = curate_table(tmp_path)
    expected = brute_force(dict(enumerate(texts)))
    assert column_by_id(table, "is_dup") == expected
    assert 0 < sum(expected.values()) < len(expected)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("A b", "a  B\n", True),
        ("ﬁne", "fine", True),
        ("a + b", "a - b", False),
        ("year 1999", "year 2000", False),
        ("ab", "a b", False),
        ("cafe", "café", False),
    ],
)
def test_what_a_duplicate_is(one, other, same):
    assert (dedup.text_hash(one) == dedup.text_hash(other)) is same


def test_the_lowest_id_is_kept_not_the_first_row(tmp_path):
    data = pa.table({"id": [30, 10, 20, 5], "text": ["same", "Same", "same ", "other"]})
    lancedb.connect(tmp_path).create_table("corpus", data)
    found = column_by_id(curate_table(tmp_path), "is_dup")
    assert found == {30: True, 10: False, 20: True, 5: False}


def test_half_equal_hashes_are_not_duplicates():
    """Documents that agree in the first 64 bits only, and a group of three among them."""
    high = np.array([7, 7, 7, 7, 9], np.uint64)
    low = np.array([1, 2, 1, 1, 1], np.uint64)
    ids = np.array([40, 30, 20, 10, 0])
    new = np.full(5, dedup.NEW, np.uint8)
    copies = dedup.later_copies(dedup.Fingerprints(high, low, ids, new))
    assert copies.tolist() == [True, False, True, False, False]


def test_large_random_groups_agree_with_a_dictionary():
    rng = np.random.default_rng(1)
    n = 20_000
    high, low = rng.integers(0, 90, (2, n), np.uint64)
    ids, new = rng.permutation(n), np.full(n, dedup.NEW, np.uint8)
    kept: dict[tuple, int] = {}
    for at, key in zip(ids.tolist(), zip(high.tolist(), low.tolist(), strict=True), strict=True):
        kept[key] = min(kept.get(key, at), at)
    copies = dedup.later_copies(dedup.Fingerprints(high, low, ids, new))
    assert set(ids[~copies].tolist()) == set(kept.values())


def test_appended_rows_are_judged_against_the_older_ones(tmp_path):
    rng = random.Random(2)
    old = [f"{i} {PROSE * rng.randrange(4, 40)}" for i in range(60)]
    create(tmp_path, old)
    table = curate_table(tmp_path)
    before, scores = column_by_id(table, "is_dup"), column_by_id(table, "score")
    new = [old[3].upper(), "something new", "Something  new", old[59], f"x {PROSE * 20}"]
    table.add(rows(new, 60))
    addresses, size = row_ids(table), data_bytes(tmp_path)

    table = curate_table(tmp_path)
    after = column_by_id(table, "is_dup")
    assert after == before | {60: True, 61: False, 62: True, 63: True, 64: False}
    assert column_by_id(table, "score") == scores | {
        60 + i: np.float32(score_document(text)) for i, text in enumerate(new)
    }
    assert row_ids(table) == addresses
    assert data_bytes(tmp_path) - size < 0.02 * sum(map(len, old))  # 2 columns, no text


def test_a_copy_with_a_lower_id_appended_later_is_the_duplicate(tmp_path):
    create(tmp_path, ["kept", "other"], first_id=10)
    curate_table(tmp_path).add(rows(["KEPT", "new"], 0))
    found = column_by_id(curate_table(tmp_path), "is_dup")
    assert found == {10: False, 11: False, 0: True, 1: False}


def test_rows_appended_while_it_runs_are_not_guessed(tmp_path, monkeypatch):
    table, find = create(tmp_path, ["a", "b"]), curate.find_duplicates

    def find_then_append(*args):
        verdicts = find(*args)
        table.add(rows(["A", "c"], 2))
        return verdicts

    monkeypatch.setattr(curate, "find_duplicates", find_then_append)
    with pytest.raises(SystemExit, match="was appended to meanwhile: run the same command again"):
        curate_table(tmp_path)
    monkeypatch.undo()
    found = column_by_id(curate_table(tmp_path), "is_dup")
    assert found == {0: False, 1: False, 2: True, 3: False}


def test_ids_that_repeat_are_refused(tmp_path):
    lancedb.connect(tmp_path).create_table("corpus", pa.table({"id": [1, 1], "text": ["a", "b"]}))
    with pytest.raises(SystemExit, match="id 1 of table 'corpus' is not unique: see --id-column"):
        curate_table(tmp_path)
    assert "is_dup" not in open_table(tmp_path).schema.names


# -----------------------------------------------------------------------------
# scores


@pytest.mark.parametrize("name", ["argparse.py", "heapq.py", "json/decoder.py"])
def test_source_code_passes_the_training_filter(name):
    path = Path(sysconfig.get_paths()["stdlib"]) / name
    assert score_document(path.read_text(encoding="utf-8")) >= 3.0


def test_prose_passes_every_rule():
    assert explain(PROSE) == {}
    assert score_document(PROSE) == 5.0


JUNK = {
    "symbols": "#!? %% -- ==",
    "one line": "import foo",
    "repeated word": "spam " * 1000,
    "repeated phrase": "buy cheap pills now " * 300,
    "repeated line": "The same line is printed again, and again.\n" * 200,
    "numbers": "\n".join(str(i * 0.37) + " " + str(i * 1.41) for i in range(400)),
    "base64": "\n".join("QmFzZTY0IGlz" * 6 + str(i) for i in range(200)),
    "binary": bytes(i * 37 % 256 for i in range(5000)).decode("latin-1"),
    "wrong encoding": "\ufffd\ufffda" * 500,
    "menu": "Home\nAbout\nLogin\nNews\n" * 40,
}


OBJECTED = {
    "few_words": "Too few words.",
    "many_words": "the end of it all. " * 22_000,
    "short_words": "a b c d\n" * 20,
    "long_words": "incomprehensibilities, " * 60,
    "words_without_letters": "1 + 2 is 3 " * 20,
    "no_stop_words": "zebra giraffe ostrich " * 20,
    "hashes_and_ellipses": "so it goes ... and goes ... " * 20,
    "curly_brackets": "{ a: b } and { c: d } " * 20,
    "few_letters_or_digits": "what?!?!?! who?!?!?! " * 30,
    "control_characters": PROSE + "\x01" * 20,
    "lorem_ipsum": PROSE + "Lorem ipsum.",
    "bullet_lines": "".join(f"- point {i} of the list\n" for i in range(50)),
    "ellipsis_lines": "".join(f"line {i} goes on...\n" for i in range(50)),
    "lines_without_end": "".join(f"line {i} has no end\n" for i in range(50)),
    "short_lines": "".join(f"{i}.\n" for i in range(50)),
    "duplicate_lines": PROSE + "It is.\n" * 400,
    "duplicate_line_characters": PROSE + "This line is here to be seen again. \n" * 40,
    "top_bigram": "spam eggs " * 100,
    "duplicate_ngrams": PROSE * 2,
}


@pytest.mark.parametrize("rule", [rule.severity.__name__ for rule in quality.RULES])
def test_each_rule_takes_points_from_a_text_that_it_is_about(rule):
    assert quality.explain(OBJECTED[rule])[rule] > 0 and rule not in quality.explain(PROSE)


@pytest.mark.parametrize("text", JUNK.values(), ids=JUNK)
def test_junk_does_not_pass_the_training_filter(text):
    assert score_document(text) < 1.0 < score_document(PROSE)


def test_languages_without_spaces_are_not_junk():
    rng = random.Random(3)
    chinese = "".join(chr(rng.randrange(0x4E00, 0x9000)) for _ in range(600)) + "。"
    assert score_document(chinese) >= 3.0


@pytest.mark.parametrize("text", ["", " \n\t", "\u00a0"])
def test_an_empty_document_scores_zero(text):
    assert score_document(text) == 0.0


def test_every_score_is_between_zero_and_five_and_never_nan():
    rng = random.Random(4)
    alphabets = [
        "ab ",
        "a1#{}\n ",
        "\x00\x7f\n",
        "…• .\n",
        "漢字 a。",
        "".join(map(chr, range(300))),
    ]
    for _ in range(400):
        text = "".join(rng.choices(rng.choice(alphabets), k=rng.randrange(0, 400)))
        assert 0.0 <= score_document(text) <= quality.MAX_SCORE


def test_duplicate_ngrams_agree_with_counting_by_hand():
    """12 words, then the same 12, then 12 others: the second dozen is repeated text."""
    words = [f"w{i:02d}" for i in range(24)]
    text = " ".join(words[:12] + words[:12] + words[12:])
    expected = quality.ramp(12 / 36, 0.1, 0.6)
    assert quality.duplicate_ngrams(quality.take_apart(text)) == pytest.approx(expected)


def test_top_bigram_agrees_with_counting_by_hand():
    words = random.Random(5).choices(["a", "bb", "ccc"], k=200)
    pairs = Counter(pairwise(words))
    (one, two), count = pairs.most_common(1)[0]
    share = count * (len(one) + len(two)) / sum(map(len, words))
    found = quality.top_bigram(quality.take_apart(" ".join(words)))
    assert found == pytest.approx(quality.ramp(share, 0.2, 0.6))


def test_scores_of_the_source_are_kept(tmp_path):
    scores = pa.array([0.25, None, 9.0, None], pa.float32())
    create(tmp_path, [PROSE, PROSE, PROSE, None], score=scores)
    found = column_by_id(curate_table(tmp_path), "score")
    assert found == {0: 0.25, 1: 5.0, 2: 9.0, 3: 0.0}


# -----------------------------------------------------------------------------
# runs


def test_a_second_run_changes_nothing(tmp_path, capsys):
    create(tmp_path, ["one", "two", "One"])
    first = curate_table(tmp_path)
    capsys.readouterr()
    second = curate_table(tmp_path)
    assert second.version == first.version
    assert capsys.readouterr().out.count("all 3 rows are filled") == 2


def test_workers_find_the_same_as_this_process(tmp_path):
    rng = random.Random(6)
    texts = [f"{rng.randrange(40)} {PROSE * 30}" for _ in range(120)]  # several tasks
    tables = [create(tmp_path / name, texts) for name in ("one", "two")]
    curate_table(tmp_path / "one")
    curate_table(tmp_path / "two", "--workers", "2")
    for column in ("is_dup", "score"):
        one, two = (column_by_id(table, column) for table in map(latest, tables))
        assert one == two


def latest(table: lancedb.table.Table) -> lancedb.table.Table:
    table.checkout_latest()
    return table


def test_another_writer_meanwhile_ends_it_in_one_line_and_keeps_both(tmp_path):
    table = create(tmp_path, ["one", "two", "three"])

    def intruding(batches):
        table.update(where="id = 1", values={"text": "TWO"})
        for batch in batches:
            yield pa.record_batch({"_rowid": batch["_rowid"], "n": batch["id"].cast(pa.int32())})

    fields = pa.schema([pa.field("n", pa.int32())])
    with pytest.raises(SystemExit, match="something else wrote to table 'corpus' meanwhile: run"):
        columns.fill_columns(open_table(tmp_path), fields, ["id"], "n", intruding)
    assert column_by_id(latest(table), "text") == {0: "one", 1: "TWO", 2: "three"}
    assert set(column_by_id(table, "n").values()) == {None}


def test_columns_that_another_writer_adds_or_replaces_are_left_to_it(tmp_path, monkeypatch):
    """Two that begin at once; and one that drops the other's column for its own."""
    theirs = pa.schema([pa.field("n", pa.int32(), metadata={"tokenizer": "theirs"})])
    fields = pa.schema([pa.field("n", pa.int32(), metadata={"tokenizer": "ours"})])

    def count(batches):
        for batch in batches:
            yield pa.record_batch({"_rowid": batch["_rowid"], "n": batch["id"].cast(pa.int32())})

    table = create(tmp_path, ["one"])
    table.add(rows(["two"], 1))
    to_lance = lancedb.table.LanceTable.to_lance

    def late(self):
        found = to_lance(self)
        monkeypatch.undo()
        to_lance(latest(open_table(tmp_path))).add_columns(theirs)
        return found

    monkeypatch.setattr(lancedb.table.LanceTable, "to_lance", late)
    with pytest.raises(SystemExit, match="something else wrote"):
        columns.fill_columns(open_table(tmp_path), fields, ["id"], "n", count)

    fill = columns._fill_slice

    def replaced(*arguments):
        more = fill(*arguments)
        other = latest(open_table(tmp_path))
        other.drop_columns(["n"])
        to_lance(latest(other)).add_columns(fields)
        return more

    monkeypatch.setattr(columns, "_fill_slice", replaced)
    with pytest.raises(SystemExit, match="something else wrote"):
        columns.fill_columns(open_table(tmp_path), theirs, ["id"], "n", count)
    assert set(column_by_id(latest(table), "n").values()) == {None}


@pytest.mark.parametrize("error", [SystemExit("mend it"), KeyboardInterrupt(), KeyError(7)])
def test_what_is_raised_while_a_column_is_filled_comes_out_as_it_is(tmp_path, error):
    def failing(batches):
        yield from ()
        raise error

    fields = pa.schema([pa.field("n", pa.int32())])
    create(tmp_path, ["one"])
    with pytest.raises(type(error)) as raised:
        columns.fill_columns(open_table(tmp_path), fields, ["id"], "n", failing)
    assert raised.value is error


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_run_is_continued(tmp_path, how):
    texts = [f"{i % 10} {PROSE * 40}" for i in range(300)]
    table = create(tmp_path, texts[:20])
    for first in range(20, 300, 20):
        table.add(rows(texts[first : first + 20], first))
    command = [sys.executable, ROOT / "scripts/curate.py", "--db", ".", "--workers", "1"]
    process = subprocess.Popen(
        command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    while "score" not in latest(table).schema.names or table.count_rows("score IS NOT NULL") == 0:
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.01)
    # Ctrl-C goes to all of them; multiprocessing's resource tracker cleans up behind a kill
    os.killpg(process.pid, how) if how == signal.SIGINT else process.kill()
    lines = process.communicate(timeout=30)[1].splitlines()
    if how == signal.SIGINT:
        assert (process.returncode, lines[-1].split(":")[0]) == (130, "interrupted")
        assert "Traceback" not in "".join(lines)
    half = {at: value for at, value in column_by_id(latest(table), "score").items() if value}
    assert 0 < len(half) < 300

    found = curate_table(tmp_path)
    expected = [np.float32(score_document(text)) for text in texts[:10]]
    assert column_by_id(found, "score") == {i: expected[i % 10] for i in range(300)}
    assert column_by_id(found, "is_dup") == {i: i >= 10 for i in range(300)}


@pytest.mark.parametrize(
    ("data", "flags", "message"),
    [
        ({"id": [1], "body": ["a"]}, (), r"no column 'text': name its text with --text-column"),
        ({"id": [1], "text": [2]}, (), r"'text' is int64, not text: see --text-column"),
        ({"id": ["a"], "text": ["a"]}, (), r"'id' is string: name one with --id-column"),
        ({"text": ["a"]}, (), r"'id' is missing: name one with --id-column"),
        ({"id": [1, None], "text": ["a", "b"]}, (), r"1 rows .* no 'id': see --id-column"),
        ({"id": [1], "text": ["a"], "score": ["hi"]}, (), r"'score' .* is string"),
        ({"id": [1], "text": ["a"], "is_dup": [0]}, (), r"'is_dup' .* is int64"),
    ],
)
def test_a_table_that_does_not_fit_is_refused_in_one_line(tmp_path, data, flags, message):
    lancedb.connect(tmp_path).create_table("corpus", pa.table(data))
    with pytest.raises(SystemExit, match=message) as refusal:
        curate_table(tmp_path, *flags)
    assert "\n" not in str(refusal.value)
    assert open_table(tmp_path).version == 1


def test_an_empty_table_is_refused(tmp_path):
    create(tmp_path, [])
    with pytest.raises(SystemExit, match=r"table 'corpus' is empty: add documents with python"):
        curate_table(tmp_path)


def test_a_report_directory_that_cannot_be_made_is_refused_before_any_work(tmp_path):
    create(tmp_path, ["a"])
    (tmp_path / "report").write_text("a file")
    with pytest.raises(SystemExit, match="--report .*report: cannot create it: File exists"):
        curate_table(tmp_path)
    assert open_table(tmp_path).version == 1


def test_named_columns_of_a_users_table(tmp_path):
    data = pa.table({"Doc Id": pa.array([3, 2], pa.int32()), "Body": ["same", "Same"]})
    lancedb.connect(tmp_path).create_table("corpus", data)
    table = curate_table(tmp_path, "--id-column", "Doc Id", "--text-column", "Body")
    assert table.to_lance().to_table(["is_dup"])["is_dup"].to_pylist() == [True, False]


# -----------------------------------------------------------------------------
# the report


def test_report_agrees_with_a_direct_computation(tmp_path, capsys):
    rng = random.Random(7)
    texts = [PROSE[: rng.randrange(0, 400)] for _ in range(300)] + [None]
    sources = [rng.choice(["web", "books", None]) for _ in texts]
    tokens = pa.array([None if i % 7 == 0 else i for i in range(301)], pa.int32())
    create(tmp_path, texts, source=pa.array(sources, pa.string()), n_tokens=tokens)
    table = curate_table(tmp_path)
    report = (tmp_path / "report/report.txt").read_text(encoding="utf-8")
    assert report.strip() in capsys.readouterr().out
    numbers = {line[:28].strip(): line[28:].replace(",", "").split() for line in report.split("\n")}

    is_dup, score = (list(column_by_id(table, name).values()) for name in ("is_dup", "score"))
    low = [s < 1.0 and not dup for s, dup in zip(score, is_dup, strict=True)]
    assert f"curation of table corpus, version {table.version}" in report
    assert numbers["documents"] == ["301"]
    assert numbers["duplicates"][0] == str(sum(is_dup))
    assert numbers["score < 1"][0] == str(sum(low))
    assert numbers["kept"][0] == str(301 - sum(low) - sum(is_dup))
    for name in ("web", "books", None):
        mine = [i for i, source in enumerate(sources) if source == name]
        dups, lows = sum(is_dup[i] for i in mine), sum(low[i] for i in mine)
        share = f"{100 * dups / len(mine):.1f}"
        expected = [len(mine), dups, share, "%", lows, len(mine) - dups - lows]
        assert numbers[name or "(no source)"] == [str(value) for value in expected]
    for unit, lengths in (
        ("characters", sorted(len(text or "") for text in texts)),
        ("tokens", sorted(0 if i % 7 == 0 else i for i in range(301))),
    ):
        line = next(line for line in report.split("\n") if line.startswith(unit))
        found = [int(cell.replace(",", "")) for cell in line.split()[1:]]
        at = [round(q * 300) for q in curate_report.QUANTILES]
        assert found == [lengths[i] for i in at] + [sum(lengths)]
    for edge in range(10):
        line = next(x for x in report.split("\n") if x.startswith(f"{edge / 2:.1f} – "))
        inside = [edge / 2 <= s < edge / 2 + 0.5 or (s == 5.0 and edge == 9) for s in score]
        assert int(line.split()[3]) == sum(inside)


def test_report_has_a_figure_also_without_source_and_tokens(tmp_path):
    create(tmp_path, [PROSE, "short"])
    curate_table(tmp_path)
    figure = (tmp_path / "report/report.png").read_bytes()
    assert figure.startswith(b"\x89PNG") and len(figure) > 10_000
    assert "all documents" in (tmp_path / "report/report.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("more", "rows"),
    [
        ({"source": pa.array(["aa", "bb"]).dictionary_encode()}, ["aa", "bb"]),
        ({"source": pa.array([["aa"], ["bb"]])}, ["all documents"]),
        ({"source": ["$\\frac$", "$x"]}, ["$\\frac$", "$x"]),
        ({"score": pa.array([float("inf"), -1e30], pa.float32())}, ["all documents"]),
    ],
    ids=["categories", "lists", "formulas", "far scores"],
)
def test_report_takes_tables_as_they_come(tmp_path, more, rows):
    create(tmp_path, ["one", "two"], **more)
    curate_table(tmp_path)
    report = (tmp_path / "report/report.txt").read_text()
    assert (tmp_path / "report/report.png").exists()
    assert sum(int(line.split()[3]) for line in report.splitlines() if " – " in line) == 2
    table = report.partition("source  ")[2].partition("\n\n")[0].splitlines()[1:]
    assert [line[:28].rstrip() for line in table] == rows


def test_sources_of_one_beginning_have_a_bar_each():
    axes = Figure().subplots()
    sources = {f"HuggingFaceFW/fineweb-edu-{year}": np.array([year, 0, 0]) for year in (13, 14)}
    curate_report.draw_sources(axes, argparse.Namespace(sources=sources))
    bars = {(round(bar.get_y(), 3), bar.get_width()) for bar in axes.patches if bar.get_width()}
    assert {width for _, width in bars} == {13, 14} and len({y for y, _ in bars}) == 2


def test_many_sources_are_summed_up(tmp_path, monkeypatch):
    monkeypatch.setattr(curate_report, "MAX_SOURCES", 20)
    sources = [f"site {i:03d}" for i in range(100)] + ["site 000"]
    create(tmp_path, [f"{i}" for i in range(101)], source=pa.array(sources))
    table = curate_table(tmp_path)
    summary = curate_report.summarise(table, "text", 1.0)
    assert len(summary.sources) <= 21
    shown = curate_report.largest_sources(summary)
    assert len(shown) == 13 and shown["site 000"].sum() == 2
    assert sum(row.sum() for row in shown.values()) == 101


def test_summary_counts_null_score_as_low(tmp_path):
    """As the training filter does: SQL's score >= x is not true for NULL."""
    table = create(
        tmp_path, ["a", "b"], score=pa.array([None, 4.0]), is_dup=pa.array([None, False])
    )
    args = argparse.Namespace(text_column="text", min_score=1.0, report=tmp_path / "report")
    args.report.mkdir()
    curate_report.write(table, args)
    assert curate_report.summarise(table, "text", 1.0).by_fate.tolist() == [1, 1, 0]
