"""autopar: automatic parallelization of PyTorch models. `parallelize` an unmodified module, or `plan` for a cluster that is not there."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autopar.api import compare, plan, relieve, verify
    from autopar.compression import Compression
    from autopar.cost.cluster import Cluster, Level
    from autopar.cost.machine import MachineProfile
    from autopar.dry.check import Checked, check
    from autopar.dry.count import Counted, count
    from autopar.errors import AutoparError
    from autopar.log import Log, log
    from autopar.mesh import Mesh
    from autopar.parallel import parallelize
    from autopar.planner.document import Plan
    from autopar.planner.relief import Relief
    from autopar.precision import Precision
    from autopar.runtime.checkpoint import Saving, load, save
    from autopar.runtime.loading import shard_loader
    from autopar.runtime.local_batch import BatchRank, batch_rank, local_batch
    from autopar.runtime.weights import export_weights, load_weights
    from autopar.scale import scale
    from autopar.show.compare import Row
    from autopar.show.page import draw
    from autopar.show.scaling import Scaling, ScalingRow
    from autopar.solve.manual import Manual
    from autopar.solve.pins import pin
    from autopar.start.deferred import deferred
    from autopar.sweep import Sweep, sweep
    from autopar.verify import Verification

__version__ = "0.1.0"

__all__ = [
    "AutoparError",
    "BatchRank",
    "Checked",
    "Cluster",
    "Compression",
    "Counted",
    "Level",
    "Log",
    "MachineProfile",
    "Manual",
    "Mesh",
    "Plan",
    "Precision",
    "Relief",
    "Row",
    "Saving",
    "Scaling",
    "ScalingRow",
    "Sweep",
    "Verification",
    "batch_rank",
    "check",
    "compare",
    "count",
    "deferred",
    "draw",
    "export_weights",
    "load",
    "load_weights",
    "local_batch",
    "log",
    "parallelize",
    "pin",
    "plan",
    "relieve",
    "save",
    "scale",
    "shard_loader",
    "sweep",
    "verify",
]

_HOMES = {
    "autopar.api": ("compare", "plan", "relieve", "verify"),
    "autopar.compression": ("Compression",),
    "autopar.cost.cluster": ("Cluster", "Level"),
    "autopar.cost.machine": ("MachineProfile",),
    "autopar.planner.document": ("Plan",),
    "autopar.dry.check": ("Checked", "check"),
    "autopar.dry.count": ("Counted", "count"),
    "autopar.errors": ("AutoparError",),
    "autopar.log": ("Log", "log"),
    "autopar.mesh": ("Mesh",),
    "autopar.parallel": ("parallelize",),
    "autopar.precision": ("Precision",),
    "autopar.planner.relief": ("Relief",),
    "autopar.runtime.checkpoint": ("Saving", "load", "save"),
    "autopar.runtime.loading": ("shard_loader",),
    "autopar.runtime.local_batch": ("BatchRank", "batch_rank", "local_batch"),
    "autopar.runtime.weights": ("export_weights", "load_weights"),
    "autopar.scale": ("scale",),
    "autopar.show.compare": ("Row",),
    "autopar.show.page": ("draw",),
    "autopar.show.scaling": ("Scaling", "ScalingRow"),
    "autopar.solve.manual": ("Manual",),
    "autopar.solve.pins": ("pin",),
    "autopar.start.deferred": ("deferred",),
    "autopar.sweep": ("Sweep", "sweep"),
    "autopar.verify": ("Verification",),
}
"""Where the public names are; those that only type checkers see above are the same."""


class _Face(ModuleType):
    """The package. What a public name stands for is imported when it is first asked for, so that the command line, which is below, need
    not wait for torch to print its help."""

    def __getattr__(self, name: str) -> object:
        home = next((module for module, names in _HOMES.items() if name in names), None)
        if home is not None:
            value = getattr(import_module(home), name)
            setattr(self, name, value)
            return value
        if not name.startswith("_") and find_spec(f"{self.__name__}.{name}") is not None:
            return import_module(f"{self.__name__}.{name}")
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")

    def __setattr__(self, name: str, value: object) -> None:
        """The import of a submodule sets its name here, but `autopar.plan` is the function, whoever imports the module of that name."""
        if not (isinstance(value, ModuleType) and name in __all__):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *__all__})


sys.modules[__name__].__class__ = _Face
