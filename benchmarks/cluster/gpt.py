"""The model that all rows train, from transformers and as plain modules with the same weights, and its batches.

The output layer is not tied to the embedding, as hand-written pipelines would have to sum the gradients of a shared one by hand. GELU is
torch's one kernel in both. Losses are equal up to rounding, so that a row that does less than the others is found out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch
import torch.nn.functional as F
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

LAYERS, HIDDEN, HEADS, SEQUENCE, VOCABULARY, BATCH = 4, 512, 8, 128, 4096, 16
SIZES = f"GPT of {LAYERS} layers, hidden {HIDDEN}, {HEADS} heads, sequence {SEQUENCE}, vocabulary {VOCABULARY} (untied), batch {BATCH}"
LEARNING_RATE = 1e-3


def transformers_model() -> GPT2LMHeadModel:
    """The same weights at every call."""
    torch.manual_seed(0)
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = GPT2Config(
        n_layer=LAYERS,
        n_embd=HIDDEN,
        n_head=HEADS,
        vocab_size=VOCABULARY,
        n_positions=SEQUENCE,
        activation_function="gelu_pytorch_tanh",
        tie_word_embeddings=False,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
        **dropout,
    )
    return GPT2LMHeadModel(config)


def batches() -> Iterator[torch.Tensor]:
    """Tokens of global batches without end, the same on every rank; they are the labels too."""
    generator = torch.Generator().manual_seed(1)
    while True:
        yield torch.randint(VOCABULARY, (BATCH, SEQUENCE), generator=generator)


class Attention(nn.Module):
    """Causal attention over as many heads as the projections give."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.proj = (nn.Linear(HIDDEN, HIDDEN) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            project(x).unflatten(-1, (-1, HIDDEN // HEADS)).transpose(1, 2) for project in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: torch.Tensor = self.proj(mixed.transpose(1, 2).flatten(-2))
        return out


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.attention, self.norm_2 = nn.LayerNorm(HIDDEN), Attention(), nn.LayerNorm(HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm_1(x))
        out: torch.Tensor = x + self.down(F.gelu(self.up(self.norm_2(x)), approximate="tanh"))
        return out


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, HIDDEN), nn.Embedding(SEQUENCE, HIDDEN)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.tokens(tokens) + self.positions.weight
        return out


def plain_model(source: GPT2LMHeadModel) -> nn.Sequential:
    """Embedding, blocks, norm and output layer in a row, with the weights of ``source``."""
    state = source.state_dict()

    def put(module: nn.Module, name: str, columns: slice = slice(None)) -> None:
        """Linear layers of transformers' GPT-2 are stored as [in, out], those of attention fused."""
        weight = state[f"{name}.weight"]
        is_product = isinstance(module, nn.Linear) and name != "lm_head"
        cast(nn.Parameter, module.weight).data.copy_(weight[:, columns].T if is_product else weight)
        if isinstance(module.bias, nn.Parameter):
            module.bias.data.copy_(state[f"{name}.bias"][columns])

    embedding = Embedding()
    embedding.tokens.weight.data.copy_(state["transformer.wte.weight"])
    embedding.positions.weight.data.copy_(state["transformer.wpe.weight"])
    blocks = [Block() for _ in range(LAYERS)]
    for i, block in enumerate(blocks):
        layer = f"transformer.h.{i}"
        for j, part in enumerate((block.attention.q, block.attention.k, block.attention.v)):
            put(part, f"{layer}.attn.c_attn", slice(j * HIDDEN, (j + 1) * HIDDEN))
        put(block.attention.proj, f"{layer}.attn.c_proj")
        put(block.up, f"{layer}.mlp.c_fc")
        put(block.down, f"{layer}.mlp.c_proj")
        put(block.norm_1, f"{layer}.ln_1")
        put(block.norm_2, f"{layer}.ln_2")
    norm, head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCABULARY, bias=False)
    put(norm, "transformer.ln_f")
    put(head, "lm_head")
    return nn.Sequential(embedding, *blocks, norm, head)


def next_token_loss(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of each next token, as transformers computes it."""
    labels = F.pad(tokens[:, 1:], (0, 1), value=-100)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
