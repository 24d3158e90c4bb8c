"""What plans are priced with: every kind of op at its own rate, every message on its own link, collectives as they were measured."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autopar import Cluster, Manual, Plan, api
from autopar.cost.collectives import collective_time_s
from autopar.cost.device import AttentionSample, DeviceProfile, MatmulSample, Stream
from autopar.cost.machine import LinkProfile, MachineProfile
from autopar.cost.pricing import EdgePrice, Pricer
from autopar.cost.updates import FOREACH_COPIES, OPTIMIZER_STATE_BYTES, UPDATE_COPIES, WHOLE_COPIES, update_passes
from autopar.errors import PlanError
from autopar.layout import Placement
from autopar.mesh import Mesh
from autopar.passes.buckets import BUCKET_NUM_BYTES, SMALL_NUM_BYTES
from autopar.planner.request import check_optimizer
from autopar.precision import Master
from autopar.rules.registry import TensorSpec
from autopar.solve.pins import Pin
from autopar.storage import parse_held
from tests import models

aten = torch.ops.aten

DEVICE = DeviceProfile("toy", 2**33, (MatmulSample(64, 64, 64, "float32", 1e9),), 1e9, 1e-6, "made up")
LINKS = (LinkProfile(1e-6, 1e9),) * 2


def compute_s(device: DeviceProfile, vocab: int = 96) -> float:
    model, batch = models.gpt2(layers=1, batch=8, vocab=vocab)
    return api.plan(model, 2, batch, plan=Manual(dp=2), profile=MachineProfile(device, LINKS)).prediction.compute_s


SLOW = Stream(1e5, 1e5)


@pytest.mark.parametrize(
    "device",
    [
        replace(DEVICE, attention=(AttentionSample(16, "float32", 1e6, 1e6),)),
        replace(DEVICE, matmul=(*DEVICE.matmul, MatmulSample(1024, 1024, 64, "float32", 1e7))),
        *(replace(DEVICE, streams={name: SLOW}) for name in ("tanh", "layer_norm", "cross_entropy_loss", "embedding", "broadcast")),
    ],
    ids=["attention", "skinny", "tanh", "layer_norm", "cross_entropy_loss", "embedding", "broadcast"],
)
def test_every_kind_of_op_has_its_rate(device: DeviceProfile) -> None:
    """One kind at a small part of its rate makes the model slower."""
    assert compute_s(device) > 1.2 * compute_s(DEVICE)


def test_a_vocabulary_that_is_not_aligned_has_slow_products() -> None:
    slow = replace(DEVICE, matmul=(*DEVICE.matmul, MatmulSample(64, 65, 64, "float32", 1e7)))
    assert compute_s(slow) == compute_s(DEVICE)
    assert compute_s(slow, vocab=97) > 1.2 * compute_s(DEVICE, vocab=97)


ON_CPU = replace(DEVICE, streams={"broadcast": Stream(2e8, 2e8)})
ON_GPU = replace(ON_CPU, host_bytes_per_s=1e9)
WIDE, NARROW = 256, 64


class Mlp(nn.Module):
    """An MLP with biases, then one without, whose product is a part of a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(NARROW, WIDE), nn.Linear(WIDE, NARROW)
        self.plain_up, self.plain_down = nn.Linear(NARROW, WIDE, bias=False), nn.Linear(WIDE, NARROW, bias=False)
        self.norm, self.last_norm = nn.LayerNorm(NARROW), nn.LayerNorm(NARROW)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.down(F.gelu(self.up(x))))
        loss: torch.Tensor = self.last_norm(self.plain_down(F.gelu(self.plain_up(x))) + x)
        return loss


def adding_s(*added: tuple[int, int]) -> float:
    """Seconds in which ops add biases to products of so many rows and columns; a bias that is read counts."""
    return sum(float(ON_GPU.stream_time_s(4 * (2 * rows * width + width), "broadcast")) for rows, width in added)


