"""GPT-2 (Radford et al. 2019) and Llama (Touvron et al. 2023): presets, model, loss.

Shapes in comments: B blocks, T positions, C channels, V vocabulary.
"""

import argparse
import math
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from attention import Documents, attend, rotary_table, rotate
from flags import at_least_two, not_negative
from loss import Loss, linear_cross_entropy

# (layers, heads, channels); parameters at a 50,257-token vocabulary but for tiny, at 257
PRESETS = {
    "tiny": (4, 4, 128),  # 0.9M: smoke tests
    "small": (12, 12, 768),  # 124M
    "medium": (24, 16, 1024),  # 354M
    "large": (36, 20, 1280),  # 774M
    "xl": (48, 25, 1600),  # 1.56B
}
RECOMPUTE = ("none", "selective", "full")
aten = torch.ops.aten
SAVED = [  # by selective recomputation: products, which cost the most; the rest is cheap
    *(aten.mm.default, aten.addmm.default),
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.higher_order.flex_attention,  # with --compile; by itself it is compiled apart, unseen
]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    group.add_argument("--model", choices=PRESETS, default="tiny", help="preset, by size")
    group.add_argument("--arch", choices=("gpt2", "llama"), default="gpt2")
    group.add_argument("--seq-len", type=at_least_two, default=512, help="tokens per block")
    group.add_argument(
        "--doc-mask", action="store_true", help="no attention across packed documents"
    )
    group.add_argument(
        "--kv-heads", type=not_negative, default=0, help="of keys and values (0: as many as heads)"
    )
    group.add_argument("--qk-norm", action="store_true", help="RMSNorm of queries and keys")
    group.add_argument("--untied", action="store_true", help="an output head of its own")
    group.add_argument(
        "--recompute",
        choices=RECOMPUTE,
        default="none",
        help="in backward, to save memory: all of a layer but its products, or all",
    )


@dataclass(frozen=True)
class GPTConfig:
    vocab_size: int  # ids that occur, EOS included
    seq_len: int
    n_layer: int
    n_head: int
    n_embd: int
    arch: str = "gpt2"
    n_kv_head: int = 0  # 0: n_head; fewer: grouped-query attention (Ainslie et al. 2023)
    qk_norm: bool = False  # (Henry et al. 2020)
    tied: bool = True
    rope_theta: float = 10_000.0

    @classmethod
    def preset(cls, name: str, vocab_size: int, seq_len: int, **options) -> "GPTConfig":
        """Raises SystemExit for ``n_kv_head`` that does not divide the heads."""
        config = cls(vocab_size, seq_len, *PRESETS[name], **options)
        if config.n_head % config.kv_heads:
            raise SystemExit(
                f"--kv-heads {config.n_kv_head} does not divide the {config.n_head} heads of "
                f"--model {name}"
            )
        return config

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding: a multiple of 64, so that the head's product fills its tiles."""
        return -(-self.vocab_size // 64) * 64

    @property
    def kv_heads(self) -> int:
        return self.n_kv_head or self.n_head

    @property
    def llama(self) -> bool:
        return self.arch == "llama"

    def norm(self, channels: int) -> nn.Module:
        return nn.RMSNorm(channels, eps=1e-5) if self.llama else nn.LayerNorm(channels)


class CausalSelfAttention(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        C, bias = config.n_embd, not config.llama
        self.head = C // config.n_head  # channels
        kv = config.kv_heads * self.head
        self.sizes = (C, kv, kv)
        self.c_attn = nn.Linear(C, C + 2 * kv, bias=bias)
        self.c_proj = nn.Linear(C, C, bias=bias)
        self.qk_norm = config.qk_norm
        if config.qk_norm:
            self.q_norm = nn.RMSNorm(self.head, eps=1e-5)
            self.k_norm = nn.RMSNorm(self.head, eps=1e-5)

    def forward(
        self,
        x: torch.Tensor,
        rotary: torch.Tensor | None,
        mask: torch.Tensor | BlockMask | None,
    ) -> torch.Tensor:
        B, T, C = x.shape
        qkv = self.c_attn(x).split(self.sizes, dim=-1)
        q, k, v = (part.view(B, T, -1, self.head).transpose(1, 2) for part in qkv)
        if self.qk_norm:
            wide = self.q_norm.weight.dtype  # autocast leaves norms to the dtypes they get
            q, k = self.q_norm(q.to(wide)).to(v.dtype), self.k_norm(k.to(wide)).to(v.dtype)
        if rotary is not None:
            q, k = rotate(q, rotary), rotate(k, rotary)
        y = attend(q, k, v, mask)  # (B, heads, T, C / heads)
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))


