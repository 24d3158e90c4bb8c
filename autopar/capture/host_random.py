"""Random numbers of Python and of numpy in a forward: a graph holds what they were when it was captured."""

from __future__ import annotations

import linecache
import os
import pickle
import random
import sys
import sysconfig
import warnings
from collections.abc import Callable
from types import FrameType

import numpy as np
import torch
from torch.export import ExportedProgram

from autopar.callers import OF_AUTOPAR, OF_TORCH, user_level
from autopar.errors import CaptureError

_NOT_THE_MODELS = (OF_AUTOPAR, OF_TORCH, os.path.dirname(np.__file__) + os.sep)
_PYTHON_DIR = sysconfig.get_path("stdlib") + os.sep
_INSTEAD = "draw by torch, whose numbers are others in every step, give what is drawn as an input, or turn it off"


class DrawnOnceWarning(UserWarning):
    """A forward draws numbers that are not torch's, which made no difference when it was captured again."""


class _Drawing:
    """Within this context: from whose generator numbers are drawn. Afterwards both are as they were.

    Args:
        anew: other numbers than before, and find where they are drawn, which takes its time.
    """

    def __init__(self, *, anew: bool = False) -> None:
        self.anew = anew
        self.by = self.where = ""

    def __enter__(self) -> _Drawing:
        self._before = random.getstate(), np.random.get_state(legacy=False)
        if self.anew:
            random.random()
            np.random.random()
        self._state = _state()
        if self.anew:
            self._profile = sys.getprofile()
            sys.setprofile(self._watch)
        return self

    def __exit__(self, *_: object) -> None:
        if self.anew:
            sys.setprofile(self._profile)
        self.by = " and ".join(name for name, old, new in zip(("Python", "numpy"), self._state, _state(), strict=True) if old != new)
        random.setstate(self._before[0])
        np.random.set_state(self._before[1])

    def _watch(self, frame: FrameType, event: str, _: object) -> None:
        """The first function of the model that has drawn when it, or the function of Python that it asks, returns."""
        drawing = frame if frame.f_code.co_filename != random.__file__ else frame.f_back
        if event != "return" or self.where or drawing is None or not _is_of_a_model(drawing) or _state() == self._state:
            return
        code, number = drawing.f_code, drawing.f_lineno
        line = linecache.getline(code.co_filename, number).strip()
        self.where = f"{os.path.basename(code.co_filename)}:{number}, in {code.co_name}: `{line}`"


def _is_of_a_model(frame: FrameType) -> bool:
    path = frame.f_code.co_filename
    is_of_python = path.startswith(_PYTHON_DIR) and "site-packages" not in path
    return not is_of_python and not path.startswith((*_NOT_THE_MODELS, "<"))


def _state() -> tuple[object, bytes]:
    return random.getstate(), pickle.dumps(np.random.get_state(legacy=False))


def without_drawing(export: Callable[[], tuple[ExportedProgram, str]]) -> tuple[ExportedProgram, str]:
    """What ``export`` returns, a program and something to say of it, if the program is the same whatever numbers Python and numpy draw.

    Raises:
        CaptureError: it is another one with other numbers; ranks that each capture the model would have graphs that differ.

    Warns:
        DrawnOnceWarning: numbers are drawn, of which two captures show nothing.
    """
    with _Drawing() as drawing:
        found = export()
    if not drawing.by:
        return found
    with _Drawing(anew=True) as again:
        other = export()
    what = f"the forward draws random numbers of {drawing.by} ({again.where or 'at an unknown line'})"
    if not _are_alike(found[0], other[0]):
        raise CaptureError(f"{what}, which would be decided once and apart on each rank: {_INSTEAD}")
    warnings.warn(f"{what}: what they decide is decided once; {_INSTEAD}", DrawnOnceWarning, stacklevel=user_level())
    return found


def _are_alike(one: ExportedProgram, other: ExportedProgram) -> bool:
    if str(one.graph) != str(other.graph) or one.constants.keys() != other.constants.keys():
        return False
    pairs = [(one.constants[name], other.constants[name]) for name in one.constants]
    return all(torch.equal(a, b) for a, b in pairs if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and not a.is_meta)
