"""What is trained: a model, its batches, and where its loss is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import gpt
import torch
from torch import nn
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM

from autopar.demo import run as demo

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Workload:
    """Something to train.

    Args:
        model: the same weights at every call.
        batches: global batches without end, the same on every rank.
        loss: of what the model returns.
    """

    model: Callable[[], nn.Module]
    batches: Callable[[], Iterator[Batch]]
    loss: Callable[[Any], torch.Tensor]


def _loss(output: Any) -> torch.Tensor:
    loss: torch.Tensor = output.loss
    return loss


def _tokens(vocabulary: int, rows: int, columns: int) -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(1)
    while True:
        tokens = torch.randint(vocabulary, (rows, columns), generator=generator)
        yield {"input_ids": tokens, "labels": tokens}


def _gpt_batches() -> Iterator[Batch]:
    return ({"input_ids": tokens, "labels": tokens} for tokens in gpt.batches())


def _llama() -> nn.Module:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            num_hidden_layers=4,
            hidden_size=384,
            intermediate_size=1024,
            num_attention_heads=8,
            num_key_value_heads=4,
            vocab_size=2048,
            max_position_embeddings=256,
            use_cache=False,
        )
    )


def _bert() -> nn.Module:
    torch.manual_seed(0)
    return BertForMaskedLM(
        BertConfig(
            num_hidden_layers=3,
            hidden_size=384,
            intermediate_size=1536,
            num_attention_heads=6,
            vocab_size=4096,
            max_position_embeddings=128,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


class Wide(nn.Module):
    """Four wide layers and little else: bound by its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1024, 1024) for _ in range(6))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return nn.functional.mse_loss(x, labels)


def _wide() -> nn.Module:
    torch.manual_seed(0)
    return Wide()


def _rows() -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(1)
    while True:
        yield {name: torch.randn(512, 1024, generator=generator) for name in ("x", "labels")}


GPT = Workload(gpt.transformers_model, _gpt_batches, _loss)
WORKLOADS = {
    "gpt": GPT,
    "llama": Workload(_llama, lambda: _tokens(2048, 8, 256), _loss),
    "bert": Workload(_bert, lambda: _tokens(4096, 16, 128), _loss),
    "wide": Workload(_wide, _rows, lambda loss: loss),
    "small": Workload(demo.build_model, demo.batches, _loss),
}
