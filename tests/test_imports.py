"""The floors of the house: a module imports from floors below its own and from its own unit, and nowhere else."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "autopar"

FLOORS = """
errors  callers
units  typed  garbage  report  gloo  tokens  resident  copying
mesh  precision  start  offload  compression
capture  layout  piece
ops
transitions  storage
virtual
rules  plan  measured
graph
factors
passes  schedule
stage
cost  compile
step
solve  runtime  show  verify
importers  record  log
planner
programs
api  parallel  scale  sweep
dry
__init__
demo
cli
__main__
"""
"""One floor a line, the ground first. A name is a file of autopar or a folder; what a folder holds may import from its
siblings. Units on one floor do not know each other. ``__init__`` is the public face, ``from autopar import X``."""

FLOOR = {unit: floor for floor, line in enumerate(FLOORS.strip().splitlines()) for unit in line.split()}


def is_ours(module: str | None) -> bool:
    return module is not None and module.split(".")[0] == "autopar"


def imported_modules(node: ast.stmt, module: str) -> list[str]:
    """The modules of autopar that an import statement in ``module`` names; an object counts as its module."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names if is_ours(alias.name)]
    if not isinstance(node, ast.ImportFrom):
        return []
    source = node.module or ""
    if node.level:  # relative: the folder of `module`, then up
        source = ".".join([*module.split(".")[: -node.level], *([node.module] if node.module else [])])
    if source == "autopar":
        return [f"autopar.{alias.name}" if alias.name in FLOOR else "autopar.__init__" for alias in node.names]
    return [source] if is_ours(source) else []


def unit(module: str) -> str:
    return (module.split(".") + ["__init__"])[1]


def complaints(module: str, source: str) -> Iterator[str]:
    """What is wrong with the imports of a module, named ``autopar.rules.matmul``, one line each."""
    home = unit(module)
    if home not in FLOOR:
        yield f"{module}: give it a floor (the unit {home!r} is not in FLOORS of {Path(__file__).name})"
        return
    tree = ast.parse(source)
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            for node in ast.walk(function):
                if isinstance(node, ast.stmt) and imported_modules(node, module):
                    yield f"{module}:{node.lineno}: imports autopar inside {function.name}(); import at the top"
    for node in ast.walk(tree):
        if not isinstance(node, ast.stmt):
            continue
        for target in imported_modules(node, module):
            there = unit(target)
            if there not in FLOOR:
                yield f"{module}:{node.lineno}: {target}: give it a floor"
            elif there != home and FLOOR[there] >= FLOOR[home]:
                yield (
                    f"{module}:{node.lineno}: {home} (floor {FLOOR[home]}) imports {target} (floor {FLOOR[there]}); "
                    "only lower floors may be imported"
                )


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 2 else parts)


MODULES = {module_name(path): path for path in sorted(ROOT.rglob("*.py"))}


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_down(module: str) -> None:
    found = list(complaints(module, MODULES[module].read_text()))
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "module, source, complaint",
    [
        ("autopar.layout", "from autopar.api import parallelize", "imports autopar.api"),
        ("autopar.rules.matmul", "import autopar.plan", "rules (floor 7) imports autopar.plan"),
        ("autopar.mesh", "from autopar import errors, Plan", "imports autopar.__init__"),
        ("autopar.mesh", "def f():\n    from autopar.errors import MeshError", "inside f(); import at the top"),
        ("autopar.cost.machine", "from ..api import plan", "imports autopar.api"),
        ("autopar.helpers", "", "give it a floor"),
        ("autopar.api", "from autopar.helpers import do", "give it a floor"),
    ],
)
def test_a_wrong_import_is_found(module: str, source: str, complaint: str) -> None:
    found = list(complaints(module, source))
    assert len(found) == 1
    assert complaint in found[0]


@pytest.mark.parametrize(
    "module, source",
    [
        ("autopar.rules.matmul", "from autopar.rules.notation import Rule\nfrom . import strategies"),
        ("autopar.api", "from autopar import compile, errors\nfrom autopar.solve.intra import solve"),
        ("autopar.cli", "import torch\nfrom autopar import parallelize"),
        ("autopar.__init__", "from autopar.api import parallelize"),
        ("autopar.mesh", "def f():\n    import torch"),
    ],
)
def test_a_right_import_passes(module: str, source: str) -> None:
    assert not list(complaints(module, source))
