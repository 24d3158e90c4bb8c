"""Weights in files of safetensors, as Hugging Face publishes them: `load_weights` into a model under any plan, `export_weights` from a
checkpoint.

One file, or several, written with an index of what is where; tied weights stand there once, under any of their names.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from autopar.callers import user_level
from autopar.errors import CheckpointError
from autopar.runtime.checkpoint import read_into, wait_for_others
from autopar.runtime.chunks import Chunks
from autopar.runtime.module import ParallelModule
from autopar.runtime.ranks import Ranks
from autopar.runtime.state import aliases_of, buffers_of, names_of, some
from autopar.runtime.versions import latest_version

SUFFIX, INDEX = ".safetensors", "model.safetensors.index.json"
MAX_FILE_BYTES = 5_000_000_000


def load_weights(folder: str | Path, model: nn.Module) -> None:
    """Load the weights of a folder of safetensors into a model; each rank reads its own part of each, and no other.

    The public ``autopar.load_weights``; all ranks call it. Names are those of the model, with or without the prefix of a transformers base
    model. Values are converted to the dtypes of the model.

    Args:
        folder: with one or several files of safetensors, or such a file.
        model: a parallel model that has a plan, or any other model, by each process for itself.

    Raises:
        CheckpointError: a weight is not there or has another shape, or there are no files; all ranks raise it.
        PlanError: the model has no plan yet: give `parallelize` an example batch.

    Warns:
        UserWarning: the files have weights that the model has not.
    """
    ranks = Ranks.of(model)
    wait_for_others(ranks)
    ranks.together(lambda: _load(Path(folder), model))


def load_some(folder: str | Path, names: Container[str], model: nn.Module) -> None:
    """`load_weights` of some parameters and buffers of a parallel model."""
    Ranks.of(model).together(lambda: _load(Path(folder), model, names))


def found_in(folder: str | Path, model: nn.Module) -> set[str]:
    """The parameters and buffers of a model, of tied ones the first name, that a folder of safetensors has.

    Raises:
        CheckpointError: there are no files.
    """
    with _opened(Path(folder)) as there:
        return {name for name, spelling in _spelled(model, there, _held(model)).items() if spelling is not None}


@contextmanager
def _opened(folder: Path) -> Iterator[dict[str, Any]]:
    """For every weight in a folder the file that it is in."""
    from safetensors import safe_open

    files = [folder] if folder.is_file() else sorted(folder.glob(f"*{SUFFIX}"))
    if not files:
        raise CheckpointError(f"there are no files of safetensors in {folder}")
    with ExitStack() as stack:
        there: dict[str, Any] = {}
        for path in files:
            file = stack.enter_context(safe_open(path, framework="pt"))
            if twice := there.keys() & {*file.keys()}:
                raise CheckpointError(f"{some(sorted(twice))} is in {path.name} and in another file of {folder}; give one set of weights")
            there |= dict.fromkeys(file.keys(), file)
        yield there


def _load(folder: Path, model: nn.Module, only: Container[str] | None = None) -> None:
    with _opened(folder) as there:
        wanted = _wanted(model, there, only)
        for name, chunks in wanted.items():
            shape = tuple(there[name].get_slice(name).get_shape())
            if shape != tuple(chunks.whole):
                raise CheckpointError(f"{name} is {shape} in {folder} and {tuple(chunks.whole)} here; build the model of these weights")
        for name, chunks in wanted.items():
            for offsets, part in chunks.parts.items():
                rows = tuple(slice(start, start + length) for start, length in zip(offsets, part.shape, strict=True))
                part.copy_(there[name].get_slice(name)[rows] if rows else there[name].get_tensor(name))


def _wanted(model: nn.Module, there: Mapping[str, object], only: Container[str] | None) -> dict[str, Chunks]:
    """What this rank holds, by its name in the files."""
    held = _held(model)
    found = {name: spelling for name, spelling in _spelled(model, there, held).items() if only is None or name in only}
    if lacking := [name for name, spelling in found.items() if spelling is None]:
        raise CheckpointError(f"the files lack {some(lacking)} ({len(lacking)} in all); build the model of these weights")
    elsewhere = {p.name for p in model.plan.parameters} if isinstance(model, ParallelModule) else set()
    known = {spelling for spellings in _spellings(model, {*held, *elsewhere}).values() for spelling in spellings}
    if more := sorted({*there} - known):
        warnings.warn(f"the files have what the model lacks: {some(more)} ({len(more)} in all)", stacklevel=user_level())
    return {spelling: held[name] for name, spelling in found.items() if spelling is not None}


def _held(model: nn.Module) -> dict[str, Chunks]:
    """What this rank holds, by name."""
    names = names_of(model)
    held = {names[id(parameter)]: Chunks.of(parameter) for parameter in model.parameters()}
    return held | {name.partition(".")[2]: chunks for name, chunks in buffers_of(model).items()}


def _spelled(model: nn.Module, there: Mapping[str, object], names: Iterable[str]) -> dict[str, str | None]:
    """What the files call each of the model's names; None for what they lack."""
    return {
        name: next((spelling for spelling in spellings if spelling in there), None)
        for name, spellings in _spellings(model, names).items()
    }


