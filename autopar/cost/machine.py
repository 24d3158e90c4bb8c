"""What a machine can do: the inputs of every price.

A `DeviceProfile` prices an op, a `LinkProfile` holds what `collectives` prices a message by, a `MachineProfile` is a device and one link
per mesh axis. Numbers come from `measure`, or from data files shipped here (`cluster`), where each stands with its source.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, get_origin, get_type_hints

import numpy as np

from autopar.cost.device import DeviceProfile, check_fields, check_numbers, read_rows, slowest
from autopar.errors import MeshError, PlanError
from autopar.mesh import Mesh
from autopar.units import number_text

ASSUMED_OVERLAP = 0.87
"""Overlap of links that were not measured: computing and communicating at once took 1.1256 times as long (Hetu-Galvatron's profiles)."""

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send")
"""Of collectives; `collectives` has their formulas."""


_FITTING: dict[Any, tuple[tuple[type, ...], str]] = {
    str: ((str,), "text"),
    int: ((int, float), "a whole number"),
    float: ((int, float), "a number"),
    bool: ((bool,), "true or false"),
    tuple: ((list, tuple), "a list"),
    Mapping: ((dict,), "an object with names"),
}
"""What a file may have for a field of each kind, and what to call that."""


def check_kinds(kind: type, data: Mapping[str, Any]) -> None:
    """PlanError for the first value of a file that is of another kind than its field; true and false are no numbers."""
    for name, hint in get_type_hints(kind).items():
        if name not in data or (get_origin(hint) or hint) not in _FITTING:  # parts that are described by fields of their own
            continue
        value, (fitting, words) = data[name], _FITTING[get_origin(hint) or hint]
        is_fitting = isinstance(value, fitting) and (hint is bool or not isinstance(value, bool))
        if not is_fitting or (hint is int and value != value // 1):
            raise PlanError(f"{name} of a {kind.__name__} is {value!r}; give {words}")
        for rows in value.values() if isinstance(value, dict) else (value,):
            if _has_flag(rows):
                raise PlanError(f"{name} of a {kind.__name__} has true or false in {rows!r}; give numbers")


def _has_flag(rows: Any) -> bool:
    return isinstance(rows, list | tuple) and any(isinstance(value, bool) or _has_flag(value) for value in rows)


def level_of(axis: str) -> str:
    """What to call links whose level nobody told, by the axis that they were measured on."""
    return f"links of {axis}"


class Timing(NamedTuple):
    """Of a collective: bytes of the whole buffer, and what it took."""

    num_bytes: float
    time_s: float


class Protocol(NamedTuple):
    """A way to send that begins more quickly than another and carries less: ``share`` of its bandwidth."""

    alpha_s: float
    base_s: float
    share: float


@dataclass(frozen=True, slots=True)
class LinkProfile:
    """How the ranks of one mesh axis reach each other.

    Args:
        alpha_s: seconds of latency per step of an algorithm.
        bandwidth: bytes/s per rank per direction while all ranks talk.
        base_s: seconds that each collective takes once, whatever its steps.
        lanes: how many times ``bandwidth`` a ring through the group reaches, because several of its ranks share a node and
            each drives a port of its own; all-to-all gains nothing from this (NVIDIA/nccl-tests issues 130 and 267).
        inside: what ranks of the group that share a node (a pod), ``ranks_inside`` next to each other, reach each other by; of one that is
            alone there what devices of a node have. None inside of a node, and where that is not known.
        overlap: part of the time of a collective that is gained when it runs beside computation: 1 on ideal hardware, 0 where both want
            the same cores.
        crowded_s: seconds more that ranks wait for a collective or a message when others compute on the cores that they share.
        measured: for each kind of collective, ascending pairs (num_bytes, time_s).
        group_size: ranks of the groups that ``measured`` was taken on; 1 where there was nothing to measure, 0 if that is not known.
        protocols: other ways to send that begin more quickly and carry less: (alpha_s, base_s, share of ``bandwidth``).
        source: where the numbers come from.
        level: which of the machine's links these are: ``between nodes``, ``inside a node``, ``between pods``; empty if that is not known.
        is_network: whether they join nodes, over switches that trees may span, and not devices of a node.
        lone_ranks: up to so many ranks gain nothing from switches that reduce; what was measured to be gained grows from there to
            ``group_size``.
        alone: how many times as fast a message is while the other ranks of the node send none: more than 1 where ranks share a port, whose
            part for each is ``bandwidth``.
    """

    alpha_s: float
    bandwidth: float
    base_s: float = 0.0
    lanes: float = 1.0
    overlap: float = ASSUMED_OVERLAP
    crowded_s: float = 0.0
    measured: Mapping[str, tuple[tuple[float, float], ...]] = field(default_factory=dict, hash=False)
    group_size: int = 0
    source: str = ""
    inside: LinkProfile | None = None
    ranks_inside: int = 1
    protocols: tuple[tuple[float, float, float], ...] = ()
    level: str = ""
    is_network: bool = False
    alone: float = 1.0
    lone_ranks: int = 0

    def check(self) -> None:
        """PlanError if no link can be like this."""
        what = f"link {self.level or self.source!r}"
        parts = [share for *_, share in self.protocols]
        others: dict[str, float | Sequence[float]] = {
            **{name: getattr(self, name) for name in ("alpha_s", "base_s", "overlap", "crowded_s", "lone_ranks")},
            "1 - overlap": 1 - self.overlap,
            "start of a protocol": [start_s for *starts, _ in self.protocols for start_s in starts],
            "1 - share of a protocol": [1 - part for part in parts],
        }
        positive: dict[str, float | Sequence[float]] = {
            **{name: getattr(self, name) for name in ("bandwidth", "lanes", "ranks_inside", "alone")},
            "share of a protocol": parts,
        }
        for kind, rows in self.measured.items():
            positive[f"bytes and seconds of {kind}"] = [number for row in rows for number in row]
            sizes = [num_bytes for num_bytes, _ in rows]
            if kind not in KINDS or self.group_size < 2 or not rows or sizes != sorted({*sizes}):
                raise PlanError(
                    f"{what}: {kind!r} was measured on {self.group_size} ranks as {rows}; give one of {', '.join(KINDS)}, a group of 2 or "
                    "more ranks, and pairs of bytes and seconds in ascending order"
                )
        check_numbers(what, positive=positive, others=others)
        if self.inside is not None:
            self.inside.check()

    def hop(self, position: int) -> LinkProfile:
        """What carries a message from a position of the group to the next, or back."""
        return self if self.inside is None or (position + 1) % self.ranks_inside == 0 else self.inside.hop(position)

    def by_protocol(self, index: int) -> LinkProfile:
        """This link by one of its ``protocols``, inside of nodes as well."""
        if index >= len(self.protocols):
            return self
        alpha_s, base_s, share = self.protocols[index]
        inside = self.inside.by_protocol(index) if self.inside is not None else None
        return replace(self, alpha_s=alpha_s, base_s=base_s, bandwidth=self.bandwidth * share, inside=inside, protocols=())

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> LinkProfile:
        check_fields(LinkProfile, data)
        check_kinds(LinkProfile, data)
        inside = data.get("inside")
        measured = {kind: read_rows(Timing, rows, f"measured {kind}") for kind, rows in data.get("measured", {}).items()}
        return LinkProfile(
            float(data["alpha_s"]),
            float(data["bandwidth"]),
            float(data.get("base_s", 0.0)),
            float(data.get("lanes", 1.0)),
            float(data.get("overlap", ASSUMED_OVERLAP)),
            float(data.get("crowded_s", 0.0)),
            measured,
            int(data.get("group_size", 0)),
            data.get("source", ""),
            LinkProfile.from_json(inside) if inside is not None else None,
            int(data.get("ranks_inside", 1)),
            read_rows(Protocol, data.get("protocols", ()), "protocols"),
            data.get("level", ""),
            data.get("is_network", False),
            float(data.get("alone", 1.0)),
            int(data.get("lone_ranks", 0)),
        )


@dataclass(frozen=True, slots=True)
class MachineProfile:
    """A device and one link per mesh axis, the outermost first.

    Args:
        device: what a rank computes with.
        links: what each axis communicates over.
        origin: which machine, and when.
        kinds: where devices differ, runs of ranks next to each other, with a machine that is all like them; ``device`` and ``links`` are
            the slowest of them then. Empty if all are alike.
    """

    device: DeviceProfile
    links: tuple[LinkProfile, ...]
    origin: str = ""
    kinds: tuple[tuple[int, MachineProfile], ...] = ()

    def __post_init__(self) -> None:
        for link in self.links:  # not each link by itself, which are made anew for many a price
            link.check()
        if wrong := [count for count, _ in self.kinds if count < 1]:
            raise PlanError(f"machine {self.origin!r} has {wrong[0]} ranks of a kind; give 1 or more")

    @staticmethod
    def mixed(kinds: Sequence[tuple[int, MachineProfile]]) -> MachineProfile:
        """A machine of several kinds of devices, in the order of their ranks, on one mesh."""
        return _slowest([machine for _, machine in kinds], tuple(kinds))

    def kinds_along(self, mesh: Mesh, axis: int) -> tuple[tuple[int, ...], ...]:
        """The kinds that the ranks at each position of an axis are of, by their index."""
        if not self.kinds:
            return ((0,),) * mesh.sizes[axis]
        kind_of = np.repeat(range(len(self.kinds)), [count for count, _ in self.kinds]).reshape(mesh.sizes)
        return tuple(tuple(map(int, np.unique(kind_of.take(position, axis)))) for position in range(mesh.sizes[axis]))

    def of_kinds(self, kinds: Sequence[int]) -> MachineProfile:
        """The slowest of some kinds."""
        return _slowest([self.kinds[kind][1] for kind in kinds]) if self.kinds else self

    @property
    def best_flops_per_s(self) -> float:
        """Rate of the fastest matmul that was sampled, of a rank in the mean; 0 if none was."""
        kinds = self.kinds or ((1, self),)
        rates = [max((sample.flops_per_s for sample in machine.device.matmul), default=0.0) for _, machine in kinds]
        counts = [count for count, _ in kinds]
        return sum(count * rate for count, rate in zip(counts, rates, strict=True)) / sum(counts)

    def for_mesh(self, mesh: Mesh) -> MachineProfile:
        """This profile, checked to have one link per axis of ``mesh``."""
        if len(self.links) != len(mesh.sizes):
            raise MeshError(
                f"profile of {self.origin or self.device.name!r} has {number_text(len(self.links), 'link')}, but mesh ({mesh}) has "
                f"{number_text(len(mesh.sizes), 'axis', 'axes')}; a profile holds one link per axis, of as many ranks as were "
                "measured: measure this mesh with `autopar profile --mesh`"
            )
        return self

    def save(self, path: str | Path) -> None:
        """Write it as JSON."""
        Path(path).write_text(json.dumps(asdict(self), indent=1) + "\n")

    @staticmethod
    def load(path: str | Path) -> MachineProfile:
        """Read what `save` or ``autopar profile --out`` wrote; PlanError if it is something else."""
        data = read_json(Path(path))
        try:
            return MachineProfile.from_json(data)
        except PlanError as error:
            raise PlanError(f"{path}: {error}") from error

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> MachineProfile:
        try:
            check_fields(MachineProfile, data)
            check_kinds(MachineProfile, data)
            links = tuple(LinkProfile.from_json(link) for link in data["links"])
            kinds = tuple((int(count), MachineProfile.from_json(kind)) for count, kind in data.get("kinds", ()))
            check_kinds(DeviceProfile, data["device"])
            return MachineProfile(DeviceProfile.from_json(data["device"]), links, data.get("origin", ""), kinds)
        except PlanError:
            raise
        except KeyError as error:
            raise PlanError(f"not a machine profile: it lacks {error}; it should read as MachineProfile.save writes it") from error
        except (AttributeError, OverflowError, TypeError, ValueError) as error:
            raise PlanError(f"not a machine profile: {error}; it should read as MachineProfile.save writes it") from error


def profile_of(given: MachineProfile | str | Path | None) -> MachineProfile | None:
    """The prices that an argument ``profile=`` means.

    Raises:
        PlanError: it is no file of a profile.
    """
    if given is None or isinstance(given, MachineProfile):
        return given
    if not isinstance(given, str | Path):
        raise PlanError(f"profile is a MachineProfile, or a file that `autopar profile --out` wrote, got {given!r}")
    if not Path(given).is_file():
        raise PlanError(f"profile={str(given)!r} is no file; it takes a MachineProfile, or a file that `autopar profile --out` wrote")
    return MachineProfile.load(given)


def _slowest(machines: Sequence[MachineProfile], kinds: tuple[tuple[int, MachineProfile], ...] = ()) -> MachineProfile:
    """A machine with the slowest device and, on each axis, the slowest link of several."""
    links = zip(*(machine.links for machine in machines), strict=True)
    return MachineProfile(
        slowest([machine.device for machine in machines]),
        tuple(min(alike, key=lambda link: link.bandwidth * link.lanes) for alike in links),
        " + ".join(dict.fromkeys(machine.origin for machine in machines)),
        kinds,
    )


def read_json(path: Path) -> dict[str, Any]:
    """What a file of a profile or a cluster holds.

    Raises:
        PlanError: there is none, or it holds something else.
    """
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "is not there"
        raise PlanError(f"{path} {what}, and no file; write one with save, or with `autopar profile --out`")

    def refuse(number: str) -> float:
        raise PlanError(f"{path} has {number}; all numbers of a profile or a cluster are finite")

    try:
        data = json.loads(path.read_text(), parse_constant=refuse)
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise PlanError(f"{path} is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise PlanError(f"{path} holds a {type(data).__name__}, not a profile or a cluster")
    return data
