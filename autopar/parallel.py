"""`parallelize`: plan on rank 0, agree on all ranks, and run the model by the plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autopar import errors
from autopar.capture.loss import LossFn
from autopar.capture.trace import Captured
from autopar.compression import Compression
from autopar.cost.cluster import Cluster
from autopar.cost.machine import MachineProfile, profile_of
from autopar.cost.measure import measure
from autopar.errors import AutoparError, InfeasibleError, InputError, MeshError, MicrobatchError, PlanError
from autopar.mesh import Mesh
from autopar.offload import Offload
from autopar.passes.rows import RowSplit
from autopar.plan import Plan as PlanRecord
from autopar.planner.choose import MachineOf, make_plan, memory_bytes
from autopar.planner.request import (
    Batch,
    Wanted,
    check_flags,
    check_functions,
    check_optimizer,
    check_plan,
    compression_of,
    grids_of,
    load_plan,
    offload_of,
    positional_and_keyword,
    precision_of,
    refuse_other_optimizer,
    shapes_in_force,
    shapes_of,
)
from autopar.planner.session import Session, open_session
from autopar.precision import Precision
from autopar.programs import build_program
from autopar.record import Record
from autopar.report import Report, silent
from autopar.runtime.groups import adopt, device_mesh, ensure_processes
from autopar.runtime.module import Built, Engine, check_module, make_parallel, make_skeleton, refuse_parallel
from autopar.runtime.values import is_meta, plan_values
from autopar.solve.manual import Manual
from autopar.solve.pins import Pin, Restriction, keep_parameters, pins_of
from autopar.solve.shapes import Shape
from autopar.units import is_whole, number_text


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh | int | str | Sequence[int] | Mesh | None = None,
    *,
    example_batch: Batch | None = None,
    loss_fn: LossFn | None = None,
    plan: Wanted = None,
    optimizer: str = "adamw",
    precision: Precision | torch.dtype | str | None = None,
    offload: Offload | str | None = None,
    compress: Compression | str | None = None,
    memory_limit: float | str | None = None,
    constraints: Sequence[Pin] | Pin = (),
    profile: MachineProfile | str | Path | None = None,
    outputs: str = "whole",
    pipeline: bool = True,
    average_microbatches: bool = False,
    compare_batches: int = 3,
    device: str | None = None,
    weights: str | Path | None = None,
    initialize: bool = True,
    report: Report = silent,
) -> Any:
    """Train ``model`` on all processes by a plan; the training loop stays that of one device.

    The module is changed in place and returned: same class, names and methods; its parameters become DTensors that hold this rank's
    shards (rank 0's values count). It takes the global batch on every rank and returns what the model returns, whole, on every rank.
    Make the optimizer after this call.

    A model on meta gets its values when it has its plan, a tensor at a time, of which each rank keeps its shard: from ``weights``, or else
    as its construction was recorded (`autopar.deferred`), or else by ``reset_parameters()`` of its modules and, in models of transformers,
    ``_init_weights``, each module with a seed of its own. They are the same under every plan.

    Args:
        model: the module, on the device where it will run or on meta, alike on all ranks.
        mesh: a DeviceMesh over all ranks, axis sizes (``(2, 4)``, ``"2x4"``, ``"dp=2,tp=4"``), or the number of ranks, which the planner
            may factor in two axes. The default is the number of ranks.
        example_batch: what the model will be called with, a dict of keywords or a tuple; without it the plan is made at the first call.
        loss_fn: ``loss_fn(output, ...)`` for a model that does not return a scalar loss; arguments that the forward does not take go to it.
            To predict, call the model in ``eval()`` without them: it gives its own outputs.
        plan: a plan to use (`Plan`, path) or a hand-written configuration (`Manual`); by default the solver chooses.
        optimizer: which one will be used, for the memory of its state and the time of its update: adamw, adam, adamw_fused and adam_fused
            (``fused=True``), adamw_amsgrad, adam_amsgrad, nadam, radam, adamax, adadelta, adagrad, adagrad_fused, rmsprop,
            rmsprop_momentum, rmsprop_centered, asgd, sgd, sgd_momentum, adafactor, or adamw_master, which keeps float32 copies of 16-bit
            parameters. Training may use any of `torch.optim` but LBFGS and SparseAdam; of those that are not here take the most alike.
        precision: what the model computes in, whatever its parameters are stored, updated and saved in: ``"bf16"``, ``"fp16"`` (scale the
            loss with `torch.amp.GradScaler`), ``"fp32"``, their dtypes, or a `Precision`. Gradients are summed over ranks in float32, with
            ``"bf16/bf16"`` in bfloat16, which halves what travels. By default it is that of the plan or configuration, and without one the
            model computes in what its parameters are in; a `torch.autocast` around the call or inside of the model is followed in any
            case.
        offload: what lies in the memory of the host: ``"optimizer"`` (stored shards, their gradients and optimizer state, which the host
            updates), ``"parameters"`` (the same, with copies on the device about their use alone), ``"activations"`` (large ones, from the
            forward to the backward), or several joined by ``+``; ``"auto"``: what is fastest, where nothing fits without. By default that
            of the plan or configuration, or nothing. Host and device of CPUs are one memory: there it is done, and saves none.
        compress: how gradients of parameters travel while they are reduced: ``"bf16"``, ``"fp16"``, ``"int8"``, ``"topk:0.01"``,
            ``"powersgd:4"``, or a `Compression`, which tells the schemes; ``"powersgd:4 after 100"`` leaves gradients as they are in the
            first 100 calls with gradients. All are lossy, and none is ever chosen by the planner;
            `Plan.compressions` says which would pay. By default that of the plan, and without one gradients travel as they are.
        memory_limit: bytes per rank that a step may take, a number or text such as ``"10GiB"``.
        constraints: pins (`autopar.pin`).
        profile: prices; by default this machine is measured once and the result cached.
        outputs: what a call in training mode returns beside the loss: ``"whole"`` gathers every output on every rank, ``"loss"`` gives None
            for outputs that are not scalars, which saves the gathering of large logits.
        pipeline: whether the planner may cut the model into pipeline stages.
        average_microbatches: for a model that needs its whole batch at once (batch statistics, contrastive losses): allow micro-batches
            nevertheless, each a batch of its own, and train on the average of their losses, as gradient accumulation by hand does
            (`passes.average`). Without it such a batch stays whole; a model whose micro-batches are exact has those in any case.
        compare_batches: how many calls, from the first, check that all ranks were given the same batch; the call raises `InputError` on all
            of them if not. 0 checks none.
        device: where a model on meta will run, ``"cpu"`` or ``"cuda"``, which is the default where there is one.
        weights: folder of safetensors, which is read when the plan is made, as by `autopar.load_weights`. A model on meta may have more
            tensors than the files.
        initialize: False for a model on meta that `autopar.load` or `autopar.load_weights` will give values: what a checkpoint holds is NaN
            until then.
        report: called with a line of text at every phase.

    Raises:
        MeshError: the mesh does not fit the processes.
        CaptureError: the model is not one graph.
        PlanError: a pin, a plan or a configuration does not fit the model.
        InfeasibleError: nothing fits the memory limit.
        StartError: a model on meta has tensors that nothing gives values.
    """
    device_type = _device_type(model, device)
    refuse_parallel(model)
    wanted = load_plan(plan)
    check_functions(loss_fn, report)
    check_flags(pipeline=pipeline, average_microbatches=average_microbatches, initialize=initialize)
    wished = precision_of(precision, wanted)
    check_optimizer(optimizer, wished)
    refuse_other_optimizer(optimizer, wanted)
    if not is_whole(compare_batches) or compare_batches < 0:
        raise InputError(f"compare_batches counts calls, and there cannot be {compare_batches!r}; 0 compares none")
    ensure_processes(device_type)
    grids = _grids(mesh, plan)
    builder = _Builder(
        grids,
        _machine(profile, grids, device_type, report),
        wanted=wanted,
        device_type=device_type,
        loss_fn=loss_fn,
        outputs=outputs,
        optimizer=optimizer,
        precision=wished,
        offload=offload_of(offload, wanted),
        compression=compression_of(compress, wanted),
        limit=memory_bytes(memory_limit),
        constraints=pins_of(constraints),
        pipeline=pipeline,
        average=average_microbatches,
        report=report,
    )
    start = plan_values(model, weights, device_type, initialize=initialize)
    mesh_of = partial(_mesh_of, device_type)
    exact_calls = builder.compression.after if builder.compression is not None else 0
    engine = Engine(make_skeleton(model), builder, mesh_of, device_type, Record, compare_batches, exact_calls, start=start)
    parallel = make_parallel(model, engine, device_mesh(grids[0], device_type))
    if example_batch is not None:
        engine.prepare(parallel, *positional_and_keyword(example_batch))
    return parallel


def _mesh_of(device_type: str, made: PlanRecord) -> DeviceMesh:
    return device_mesh(made.grid, device_type)


def _grids(mesh: DeviceMesh | int | str | Sequence[int] | Mesh | None, plan: Wanted) -> list[Mesh]:
    """Candidate meshes of all processes."""
    world = dist.get_world_size()
    grid = adopt(mesh) if isinstance(mesh, DeviceMesh) else world if mesh is None else mesh
    grids = grids_of(grid, plan, num_ranks=world)
    if grids[0].num_ranks != world:
        raise MeshError(
            f"mesh ({grids[0]}) has {number_text(grids[0].num_ranks, 'position')}, but there are {number_text(world, 'rank')}; "
            "start as many processes as the mesh has positions (torchrun --nproc-per-node), or give another mesh"
        )
    return grids


@dataclass(frozen=True, slots=True)
class _Builder:
    """Plans and compiles each kind of call of a parallel model; the arguments are those of `parallelize`."""

    grids: Sequence[Mesh]
    machine_of: MachineOf
    wanted: PlanRecord | Manual | None
    device_type: str
    loss_fn: LossFn | None
    outputs: str
    optimizer: str
    precision: Precision | None
    offload: Offload | None
    compression: Compression | None
    limit: float | None
    constraints: tuple[Pin, ...]
    pipeline: bool
    average: bool
    report: Report
    known: dict[object, Captured] = field(default_factory=dict)

    def __call__(
        self,
        skeleton: nn.Module,
        args: tuple[object, ...],
        kwargs: dict[str, object],
        *,
        gradients: bool,
        is_exact: bool,
        in_force: PlanRecord | None,
        split: RowSplit | None,
        dealt: Sequence[int],
    ) -> Built:
        session = _on_all_ranks(
            lambda: open_session(
                skeleton,
                args,
                kwargs,
                loss_fn=self.loss_fn,
                outputs=self.outputs,
                precision=self.precision,
                known=self.known,
                report=self.report,
            )
        )
        choose = self._first_plan if in_force is None else lambda s: self._next_plan(s, in_force, gradients)
        made = _from_first_rank(lambda: choose(session))
        return build_program(session, made, self.device_type, split if dealt else None, dealt, gradients=gradients, is_exact=is_exact)

    def _first_plan(self, session: Session) -> PlanRecord:
        """The plan that decides how parameters are stored."""
        if isinstance(self.wanted, PlanRecord):
            check_plan(self.wanted, session)
            return self.wanted
        restrictions: list[Restriction] = [*self.constraints]
        if self.wanted is not None:
            restrictions.append(self.wanted)
        shapes, widen = shapes_of(self.grids, self.wanted, session), self.wanted is None and self.pipeline
        return self._solve(
            session, shapes, restrictions, self.offload, limit=self.limit, training=True, widen=widen, average=self.average
        )

    def _next_plan(self, session: Session, in_force: PlanRecord, gradients: bool) -> PlanRecord:
        """A plan for another kind of call, with the parameters as they are stored, in the first shape that can be."""
        first, *others = shapes_in_force(in_force, session, training=gradients)
        if first.pipeline == in_force.pipeline and in_force.graph_hash == session.hash_for(first.pipeline):
            return in_force
        try:
            return self._solve_again(session, first, in_force, gradients)
        except (InfeasibleError, MicrobatchError) as error:
            if not others:
                raise
            self.report(f"one micro-batch in place of {first.pipeline.microbatches}: {error}")
            return self._solve_again(session, others[0], in_force, gradients)

    def _solve_again(self, session: Session, shape: Shape, in_force: PlanRecord, gradients: bool) -> PlanRecord:
        limit, offload = self.limit if gradients else math.inf, Offload.of(in_force.offload)
        average = shape.pipeline.is_average
        made = self._solve(session, [shape], [keep_parameters(in_force)], offload, limit=limit, training=gradients, average=average)
        homes = {p.name: p.stages for p in in_force.parameters}  # which store it, though fewer may use it now
        return replace(made, parameters=tuple(replace(p, stages=homes.get(p.name, p.stages)) for p in made.parameters))

    def _solve(
        self,
        session: Session,
        shapes: Sequence[Shape],
        restrictions: Sequence[Restriction],
        offload: Offload | None,
        *,
        limit: float | None,
        training: bool,
        widen: bool = False,
        average: bool,
    ) -> PlanRecord:
        made, _ = make_plan(
            session,
            shapes,
            self.machine_of,
            memory_limit_bytes=limit,
            restrictions=restrictions,
            optimizer=self.optimizer,
            training=training,
            config=str(self.wanted) if isinstance(self.wanted, Manual) else "",
            widen=widen,
            average=average,
            compression=self.compression,
            pipeline=self.pipeline,
            offload=offload,
            report=self.report,
        )
        return made


def _machine(
    profile: MachineProfile | str | Path | None, grids: Sequence[Mesh], device_type: str, report: Report
) -> Callable[[Mesh], MachineProfile]:
    """Prices for candidate meshes: measured on this machine unless given."""
    measured = profile_of(profile) or measure(device_mesh(grids[0], device_type), report=report)
    cluster = Cluster.from_mesh(grids[0], measured)
    return lambda mesh: cluster.with_mesh(mesh).profile


def _device_type(model: nn.Module, wanted: str | None) -> str:
    """Where the model runs: where its weights are, or where those of a model on meta will be."""
    check_module(model)
    if wanted is not None:
        wanted = _type_of(wanted)
    if is_meta(model):
        if wanted == "cuda" and not torch.cuda.is_available():
            raise PlanError("device is 'cuda', and torch finds none here; leave device out, or say 'cpu'")
        return wanted or ("cuda" if torch.cuda.is_available() else "cpu")
    devices = {p.device.type for p in model.parameters()}
    if not devices:
        raise PlanError("parallelize needs a model with parameters; this one has none")
    if len(devices) > 1:
        raise PlanError(f"the model lies on several device types {sorted(devices)}; move it to one")
    if wanted is not None and {wanted} != devices:
        raise PlanError(f"the weights of the model are on {devices.pop()}, not on {wanted}, as device= says; move the model there")
    return devices.pop()


def _type_of(device: object) -> str:
    """The type of a device by its name, "cuda" of "cuda:1"; each rank has the one of its number.

    Raises:
        PlanError: no rank can run there.
    """
    name = str(device) if isinstance(device, torch.device) else device
    kind = name.partition(":")[0] if isinstance(name, str) else ""
    if kind not in ("cpu", "cuda"):
        raise PlanError(f"device is 'cpu' or 'cuda', where the model will run, got {device!r}")
    return kind


def _on_all_ranks(capture: Callable[[], Session]) -> Session:
    """What each rank captures, after a check that it is the same graph on all. An error of one rank is every rank's error."""
    session, own = None, None
    try:
        session = capture()
    except Exception as error:  # of any kind: the others would wait for this rank
        own = error
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, ("graph", session.hash) if session is not None else _told(own))
    if own is not None:
        raise own
    for rank, (kind, text) in enumerate(found):
        if kind != "graph":
            raise getattr(errors, kind)(f"rank {rank}: {text}")
    hashes = [text for _, text in found]
    if len(set(hashes)) > 1:
        raise PlanError(
            f"the ranks captured different graphs ({dict(enumerate(hashes))}); build the same model and give the same shapes on every rank"
        )
    assert session is not None
    return session


def _from_first_rank(choose: Callable[[], PlanRecord]) -> PlanRecord:
    """Rank 0's plan on every rank. Rank 0's error is every rank's error."""
    payload: list[Any] = [None]
    own = None
    if dist.get_rank() == 0:
        try:
            payload = [("plan", choose().to_json())]
        except Exception as error:  # of any kind: the others wait for this rank
            payload, own = [_told(error)], error
    dist.broadcast_object_list(payload, 0)
    if own is not None:
        raise own
    kind, text = payload[0]
    if kind != "plan":
        raise getattr(errors, kind)(text)
    return PlanRecord.from_json(text)


def _told(error: Exception | None) -> tuple[str, str]:
    """What other ranks are told of an error: its kind, if it is one of ours, and its text."""
    if isinstance(error, AutoparError):
        return type(error).__name__, str(error)
    return PlanError.__name__, f"{type(error).__name__}: {error}"
