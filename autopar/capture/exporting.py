"""What stands around `torch.export` while it works: what it gets wrong, what it does for nobody, and what it says too loudly."""

from __future__ import annotations

import io
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from itertools import pairwise
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
from torch import fx
from torch._decomp import decomposition_table
from torch.fx import proxy
from torch.nn.functional import instance_norm
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

from autopar.callers import OF_AUTOPAR, OF_TORCH
from autopar.errors import CaptureError

_OF_DATA = (torch.tensor, torch.as_tensor, torch.asarray, torch.scalar_tensor)
_DATA_OF = torch.Tensor.data.__get__  # type: ignore[attr-defined]
"""``x.data``, of which export makes a constant."""
_HOOKING = (torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook)
_NOISY = ("torch.fx.experimental.symbolic_shapes", "torch._subclasses.fake_tensor")
"""Loggers of torch that report a failed export at length."""


@contextmanager
def true_shapes() -> Iterator[None]:
    """Take away a decomposition that gives unreduced losses on meta the shape of a sum: torch's reference of ``nll_loss`` takes the number
    of the reduction, fourth among the arguments of the op, for its own fourth argument ``size_average`` (seen: torch 2.13)."""
    wrong = torch.ops.aten.nll_loss.default
    reference = decomposition_table.pop(wrong, None)
    try:
        yield
    finally:
        if reference is not None:
            decomposition_table[wrong] = reference


class MakingOn(TorchFunctionMode):
    """What a forward makes without saying where lies on ``device``; numbers that it writes down keep their values there, on meta too, where
    torch makes tensors without values of them."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in _HOOKING:
            raise CaptureError(
                f"the forward hooks into a gradient ({_called_at()}), and plans call no hooks; write it as the backward of a "
                "torch.autograd.Function"
            )
        if kwargs.get("generator") is not None:
            raise CaptureError(
                f"the forward draws by a generator of its own ({_called_at()}), and plans draw by a seed and the position of each element, "
                "so that ranks agree; draw without one, or outside of the model and pass the numbers in"
            )
        if func in _device_constructors():
            device = torch.device(kwargs.get("device") or self.device)
            if func in _OF_DATA and device.type == "meta" and not isinstance(next(iter([*args, *kwargs.values()])), torch.Tensor):
                return func(*args, **kwargs | {"device": "cpu"}).to(device)
            kwargs["device"] = device
        elif func == _DATA_OF:  # made anew whenever it is read
            return args[0].detach()
        elif func is instance_norm:
            return _instance_norm(*args, **kwargs)
        elif func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__):
            args = args[0], _with_tensors(args[1], args[0].device), *args[2:]
        return func(*args, **kwargs)


def _called_at() -> str:
    """``file:line code`` of the innermost line that is neither torch's nor ours."""
    frames = [frame for frame in traceback.extract_stack() if not frame.filename.startswith((OF_TORCH, OF_AUTOPAR))]
    return f"{os.path.basename(frames[-1].filename)}:{frames[-1].lineno} {frames[-1].line}"


def _with_tensors(index: object, device: torch.device) -> object:
    """An index with tensors in place of its lists."""
    if isinstance(index, tuple):
        return tuple(_with_tensors(part, device) for part in index)
    if not isinstance(index, list | range) or not all(isinstance(i, int) for i in index):
        return index
    is_mask = bool(index) and all(isinstance(i, bool) for i in index)
    return torch.tensor([i for i, keep in enumerate(index) if keep] if is_mask else list(index), dtype=torch.int64, device="cpu").to(device)


