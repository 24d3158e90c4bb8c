"""Measures one device: matmuls square and skinny, attention, ops that stream, a copy, and the launch of an op.

Inputs are random (zeros multiply faster). Weights come from memory, as in a model, where every layer has its own: each call takes the next
of so many right factors that they fill `COLD_BYTES`.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import cycle

import torch
import torch.nn.functional as F

from autopar.cost.compute import evaluate, op_cost
from autopar.cost.device import AttentionSample, DeviceProfile, MatmulSample, Stream
from autopar.cost.families import STREAMS
from autopar.cost.measure_dispatch import measure_launch
from autopar.cost.timing import Timing, time_calls
from autopar.errors import PlanError
from autopar.ops import onednn
from autopar.report import Report, silent
from autopar.rules.registry import Call, TensorSpec
from autopar.units import number_text

aten = torch.ops.aten

CPU_CUBES = (64, 128, 200, 208, 512, 1024)
"""Two of them next to `onednn.LEAST_FLOPS`, from where on products are faster."""
CPU_BATCHED = (64, 128, 256)
"""Cubes of which many are multiplied in one op, which CPUs do one by one. On GPUs they are priced as one of all their flops."""
CUDA_CUBES = (256, 512, 1024, 2048, 4096, 8192)
SKINNY = (4, 16, 64)
"""How many times shorter than the others one side of a skinny matmul is."""
WIDEST_SKINNY = {"cpu": 1024, "cuda": 8192}
"""The others are as long as the largest cube, but no longer than this."""
UNALIGNED = {"cpu": 0, "cuda": 4096}
"""Cubes up to this are measured unaligned too, one longer; those of the larger ones are as fast."""
LENGTHS = {"cpu": (64, 256, 1024), "cuda": (256, 1024, 4096, 16384)}
"""Queries and keys of attention."""
BATCHED_NUMEL = 2**20
"""Of each factor of such an op."""
ATTENTION_TOKENS = {"cpu": 1024, "cuda": 131072}
"""Of the whole batch, whatever the length."""
HEADS, HEAD_DIM = 8, 64
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
STREAM_SHAPE = {"cpu": (2048, 1024), "cuda": (32768, 1024)}
COLD_BYTES = {"cpu": 2**26, "cuda": 2**28}
"""What all weights take together, more than caches hold."""
MOST_WEIGHTS = 1024
"""But no more weights than these, however small."""
LONGEST_S = 0.1
"""Nothing is tried that should take longer than this, judged by what is next smaller."""


def measure_device(
    device: torch.device,
    *,
    report: Report = silent,
    cubes: Sequence[int] | None = None,
    lengths: Sequence[int] | None = None,
    copy_bytes: int | None = None,
) -> DeviceProfile:
    """What a device does, alone. A launch is that of one op by itself on CUDA, and that of an op of a model on CPUs (`measure_dispatch`).

    Args:
        device: a CPU or CUDA device.
        report: gets one line per measurement.
        cubes: sides of the square matmuls; the default fits the kind of device, as do the others.
        lengths: queries and keys of attention.
        copy_bytes: size of the copied buffer.
    """
    kind = device.type
    if kind not in ("cpu", "cuda"):
        raise PlanError(f"measure_device knows cpu and cuda devices, got {device}; write a DeviceProfile by hand, or load one")
    small = torch.zeros(1, device=device)
    launch = time_calls(lambda: aten.add.Tensor(small, small), device, calls=200, repeats=9, ahead=True)
    report(f"launch of an addition: {launch}")
    num_bytes = copy_bytes or (2**30 if kind == "cuda" else 2**26)
    source = torch.rand(num_bytes // 4, device=device)
    copy = _time_copy(source, torch.empty_like(source))
    bandwidth = 2 * num_bytes / copy.median_s
    report(f"copy: {bandwidth / 1e9:.4g} GB/s read and written ({copy})")
    host, host_bytes, host_bandwidth = 0.0, 0, 0.0
    if kind == "cuda":
        pinned = torch.empty(num_bytes // 4, pin_memory=True, device="cpu")
        to_host = _time_copy(pinned.to(device), pinned)
        host = num_bytes / to_host.median_s
        report(f"host link: {host / 1e9:.4g} GB/s to page-locked memory ({to_host})")
        host_bytes = _host_bytes() // max(1, torch.cuda.device_count())
        on_host = _time_copy(pinned, torch.empty_like(pinned))
        host_bandwidth = 2 * num_bytes / on_host.median_s
        report(f"memory of the host: {host_bandwidth / 1e9:.4g} GB/s read and written by this process ({on_host})")
    matmul = list(_matmuls(device, launch.median_s, cubes or (CUDA_CUBES if kind == "cuda" else CPU_CUBES), report))
    batched = list(_batched(device, launch.median_s, report)) if kind == "cpu" else []
    attention = list(_attention(device, launch.median_s, lengths or LENGTHS[kind], report))
    streams = dict(_streams(device, launch.median_s, report))
    launch_s = measure_launch(report) if kind == "cpu" else launch.median_s
    tf32 = f", float32 matmul precision {torch.get_float32_matmul_precision()}" if kind == "cuda" else ""
    origin = f"measured on {device_name(device)}, torch {torch.__version__}, {today()}, by autopar.cost.measure_device{tf32}"
    return DeviceProfile(
        device_name(device),
        _memory_bytes(device),
        tuple(matmul),
        bandwidth,
        launch_s,
        origin,
        attention=tuple(attention),
        streams=streams,
        host_bytes_per_s=host,
        host_memory_bytes=host_bytes,
        host_memory_bandwidth=host_bandwidth,
        batched=tuple(batched),
    )


def _matmuls(device: torch.device, launch_s: float, cubes: Iterable[int], report: Report) -> Iterator[MatmulSample]:
    for dtype in DTYPES:
        s_per_flop, widest = 0.0, 0
        for size in cubes:
            expected_s = 2.0 * size**3 * s_per_flop
            if expected_s > LONGEST_S:
                report(f"matmul {size} {dtype}: not measured, it would take {expected_s:.2f} s")
                break
            sample = _matmul(device, launch_s, (size, size, size), dtype, report)
            yield sample
            if size <= UNALIGNED[device.type] and dtype.itemsize < 4:
                yield _matmul(device, launch_s, (size, size + 1, size), dtype, report)
            s_per_flop = 1 / sample.flops_per_s
            widest = min(size, WIDEST_SKINNY[device.type])
        for times in SKINNY:
            for side in range(3):
                if widest >= times:
                    m, n, k = (widest // times if i == side else widest for i in range(3))
                    yield _matmul(device, launch_s, (m, n, k), dtype, report)


def _matmul(
    device: torch.device, launch_s: float, sides: tuple[int, int, int], dtype: torch.dtype, report: Report
) -> MatmulSample:
    m, n, k = sides
    count = min(MOST_WEIGHTS, max(1, COLD_BYTES[device.type] // (n * k * dtype.itemsize)))
    left = torch.randn(m, k, device=device).to(dtype)
    is_cuda = device.type == "cuda"
    weights = cycle(torch.randn(count, *((n, k) if is_cuda else (k, n)), device=device, dtype=torch.float32).to(dtype).unbind())
    flops = 2.0 * m * n * k
    if is_cuda:
        forward, *backward = _time_products(left, weights)
    elif onednn.takes(device, dtype, flops):
        forward, *backward = _time_layer(left, weights)
    else:
        forward, *backward = (time_calls(lambda: torch.mm(left, next(weights)), device),) * 2
    rates = flops / _busy_s(forward, launch_s), flops * len(backward) / sum(_busy_s(each, launch_s) for each in backward)
    sample = MatmulSample(m, n, k, _name(dtype), 1.0).at_rates(*rates)
    spreads = "; ".join(dict.fromkeys(map(str, (forward, *backward))))
    report(f"matmul {m} x {k} x {n} {sample.dtype}: {rates[0] / 1e12:.4g} and {rates[1] / 1e12:.4g} TFLOP/s ({spreads})")
    return sample


def _time_layer(x: torch.Tensor, weights: Iterator[torch.Tensor]) -> tuple[Timing, ...]:
    """The product of a layer's forward, and those of its gradients: that of the input goes to oneDNN as well, that of the weight is added
    to what there is of it."""
    total = torch.zeros_like(next(weights))
    grad = torch.randn(x.shape[0], total.shape[1], dtype=x.dtype, device=x.device)
    ours = time_calls(lambda: onednn.linear(x, next(weights).t()), x.device)
    return ours, ours, time_calls(lambda: total.addmm_(x.t(), grad), x.device)


def _time_products(x: torch.Tensor, weights: Iterator[torch.Tensor]) -> tuple[Timing, ...]:
    """The product of a layer's forward, and those of its gradients."""
    grad = torch.randn(x.shape[0], next(weights).shape[0], device=x.device).to(x.dtype)
    runs = (lambda: torch.mm(x, next(weights).t()), lambda: torch.mm(grad, next(weights)), lambda: torch.mm(grad.t(), x))
    return tuple(time_calls(run, x.device, ahead=True) for run in runs)


