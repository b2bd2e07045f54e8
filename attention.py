"""Causal attention, over whole blocks or within the documents packed into them.

Shapes: B blocks, T positions, H heads, D channels of a head.
"""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

TILE = 128  # positions; FlexAttention's default block size


@cache
def fused_flex_attention() -> Callable:
    """FlexAttention by itself in a kernel: uncompiled, it forms all T x T scores. Made when it is
    needed, as the compiler takes a second to import."""
    return torch.compile(flex_attention)


class Documents(NamedTuple):
    """Where the documents of a batch lie, worked out once for all layers."""

    positions: torch.Tensor  # of each token in its document, int64 (B, T)
    mask: torch.Tensor | BlockMask  # who attends to whom; as a tensor bool (B, 1, T, T)


def documents_of(doc_ids: torch.Tensor, flex: bool) -> Documents:
    """From ``doc_ids`` int64 (B, T), ascending in each block. ``flex``: for FlexAttention, which
    has no backward on a CPU and never holds T x T values; else a dense mask."""
    index = torch.arange(doc_ids.shape[1], device=doc_ids.device)
    goes_on = F.pad(doc_ids[:, 1:] == doc_ids[:, :-1], (1, 0))
    starts = torch.where(goes_on, 0, index).cummax(dim=1).values
    if flex:
        return Documents(index - starts, block_mask(doc_ids))
    same = doc_ids[:, :, None] == doc_ids[:, None, :]
    return Documents(index - starts, (same & (index[:, None] >= index))[:, None])


def block_mask(doc_ids: torch.Tensor) -> BlockMask:
    """FlexAttention's mask from the ends of each tile, since ids ascend: no T x T step.

    A tile of keys is read where it is not later than the queries' and reaches into their first
    document, and needs no test of its elements where all of both is one document.
    """
    B, T = doc_ids.shape
    tiles = -(-T // TILE)
    padded = F.pad(doc_ids, (0, tiles * TILE - T), value=-1).view(B, tiles, TILE)
    first, last = padded[:, :, 0], padded.amax(dim=2)
    tile = torch.arange(tiles, device=doc_ids.device)
    earlier = tile[:, None] > tile  # (queries, keys)
    reaches = last[:, None, :] >= first[:, :, None]
    full = earlier & (first[:, None, :] == last[:, :, None])
    partial = (earlier | (tile[:, None] == tile)) & reaches & ~full

    def same_document(b, _h, q, k):
        return (doc_ids[b, q] == doc_ids[b, k]) & (q >= k)

    def listed(tiles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """How many tiles of keys each tile of queries has, int32 (B, 1, n), and which first."""
        order = tiles.int().argsort(dim=2, descending=True, stable=True)
        return tiles.sum(2, dtype=torch.int32)[:, None], order.int()[:, None]

    return BlockMask.from_kv_blocks(
        *listed(partial), *listed(full), TILE, mask_mod=same_document, seq_lengths=(T, T)
    )


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | BlockMask | None
) -> torch.Tensor:
    """Attention of ``q`` (B, H, T, D) to ``k`` and ``v`` (B, H / n, T, D); no mask: causal."""
    grouped = q.shape[1] != k.shape[1]
    if isinstance(mask, BlockMask):
        alone = q.is_cuda and not torch.compiler.is_compiling()  # else the step's compiler fuses it
        flex = fused_flex_attention() if alone else flex_attention
        return flex(q, k, v, block_mask=mask, enable_gqa=grouped)
    causal = mask is None
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=grouped
    )


def rotary_table(seq_len: int, channels: int, theta: float) -> torch.Tensor:
    """Cosines and sines of RoPE (Su et al. 2021), float32 (2, T, D / 2)."""
    frequencies = theta ** (-torch.arange(0, channels, 2, dtype=torch.float32) / channels)
    angles = torch.outer(torch.arange(seq_len, dtype=torch.float32), frequencies)
    return torch.stack([angles.cos(), angles.sin()])


def rotate(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Turn channels i and i + D / 2 of ``x`` (B, H, T, D) by their angle; ``table`` (2, B or 1, 1,
    T, D / 2). In float32, as angles of far positions need it."""
    a, b = x.to(table.dtype).chunk(2, dim=-1)
    cos, sin = table
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)
