"""The public face: `parallelize`, `plan`, `verify`, `compare`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autopar import errors
from autopar import plan as records
from autopar.compile import compile_plan, plan_choices, plan_held
from autopar.cost.machine import Cluster, MachineProfile
from autopar.cost.measure import measure
from autopar.cost.pricing import OPTIMIZER_STATE_BYTES
from autopar.document import Plan
from autopar.errors import AutoparError, MeshError, PlanError
from autopar.loss import LossFn
from autopar.mesh import Mesh
from autopar.runtime.execute import Program
from autopar.runtime.groups import adopt, device_mesh, ensure_processes
from autopar.runtime.module import Built, Engine, make_parallel, make_skeleton
from autopar.session import Report, Session, factorizations, make_plan, memory_bytes, open_session, silent
from autopar.show.compare import Row
from autopar.solve.manual import Manual
from autopar.solve.pins import Pin, Restriction, keep_parameters
from autopar.storage import storage_layout
from autopar.trace import Captured
from autopar.verify import Verification, verify_plan

Batch = Mapping[str, object] | Sequence[object] | torch.Tensor
Grid = int | str | Sequence[int] | Mesh | Cluster
Wanted = records.Plan | Manual | str | Path | None


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh | int | str | Sequence[int] | Mesh | None = None,
    *,
    example_batch: Batch | None = None,
    loss_fn: LossFn | None = None,
    plan: Wanted = None,
    optimizer: str = "adamw",
    memory_limit: float | str | None = None,
    constraints: Sequence[Pin] = (),
    profile: MachineProfile | str | Path | None = None,
    outputs: str = "whole",
    report: Report = silent,
) -> Any:
    """Train ``model`` on all processes by a plan; the training loop stays that of one device.

    The module is changed in place and returned: same class, names and methods; its parameters become DTensors that hold this rank's
    shards (rank 0's values count). It takes the global batch on every rank and returns what the model returns, whole, on every rank.
    Make the optimizer after this call.

    Args:
        model: the module, on the device where it will run, alike on all ranks.
        mesh: a DeviceMesh over all ranks, axis sizes (``(2, 4)``, ``"2x4"``, ``"dp=2,tp=4"``), or the number of ranks, which the planner
            may factor in two axes. The default is the number of ranks.
        example_batch: what the model will be called with, a dict of keywords or a tuple; without it the plan is made at the first call.
        loss_fn: ``loss_fn(output, ...)`` for a model that does not return a scalar loss; arguments that the forward does not take go to it.
        plan: a plan to use (`Plan`, path) or a hand-written configuration (`Manual`); by default the solver chooses.
        optimizer: which one will be used, for the memory of its state: adamw, adam, sgd or sgd_momentum.
        memory_limit: bytes per rank that a step may take, a number or text such as ``"10GiB"``.
        constraints: pins (`autopar.pin`).
        profile: prices; by default this machine is measured once and the result cached.
        outputs: what a call in training mode returns beside the loss: ``"whole"`` gathers every output on every rank, ``"loss"`` gives None
            for outputs that are not scalars, which saves the gathering of large logits.
        report: called with a line of text at every phase.

    Raises:
        MeshError: the mesh does not fit the processes.
        CaptureError: the model is not one graph.
        PlanError: a pin, a plan or a configuration does not fit the model.
        InfeasibleError: nothing fits the memory limit.
    """
    device_type = _device_type(model)
    _check_optimizer(optimizer)
    ensure_processes(device_type)
    world = dist.get_world_size()
    grid = adopt(mesh) if isinstance(mesh, DeviceMesh) else world if mesh is None else mesh
    meshes = _meshes(grid, plan, num_ranks=world)
    if meshes[0].num_ranks != world:
        raise MeshError(
            f"mesh ({meshes[0]}) has {meshes[0].num_ranks} positions, but there are {world} ranks; start as many processes as the mesh has "
            "positions (torchrun --nproc-per-node), or give another mesh"
        )
    wanted = _load(plan)
    machine_of = _machine(profile, meshes, device_type, report)
    limit = memory_bytes(memory_limit)
    known: dict[object, Captured] = {}

    def build(
        skeleton: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], gradients: bool, in_force: records.Plan | None
    ) -> Built:
        session = open_session(
            skeleton, args, kwargs, loss_fn=loss_fn, outputs=outputs, known=known, report=report
        )
        given = in_force or (wanted if isinstance(wanted, records.Plan) else None)

        def choose() -> records.Plan:
            if given is not None and (given.graph_hash == session.hash or in_force is None):
                _check_plan(given, session)
                return given
            restrictions: list[Restriction] = [*constraints] if in_force is None else [keep_parameters(in_force)]
            if in_force is None and isinstance(wanted, Manual):
                restrictions.append(wanted)
            made, _ = make_plan(
                session,
                meshes if in_force is None else [in_force.mesh],
                machine_of,
                memory_limit_bytes=limit if in_force is None or gradients else math.inf,
                restrictions=restrictions,
                optimizer=optimizer,
                training=gradients or in_force is None,
                config=str(wanted) if isinstance(wanted, Manual) else "",
                report=report,
            )
            return made

        return _built(session, _from_first_rank(choose, session), device_type, gradients)

    skeleton = make_skeleton(model)
    engine = Engine(skeleton, build, lambda made: device_mesh(made.mesh, device_type), device_type)
    parallel = make_parallel(model, engine, device_mesh(meshes[0], device_type))
    if example_batch is not None:
        engine.prepare(parallel, *_call(example_batch))
    return parallel


def plan(
    model: nn.Module,
    cluster: Grid,
    batch: Batch,
    *,
    loss_fn: LossFn | None = None,
    plan: Wanted = None,
    optimizer: str = "adamw",
    memory_limit: float | str | None = None,
    constraints: Sequence[Pin] = (),
    profile: MachineProfile | None = None,
    outputs: str = "whole",
    report: Report = silent,
) -> Plan:
    """Plan for a cluster that need not be here; the model and the batch may be on meta, and no processes are started.

    Args:
        model: the module.
        cluster: a `Cluster`, or a grid of its default devices (``8``, ``(4, 8)``, ``"4x8"``, ``"dp=2,tp=4"``).
        batch: what the model will be called with, a dict of keywords or a tuple.
        plan: a saved plan to bind to the model, or a `Manual`.
        profile: prices in place of the cluster's own, one link per axis.

    The other arguments and the errors are those of `parallelize`.
    """
    _check_optimizer(optimizer)
    session = open_session(make_skeleton(model), *_call(batch), loss_fn=loss_fn, outputs=outputs, report=report)
    return _plan_session(
        session,
        cluster,
        wanted=_load(plan),
        optimizer=optimizer,
        limit=memory_bytes(memory_limit),
        constraints=constraints,
        profile=profile,
        report=report,
    )


def verify(
    model: nn.Module, cluster: Grid, batch: Batch, plan: Wanted = None, *, loss_fn: LossFn | None = None, report: Report = silent
) -> Verification:
    """Run a plan on virtual ranks in this one process and compare with the unmodified model.

    Args:
        model: the module with real weights on the CPU.
        cluster: as for `plan`.
        batch: real inputs.
        plan: the plan or configuration to verify; by default the one that the solver chooses.

    Raises:
        InputError: the model has dropout, or is on meta.
    """
    args, kwargs = _call(batch)
    session = open_session(make_skeleton(model), args, kwargs, loss_fn=loss_fn, report=report)
    made = _plan_session(
        session, cluster, wanted=_load(plan), optimizer="adamw", limit=None, constraints=(), profile=None, report=report
    )
    return verify_plan(model, session.captured, session.normal, made, args, kwargs, loss_fn=loss_fn)


def compare(
    model: nn.Module,
    cluster: Grid,
    batch: Batch,
    configs: Mapping[str, Manual | records.Plan],
    *,
    loss_fn: LossFn | None = None,
    optimizer: str = "adamw",
    memory_limit: float | str | None = None,
    profile: MachineProfile | None = None,
    outputs: str = "whole",
    report: Report = silent,
) -> list[Row]:
    """The automatic plan against hand-written configurations, by predicted figures; a row that does not fit says why.

    Args:
        configs: by name; the row of the automatic plan is called ``auto``.
    """
    session = open_session(make_skeleton(model), *_call(batch), loss_fn=loss_fn, outputs=outputs, report=report)
    rows = []
    for name, wanted in {"auto": None, **configs}.items():
        report(f"planning {name}")
        try:
            made = _plan_session(
                session,
                cluster,
                wanted=wanted,
                optimizer=optimizer,
                limit=memory_bytes(memory_limit),
                constraints=(),
                profile=profile,
                report=report,
            )
            rows.append(compare_row(name, made))
        except AutoparError as error:
            rows.append(Row(name, False, str(error), None, None, 0))
    return rows


def compare_row(name: str, made: records.Plan, measured_step_time_s: float | None = None) -> Row:
    """One row of a comparison."""
    moved = sum(c.num_bytes * c.count for c in made.collectives)
    return Row(name, True, "", made.prediction, measured_step_time_s, moved)


def _plan_session(
    session: Session,
    cluster: Grid,
    *,
    wanted: records.Plan | Manual | None,
    optimizer: str,
    limit: float | None,
    constraints: Sequence[Pin],
    profile: MachineProfile | None,
    report: Report,
) -> Plan:
    meshes = _meshes(cluster, wanted)
    described = cluster if isinstance(cluster, Cluster) else Cluster(1, meshes[0].num_ranks)

    def machine_of(mesh: Mesh) -> MachineProfile:
        return profile.for_mesh(mesh) if profile is not None else described.with_mesh(mesh).profile

    restrictions: list[Restriction] = list(constraints)
    if isinstance(wanted, Manual):
        restrictions.append(wanted)
    elif wanted is not None:
        _check_plan(wanted, session)
        restrictions.append(keep_parameters(wanted))
    made, decision = make_plan(
        session,
        meshes,
        machine_of,
        memory_limit_bytes=limit,
        restrictions=restrictions,
        optimizer=optimizer,
        training=True,
        config=str(wanted) if isinstance(wanted, Manual) else "",
        report=report,
    )
    return Plan.of(wanted if isinstance(wanted, records.Plan) else made, session.normal, decision)


def _meshes(grid: Grid, wanted: Wanted, num_ranks: int | None = None) -> list[Mesh]:
    """Candidate meshes for a grid; a plan or configuration brings its own."""
    base: list[Mesh]
    if isinstance(grid, Cluster):
        base = [grid.mesh]
    elif isinstance(grid, Mesh):
        base = [grid]
    elif isinstance(grid, int):
        if grid < 1:
            raise MeshError(f"a mesh has at least one rank, got {grid}")
        base = factorizations(grid)
    elif isinstance(grid, str):
        base = [Mesh.parse(grid)] if "=" in grid else [Mesh.of(_sizes(grid))]
    else:
        base = [Mesh.of(tuple(grid))]
    wanted = _load(wanted)
    if isinstance(wanted, Manual):
        return [wanted.mesh(num_ranks or base[0].num_ranks)]
    if isinstance(wanted, records.Plan):
        if wanted.mesh.num_ranks != base[0].num_ranks:
            raise MeshError(f"the plan was made for mesh ({wanted.mesh}), {wanted.mesh.num_ranks} ranks; here are {base[0].num_ranks}")
        return [wanted.mesh]
    return base


def _sizes(text: str) -> tuple[int, ...]:
    parts = text.split("x")
    if not all(part.isdigit() for part in parts):
        raise MeshError(f"a mesh reads like '8', '2x4' or 'dp=2,tp=4', got {text!r}")
    return tuple(map(int, parts))


def _machine(
    profile: MachineProfile | str | Path | None, meshes: Sequence[Mesh], device_type: str, report: Report
) -> Callable[[Mesh], MachineProfile]:
    """Prices for candidate meshes: measured on this machine unless given."""
    if isinstance(profile, str | Path):
        profile = MachineProfile.load(profile)
    measured = profile if profile is not None else measure(device_mesh(meshes[0], device_type), report=report)
    if len(measured.links) != len(meshes[0].sizes):
        raise MeshError(f"the profile has {len(measured.links)} links, but mesh ({meshes[0]}) has {len(meshes[0].sizes)} axes; measure it on this mesh")
    cluster = Cluster.from_mesh(meshes[0], measured)
    return lambda mesh: cluster.with_mesh(mesh).profile


def _load(plan: Wanted) -> records.Plan | Manual | None:
    return records.Plan.load(plan) if isinstance(plan, str | Path) else plan


def _call(batch: Batch) -> tuple[tuple[object, ...], dict[str, object]]:
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return ((batch,), {}) if isinstance(batch, torch.Tensor) else (tuple(batch), {})


def _device_type(model: nn.Module) -> str:
    devices = {p.device.type for p in model.parameters()}
    if not devices or "meta" in devices:
        raise PlanError(f"parallelize needs a model with weights on one device, got {sorted(devices) or 'no parameters'}; use autopar.plan for a model on meta")
    if len(devices) > 1:
        raise PlanError(f"the model lies on several device types {sorted(devices)}; move it to one")
    return devices.pop()


def _check_optimizer(name: str) -> None:
    if name not in OPTIMIZER_STATE_BYTES:
        raise PlanError(f"optimizer {name!r} is unknown; its state is known for {', '.join(OPTIMIZER_STATE_BYTES)}")


def _check_plan(given: records.Plan, session: Session) -> None:
    if given.graph_hash != session.hash:
        raise PlanError(
            f"the plan was made for another graph (plan {given.graph_hash}: {given.model} on {dict(given.batch)}; here {session.hash}: "
            f"{session.name} on {dict(session.batch)}); plan again for this model and batch"
        )
    plan_choices(session.normal, given)


def _from_first_rank(choose: Callable[[], records.Plan], session: Session) -> records.Plan:
    """Rank 0's plan on every rank, after a check that all ranks captured the same graph. Rank 0's error is every rank's error."""
    hashes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(hashes, session.hash)
    if len(set(hashes)) > 1:
        raise PlanError(f"the ranks captured different graphs ({dict(enumerate(hashes))}); build the same model and give the same shapes on every rank")
    payload: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            payload = [("plan", choose().to_json())]
        except AutoparError as error:
            payload = [(type(error).__name__, str(error))]
    dist.broadcast_object_list(payload, 0)
    kind, text = payload[0]
    if kind != "plan":
        raise getattr(errors, kind)(text)
    return records.Plan.from_json(text)


def _built(session: Session, made: records.Plan, device_type: str, gradients: bool) -> Built:
    compiled = compile_plan(session.normal, made, device=torch.device(device_type), training=gradients)
    held = plan_held(session.normal, made)
    nodes = session.normal.module.graph.find_nodes(op="placeholder")
    names, layouts = [], {}
    for node, entry in zip(nodes, session.captured.placeholders, strict=True):
        names.append(None if entry.source.value == "input" else entry.name)
        if node in held:
            layouts[(entry.name, *entry.aliases)] = storage_layout(made.mesh, session.normal.factors.of(node), held[node])
    program = Program(compiled.halves, tuple(names), session.output_names())
    bound = Plan.of(made, session.normal)
    return Built(bound, program, layouts, session.captured.out_spec, session.captured.outputs)
