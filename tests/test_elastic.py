"""The elastic stream against a brute-force reference of its definition, written with lists.

The reference reads every row with plain lancedb, sorts, joins, cuts and deals one block at a time.
"""

import os
import subprocess
import sys
import threading
from pathlib import Path

import lancedb
import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import common
import launch
import reader
from distributed import World
from elastic import ElasticStream
from lancedb_stream import LanceDBStream
from reader import ring_permitted
from tests.conftest import ROOT
from tokenizer import ByteTokenizer

EOS = 256
MASK = 2**64 - 1


# -----------------------------------------------------------------------------
# the reference


def splitmix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def sort_key(doc_id: int, seed: int, epoch: int) -> int:
    salt = splitmix((splitmix(seed & MASK) + epoch * 0x9E3779B97F4A7C15) & MASK)
    return splitmix((doc_id & MASK) ^ salt)


def ordered(docs: list[tuple[int, list[int]]], epoch: int, seed=42, clump=1, shuffle=True):
    """Documents (id, tokens), given in table order, in the epoch's order."""
    if not shuffle:
        return sorted(docs, key=lambda doc: doc[0])
    clumps = [docs[i : i + clump] for i in range(0, len(docs), clump)]
    clumps.sort(key=lambda c: sort_key(c[0][0], seed, epoch))
    return [doc for c in clumps for doc in c]


def epoch_blocks(docs, epoch, T, splits=64, **order):
    """The epoch's blocks (tokens, document numbers) in the order in which they are trained."""
    stream, numbers = [], []
    for k, (_, tokens) in enumerate(ordered(docs, epoch, **order)):
        stream += [*tokens, EOS]
        numbers += [k] * (len(tokens) + 1)
    blocks = []
    for i in range(0, len(stream) - T + 1, T):
        first = numbers[i]
        blocks.append((stream[i : i + T], [n - first for n in numbers[i : i + T]]))
    S = min(splits, len(blocks))
    lanes, at = [], 0
    for lane in range(S):
        length = len(blocks) // S + (lane < len(blocks) % S)
        lanes.append(blocks[at : at + length])
        at += length
    dealt = []
    for i in range(max(map(len, lanes), default=0)):
        dealt += [lane[i] for lane in lanes if i < len(lane)]
    return dealt


# -----------------------------------------------------------------------------
# running the real one


def make(path, docs, kind=None, **columns) -> lancedb.table.Table:
    """A table of (id, tokens) documents, in this order."""
    table = rows(docs, kind, **columns)
    return lancedb.connect(path).create_table("corpus", table, mode="overwrite")


def rows(docs, kind=None, **columns) -> pa.Table:
    ids = pa.array([i for i, _ in docs], pa.int64())
    tokens = pa.array([t for _, t in docs], kind or pa.list_(pa.uint16()))
    counts = pa.array([None if t is None else len(t) for _, t in docs], pa.int32())
    return pa.table({"id": ids, "input_ids": tokens, "n_tokens": counts, **columns})


ALONE = World()


def open_stream(path, *flags, world=ALONE, G=4, where="n_tokens > 0") -> ElasticStream:
    args = launch.flag_parser().parse_args(
        ["--db", str(path), "--plan-cache", str(Path(path) / "cache"), *flags]
    )
    return ElasticStream(
        common.open_table(args), args, where, ByteTokenizer(), global_batch=G, world=world
    )


def rows_of(batches) -> list:
    """Real rows of micro-batches: (tokens, document numbers) or tokens in row mode."""
    rows = []
    for batch in batches:
        for i, mask in enumerate(batch["mask"]):
            if mask.any():
                tokens = batch["input_ids"][i][mask].tolist()
                packed = "doc_ids" in batch
                rows.append((tokens, batch["doc_ids"][i].tolist()) if packed else tokens)
    return rows