def _instance_norm(
    x: torch.Tensor,
    running_mean: torch.Tensor | None = None,
    running_var: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> torch.Tensor:
    """``torch.nn.functional.instance_norm``, with what it writes into statistics said by ops that say that they write; its own does not,
    and export takes it for a function (seen: torch 2.13)."""
    if not use_input_stats:
        return instance_norm(x, running_mean, running_var, weight, bias, False, momentum, eps)
    space = list(range(2, x.dim()))
    if running_mean is not None:
        running_mean.mul_(1 - momentum).add_(x.detach().to(running_mean.dtype).mean(space).mean(0), alpha=momentum)
    if running_var is not None:
        running_var.mul_(1 - momentum).add_(x.detach().to(running_var.dtype).var(space).mean(0), alpha=momentum)
    return instance_norm(x, None, None, weight, bias, True, momentum, eps)


class _Code:
    """The code of a graph module, made when it is first read, as by ``str``."""

    def __init__(self, make_code: Callable[[fx.GraphModule], object]) -> None:
        self._make_code = make_code

    def __get__(self, module: fx.GraphModule | None, _: type) -> object:
        if module is None:
            return self
        self._make_code(module)
        return module._code


@contextmanager
def code_when_called() -> Iterator[None]:
    """Let graph modules make their Python code when they are called or it is read, and not whenever a pass has changed them, some twenty
    times for one graph of an export, which nobody calls: a fifth of its time (seen: torch 2.13). What `torch.fx._lazy_graph_module` does
    for the graphs of Inductor."""
    make_code = fx.GraphModule.recompile

    def forward(module: fx.GraphModule, *args: object, **kwargs: object) -> object:
        make_code(module)
        return module(*args, **kwargs)

    code = _Code(make_code)

    def recompile(module: fx.GraphModule) -> None:
        kind = type(module)  # a graph module has a class of its own
        kind.forward, kind._code = forward, code
        vars(module).pop("_code", None)  # of the graph before

    fx.GraphModule.recompile = recompile  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        fx.GraphModule.recompile = make_code  # type: ignore[method-assign]


@contextmanager
def quiet() -> Iterator[None]:
    """Keep what torch logs and prints of a failed export from the user, who gets what `trace` explains instead."""
    loggers = [logging.getLogger(name) for name in _NOISY]
    before = [logger.disabled for logger in loggers]
    printed = io.StringIO()
    try:
        for logger in loggers:
            logger.disabled = True
        with redirect_stderr(printed):
            yield
        sys.stderr.write(printed.getvalue())
    finally:
        for logger, disabled in zip(loggers, before, strict=True):
            logger.disabled = disabled


class _Frames:
    """The frames of a call that a node of export keeps, in place of a `CapturedTraceback` with all frames and their lines."""

    def __init__(self, frames: traceback.StackSummary) -> None:
        self._frames = frames

    @classmethod
    def extract(cls) -> _Frames:
        """Those of methods called ``forward``, the outermost first; that of a model with its loss stands for the line in the loss function,
        as torch leaves out what has another name."""
        found: list[traceback.FrameSummary] = []
        frame: FrameType | None = sys._getframe(1)
        called: FrameType | None = None
        user: FrameType | None = None
        while frame is not None:
            code = frame.f_code
            is_ours = code.co_filename.startswith(OF_AUTOPAR)
            if user is None and not is_ours and not code.co_filename.startswith(OF_TORCH):
                user = frame
            if code.co_name == "forward":
                shown = (user or called or frame) if is_ours else frame
                found.append(traceback.FrameSummary(shown.f_code.co_filename, shown.f_lineno, code.co_name, lookup_line=False))
            frame, called = frame.f_back, frame
        return cls(traceback.StackSummary.from_list(found[::-1]))

    def summary(self) -> traceback.StackSummary:
        return self._frames


@contextmanager
def frames_of_forwards() -> Iterator[None]:
    """Let nodes keep the frames of ``forward`` alone, of which each is told where it is in the model, without looking at all others
    first: a sixth of the time of an export (seen: torch 2.13)."""
    with patch.object(proxy, "CapturedTraceback", _Frames):
        yield


def user_line(node: fx.Node) -> str:
    """``file:line code`` of the innermost line of user code; a line of ``torch.nn`` counts only if there is no other."""
    trace = node.meta.get("stack_trace") or ""
    frames = [line.strip() for line in trace.splitlines()]
    best, is_torch = "", True
    for where, code in pairwise([*frames, ""]):
        if where.startswith("File "):
            path, _, rest = where[len('File "') :].partition('", line ')
            if OF_TORCH not in path or is_torch:
                best, is_torch = f"{os.path.basename(path)}:{rest.split(',')[0]} {code}", OF_TORCH in path
    return best
