"""Rows at marked places: features of images among the tokens of their samples."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import autopar
from autopar import Manual
from autopar.errors import InputError
from autopar.planner.session import open_session
from autopar.runtime.module import make_skeleton
from tests.planning import planned

aten, ours = torch.ops.aten, torch.ops.autopar
SAMPLES, PLACES, ROWS, WIDTH, IMAGE = 8, 6, 2, 8, 3
Call = tuple[torch.Tensor, torch.Tensor]


def scattered(x: torch.Tensor, mask: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
    return x.masked_scatter(mask.unsqueeze(-1), features)


def scattered_wide(x: torch.Tensor, mask: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
    return x.masked_scatter(mask.unsqueeze(-1).expand_as(x), features.flatten(0, 1))


def written(x: torch.Tensor, mask: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x[mask] = features.flatten(0, 1)
    return x


def in_parts(x: torch.Tensor, mask: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
    """As LLaVA does."""
    return x.masked_scatter(mask.unsqueeze(-1), torch.cat([*features.unbind()]))


def by_element(x: torch.Tensor, mask: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
    """Not whole places."""
    return x.masked_scatter(mask.unsqueeze(-1) & (x > 0), features.repeat(1, 3, 1))


class Seeing(nn.Module):
    def __init__(self, way: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.way = way
        self.tokens, self.image, self.head = nn.Embedding(8, WIDTH), nn.Linear(4, WIDTH), nn.Linear(WIDTH, 8)

    def forward(self, ids: torch.Tensor, pixels: torch.Tensor) -> torch.Tensor:
        x = self.way(self.tokens(ids), ids == IMAGE, self.image(pixels))
        result: torch.Tensor = self.head(torch.tanh(x + x.cumsum(1))).square().sum()
        return result


def call() -> Call:
    drawn = torch.Generator().manual_seed(0)
    ids = torch.randint(4, 8, (SAMPLES, PLACES), generator=drawn)
    places = torch.rand(SAMPLES, PLACES, generator=drawn).topk(ROWS).indices
    return ids.scatter(1, places, IMAGE), torch.randn(SAMPLES, ROWS, 4, generator=drawn)


WAYS = [scattered, scattered_wide, written, in_parts]


@pytest.mark.parametrize("plan", [Manual(dp=2, tp=2, zero=3), Manual(pp=2, dp=2, microbatches=2)], ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_numbers_are_those_of_the_model(way: Callable[..., torch.Tensor], plan: Manual) -> None:
    torch.manual_seed(0)
    found = autopar.verify(Seeing(way), 4, call(), plan)
    assert max(found.loss_error, found.output_error, found.grad_error) < 1e-6, str(found)


@pytest.mark.parametrize("way", WAYS)
def test_each_rank_takes_rows_of_its_samples(way: Callable[..., torch.Tensor]) -> None:
    plan = planned(open_session(make_skeleton(Seeing(way)), call(), {}), Manual(dp=4))
    assert {collective.kind for collective in plan.collectives} == {"all_reduce"}
    (loss,) = [collective for collective in plan.collectives if collective.phase == "forward"]
    assert loss.num_bytes == 4


@pytest.mark.filterwarnings("ignore::autopar.factors.MissingRuleWarning")
def test_single_elements_stay_as_they_are() -> None:
    session = open_session(make_skeleton(Seeing(by_element)), call(), {})
    assert aten.masked_scatter.default in [node.target for node in session.normal.module.graph.nodes]


def test_samples_with_more_places_than_others_are_refused() -> None:
    ids, pixels = call()
    ids[1] = ids[0].where(ids[0] != IMAGE, 5)
    ids[2] = IMAGE
    with pytest.raises(InputError, match=r"needs 2 marked places(.|\n)*here they have \[2, 0, 6, 2.*the same number"):
        autopar.verify(Seeing(scattered), 2, (ids, pixels), Manual(dp=2))


def test_which_row_goes_where() -> None:
    marked = torch.tensor([[True, False, True], [False, True, True]])
    found = ours.row_of_mark(marked, 2)
    assert found[marked].tolist() == [0, 1, 0, 1]
    assert found.min() >= 0
    assert found.max() < 2


class Parted(nn.Linear):
    def __init__(self, dim: int, other: int) -> None:
        super().__init__(2, 2)
        self.dim, self.other = dim, other

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        joined = torch.cat(super().forward(x).unbind(self.dim), self.other)
        result: torch.Tensor = (joined + joined.cumsum(0) + joined.cumsum(1)).square().sum()
        return result


@pytest.mark.parametrize("dim, other", [(0, 0), (1, 0), (0, 1), (2, 1)])
def test_parts_are_joined(dim: int, other: int) -> None:
    given, model = (torch.randn(4, 6, 2),), Parted(dim, other)
    targets = [node.target for node in open_session(make_skeleton(model), given, {}).normal.module.graph.nodes]
    assert aten.unbind.int not in targets
    found = autopar.verify(model, 2, given, Manual(tp=2))
    assert max(found.loss_error, found.grad_error) < 1e-6, str(found)


@pytest.mark.filterwarnings("ignore::autopar.factors.MissingRuleWarning")
def test_rows_for_all_places_are_those_of_no_sample() -> None:
    """Of which torch takes as many as there are marks, whoever has them."""
    model = Seeing(lambda x, mask, features: x.masked_scatter(mask.unsqueeze(-1), features.repeat(1, PLACES // ROWS, 1)))
    ids, pixels = call()
    ids[2] = IMAGE
    found = autopar.verify(model, 2, (ids, pixels), Manual(dp=2))
    assert max(found.loss_error, found.grad_error) < 1e-6, str(found)