def global_batches(path, n, *flags, size=1, G=4, state=None, where="n_tokens > 0"):
    """The first ``n`` global batches on ``size`` ranks, and the state after them."""
    steps = [[] for _ in range(n)]
    for rank in range(size):
        stream = open_stream(path, *flags, world=World(rank, size), G=G, where=where)
        if state:
            stream.load_state_dict(state)
        got = stream.steps()
        for k in range(n):
            steps[k] += rows_of(next(got))
        after = stream.state_dict()
        stream.close()
    return steps, after


def documents(rng, n, longest):
    return [
        (int(i), rng.integers(0, 256, int(rng.integers(1, longest + 1))).tolist())
        for i in rng.choice(10 * n, n, replace=False)
    ]


# -----------------------------------------------------------------------------
# order


def test_order_is_pinned_by_golden_values():
    """Computed once with Python integers: a change here breaks every checkpoint's order."""
    from plan import shuffle_keys

    ids = np.array([0, 1, 2, 1_000_000, 2**62, -1])
    expected = [sort_key(int(i), 42, 3) for i in ids]
    assert shuffle_keys(ids, 42, 3).tolist() == expected
    assert [f"{k:016x}" for k in expected[:2]] == ["3e1afc906e6d4f9f", "91eb2c461e8a8ac6"]


# -----------------------------------------------------------------------------
# blocks


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_stream_is_its_definition_for_any_world_batch_and_resume(tmp_path_factory, data):
    draw = data.draw
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    T = draw(st.sampled_from([2, 3, 5, 16, 33]))
    docs = documents(rng, draw(st.integers(1, 60)), draw(st.sampled_from([1, 3, T, 6 * T])))
    clump = draw(st.sampled_from([1, 1, 2, 7]))
    shuffle = draw(st.booleans())
    splits = draw(st.sampled_from([1, 2, 3, 8, 64]))
    G = draw(st.integers(4, 11))
    size = draw(st.sampled_from([1, 2, 3, 4]))
    batch = draw(st.integers(1, 5))
    path = tmp_path_factory.mktemp("elastic")
    make(path, docs)
    flags = ["--pack", "--seq-len", str(T), "--num-splits", str(splits)]
    flags += ["--shuffle-clump", str(clump)] + ["--no-shuffle"] * (not shuffle)
    expected, epoch = [], 0
    order = {"clump": clump, "shuffle": shuffle}
    n = 5
    first = epoch_blocks(docs, 0, T, splits, **order)
    if not first:
        assert open_stream(path, *flags).blocks_per_epoch == 0
        return
    while len(expected) < n * G:
        expected += epoch_blocks(docs, epoch, T, splits, **order)
        epoch += 1
    steps = [expected[k * G : (k + 1) * G] for k in range(n)]
    got, _ = global_batches(path, n, *flags, "--batch-size", str(batch), size=size, G=G)
    assert got == steps
    stop = draw(st.integers(0, n - 1))
    _, state = global_batches(path, stop, *flags, "--batch-size", "3", size=1, G=G)
    rest, _ = global_batches(
        path, n - stop, *flags, "--batch-size", "2", size=draw(st.sampled_from([1, 3])), G=G,
        state=state,
    )  # fmt: skip
    assert rest == steps[stop:]


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_row_mode_is_one_document_a_block_for_any_world(tmp_path, size):
    rng = np.random.default_rng(0)
    docs = documents(rng, 50, 20)
    make(tmp_path, docs)
    G, T = 9, 8
    expected = [[*tokens, EOS][:T] for epoch in range(2) for _, tokens in ordered(docs, epoch)]
    got, _ = global_batches(tmp_path, 11, "--seq-len", str(T), "--batch-size", "2", size=size, G=G)
    assert got == [expected[k * G : (k + 1) * G] for k in range(11)]


