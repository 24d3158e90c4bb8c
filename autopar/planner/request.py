"""Reading what users ask for: grids, batches, plans and configurations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from autopar.compression import Compression
from autopar.cost.cluster import Cluster
from autopar.cost.updates import MASTER, OPTIMIZER_STATE_BYTES
from autopar.errors import InputError, MeshError, MicrobatchError, PlanError
from autopar.mesh import MICROBATCH, Mesh
from autopar.offload import AUTO, Offload
from autopar.plan import Plan as PlanRecord
from autopar.planner.choose import factorizations
from autopar.planner.damage import load_whole
from autopar.planner.session import Session
from autopar.planner.sound import check_cut, check_parts
from autopar.precision import Precision
from autopar.solve.manual import Manual
from autopar.solve.shapes import Shape
from autopar.units import number_text

Batch = Mapping[str, object] | Sequence[object] | torch.Tensor
Grid = int | str | Sequence[int] | Mesh | Cluster
Wanted = PlanRecord | Manual | str | Path | None


DEFAULT_OPTIMIZER = "adamw"
"""What memory is planned for where nothing else is asked for."""
MAX_RANKS = 2**24
"""More is a typing error, of which all factors would be looked for."""


def grids_of(grid: Grid, wanted: Wanted, num_ranks: int | None = None) -> list[Mesh]:
    """Candidate meshes of all ranks; a plan or configuration brings its own."""
    base: list[Mesh]
    _check_grid(grid)
    if isinstance(grid, Cluster):
        base = [grid.mesh]
    elif isinstance(grid, Mesh):
        base = [grid]
    elif isinstance(grid, int):
        if grid < 1:
            raise MeshError(f"a mesh has at least one rank, got {grid}")
        base = factorizations(grid) if grid <= MAX_RANKS else [Mesh.of(grid)]
    elif isinstance(grid, str):
        base = [Mesh.parse(grid)] if "=" in grid else [Mesh.of(_sizes(grid))]
    else:
        base = [Mesh.of(tuple(grid))]
    if base[0].num_ranks > MAX_RANKS:
        raise MeshError(f"mesh ({base[0]}) has {base[0].num_ranks:,} ranks; at most {MAX_RANKS:,} can be planned for")
    if MICROBATCH in base[0].names:
        raise MeshError(f"mesh ({base[0]}): {MICROBATCH!r} is the axis in time, which plans have beside those of a mesh; name it otherwise")
    wanted = load_plan(wanted)
    if isinstance(wanted, Manual):
        return [wanted.grid(num_ranks or base[0].num_ranks)]
    if isinstance(wanted, PlanRecord):
        if wanted.grid.num_ranks != base[0].num_ranks:
            raise MeshError(
                f"the plan was made for mesh ({wanted.grid}), {number_text(wanted.grid.num_ranks, 'rank')}; here are {base[0].num_ranks}"
            )
        return [wanted.grid]
    return base


def _check_grid(grid: object) -> None:
    if not isinstance(grid, Cluster | Mesh | int | Sequence) or isinstance(grid, bool | bytes):
        known = "a Cluster, a number of ranks, sizes as in (4, 8), or text as '4x8' or 'dp=2,tp=4'"
        raise MeshError(f"a cluster or a grid of devices is {known}, not a {type(grid).__name__}")


def regrouped(grid: Grid) -> list[Mesh]:
    """The other grids of the ranks of a described cluster: with an inner axis that is a part of a node, as for tensor parallelism over 4 of
    8, and of several nodes as one axis."""
    if not isinstance(grid, Cluster) or grid.grid is not None or grid.measured_mesh is not None:
        return []
    parts = [d for d in range(2, grid.gpus_per_node) if grid.gpus_per_node % d == 0]
    flat = [Mesh(("gpu",), (grid.num_ranks,))] if len(grid.mesh.sizes) > 1 else []
    return [Mesh(("part", "gpu"), (grid.num_ranks // part, part)) for part in reversed(parts)] + flat


def shapes_of(grids: Sequence[Mesh], wanted: PlanRecord | Manual | None, session: Session) -> list[Shape]:
    """Candidate shapes on candidate grids; a plan or configuration brings its own."""
    if isinstance(wanted, Manual):
        return [wanted.shape(session.batch_size)]
    if isinstance(wanted, PlanRecord):
        return shapes_in_force(wanted, session)[:1]
    return [Shape(grid) for grid in grids]


def shapes_in_force(plan: PlanRecord, session: Session, *, training: bool = True) -> list[Shape]:
    """The shapes for another kind of call under a plan, of which the first that can be is meant: its stages stay, and its micro-batches
    where they divide the batch, else one. Averaged ones are of training: no other number makes its step, and to evaluate takes none.

    Raises:
        MicrobatchError: averaged micro-batches do not divide the batch.
    """
    pipeline, size, homes = plan.pipeline, session.batch_size, {p.name: p.stages for p in plan.parameters}
    is_average, divides = pipeline.is_average and training, size % pipeline.microbatches == 0
    if is_average and not divides:
        raise MicrobatchError(
            f"the plan averages {pipeline.microbatches} micro-batches, which do not divide the batch of {size}; give batches that are a "
            f"multiple of {pipeline.microbatches}: leave out the last short one (drop_last=True of a DataLoader), or fill it up"
        )
    counts = [pipeline.microbatches] if divides else []
    counts += [] if is_average or 1 in counts else [1]
    return [Shape(plan.mesh, replace(pipeline, microbatches=count, is_average=is_average), homes=homes) for count in counts]


def _sizes(text: str) -> tuple[int, ...]:
    parts = text.split("x")
    if not all(part.isdecimal() for part in parts):
        raise MeshError(f"a mesh reads like '8', '2x4' or 'dp=2,tp=4', got {text!r}")
    return tuple(map(int, parts))


def load_plan(plan: Wanted) -> PlanRecord | Manual | None:
    """What an argument ``plan=`` means.

    Raises:
        PlanError: it is none, or no file of one.
    """
    if isinstance(plan, PlanRecord | Manual | None):
        return plan
    known = "a Plan, a file that Plan.save wrote, a Manual, or None for the planner to choose"
    if not isinstance(plan, str | Path):
        raise PlanError(f"plan is {known}; got {plan!r}")
    if not Path(plan).is_file():
        raise PlanError(f"plan={str(plan)!r} is no file; it takes {known}")
    return load_whole(plan)


def positional_and_keyword(batch: Batch) -> tuple[tuple[object, ...], dict[str, object]]:
    """The arguments of a call.

    Raises:
        InputError: the batch is no call.
    """
    if isinstance(batch, torch.Tensor):
        return (batch,), {}
    if isinstance(batch, Mapping) and all(isinstance(name, str) for name in batch):
        return (), dict(batch)
    if isinstance(batch, Mapping | str | bytes) or not isinstance(batch, Iterable):
        found = f"the keywords {list(batch)}" if isinstance(batch, Mapping) else repr(batch)
        raise InputError(f"the batch is what the model is called with: a dict by keyword, a tuple by position, or a tensor; got {found}")
    return tuple(batch), {}


def check_functions(loss_fn: object, report: object) -> None:
    """Raise `PlanError` if what will be called cannot be."""
    held = [name for name, _ in (*loss_fn.named_parameters(), *loss_fn.named_buffers())] if isinstance(loss_fn, nn.Module) else []
    if held:
        raise PlanError(
            f"loss_fn, a {type(loss_fn).__name__}, holds tensors ({', '.join(held)}), and plans know those of the model alone; let the "
            "model have it and return the loss, or give what it holds among the arguments of the call"
        )
    if isinstance(loss_fn, type) or not (loss_fn is None or callable(loss_fn)):
        what = f"make one, as {loss_fn.__name__}()" if isinstance(loss_fn, type) else "such as torch.nn.functional.cross_entropy"
        raise PlanError(f"loss_fn is a function of the model's output, or a module, got {loss_fn!r}; {what}, or leave it out")
    if not callable(report):
        raise PlanError(f"report is a function of a line of text, such as print, got {report!r}; leave it out to hear nothing")


def check_flags(**flags: object) -> None:
    """Raise `PlanError` if an argument that is yes or no is neither: ``"no"`` would be yes."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise PlanError(f"{name} is True or False, got {value!r}")


