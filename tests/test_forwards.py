"""Ways in which forwards are written: each is captured, needs no op without a rule, and has the model's numbers in micro-batches too."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import autopar
from autopar import Manual
from autopar.errors import CaptureError
from autopar.factors import MissingRuleWarning
from tests.marks import few, not_on_torch_2_11

pytestmark = pytest.mark.slow

WIDTH = 16


class Written(nn.Module):
    """A product, something that is written in a way of its own, and a sum of squares of what is no loss itself."""

    def __init__(self, way: Callable[[Written, torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.product = nn.Linear(WIDTH, WIDTH)
        self.row = nn.Parameter(torch.linspace(-1, 1, WIDTH))
        self.way = way

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        result = self.way(self, self.product(x), y)
        return result.square().sum() if result.dim() else result


def numbers(model: Written, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Made where nobody says, and where x is."""
    return x * torch.tensor([1.0, 2.0] * 8, device=x.device) + torch.where(x > 0, x, torch.tensor(-3.5)) + torch.ones(WIDTH)


def several(model: Written, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Lists, ranges, masks and arrays among indices."""
    return x[:, [0, 2]] + x[:, [-2]] + x[:, range(2)] + x[:, [True, True, False, False]] + x[:, np.array([1, 3])]


def set_several(model: Written, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x[:, [1, 3]] = 0.0
    return x


def moved(model: Written, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x * torch.arange(WIDTH).to(x.device, x.dtype)


def copied(model: Written, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """As keys of latent attention are put together."""
    both = x.new_empty(*x.shape[:-1], 2 * WIDTH)
    both[..., :WIDTH].copy_(x)
    both[..., WIDTH:] = model.row
    return both


def beside_nothing(model: Written, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """As rotary positions of whole heads."""
    turned, passed = x[..., :WIDTH], x[..., WIDTH:]
    return torch.cat([turned.sin(), passed], -1) + torch.cat([turned, passed], -1)


def one_part(model: Written, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    (whole,) = x.split(WIDTH, -1)
    (only,) = x[:, :1].unbind(1)
    result: torch.Tensor = whole + only.unsqueeze(1)
    return result


def last_token(model: Written, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """As classifiers of sequences do: a row of each sample, counted from the end or not."""
    last = (y[..., 0] > 0).int().argmax(-1)
    samples = torch.arange(x.shape[0], device=x.device)
    return x[samples, last] + x[samples, last - x.shape[1]] + x[samples[:, None], last[:, None]].squeeze(1)


def masked(model: Written, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x[y > 0.3] = 0.5
    x[y[..., 0] > 0] = model.row
    x[y[..., 1] > 0] = model.row[None]
    x[y > 1] = model.row.sum()
    return x


def other_names(model: Written, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    scale = torch.clip(torch.absolute(x), 0.1, 2.0)
    result: torch.Tensor = torch.multiply(torch.subtract(x, y), scale) + torch.special.expit(torch.negative(x))
    return result


def distances(model: Written, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = torch.cdist(x, y).sum() + F.pairwise_distance(x, y).sum() + torch.linalg.norm(x, dim=-1).sum()
    return result


def losses(model: Written, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.triplet_margin_loss(x, y, y.roll(1, -1), reduction="sum") + F.poisson_nll_loss(x, y, reduction="sum")


def statistics(model: Written, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.trapezoid(x, dim=-1) + torch.diff(x, dim=-1).sum(-1) + torch.nanmean(x, dim=-1)


def quantiles(model: Written, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.quantile(x, 0.25, dim=-1)


def log_probabilities(model: Written, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.nll_loss(x.log_softmax(-1).flatten(0, 1), y.argmax(-1).flatten())


def checked(model: Written, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Looks at values, and nothing comes of it."""
    torch._check(y.argmax(-1).max().item() < WIDTH)
    return x


def strided(model: Written, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Backwards whose results are laid out as no fake tensor tells."""
    turned = x.transpose(1, 2)
    return F.softplus(turned).flatten(1) + F.elu(turned).reshape(len(x), -1) + turned[:, [1, 0, *range(2, WIDTH)]].flatten(1)


def read_as_data(model: Written, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The old way to detach."""
    return x * x.data.abs()


def inverted(model: Written, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """What is checked on the way gives nothing."""
    result: torch.Tensor = x @ torch.linalg.inv(torch.outer(model.row, model.row) + 4 * torch.eye(WIDTH))
    return result


def checkpointed(model: Written, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Both kinds, of which the older computes where no gradients are recorded."""
    old: torch.Tensor = checkpoint(lambda z: model.product(z).sin(), x, use_reentrant=True)
    new: torch.Tensor = checkpoint(lambda z: model.product(z).sin(), old, use_reentrant=False)
    return new


WAYS = [
    checkpointed,
    inverted,
    read_as_data,
    numbers,
    several,
    set_several,
    moved,
    copied,
    beside_nothing,
    one_part,
    last_token,
    masked,
    other_names,
    distances,
    losses,
    statistics,
    pytest.param(quantiles, marks=not_on_torch_2_11),
    log_probabilities,
    checked,
    strided,
]


def call() -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.Generator().manual_seed(0)
    return torch.randn(8, 4, WIDTH, generator=drawn), torch.randn(8, 4, WIDTH, generator=drawn)


@pytest.mark.parametrize("plan", few(1, [Manual(dp=2, microbatches=2), Manual(dp=2, tp=2, zero=3)]), ids=str)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_way_of_writing(way: Callable[[Written, torch.Tensor, torch.Tensor], torch.Tensor], plan: Manual) -> None:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error", MissingRuleWarning)
        found = autopar.verify(Written(way), plan.dp * plan.tp, call(), plan)
    assert max(found.loss_error, found.output_error, found.grad_error) < 2e-6, str(found)


def test_numbers_that_are_lost_are_not_made_up() -> None:
    """torch makes these on meta, without values."""
    with pytest.raises(CaptureError, match=r"test_forwards.py.*its values are not there.*make it by torch.tensor"):
        autopar.verify(Written(lambda model, x, y: x * x.new_tensor([1.0, 2.0] * 8)), 2, call(), Manual(dp=2))


@pytest.mark.parametrize(
    "way",
    [
        lambda model, x, y: x + torch.empty(16),
        lambda model, x, y: x + nn.init.trunc_normal_(torch.empty_like(x)),
        lambda model, x, y: torch.cat([x, x.new_empty(4, 16, 4).mT]),
    ],
)
def test_memory_that_nothing_was_written_to_is_not_read(way: Callable[[Written, torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
    with pytest.raises(CaptureError, match=r"nothing was written to \(test_forwards.py:\d+ .*: make it by torch.zeros"):
        autopar.plan(Written(way), 2, call())


def test_a_size_that_values_tell_is_explained() -> None:
    with pytest.raises(CaptureError, match=r"a number u0 that depends on values of tensors \(test_forwards.py.*x\[mask\]"):
        autopar.verify(Written(lambda model, x, y: x[y[..., 0] > 0]), 2, call(), Manual(dp=2))


def test_a_vmap_is_explained() -> None:
    with pytest.raises(CaptureError, match=r"a torch.vmap \(.*write what it does for a batch"):
        autopar.verify(Written(lambda model, x, y: torch.func.vmap(model.product)(x)), 2, call(), Manual(dp=2))


def test_a_write_into_the_data_of_a_parameter_is_explained() -> None:
    with pytest.raises(CaptureError, match="changes 'row' in place"):
        autopar.verify(Written(lambda model, x, y: x * model.row.data.mul_(0.5)), 2, call(), Manual(dp=2))


class Remembering(Written):
    """Keeps what it has computed, as recurrent models do."""

    kept: list[torch.Tensor]

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        result = super().forward(x, y)
        self.kept = [result]
        return result


def test_a_model_that_has_run_is_copied() -> None:
    model = Remembering(numbers)
    model(*call()).backward()
    assert not model.kept[0].is_leaf
    assert autopar.verify(model, 2, call(), Manual(dp=2)).grad_error < 2e-6
