"""What one device computes and moves: the price of an op by its shape.

An op takes the launch, and the longer of computing and of moving its bytes (the roofline of Williams et al. 2009):

| op        | busy time                                                                                             |
|-----------|-------------------------------------------------------------------------------------------------------|
| matmul    | flops at the rate of a cube of as many flops, forward or backward, times what matmuls that are as     |
|           | skinny reach of it, or at that of an unaligned cube if it is unaligned and that is slower; many small |
|           | ones in one op at the rate that such reached, if that was sampled                                     |
| attention | flops at the rate that attention over as many keys reached, forward or backward                       |
| other ops | their bytes, at the rate of the sampled op that is like them (`Stream`), else as fast as a large copy |

Rates between samples are interpolated in logarithms; outside of them the nearest holds. *Skinny* is the shortest of the three sides over
the next: 1 for a cube, and for what is long in one side alone, which only makes more tiles, as does what is longer than the sides of the
skinny samples in two. *Unaligned* is what has rows that are no
multiple of 16 bytes, which the fastest kernels of GPUs do not read (NVIDIA, Matrix Multiplication Background User's Guide): on an H200
products with a vocabulary of 50257 reach 130 TFLOP/s in bfloat16, and 850 with one of 128256.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, NamedTuple, TypeVar, get_type_hints

import numpy as np
import torch
from numpy.typing import ArrayLike

from autopar.errors import PlanError

_TWINS = {"bfloat16": "float16", "float16": "bfloat16"}
"""Dtypes that run equally fast on the matrix units, so that the samples of one serve for the other."""
Row = TypeVar("Row", bound=NamedTuple)
ALIGNED_BYTES = 16
SEVERAL = 1.5
"""An op that has this many times the flops of a matmul of its sides is several of them."""
NEARLY_CUBE = 0.5
"""Samples that are no more skinny than this tell the rate of cubes, the others what is lost by being skinny."""


Numbers = Mapping[str, float | Sequence[float]]
"""By name one, or several of which each counts."""


def check_numbers(what: str, *, positive: Numbers, others: Numbers) -> None:
    """PlanError for the first that is not finite, or not positive, or of the others less than 0."""
    for name, value in (*positive.items(), *others.items()):
        for number in value if isinstance(value, Sequence) else (value,):
            if not (math.isfinite(number) and (number > 0 if name in positive else number >= 0)):
                raise PlanError(f"{what}: {name} is {number}; give {'a positive number' if name in positive else '0 or more'}")


def check_fields(kind: type, data: Mapping[str, Any]) -> None:
    """PlanError if a file has fields that what it describes has not."""
    known = [entry.name for entry in fields(kind)]
    if unknown := data.keys() - {*known}:
        raise PlanError(f"a {kind.__name__} has no {', '.join(sorted(unknown))}; it has {', '.join(known)}")


def read_rows(kind: type[Row], rows: Iterable[Sequence[Any]], of: str) -> tuple[Row, ...]:
    """Rows of a file as named tuples, whose last columns may be left out where they have defaults; PlanError for the first that is none."""
    hints, found = get_type_hints(kind), []
    for i, row in enumerate(rows):
        try:
            typed = [_typed(value, hint) for value, hint in zip(row, hints.values(), strict=False)]
            found.append(kind(*typed, *row[len(hints) :]))
        except (TypeError, ValueError) as error:
            raise PlanError(f"not a machine profile: row {i} of {of} is {row!r}; a row has {', '.join(hints)}") from error
    return tuple(found)


def _typed(value: Any, hint: Any) -> Any:
    if not isinstance(hint, type):
        return None if value is None else float(value)
    if hint is int and value != int(value):
        raise ValueError(f"{value} is no whole number")
    return hint(value)


class MatmulSample(NamedTuple):
    """Throughput of one ``[m, k] @ [k, n]``, launch overhead not counted, and of the two products by which gradients of its factors are
    made, in the mean; None: these are as fast. ``dtype`` is a torch name such as ``bfloat16``."""

    m: int
    n: int
    k: int
    dtype: str
    flops_per_s: float
    backward_flops_per_s: float | None = None

    @property
    def rates(self) -> tuple[float, float]:
        """Forward and backward."""
        return self.flops_per_s, self.flops_per_s if self.backward_flops_per_s is None else self.backward_flops_per_s

    def at_rates(self, forward: float, backward: float) -> MatmulSample:
        """The same product at other rates."""
        return self._replace(flops_per_s=forward, backward_flops_per_s=None if backward == forward else backward)

    def times(self, factor: float) -> MatmulSample:
        """The same product so many times as fast."""
        forward, backward = self.rates
        return self.at_rates(forward * factor, backward * factor)

    @property
    def flops(self) -> float:
        return 2.0 * self.m * self.n * self.k

    @property
    def skinny(self) -> float:
        return float(skinny_of((self.m, self.n, self.k)))

    @property
    def is_aligned(self) -> bool:
        return bool(are_aligned(self.n, self.k, getattr(torch, self.dtype)))


Sides = tuple[ArrayLike, ArrayLike, ArrayLike]
"""m, n and k of ``[m, k] @ [k, n]``."""


def skinny_of(sides: Sides, widest: float = math.inf) -> np.ndarray:
    """The shortest side over the next, which counts as no more than the widest that was sampled."""
    m, n, k = (np.asarray(side, dtype=float) for side in sides)
    shortest, longest = np.minimum(np.minimum(m, n), k), np.maximum(np.maximum(m, n), k)
    return np.asarray(np.minimum(1.0, shortest / np.minimum(m + n + k - shortest - longest, widest)))


def are_aligned(n: ArrayLike, k: ArrayLike, dtype: torch.dtype) -> np.ndarray:
    """Whether the rows of factors and product of ``[m, k] @ [k, n]``, and of those of its backward, begin at multiples of 16 bytes."""
    elements = ALIGNED_BYTES // dtype.itemsize
    return np.asarray((np.asarray(n) % elements == 0) & (np.asarray(k) % elements == 0))


class AttentionSample(NamedTuple):
    """Throughput of causal attention over ``length`` queries and keys, by the flops of `cost.compute`, launch overhead not counted."""

    length: int
    dtype: str
    forward_flops_per_s: float
    backward_flops_per_s: float


class Stream(NamedTuple):
    """Bytes/s of a family of ops, by the bytes of `cost.compute`: less than a copy where they compute more than they move."""

    forward_bytes_per_s: float
    backward_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """One accelerator.

    Args:
        name: as the vendor or torch calls it.
        memory_bytes: what a program may allocate.
        matmul: throughput by size and dtype.
        memory_bandwidth: bytes/s read plus written, as a large copy reaches it.
        launch_overhead_s: seconds that every op takes, however small; where the host is the device, with all that the host does for it.
        source: where the numbers come from.
        sharing: how many times as fast a rank computes while the others wait: 1 where each has a device of its own, more where ranks share
            cores. The other numbers are those of all ranks at once.
        attention: throughput of attention; where it was not sampled, matmuls stand for it.
        streams: rates of families of other ops, by the op that was sampled (`families.STREAMS`).
        host_bytes_per_s: of copies between page-locked memory of the host and that of the device, one way; 0 if they are one memory, or if
            it is not known.
        host_memory_bytes: what the host has of memory for each device; 0 if it is not known.
        host_memory_bandwidth: bytes/s read plus written by the cores of the host for each device, as an optimizer that runs there reaches
            them; 0 if it is not known.
        dispatch_s: seconds that the host takes to launch an op while the device is busy with those before: a step takes no less than to
            launch all of its ops. 0 where the host is the device, and if it is not known.
        update_dispatch_s: likewise to launch the update of one parameter; where the host is the device, each takes so much longer.
        batched: throughput of many equal matmuls in one op, by the size of each; where it was not sampled, they are as fast as one matmul
            of all their flops.
    """

    name: str
    memory_bytes: int
    matmul: tuple[MatmulSample, ...]
    memory_bandwidth: float
    launch_overhead_s: float
    source: str
    sharing: float = 1.0
    attention: tuple[AttentionSample, ...] = ()
    streams: Mapping[str, Stream] = field(default_factory=dict, hash=False)
    host_bytes_per_s: float = 0.0
    host_memory_bytes: int = 0
    host_memory_bandwidth: float = 0.0
    dispatch_s: float = 0.0
    update_dispatch_s: float = 0.0
    batched: tuple[MatmulSample, ...] = ()

    def __post_init__(self) -> None:
        positive: dict[str, float | Sequence[float]] = {
            "memory_bytes": self.memory_bytes, "memory_bandwidth": self.memory_bandwidth, "sharing": self.sharing
        }  # fmt: skip
        for sample in (*self.matmul, *self.batched):
            positive[f"rate of {sample.m} x {sample.n} x {sample.k} in {sample.dtype}"] = sample[:3] + sample.rates
        for over in self.attention:
            positive[f"rate of attention over {over.length} in {over.dtype}"] = over[:1] + over[2:]
        for dtype in {sample.dtype for sample in (*self.matmul, *self.batched)} | {over.dtype for over in self.attention}:
            if not isinstance(getattr(torch, str(dtype), None), torch.dtype):
                raise PlanError(f"device {self.name!r}: there is no dtype {dtype!r}; give a name of torch such as 'bfloat16'")
        positive |= {f"rate of {name}": rates for name, rates in self.streams.items()}
        others = ("launch_overhead_s", "host_bytes_per_s", "host_memory_bytes", "host_memory_bandwidth", "dispatch_s", "update_dispatch_s")
        check_numbers(f"device {self.name!r}", positive=positive, others={name: getattr(self, name) for name in others})

    @property
    def has_host(self) -> bool:
        """Whether there is another memory beside that of the device."""
        return self.host_bytes_per_s > 0

    def copy_time_s(self, num_bytes: ArrayLike) -> np.ndarray:
        """Seconds of a copy between the memories of host and device, or where they are one inside of it. Copies there and back run at
        the same time."""
        if not self.has_host:
            return self.stream_time_s(2 * np.asarray(num_bytes, dtype=float))
        return self._launched_s(np.asarray(num_bytes, dtype=float) / self.host_bytes_per_s)

    def host_time_s(self, num_bytes: ArrayLike) -> np.ndarray:
        """Seconds in which the cores of the host read and write so many bytes; where their rate is not known, that of the link stands for
        it."""
        if not self.has_host:
            return self.stream_time_s(num_bytes)
        return np.asarray(num_bytes, dtype=float) / (self.host_memory_bandwidth or self.host_bytes_per_s)

    def sampled_flops(self, dtype: torch.dtype) -> float:
        """Of the largest matmul that stands for this dtype; 0 if none was sampled."""
        return max((sample.flops for sample in _of_dtype(self.matmul, str(dtype).removeprefix("torch."))), default=0.0)

    def sampled_length(self, dtype: torch.dtype) -> int:
        """Of the longest attention that stands for this dtype; 0 if none was sampled."""
        return max((sample.length for sample in _of_dtype(self.attention, str(dtype).removeprefix("torch."))), default=0)

    def matmul_flops_per_s(
        self, flops: ArrayLike, dtype: torch.dtype, sides: Sides | None = None, *, backward: bool = False
    ) -> np.ndarray:
        """Throughput of matmuls.

        bfloat16 and float16 stand for each other where only one was sampled: the matrix units run both at one rate. A product of complex
        numbers is four of real ones, unless complex ones were sampled.

        Args:
            flops: of all that run as one op.
            sides: m, n and k of each of those; without them they are taken to be alike.
            backward: of products by which a gradient is made.

        Raises:
            PlanError: the dtype was not sampled.
        """
        name, flops = str(dtype).removeprefix("torch."), np.maximum(flops, 1.0)
        sizes, rates = _cubes(self.matmul, name, True, backward)
        if not sizes.size and dtype.is_complex:
            taller = sides and (4 * np.asarray(sides[0]), *sides[1:])
            return self.matmul_flops_per_s(4 * flops, dtype.to_real(), taller, backward=backward) / 4
        if not sizes.size:
            known = ", ".join(sorted({sample.dtype for sample in self.matmul})) or "none"
            raise PlanError(
                f"device {self.name!r} has no matmul throughput for {name}; sampled are: {known}. Measure this machine with "
                f"`autopar profile`, or add samples of {name} to the profile"
            )
        log_rate = np.interp(np.log(flops), sizes, rates)
        if sides is not None:
            skinny = skinny_of(sides, _widest_skinny(self.matmul, name))
            log_rate = log_rate + np.interp(np.log(skinny), *_skinny(self.matmul, name, backward))
            sizes, rates = _cubes(self.matmul, name, False, backward)
            if sizes.size:
                slower = np.minimum(log_rate, np.interp(np.log(flops), sizes, rates))
                log_rate = np.where(are_aligned(*sides[1:], dtype), log_rate, slower)
            sizes, rates = _cubes(self.batched, name, True, backward)
            if sizes.size:
                each = 2.0 * np.prod(np.broadcast_arrays(*sides), axis=0)
                log_rate = np.where(flops >= SEVERAL * each, np.interp(np.log(np.maximum(each, 1.0)), sizes, rates), log_rate)
        return np.asarray(np.exp(log_rate))

    def matmul_time_s(
        self, flops: ArrayLike, num_bytes: ArrayLike, dtype: torch.dtype, sides: Sides | None = None, *, gradients: int = 0
    ) -> np.ndarray:
        """Seconds of a matmul; no flops take no time. Or of its backward, which makes so many ``gradients`` of its factors, one after the
        other by products of as many flops each."""
        flops = np.asarray(flops, dtype=float)
        rate = self.matmul_flops_per_s(flops / max(1, gradients), dtype, sides, backward=gradients > 0)
        return self._launched_s(np.maximum(flops / rate, self._moving_s(num_bytes)))

    def attention_time_s(
        self, flops: ArrayLike, num_bytes: ArrayLike, dtype: torch.dtype, length: ArrayLike, *, backward: bool
    ) -> np.ndarray:
        """Seconds of an attention over ``length`` keys."""
        lengths, rates = _attention(self.attention, str(dtype).removeprefix("torch."), backward)
        if not lengths.size:
            return self.matmul_time_s(flops, num_bytes, dtype)
        rate = np.exp(np.interp(np.log(np.maximum(length, 1.0)), lengths, rates))
        return self._launched_s(np.maximum(np.asarray(flops, dtype=float) / rate, self._moving_s(num_bytes)))

    def stream_time_s(
        self, num_bytes: ArrayLike, stream: str = "", *, backward: bool = False, is_launched: bool = True
    ) -> np.ndarray:
        """Seconds of an op that is bound by its bytes; what moves nothing (a view) takes none. ``is_launched``: by itself, not with
        others in one launch."""
        sampled = self.streams.get(stream)
        rate = self.memory_bandwidth if sampled is None else sampled[backward]
        busy_s = np.asarray(num_bytes, dtype=float) / rate
        return self._launched_s(busy_s) if is_launched else busy_s

    def _moving_s(self, num_bytes: ArrayLike) -> np.ndarray:
        return np.asarray(num_bytes, dtype=float) / self.memory_bandwidth

    def _launched_s(self, busy_s: np.ndarray) -> np.ndarray:
        return np.where(busy_s > 0, self.launch_overhead_s + busy_s, 0.0)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> DeviceProfile:
        check_fields(DeviceProfile, data)
        return DeviceProfile(
            data["name"],
            int(data["memory_bytes"]),
            read_rows(MatmulSample, data["matmul"], "matmul"),
            float(data["memory_bandwidth"]),
            float(data["launch_overhead_s"]),
            data["source"],
            float(data.get("sharing", 1.0)),
            read_rows(AttentionSample, data.get("attention", ()), "attention"),
            {name: read_rows(Stream, [rates], f"streams, {name},")[0] for name, rates in data.get("streams", {}).items()},
            float(data.get("host_bytes_per_s", 0.0)),
            int(data.get("host_memory_bytes", 0)),
            float(data.get("host_memory_bandwidth", 0.0)),
            float(data.get("dispatch_s", 0.0)),
            float(data.get("update_dispatch_s", 0.0)),
            read_rows(MatmulSample, data.get("batched", ()), "batched"),
        )


def slowest(devices: Sequence[DeviceProfile]) -> DeviceProfile:
    """A device that does everything as slowly as the slowest of several, and has no more memory than the smallest: what ranks that share
    every op evenly wait for. A dtype or an op that one of them was not sampled with is left out."""
    if len({*devices}) == 1:
        return devices[0]
    matmul = [
        sample.at_rates(*(min(_rate_of(device, sample, backward=b) for device in devices) for b in (False, True)))
        for sample in {(s.m, s.n, s.k, s.dtype): s for device in devices for s in device.matmul}.values()
        if all(_of_dtype(device.matmul, sample.dtype) for device in devices)
    ]
    batched = [
        sample.at_rates(*(min(_batched_rate(device, sample, backward=b) for device in devices) for b in (False, True)))
        for sample in {(s.m, s.n, s.k, s.dtype): s for device in devices for s in device.batched}.values()
        if all(_of_dtype(device.batched, sample.dtype) for device in devices)
    ]
    attention = [
        AttentionSample(
            length, dtype, *(float(min(_attention_rate(d, dtype, length, backward=b) for d in devices)) for b in (False, True))
        )
        for length, dtype in {(s.length, s.dtype): None for device in devices for s in device.attention}
        if all(_attention(device.attention, dtype, False)[0].size for device in devices)
    ]
    streams = set.intersection(*({*device.streams} for device in devices))
    return DeviceProfile(
        name=" and ".join(dict.fromkeys(device.name for device in devices)),
        memory_bytes=min(device.memory_bytes for device in devices),
        matmul=tuple(matmul),
        memory_bandwidth=min(device.memory_bandwidth for device in devices),
        launch_overhead_s=max(device.launch_overhead_s for device in devices),
        source="the slowest of each",
        sharing=min(device.sharing for device in devices),
        attention=tuple(attention),
        streams={name: Stream(*map(min, zip(*(device.streams[name] for device in devices), strict=True))) for name in sorted(streams)},
        host_bytes_per_s=min(device.host_bytes_per_s for device in devices),
        host_memory_bytes=min((device.host_memory_bytes for device in devices if device.host_memory_bytes), default=0),
        host_memory_bandwidth=min((device.host_memory_bandwidth for device in devices if device.host_memory_bandwidth), default=0.0),
        dispatch_s=max(device.dispatch_s for device in devices),
        update_dispatch_s=max(device.update_dispatch_s for device in devices),
        batched=tuple(batched),
    )


def _rate_of(device: DeviceProfile, sample: MatmulSample, *, backward: bool) -> float:
    dtype = getattr(torch, sample.dtype)
    return float(device.matmul_flops_per_s(sample.flops, dtype, (sample.m, sample.n, sample.k), backward=backward))


def _batched_rate(device: DeviceProfile, sample: MatmulSample, *, backward: bool) -> float:
    return float(np.exp(np.interp(np.log(sample.flops), *_cubes(device.batched, sample.dtype, True, backward))))


def _attention_rate(device: DeviceProfile, dtype: str, length: int, *, backward: bool) -> float:
    return float(np.exp(np.interp(np.log(length), *_attention(device.attention, dtype, backward))))


_Curve = tuple[np.ndarray, np.ndarray]
_Sample = TypeVar("_Sample", MatmulSample, AttentionSample)


def _of_dtype(samples: tuple[_Sample, ...], dtype: str) -> list[_Sample]:
    return [s for s in samples if s.dtype == dtype] or [s for s in samples if s.dtype == _TWINS.get(dtype)]


def _means(pairs: list[tuple[float, float]]) -> _Curve:
    """Pairs in ascending order, one for each first number with the mean of the second."""
    first = sorted({x for x, _ in pairs})
    return np.array(first), np.array([np.mean([y for x, y in pairs if x == at]) for at in first])


@cache
def _cubes(samples: tuple[MatmulSample, ...], dtype: str, is_aligned: bool, backward: bool) -> _Curve:
    """Log flops and log flops/s of one dtype; where none was sampled that is aligned, the others stand for them."""
    chosen = _of_dtype(samples, dtype)
    alike = [s for s in chosen if s.is_aligned is is_aligned] or (chosen if is_aligned else [])
    cubes = [s for s in alike if s.skinny >= NEARLY_CUBE] or alike
    return _means([(np.log(s.flops), np.log(s.rates[backward])) for s in cubes])


@cache
def _skinny(samples: tuple[MatmulSample, ...], dtype: str, backward: bool) -> _Curve:
    """Log of how skinny, and log of what is left of the rate of a cube of as many flops; 0 at cubes."""
    sizes, rates = _cubes(samples, dtype, True, backward)
    lost = [
        (round(np.log(s.skinny), 2), np.log(s.rates[backward]) - np.interp(np.log(s.flops), sizes, rates))
        for s in _of_dtype(samples, dtype)
        if s.skinny < NEARLY_CUBE
    ]
    return _means([*lost, (0.0, 0.0)])


@cache
def _widest_skinny(samples: tuple[MatmulSample, ...], dtype: str) -> float:
    """The longest next side of what was sampled for being skinny."""
    return max((sorted(s[:3])[1] for s in _of_dtype(samples, dtype) if s.skinny < NEARLY_CUBE), default=math.inf)


@cache
def _attention(samples: tuple[AttentionSample, ...], dtype: str, backward: bool) -> _Curve:
    """Log length and log flops/s of one dtype."""
    chosen = _of_dtype(samples, dtype)
    return _means([(np.log(s.length), np.log(s.backward_flops_per_s if backward else s.forward_flops_per_s)) for s in chosen])
