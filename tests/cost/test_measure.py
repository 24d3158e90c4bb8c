"""Measuring, on one CPU process with small sizes; no test depends on how fast this machine is."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autopar.cost import measure as measuring
from autopar.cost import measure_device as measuring_device
from autopar.cost import measure_dispatch as measuring_dispatch
from autopar.cost.collectives import collective_time_s
from autopar.cost.device import AttentionSample, DeviceProfile, MatmulSample, Stream
from autopar.cost.families import STREAMS
from autopar.cost.machine import KINDS, LinkProfile, MachineProfile
from autopar.cost.measure import Sharing, cache_path, fit_link, measure, measure_links, read_cached
from autopar.cost.measure_device import device_name, measure_device
from autopar.cost.measure_dispatch import measure_dispatch, measure_launch, measure_update
from autopar.cost.timing import Timing
from autopar.errors import PlanError
from autopar.mesh import Mesh
from autopar.ops import onednn
from autopar.report import silent

pytestmark = pytest.mark.slow


@pytest.fixture
def one_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DeviceMesh]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert not dist.is_initialized()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    dist.barrier()
    dist.destroy_process_group()


def test_measure_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring_device, "STREAM_SHAPE", {"cpu": (8, 8)})
    lines: list[str] = []
    profile = measure_device(torch.device("cpu"), report=lines.append, cubes=(8, 16), lengths=(8,), copy_bytes=2**16)
    cubes = [(8, 8, 8), (16, 16, 16)]
    skinny = [tuple(s if i == side else 16 for i in range(3)) for s in (4, 1) for side in range(3)]
    assert [(s.m, s.n, s.k) for s in profile.matmul if s.dtype == "float32"] == cubes + skinny
    assert [(s.length, s.dtype) for s in profile.attention] == [(8, "float32"), (8, "bfloat16")]
    assert tuple(profile.streams) == STREAMS
    assert min(rate for rates in profile.streams.values() for rate in rates) > 0
    assert {s.dtype for s in profile.matmul} == {"float32", "bfloat16", "float16", "float64"}
    assert profile.memory_bandwidth > 0
    assert profile.launch_overhead_s > 0
    assert torch.__version__ in profile.source
    assert [line.split()[0] for line in lines] == [
        *("launch", "copy:"),
        *["matmul"] * 32,
        *["many"] * 6,
        *["attention"] * 2,
        *(f"{name}:" for name in STREAMS),
        "launch:",
    ]


def test_large_products_are_measured_as_a_layer_runs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and one of two gradients by oneDNN, the other added to that of the weight; small ones by one product, for both ways."""
    plain, timed = onednn.linear, []
    times = {"oneDNN": Timing(3e-3, 0.1), "aten": Timing(6e-3, 0.2)}

    def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        timed.append("oneDNN")
        return plain(x, weight)

    def time_calls(run: Callable[[], object], device: torch.device) -> Timing:
        before = len(timed)
        run()
        if len(timed) == before:
            timed.append("aten")
        return times[timed[-1]]

    monkeypatch.setattr(onednn, "linear", linear)
    monkeypatch.setattr(measuring_device, "time_calls", time_calls)
    large, small = (
        measuring_device._matmul(torch.device("cpu"), 0.0, sides, torch.float32, silent) for sides in ((256, 512, 256), (64, 64, 64))
    )
    assert large.rates == pytest.approx((large.flops / 3e-3, large.flops / 4.5e-3))
    assert small.flops_per_s == pytest.approx(small.flops / 6e-3)
    assert small.backward_flops_per_s is None
    assert timed == ["oneDNN", "aten", "aten"]


def test_measure_device_refuses_other_devices() -> None:
    with pytest.raises(PlanError, match="cpu and cuda devices, got meta"):
        measure_device(torch.device("meta"))


def test_fit_finds_latency_and_bandwidth() -> None:
    link = LinkProfile(alpha_s=2e-5, bandwidth=3e9)
    measured = {
        kind: [(size, float(collective_time_s(kind, size, 2, link))) for size in (1e3, 1e6, 1e8)] for kind in KINDS
    }
    assert fit_link(measured, 2) == pytest.approx((2e-5, 3e9))


