"""Deep copies of modules."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping

import torch
from torch import nn
from torch.utils import _pytree as pytree


def copied_module(model: nn.Module, known: Mapping[int, object] | None = None) -> nn.Module:
    """A deep copy of a module, also of one that keeps what a forward has computed, as recurrent states, which torch refuses to copy: the
    copy has it without its history.

    Args:
        model: the module.
        known: what some of its parts become, by their ``id``.
    """
    return copy.deepcopy(model, without_history(model.modules()) | dict(known or {}))


def without_history(modules: Iterable[nn.Module]) -> dict[int, object]:
    """Copies of tensors that modules keep of what was computed, by their ``id``, as `copy.deepcopy` takes them."""
    memo: dict[int, object] = {}
    for module in modules:
        for value in pytree.tree_leaves({name: part for name, part in vars(module).items() if not name.startswith("_")}):
            if isinstance(value, torch.Tensor) and not value.is_leaf:
                memo.setdefault(id(value), value.detach().clone())
    return memo
