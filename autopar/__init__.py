"""autopar: automatic parallelization of PyTorch models. `parallelize` an unmodified module, or `plan` for a cluster that is not there."""

from autopar.api import compare, plan, relieve, verify
from autopar.compression import Compression
from autopar.cost.cluster import Cluster
from autopar.cost.machine import MachineProfile
from autopar.document import Plan
from autopar.dry.check import Checked, check
from autopar.dry.count import Counted, count
from autopar.log import Log, log
from autopar.mesh import Mesh
from autopar.parallel import parallelize
from autopar.precision import Precision
from autopar.relief import Relief
from autopar.runtime.checkpoint import Saving, load, save
from autopar.runtime.loading import shard_loader
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
    "Checked",
    "Cluster",
    "Compression",
    "Counted",
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
    "check",
    "compare",
    "count",
    "deferred",
    "draw",
    "export_weights",
    "load",
    "load_weights",
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
