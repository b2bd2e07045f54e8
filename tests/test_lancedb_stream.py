"""Loaders: what their batches hold, against the documents themselves."""

from itertools import pairwise

import pyarrow as pa
import pytest
import torch

import common
import launch
from distributed import World
from lancedb_stream import DocumentBlocks, LanceDBStream
from tests.conftest import documents
from tokenizer import ByteTokenizer


def open_stream(corpus, *flags: str) -> LanceDBStream:
    args = launch.flag_parser().parse_args(["--db", str(corpus), "--seq-len", "64", *flags])
    return LanceDBStream(
        common.open_table(args),
        args,
        "id % 100 != 0",
        ByteTokenizer(),
        global_batch=args.global_batch or args.batch_size,
        world=World(),
    )


def epoch(stream) -> list[dict]:
    steps = stream.steps()
    batches = [batch for _ in range(stream.steps_per_epoch) for batch in next(steps)]
    stream.close()
    return batches


def test_row_mode_block_is_one_document_and_eos_cut_or_padded():
    blocks = DocumentBlocks(seq_len=4, eos_id=9)
    lists = pa.array([[1, 2], [1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 4, 5], []])
    got = [
        (b["input_ids"].tolist(), b["mask"].tolist())
        for b in blocks(pa.record_batch([lists], ["t"]))
    ]
    t, f = True, False
    assert got == [
        ([1, 2, 9, 9], [t, t, t, f]),
        ([1, 2, 3, 9], [t, t, t, t]),
        ([1, 2, 3, 4], [t, t, t, t]),
        ([1, 2, 3, 4], [t, t, t, t]),
        ([9, 9, 9, 9], [t, f, f, f]),
    ]


def test_row_mode_epoch_is_the_filtered_documents_once_each(corpus):
    batches = epoch(open_stream(corpus, "--batch-size", "9"))
    got = [
        tuple(row[m].tolist())
        for b in batches
        for row, m in zip(b["input_ids"], b["mask"], strict=True)
    ]
    texts = documents(300)
    expected = [tuple([*texts[i].encode(), 256][:64]) for i in range(300) if i % 100]
    assert len(got) == 297 and sorted(got) == sorted(expected)


def test_packed_blocks_hold_documents_joined_by_eos(corpus):
    batches = epoch(open_stream(corpus, "--pack", "--batch-size", "2", "--global-batch", "4"))
    known = {tuple(text.encode()) for text in documents(300)}
    whole = 0
    for batch in batches:
        assert batch["input_ids"].shape == batch["doc_ids"].shape == (2, 64)
        for ids, docs, mask in zip(
            batch["input_ids"], batch["doc_ids"], batch["mask"], strict=True
        ):
            ids, docs = ids[mask], docs[mask]
            ends = (ids == 256).nonzero().flatten()
            assert torch.equal(docs, (torch.cumsum(ids == 256, 0) - (ids == 256).long()))
            for a, b in pairwise(ends):  # documents that lie wholly inside
                assert tuple(ids[a + 1 : b].tolist()) in known
                whole += 1
    assert whole > 10


def test_packed_epoch_is_counted_exactly(corpus):
    stream = open_stream(corpus, "--pack", "--batch-size", "2")
    texts = documents(300)
    tokens = sum(len(texts[i]) + 1 for i in range(300) if i % 100)
    assert stream.blocks_per_epoch == tokens // 64 // 2 * 2
    assert len(epoch(stream)) == stream.steps_per_epoch == tokens // 64 // 2


def test_epochs_are_shuffled_differently(corpus):
    stream = open_stream(corpus, "--batch-size", "9")
    steps = stream.steps()
    first, second = ([next(steps) for _ in range(stream.steps_per_epoch)] for _ in range(2))
    stream.close()
    assert stream.epoch == 1
    first, second = (torch.cat([s[0]["input_ids"] for s in e]) for e in (first, second))
    assert not torch.equal(first, second)
    assert sorted(first.tolist()) == sorted(second.tolist())


@pytest.mark.parametrize("mode", [("--pack",), ()])
def test_state_continues_behind_what_was_consumed(corpus, mode):
    flags = ("--batch-size", "4", "--seq-len", "256", *mode)
    whole = open_stream(corpus, *flags)
    steps = whole.steps()
    expected = [next(steps)[0] for _ in range(whole.steps_per_epoch + 2)]
    whole.close()
    for stop in (1, whole.steps_per_epoch - 1, whole.steps_per_epoch, whole.steps_per_epoch + 1):
        first = open_stream(corpus, *flags)
        steps = first.steps()
        for _ in range(stop):
            next(steps)
        state = first.state_dict()
        first.close()
        second = open_stream(corpus, *flags)
        second.load_state_dict(state)
        steps = second.steps()
        for batch in expected[stop:]:
            (got,) = next(steps)
            assert all(torch.equal(got[k], batch[k]) for k in batch)
        second.close()


def test_estimate_of_an_epoch_is_near_the_count(corpus):
    exact = open_stream(corpus, "--pack", "--batch-size", "2")
    with pytest.warns(UserWarning, match="approximate"):
        estimate = open_stream(corpus, "--pack", "--batch-size", "2", "--blocks-per-epoch", "auto")
    assert abs(estimate.blocks_per_epoch - exact.blocks_per_epoch) < 0.5 * exact.blocks_per_epoch


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--num-splits", "3"), "--num-splits 3 must be a multiple of 1 ranks x 1 workers"),
        (("--num-workers", "3"), "--num-splits 8 must be a multiple of 1 ranks x 3 workers"),
        (
            ("--global-batch", "12"),
            "--global-batch 12 must be a multiple of --batch-size 8 x 1 ranks",
        ),
        (("--pack", "--blocks-per-epoch", "9"), "--blocks-per-epoch 9: give auto or a multiple"),
    ],
)
def test_limits_of_lancedb_streaming_are_refused_in_one_line(corpus, flags, words):
    with pytest.raises(SystemExit) as refusal:
        open_stream(corpus, *flags)
    assert words in str(refusal.value) and "\n" not in str(refusal.value)


def test_resume_on_another_world_size_is_refused(corpus):
    stream = open_stream(corpus)
    state = stream.state_dict() | {"world_size": 2}
    with pytest.raises(SystemExit, match="world_size 1: the checkpoint has 2"):
        stream.load_state_dict(state)