def test_fit_is_never_negative() -> None:
    assert fit_link({"all_gather": [(1e3, 1e-6), (1e6, 2e-3)]}, 2)[0] >= 0
    alpha_s, bandwidth = fit_link({"all_gather": [(1e3, 2e-6), (1e6, 1e-6)]}, 2)
    assert alpha_s > 0
    assert bandwidth > 0


def test_bursts_do_not_tell_the_bandwidth() -> None:
    """A shaper lets half a megabyte pass at ten times its rate."""
    link = LinkProfile(alpha_s=1e-4, bandwidth=1e8)
    measured = {
        kind: [(size, float(collective_time_s(kind, size, 2, link)) / (10 if 1e4 < size < 1e6 else 1)) for size in (1e3, 1e5, 1e7, 1e8)]
        for kind in KINDS
    }
    assert fit_link(measured, 2) == pytest.approx((1e-4, 1e8))


def test_measure_links_of_one_rank(one_rank: DeviceMesh) -> None:
    assert [link.measured for link in measure_links(one_rank)] == [{}, {}]


def once(run: Callable[[], object], device: torch.device, **settings: int) -> Timing:
    """Instead of a time: what is timed can be run."""
    run()
    return Timing(1e-3, 0.1)


def test_measure_dispatch(one_rank: DeviceMesh) -> None:
    """What it counts does not depend on sizes: 31 ops and views of each block, and the sum."""
    lines: list[str] = []
    op_s = measure_dispatch(torch.device("cpu"), lines.append)
    assert 0 < op_s < measure_update(one_rank, torch.device("cpu"), lines.append)
    assert "249 forward" in lines[0]


def test_what_a_host_launches_is_a_share_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backward launches two ops for each of its forward."""
    monkeypatch.setattr(measuring_dispatch, "time_calls", once)
    assert measure_dispatch(torch.device("cpu"), silent) == pytest.approx(1e-3 / (3 * 249))


def test_what_a_host_launches_is_launched_as_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """By functions of torch: none of the ops that these come to is called as such."""
    timed: list[Mapping[str, Any]] = []

    def keep(run: Callable[[], object], device: torch.device, *, calls: int, repeats: int) -> Timing:
        timed.append(inspect.getclosurevars(run).nonlocals)
        return once(run, device, calls=calls, repeats=repeats)

    monkeypatch.setattr(measuring_dispatch, "time_calls", keep)
    measure_dispatch(torch.device("cpu"), silent)
    for module in (timed[0]["step"].forward, timed[0]["step"].backward):
        assert "torch.mul(" in module.code
        assert "aten.mul.Tensor" not in module.code


def test_what_a_host_launches_backward_is_called_by_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[int] = []
    found = measuring_dispatch._Step.of

    def backward(*_: object) -> None:
        called.append(torch._C._current_graph_task_id())

    def of(device: torch.device, size: measuring_dispatch.Size, dtype: torch.dtype) -> Any:
        return replace(found(device, size, dtype), backward=cast(Any, backward))

    monkeypatch.setattr(measuring_dispatch._Step, "of", of)
    monkeypatch.setattr(measuring_dispatch, "time_calls", once)
    measure_dispatch(torch.device("cpu"), silent)
    assert len(called) == 1
    assert called[0] >= 0


def test_a_launch_on_cpus_is_a_share_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum, with its backward of two ops, and 68 launches of each block."""
    monkeypatch.setattr(measuring_dispatch, "time_calls", once)
    lines: list[str] = []
    assert measure_launch(lines.append) == pytest.approx(1e-3 / (3 + 2 * 68))
    assert lines == ["launch: 7.2 us an op, 139 in a model; 1000.0 us, spread 10%"]


def test_measure_is_cached(one_rank: DeviceMesh, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(measuring_device, "CPU_CUBES", (8,))
    monkeypatch.setattr(measuring_device, "LENGTHS", {"cpu": (8,)})
    monkeypatch.setattr(measuring_device, "STREAM_SHAPE", {"cpu": (8, 8)})
    monkeypatch.setattr(measuring_device, "time_calls", once)
    lines: list[str] = []
    random = torch.get_rng_state()
    profile = measure(one_rank, report=lines.append)
    assert profile.device.update_dispatch_s > profile.device.launch_overhead_s > 0
    assert torch.equal(torch.get_rng_state(), random)
    path = cache_path((1, 1), device_name(torch.device("cpu")), "gloo")
    assert lines[-1] == f"wrote {path}"
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    assert measure(one_rank, report=lines.append) == profile
    assert lines[-1] == f"read {path}"
    assert read_cached(Mesh.of((1, 1)), torch.device("cpu"), torch.get_num_threads()) == profile
    assert read_cached(Mesh.of((1, 1)), torch.device("cpu"), torch.get_num_threads() + 1) is None

    def told() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.name.startswith("autopar")]

    assert not told()
    measure(one_rank, refresh=True)
    (line,) = told()
    assert line.endswith(f"kept in {path}, and read from there next time")
    measure(one_rank)
    assert told() == [line], "what is read takes no time"


