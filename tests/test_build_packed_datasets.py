"""The packed blocks of every format, read back by its own library, against the documents."""

import fcntl
import hashlib
import json
import os
from pathlib import Path

import lance
import litdata
import numpy as np
import pyarrow.parquet as pq
import pytest
import webdataset
from streaming import StreamingDataset
from test_elastic import epoch_blocks

import build_packed_datasets
from blocks_writers import FORMATS, SHARD, shard_size
from packed_blocks import block_hashes
from scripts import tokenize_corpus
from stores import Store, lance_options
from tests.conftest import PACKED_LENGTH as T
from tests.conftest import documents, make_table, memmap_rows, small_disk


def build(corpus, out, *flags: str) -> None:
    build_packed_datasets.main(
        ["--db", str(corpus), "--seq-len", str(T), "--out", str(out), *flags]
    )


def lance_rows(path: Path):
    return lance.dataset(path / "blocks.lance").to_table()["input_ids"].to_pylist()


def parquet_rows(path: Path):
    files = sorted(path.glob("*.parquet"))
    return [row for file in files for row in pq.read_table(file)["input_ids"].to_pylist()]


def mds_rows(path: Path):
    return [s["tokens"].tolist() for s in StreamingDataset(local=str(path), batch_size=1)]


def webdataset_rows(path: Path):
    shards = sorted(map(str, path.glob("*.tar")))
    samples = list(webdataset.WebDataset(shards, shardshuffle=False))
    assert [int(s["__key__"]) for s in samples] == list(range(len(samples)))
    return [np.frombuffer(s["bin"], "<u2").tolist() for s in samples]


def litdata_rows(path: Path):
    return [
        block.tolist()
        for block in litdata.StreamingDataset(str(path), item_loader=litdata.TokensLoader(T))
    ]


READERS = {
    "lance": lance_rows,
    "mds": mds_rows,
    "webdataset": webdataset_rows,
    "litdata": litdata_rows,
    "parquet-random": parquet_rows,
    "parquet-seq": parquet_rows,
    "memmap": memmap_rows,
}


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_holds_the_epochs_blocks_in_order(packed, name):
    texts = documents(300)
    docs = [(i, list(texts[i].encode())) for i in range(300) if i % 100]
    expected = [tokens for tokens, _ in epoch_blocks(docs, 0, T)]
    rows = READERS[name](packed / name)
    assert rows == expected
    manifest = json.loads((packed / "manifest.json").read_text())
    assert manifest["hash"] == hashlib.sha256(np.array(rows, np.uint16).data).hexdigest()
    assert (manifest["blocks"], manifest["seq_len"]) == (len(rows), T)
    sizes = [f.stat().st_size for f in (packed / name).rglob("*") if f.is_file()]
    assert manifest["formats"][name]["bytes"] == sum(sizes)


