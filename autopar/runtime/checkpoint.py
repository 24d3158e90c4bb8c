"""Checkpoints that move between plans: `save` what a model, its optimizer and the script around them are, `load` it under any other layout.

Everything stands under its original name (`state`), as rectangles of global tensors (`chunks`), in files of `torch.distributed.checkpoint`
(DCP), of which one version counts at a time (`versions`). So it does not matter how many ranks and stages wrote them, and how many read.
"""

from __future__ import annotations

import contextlib
import copy
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as read
from torch.distributed.checkpoint.state_dict_saver import save as write

from autopar.errors import CheckpointError
from autopar.runtime.chunks import ChunkLoadPlanner, Chunks, ChunkSavePlanner
from autopar.runtime.extras import Coming, Extras
from autopar.runtime.module import ParallelModule
from autopar.runtime.ranks import Ranks
from autopar.runtime.state import (
    Fitting,
    aliases_of,
    buffers_of,
    groups_of,
    kind_of,
    names_of,
    parameters_of,
    refuse_shared,
    state_of,
)
from autopar.runtime.unsent import fit_unsent, put_unsent, sharing_of, unsent_of
from autopar.runtime.versions import latest_version, new_version, publish, remove
from autopar.units import number_text

FORMAT = 1
_under_way: list[Saving] = []


