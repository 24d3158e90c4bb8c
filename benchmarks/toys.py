"""Models and batches for measuring equality: small, of random weights from a seed, with labels that differ in number by row if asked.

``build(name, dtype)`` gives a model that returns its loss, or an output with ``loss``; ``batches(name, dtype)`` what it is called with.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

STEPS, SEQUENCE, IMAGE, VOCABULARY = 5, 32, 16, 1000


class Translator(nn.Module):
    """``nn.Transformer`` between an embedding for both sides and a head; the loss is the mean over labels that are not -100."""

    def __init__(self, hidden: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, hidden)
        self.transformer = nn.Transformer(hidden, 4, 2, 2, 2 * hidden, 0.0, batch_first=True)
        self.head = nn.Linear(hidden, VOCABULARY)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        target = labels.clamp(min=0).roll(1, 1)
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1], device=target.device)
        hidden = self.transformer(self.embed(input_ids), self.embed(target), tgt_mask=mask.to(self.head.weight.dtype), tgt_is_causal=True)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


class UNet(nn.Module):
    """Two levels down and up again, each level up with what its level down made."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        widths = [width, 2 * width, 4 * width]
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in pairwise(widths))
        self.up = nn.ModuleList(nn.Conv2d(b + a, a, 3, padding=1) for a, b in pairwise(widths))
        self.last = nn.Conv2d(width, 3, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        skips = [nn.functional.gelu(self.first(x))]
        for down in self.down:
            skips.append(nn.functional.gelu(down(nn.functional.avg_pool2d(skips[-1], 2))))
        y = skips.pop()
        for up in reversed(self.up):
            wide = nn.functional.interpolate(y, scale_factor=2.0, mode="nearest")
            y = nn.functional.gelu(up(torch.cat([wide, skips.pop()], dim=1)))
        return nn.functional.mse_loss(self.last(y), labels)


def build(name: str, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    if name == "gpt2":
        dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        gpt2 = GPT2Config(
            n_layer=4,
            n_embd=192,
            n_head=6,
            vocab_size=1003,
            n_positions=SEQUENCE,
            use_cache=False,
            bos_token_id=0,
            eos_token_id=0,
            **dropout,
        )
        return GPT2LMHeadModel(gpt2).to(dtype)
    if name == "llama":
        llama = LlamaConfig(
            num_hidden_layers=4,
            hidden_size=256,
            intermediate_size=688,
            num_attention_heads=8,
            num_key_value_heads=4,
            vocab_size=VOCABULARY,
            use_cache=False,
        )
        return LlamaForCausalLM(llama).to(dtype)
    if name == "t5":
        t5 = T5Config(
            num_layers=2,
            d_model=64,
            d_kv=16,
            d_ff=128,
            num_heads=4,
            vocab_size=VOCABULARY,
            dropout_rate=0.0,
            decoder_start_token_id=0,
            pad_token_id=0,
            use_cache=False,
        )
        return T5ForConditionalGeneration(t5).train().to(dtype)
    return (Translator() if name == "nn.Transformer" else UNet()).to(dtype)


def batches(name: str, dtype: torch.dtype, *, size: int, ragged: bool = False) -> Iterator[dict[str, torch.Tensor]]:
    """One batch for every step. ``ragged``: the last row has all of its labels, the first none; the labels of the U-Net are pixels."""
    generator = torch.Generator().manual_seed(1)
    kept = torch.arange(size) * SEQUENCE // (size - 1)
    for _ in range(STEPS):
        if name == "U-Net":
            x, labels = torch.randn(2, size, 3, IMAGE, IMAGE, generator=generator).to(dtype)
            yield {"x": x, "labels": labels}
            continue
        tokens, labels = torch.randint(VOCABULARY, (2, size, SEQUENCE), generator=generator)
        if ragged:
            labels = labels.masked_fill(torch.arange(SEQUENCE) >= kept[:, None], -100)
        yield {"input_ids": tokens, "labels": labels}
