"""Every reshard of a tensor is right forward and backward, by brute force, and well-known ones take the steps that they are known for."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import product

import pytest
import torch

from autopar.errors import PlanError
from autopar.layout import PARTIAL, REPLICATED, REPLICATED_PARTIAL_GRAD, Kind, Layout, Placement, shard
from autopar.mesh import Mesh
from autopar.passes.reshard import plan_parameter_steps, plan_steps
from autopar.storage import Held, Stored, storage_layout
from tests.lockstep import check_function
from tests.marks import few

pytestmark = pytest.mark.slow

ATOMS = ((2, 12), (24,))
SHARDS = [shard(0, 0), shard(0, 1), shard(1)]
WHOLE = [REPLICATED, REPLICATED_PARTIAL_GRAD]


def layouts(mesh: Mesh, kinds: Sequence[Placement] = (*WHOLE, PARTIAL, *SHARDS)) -> list[Layout]:
    """Every layout of the tensor out of these placements."""
    found = []
    for placements in product(kinds, repeat=len(mesh.sizes)):
        try:
            found.append(Layout(mesh, ATOMS, placements))
        except PlanError:
            continue
    return found


def has_way(source: Placement, target: Placement) -> bool:
    """Nothing becomes a partial sum, and a gradient that is one is not whole."""
    back = source.kind is Kind.REPLICATED_PARTIAL_GRAD and target.kind is Kind.REPLICATED
    return source == target or (target.kind is not Kind.PARTIAL and not back)


def pairs(mesh: Mesh) -> list[tuple[Layout, Layout]]:
    return [
        (source, target)
        for source, target in product(layouts(mesh), repeat=2)
        if source != target and all(map(has_way, source.placements, target.placements))
    ]


def check(source: Layout, target: Layout, held: Sequence[Held] = ()) -> None:
    """A tensor, or what is stored of a parameter that is ``held`` so."""
    steps = plan_parameter_steps(source, held, target.placements, needs_grad=True) if held else plan_steps(source, target, needs_grad=True)

    def run(x: torch.Tensor, coordinates: Sequence[torch.Tensor]) -> torch.Tensor:
        for step in steps:
            x = step.op(x, coordinates[step.axis], **dict(step.arguments))
            assert tuple(x.shape) == step.local_shape
        return x

    try:
        check_function(run, source, target)
    except AssertionError as error:
        raise AssertionError(f"{source} {source.order} -> {target} by {'; '.join(map(str, steps))}") from error


@pytest.mark.parametrize("sizes, count", few(2, [((2,), 30), ((2, 3), 30), ((2, 2, 2), 60), ((2, 3), 60)]))
def test_brute_force(sizes: tuple[int, ...], count: int) -> None:
    torch.manual_seed(0)
    mesh = Mesh.of(sizes)
    every = pairs(mesh)
    for source, target in every if len(every) <= count else random.Random(0).sample(every, count):
        check(source, target)


def stored_layout(mesh: Mesh, held: Sequence[Held]) -> Layout | None:
    with suppress(PlanError):
        return storage_layout(mesh, ATOMS, held)
    return None


def is_use(held: Sequence[Held], use: Layout) -> bool:
    """Whether a parameter held so may be used so: what is not sharded becomes anything, the others stay what they are."""
    return all(isinstance(h, Stored) or h in (p, REPLICATED) for h, p in zip(held, use.placements, strict=True))


@pytest.mark.parametrize("sizes, count", few(2, [((2,), 30), ((2, 3), 30), ((2, 2, 2), 30)]))
def test_from_zero_storage_to_use(sizes: tuple[int, ...], count: int) -> None:
    """ZeRO axes nest inside the others whatever their place in the mesh."""
    torch.manual_seed(0)
    mesh = Mesh.of(sizes)
    kinds: list[Held] = [Stored(3), REPLICATED, *SHARDS]
    every = []
    for held in product(kinds, repeat=len(sizes)):
        stored = stored_layout(mesh, held)
        if stored is not None and any(isinstance(h, Stored) for h in held):
            every += [(stored, use, held) for use in layouts(mesh, (*WHOLE, *SHARDS)) if is_use(held, use)]
    assert len(every) > len(sizes)
    for source, target, of in every if len(every) <= count else random.Random(0).sample(every, count):
        check(source, target, of)


@pytest.mark.parametrize("needs_grad", [True, False])
def test_nothing_to_do(needs_grad: bool) -> None:
    for layout in layouts(Mesh.of((2, 2))):
        assert plan_steps(layout, layout, needs_grad=needs_grad) == []


def test_without_gradient_replicas_are_alike() -> None:
    mesh = Mesh.of((2,))
    source, target = (Layout(mesh, ATOMS, (placement,)) for placement in WHOLE)
    assert plan_steps(source, target, needs_grad=False) == []
    assert len(plan_steps(source, target, needs_grad=True)) == 1


def test_what_zero_stores_is_gathered_before_it_is_sliced() -> None:
    mesh, held = Mesh(("dp", "tp"), (2, 2)), (Stored(3), REPLICATED)
    stored, target = storage_layout(mesh, ATOMS, held), Layout(mesh, ATOMS, (REPLICATED_PARTIAL_GRAD, shard(1)))
    steps = plan_parameter_steps(stored, held, target.placements, needs_grad=True)
    assert [(step.op.__name__, step.local_shape) for step in steps] == [("all_gather", (24, 24)), ("shard_slice", (24, 12))]


@pytest.mark.parametrize("level", [1, 2, 3])
def test_what_zero_stores_is_gathered_before_it_is_shared_out(level: int) -> None:
    mesh, held = Mesh(("dp",), (2,)).with_time(4), (Stored(level), REPLICATED)
    stored, target = storage_layout(mesh, ATOMS, held), Layout(mesh, ATOMS, (REPLICATED_PARTIAL_GRAD, PARTIAL))
    steps = plan_parameter_steps(stored, held, target.placements, needs_grad=True)
    assert [(step.op.__name__, step.axis) for step in steps] == [("all_gather", 0), ("share", 1)]


def test_what_shrinks_comes_first() -> None:
    mesh = Mesh(("dp", "tp"), (2, 2))
    source, target = (Layout(mesh, ATOMS, tuple(map(Placement.parse, text.split()))) for text in ("S0 P", "R S1"))
    sizes = [step.local_shape for step in plan_steps(source, target, needs_grad=True)]
    assert sizes == [(12, 12), (24, 12)]


KNOWN = [
    ("Megatron f", "R R", "R R*"),
    ("Megatron g", "R P", "R R"),
    ("sequence parallel in", "R S0", "R R*"),
    ("sequence parallel out", "R P", "R S0"),
    ("data parallel parameter", "R R", "R* R"),
    ("ZeRO-3 gather", "S0 R", "R* R"),
    ("ZeRO-3 gather of a column-parallel weight", "S0 S1", "R* S1"),
    ("fused heads to whole", "R S0.1", "R R*"),
    ("expert all-to-all", "R S0", "R S1"),
    ("all-to-all between factors of one dim", "R S0", "R S0.1"),
    ("both axes gathered", "S1 S1", "R* R*"),
    ("inner axis kept, outer dropped", "S1 S1", "R S1"),
    ("outer axis joins an inner one", "R S1", "S1 S1"),
    ("axes change places", "S0.1 S1", "S1 S0.1"),
    ("nested conflict", "S1 S1", "S0.1 S1"),
    ("partial sums everywhere", "P P", "R* S0"),
]


def test_known_steps(golden: Callable[[str, str], None]) -> None:
    mesh = Mesh(("dp", "tp"), (2, 2))
    lines = []
    for name, *ends in KNOWN:
        source, target = (Layout(mesh, ATOMS, tuple(map(Placement.parse, text.split()))) for text in ends)
        lines.append(f"{name}: {source} -> {target}")
        lines += [f"    {step} -> {step.local_shape}" for step in plan_steps(source, target, needs_grad=True)]
    golden("passes/reshard", "\n".join(lines))
