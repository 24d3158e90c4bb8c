"""A decoder-only transformer of given dimensions, as the software of the time computes it."""

from __future__ import annotations

import torch
from records import Dims, Latent
from torch import nn
from torch.nn import functional as F

EPSILON = 1e-6
DROPOUT = 0.1
"""Of attention without a fused kernel, and of what it is added to: the default of Megatron-LM in 2021."""


class Norm(nn.Module):
    """LayerNorm, or RMSNorm where positions are rotary, in float32 ``op_by_op`` as torch had it before 2.9."""

    def __init__(self, width: int, *, centred: bool, op_by_op: bool = False) -> None:
        super().__init__()
        self.op_by_op = op_by_op
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width)) if centred else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.bias is not None:
            return F.layer_norm(x, self.weight.shape, self.weight, self.bias)
        if not self.op_by_op:
            return F.rms_norm(x, self.weight.shape, self.weight)
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPSILON)).type_as(x) * self.weight


def rotated(x: torch.Tensor) -> torch.Tensor:
    """Rotary positions as numbers of two parts in float32 times others (Llama's own code, which torchtitan has): what it takes alone, since
    here none turns."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * torch.ones(pairs.shape[-2:], dtype=pairs.dtype, device=x.device)).flatten(-2).type_as(x)


class Attention(nn.Module):
    """Of heads that share keys and values evenly."""

    def __init__(self, dims: Dims, *, unfused: bool, bias: bool, rotates: bool) -> None:
        super().__init__()
        self.head, self.unfused, self.rotates = dims.head, unfused, rotates
        self.q = nn.Linear(dims.hidden, dims.heads * self.head, bias)
        self.k, self.v = (nn.Linear(dims.hidden, dims.kv_heads * self.head, bias) for _ in range(2))
        self.out = nn.Linear(dims.heads * self.head, dims.hidden, bias)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        q, k, v = (p(h).unflatten(-1, (-1, self.head)).transpose(1, 2) for p in (self.q, self.k, self.v))
        if self.rotates:
            q, k = rotated(q), rotated(k)
        if self.unfused:
            k, v = (x if x.shape[1] == q.shape[1] else x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
            found = F.dropout(F.softmax(q @ k.transpose(-1, -2), -1), DROPOUT) @ v
        else:
            found = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=k.shape[1] != q.shape[1])
        return self.out(found.transpose(1, 2).flatten(2))


class LatentAttention(nn.Module):
    """Multi-head latent attention; keys share what has a position (DeepSeek-AI 2024, DeepSeek-V2, section 2.1)."""

    def __init__(self, dims: Dims, latent: Latent, *, op_by_op: bool = False) -> None:
        super().__init__()
        self.widths, self.heads, self.rotates = latent, dims.heads, op_by_op
        self.q_down = nn.Linear(dims.hidden, latent.q, bias=False)
        self.q_up = nn.Linear(latent.q, dims.heads * (latent.nope + latent.rope), bias=False)
        self.kv_down = nn.Linear(dims.hidden, latent.kv + latent.rope, bias=False)
        self.kv_up = nn.Linear(latent.kv, dims.heads * (latent.nope + latent.value), bias=False)
        self.q_norm, self.kv_norm = (Norm(width, centred=False, op_by_op=op_by_op) for width in (latent.q, latent.kv))
        self.out = nn.Linear(dims.heads * latent.value, dims.hidden, bias=False)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        _, kv, nope, rope, value = self.widths
        q = self.q_up(self.q_norm(self.q_down(h))).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        shared, placed = self.kv_down(h).split((kv, rope), -1)
        k, v = self.kv_up(self.kv_norm(shared)).unflatten(-1, (self.heads, -1)).transpose(1, 2).split((nope, value), -1)
        if self.rotates:
            q = torch.cat((q[..., :nope], rotated(q[..., nope:])), -1)
            placed = rotated(placed)
        k = torch.cat((k, placed.unsqueeze(1).expand(-1, self.heads, -1, -1)), -1)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """Attention and MLP, each after its norm."""

    def __init__(self, dims: Dims, *, unfused: bool, op_by_op: bool) -> None:
        super().__init__()
        self.unfused = unfused
        bias = not dims.rotary
        self.norm, self.mlp_norm = (Norm(dims.hidden, centred=bias, op_by_op=op_by_op) for _ in range(2))
        if dims.latent:
            self.attention: nn.Module = LatentAttention(dims, dims.latent, op_by_op=op_by_op)
        else:
            self.attention = Attention(dims, unfused=unfused, bias=bias, rotates=op_by_op and not bias)
        self.up = nn.Linear(dims.hidden, dims.ffn_hidden, bias)
        self.gate = nn.Linear(dims.hidden, dims.ffn_hidden, bias) if dims.gated else None
        self.down = nn.Linear(dims.ffn_hidden, dims.hidden, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self._dropped(self.attention(self.norm(x)))
        h = self.mlp_norm(x)
        up = self.up(h)
        up = F.silu(self.gate(h)) * up if self.gate is not None else F.gelu(up, approximate="tanh")
        return x + self._dropped(self.down(up))

    def _dropped(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, DROPOUT) if self.unfused else x


class Decoder(nn.Module):
    """Token ids and labels ``[batch, seq]`` in, the mean loss out.

    Args:
        dims: of the model.
        unfused: attention as two products with a softmax between, and dropout.
        op_by_op: RMS norms and rotary positions by an op of torch after the other; else norms are one, and positions none.
    """

    def __init__(self, dims: Dims, *, unfused: bool = False, op_by_op: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(dims.vocab, dims.hidden)
        self.layers = nn.ModuleList(Layer(dims, unfused=unfused, op_by_op=op_by_op) for _ in range(dims.layers))
        self.norm = Norm(dims.hidden, centred=not dims.rotary, op_by_op=op_by_op)
        self.head = nn.Linear(dims.hidden, dims.vocab, bias=False)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())
