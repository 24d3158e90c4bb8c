"""Whose a line of Python is, and which line of a user's file called autopar: a warning or an error is about that one."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import torch

OF_TORCH = f"{Path(torch.__file__).parent}/"
OF_AUTOPAR = f"{Path(__file__).parent}/"
_BETWEEN = (OF_AUTOPAR, OF_TORCH, contextlib.__file__)
"""Files whose frames lie between a user's line and a warning: a plan may be made inside of ``nn.Module.__call__``."""


def user_level() -> int:
    """The ``stacklevel`` of a warning that the caller gives, to point at the first line outside of autopar and of torch."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_BETWEEN):
        frame, level = frame.f_back, level + 1
    return level
