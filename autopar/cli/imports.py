"""Configurations of other systems on the command line: read for the ranks at hand, with a word on what their rows do not show."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from autopar.cli.inputs import Batch
from autopar.errors import InputError, PlanError
from autopar.importers import Imported, read_deepspeed, read_megatron, read_nanotron, read_nemo, read_torchtitan
from autopar.show.compare import Row
from autopar.solve.manual import Manual, UnusedSettingWarning


class Imports(NamedTuple):
    """Configurations by name, and rows for those that cannot be."""

    configs: dict[str, Manual]
    refused: list[Row]


READERS: Mapping[str, Callable[[str, int], Imported]] = {
    "megatron": read_megatron,
    "torchtitan": read_torchtitan,
    "deepspeed": read_deepspeed,
    "nemo": read_nemo,
    "nanotron": read_nanotron,
}


def read_imports(given: Mapping[str, Sequence[str]], num_ranks: int, batch: Batch, *, taken: Mapping[str, Manual]) -> Imports:
    """Read what stands behind ``--megatron``, ``--torchtitan`` and so on, and warn of what a row does not show.

    Args:
        given: by reader the arguments and files.
        num_ranks: number of all ranks.
        batch: what the rows are planned for.
        taken: names of other rows; an equal one gets a number.

    Raises:
        InputError: something is neither a file nor arguments.
    """
    configs: dict[str, Manual] = {}
    refused: list[Row] = []
    for kind, texts in given.items():
        for text in texts:
            _check_there(kind, text)
            stem = Path(text).stem if os.path.isfile(text) else kind
            names = {"auto", *taken, *configs, *(row.name for row in refused)}
            name = next(n for n in (stem, *(f"{stem}-{i}" for i in range(2, len(names) + 3))) if n not in names)
            try:
                imported = READERS[kind](text, num_ranks)
            except PlanError as error:
                refused.append(Row(name, False, str(error), None, None, 0))
                continue
            configs[name] = imported.config
            for note in _notes(imported, batch):
                warnings.warn(f"{name}: {note}", UnusedSettingWarning, stacklevel=2)
    return Imports(configs, refused)


def _check_there(kind: str, text: str) -> None:
    if os.path.isfile(text) or (kind == "megatron" and "--" in text):
        return
    wanted = "neither a file nor arguments, which read like '--micro-batch-size 1'" if kind == "megatron" else "no file"
    raise InputError(f"--{kind} {text!r} is {wanted}")


def _notes(imported: Imported, batch: Batch) -> Iterator[str]:
    tensors = batch.values() if isinstance(batch, dict) else batch
    first = next(iter(tensors))
    rows = first.shape[0]
    if imported.batch_size not in (None, rows):
        yield f"its global batch is {imported.batch_size}, this comparison's {rows} (--batch): the row is of another run"
    tokens = first.shape[1] if first.dim() == 2 and first.dtype == torch.int64 else imported.sequence
    if imported.sequence not in (None, tokens):
        yield f"its sequences have {imported.sequence} tokens, this comparison's {tokens} (--sequence): the row is of another run"
    yield from (f"left out: {setting}" for setting in imported.left_out)
    yield from (f"unknown, and not read: {setting}" for setting in imported.unknown)
