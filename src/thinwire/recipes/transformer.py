"""A small decoder-only transformer and the AdamW it is trained with."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from thinwire.data.tokens import MAX_WORDS
from thinwire.recipes.base import Plan


class Block(nn.Module):
    """Attention to what came before, then a dense layer for each place; each added to its input."""

    def __init__(self, *, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.dropout = dropout
        self.before_attention = nn.LayerNorm(width)
        self.project_in = nn.Linear(width, 3 * width)
        self.project_out = nn.Linear(width, width)
        self.dense = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        count, length, width = x.shape
        query, key, value = (
            part.view(count, length, self.num_heads, -1).transpose(1, 2)
            for part in self.project_in(self.before_attention(x)).chunk(3, dim=2)
        )
        seen = nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, dropout_p=self.dropout if self.training else 0.0
        )
        x = x + self.drop(self.project_out(seen.transpose(1, 2).reshape(count, length, width)))
        return torch.add(x, self.drop(self.dense(x)))


class Transformer(nn.Module):
    """Blocks between an embedding and the same embedding used backwards."""

    def __init__(self, *, length: int, width: int, num_blocks: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(MAX_WORDS, width)
        self.places = nn.Parameter(torch.zeros(length, width))
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.Sequential(
            *(Block(width=width, num_heads=num_heads, dropout=dropout) for _ in range(num_blocks))
        )
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.embedding.weight, std=0.02)
        nn.init.normal_(self.places, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores of the next word at each place."""
        x = self.drop(self.embedding(tokens) + self.places[: tokens.shape[1]])
        return nn.functional.linear(self.norm(self.blocks(x)), self.embedding.weight)


def adamw(model: nn.Module, plan: Plan, *, rate_at_32: float) -> Optimizer:
    """AdamW with strong decay of matrices only; the rate grows with the square root of the global batch."""
    rate = rate_at_32 * (plan.global_batch_size / 32) ** 0.5
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return AdamW(groups, lr=rate, betas=(0.9, 0.98))