@pytest.mark.parametrize(
    "kind",
    [
        *(pa.list_(t) for t in (pa.int8(), pa.uint8(), pa.int16(), pa.uint16(), pa.int32())),
        *(pa.list_(t) for t in (pa.uint32(), pa.int64(), pa.uint64())),
        pa.large_list(pa.uint16()),
        pa.large_list(pa.int64()),
        pa.list_(pa.uint16(), 7),
        pa.list_(pa.int64(), 7),
    ],
    ids=str,
)
def test_every_integer_list_type_is_read(tmp_path, kind):
    rng = np.random.default_rng(0)
    docs = [(i, rng.integers(0, 127, 7).tolist()) for i in range(40)]
    make(tmp_path, docs, kind)
    got, _ = global_batches(tmp_path, 3, "--pack", "--seq-len", "16")
    assert [row for step in got for row in step] == epoch_blocks(docs, 0, 16)[:12]


def test_reading_through_io_uring_and_by_threads_gives_the_same(tmp_path):
    docs = documents(np.random.default_rng(0), 300, 90)
    make(tmp_path, docs)
    flags = ("--pack", "--seq-len", "16")
    assert not open_stream(tmp_path, *flags, "--no-io-uring").reader.by_ring
    assert open_stream(tmp_path, *flags).reader.by_ring == ring_permitted()
    by_threads, _ = global_batches(tmp_path, 50, *flags, "--no-io-uring")
    assert global_batches(tmp_path, 50, *flags)[0] == by_threads
    assert [row for step in by_threads for row in step] == epoch_blocks(docs, 0, 16)[:200]


def test_documents_of_many_reads_are_cut_before_they_are_joined(tmp_path, monkeypatch):
    """A window is read in parts, so that long documents do not fill the memory."""
    docs = documents(np.random.default_rng(0), 30, 500)
    make(tmp_path, docs)
    monkeypatch.setattr(reader, "PART", 300)
    got, _ = global_batches(tmp_path, 60, "--pack", "--seq-len", "8", G=8)
    assert [row for step in got for row in step] == epoch_blocks(docs, 0, 8)[:480]