@pytest.mark.parametrize(
    "plan, biased, rows",
    [
        (Manual(dp=4), [(16, WIDE), (16, NARROW)], 0),
        (Manual(tp=4), [(64, WIDE // 4), (64, NARROW)], 64),
        (Manual(dp=2, tp=2), [(32, WIDE // 2), (32, NARROW)], 32),
        (Manual(tp=4, microbatches=2), 2 * [(32, WIDE // 4), (32, NARROW)], 32),
    ],
    ids=str,
)
def test_products_of_gpus_add_their_biases(plan: Manual, biased: list[tuple[int, int]], rows: int) -> None:
    """Those of CPUs begin with them, which takes as long as to add them. What is a sum over ranks first, of so many rows then, has its bias
    added by an op."""
    links = (LinkProfile(1e-6, 1e9),) * len(plan.grid(4).sizes)
    asked = {"plan": plan, "loss_fn": lambda y: y.square().mean()}
    plans = [
        api.plan(Mlp(), 4, (torch.randn(64, NARROW),), profile=MachineProfile(device, links), **asked)  # type: ignore[arg-type]
        for device in (ON_CPU, ON_GPU)
    ]
    on_cpu, on_gpu = (made.prediction for made in plans)
    times = plan.microbatches or 1
    left_s = times * float(ON_GPU.stream_time_s(4 * 2 * rows * NARROW, "broadcast"))
    assert on_cpu.compute_s - on_gpu.compute_s == pytest.approx(adding_s(*biased) - left_s, rel=1e-6)
    assert on_gpu.blocking_comm_s == pytest.approx(on_cpu.blocking_comm_s)
    for cpu, gpu in zip(plans[0].stages, plans[1].stages, strict=True):
        assert times * (cpu.forward_s - gpu.forward_s) == pytest.approx(adding_s(*biased) - left_s, rel=1e-6)


def test_what_a_reduction_leaves_on_each_rank_has_its_bias_added() -> None:
    """A quarter of the rows: told by how much longer a step takes where nothing but that is slower."""
    pins = {"up.weight": "S0", "down.weight": "S1", "plain_up.weight": "R", "layer_norm": "b0"}
    asked = {"constraints": [Pin(name, (("tp", held),)) for name, held in pins.items()], "loss_fn": lambda y: y.square().mean()}
    slow = replace(ON_GPU, streams={"broadcast": Stream(1e6, 2e8)})
    times = [
        api.plan(Mlp(), "tp=4", (torch.randn(64, NARROW),), profile=MachineProfile(device, LINKS[:1]), **asked).prediction  # type: ignore[arg-type]
        for device in (ON_GPU, slow)
    ]
    added_s = [float(device.stream_time_s(4 * 2 * 16 * NARROW, "broadcast")) for device in (ON_GPU, slow)]
    assert times[1].step_time_s - times[0].step_time_s == pytest.approx(added_s[1] - added_s[0], rel=1e-6)


def test_kinds_that_a_model_has_not_are_nothing_to_it() -> None:
    assert compute_s(replace(DEVICE, streams={"gelu": SLOW})) == compute_s(DEVICE)


def test_a_backward_launches_twice_and_adds_up_gradients() -> None:
    """Of three ops that read one value each adds up two thirds of a gradient."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    nodes = [graph.call_function(aten.tanh.default, (x,)) for _ in range(3)]
    for node in (x, *nodes):
        node.meta["specs"] = (TensorSpec((100,), requires_grad=True),)
    prices = Pricer(MachineProfile(DEVICE, LINKS), Mesh.of(2)).op_time(nodes[0], None, {}, 1)
    moved_s = [num_bytes / DEVICE.memory_bandwidth for num_bytes in (2 * 400, 3 * 400, 3 * 400 * 2 / 3)]
    launch_s = DEVICE.launch_overhead_s
    assert prices.forward_s == pytest.approx(launch_s + moved_s[0])
    assert prices.backward_s == pytest.approx(2 * launch_s + moved_s[1] + launch_s + moved_s[2])


@pytest.mark.parametrize("both", [True, False])
def test_a_product_has_its_rate_forward_and_backward(*, both: bool) -> None:
    """One of 100 x 64 x 8 flops at 1 GFLOP/s, and the gradients of both factors or of one at 0.25 GFLOP/s each."""
    graph = fx.Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    node = graph.call_function(aten.mm.default, (x, w))
    shapes = {x: ((100, 64), both), w: ((64, 8), True), node: ((100, 8), True)}
    for each, (shape, requires_grad) in shapes.items():
        each.meta["specs"] = (TensorSpec(shape, requires_grad=requires_grad),)
    samples = MatmulSample(64, 64, 64, "float32", 1e9, 2.5e8), MatmulSample(640, 640, 640, "float32", 1e9, 1e9)
    device = replace(DEVICE, matmul=samples, memory_bandwidth=1e15, launch_overhead_s=0.0)
    prices = Pricer(MachineProfile(device, LINKS), Mesh.of(2)).op_time(node, None, {}, 1)
    flops = 2 * 100 * 64 * 8
    assert prices.forward_s == pytest.approx(flops / 1e9)
    assert prices.backward_s == pytest.approx((1 + both) * flops / 2.5e8)


@pytest.mark.parametrize("held, casts", [("R", 2), ("Z1", 2), ("Z2", 2 * 4), ("Z3", 3 * 4)])
def test_parameters_are_cast_for_their_uses_and_gradients_back(held: str, casts: int) -> None:
    """Of four micro-batches; at the rate of casts. Vectors are cast together, so that one has no launch of its own."""
    plain = TensorSpec((10, 100), torch.bfloat16, requires_grad=True)
    mixed = replace(plain, master=Master(torch.float32, torch.float32))
    device = replace(DEVICE, streams={"cast": Stream(1e6, 1e6)})
    fast, slow = (Pricer(MachineProfile(d, LINKS), Mesh.of(2)).update_time_s(mixed, (parse_held(held),), 4) for d in (DEVICE, device))
    num_bytes = 1000 * (4 + 2) / (2 if held != "R" else 1)
    assert slow - fast == pytest.approx(casts * num_bytes * (1e-6 - 1e-9))
    launching = Pricer(MachineProfile(replace(DEVICE, launch_overhead_s=1.0), LINKS), Mesh.of(2))
    for shape, launches in (((10, 100), casts), ((1000,), 0)):
        with_cast, without = (replace(spec, shape=shape) for spec in (mixed, plain))
        times = [launching.update_time_s(spec, (parse_held(held),), 4) for spec in (with_cast, without)]
        assert round(times[0] - times[1]) == launches


@pytest.mark.parametrize(
    "held, is_read_again, casts", [("R", True, 1), ("Z1", True, 1), ("Z2", True, 4), ("Z3", True, 8), ("Z3", False, 4)]
)
def test_frozen_parameters_are_cast_for_their_uses_alone(held: str, is_read_again: bool, casts: int) -> None:
    """Of four micro-batches; ZeRO-3 makes the narrower copy again where a backward reads it."""
    spec = TensorSpec((10, 100), torch.bfloat16, master=Master(torch.float32, torch.float32))
    device = replace(DEVICE, streams={"cast": Stream(1e6, 1e6)}, dispatch_s=1.0, update_dispatch_s=9.0)
    pricer = Pricer(MachineProfile(device, LINKS), Mesh.of(2))
    num_bytes = 1000 * (4 + 2) / (2 if held != "R" else 1)
    cast_s = pricer.update_time_s(spec, (parse_held(held),), 4, is_read_again=is_read_again)
    assert cast_s == pytest.approx(casts * (num_bytes / 1e6 + DEVICE.launch_overhead_s))
    assert pricer.update_time_s(replace(spec, master=None), (parse_held(held),), 4) == 0.0
    assert [pricer.update_dispatch_s(replace(spec, shape=shape)) for shape in ((10, 100), (1000,))] == [1.0, 0.0]


@pytest.mark.parametrize("level, is_read_again, times", [(1, True, 1), (2, True, 1), (3, True, 2), (3, False, 1)])
def test_frozen_parameters_are_gathered_for_what_reads_them(level: int, is_read_again: bool, times: int) -> None:
    """A backward reads a weight for the gradient of what it is multiplied with; nothing does without a backward."""
    training, inference = (Pricer(MachineProfile(DEVICE, LINKS), Mesh.of(2), training=is_on) for is_on in (True, False))
    ends = parse_held(f"Z{level}"), Placement.parse("R")
    found = training.parameter_edge(*ends, 1e7, 0, needs_grad=False, is_read_again=is_read_again)
    once = inference.parameter_edge(*ends, 1e7, 0, needs_grad=False, is_read_again=is_read_again)
    assert found is not None
    assert once is not None
    assert once == EdgePrice(0.0, training.collective_s("all_gather", 1e7, 0))
    assert found == once._replace(backward_s=(times - 1) * once.forward_s)


def test_a_part_among_zeros_writes_the_whole() -> None:
    """Zeros of all bytes, and a part that is read and written, as a slice does."""
    pricer, num_bytes = Pricer(MachineProfile(DEVICE, LINKS), Mesh.of(8)), 8e6
    moved = [(pricer.collective_s(kind, num_bytes, 0) - DEVICE.launch_overhead_s) * DEVICE.memory_bandwidth for kind in ("slice", "pad")]
    assert moved == pytest.approx([2 * num_bytes / 8, num_bytes + 2 * num_bytes / 8])


def test_a_plan_says_that_devices_wait_for_their_hosts() -> None:
    """Three launches for each op of the model, updates of its parameters, and both casts of matrices."""
    model, batch = models.gpt2(layers=1, batch=8)
    slow = replace(DEVICE, dispatch_s=1.0, update_dispatch_s=100.0)
    fast, bound = (api.plan(model, 2, batch, plan=Manual(dp=2), profile=MachineProfile(d, LINKS)) for d in (DEVICE, slow))
    assert (fast.prediction.dispatch_s, fast.prediction.is_host_bound) == (0.0, False)
    assert bound.prediction.is_host_bound
    updates = 100 * len(bound.parameters)
    assert bound.prediction.step_time_s == bound.prediction.dispatch_s == 3 * bound.stages[0].num_ops + updates
    mixed = api.plan(model, 2, batch, plan=Manual(dp=2), precision="bf16", profile=MachineProfile(with_bfloat16(slow), LINKS))
    matrices = [p for p in mixed.parameters if len(p.shape) > 1]
    assert 0 < len(matrices) < len(mixed.parameters)
    assert mixed.prediction.dispatch_s - updates - 2 * len(matrices) == 3 * mixed.stages[0].num_ops


def test_where_the_host_is_the_device_an_update_takes_its_launch() -> None:
    spec = TensorSpec((1000,), torch.float32, requires_grad=True)
    alone = replace(DEVICE, update_dispatch_s=100.0)
    plain, launched, ahead = (
        Pricer(MachineProfile(d, LINKS), Mesh.of(2)) for d in (DEVICE, alone, replace(alone, dispatch_s=1.0))
    )
    times = [pricer.update_time_s(spec, (parse_held("R"),)) for pricer in (plain, launched, ahead)]
    assert times == [times[0], times[0] + 100.0, times[0]]
    assert [pricer.update_dispatch_s(spec) for pricer in (plain, launched, ahead)] == [0.0, 0.0, 100.0]


def with_bfloat16(device: DeviceProfile) -> DeviceProfile:
    return replace(device, matmul=(*device.matmul, MatmulSample(64, 64, 64, "bfloat16", 1e9)))


def pipelined(inside: LinkProfile, *, sharing: float = 1.0) -> Plan:
    """Four stages over two nodes of two."""
    model, batch = models.gpt2(layers=4, batch=8)
    machine = MachineProfile(replace(DEVICE, sharing=sharing), (LinkProfile(1e-2, 1e6), inside))
    cluster = Cluster.from_mesh(Mesh(("node", "gpu"), (2, 2)), machine)
    cuts = tuple(f"transformer.h.{layer}" for layer in (1, 2, 3))
    return api.plan(model, cluster, batch, plan=Manual(pp=4, microbatches=4, stages=cuts))


def test_messages_are_priced_on_the_link_that_they_cross() -> None:
    """The second of three boundaries lies between the nodes."""
    sends = [stage.send_forward_s for stage in pipelined(LinkProfile(1e-6, 1e9)).stages]
    assert sends[1] > 100 * sends[0] == 100 * sends[2]
    assert sends[3] == 0


@pytest.mark.slow
def test_messages_take_of_cores_that_are_shared() -> None:
    """What overlap leaves of a message is work; where every rank has its own device, it only waits."""
    free, dear = LinkProfile(1e-3, 1e6, overlap=1.0), LinkProfile(1e-3, 1e6, overlap=0.0)
    assert pipelined(dear).prediction.step_time_s == pipelined(free).prediction.step_time_s
    assert pipelined(dear, sharing=4.0).prediction.step_time_s > 1.02 * pipelined(free, sharing=4.0).prediction.step_time_s


def test_what_a_library_makes_of_a_collective_goes_along() -> None:
    """A reduce-scatter that takes twice the formula between nodes does so too for groups with several ranks of a node."""
    outer = LinkProfile(1e-9, 1e9)
    sizes = (1e6, 1e8)
    slow = {
        kind: tuple((size, times * float(collective_time_s(kind, size, 2, outer))) for size in sizes)
        for kind, times in (("reduce_scatter", 2.0), ("all_gather", 1.0))
    }
    measured = MachineProfile(DEVICE, (replace(outer, measured=slow, group_size=2), LinkProfile(1e-9, 4e9)))
    (link,) = Cluster.from_mesh(Mesh(("node", "gpu"), (2, 2)), measured).with_mesh(Mesh(("dp",), (4,))).profile.links
    assert link.lanes == 2
    for kind, times in (("reduce_scatter", 2.0), ("all_gather", 1.0)):
        formula = float(collective_time_s(kind, 1e7, 4, replace(outer, lanes=2.0)))
        assert float(collective_time_s(kind, 1e7, 4, link)) == pytest.approx(times * formula, rel=1e-3)


def test_small_gradients_share_a_collective() -> None:
    """Of half of what is small a bucket holds eight: each pays an eighth of it, and not a latency of its own."""
    latent = LinkProfile(1.0, 1e9)
    pricer = Pricer(MachineProfile(DEVICE, (latent,)), Mesh.of(2))
    reduced = (parse_held("R"), Placement.parse("R*"))

    def backward_s(num_bytes: float) -> float:
        price = pricer.parameter_edge(*reduced, num_bytes, 0, needs_grad=True)
        assert price is not None
        return price.backward_s

    assert backward_s(SMALL_NUM_BYTES / 2) == pytest.approx(float(collective_time_s("all_reduce", BUCKET_NUM_BYTES, 2, latent)) / 8)
    assert backward_s(SMALL_NUM_BYTES) == pytest.approx(float(collective_time_s("all_reduce", SMALL_NUM_BYTES, 2, latent)))


@pytest.mark.parametrize("is_waited", [False, True])
def test_vectors_share_gathers_and_reductions(is_waited: bool) -> None:
    """Each pays its part of a bucket, forward, again in the backward, and for its gradient, for which micro-batches wait in a crowd."""
    latent = LinkProfile(1.0, 1e9, crowded_s=8.0)
    pricer = Pricer(MachineProfile(DEVICE, (latent,)), Mesh.of(2).with_time(4) if is_waited else Mesh.of(2))

    def price(num_bytes: float, *, is_vector: bool) -> tuple[float, float]:
        wanted = Placement.parse("R*")
        found = pricer.parameter_edge(parse_held("Z3"), wanted, num_bytes, 0, needs_grad=True, is_vector=is_vector)
        assert found is not None
        return found.forward_s, found.backward_s

    gather_s, reduce_s = (
        [float(collective_time_s(kind, num_bytes, 2, latent)) for num_bytes in (BUCKET_NUM_BYTES, SMALL_NUM_BYTES / 2, SMALL_NUM_BYTES)]
        for kind in ("all_gather", "reduce_scatter")
    )
    crowd_s = 8.0 * is_waited
    together_s = gather_s[0] / 8, (gather_s[0] + reduce_s[0] + crowd_s) / 8
    assert price(SMALL_NUM_BYTES / 2, is_vector=True) == pytest.approx(together_s)
    assert price(SMALL_NUM_BYTES / 2, is_vector=False) == pytest.approx((gather_s[1], gather_s[1] + reduce_s[1] + crowd_s))
    assert price(SMALL_NUM_BYTES, is_vector=True) == pytest.approx((gather_s[2], gather_s[2] + reduce_s[2] + crowd_s))


def test_what_is_waited_for_takes_longer_in_a_crowd() -> None:
    """All-reduces of activations and gathers of their gradients do; gradients of parameters are waited for at the end of the step."""
    pricers = [Pricer(MachineProfile(DEVICE, (LinkProfile(1e-6, 1e9, crowded_s=s),)), Mesh.of(2)) for s in (0.0, 1e-2)]
    partial, whole, split = Placement.parse("P"), Placement.parse("R"), Placement.parse("S0")
    for source, target, times in ((partial, whole, 1), (partial, split, 2), (whole, whole, 0), (whole, split, 1)):
        free, crowded = (pricer.edge(source, target, 1e6, 0, needs_grad=True) for pricer in pricers)
        assert free is not None
        assert crowded is not None
        assert crowded.blocking_s - free.blocking_s == pytest.approx(times * 1e-2)
    free, crowded = (pricer.parameter_edge(whole, Placement.parse("R*"), 1e7, 0, needs_grad=True) for pricer in pricers)
    assert free == crowded
    in_parts = [replace(pricer, mesh=pricer.mesh.with_time(4)) for pricer in pricers]
    for level, many, times in ((1, in_parts, 0), (2, in_parts, 1), (3, in_parts, 1), (2, pricers, 0)):  # reductions for every micro-batch
        both = [pricer.parameter_edge(parse_held(f"Z{level}"), Placement.parse("R*"), 1e7, 0, needs_grad=True) for pricer in many]
        assert sum(both[1] or ()) - sum(both[0] or ()) == pytest.approx(times * 1e-2)


def test_products_add_up_for_a_third_of_the_bytes() -> None:
    pricer, spec = Pricer(MachineProfile(DEVICE, LINKS), Mesh.of(2)), TensorSpec((1000, 1000), requires_grad=True)
    once_s, by_add_s = (pricer.update_time_s(spec, (parse_held("R"),), count) for count in (1, 5))
    by_product_s = pricer.update_time_s(spec, (parse_held("R"),), 5, adds_itself=True)
    assert by_add_s - once_s == pytest.approx(4 * 3 * 4e6 / DEVICE.memory_bandwidth)
    assert by_product_s - once_s == pytest.approx((by_add_s - once_s) / 3)


OPTIMIZERS: list[tuple[str, type[torch.optim.Optimizer], dict[str, Any]]] = [
    ("adamw", torch.optim.AdamW, {}),
    ("adam", torch.optim.Adam, {}),
    ("sgd", torch.optim.SGD, {}),
    ("sgd_momentum", torch.optim.SGD, {"momentum": 0.9}),
    ("adamw_amsgrad", torch.optim.AdamW, {"amsgrad": True}),
    ("adam_amsgrad", torch.optim.Adam, {"amsgrad": True}),
    ("nadam", torch.optim.NAdam, {}),
    ("radam", torch.optim.RAdam, {}),
    ("adamax", torch.optim.Adamax, {}),
    ("adadelta", torch.optim.Adadelta, {}),
    ("adagrad", torch.optim.Adagrad, {}),
    ("rmsprop", torch.optim.RMSprop, {}),
    ("rmsprop_momentum", torch.optim.RMSprop, {"momentum": 0.9}),
    ("rmsprop_centered", torch.optim.RMSprop, {"centered": True}),
    ("asgd", torch.optim.ASGD, {}),
]
FUSED = [("adamw", torch.optim.AdamW), ("adam", torch.optim.Adam), ("adagrad", torch.optim.Adagrad)]
GPU = replace(DEVICE, host_bytes_per_s=1e9)
SETTLED_STEPS = 8
"""The first makes the state, and RAdam goes without its second moment for five."""


class Touched(TorchDispatchMode):
    """Elements that ops read and write, of tensors that are larger than one element: of all, and of ``state``; and the most elements of
    tensors that there are at one time beside those that were there."""

    num_elements = num_of_state = alive = most_alive = 0

    def __init__(self, state: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.state = {x.data_ptr() for x in state}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        own = zip(args, func._schema.arguments, strict=False)  # a fused op may write gradients too, but only to scale them
        in_place = [arg for arg, said in own if said.alias_info is not None and said.alias_info.is_write and said.name != "grads"]
        written = in_place or [result]
        read = {id(leaf): leaf for leaf in tree_leaves((args, kwargs))}.values()
        tensors = _larger((written, *read))
        self.num_elements += sum(tensor.numel() for tensor in tensors)
        self.num_of_state += sum(tensor.numel() for tensor in tensors if tensor.data_ptr() in self.state)
        there = {tensor.data_ptr() for tensor in _larger(list(read))}
        for made in _larger(result):
            if made.data_ptr() not in there:
                self.alive += made.numel()
                self.most_alive = max(self.most_alive, self.alive)
                weakref.finalize(made, self._free, made.numel())
        return result

    def _free(self, num_elements: int) -> None:
        self.alive -= num_elements


def _larger(tree: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor) and leaf.numel() > 1]


@pytest.mark.parametrize(
    "name, kind, options",
    [
        *((name, kind, {**options, "foreach": foreach}) for name, kind, options in OPTIMIZERS for foreach in (False, True)),
        *((f"{name}_fused", kind, {"fused": True}) for name, kind in FUSED),
    ],
)
def test_updates_go_through_memory_as_often_as_those_of_torch(
    name: str, kind: type[torch.optim.Optimizer], options: dict[str, Any]
) -> None:
    """So do its state, and what it takes for itself: that of the loop is predicted, ``foreach`` takes it for all parameters at a time."""
    weight = torch.nn.Parameter(torch.ones(100))
    optimizer = kind([weight], **options)
    for _ in range(SETTLED_STEPS):
        weight.grad = torch.ones(100)
        state = _larger([*optimizer.state[weight].values()])
        with Touched(state) as touched:
            optimizer.step()
    assert 4 * sum(x.numel() for x in state) == 100 * OPTIMIZER_STATE_BYTES[name]
    of_parameter, of_state = update_passes(name, 1, by_foreach=options.get("foreach", False))
    assert touched.num_of_state == pytest.approx(100 * of_state * OPTIMIZER_STATE_BYTES[name] / 4)
    assert touched.num_elements - touched.num_of_state == 100 * of_parameter
    copies = (FOREACH_COPIES if options.get("foreach") else UPDATE_COPIES).get(name, 0)
    assert touched.most_alive == 100 * copies
    device = GPU if options.get("foreach") else DEVICE
    pricer, spec = Pricer(MachineProfile(device, LINKS), Mesh.of(2), name), TensorSpec((100,), requires_grad=True)
    busy_s = pricer.update_time_s(spec, (parse_held("R"),)) - DEVICE.launch_overhead_s
    assert busy_s == pytest.approx(4 * touched.num_elements / DEVICE.memory_bandwidth)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize(
    "name, kind, options",
    [*OPTIMIZERS, *((f"{name}_fused", kind, {"fused": True}) for name, kind in FUSED), ("adafactor", torch.optim.Adafactor, {})],
)
def test_state_has_the_dtype_of_its_parameter(
    name: str, kind: type[torch.optim.Optimizer], options: dict[str, Any], dtype: torch.dtype
) -> None:
    """As torch has it, for a matrix and a vector."""
    for shape in ((10, 10), (100,)):
        weight = torch.nn.Parameter(torch.ones(shape, dtype=dtype))
        optimizer = kind([weight], **options)
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        pricer = Pricer(MachineProfile(DEVICE, LINKS), Mesh.of(2), name)
        kept = pricer.parameter_bytes(TensorSpec(shape, dtype, requires_grad=True), (parse_held("R"),))
        assert kept.optimizer == sum(x.nbytes for x in _larger([*optimizer.state[weight].values()]))


def test_moments_beside_a_float32_copy_are_as_wide() -> None:
    """What is in float32 itself has no copy."""
    pricer = Pricer(MachineProfile(DEVICE, LINKS), Mesh.of(2), "adamw_master")
    for dtype, num_bytes in ((torch.bfloat16, 1200), (torch.float32, 800)):
        assert pricer.parameter_bytes(TensorSpec((100,), dtype, requires_grad=True), (parse_held("R"),)).optimizer == num_bytes


@pytest.mark.parametrize("held, parts", [("R", 1), ("Z1", 2), ("Z2", 2), ("Z3", 2)])
def test_updates_beside_a_float32_copy_go_through_30_bytes(held: str, parts: int) -> None:
    """Of each element, also where ZeRO-1 and -2 store the copy alone, which the update rounds into what is gathered."""
    pricer = Pricer(MachineProfile(DEVICE, LINKS), Mesh.of(2), "adamw_master")
    busy_s = pricer.update_time_s(TensorSpec((100,), torch.bfloat16, requires_grad=True), (parse_held(held),)) - DEVICE.launch_overhead_s
    assert busy_s == pytest.approx(30 * 100 / parts / DEVICE.memory_bandwidth)


def test_an_optimizer_without_a_price_is_refused() -> None:
    with pytest.raises(PlanError, match=r"optimizer 'muon' has no price here; give the one of adamw, .*radam, .*rmsprop_momentum"):
        check_optimizer("muon")


@pytest.mark.parametrize("shape", [(60, 60), (60, 20), (100,)])
def test_adafactor_keeps_rows_and_columns(shape: tuple[int, ...]) -> None:
    """Between 10 and 9 passes of its rows and columns are priced as 9.5, which is right where it has as many of both."""
    weight = torch.nn.Parameter(torch.ones(shape))
    optimizer = torch.optim.Adafactor([weight])
    for _ in range(2):
        weight.grad = torch.ones(shape)
        with Touched() as touched:
            optimizer.step()
    pricer, spec = Pricer(MachineProfile(DEVICE, LINKS), Mesh.of(2), "adafactor"), TensorSpec(shape, requires_grad=True)
    state = [x for x in optimizer.state[weight].values() if x.dim()]
    for held in ("R", "Z3"):
        kept = pricer.parameter_bytes(spec, (parse_held(held),)).optimizer
        shares = 2 if held == "Z3" and len(shape) == 1 else 1  # rows and columns are whole on every rank
        assert kept == 4 * sum(x.numel() for x in state) / shares
    busy_s = pricer.update_time_s(spec, (parse_held("R"),)) - DEVICE.launch_overhead_s
    apart = 4 * 0.5 * abs(shape[0] - shape[-1]) if len(shape) > 1 else 0
    assert busy_s == pytest.approx(4 * touched.num_elements / DEVICE.memory_bandwidth, abs=1e-9 + apart / DEVICE.memory_bandwidth)


def test_adafactor_gathers_what_is_sharded() -> None:
    """Parameter and gradient, over every axis that shards them; every rank then updates all of it."""
    mesh, spec = Mesh.of((2, 2)), TensorSpec((100, 100), requires_grad=True)
    pricer = Pricer(MachineProfile(DEVICE, LINKS * 2), mesh, "adafactor")
    whole, sharded = (tuple(map(parse_held, held)) for held in (("R", "R"), ("Z3", "S0")))
    gathers_s = pricer.waited_s("all_gather", 2e4, 0) + pricer.waited_s("all_gather", 4e4, 1)
    assert pricer.update_time_s(spec, sharded) - pricer.update_time_s(spec, whole) == pytest.approx(2 * gathers_s)
    assert pricer.update_bytes(spec, whole) == (spec.num_bytes, 0)
    assert pricer.update_bytes(spec, sharded) == (WHOLE_COPIES * spec.num_bytes, 0)


@pytest.mark.parametrize(
    "billions, level, gigabytes",
    [(7, 0, 112), (7, 1, 28 + 10.5), (7, 3, 14), (10, 0, 160), (10, 1, 55), (10, 2, 37.5), (10, 3, 20), (12, 0, 192), (12, 3, 24)],
)
def test_mixed_precision_adam_on_eight_ranks(billions: int, level: int, gigabytes: float) -> None:
    """Rajbhandari et al. 2020, figure 1: 2 bytes of parameter, 2 of gradient, 12 of optimizer state for each parameter."""
    pricer = Pricer(MachineProfile(DEVICE, LINKS), Mesh.of(8), optimizer="adamw_master")
    spec = TensorSpec((billions * 10**9,), torch.bfloat16, requires_grad=True)
    found = pricer.parameter_bytes(spec, (parse_held(f"Z{level}" if level else "R"),))
    assert found.total == pytest.approx(gigabytes * 1e9)
    assert found.optimizer == pytest.approx(12e9 * billions / (8 if level else 1))
