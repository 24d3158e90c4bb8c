"""Masks and numbers follow the layout and the seed, and nothing else."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from types import ModuleType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autopar.errors import PlanError
from autopar.layout import REPLICATED, Layout, assemble, replicated, shard, take_shard
from autopar.mesh import Mesh
from autopar.ops import random
from autopar.ops.random import Digits, Pieces, digits_on, dropout, layout_pieces, uniform
from autopar.storage import Stored, storage_layout
from tests.lockstep import coordinates


def masks(layout: Layout, *, seed: int = 0, salt: int = 0, probability: float = 0.25) -> list[torch.Tensor]:
    """What every rank makes of ones."""
    ones = torch.ones(layout.local_shape, dtype=torch.float64)
    pieces = layout_pieces(layout)
    return [
        dropout(ones, torch.tensor([seed]), coordinates(layout.mesh, rank), probability=probability, salt=salt, pieces=pieces)
        for rank in range(layout.mesh.num_ranks)
    ]


def mask(*shape: int, seed: int = 0, salt: int = 0, probability: float = 0.25) -> torch.Tensor:
    return masks(replicated(Mesh.of(1), shape), seed=seed, salt=salt, probability=probability)[0]


@pytest.mark.parametrize("probability", [0.1, 0.5, 0.9])
def test_the_share_of_zeros_is_the_probability(probability: float) -> None:
    found = mask(400, 500, probability=probability)
    deviation = (probability * (1 - probability) / found.numel()) ** 0.5
    assert abs(float((found == 0).double().mean()) - probability) < 5 * deviation
    kept = found[found != 0]
    torch.testing.assert_close(kept, torch.full_like(kept, 1 / (1 - probability)))


def test_rows_columns_seeds_and_salts_are_independent() -> None:
    """Each pair of masks agrees as often as independent ones do."""
    base = mask(300, 300, probability=0.5) == 0
    others = [
        base.roll(1, 0),
        base.roll(1, 1),
        base.T,
        mask(300, 300, probability=0.5, seed=1) == 0,
        mask(300, 300, probability=0.5, salt=1) == 0,
    ]
    for other in others:
        assert abs(float((base == other).double().mean()) - 0.5) < 5 * 0.5 / 300
    assert float(base.double().mean(0).std()) < 2 * 0.5 / 300**0.5


def test_a_number_without_dims_is_drawn() -> None:
    assert mask().shape == ()
    number = uniform(torch.tensor([0]), coordinates(Mesh.of(2), 1), salt=0, dtype=torch.float32, pieces=())
    assert number.shape == ()
    assert 0 < number < 1


def test_equal_seeds_give_equal_masks() -> None:
    torch.testing.assert_close(mask(20, 20, seed=5), mask(20, 20, seed=5), rtol=0, atol=0)


def test_a_mask_does_not_depend_on_the_layout() -> None:
    mesh, atoms = Mesh.of((2, 2)), ((2, 12), (8,))
    expected = mask(24, 8)
    tried = 0
    for placements in product([REPLICATED, shard(0), shard(0, 1), shard(1)], repeat=2):
        try:
            layout = Layout(mesh, atoms, placements)
        except PlanError:
            continue
        tried += 1
        found = masks(layout)
        torch.testing.assert_close(assemble(found, layout), expected, rtol=0, atol=0)
        for rank in range(mesh.num_ranks):
            torch.testing.assert_close(found[rank], take_shard(expected, layout, mesh.coordinate(rank)), rtol=0, atol=0)
    assert tried > 10


def test_a_mask_does_not_depend_on_the_nesting() -> None:
    layout = storage_layout(Mesh.of((2, 2)), ((16,), (8,)), (Stored(3), shard(0)))
    assert layout.order == (1, 0)
    torch.testing.assert_close(assemble(masks(layout), layout), mask(16, 8), rtol=0, atol=0)


def test_ends_of_the_probability() -> None:
    x = torch.tensor([1.0, -2.0])
    for probability, expected in ((0.0, x), (1.0, torch.zeros(2))):
        pieces = layout_pieces(replicated(Mesh.of(1), (2,)))
        found = dropout(x, torch.tensor([0]), [torch.tensor([0])], probability=probability, salt=0, pieces=pieces)
        assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_dtype_is_kept(dtype: torch.dtype) -> None:
    pieces = layout_pieces(replicated(Mesh.of(1), (64,)))
    found = dropout(torch.ones(64, dtype=dtype), torch.tensor([0]), [torch.tensor([0])], probability=0.5, salt=0, pieces=pieces)
    assert found.dtype is dtype
    assert set(found.tolist()) == {0.0, 2.0}


def test_the_gradient_has_the_same_mask() -> None:
    pieces = layout_pieces(replicated(Mesh.of(1), (8, 8)))
    x = torch.ones(8, 8, requires_grad=True)
    y = dropout(x, torch.tensor([3]), [torch.tensor([0])], probability=0.5, salt=1, pieces=pieces)
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, y.detach())


@st.composite
def shards(draw: st.DrawFn) -> tuple[Pieces, list[int]]:
    """Pieces of some dims over up to two axes, and coordinates on these."""
    axes, coordinates = draw(st.permutations([0, 1])), [0, 0]
    dims = list[tuple[tuple[int, int], ...]]()
    for _ in range(draw(st.integers(1, 3))):
        splits = list[tuple[int, int]]()
        for _ in range(draw(st.integers(1, 3))):
            is_sharded = bool(axes) and draw(st.booleans())
            size = draw(st.sampled_from([2, 3, 2**17, 2**23]) if is_sharded else st.integers(1, 6))
            splits.append((size, axes[-1] if is_sharded else -1))
            if is_sharded:
                coordinates[axes.pop()] = draw(st.integers(0, size - 1))
        dims.append(tuple(splits))
    return tuple(dims), coordinates


def spelled_out(pieces: Pieces, coordinates: list[int], seed: int, salt: int, probability: float) -> list[bool]:
    """The definition, in numbers of Python."""
    return [number >= int(probability * 2**32) for number in numbers_of(pieces, coordinates, seed, salt)]


def numbers_of(pieces: Pieces, coordinates: list[int], seed: int, salt: int) -> list[int]:
    """Of 32 bits, one for each element of a shard."""

    def mixed(x: int) -> int:
        x &= 2**32 - 1
        x = ((x ^ (x >> 16)) * 0x7FEB352D) % 2**32
        x = ((x ^ (x >> 15)) * 0x846CA68B) % 2**32
        return x ^ (x >> 16)

    flat = [piece for dim in pieces for piece in dim]
    found = list[int]()
    for local in product(*(range(size) if axis < 0 else [coordinates[axis]] for size, axis in flat)):
        position = 0
        for (size, _), digit in zip(flat, local, strict=True):
            position = position * size + digit
        found.append(mixed((position % 2**32) ^ mixed((position >> 32) + seed * 0x9E3779B1 + salt)))
    return found


def kept(pieces: Pieces, coordinates: list[int], seed: int, salt: int, probability: float) -> list[bool]:
    shape = [math.prod(size for size, axis in dim if axis < 0) for dim in pieces]
    along = [torch.tensor([coordinate]) for coordinate in coordinates]
    found = dropout(torch.ones(shape), torch.tensor([seed]), along, probability=probability, salt=salt, pieces=pieces)
    return [bool(x) for x in (found != 0).flatten().tolist()]


PROBABILITIES = st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0])


@given(shards(), st.integers(-(2**31), 2**31), st.integers(0, 9), PROBABILITIES, st.sampled_from([1, 2, 7, 2**16]))
def test_masks_are_those_of_the_definition(
    shard: tuple[Pieces, list[int]], seed: int, salt: int, probability: float, block: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(random, "BLOCK", block)
        expected = spelled_out(*shard, seed, salt, probability) if probability < 1 else [False] * len(spelled_out(*shard, seed, salt, 0.0))
        assert kept(*shard, seed, salt, probability) == expected


@contextmanager
def imported(*, interpret: bool) -> Iterator[ModuleType]:
    """The kernel, interpreted or to be compiled; Triton decides when it is imported, and asks again when it runs."""
    pytest.importorskip("triton")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", str(int(interpret)))
        patch.delitem(sys.modules, "autopar.ops.random_kernel", raising=False)
        yield importlib.import_module("autopar.ops.random_kernel")


@pytest.fixture(scope="module")
def kernel() -> Iterator[ModuleType]:
    with imported(interpret=True) as module:
        yield module


@given(shards(), st.integers(-(2**31), 2**31), st.integers(0, 9), PROBABILITIES)
def test_the_kernel_makes_the_same_mask(
    kernel: ModuleType, shard: tuple[Pieces, list[int]], seed: int, salt: int, probability: float
) -> None:
    pieces, coordinates = shard
    digits, expected = Digits.of(pieces), kept(pieces, coordinates, seed, salt, probability)
    begin = torch.tensor([sum(c * w for c, w in zip(coordinates, digits.axis_weights, strict=False))])
    found = torch.empty(len(expected), dtype=torch.bool)
    table = digits_on(found.device, tuple(digits.sizes), tuple(digits.weights))
    for is_wide in {digits.is_wide, True}:  # of few positions it may be told either
        kernel.fill(
            found, begin, torch.tensor([seed * random.SEED_FACTOR + salt]), table, is_wide=is_wide, threshold=int(probability * 2**32)
        )
        assert found.tolist() == expected


@pytest.mark.parametrize("is_wide", [False, True])
@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("bits, out", [(0, "*i1"), (7, "*bf16"), (10, "*fp16"), (23, "*fp32"), (32, "*fp64")])
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
def test_the_kernel_compiles_for_gpus(capability: int, bits: int, out: str, is_wide: bool) -> None:
    """To machine code, which wants no GPU."""
    with imported(interpret=False) as module:
        compiler, target = importlib.import_module("triton.compiler"), importlib.import_module("triton.backends.compiler").GPUTarget
        pointers = {"out": out, "begin": "*i64", "key": "*i64", "digits": "*i64"}
        constants = {"BITS": bits, "NUM_DIGITS": 2, "WIDE": is_wide, "BLOCK": module.BLOCK}
        signature = pointers | {"threshold": "i64", "numel": "i32"} | dict.fromkeys(constants, "constexpr")
        source = compiler.ASTSource(module._fill, signature=signature, constexprs=constants)
        assert compiler.compile(source, target=target("cuda", capability, 32)).asm["cubin"]


def test_a_mask_of_many_blocks_and_an_empty_one() -> None:
    pieces: Pieces = (((3, -1), (2, 0), (50, -1)), ((1000, -1),))
    assert kept(pieces, [1, 0], 5, 1, 0.5) == spelled_out(pieces, [1, 0], 5, 1, 0.5)
    assert kept((((0, -1),),), [0, 0], 5, 1, 0.5) == []


UNIFORM = [(torch.float64, 32), (torch.float32, 23), (torch.float16, 10), (torch.bfloat16, 7)]


def drawn(pieces: Pieces, coordinates: list[int], seed: int, salt: int, dtype: torch.dtype) -> torch.Tensor:
    along = [torch.tensor([coordinate]) for coordinate in coordinates]
    return uniform(torch.tensor([seed]), along, salt=salt, dtype=dtype, pieces=pieces)


@given(shards(), st.integers(-(2**31), 2**31), st.integers(0, 9), st.sampled_from(UNIFORM), st.sampled_from([1, 7, 2**16]))
def test_uniform_numbers_are_those_of_the_definition_on_both_paths(
    kernel: ModuleType, shard: tuple[Pieces, list[int]], seed: int, salt: int, of: tuple[torch.dtype, int], block: int
) -> None:
    (pieces, coordinates), (dtype, bits) = shard, of
    expected = [((number >> (32 - bits)) + 0.5) / 2**bits for number in numbers_of(*shard, seed, salt)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(random, "BLOCK", block)
        found = drawn(*shard, seed, salt, dtype)
    assert found.dtype is dtype
    assert found.flatten().tolist() == expected
    digits = Digits.of(pieces)
    begin = torch.tensor([sum(c * w for c, w in zip(coordinates, digits.axis_weights, strict=False))])
    table = digits_on(begin.device, tuple(digits.sizes), tuple(digits.weights))
    by_kernel = torch.empty(len(expected), dtype=dtype)
    kernel.fill(by_kernel, begin, torch.tensor([seed * random.SEED_FACTOR + salt]), table, is_wide=digits.is_wide, bits=bits)
    assert by_kernel.tolist() == expected


@pytest.mark.parametrize("dtype, bits", UNIFORM, ids=str)
def test_uniform_numbers_lie_evenly_between_the_ends(dtype: torch.dtype, bits: int) -> None:
    found = drawn((((400, -1),), ((500, -1),)), [0, 0], 3, 1, dtype)
    assert 0 < float(found.min()) < float(found.max()) < 1
    counts = torch.histc(found.float(), bins=64, min=0, max=1)
    chi_square = float(((counts - found.numel() / 64) ** 2).sum() / (found.numel() / 64))
    assert chi_square < 63 + 5 * (2 * 63) ** 0.5