def test_an_epoch_has_the_documents_that_the_filter_keeps_and_lancedb_streams_a_subset(tmp_path):
    rng = np.random.default_rng(0)
    docs = [(i, rng.integers(0, 256, 12).tolist()) for i in range(203)]
    table = make(tmp_path, docs, score=pa.array(rng.random(203)))
    where = "score >= 0.3 AND id % 100 != 0"
    kept = table.search().where(where).select(["input_ids"]).to_arrow()["input_ids"].to_pylist()
    flags = ("--seq-len", "16", "--batch-size", "4")
    steps, _ = global_batches(tmp_path, -(-len(kept) // 4), *flags, where=where)
    rows = [row[:-1] for step in steps for row in step]
    assert sorted(rows[: len(kept)]) == sorted(kept)
    args = launch.flag_parser().parse_args(["--db", str(tmp_path), *flags])
    other = LanceDBStream(table, args, where, ByteTokenizer(), global_batch=4, world=ALONE)
    steps = other.steps()
    theirs = [row[:-1] for _ in range(other.steps_per_epoch) for row in rows_of(next(steps))]
    other.close()
    assert len(theirs) > 0.9 * len(kept) and all(row in kept for row in theirs)
    assert len(set(map(tuple, theirs))) == len(theirs)


def test_rows_without_tokens_are_left_out(tmp_path):
    docs = [(0, [1, 2]), (1, None), (2, []), (3, [3]), (4, [4, 5, 6])]
    make(tmp_path, docs)
    stream = open_stream(tmp_path, "--pack", "--seq-len", "3")
    assert stream.epoch_tokens == 2 + 1 + 3 + 3 and stream.blocks_per_epoch == 3
    stream.close()
    got, _ = global_batches(tmp_path, 1, "--pack", "--seq-len", "3", "--no-shuffle", G=3)
    kept = [(i, t) for i, t in docs if t]
    assert got[0] == epoch_blocks(kept, 0, 3, shuffle=False)


def test_cap_on_an_epoch_is_its_first_blocks(tmp_path):
    docs = documents(np.random.default_rng(0), 40, 30)
    make(tmp_path, docs)
    flags = ("--seq-len", "8", "--blocks-per-epoch", "10")
    stream = open_stream(tmp_path, *flags, "--pack")
    assert stream.blocks_per_epoch == 10
    stream.close()
    got, _ = global_batches(tmp_path, 4, *flags, G=5)
    expected = [[*t, EOS][:8] for e in (0, 1) for _, t in ordered(docs, e)[:10]]
    assert [row for step in got for row in step] == expected
    with pytest.raises(SystemExit, match="--blocks-per-epoch auto"):
        open_stream(tmp_path, "--blocks-per-epoch", "auto")


# -----------------------------------------------------------------------------
# state


def test_state_counts_what_was_consumed_not_what_was_read(tmp_path):
    make(tmp_path, documents(np.random.default_rng(0), 200, 50))
    stream = open_stream(tmp_path, "--pack", "--seq-len", "8")
    steps = stream.steps()
    for k in range(1, 6):
        next(steps)
        state = stream.state_dict()
        assert (state["epoch"], state["block"]) == (0, 4 * k)
    stream.close()


def test_global_batch_may_change_on_purpose(tmp_path):
    docs = documents(np.random.default_rng(0), 100, 50)
    make(tmp_path, docs)
    flags = ("--pack", "--seq-len", "8")
    _, state = global_batches(tmp_path, 3, *flags, G=4)
    got, _ = global_batches(tmp_path, 2, *flags, G=7, state=state)
    assert got[0] + got[1] == epoch_blocks(docs, 0, 8)[12:26]


def test_deleted_rows_several_fragments_and_compaction_change_no_block(tmp_path):
    docs = documents(np.random.default_rng(0), 100, 50)
    table = make(tmp_path, docs[:60])
    table.add(rows(docs[60:]))
    table.delete(f"id IN ({', '.join(str(i) for i, _ in docs[1::3])})")
    kept = [doc for at, doc in enumerate(docs) if at % 3 != 1]
    flags, found = ("--pack", "--seq-len", "8"), []
    for fragments in (2, 1):
        assert len(table.to_lance().get_fragments()) == fragments
        got, state = global_batches(tmp_path, 3, *flags)
        assert [r for s in got for r in s] == epoch_blocks(kept, 0, 8)[:12]
        found.append(state["fingerprint"])
        table.optimize()
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--seq-len", "9"), "--seq-len was 8, is 9"),
        (("--shuffle-seed", "7"), "--shuffle-seed was 42, is 7"),
        (("--shuffle-clump", "2"), "--shuffle-clump was 1, is 2"),
        (("--num-splits", "8"), "--num-splits was 64, is 8"),
        (("--no-shuffle",), "--no-shuffle was False, is True"),
    ],
)
def test_other_data_is_refused_with_the_field_that_differs(tmp_path, flags, words):
    make(tmp_path, documents(np.random.default_rng(0), 60, 50))
    stream = open_stream(tmp_path, "--pack", "--seq-len", "8")
    other = open_stream(tmp_path, "--pack", "--seq-len", "8", *flags)
    with pytest.raises(SystemExit) as refusal:
        other.load_state_dict(stream.state_dict())
    assert words in str(refusal.value) and "\n" not in str(refusal.value)
    stream.close(), other.close()


def test_changed_rows_are_other_data(tmp_path):
    docs = documents(np.random.default_rng(0), 60, 50)
    make(tmp_path, docs)
    stream = open_stream(tmp_path, "--pack", "--seq-len", "8")
    make(tmp_path, docs[:-1])
    other = open_stream(tmp_path, "--pack", "--seq-len", "8")
    with pytest.raises(SystemExit, match="other data: documents was"):
        other.load_state_dict(stream.state_dict())
    stream.close(), other.close()


# -----------------------------------------------------------------------------
# bad tables, and nothing left behind


