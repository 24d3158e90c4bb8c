"""Machines that need not be here: a `Cluster` names one by its shape and its parts, whose numbers are in data files with their sources."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from autopar.cost.device import DeviceProfile
from autopar.cost.machine import ASSUMED_OVERLAP, LinkProfile, MachineProfile, level_of, read_json
from autopar.errors import MeshError, PlanError
from autopar.mesh import Mesh
from autopar.units import is_whole, number_text, seconds_text

BETWEEN_NODES, INSIDE_NODE = "between nodes", "inside a node"
"""Levels of the links of a cluster of named parts."""


@dataclass(frozen=True, slots=True)
class Level:
    """Groups of nodes that reach each other better than other nodes: racks, pods, datacenters. The public ``autopar.Level``.

    ``Level("pod", 384, oversubscription=7)``: pods of 384 nodes with full bandwidth inside, and between pods one uplink for seven ports, as
    in the cluster of Llama 3 (arXiv 2407.21783, section 3.3.1: 3,072 GPUs in a pod).

    Args:
        name: what a group is called.
        nodes: in a group; a multiple of those of the level below.
        oversubscription: how many times what the uplinks of a group carry its ranks could send, on the links of the cluster's ``inter``.
        latency_s: seconds that a message between groups takes longer than one inside.

    Raises:
        MeshError: a number is out of range.
    """

    name: str
    nodes: int
    oversubscription: float = 1.0
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        is_named = isinstance(self.name, str) and self.name and is_whole(self.nodes)
        if not (is_named and all(isinstance(number, int | float) for number in (self.oversubscription, self.latency_s))) or not (
            self.nodes >= 1 and 1 <= self.oversubscription < math.inf and 0 <= self.latency_s < math.inf
        ):
            given = ", ".join(f"{entry.name}={getattr(self, entry.name)!r}" for entry in fields(self))
            raise MeshError(f"({given}) is no level: it needs a name, nodes >= 1, a finite oversubscription >= 1 and latency_s >= 0")

    def __str__(self) -> str:
        parts = [f"{self.name}s of {number_text(self.nodes, 'node')}"]
        parts += [f"1:{self.oversubscription:g}"] if self.oversubscription > 1 else []
        parts += [f"{seconds_text(self.latency_s)} apart"] if self.latency_s else []
        return " ".join(parts)

    @staticmethod
    def _from_json(data: Mapping[str, Any], path: str) -> Level:
        try:
            return Level(**data)
        except TypeError as error:
            raise PlanError(f"{path} is not a cluster: its level {data} is none ({error}); write it with Cluster.save") from error

    def link_of(self, inter: LinkProfile) -> LinkProfile:
        """Between groups, on links that are ``inter`` inside of them."""
        return replace(
            inter,
            alpha_s=inter.alpha_s + self.latency_s,
            bandwidth=inter.bandwidth / self.oversubscription,
            protocols=tuple((alpha_s + self.latency_s, base_s, share) for alpha_s, base_s, share in inter.protocols),
            level=f"between {self.name}s",
        )


@dataclass(frozen=True, slots=True)
class Cluster:
    """A machine by its shape and the names of its parts; no device need be present. The public ``autopar.Cluster``.

    ``Cluster(4, 8, "a100-80gb") + Cluster(2, 8, "h100")`` has two kinds of nodes: stages of a pipeline that lie in nodes of one kind are
    priced, and limited in memory, by their own device; ranks that share an op wait for the slowest of them.

    Args:
        nodes: hosts.
        gpus_per_node: devices in each.
        device: a name that `named_device` knows.
        inter: link across nodes, a name that `named_link` knows; the default is what the device usually comes with, as ib-400 with h100.
        intra: link inside a node; likewise.
        grid: the ranks regrouped, see `with_mesh`.
        measured: a measured profile in place of named parts, see `from_mesh`.
        measured_mesh: the mesh it was measured on.
        others: nodes of other kinds, whose ranks come after.
        levels: groups of nodes, the innermost first; a cluster that is one group has no links between them.

    Raises:
        MeshError: a number is not positive, a part is of another kind, the grid has other numbers of ranks, the nodes of a sum have
            different numbers of devices, or groups of a level do not come out even.
        PlanError: there is no such device or link.
    """

    nodes: int = 1
    gpus_per_node: int = 8
    device: str = "a100-80gb"
    inter: str | None = None
    intra: str | None = None
    grid: Mesh | None = None
    measured: MachineProfile | None = None
    measured_mesh: Mesh | None = None
    others: tuple[Cluster, ...] = ()
    levels: tuple[Level, ...] = ()

    def __post_init__(self) -> None:
        if not all(is_whole(count) and count >= 1 for count in (self.nodes, self.gpus_per_node)):
            raise MeshError(
                f"a Cluster needs at least one node and one device, got nodes={self.nodes!r}, gpus_per_node={self.gpus_per_node!r}"
            )
        self._check_parts()
        if self.measured is None:  # wrong names fail here, not at first use
            _check_named(device=self.device, intra=self.intra, inter=self.inter)
            named_device(self.device)
            for name in self._link_names:
                named_link(name)
        if self.grid is not None and self.grid.num_ranks != self._base_mesh.num_ranks:
            raise MeshError(
                f"mesh ({self.grid}) has {number_text(self.grid.num_ranks, 'rank')}, but the cluster ({self._base_mesh}) has "
                f"{self._base_mesh.num_ranks}; give axis sizes whose product is {self._base_mesh.num_ranks}"
            )
        self._check_levels()

    def _check_parts(self) -> None:
        """Raise `MeshError` if a part is of another kind."""
        for name, kind, example in (("others", Cluster, "Cluster(2, 8)"), ("levels", Level, "Level('pod', 4)")):
            given = getattr(self, name)
            if not isinstance(given, tuple | list) or not all(isinstance(part, kind) for part in given):
                raise MeshError(f"{name} of a Cluster is a tuple, such as ({example},), got {given!r}")
            object.__setattr__(self, name, tuple(given))
        for name in ("grid", "measured_mesh"):
            given = getattr(self, name)
            if not isinstance(given, Mesh | None):
                raise MeshError(f"{name} of a Cluster is a Mesh, such as Mesh.parse('dp=2,tp=4'), got {given!r}")
        if not isinstance(self.measured, MachineProfile | None) or (self.measured is None) != (self.measured_mesh is None):
            raise MeshError("measured of a Cluster is a MachineProfile, with its measured_mesh; Cluster.from_mesh gives both")

    def _check_levels(self) -> None:
        if self.levels and self.measured is not None:
            raise MeshError("a measured cluster has the links that were measured, and no levels; describe it by its parts")
        below = 1
        for level in self.levels:
            if level.nodes % below:
                raise MeshError(f"{level} do not hold whole groups of {number_text(below, 'node')}; give a multiple of {below}")
            if self._num_nodes > level.nodes and self._num_nodes % level.nodes:
                nodes = number_text(self._num_nodes, "node")
                raise MeshError(f"{nodes} are no whole {level}; give a number of nodes that is a multiple of {level.nodes}, or less")
            below = level.nodes

    def __add__(self, other: Cluster) -> Cluster:
        """The nodes of both, with the ranks of the other after these."""
        if not isinstance(other, Cluster):
            return NotImplemented
        for cluster in (self, other):
            if cluster.grid is not None or cluster.measured is not None:
                raise MeshError(f"clusters are added as nodes, but ({cluster.mesh}) is regrouped or measured; add first, then with_mesh")
        if self.gpus_per_node != other.gpus_per_node:
            raise MeshError(
                f"nodes of {self.gpus_per_node} and of {other.gpus_per_node} devices make no grid; describe the larger as several nodes"
            )
        if self.levels != other.levels:
            raise MeshError(
                f"clusters in {_levels_text(self.levels)} and in {_levels_text(other.levels)} are not added: their nodes share no network; "
                "give both the same levels"
            )
        return replace(self, others=(*self.others, replace(other, others=()), *other.others))

    @staticmethod
    def from_mesh(mesh: Mesh, profile: MachineProfile | str | Path) -> Cluster:
        """The machine that ``profile`` was measured on, or its file, with the ranks of ``mesh``.

        It has a link for each axis of the mesh, or was measured on another grid of as many ranks, which are regrouped then
        (`with_mesh`). Of groups of other sizes than were measured the model tells the price.

        Raises:
            MeshError: the links are those of other axes, or one rank was measured, which tells nothing of links.
            PlanError: the file is no profile.
        """
        if not isinstance(mesh, Mesh):
            raise MeshError(f"mesh is a Mesh, such as Mesh.parse('dp=2,tp=4'), got {mesh!r}")
        profile = profile if isinstance(profile, MachineProfile) else MachineProfile.load(profile)
        sizes = tuple(link.group_size for link in profile.links)
        is_regrouped = sizes != mesh.sizes and math.prod(sizes) == mesh.num_ranks
        measured_mesh = Mesh.of(sizes) if is_regrouped else mesh
        measured = profile.for_mesh(measured_mesh)
        for name, size, link in zip(measured_mesh.names, measured_mesh.sizes, measured.links, strict=True):
            if size > 1 and link.group_size == 1:
                raise MeshError(
                    f"axis {name} has {size} ranks, but profile of {profile.origin or profile.device.name!r} was measured on one, where "
                    f"nothing is sent; measure as many with `autopar profile --mesh {size}`"
                )
        return Cluster(1, mesh.num_ranks, profile.device.name, grid=mesh, measured=measured, measured_mesh=measured_mesh)

    def with_mesh(self, mesh: Mesh) -> Cluster:
        """The same machine with its ranks regrouped; each axis takes the slowest link that it crosses.

        Groups that cross nodes are taken to talk all at once, so that those of one node share its ports: a group with r ranks
        in a node runs rings at r times the share of one rank, but not faster than inside the node.
        """
        return replace(self, grid=mesh)

    @property
    def mesh(self) -> Mesh:
        """The ranks: nodes by devices, or as they are regrouped."""
        return self.grid or self._base_mesh

    @property
    def num_ranks(self) -> int:
        """Devices of all nodes."""
        return self.mesh.num_ranks

    @property
    def memory_bytes(self) -> int:
        """Memory of one device, the smallest if there are several kinds."""
        own = self.measured.device if self.measured else named_device(self.device)
        return min([own.memory_bytes, *(other.memory_bytes for other in self.others)])

    @property
    def device_name(self) -> str:
        """The devices, in words."""
        return " and ".join(dict.fromkeys(cluster.device for cluster in (self, *self.others)))

    @property
    def profile(self) -> MachineProfile:
        """Device, and one link per axis of `mesh`."""
        if self.others:
            kinds = []
            for cluster in (self, *self.others):
                alike = replace(cluster, nodes=self._num_nodes, grid=self.grid, others=())
                kinds.append((cluster.nodes * self.gpus_per_node, replace(alike.profile, origin=cluster._named_origin)))
            return MachineProfile.mixed(kinds)
        if self.measured is None:
            base, sizes, known = MachineProfile(named_device(self.device), (), self._named_origin), *self._named_links()
        else:
            if self.mesh == self._base_mesh:
                return self.measured
            named = zip(self._base_mesh.names, self.measured.links, strict=True)
            base, sizes = self.measured, self._base_mesh.sizes
            known = tuple(replace(link, level=link.level or level_of(name)) for name, link in named)
        stride, links = self.mesh.num_ranks, []
        for size in self.mesh.sizes:
            stride //= size
            links.append(_link_of_axis(stride, size, sizes, known))
        return replace(base, links=tuple(links))

    @property
    def _named_origin(self) -> str:
        levels = f", {_levels_text(self.levels)}" if self.levels else ""
        return f"{number_text(self.nodes, 'node')} x {self.gpus_per_node} {self.device}, {self._link_names[1]}{levels}"

    @property
    def _link_names(self) -> tuple[str, str]:
        """Inside a node and across nodes."""
        file = _device_file(self.device)
        return file["intra"] if self.intra is None else self.intra, file["inter"] if self.inter is None else self.inter

    @property
    def _num_nodes(self) -> int:
        """Of all kinds."""
        return sum(cluster.nodes for cluster in (self, *self.others))

    @property
    def _base_mesh(self) -> Mesh:
        if self.measured_mesh is not None:
            return self.measured_mesh
        axes = [(name, size) for name, size in (("node", self._num_nodes), ("gpu", self.gpus_per_node)) if size > 1]
        names, sizes = zip(*(axes or [("gpu", 1)]), strict=True)
        return Mesh(names, sizes)

    def _named_links(self) -> tuple[tuple[int, ...], tuple[LinkProfile, ...]]:
        """How many parts each level has in one of the next outer, and what joins them; the outermost first."""
        intra, inter = map(named_link, self._link_names)
        ports = _data("links.json")[self._link_names[1]].get("ports_per_node")
        if ports:  # fewer ports than devices: all devices share them
            each = min(1.0, ports / self.gpus_per_node)
            inter = replace(inter, bandwidth=inter.bandwidth * each, alone=1 / each)
        overlap = named_overlap(self.device)
        inter = replace(inter, level=BETWEEN_NODES, is_network=True, overlap=overlap)
        intra = replace(intra, level=INSIDE_NODE, overlap=overlap)
        found, below, link = [(self.gpus_per_node, intra)], 1, inter
        for level in self.levels:
            if level.nodes < self._num_nodes:
                found.append((level.nodes // below, link))
                below, link = level.nodes, level.link_of(link)
        found.append((self._num_nodes // below, link))
        sizes, links = zip(*((size, link) for size, link in reversed(found) if size > 1 or link is intra), strict=True)
        return sizes, links

    def save(self, path: str | Path) -> None:
        """Write it as JSON."""
        Path(path).write_text(json.dumps(self._to_json(), indent=1) + "\n")

    def _to_json(self) -> dict[str, Any]:
        return asdict(self) | {
            "grid": str(self.grid) if self.grid else None,
            "measured_mesh": str(self.measured_mesh) if self.measured_mesh else None,
            "others": [other._to_json() for other in self.others],
        }

    @staticmethod
    def load(path: str | Path) -> Cluster:
        """Read what `save` wrote.

        Raises:
            PlanError: it is no cluster.
        """
        return Cluster._from_json(read_json(Path(path)), str(path))

    @staticmethod
    def _from_json(data: Mapping[str, Any], path: str) -> Cluster:
        missing = {"nodes", "gpus_per_node", "device"} - data.keys()
        unknown = data.keys() - {entry.name for entry in fields(Cluster)}
        if missing or unknown:
            what = f"it lacks {', '.join(sorted(missing))}" if missing else f"it has {', '.join(sorted(unknown))}"
            raise PlanError(f"{path} is not a cluster: {what}; write it with Cluster.save")
        if bool(data.get("measured")) != bool(data.get("measured_mesh")):
            raise PlanError(f"{path} is not a cluster: measured and measured_mesh go together; write it with Cluster.save")
        try:
            meshes = {key: Mesh.parse(data[key]) if data.get(key) else None for key in ("grid", "measured_mesh")}
            measured = MachineProfile.from_json(data["measured"]) if data.get("measured") else None
            others = tuple(Cluster._from_json(other, path) for other in data.get("others", ()))
            levels = tuple(Level._from_json(level, path) for level in data.get("levels", ()))
            return Cluster(**dict(data) | meshes | {"measured": measured, "others": others, "levels": levels})
        except (AttributeError, MeshError, TypeError) as error:
            raise PlanError(f"{path} is not a cluster: {error}; write it with Cluster.save") from error


def _link_of_axis(stride: int, size: int, sizes: tuple[int, ...], links: tuple[LinkProfile, ...]) -> LinkProfile:
    """The slowest (outermost) link that groups of ``size`` ranks at ``stride`` cross, as one such group sees it.

    Of its ranks that share a part of the level, each of which has its share of what leads out, a ring may use all, as far as one carries
    as much inside. Where parts do not hold whole strides their ranks differ in number, and each is taken to be alone.
    """
    part = math.prod(sizes)  # ranks in a part of the level
    for level, count in enumerate(sizes):
        whole, part = part, part // count
        if stride < whole and (stride * size > part or part % (stride * size)):
            link, lanes = links[level], math.gcd(part // stride, size) if part % stride == 0 else 1
            if lanes == 1:
                return replace(link, inside=links[-1], ranks_inside=1) if level + 1 < len(links) else link
            inside = _link_of_axis(stride, lanes, sizes, links)
            faster = max(1.0, min(lanes, inside.bandwidth * inside.lanes / link.bandwidth))
            return replace(link, lanes=faster, inside=inside, ranks_inside=lanes)
    return links[-1]


def _check_named(**parts: object) -> None:
    """Raise `MeshError` if a part is no text, and not left out."""
    for argument, name in parts.items():
        if not isinstance(name, str | None) or (name is None and argument == "device"):
            raise MeshError(f"{argument} of a Cluster is the name of a part, such as 'h100' or 'ib-400', got {name!r}")


def _levels_text(levels: Sequence[Level]) -> str:
    return ", ".join(map(str, levels)) or "no levels"


@cache
def named_device(name: str) -> DeviceProfile:
    """A device from the shipped data files."""
    return DeviceProfile.from_json(_device_file(name)["device"])


def named_overlap(name: str) -> float:
    """`LinkProfile.overlap` of all links of a device from the shipped data files: what computation there loses beside a collective."""
    return float(_device_file(name).get("overlap", ASSUMED_OVERLAP))


@cache
def named_link(name: str) -> LinkProfile:
    """A link from the shipped data file: NVLink and PCIe generations inside a node, network ports across."""
    links = _data("links.json")
    if name not in links:
        raise PlanError(
            f"no link called {name!r}; there are {', '.join(sorted(links))}. Or measure with `autopar profile`"
        )
    return LinkProfile.from_json({key: value for key, value in links[name].items() if key != "ports_per_node"})


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
