"""Any graph of the pipeline as readable Python: shapes and layouts as annotations, the user's source line at the end.

    mm: "f32[4096, 576] [S0 S1.1]" = torch.ops.aten.mm.default(view_1, c_attn_weight)  # pytorch_utils.py:119 x = torch.addmm(...)
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator

import torch
from torch import fx

from autopar.rules.registry import TensorSpec

_INDENT = "    "


def dtype_text(dtype: torch.dtype) -> str:
    """``f32``, ``bf16``, ``i64``, ``b8``."""
    name = str(dtype).removeprefix("torch.")
    if name == "bool":
        return "b8"
    for long, short in (("bfloat", "bf"), ("float", "f"), ("uint", "u"), ("int", "i"), ("complex", "c")):
        if name.startswith(long):
            return short + name.removeprefix(long)
    return name


def _tensor_text(x: object) -> str:
    if isinstance(x, TensorSpec | torch.Tensor):
        return f"{dtype_text(x.dtype)}[{', '.join(map(str, x.shape))}]"
    return type(x).__name__


def _type_text(node: fx.Node) -> str:
    """What is known about a node's results; empty if nothing is."""
    found = node.meta["specs"] if "specs" in node.meta else node.meta.get("val")
    if found is None:
        return ""
    results = found if isinstance(found, tuple | list) else (found,)
    one = ("specs" in node.meta and len(results) == 1) or not isinstance(found, tuple | list)
    text = _tensor_text(results[0]) if one else f"({', '.join(map(_tensor_text, results))})"
    layout = node.meta.get("layout")
    return f"{text} {layout}" if layout else text


def _argument_text(x: object) -> str:
    if isinstance(x, fx.Node):
        return x.name
    if isinstance(x, tuple) and hasattr(x, "_fields"):
        fields = (f"{name}={_argument_text(item)}" for name, item in zip(x._fields, x, strict=True))
        return f"{type(x).__name__}({', '.join(fields)})"
    if isinstance(x, tuple):
        return f"({', '.join(map(_argument_text, x))}{',' if len(x) == 1 else ''})"
    if isinstance(x, list):
        return f"[{', '.join(map(_argument_text, x))}]"
    if isinstance(x, dict):
        return "{" + ", ".join(f"{key!r}: {_argument_text(value)}" for key, value in x.items()) + "}"
    if isinstance(x, slice):
        return f"slice({_argument_text(x.start)}, {_argument_text(x.stop)}, {_argument_text(x.step)})"
    if isinstance(x, float) and not math.isfinite(x):
        return f"float({str(x)!r})"
    if isinstance(x, torch.device):
        return f"torch.device({str(x)!r})"
    if isinstance(x, torch.SymInt | torch.SymFloat | torch.SymBool):
        return str(x)
    if x is None or isinstance(x, bool | int | float | complex | str | torch.dtype | torch.layout | torch.memory_format):
        return repr(x)
    return repr(repr(x))  # nothing that Python could read: as a string


def _target_text(target: object) -> str:
    if isinstance(target, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return f"torch.ops.{target}"
    module = str(getattr(target, "__module__", "") or "")
    name = str(getattr(target, "__qualname__", getattr(target, "__name__", type(target).__name__)))
    name = name.replace(".<locals>.", ".").replace("<lambda>", "lambda_")
    module = {"_operator": "operator", "builtins": ""}.get(module, module)
    if module.startswith("autopar."):  # as its module is imported: collectives.all_gather
        module = module.rpartition(".")[2]
    return f"{module}.{name}" if module else name


def _call_text(node: fx.Node) -> str:
    if node.op == "get_attr":
        return f"self.{node.target}"
    if node.target is operator.getitem and not node.kwargs:
        source, index = node.args
        return f"{_argument_text(source)}[{_argument_text(index)}]"
    arguments = [_argument_text(x) for x in node.args]
    arguments += [f"{name}={_argument_text(value)}" for name, value in node.kwargs.items()]
    if node.op == "call_method":
        return f"{arguments[0]}.{node.target}({', '.join(arguments[1:])})"
    target = f"self.{node.target}" if node.op == "call_module" else _target_text(node.target)
    return f"{target}({', '.join(arguments)})"


def _annotated(node: fx.Node) -> str:
    text = _type_text(node)
    return f'{node.name}: "{text}"' if text else node.name


def _header(nodes: list[fx.Node]) -> Iterator[str]:
    yield "def forward("
    yield f"{_INDENT}self,"
    for node in nodes:
        entry = node.meta.get("placeholder")
        origin = f"  # {entry.source.value} {entry.name}" if entry is not None else ""
        yield f"{_INDENT}{_annotated(node)},{origin}"
    yield "):"


def graph_code(module: fx.GraphModule) -> str:
    """The graph as the source of one function; it parses as Python, and reads as what runs."""
    nodes = list(module.graph.nodes)
    lines = list(_header([node for node in nodes if node.op == "placeholder"]))
    here = ""
    for node in nodes:
        if node.op == "placeholder":
            continue
        if node.op == "output":
            lines.append(f"{_INDENT}return {_argument_text(node.args[0])}")
            continue
        there = node.meta.get("module", here) if node.meta.get("line") else here  # reshards of parameters are of no module
        if there != here:
            lines.append(f"{_INDENT}# {there or 'the model itself'}")
            here = there
        source = " ".join(str(node.meta.get("line") or "").split())
        comment = f"  # {source}" if source else ""
        lines.append(f"{_INDENT}{_annotated(node)} = {_call_text(node)}{comment}")
    return "\n".join(lines) + "\n"
