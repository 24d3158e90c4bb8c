"""What a machine can do: the inputs of every price.

A `DeviceProfile` prices an op, a `LinkProfile` holds what `collectives` prices a message
by, a `MachineProfile` is a device and one link per mesh axis, and a `Cluster` names a machine by its shape and parts.
Numbers come from `measure`, or from data files shipped here, where each stands with its source.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from autopar.cost.device import DeviceProfile
from autopar.errors import MeshError, PlanError
from autopar.mesh import Mesh

ASSUMED_OVERLAP = 0.87
"""Overlap of links that were not measured: computing and communicating at once took 1.1256 times as long (Hetu-Galvatron's profiles)."""


@dataclass(frozen=True, slots=True)
class LinkProfile:
    """How the ranks of one mesh axis reach each other.

    Args:
        alpha_s: seconds of latency per step of an algorithm.
        bandwidth: bytes/s per rank per direction while all ranks talk.
        base_s: seconds that each collective takes once, whatever its steps.
        lanes: how many times ``bandwidth`` a ring through the group reaches, because several of its ranks share a node and
            each drives a port of its own; all-to-all gains nothing from this (NVIDIA/nccl-tests issues 130 and 267).
        inside: what ranks of the group that share a node, ``ranks_inside`` next to each other, reach each other by; None if each has a node
            of its own.
        overlap: part of the time of a collective that is gained when it runs beside computation: 1 on ideal hardware, 0 where both want
            the same cores.
        crowded_s: seconds more that ranks wait for a collective when others compute on the cores that they share.
        measured: for each kind of collective, ascending pairs (num_bytes, time_s).
        group_size: ranks of the groups that ``measured`` was taken on.
        protocols: other ways to send that begin more quickly and carry less: (alpha_s, base_s, share of ``bandwidth``).
        source: where the numbers come from.
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
        measured = {
            kind: tuple((float(b), float(t)) for b, t in rows) for kind, rows in data.get("measured", {}).items()
        }
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
            LinkProfile.from_json(data["inside"]) if data.get("inside") else None,
            int(data.get("ranks_inside", 1)),
            tuple((float(alpha_s), float(base_s), float(share)) for alpha_s, base_s, share in data.get("protocols", ())),
        )


@dataclass(frozen=True, slots=True)
class MachineProfile:
    """A device and one link per mesh axis, the outermost first.

    Args:
        device: what a rank computes with.
        links: what each axis communicates over.
        origin: which machine, and when.
    """

    device: DeviceProfile
    links: tuple[LinkProfile, ...]
    origin: str = ""

    def for_mesh(self, mesh: Mesh) -> MachineProfile:
        """This profile, checked to have one link per axis of ``mesh``."""
        if len(self.links) != len(mesh.sizes):
            raise MeshError(
                f"profile of {self.origin or self.device.name!r} has {len(self.links)} links, but mesh ({mesh}) has "
                f"{len(mesh.sizes)} axes; a profile holds one link per axis: use Cluster.with_mesh, or measure this mesh"
            )
        return self

    def save(self, path: str | Path) -> None:
        Path(path).write_text(json.dumps(asdict(self), indent=1) + "\n")

    @staticmethod
    def load(path: str | Path) -> MachineProfile:
        return MachineProfile.from_json(_read_json(Path(path)))

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> MachineProfile:
        try:
            links = tuple(LinkProfile.from_json(link) for link in data["links"])
            return MachineProfile(DeviceProfile.from_json(data["device"]), links, data.get("origin", ""))
        except (KeyError, TypeError, ValueError) as error:
            raise PlanError(
                f"not a machine profile: {type(error).__name__} {error}; it should read as MachineProfile.save writes it"
            ) from error


@dataclass(frozen=True, slots=True)
class Cluster:
    """A machine by its shape and the names of its parts; no device need be present. The public ``autopar.Cluster``.

    Args:
        nodes: hosts.
        gpus_per_node: devices in each.
        device: a name that `named_device` knows.
        inter: link across nodes, a name that `named_link` knows.
        intra: link inside a node; the default is what the device comes with.
        grid: the ranks regrouped, see `with_mesh`.
        measured: a measured profile in place of named parts, see `from_mesh`.
        measured_mesh: the mesh it was measured on.
    """

    nodes: int = 1
    gpus_per_node: int = 8
    device: str = "a100-80gb"
    inter: str = "ib-200"
    intra: str | None = None
    grid: Mesh | None = None
    measured: MachineProfile | None = None
    measured_mesh: Mesh | None = None

    def __post_init__(self) -> None:
        if self.nodes < 1 or self.gpus_per_node < 1:
            raise MeshError(
                f"a Cluster needs at least one node and one device, got nodes={self.nodes}, gpus_per_node={self.gpus_per_node}"
            )
        assert (self.measured is None) == (self.measured_mesh is None)
        if self.measured is None:  # wrong names fail here, not at first use
            named_device(self.device)
            named_link(self.intra or _device_file(self.device)["intra"])
            named_link(self.inter)
        if self.grid is not None and self.grid.num_ranks != self._base_mesh.num_ranks:
            raise MeshError(
                f"mesh ({self.grid}) has {self.grid.num_ranks} ranks, but the cluster ({self._base_mesh}) has "
                f"{self._base_mesh.num_ranks}; give axis sizes whose product is {self._base_mesh.num_ranks}"
            )

    @staticmethod
    def from_mesh(mesh: Mesh, profile: MachineProfile) -> Cluster:
        """The machine that ``profile`` was measured on, with one link per axis of ``mesh``."""
        return Cluster(
            1, mesh.num_ranks, profile.device.name, grid=mesh, measured=profile.for_mesh(mesh), measured_mesh=mesh
        )

    def with_mesh(self, mesh: Mesh) -> Cluster:
        """The same machine with its ranks regrouped; each axis takes the slowest link that it crosses.

        Groups that cross nodes are taken to talk all at once, so that those of one node share its ports: a group with r ranks
        in a node runs rings at r times the share of one rank, but not faster than inside the node.
        """
        return replace(self, grid=mesh)

    @property
    def mesh(self) -> Mesh:
        return self.grid or self._base_mesh

    @property
    def num_ranks(self) -> int:
        return self.mesh.num_ranks

    @property
    def memory_bytes(self) -> int:
        """Memory of one device."""
        return (self.measured.device if self.measured else named_device(self.device)).memory_bytes

    @property
    def profile(self) -> MachineProfile:
        """Device, and one link per axis of `mesh`."""
        base = self.measured or MachineProfile(
            named_device(self.device),
            self._named_links(),
            f"{self.nodes} nodes x {self.gpus_per_node} {self.device}, {self.inter}",
        )
        if self.mesh == self._base_mesh:
            return base
        stride, links = self.mesh.num_ranks, []
        for size in self.mesh.sizes:
            stride //= size
            links.append(_link_of_axis(stride, size, self._base_mesh, base.links))
        return replace(base, links=tuple(links))

    @property
    def _base_mesh(self) -> Mesh:
        if self.measured_mesh is not None:
            return self.measured_mesh
        axes = [(name, size) for name, size in (("node", self.nodes), ("gpu", self.gpus_per_node)) if size > 1]
        names, sizes = zip(*(axes or [("gpu", 1)]), strict=True)
        return Mesh(names, sizes)

    def _named_links(self) -> tuple[LinkProfile, ...]:
        intra = named_link(self.intra or _device_file(self.device)["intra"])
        inter = named_link(self.inter)
        ports = _data("links.json")[self.inter].get("ports_per_node")
        if ports:  # fewer ports than devices: all devices share them
            inter = replace(inter, bandwidth=inter.bandwidth * min(1.0, ports / self.gpus_per_node))
        return tuple(inter if name == "node" else intra for name in self._base_mesh.names)

    def save(self, path: str | Path) -> None:
        data = asdict(self) | {
            "grid": str(self.grid) if self.grid else None,
            "measured_mesh": str(self.measured_mesh) if self.measured_mesh else None,
        }
        Path(path).write_text(json.dumps(data, indent=1) + "\n")

    @staticmethod
    def load(path: str | Path) -> Cluster:
        data = _read_json(Path(path))
        missing = {"nodes", "gpus_per_node", "device"} - data.keys()
        if missing:
            raise PlanError(
                f"{path} is not a cluster: it lacks {', '.join(sorted(missing))}; write it with Cluster.save"
            )
        meshes = {key: Mesh.parse(data[key]) if data.get(key) else None for key in ("grid", "measured_mesh")}
        measured = MachineProfile.from_json(data["measured"]) if data.get("measured") else None
        return Cluster(**data | meshes | {"measured": measured})


def _link_of_axis(stride: int, size: int, base: Mesh, links: tuple[LinkProfile, ...]) -> LinkProfile:
    """The slowest (outermost) link that groups of ``size`` ranks at ``stride`` cross, as one such group sees it."""
    base_stride = base.num_ranks
    for axis, base_size in enumerate(base.sizes):
        base_stride //= base_size
        if stride * size > base_stride and stride < base_stride * base_size:
            link = links[axis]
            lanes = max(1, base_stride // stride)
            if lanes == 1:
                return link
            faster = max(1.0, min(lanes, links[axis + 1].bandwidth / link.bandwidth))
            inside = _link_of_axis(stride, lanes, base, links)
            return replace(link, lanes=faster, inside=inside, ranks_inside=lanes)
    return links[-1]


def named_device(name: str) -> DeviceProfile:
    """A device from the shipped data files."""
    return DeviceProfile.from_json(_device_file(name)["device"])


def named_link(name: str) -> LinkProfile:
    """A link from the shipped data file: NVLink and PCIe generations inside a node, network ports across."""
    links = _data("links.json")
    if name not in links:
        raise PlanError(
            f"no link called {name!r}; there are {', '.join(sorted(links))}. Or measure with `autopar profile`"
        )
    return LinkProfile.from_json(links[name])


def _device_file(name: str) -> dict[str, Any]:
    names = sorted(entry.name.removesuffix(".json") for entry in _folder().iterdir() if entry.name.endswith(".json"))
    names.remove("links")
    if name not in names:
        raise PlanError(f"no device called {name!r}; there are {', '.join(names)}. Or measure with `autopar profile`")
    return _data(f"{name}.json")


def _folder() -> Any:
    return resources.files("autopar.cost") / "data"


@cache
def _data(name: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((_folder() / name).read_text())
    return data


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise PlanError(f"no file {path}; write one with save, or with `autopar profile`")
    try:
        data = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise PlanError(f"{path} is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise PlanError(f"{path} holds a {type(data).__name__}, not a profile or a cluster")
    return data