def precision_of(given: Precision | torch.dtype | str | None, wanted: PlanRecord | Manual | None) -> Precision | None:
    """What a model is to compute in: what is given, else what a plan or configuration says, else None.

    Raises:
        PlanError: it is unknown, or a plan was made for another.
    """
    asked = Precision.of(given)
    if isinstance(wanted, PlanRecord):
        made = Precision.of(wanted.precision or None)
        if asked is not None and asked != made:
            raise PlanError(
                f"the plan was made for precision {wanted.precision or 'None'!r}, and {str(asked)!r} is asked for; leave precision out, or "
                "plan again"
            )
        return made
    return asked if asked is not None or wanted is None else Precision.of(wanted.precision or None)


def offload_of(given: Offload | str | None, wanted: PlanRecord | Manual | None) -> Offload | None:
    """What is to lie on the host: what a plan or configuration says, else what is given; None where the planner chooses.

    Raises:
        PlanError: it is unknown, or a plan was made for another.
    """
    asked = None if given == AUTO else Offload.of(given)
    if isinstance(wanted, PlanRecord):
        if asked and str(asked) != wanted.offload:
            raise PlanError(
                f"the plan was made for offload {wanted.offload or 'none'!r}, and {str(asked)!r} is asked for; leave offload out, or "
                "plan again"
            )
        return Offload.of(wanted.offload)
    return Offload.of(wanted.offload) if wanted is not None and wanted.offload else asked