def test_length_that_is_not_as_counted_stops_with_the_documents_id(tmp_path):
    docs = [(7, [1, 2, 3]), (11, [4, 5])]
    make(tmp_path, docs)
    table = lancedb.connect(tmp_path).open_table("corpus")
    table.update(where="id = 11", values={"n_tokens": 3})
    stream = open_stream(tmp_path, "--pack", "--seq-len", "4")
    with pytest.raises(SystemExit, match="document 11 has 2 tokens where n_tokens said 3"):
        next(stream.steps())
    stream.close()


@pytest.mark.parametrize(("kind", "bad"), [(pa.int32(), -1), (pa.uint16(), 257)])
def test_unknown_token_id_stops_with_the_documents_id(tmp_path, kind, bad):
    make(tmp_path, [(7, [1, 2, 3]), (11, [4, bad])], pa.list_(kind))
    stream = open_stream(tmp_path, "--pack", "--seq-len", "3", "--no-shuffle", G=1)
    with pytest.raises(SystemExit, match=f"document 11 holds token id {bad} in column input_ids"):
        for _, _ in zip(range(2), stream.steps(), strict=False):
            pass
    stream.close()


def test_close_ends_the_threads_and_leaves_only_the_plans(tmp_path):
    make(tmp_path, documents(np.random.default_rng(0), 60, 50))
    before = set(threading.enumerate())
    stream = open_stream(tmp_path, "--pack", "--seq-len", "8")
    steps = stream.steps()
    next(steps)
    assert set(threading.enumerate()) - before
    stream.close()
    assert set(threading.enumerate()) <= before
    assert all(p.name != "partial" for p in (tmp_path / "cache").iterdir())


@pytest.mark.slow
def test_soak_keeps_memory_threads_and_descriptors_flat(tmp_path):
    """Thousands of steps over hundreds of epochs: nothing grows."""
    make(tmp_path, documents(np.random.default_rng(0), 400, 200))
    stream = open_stream(tmp_path, "--pack", "--seq-len", "64", "--prefetch-mb", "4", G=8)
    steps, marks = stream.steps(), []
    for _ in range(5):
        for _ in range(2000):
            next(steps)
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        marks.append((pages * 4096, threading.active_count(), len(os.listdir("/proc/self/fd"))))
    assert stream.epoch > 100
    stream.close()
    memory, threads, descriptors = zip(*marks, strict=True)
    assert memory[-1] - memory[1] < 20 << 20, memory
    assert max(threads[1:]) == min(threads[1:])
    assert max(descriptors[1:]) - min(descriptors[1:]) <= 4  # the mapped orders of two epochs


def test_killed_process_leaves_no_other_and_no_half_entry(tmp_path):
    make(tmp_path, documents(np.random.default_rng(0), 400, 200))
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from tests.test_elastic import open_stream\n"
        "stream = open_stream(sys.argv[2], '--pack', '--seq-len', '64')\n"
        "for _ in stream.steps(): print('step', flush=True)"
    )
    command = [sys.executable, "-c", code, str(ROOT), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as process:
        process.stdout.readline()
        group = os.getpgid(process.pid)
        process.kill()
    with pytest.raises(ProcessLookupError):
        os.killpg(group, 0)
    assert all(p.name != "partial" for p in (tmp_path / "cache").iterdir())
    stream = open_stream(tmp_path, "--pack", "--seq-len", "64")
    next(stream.steps())
    stream.close()


def test_batches_keep_the_loaders_contract(tmp_path):
    make(tmp_path, documents(np.random.default_rng(0), 60, 50))
    stream = open_stream(
        tmp_path, "--pack", "--seq-len", "8", "--batch-size", "3", world=World(1, 2), G=7
    )
    batches = next(stream.steps())
    assert len(batches) == 2
    for batch in batches:
        assert batch["input_ids"].shape == batch["doc_ids"].shape == (3, 8)
        assert batch["input_ids"].dtype == batch["doc_ids"].dtype == torch.int64
        assert batch["mask"].dtype == torch.bool
    assert torch.cat([b["mask"] for b in batches]).any(1).tolist() == [True] * 4 + [False] * 2
    stream.close()
