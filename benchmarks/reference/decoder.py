"""A decoder-only transformer of given dimensions, as the software of the time computes it."""

from __future__ import annotations

import torch
from records import Dims
from torch import nn
from torch.nn import functional as F

DROPOUT = 0.1
"""Of attention without a fused kernel, and of what it is added to: the default of Megatron-LM in 2021."""

_ROTARY = ("llama", "internlm", "qwen", "nemotron", "grok", "gpt-oss", "deepseek")
_GATED = ("llama", "internlm", "qwen", "grok", "gpt-oss", "deepseek")


class Norm(nn.Module):
    """LayerNorm, or RMSNorm where positions are rotary."""

    def __init__(self, width: int, *, centred: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width)) if centred else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.bias is None:
            return F.rms_norm(x, self.weight.shape, self.weight)
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias)


class Layer(nn.Module):
    """Attention and MLP, each after its norm."""

    def __init__(self, dims: Dims, *, unfused: bool) -> None:
        super().__init__()
        self.head, self.unfused = dims.head, unfused
        self.is_rotary = dims.family.startswith(_ROTARY)
        self.is_gated = dims.family.startswith(_GATED)
        bias = not self.is_rotary
        self.norm, self.mlp_norm = (Norm(dims.hidden, centred=bias) for _ in range(2))
        self.q = nn.Linear(dims.hidden, dims.heads * self.head, bias)
        self.k, self.v = (nn.Linear(dims.hidden, dims.kv_heads * self.head, bias) for _ in range(2))
        self.out = nn.Linear(dims.heads * self.head, dims.hidden, bias)
        self.up = nn.Linear(dims.hidden, dims.ffn_hidden, bias)
        self.gate = nn.Linear(dims.hidden, dims.ffn_hidden, bias) if self.is_gated else None
        self.down = nn.Linear(dims.ffn_hidden, dims.hidden, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        q, k, v = (p(h).unflatten(-1, (-1, self.head)).transpose(1, 2) for p in (self.q, self.k, self.v))
        x = x + self._dropped(self.out(self._attention(q, k, v).transpose(1, 2).flatten(2)))
        h = self.mlp_norm(x)
        up = self.up(h)
        up = F.silu(self.gate(h)) * up if self.gate is not None else F.gelu(up, approximate="tanh")
        return x + self._dropped(self.down(up))

    def _attention(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if self.unfused:
            return F.dropout(F.softmax(q @ k.transpose(-1, -2), -1), DROPOUT) @ v
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=k.shape[1] != q.shape[1])

    def _dropped(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, DROPOUT) if self.unfused else x


class Decoder(nn.Module):
    """Token ids and labels ``[batch, seq]`` in, the mean loss out."""

    def __init__(self, dims: Dims, *, unfused: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(dims.vocab, dims.hidden)
        self.layers = nn.ModuleList(Layer(dims, unfused=unfused) for _ in range(dims.layers))
        self.norm = Norm(dims.hidden, centred=not dims.family.startswith(_ROTARY))
        self.head = nn.Linear(dims.hidden, dims.vocab, bias=False)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())
