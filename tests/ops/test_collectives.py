"""Each named operation does to whole tensors what it says, forward and backward, on virtual ranks and on real ones."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist

from autopar.layout import Layout, Placement
from autopar.mesh import Mesh
from autopar.ops import collectives
from autopar.ops.collectives import RESHARDS, Spot
from autopar.passes.reshard import plan_steps
from autopar.runtime.groups import activate, device_mesh
from autopar.virtual import run_lockstep
from tests.lockstep import Local, check_function, coordinates, joint_graph, spread, value_layout
from tests.pool import RankPool

pytestmark = pytest.mark.slow

MESH, IN_TIME = Mesh(("dp", "tp"), (2, 2)), Mesh.of(2).with_time(2)
ATOMS = ((3, 4), (4, 2))
STEPS = {
    "replicate": ("R R", "R R*"),
    "all_reduce": ("R P", "R R"),
    "all_reduce_both_ways": ("P R", "R* R"),
    "all_gather": ("S0.1 R", "R R"),
    "all_gather_of_partial_grad": ("R S1", "R R*"),
    "reduce_scatter": ("R P", "R S0.1"),
    "shard_slice": ("R R", "S0.1 R"),
    "shard_slice_of_partial_grad": ("R* R", "S1 R"),
    "share": ("R R", "R P"),
    "share_of_partial_grad": ("R R*", "R P"),
    "all_to_all": ("R S0.1", "R S1"),
}
"""For each operation a reshard that it does alone, what is shared out on an axis in time."""


def ends(name: str) -> tuple[Layout, Layout]:
    mesh = IN_TIME if name.startswith("share") else MESH
    source, target = (Layout(mesh, ATOMS, tuple(map(Placement.parse, text.split()))) for text in STEPS[name])
    return source, target


def single_step(source: Layout, target: Layout) -> Local:
    (step,) = plan_steps(source, target, needs_grad=True)

    def run(x: torch.Tensor, given: Sequence[torch.Tensor]) -> torch.Tensor:
        result: torch.Tensor = step.op(x, given[step.axis], **dict(step.arguments))
        return result

    return run


def test_every_operation_is_tried() -> None:
    used = {plan_steps(*ends(name), needs_grad=True)[0].op for name in STEPS}
    assert used == set(RESHARDS)


@pytest.mark.parametrize("name", STEPS)
def test_on_whole_tensors(name: str) -> None:
    torch.manual_seed(0)
    check_function(single_step(*ends(name)), *ends(name))


def test_a_spot_is_read_inside_its_dim() -> None:
    """By hand: of (3)(4) rank 1 of 2 keeps the second half of every run of four."""
    whole = torch.arange(12.0)
    part = collectives.shard_slice(whole, torch.tensor([1]), axis="tp", size=2, spot=Spot(0, 3), partial_grad=True)
    assert part.tolist() == [2.0, 3.0, 6.0, 7.0, 10.0, 11.0]


def rank_inputs(name: str) -> list[list[torch.Tensor]]:
    torch.manual_seed(0)
    source, target = ends(name)
    xs = spread(torch.randn(source.shape, dtype=torch.float64), value_layout(source))
    return [[x, *coordinates(MESH, rank), torch.randn(target.local_shape, dtype=torch.float64)] for rank, x in enumerate(xs)]


def run_on_rank(rank: int) -> dict[str, list[torch.Tensor]]:
    assert dist.get_world_size() == MESH.num_ranks
    activate(device_mesh(MESH, "cpu"))
    found = {}
    for name in STEPS:
        x, first, second, tangent = rank_inputs(name)[rank]
        x.requires_grad_()
        y = single_step(*ends(name))(x, [first, second])
        y.backward(tangent)
        assert x.grad is not None
        found[name] = [y.detach(), x.grad]
    return found


def test_real_ranks_give_the_numbers_of_virtual_ones(ranks: RankPool) -> None:
    real = ranks.run(run_on_rank)
    for name in STEPS:
        graph = joint_graph(single_step(*ends(name)), ends(name)[0])
        virtual = run_lockstep(graph, rank_inputs(name), MESH)
        for rank in range(MESH.num_ranks):
            torch.testing.assert_close({name: real[rank][name]}, {name: virtual[rank][:2]})