@dataclass(slots=True)
class Saving:
    """A save that may still be under way; `wait` for it, and for the error if it failed."""

    _thread: threading.Thread | None = None
    _errors: list[CheckpointError] = field(default_factory=list)
    _is_told: bool = False

    @property
    def is_done(self) -> bool:
        """Whether nothing is being written any more."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> None:
        """Return when the checkpoint counts.

        Raises:
            CheckpointError: it failed; the last that was whole counts.
        """
        if self._thread is not None:
            self._thread.join()
        self._is_told = True
        if self._errors:
            raise self._errors[0]


def save(
    folder: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    *,
    extra: Mapping[str, object] | None = None,
    background: bool = False,
) -> Saving:
    """Save a model on all its ranks; each writes what it holds, and of what several hold one writes.

    The public ``autopar.save``; all ranks call it. Beside parameters, buffers and optimizer state it keeps the state of torch's random
    numbers (of rank 0) and of the model's dropout, and what compression keeps of gradients (`runtime.unsent`).

    Args:
        folder: on a disk that all ranks see; made if it is not there. A checkpoint in it is replaced when the new one is whole.
        model: a parallel model that has a plan, or any other model of a single process.
        optimizer: of its parameters; several, as Muon and AdamW, in an order that `load` keeps to.
        extra: anything else that can be pickled, of rank 0. Of what has a ``state_dict`` (a scheduler, a data loader) that is kept; what is
            sharded in it, as in an ``AveragedModel``, is saved by all ranks, which all give it.
        background: copy everything to the host, and return while it is written. The next `save` or `load` waits for this one; before
            ``destroy_process_group``, call ``wait()`` of what is returned.

    Raises:
        CheckpointError: something cannot be saved, or a rank could not write; all ranks raise it.
        PlanError: the model has no plan yet.
    """
    if not isinstance(model, ParallelModule) and dist.is_initialized() and dist.get_world_size() > 1:
        raise CheckpointError("the model is not parallel, and each of the processes would write its own; give it to autopar.parallelize")
    optimizers = _each(optimizer)
    _check_extra(extra)
    ranks = Ranks.of(model)
    wait_for_others(ranks)
    target = Path(folder).absolute() / ranks.from_first(new_version)
    state = _written(model, optimizers, extra or {}, ranks)
    if not background:
        _write(target, state, ranks)
        return Saving()
    copied = ranks.together(lambda: {name: _copied(value) for name, value in state.items()})
    saving = Saving()

    def write_apart() -> None:
        try:
            _write(target, copied, ranks)
        except BaseException as error:  # the end of a thread says nothing to those who wait for it
            saving._errors.append(_failed(target, error, ranks))
            print(f"autopar.save: {saving._errors[0]}; the last whole checkpoint counts", file=sys.stderr)

    saving._thread = threading.Thread(target=write_apart, name=f"autopar.save {target.name}")
    saving._thread.start()
    _under_way.append(saving)
    return saving


def load(
    folder: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    *,
    extra: Mapping[str, object] | None = None,
    random: bool = True,
) -> dict[str, Any]:
    """Load what `save` wrote, whatever the plan and the number of ranks then and now; each rank reads its own part.

    The public ``autopar.load``; all ranks call it. Values are converted to the dtypes of the model. As with all checkpoints of torch, read
    only those that you trust: ``extra`` is unpickled.

    Args:
        folder: of `save`.
        model: a parallel model that has a plan, or any other model, by each process for itself.
        optimizer: gets its state and its settings (learning rates and so on); of the kind that was saved, or several of these kinds.
        extra: objects with a ``load_state_dict``, by the name under which they were saved. What is sharded in their ``state_dict`` they get
            as it lies there now, and whole what is not there yet.
        random: also set the state of torch's random numbers, and of the model's dropout.

    Returns:
        What was saved as ``extra``, with states in place of the objects that had them; of sharded ones those that ``extra`` asks for.

    Raises:
        CheckpointError: there is no checkpoint, or it does not fit the model, the optimizer or ``extra``; all ranks raise it.
        PlanError: the model has no plan yet: give `parallelize` an example batch.
    """
    optimizers = _each(optimizer)
    _check_extra(extra)
    ranks = Ranks.of(model)
    wait_for_others(ranks)
    found = ranks.together(lambda: _Found.of(Path(folder), model, optimizers, extra or {}))
    unsent = fit_unsent(model, found.fitting.entries, found.about.get("compression", ""), warns=ranks.is_first)
    found.fitting.state.update({name: Chunks.of(value) for name, value in unsent.items()})
    if found.extra.places:
        found.extra.refuse_unwanted(ranks.gather((found.extra.asked, {*found.extra.tensors})))
    read_into(found.fitting.state, found.reader, ranks)
    found.fitting.finish()
    put_unsent(model, unsent)
    if random:
        _set_random(model, found.about["random"])
    kept = found.extra.finish()
    for name, keeper in (extra or {}).items():
        cast(Any, keeper).load_state_dict(kept[name])
    return kept


def wait_for_others(ranks: Ranks) -> None:
    """A save in the background holds the group, and its folder may be the one that is wanted.

    Raises:
        CheckpointError: it failed, and a rank has not been told so yet; on all ranks.
    """
    savings = [_under_way.pop() for _ in range(len(_under_way))]
    for saving in savings:
        if saving._thread is not None:
            saving._thread.join()

    def tell() -> None:
        for saving in savings:
            if not saving._is_told:
                saving.wait()

    if savings:
        ranks.together(tell)


def _each(optimizer: object) -> tuple[torch.optim.Optimizer, ...]:
    """The optimizers that are given; CheckpointError if something else is."""
    is_several = isinstance(optimizer, Sequence) and not isinstance(optimizer, str)
    given: tuple[Any, ...] = () if optimizer is None else tuple(optimizer) if is_several else (optimizer,)  # type: ignore[arg-type]
    other = next((each for each in given if not isinstance(each, torch.optim.Optimizer)), None)
    if other is not None:
        raise CheckpointError(f"optimizer is one of torch.optim or several, got {other!r}; what else is to be kept goes into extra")
    return given


def _check_extra(extra: object) -> None:
    if not isinstance(extra, Mapping | None):
        raise CheckpointError(f"extra has values by name, as {{'scheduler': scheduler}}, got {extra!r}")


def _written(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], extra: Mapping[str, object], ranks: Ranks
) -> dict[str, object]:
    """What this rank writes: what it holds, and rank 0 what is said of all."""
    state = ranks.together(lambda: _state(model, optimizers, ranks))
    names = names_of(model)
    groups = ranks.gather([group for each in optimizers for group in groups_of(each, names)] if optimizers else None)
    merged = ranks.together(lambda: _merged(groups))
    extras = ranks.together(lambda: Extras.of(extra, writes=ranks.is_first))
    shapes = ranks.gather(extras.shapes())
    sharded = ranks.together(lambda: extras.merge(shapes))
    state |= extras.chunks()
    if ranks.is_first:
        about = {"format": FORMAT, "aliases": aliases_of(model), "groups": merged, "random": _random(model), "sharded": sharded}
        state["about"] = about | {"optimizer": kind_of(optimizers), "compression": sharing_of(model)}
        state["extra"] = extras.values
    return state


def _state(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], ranks: Ranks) -> dict[str, object]:
    names = names_of(model)
    state: dict[str, object] = {**parameters_of(model, names)}
    if ranks.is_first:
        state |= buffers_of(model)
    refuse_shared(optimizers, names)
    for optimizer in optimizers:
        state |= state_of(optimizer, names)
    return state | unsent_of(model)


def _copied(value: object) -> object:
    return value.copied() if isinstance(value, Chunks) else copy.deepcopy(value)


def _merged(groups: list[list[dict[str, Any]] | None]) -> list[dict[str, Any]] | None:
    """The groups of an optimizer, with the parameters of all ranks.

    Raises:
        CheckpointError: they differ by rank in more than the parameters.
    """
    ranks = [rank for rank in groups if rank is not None]
    if len(ranks) < len(groups):
        if ranks:
            raise CheckpointError("some ranks save an optimizer and some do not; give it on all")
        return None
    for number, rank in enumerate(ranks):
        if len(rank) != len(ranks[0]):
            on_first = number_text(len(ranks[0]), "group")
            raise CheckpointError(f"the optimizer has {on_first} on rank 0 and {len(rank)} on rank {number}; make them alike")
        for i, (own, first) in enumerate(zip(rank, ranks[0], strict=True)):
            different = [key for key in first["settings"] if str(own["settings"].get(key)) != str(first["settings"][key])]
            if different:
                where = f"on rank {number} than on rank 0"
                raise CheckpointError(f"group {i} of the optimizer has another {different[0]} {where}; make them alike")
    return [group | {"names": sorted({name for rank in ranks for name in rank[i]["names"]})} for i, group in enumerate(ranks[0])]


def _failed(target: Path, error: BaseException, ranks: Ranks) -> CheckpointError:
    """What is told of an error in the background."""
    if isinstance(error, CheckpointError) and (ranks.group is None or dist.is_initialized()):
        return error
    if ranks.group is not None and not dist.is_initialized():
        return CheckpointError(
            f"{target} could not be written: the process group was destroyed before it was; call wait() of what save returned before "
            "destroy_process_group"
        )
    return CheckpointError(f"{type(error).__name__}: {error}")


def _write(target: Path, state: dict[str, Any], ranks: Ranks) -> None:
    """Write a version and let it count."""
    writer, is_alone = FileSystemWriter(target), ranks.group is None
    try:
        with _quiet(is_alone=is_alone):
            metadata = write(state, storage_writer=writer, planner=ChunkSavePlanner(), process_group=ranks.group, no_dist=is_alone)
        files = [entry.relative_path for entry in (metadata.storage_data or {}).values()]
        ranks.together(lambda: publish(target, files) if ranks.is_first else None)
    except (CheckpointException, OSError, RuntimeError) as error:  # the last where a rank does not answer
        if ranks.is_first:
            remove(target)
        raise CheckpointError(f"{target} could not be written: {_first(error)}") from error


def read_into(state: dict[str, Any], reader: FileSystemReader, ranks: Ranks) -> None:
    """Fill a state."""
    is_alone = ranks.group is None
    try:
        with _quiet(is_alone=is_alone):
            read(state, storage_reader=reader, planner=ChunkLoadPlanner(), process_group=ranks.group, no_dist=is_alone)
    except CheckpointException as error:
        raise CheckpointError(f"{reader.path} could not be read: {_first(error)}") from error


@contextlib.contextmanager
def _quiet(*, is_alone: bool) -> Iterator[None]:
    """DCP warns that there is but one process, where that is what is meant."""
    with warnings.catch_warnings():
        if is_alone:
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield


@dataclass(frozen=True, slots=True)
class _Found:
    """A checkpoint that fits what is asked for."""

    reader: FileSystemReader
    about: dict[str, Any]
    extra: Coming
    fitting: Fitting

    @staticmethod
    def of(folder: Path, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], extra: Mapping[str, object]) -> _Found:
        reader, names = FileSystemReader(latest_version(folder)), names_of(model)
        said: dict[str, Any] = {"about": None, "extra": None}
        read_into(said, reader, Ranks(None))
        about, kept = said["about"], said["extra"]
        if about["format"] != FORMAT:
            raise CheckpointError(f"{folder} has format {about['format']}, this autopar reads {FORMAT}; load it with the one that saved it")
        lacking = sorted({*extra} - {*kept})
        if lacking:
            raise CheckpointError(f"{folder} keeps nothing extra called {', '.join(lacking)}; it has {', '.join(kept) or 'nothing'}")
        fitting = Fitting(reader.read_metadata().state_dict_metadata, about["aliases"])
        fitting.model(model, names)
        if optimizers:
            fitting.optimizers(optimizers, names, about)
        return _Found(reader, about, Coming.of(extra, kept, about.get("sharded", {}), fitting), fitting)


def _first(error: BaseException) -> str:
    """What went wrong on the first rank on which something did; DCP tells of all, with their tracebacks."""
    if not isinstance(error, CheckpointException):
        return str(error)
    rank, (cause, _) = next(iter(error.failures.items()))
    return f"rank {rank}: {type(cause).__name__}: {cause}"


def _random(model: nn.Module) -> dict[str, Any]:
    state: dict[str, Any] = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    if isinstance(model, ParallelModule):
        state["model"] = model._autopar.seed, model._autopar.calls, model._autopar.differentiated
        state["scale"] = model._autopar.scale.expected
    return state


def _set_random(model: nn.Module, state: Mapping[str, Any]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    if "model" in state and isinstance(model, ParallelModule):
        engine = model._autopar
        engine.seed, engine.calls, *counted = state["model"]
        engine.differentiated = counted[0] if counted else engine.calls  # older checkpoints count all calls
        engine.scale.expected = state.get("scale", engine.scale.expected)
