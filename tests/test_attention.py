"""Attention within documents, against the documents one by one and torch's own block mask."""

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from attention import attend, block_mask, documents_of
from feed import Feed
from loss import IGNORE
from model import GPT, GPTConfig

ARCHS = {
    "gpt2": {},
    "llama": {"arch": "llama", "n_kv_head": 2, "qk_norm": True, "tied": False},
}


def config(arch: str) -> GPTConfig:
    return GPTConfig(vocab_size=97, seq_len=512, n_layer=2, n_head=4, n_embd=64, **ARCHS[arch])


def random_documents(B: int, T: int, seed: int = 0) -> torch.Tensor:
    """doc_ids int64 (B, T) of documents of 1 to about 80 tokens; the first row is one document."""
    generator = torch.Generator().manual_seed(seed)
    begins = torch.rand(B, T, generator=generator) < 0.03
    begins |= torch.rand(B, T, generator=generator).cumsum(1) % 50 < 1  # some of one token
    begins[0], begins[:, 0] = False, False
    return begins.long().cumsum(1)


def batch_of(doc_ids: torch.Tensor, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 97, doc_ids.shape, generator=generator)
    return {"input_ids": ids, "mask": torch.ones_like(ids, dtype=torch.bool), "doc_ids": doc_ids}


@pytest.mark.parametrize("T", [1, 7, 64, 512])
@pytest.mark.parametrize("arch", ARCHS)
def test_a_packed_block_is_its_documents_one_by_one(arch, T):
    batch = batch_of(random_documents(3, T))
    packed, alone = (GPT(config(arch), seed=3).double() for _ in range(2))
    inputs = Feed(torch.device("cpu"), doc_mask=True)(batch)
    logits = packed(inputs.input_ids, documents=inputs.documents)
    loss = packed(inputs.input_ids, inputs.targets, inputs.documents)
    total, targets = 0, 0
    for ids, documents, found in zip(batch["input_ids"], batch["doc_ids"], logits, strict=True):
        for document in range(documents.max() + 1):
            own = ids[None, documents == document]
            torch.testing.assert_close(
                alone(own)[0], found[documents == document], rtol=1e-9, atol=1e-11
            )
            if own.shape[1] > 1:
                next_ids = torch.nn.functional.pad(own[:, 1:], (0, 1), value=IGNORE)
                total = total + alone(own, next_ids).total
                targets += own.shape[1] - 1
    assert (inputs.targets != IGNORE).sum() == targets
    if targets:
        torch.testing.assert_close(loss.total, total, rtol=1e-10, atol=0)
        loss.total.backward()
        total.backward()
        for (name, p), q in zip(packed.named_parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-8, atol=1e-10, msg=name)


@pytest.mark.parametrize("arch", ARCHS)
def test_changing_one_document_leaves_the_others_logits_as_they_were(arch):
    batch = batch_of(random_documents(3, 256))
    feed, gpt = Feed(torch.device("cpu"), doc_mask=True), GPT(config(arch), seed=3)
    changed = {k: v.clone() for k, v in batch.items()}
    second = (batch["doc_ids"] == 1) & (torch.arange(3) == 2)[:, None]
    changed["input_ids"][second] = 96 - changed["input_ids"][second]
    logits = [
        gpt(inputs.input_ids, documents=inputs.documents) for inputs in map(feed, (batch, changed))
    ]
    assert torch.equal(logits[0][~second], logits[1][~second])
    assert not torch.equal(logits[0][second], logits[1][second])


@pytest.mark.parametrize("T", [1, 7, 127, 128, 129, 400, 1024])
def test_block_mask_is_the_one_that_torch_makes_element_by_element(T):
    doc_ids = random_documents(4, T, seed=T)
    doc_ids[1] = torch.arange(T)  # documents of one token
    ours = block_mask(doc_ids)

    def same(b, _h, q, k):
        return (doc_ids[b, q] == doc_ids[b, k]) & (q >= k)

    theirs = create_block_mask(same, 4, None, T, T, device="cpu")
    assert torch.equal(ours.to_dense(), theirs.to_dense())
    full = [_tiles(m.full_kv_num_blocks, m.full_kv_indices) for m in (ours, theirs)]
    assert full[0] == full[1] or T % 128  # torch's counts the rows behind the last position
    b, q, k = torch.meshgrid(torch.arange(4), torch.arange(T), torch.arange(T), indexing="ij")
    assert torch.equal(ours.mask_mod(b, 0, q, k), same(b, 0, q, k))


def _tiles(counts: torch.Tensor, indices: torch.Tensor) -> list[list[int]]:
    """The tiles of keys that each tile of queries has."""
    rows = zip(counts.flatten().tolist(), indices.flatten(0, -2).tolist(), strict=True)
    return [sorted(row[:n]) for n, row in rows]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("T", [128, 300])
def test_flex_attention_agrees_with_the_dense_mask(T):
    doc_ids, generator = random_documents(2, T), torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, T, 16, generator=generator)
    k, v = (torch.randn(2, 2, T, 16, generator=generator) for _ in range(2))
    with torch.no_grad():
        dense, flex = (attend(q, k, v, documents_of(doc_ids, f).mask) for f in (False, True))
    torch.testing.assert_close(dense, flex, rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="FlexAttention's backward needs a GPU")
def test_flex_attention_on_a_gpu_has_the_gradients_of_the_dense_mask():
    batch = batch_of(random_documents(2, 512))
    device = torch.device("cuda")
    models = [GPT(config("llama"), seed=3).to(device) for _ in range(2)]
    inputs = Feed(device, doc_mask=True)(batch)
    dense = documents_of(batch["doc_ids"].to(device), flex=False)
    for gpt, documents in zip(models, (inputs.documents, dense), strict=True):
        gpt(inputs.input_ids, inputs.targets, documents).total.backward()
    for p, q in zip(*(gpt.parameters() for gpt in models), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-3, atol=1e-3)


def test_positions_count_from_each_documents_beginning():
    doc_ids = torch.tensor([[0, 0, 1, 2, 2, 2], [0, 0, 0, 0, 0, 0]])
    positions = documents_of(doc_ids, flex=False).positions
    assert positions.tolist() == [[0, 1, 0, 0, 1, 2], [0, 1, 2, 3, 4, 5]]
