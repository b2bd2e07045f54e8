"""The packed blocks of every format, read back by its own library, against the documents."""

import hashlib
import json
from pathlib import Path

import lance
import numpy as np
import pyarrow.parquet as pq
import pytest
from streaming import StreamingDataset
from test_elastic import epoch_blocks

import build_packed_datasets
from build_packed_datasets import FORMATS
from tests.conftest import PACKED_LENGTH as T
from tests.conftest import documents, memmap_rows, small_disk


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


READERS = {
    "lance": lance_rows,
    "mds": mds_rows,
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


def test_a_second_call_adds_what_is_missing_and_nothing_else(corpus, tmp_path, capsys):
    build(corpus, tmp_path / "b", "--formats", "memmap")
    before = (tmp_path / "b/memmap/blocks.bin").stat()
    build(corpus, tmp_path / "b", "--formats", "memmap,parquet-seq")
    assert (tmp_path / "b/memmap/blocks.bin").stat() == before
    assert parquet_rows(tmp_path / "b/parquet-seq") == memmap_rows(tmp_path / "b/memmap")
    build(corpus, tmp_path / "b", "--formats", "memmap,parquet-seq")
    assert "nothing to do" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="holds blocks of other data: give another directory"):
        build(corpus, tmp_path / "b", "--filter", "id > 100")


def test_bad_calls_are_refused_in_one_line(corpus, tmp_path):
    with pytest.raises(SystemExit, match="--formats csv: there are lance, mds"):
        build(corpus, tmp_path, "--formats", "memmap,csv")
    with pytest.raises(SystemExit, match="no whole block in an epoch"):
        build(corpus, tmp_path / "b", "--filter", "id = 1", "--seq-len", "4096")
    assert not (tmp_path / "b").exists()


@pytest.mark.slow
def test_full_disk_leaves_nothing_half_written(corpus, tmp_path):
    with small_disk(tmp_path / "small", "100k") as small:
        with pytest.raises(SystemExit, match="--out .*No space left"):
            build(corpus, small / "b", "--formats", "parquet-seq,memmap")
        assert list((small / "b").iterdir()) == []