def test_block_hashes_are_of_the_blocks_bytes_in_order(packed):
    rows = np.array(memmap_rows(packed / "memmap"), np.uint16)
    found = np.load(packed / "block_hashes.npy")
    digests = [hashlib.blake2b(row.tobytes(), digest_size=8).digest() for row in rows]
    assert found.dtype == np.uint64 and found.astype("<u8").tobytes() == b"".join(digests)
    assert np.array_equal(block_hashes(rows[::2]), found[::2])
    assert np.array_equal(block_hashes(rows.astype(">u2")), found)


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("parquet-seq", "*.parquet"),
        ("webdataset", "*.tar"),
        ("litdata", "*.bin"),
        ("mds", "*.mds"),
    ],
)
def test_even_few_blocks_are_in_sixteen_shards(packed, name, pattern):
    blocks = json.loads((packed / "manifest.json").read_text())["blocks"]
    assert len(list((packed / name).glob(pattern))) == -(-blocks // (blocks // 16)) >= 16


def test_shards_are_sixteen_at_least_and_of_4096_blocks_at_most():
    assert SHARD == 4096 and shard_size(1) == shard_size(15) == shard_size(31) == 1
    for blocks in (16, 17, 630, 65_535, 65_536, 10_000_000):
        assert 1 <= shard_size(blocks) <= SHARD and -(-blocks // shard_size(blocks)) >= 16
    assert shard_size(10_000_000) == SHARD


def test_a_single_block_is_one_shard(corpus, tmp_path):
    length = len(documents(300)[1]) + 1
    flags = ("--filter", "id = 1", "--formats", ",".join(FORMATS))
    build(corpus, tmp_path / "b", *flags, "--seq-len", str(length))
    assert json.loads((tmp_path / "b/manifest.json").read_text())["blocks"] == 1
    for pattern in ("*.tar", "*.bin", "*.mds", "shard*.parquet"):
        shards = [f for f in (tmp_path / "b").rglob(pattern) if f.name != "blocks.bin"]
        assert len(shards) == 1, pattern


def test_a_second_call_adds_what_is_missing_and_nothing_else(corpus, tmp_path, capsys):
    build(corpus, tmp_path / "b", "--formats", "memmap")
    before = (tmp_path / "b/memmap/blocks.bin").stat()
    hashes = (tmp_path / "b/block_hashes.npy").read_bytes()
    build(corpus, tmp_path / "b", "--formats", "memmap,parquet-seq")
    assert (tmp_path / "b/memmap/blocks.bin").stat() == before
    assert (tmp_path / "b/block_hashes.npy").read_bytes() == hashes
    assert parquet_rows(tmp_path / "b/parquet-seq") == memmap_rows(tmp_path / "b/memmap")
    build(corpus, tmp_path / "b", "--formats", "memmap,parquet-seq")
    assert "nothing to do" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="holds blocks of other data: give another directory"):
        build(corpus, tmp_path / "b", "--filter", "id > 100")


def test_tokens_changed_in_place_are_noticed(tmp_path, capsys):
    table = make_table(tmp_path / "db", documents(100))
    tokenize_corpus.main(["--db", str(tmp_path / "db")])
    out, flags = tmp_path / "b", ("--formats", "memmap")
    build(tmp_path / "db", out, *flags)
    before = (out / "memmap/blocks.bin").stat()
    table.checkout_latest()
    table.add_columns({"other": "1"})
    build(tmp_path / "db", out, *flags)
    assert f"nothing to do: {out} has these tokens" in capsys.readouterr().out
    assert json.loads((out / "manifest.json").read_text())["table_version"] == table.version
    assert (out / "memmap/blocks.bin").stat() == before
    (row,) = table.search().where("id = 7").select(["input_ids"]).to_list()
    table.update(where="id = 7", values={"input_ids": row["input_ids"][::-1]})
    for names in ("memmap", "memmap,parquet-seq"):
        with pytest.raises(SystemExit, match="holds blocks of other data: give another directory"):
            build(tmp_path / "db", out, "--formats", names)
    assert sorted(p.name for p in out.iterdir()) == ["block_hashes.npy", "manifest.json", "memmap"]


def test_two_builds_at_once_are_refused(corpus, tmp_path):
    directory = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(directory, fcntl.LOCK_EX)
    with pytest.raises(SystemExit, match="another build writes there: wait for its end"):
        build(corpus, tmp_path, "--formats", "memmap")
    assert not list(tmp_path.iterdir())
    os.close(directory)
    build(corpus, tmp_path, "--formats", "memmap")


def test_bad_calls_are_refused_in_one_line(corpus, tmp_path):
    with pytest.raises(SystemExit, match="--formats csv: there are lance, mds"):
        build(corpus, tmp_path, "--formats", "memmap,csv")
    with pytest.raises(SystemExit, match="no whole block in an epoch"):
        build(corpus, tmp_path / "b", "--filter", "id = 1", "--seq-len", "4096")
    assert not (tmp_path / "b").exists()


def test_what_is_built_in_an_object_store_is_what_is_built_here(corpus, packed, bucket):
    build(corpus, f"{bucket}/a", "--formats", "lance")
    build(corpus, f"{bucket}/a", "--formats", "lance,mds")
    out = Store(f"{bucket}/a", "--out")
    here = json.loads((packed / "manifest.json").read_text())
    there = json.loads((out / "manifest.json").read())
    assert list(there["formats"]) == ["lance", "mds"] and there["hash"] == here["hash"]
    assert there["formats"]["mds"]["bytes"] == here["formats"]["mds"]["bytes"]
    assert (out / "block_hashes.npy").read() == (packed / "block_hashes.npy").read_bytes()
    table = lance.dataset(f"{bucket}/a/lance/blocks.lance", storage_options=lance_options())
    assert table.to_table()["input_ids"].to_pylist() == memmap_rows(packed / "memmap")


def test_a_failed_build_leaves_no_manifest_and_the_next_begins_anew(tmp_path, bucket):
    database = tmp_path / "db"
    table = make_table(database, documents(300))
    tokenize_corpus.main(["--db", str(database), "--workers", "0"])
    table.checkout_latest()
    table.update(where="id = 150", values={"input_ids": [1]})  # n_tokens says otherwise
    for out in (str(tmp_path / "b"), f"{bucket}/b"):
        with pytest.raises(SystemExit, match="document 150 has 1 tokens"):
            build(database, out, "--formats", "lance,mds", "--prefetch-mb", "1")
        assert not (Store(out, "--out") / "manifest.json").exists()
    (Store(f"{bucket}/b", "--out") / "lance/blocks.lance/rest").write(b"of the failed call")
    build(database, f"{bucket}/b", "--formats", "lance", "--filter", "id < 150")
    assert not (Store(f"{bucket}/b", "--out") / "lance/blocks.lance/rest").exists()
    options = {"storage_options": lance_options()}
    blocks = lance.dataset(f"{bucket}/b/lance/blocks.lance", **options).count_rows()
    assert json.loads((Store(f"{bucket}/b", "--out") / "manifest.json").read())["blocks"] == blocks


@pytest.mark.parametrize(
    ("out", "flags", "words"),
    [
        (
            "s3://none/a",
            ("--formats", "lance,memmap"),
            "memmap is for local disks: --formats lance,mds",
        ),
        ("gs://none/a", (), "--out gs://none/a: give a local directory or s3://bucket/prefix"),
        ("s3://none/a", ("--formats", "lance"), "--out s3://none/a: .*"),
        ("s3://none/a", ("--formats", "mds"), "--out s3://none/a: .*"),
    ],
)
def test_object_stores_that_cannot_be_written_are_refused(corpus, bucket, out, flags, words):
    with pytest.raises(SystemExit, match=words) as refused:
        build(corpus, out, *flags)
    assert "\n" not in str(refused.value)


@pytest.mark.slow
def test_full_disk_leaves_nothing_half_written(corpus, tmp_path):
    with small_disk(tmp_path / "small", "100k") as small:
        with pytest.raises(SystemExit, match="--out .*No space left"):
            build(corpus, small / "b", "--formats", "parquet-seq,memmap")
        assert list((small / "b").iterdir()) == []