def _spellings(model: nn.Module, names: Iterable[str]) -> dict[str, list[str]]:
    """What files may call each of the model's names."""
    aliases, prefix = aliases_of(model), f"{getattr(model, 'base_model_prefix', '')}."
    found = {}
    for name in names:
        tied = [name, *(alias for alias, first in aliases.items() if first == name)]
        found[name] = [spelling for own in tied for spelling in (own, own.removeprefix(prefix), prefix + own)]
    return found


def export_weights(
    checkpoint: str | Path, folder: str | Path, *, dtype: torch.dtype | None = None, max_file_bytes: int = MAX_FILE_BYTES
) -> list[Path]:
    """Write the model of a checkpoint as files of safetensors that transformers load; in one process, which holds one file at a time.

    The public ``autopar.export_weights``. A configuration comes from the model: ``model.config.save_pretrained(folder)``.

    Args:
        checkpoint: folder of `autopar.save`.
        folder: to write to; made if it is not there.
        dtype: to convert floating-point values to; what they are if None.
        max_file_bytes: of a file, but for a weight that is larger.

    Returns:
        The files.

    Raises:
        CheckpointError: there is no checkpoint, or the folder has weights already.
    """
    from safetensors.torch import save_file

    reader, target = FileSystemReader(latest_version(Path(checkpoint))), Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    if old := sorted(path.name for path in target.glob(f"*{SUFFIX}*")):
        raise CheckpointError(f"{target} has weights already ({some(old)}); export to a new folder")
    groups = list(_files(reader.read_metadata().state_dict_metadata, dtype, max_file_bytes))
    weight_map, written, total = dict[str, str](), list[Path](), 0
    for number, group in enumerate(groups, 1):
        path = target / ("model" + (f"-{number:05d}-of-{len(groups):05d}" if len(groups) > 1 else "") + SUFFIX)
        read_into({entry: Chunks.of(tensor) for entry, tensor in group.items()}, reader, Ranks(None))
        values = {entry.partition(".")[2]: tensor for entry, tensor in group.items()}
        save_file(values, path, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(values, path.name)
        total += sum(tensor.nbytes for tensor in values.values())
        written.append(path)
    if len(groups) > 1:
        index: dict[str, Any] = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (target / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return written


def _files(entries: Mapping[str, object], dtype: torch.dtype | None, max_file_bytes: int) -> Iterator[dict[str, torch.Tensor]]:
    """Empty tensors for the weights, file by file."""
    group, num_bytes = dict[str, torch.Tensor](), 0
    for name, entry in entries.items():
        if not name.startswith(("model.", "buffers.")):
            continue
        assert isinstance(entry, TensorStorageMetadata)
        kept = entry.properties.dtype
        tensor = torch.empty(entry.size, dtype=dtype if dtype is not None and kept.is_floating_point else kept, device="cpu")
        if group and num_bytes + tensor.nbytes > max_file_bytes:
            yield group
            group, num_bytes = {}, 0
        group[name] = tensor
        num_bytes += tensor.nbytes
    yield group