class MLP(nn.Module):
    """GELU, or the gated SwiGLU (Shazeer 2020) at 2/3 of the width, which is as many weights."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        C, self.gated = config.n_embd, config.llama
        hidden = -(-8 * C // 3 // 64) * 64 if self.gated else 4 * C
        self.c_fc = nn.Linear(C, hidden * (1 + self.gated), bias=not self.gated)
        self.c_proj = nn.Linear(hidden, C, bias=not self.gated)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.c_fc(x)
        if self.gated:
            gate, up = x.chunk(2, dim=-1)
            return self.c_proj(F.silu(gate) * up)
        return self.c_proj(F.gelu(x, approximate="tanh"))


class Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.ln_1 = config.norm(config.n_embd)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = config.norm(config.n_embd)
        self.mlp = MLP(config)

    def forward(
        self,
        x: torch.Tensor,
        rotary: torch.Tensor | None,
        mask: torch.Tensor | BlockMask | None,
    ) -> torch.Tensor:
        x = x + self.attn(self.ln_1(x), rotary, mask)
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """Decoder-only transformer: learned positions (gpt2) or rotary ones (llama), an output head
    that is ``wte`` again or its own.

    ``seed`` alone decides the initial weights, whatever the device or world size. ``recompute``:
    what of a layer is worked out again in backward, one of RECOMPUTE (Chen et al. 2016).
    """

    def __init__(self, config: GPTConfig, seed: int = 0, recompute: str = "none") -> None:
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.padded_vocab_size, config.n_embd)
        if config.llama:
            table = rotary_table(config.seq_len, config.n_embd // config.n_head, config.rope_theta)
            self.register_buffer("rotary", table, persistent=False)
        else:
            self.wpe = nn.Embedding(config.seq_len, config.n_embd)
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = config.norm(config.n_embd)
        if not config.tied:
            self.lm_head = nn.Linear(config.n_embd, config.padded_vocab_size, bias=False)
        self.recompute = recompute
        self.init_weights(torch.Generator().manual_seed(seed))

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator) -> None:
        """GPT-2's rule: N(0, 0.02), residual projections divided by sqrt(2 layers), biases 0.

        For llama too, whose authors publish none; OLMo 2 (2025) trains one at N(0, 0.02).
        """
        for name, p in self.named_parameters():
            if p.dim() < 2:
                p.fill_(1.0 if name.endswith("weight") else 0.0)  # a norm's gain; any bias
            else:
                residual = name.endswith("c_proj.weight")
                std = 0.02 / math.sqrt(2 * self.config.n_layer) if residual else 0.02
                p.normal_(0.0, std, generator=generator)

    @property
    def head(self) -> torch.Tensor:
        """Weights of the output head, (padded V, C)."""
        return self.wte.weight if self.config.tied else self.lm_head.weight

    def forward(
        self,
        input_ids: torch.Tensor,
        targets: torch.Tensor | None = None,
        documents: Documents | None = None,
        z_loss: float = 0.0,
    ) -> torch.Tensor | Loss:
        """Logits of ``input_ids`` int64 (B, T), or the loss if ``targets`` int64 (B, T) is given:
        float (B, T, V) of the real vocabulary, or that of all targets that are not IGNORE.

        ``documents``: attend within them and count positions from their beginnings.
        """
        T = input_ids.shape[1]
        index = torch.arange(T, device=input_ids.device)
        positions, mask = (index, None) if documents is None else documents
        x, rotary = self.wte(input_ids), None  # (B, T, C)
        if self.config.llama:
            rotary = self.rotary[:, positions].view(2, -1, 1, T, self.rotary.shape[-1])
        else:
            x = x + self.wpe(positions)
        for block in self.h:
            x = self._layer(block)(x, rotary, mask)
        x, words = self.ln_f(x), self.config.vocab_size
        if targets is None:
            return F.linear(x, self.head)[..., :words]
        return linear_cross_entropy(x, self.head, targets, words, z_loss)

    def _layer(self, block: Block):
        if self.recompute == "none" or not torch.is_grad_enabled():
            return block
        options = {"use_reentrant": False, "preserve_rng_state": False}
        if self.recompute == "selective":
            options["context_fn"] = partial(create_selective_checkpoint_contexts, SAVED)
        return partial(checkpoint, block, **options)

    def flops_per_token(self) -> int:
        """Training FLOPs per token, forward and backward: 6 N + 12 L C T.

        PaLM (Chowdhery et al. 2022), appendix B: N counts the parameters that multiply (not what
        is looked up: positions and, beside a head of its own, the embedding), and attention counts
        in full, as if it were not causal. T is ``seq_len``.
        """
        c = self.config
        looked_up = 0 if c.llama else self.wpe.weight.numel()
        looked_up += 0 if c.tied else self.wte.weight.numel()
        multiplied = sum(p.numel() for p in self.parameters()) - looked_up
        return 6 * multiplied + 12 * c.n_layer * c.n_embd * c.seq_len

    @torch.no_grad()
    def generate(
        self,
        input_ids: torch.Tensor,
        max_new_tokens: int,
        *,
        temperature: float = 0.8,
        top_k: int | None = 50,
        eos_id: int | None = None,
        generator: torch.Generator | None = None,
    ) -> torch.Tensor:
        """Sample a continuation of ``input_ids`` int64 (1, t), t >= 1. Returns int64 (1, t + n).

        Stops before EOS. ``temperature`` 0 takes the likeliest token.
        """
        for _ in range(max_new_tokens):
            logits = self(input_ids[:, -self.config.seq_len :])[:, -1].float()
            if temperature == 0:
                token = logits.argmax(-1, keepdim=True)
            else:
                if top_k is not None:
                    kth = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
                    logits = logits.masked_fill(logits < kth, -torch.inf)
                probabilities = F.softmax(logits / temperature, dim=-1)
                token = torch.multinomial(probabilities, 1, generator=generator)
            if token.item() == eos_id:
                break
            input_ids = torch.cat([input_ids, token], dim=1)
        return input_ids
