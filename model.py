"""GPT-2 (Radford et al. 2019): presets, model, loss.

Shapes in comments: B blocks, T positions, C channels, V vocabulary.
"""

import argparse
import math
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

from flags import at_least_two
from loss import Loss, linear_cross_entropy

# (layers, heads, channels); parameters at a 50,257-token vocabulary but for tiny, at 257
PRESETS = {
    "tiny": (4, 4, 128),  # 0.9M: smoke tests
    "small": (12, 12, 768),  # 124M
    "medium": (24, 16, 1024),  # 354M
    "large": (36, 20, 1280),  # 774M
    "xl": (48, 25, 1600),  # 1.56B
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    group.add_argument("--model", choices=PRESETS, default="tiny", help="GPT-2 preset")
    group.add_argument("--seq-len", type=at_least_two, default=512, help="tokens per block")


@dataclass(frozen=True)
class GPTConfig:
    vocab_size: int  # ids that occur, EOS included
    seq_len: int
    n_layer: int
    n_head: int
    n_embd: int

    @classmethod
    def preset(cls, name: str, vocab_size: int, seq_len: int) -> "GPTConfig":
        return cls(vocab_size, seq_len, *PRESETS[name])

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding: a multiple of 64, so that the head's product fills its tiles."""
        return -(-self.vocab_size // 64) * 64


class CausalSelfAttention(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.n_head = config.n_head
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        B, T, C = x.shape
        qkv = self.c_attn(x).view(B, T, 3, self.n_head, C // self.n_head)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (B, heads, T, C / heads)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))


class MLP(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd)
        self.mlp = MLP(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """Decoder-only transformer with learned positions and the output head tied to ``wte``.

    ``seed`` alone decides the initial weights, whatever the device or world size.
    """

    def __init__(self, config: GPTConfig, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.padded_vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.seq_len, config.n_embd)
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd)
        self.init_weights(torch.Generator().manual_seed(seed))

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator) -> None:
        """GPT-2's rule: N(0, 0.02), residual projections divided by sqrt(2 layers), biases 0."""
        for name, p in self.named_parameters():
            if p.dim() < 2:
                p.fill_(1.0 if name.endswith("weight") else 0.0)  # LayerNorm gain; any bias
            else:
                residual = name.endswith("c_proj.weight")
                std = 0.02 / math.sqrt(2 * self.config.n_layer) if residual else 0.02
                p.normal_(0.0, std, generator=generator)

    def forward(
        self, input_ids: torch.Tensor, targets: torch.Tensor | None = None, z_loss: float = 0.0
    ) -> torch.Tensor | Loss:
        """Logits of ``input_ids`` int64 (B, T), or the loss if ``targets`` int64 (B, T) is given:
        float (B, T, V) of the real vocabulary, or sums over all targets that are not IGNORE.
        """
        B, T = input_ids.shape
        x = self.wte(input_ids) + self.wpe(torch.arange(T, device=input_ids.device))  # (B, T, C)
        for block in self.h:
            x = block(x)
        x, words = self.ln_f(x), self.config.vocab_size
        if targets is None:
            return F.linear(x, self.wte.weight)[..., :words]
        x = x.view(B * T, -1)
        return linear_cross_entropy(x, self.wte.weight, targets.view(-1), words, z_loss)

    def flops_per_token(self) -> int:
        """Training FLOPs per token, forward and backward: 6 N + 12 L C T.

        PaLM (Chowdhery et al. 2022), appendix B: N counts the parameters that multiply (here all
        but the positions; the tied embedding counts once, as the head), and attention counts in
        full, as if it were not causal. T is ``seq_len``.
        """
        c = self.config
        multiplied = sum(p.numel() for p in self.parameters()) - self.wpe.weight.numel()
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
