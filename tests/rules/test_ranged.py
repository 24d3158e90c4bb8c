"""Look-up and cross entropy over ranges, on virtual ranks in lockstep, against torch on the whole."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx
from torch._functorch.aot_autograd import aot_export_joint_simple

from autopar.mesh import Mesh
from autopar.rules.ranged import cross_entropy_range, embedding_range, mean_part
from autopar.virtual import run_lockstep

MESHES = ["tp=2", "tp=4", "dp=2,tp=2", "a=2,b=2,c=2"]


def lockstep(
    local: Callable[..., torch.Tensor], mesh: Mesh, inputs: list[list[torch.Tensor]], grad: torch.Tensor
) -> list[list[torch.Tensor]]:
    """Result and gradients on every rank; ``local`` takes the inputs, then a coordinate for every axis."""
    ranks = [
        [*inputs[rank], *[torch.tensor([position]) for position in mesh.coordinate(rank)]]
        for rank in range(mesh.num_ranks)
    ]
    joint = aot_export_joint_simple(lambda *args: (local(*args),), tuple(ranks[0]), trace_joint=True)
    assert isinstance(joint, fx.GraphModule)
    return run_lockstep(joint, [[*[x.detach() for x in given], grad] for given in ranks], mesh)


def leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_()


@pytest.mark.parametrize("padding_idx", [-1, 5])
@pytest.mark.parametrize("text", MESHES)
def test_embedding(text: str, padding_idx: int) -> None:
    mesh = Mesh.parse(text)
    torch.manual_seed(0)
    weight = leaf(torch.randn(16, 3, dtype=torch.float64))
    ids = torch.randint(16, (4, 5))
    ids[0, 0] = 5
    want = torch.nn.functional.embedding(ids, weight, padding_idx if padding_idx >= 0 else None)
    grad = torch.randn_like(want)
    (want_grad,) = torch.autograd.grad(want, weight, grad)
    shards = weight.detach().chunk(mesh.num_ranks)

    def local(rows: torch.Tensor, ids: torch.Tensor, *coordinates: torch.Tensor) -> torch.Tensor:
        return embedding_range(rows, ids, list(coordinates), list(mesh.sizes), padding_idx)

    outputs = lockstep(local, mesh, [[leaf(shard), ids] for shard in shards], grad)
    torch.testing.assert_close(torch.stack([out[0] for out in outputs]).sum(0), want.detach())
    torch.testing.assert_close(torch.cat([out[1] for out in outputs]), want_grad)


@pytest.mark.parametrize("ignored", [-100, 3])
@pytest.mark.parametrize("text", MESHES)
def test_cross_entropy(text: str, ignored: int) -> None:
    mesh = Mesh.parse(text)
    torch.manual_seed(0)
    logits = leaf(torch.randn(6, 16, dtype=torch.float64) * 30)
    target = torch.randint(16, (6,))
    target[::2] = ignored
    want = torch.nn.functional.cross_entropy(logits, target, ignore_index=ignored, reduction="sum")
    grad = torch.tensor(0.7, dtype=torch.float64)
    (want_grad,) = torch.autograd.grad(want, logits, grad)

    def local(logits: torch.Tensor, target: torch.Tensor, *coordinates: torch.Tensor) -> torch.Tensor:
        return cross_entropy_range(logits, target, list(coordinates), list(mesh.sizes), list(mesh.names), ignored)

    shards = logits.detach().chunk(mesh.num_ranks, -1)
    outputs = lockstep(local, mesh, [[leaf(shard), target] for shard in shards], grad)
    for out in outputs:
        torch.testing.assert_close(out[0], want.detach())
    torch.testing.assert_close(torch.cat([out[1] for out in outputs], -1), want_grad)


@pytest.mark.parametrize("beyond", [16, 99, -1, -100])
def test_what_no_rank_has_is_out_of_bounds(beyond: int) -> None:
    """Of a table and of classes, as on one device; an ignored class is none."""
    mesh = Mesh.parse("dp=2,tp=2")
    given = torch.tensor([3, beyond, 15])

    def look_up(rows: torch.Tensor, ids: torch.Tensor, *coordinates: torch.Tensor) -> torch.Tensor:
        return embedding_range(rows, ids, list(coordinates), list(mesh.sizes))

    def loss(logits: torch.Tensor, target: torch.Tensor, *coordinates: torch.Tensor) -> torch.Tensor:
        return cross_entropy_range(logits, target, list(coordinates), list(mesh.sizes), list(mesh.names), -7)

    for local, shard, grad in ((look_up, torch.ones(4, 2), torch.ones(3, 2)), (loss, torch.ones(3, 4), torch.tensor(1.0))):
        with pytest.raises((IndexError, RuntimeError), match=r"out of (range|bounds)"):
            lockstep(local, mesh, [[leaf(shard), given]] * 4, grad)


def test_cross_entropy_never_gathers_and_its_backward_is_local() -> None:
    mesh = Mesh.parse("tp=2")
    logits, target = leaf(torch.randn(6, 8)), torch.randint(16, (6,))

    def local(logits: torch.Tensor, target: torch.Tensor, coordinate: torch.Tensor) -> tuple[torch.Tensor]:
        return (cross_entropy_range(logits, target, [coordinate], mesh.sizes, mesh.names, -100),)

    joint = aot_export_joint_simple(local, (logits, target, torch.tensor([0])), trace_joint=True)
    assert isinstance(joint, fx.GraphModule)
    collectives = [node for node in joint.graph.nodes if "_c10d_functional" in str(node.target)]
    reduces = [node for node in collectives if "wait" not in str(node.target)]
    assert [(str(node.target), node.args[1:]) for node in reduces] == [
        ("_c10d_functional.all_reduce.default", (operation, "autopar.tp")) for operation in ("max", "sum", "sum")
    ]
    assert all(node.args[0].meta["val"].shape == (6,) for node in reduces)


def test_cross_entropy_of_narrow_logits_is_computed_wide() -> None:
    mesh = Mesh.parse("tp=2")
    torch.manual_seed(0)
    logits = (torch.randn(64, 16) * 10).bfloat16()
    target = torch.randint(16, (64,))
    want = torch.nn.functional.cross_entropy(logits.double(), target, reduction="sum")

    def local(logits: torch.Tensor, target: torch.Tensor, coordinate: torch.Tensor) -> torch.Tensor:
        return cross_entropy_range(logits, target, [coordinate], mesh.sizes, mesh.names, -100)

    shards = logits.chunk(2, -1)
    outputs = lockstep(local, mesh, [[leaf(shard), target] for shard in shards], torch.tensor(1.0).bfloat16())
    assert outputs[0][0].dtype == torch.bfloat16
    torch.testing.assert_close(outputs[0][0].double(), want, rtol=2**-8, atol=0.0)
    assert outputs[0][1].dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_parts_of_a_mean_add_up(dtype: torch.dtype) -> None:
    """A sum over a part is beyond float16."""
    x = torch.linspace(60, 120, 24, dtype=dtype).reshape(4, 6)
    y = -x
    parts = [mean_part(torch.ops.aten.mse_loss.default, 2, a, b) for a, b in zip(x.chunk(2), y.chunk(2), strict=True)]
    torch.testing.assert_close(parts[0] + parts[1], torch.nn.functional.mse_loss(x, y))