def test_a_cache_that_cannot_be_used_stops_nothing(one_rank: DeviceMesh, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A file of it that is cut short is measured anew, and where none can be written that is said."""
    monkeypatch.setattr(measuring_device, "CPU_CUBES", (8,))
    monkeypatch.setattr(measuring_device, "LENGTHS", {"cpu": (8,)})
    monkeypatch.setattr(measuring_device, "STREAM_SHAPE", {"cpu": (8, 8)})
    monkeypatch.setattr(measuring_device, "time_calls", once)
    path = cache_path((1, 1), device_name(torch.device("cpu")), "gloo")
    path.parent.mkdir(parents=True)
    path.write_text('{"device": ')
    assert read_cached(Mesh.of((1, 1)), torch.device("cpu"), torch.get_num_threads()) is None
    lines: list[str] = []
    profile = measure(one_rank, report=lines.append)
    assert lines[0].startswith(f"measuring anew: {path} is not JSON")
    assert MachineProfile.load(path) == profile
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="the profile cannot be kept .* give XDG_CACHE_HOME a folder"):
        measure(one_rank)


def test_what_ranks_leave_each_other_is_measured_before_and_after_the_links(one_rank: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of 2**26 bytes takes 1 ms alone, and in the mean 1.25 times as long. Whether cores are shared is known in between."""
    monkeypatch.setattr(measuring_device, "CPU_CUBES", (8,))
    monkeypatch.setattr(measuring_device, "time_calls", once)
    found, are_shared = [Sharing(1.5, 1.5), Sharing(1.0, 1.0)], []
    monkeypatch.setattr(measuring, "measure_sharing", lambda *_, **__: found.pop(0))

    def links(*_: object, is_shared: bool, **__: object) -> tuple[LinkProfile, ...]:
        are_shared.append((is_shared, len(found)))
        return ()

    monkeypatch.setattr(measuring, "measure_links", links)
    device = measure(one_rank).device
    assert device.memory_bandwidth == pytest.approx(2 * 2**26 / 1.25e-3)
    assert device.sharing == 1.25
    assert are_shared == [(True, 1)]


def test_an_update_is_a_share_of_those_of_many_parameters(one_rank: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring_dispatch, "time_calls", once)
    lines: list[str] = []
    assert measure_update(one_rank, torch.device("cpu"), lines.append) == pytest.approx(1e-3 / 64)
    assert lines == ["update of a parameter: 15.6 us; of 64 1000.0 us, spread 10%"]


def test_products_are_sampled_on_both_sides_of_where_they_get_faster() -> None:
    below = max(size for size in measuring_device.CPU_CUBES if 2 * size**3 < onednn.LEAST_FLOPS)
    above = min(size for size in measuring_device.CPU_CUBES if 2 * size**3 >= onednn.LEAST_FLOPS)
    assert above**3 < 1.2 * below**3


def test_what_the_caller_has_set_does_not_count() -> None:
    """Neither its dtype nor its modes nor its device; random numbers and the dtype are then as they were."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        state = torch.get_rng_state()
        with torch.inference_mode():
            with measuring._as_ever(torch.device("cpu")):
                assert (torch.rand(1).dtype, torch.is_grad_enabled(), torch.is_inference_mode_enabled()) == (torch.float32, True, False)
            assert torch.equal(torch.get_rng_state(), state)
        assert torch.get_default_dtype() == torch.bfloat16
        torch.set_default_dtype(torch.float32)
        with torch.device("meta"):
            assert measure_launch(silent) > 0
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_disturbed_measurement_counts_as_the_next_larger_one() -> None:
    assert measuring._rising([(1, 5.0), (2, 1.0), (3, 2.0), (4, 9.0), (5, 4.0)]) == ((1, 1.0), (2, 1.0), (3, 2.0), (4, 4.0), (5, 4.0))


@pytest.mark.parametrize("alone_s, turns", [(0.01, 15), (0.1, 3)])
def test_overlap_is_what_is_gained_in_the_median(alone_s: float, turns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """An all-reduce and as many matmuls, which take 1.5 or, a time more often, 1.75 times as long at once."""
    gained = [0.5] * (turns // 2) + [0.25] * (turns - turns // 2)
    times = [seconds for gain in gained for seconds in (alone_s, 1e-3, alone_s, (2 - gain) * alone_s)]
    monkeypatch.setattr(dist, "barrier", lambda: None)
    monkeypatch.setattr(measuring, "_from_first_rank", lambda value: value)
    monkeypatch.setattr(measuring, "time_calls", lambda *_, **__: Timing(times.pop(0), 0.0))
    found = measuring._measure_overlap(cast(Any, SimpleNamespace(group_name="g")), torch.device("cpu"), silent)
    assert found == pytest.approx(0.25)
    assert not times


def test_what_would_take_long_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cube twice as long takes eight times as long."""

    def measured(device: torch.device, launch_s: float, sides: tuple[int, int, int], *_: object) -> MatmulSample:
        return MatmulSample(*sides, "float32", 2e6)

    monkeypatch.setattr(measuring_device, "_matmul", measured)
    monkeypatch.setattr(measuring_device, "DTYPES", (torch.float32,))
    monkeypatch.setattr(measuring_device, "SKINNY", ())
    lines: list[str] = []
    found = list(measuring_device._matmuls(torch.device("cpu"), 0.0, (10, 40, 50), lines.append))
    assert [sample.m for sample in found] == [10, 40]
    assert lines == ["matmul 50 torch.float32: not measured, it would take 0.12 s"]


def test_the_crowd_is_what_an_all_reduce_takes_more_amid_computation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone 1 ms, matmuls 100 ms, with ten all-reduces between them 140 ms: 4 ms each, 3 of them the crowd. The median of three turns."""
    times = [seconds for both in (0.14, 0.5, 0.12) for seconds in (0.001, 0.1, both)]
    monkeypatch.setattr(dist, "barrier", lambda: None)
    monkeypatch.setattr(measuring, "time_calls", lambda *_, **__: Timing(times.pop(0), 0.0))
    found = measuring._measure_crowd(cast(Any, SimpleNamespace(group_name="g")), torch.device("cpu"), silent)
    assert found == pytest.approx(0.003)


def test_many_products_are_timed_in_one_op(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each factor has 2**20 elements; 1 ms an op."""
    monkeypatch.setattr(measuring_device, "time_calls", once)
    monkeypatch.setattr(measuring_device, "CPU_BATCHED", (64, 128))
    lines: list[str] = []
    found = list(measuring_device._batched(torch.device("cpu"), 0.0, lines.append))
    assert [(s.m, s.n, s.k, s.dtype) for s in found] == [(n, n, n, name) for name in ("float32", "bfloat16") for n in (64, 128)]
    assert [s.rates for s in found[:2]] == [pytest.approx((rate, rate)) for rate in (2 * 2**20 * 64 / 1e-3, 2 * 2**20 * 128 / 1e-3)]
    assert lines[0] == "many matmuls 64 x 64 x 64 float32: 0.1342 TFLOP/s (1000.0 us, spread 10%)"


@pytest.mark.parametrize("world, alone", [(4, 1.5), (2, 1.0)])
def test_a_link_has_what_a_group_gains_alone_if_there_are_others(world: int, alone: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """All groups begin each measurement together."""
    begun: list[str] = []
    monkeypatch.setattr(dist, "barrier", lambda: begun.append("all"))
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: world if group is None else 2)
    monkeypatch.setattr(measuring, "_shift", lambda *_: None)
    monkeypatch.setattr(measuring, "_collective", lambda *_: None)
    monkeypatch.setattr(measuring, "_backend", lambda *_: "gloo")
    monkeypatch.setattr(measuring, "_measure_alone", lambda *_: 1.5)
    monkeypatch.setattr(measuring, "_measure_overlap", lambda *_: 0.5)

    def timed(*_: object, **__: object) -> Timing:
        begun.append("timed")
        return Timing(1e-3, 0.0)

    monkeypatch.setattr(measuring, "time_calls", timed)
    link = measuring._measure_axis(cast(Any, "a group"), torch.device("cpu"), (8, 16), silent, is_shared=False)
    assert (link.alone, link.overlap, link.group_size) == (alone, 0.5, 2)
    assert begun == ["all", "timed"] * 2 * len(KINDS)


@pytest.mark.parametrize("alone_s, alone", [(0.4, 1.5), (0.1, 2.0), (0.7, 1.0)])
def test_what_a_group_gains_by_being_alone(alone_s: float, alone: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages take 0.6 s with those of the other of two groups; the median of three turns, no more than both had, no less than now."""
    times = [seconds for alone in (alone_s, 0.05, 9.0) for seconds in (0.6, alone)]
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 4 if group is None else 2)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0, 2])
    monkeypatch.setattr(measuring, "_shift", lambda *_: None)
    monkeypatch.setattr(measuring, "time_calls", lambda *_, **__: Timing(times.pop(0), 0.0))
    assert measuring._measure_alone(cast(Any, "a group"), torch.device("cpu"), silent) == pytest.approx(alone)
    assert not times


@pytest.mark.parametrize("ranks, sent", [([0, 2], 3), ([1, 3], 0)])
def test_one_group_sends_alone_and_all_wait_for_it(ranks: list[int], sent: int, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(dist, "barrier", lambda: done.append("all"))
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 4 if group is None else 2)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: ranks)
    monkeypatch.setattr(measuring, "_shift", lambda *_: lambda: done.append("sent"))
    monkeypatch.setattr(measuring, "time_calls", once)
    measuring._measure_alone(cast(Any, "a group"), torch.device("cpu"), silent)
    assert done == [*["sent"] * 3, "all", *["sent"] * sent, "all"] * measuring.SHARING_TURNS


def test_what_memory_bounds_is_shared_as_memory_is() -> None:
    """Memory has 10 bytes/s. What takes longer than its bytes computes the rest of the time; what caches hold is shared like a copy."""
    streams = {"tanh": Stream(2.0, 8.0), "embedding": Stream(10.0, 20.0)}
    matmul, attention = (MatmulSample(1, 1, 1, "float32", 6.0, 5.0),), (AttentionSample(1, "float32", 6.0, 4.0),)
    rates = {"attention": attention, "streams": streams, "batched": (MatmulSample(2, 2, 2, "float32", 8.0),)}
    alone = DeviceProfile("alone", 1, matmul, 10.0, 1e-6, "a test", update_dispatch_s=1e-4, **rates)  # type: ignore[arg-type]
    found = measuring._shared(alone, Sharing(compute=2.0, memory=3.0))
    assert (found.matmul[0].rates, found.attention[0][2:], found.batched[0].rates) == ((3.0, 2.5), (3.0, 2.0), (4.0, 4.0))
    assert found.memory_bandwidth == pytest.approx(10 / 3)
    shared = [rate for name in streams for rate in found.streams[name]]
    assert shared == pytest.approx([1.0, 10 / 3, 10 / 3, 20 / 3])
    assert (found.launch_overhead_s, found.update_dispatch_s, found.sharing) == (2e-6, 2e-4, 2.0)
    assert measuring._shared(alone, Sharing()) == alone


@pytest.mark.parametrize(
    "compute, memory, sharing",
    [(2.0, 2.5, (2.0, 2.5)), (1.1, 1.3, (1.0, 1.3)), (2.0, 1.9, (2.0, 2.0)), (1.0, 1.04, (1.0, 1.0))],
)
def test_sharing_is_what_all_at_once_take_over_one_alone(
    compute: float, memory: float, sharing: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three turns each, whose median counts."""
    times = [seconds for ratio in (compute, memory) for seconds in (1.0, ratio, 1.0, 9.0, 2.0, 0.2)]
    monkeypatch.setattr(dist, "barrier", lambda: None)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(measuring, "_from_first_rank", lambda value: value)
    monkeypatch.setattr(measuring, "time_calls", lambda *_, **__: Timing(times.pop(0), 0.0))
    assert measuring.measure_sharing(torch.device("cpu")) == sharing
