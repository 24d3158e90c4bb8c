from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests import models
from tests.models import Example

BUILDERS: list[Callable[..., Example]] = [
    models.gpt2,
    models.llama,
    models.bert,
    models.distilbert,
    models.vit,
    models.nn_transformer_encoder,
    models.t5,
    models.nn_transformer,
    models.unet,
    models.mlp,
    models.speaker,
]


def loss(example: Example) -> torch.Tensor:
    result = example.model(**example.batch)
    value = result if isinstance(result, torch.Tensor) else result.loss
    assert isinstance(value, torch.Tensor)
    return value


@pytest.mark.parametrize("build", BUILDERS, ids=lambda build: build.__name__)
def test_builds_and_differentiates_alike_from_one_seed(build: Callable[..., Example]) -> None:
    example = build()
    assert len({tensor.data_ptr() for tensor in example.batch.values()}) == len(example.batch)
    assert example.model.training
    first = loss(example)
    first.backward()
    assert all(p.grad is not None for p in example.model.parameters() if p.requires_grad)
    torch.testing.assert_close(loss(build()), first, rtol=0, atol=0)
    assert not torch.equal(loss(build(seed=1)), first)
    assert not build(training=False).model.training


@pytest.mark.parametrize("build", BUILDERS, ids=lambda build: build.__name__)
def test_builds_on_meta(build: Callable[..., Example]) -> None:
    example = build(device="meta")
    tensors = [*example.model.parameters(), *example.model.buffers(), *example.batch.values()]
    assert {tensor.device.type for tensor in tensors} == {"meta"}


def test_gpt2_weights_are_tied_on_request() -> None:
    for tied in (True, False):
        model = models.gpt2(tied=tied, vocab=1003).model
        assert (model.get_parameter("transformer.wte.weight") is model.get_submodule("lm_head").weight) == tied


def test_ragged_labels_differ_in_number_by_row() -> None:
    example = models.gpt2(batch=4, sequence=16)
    labels = models.ragged(example).batch["labels"]
    assert (labels != -100).sum(1).tolist() == [0, 5, 10, 16]
    assert torch.equal(labels[3], example.batch["labels"][3])
    assert models.ragged(models.vit()).batch["labels"].min() >= 0