def _batched(device: torch.device, launch_s: float, report: Report) -> Iterator[MatmulSample]:
    """Many small products in one op, as those of attention without a kernel of its own are."""
    for dtype in (torch.float32, torch.bfloat16):
        for size in CPU_BATCHED:
            shape = BATCHED_NUMEL // size**2, size, size
            left, right = (torch.randn(shape, device=device).to(dtype) for _ in range(2))
            timing = time_calls(partial(torch.bmm, left, right), device)
            rate = 2.0 * left.numel() * size / _busy_s(timing, launch_s)
            report(f"many matmuls {size} x {size} x {size} {_name(dtype)}: {rate / 1e12:.4g} TFLOP/s ({timing})")
            yield MatmulSample(size, size, size, _name(dtype), rate)


def _attention(device: torch.device, launch_s: float, lengths: Iterable[int], report: Report) -> Iterator[AttentionSample]:
    for dtype in (torch.float32, torch.bfloat16) if device.type == "cpu" else (torch.bfloat16, torch.float32):
        for length in lengths:
            batch = max(1, ATTENTION_TOKENS[device.type] // length)
            shape = batch, HEADS, length, HEAD_DIM
            tensors = [torch.randn(shape, device=device).to(dtype).requires_grad_() for _ in range(3)]
            forward, backward = _both_ways(partial(F.scaled_dot_product_attention, is_causal=True), tensors, device)
            spec = TensorSpec(shape, dtype, requires_grad=True)
            cost = op_cost(Call(aten.scaled_dot_product_attention.default, (spec,) * 3, {"is_causal": True}, (spec,)), None)
            rates = [
                float(evaluate(flops, {})) / _busy_s(timing, launch_s)
                for flops, timing in ((cost.flops, forward), (cost.backward_flops, backward))
            ]
            report(f"attention {length} {_name(dtype)}: {rates[0] / 1e12:.4g} and {rates[1] / 1e12:.4g} TFLOP/s ({forward}; {backward})")
            yield AttentionSample(length, _name(dtype), *rates)


def _streams(device: torch.device, launch_s: float, report: Report) -> Iterator[tuple[str, Stream]]:
    """Each of `families.STREAMS`, at a size that caches do not hold."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    rows, width = STREAM_SHAPE[device.type]
    x = torch.randn(rows, width, device=device).to(dtype).requires_grad_()
    scale, shift = (torch.randn(width, device=device).to(dtype).requires_grad_() for _ in range(2))
    labels = torch.randint(min(rows, width), (rows,), device=device)
    logits = x if device.type == "cpu" else torch.randn(width, rows, device=device, requires_grad=True)  # of a vocabulary, in float32
    cases: dict[str, tuple[Callable[..., torch.Tensor], tuple[object, ...], dict[str, object]]] = {
        "gelu": (aten.gelu.default, (x,), {}),
        "gelu_tanh": (aten.gelu.default, (x,), {"approximate": "tanh"}),
        "tanh": (aten.tanh.default, (x,), {}),
        "softmax": (aten.softmax.int, (x, -1), {}),
        "cross_entropy_loss": (aten.cross_entropy_loss.default, (logits, labels[: len(logits)]), {}),
        "layer_norm": (aten.layer_norm.default, (x, (width,), scale, shift), {}),
        "embedding": (aten.embedding.default, (x, labels), {}),
        "cast": (aten._to_copy.default, (x,), {"dtype": torch.bfloat16 if device.type == "cpu" else torch.float32}),
        "broadcast": (aten.mul.Tensor, (x, scale), {}),
    }
    assert tuple(cases) == STREAMS
    for name, (op, given, options) in cases.items():
        forward, backward = _both_ways(partial(op, **options), given, device)
        result = _spec(op(*given, **options))
        assert isinstance(result, TensorSpec)
        cost = op_cost(Call(op, tuple(map(_spec, given)), options, (result,)), None)
        rates = Stream(
            float(evaluate(cost.num_bytes, {})) / _busy_s(forward, launch_s),
            float(evaluate(cost.backward_num_bytes, {})) / _busy_s(backward, launch_s),
        )
        report(f"{name}: {rates.forward_bytes_per_s / 1e9:.4g} and {rates.backward_bytes_per_s / 1e9:.4g} GB/s ({forward}; {backward})")
        yield name, rates


def _spec(value: object) -> object:
    """A tensor as a call of an op knows it, anything else as it is."""
    return TensorSpec(tuple(value.shape), value.dtype, value.requires_grad) if isinstance(value, torch.Tensor) else value


def _both_ways(run: Callable[..., torch.Tensor], given: Sequence[object], device: torch.device) -> tuple[Timing, Timing]:
    """Forward, and backward to those arguments that ask for gradients."""
    with torch.no_grad():
        forward = time_calls(lambda: run(*given), device, ahead=True)
    wanted = [x for x in given if isinstance(x, torch.Tensor) and x.requires_grad]
    result = run(*given)
    incoming = torch.randn_like(result)
    backward = time_calls(lambda: torch.autograd.grad(result, wanted, incoming, retain_graph=True), device, ahead=True)
    return forward, backward


def _busy_s(timing: Timing, launch_s: float) -> float:
    """What a call takes beyond its launch."""
    return max(timing.median_s - launch_s, timing.median_s / 4)


def _time_copy(source: torch.Tensor, target: torch.Tensor) -> Timing:
    return time_calls(lambda: target.copy_(source, non_blocking=True), source.device, calls=5)


def _memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return _host_bytes()


def _host_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def device_name(device: torch.device, num_threads: int | None = None) -> str:
    """As torch calls it; a CPU by the threads of this process, or by so many."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return f"cpu, {number_text(num_threads or torch.get_num_threads(), 'thread')}"


def today() -> str:
    """The date, in UTC."""
    return datetime.datetime.now(tz=datetime.UTC).date().isoformat()