def compression_of(given: Compression | str | None, wanted: PlanRecord | Manual | None) -> Compression | None:
    """How gradients are to travel: as is given, else as a plan says, else as they are.

    Raises:
        PlanError: it is unknown, or a plan was made for another.
    """
    asked = Compression.of(given)
    if not isinstance(wanted, PlanRecord):
        return asked
    made = Compression.of(wanted.compression)
    if asked is not None and asked != made:
        raise PlanError(
            f"the plan was made for compress={wanted.compression or None!r}, and {str(asked)!r} is asked for; leave compress out, or plan "
            "again"
        )
    return made


def check_optimizer(name: str, precision: Precision | None = None) -> None:
    if not isinstance(name, str) or name not in OPTIMIZER_STATE_BYTES:
        known = ", ".join(OPTIMIZER_STATE_BYTES)
        raise PlanError(
            f"optimizer {name!r} has no price here; give the one of {known} whose state is the most like its own: the training loop may "
            "use another optimizer than the plan was priced with"
        )
    if name == MASTER and precision is not None:
        raise PlanError(
            f"optimizer {name!r} keeps float32 copies of 16-bit parameters, and with precision={str(precision)!r} the parameters "
            "themselves stay in float32; say optimizer='adamw', or leave precision out and give the model in 16 bits"
        )


def refuse_other_optimizer(asked: str, wanted: PlanRecord | Manual | None) -> None:
    """PlanError if a plan is priced for another optimizer than is asked for; the default asks for none."""
    if isinstance(wanted, PlanRecord) and asked not in (DEFAULT_OPTIMIZER, wanted.optimizer):
        raise PlanError(
            f"the plan was made for optimizer {wanted.optimizer!r}, and optimizer={asked!r} is asked for; leave it out, or plan again"
        )


def check_plan(given: PlanRecord, session: Session) -> None:
    """Whether a plan can be used for a call.

    Raises:
        PlanError: it was made for another, or is damaged.
    """
    check_optimizer(given.optimizer)
    check_cut(given)
    found = session.hash_for(given.pipeline)
    if given.graph_hash != found:
        is_alike = (given.model, dict(given.batch)) == (session.name, dict(session.batch))
        raise PlanError(
            f"the plan was made for another graph (plan {given.graph_hash}: {given.model} on {dict(given.batch)}; here {found}: "
            f"{session.name} on {dict(session.batch)}); plan again for this model and batch"
            + (", or give what it was made with: outputs=, loss_fn=, precision=, the sizes of the model, train or eval" if is_alike else "")
        )
    check_parts(given, session.normal_for(given.pipeline))
