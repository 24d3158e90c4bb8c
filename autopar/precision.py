"""In what dtype a model computes, while its parameters stay what they are.

Parameters are stored, updated and checkpointed in their own dtype (float32: the *master weights*), and the graph has narrower copies of
them, so that activations, matrix products and gathers are narrow too, as with ``MixedPrecisionPolicy(param_dtype=...)`` of
``torch.distributed.fsdp``. Of what is computed, this stays in float32: losses, here; norms and softmaxes, inside of torch's kernels, which
sum in float32 and round their result; gradients of parameters, once they leave the op that makes them; and their sums over micro-batches.

A `torch.autocast` of the user, around the call or inside of the model, counts before that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from autopar.errors import PlanError

_NAMES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}



def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_PRODUCTS = _names(
    """linear bilinear matmul __matmul__ __rmatmul__ mm mv bmm addmm addmv addr addbmm baddbmm einsum tensordot chain_matmul multi_dot
    vecdot conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d prelu scaled_dot_product_attention
    multi_head_attention_forward"""
)
"""What an autocast computes in the narrow dtype, by the names of Python functions (ATen/autocast_mode.h)."""
_RECURRENT = _names("lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell")
"""What an autocast of GPUs computes in it too, and so do we; one of CPUs casts some of what these do inside."""
_LOSSES = _names(
    """cross_entropy nll_loss nll_loss2d log_softmax logsumexp binary_cross_entropy binary_cross_entropy_with_logits mse_loss l1_loss
    smooth_l1_loss huber_loss kl_div poisson_nll_loss gaussian_nll_loss cosine_embedding_loss hinge_embedding_loss margin_ranking_loss
    multilabel_margin_loss multilabel_soft_margin_loss multi_margin_loss soft_margin_loss triplet_margin_loss cosine_similarity"""
)
"""What every autocast computes in float32, and so do we."""
_NORMS = _names("layer_norm group_norm")
_WIDE_ON = {
    "cuda": _names(
        """layer_norm rms_norm group_norm norm softmax softmin softplus exp expm1 log log10 log2 log1p pow __pow__ __rpow__ reciprocal rsqrt
        sinh cosh tan asin acos erfinv sum prod cumsum cumprod vector_norm matrix_norm dist pdist cdist renorm interpolate
        upsample"""
    ),
    "cpu": _names("avg_pool3d prod cdist trace quantile nanquantile grid_sample interpolate"),
}
"""What else an autocast of a device type computes in float32."""


@dataclass(frozen=True, slots=True)
class Master:
    """The parameter behind a narrower copy of it that a graph computes with (master weights: Micikevicius et al., ICLR 2018).

    Args:
        dtype: of what is stored and updated, and of its gradient.
        reduce: of the gradient while it is summed over ranks.
    """

    dtype: torch.dtype
    reduce: torch.dtype


@dataclass(frozen=True, slots=True)
class Precision:
    """In what a model computes, and in what gradients are summed over ranks.

    Args:
        compute: dtype of the copies of parameters that the graph has, and of what is computed of them: bfloat16, float16 or float32.
        reduce: dtype of gradients while they are summed over ranks: float32, or that of ``compute``, which halves what travels.

    Raises:
        PlanError: another dtype.
    """

    compute: torch.dtype
    reduce: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if self.compute not in _NAMES.values() or self.reduce not in (torch.float32, self.compute):
            raise PlanError(
                f"a Precision computes in bfloat16, float16 or float32 and reduces in float32 or in what it computes in; "
                f"got compute={self.compute}, reduce={self.reduce}"
            )

    @staticmethod
    def of(given: str | torch.dtype | Precision | None) -> Precision | None:
        """What a user may give: ``"bf16"``, ``"fp16"``, ``"fp32"``, with ``"/bf16"`` or ``"/fp16"`` behind for gradients reduced in it; or
        a dtype.

        Raises:
            PlanError: anything else.
        """
        if given is None or isinstance(given, Precision):
            return given
        if isinstance(given, torch.dtype):
            return Precision(given)
        if not isinstance(given, str):
            raise PlanError(f"precision is one of {', '.join(_NAMES)}, a torch.dtype or a Precision; got a {type(given).__name__}")
        compute, _, reduce = given.partition("/")
        if compute not in _NAMES or (reduce or "fp32") not in _NAMES:
            known = f"{', '.join(_NAMES)}, 'bf16/bf16' (gradients reduced in it too) or a Precision"
            raise PlanError(f"precision is one of {known}; got {given!r}")
        return Precision(_NAMES[compute], _NAMES[reduce or "fp32"])

    def __str__(self) -> str:
        names = {dtype: name for name, dtype in _NAMES.items()}
        return names[self.compute] if self.reduce == torch.float32 else f"{names[self.compute]}/{names[self.reduce]}"

    def lowers(self, parameter: torch.Tensor) -> bool:
        """Whether the graph has a narrower copy of a parameter.

        Raises:
            PlanError: the parameter is narrower than what is asked for.
        """
        if not parameter.is_floating_point():
            return False
        if parameter.dtype.itemsize < self.compute.itemsize:
            raise PlanError(
                f"precision {str(self)!r} computes in {self.compute}, but the model has parameters in {parameter.dtype}, whose other "
                "digits are gone; give a model in float32"
            )
        return parameter.dtype != self.compute

    def master_of(self, parameter: torch.Tensor, used: torch.dtype) -> Master | None:
        """The master of a parameter that the graph has in ``used``; None if they are the same."""
        if used == parameter.dtype:
            return None
        return Master(parameter.dtype, parameter.dtype if self.reduce == torch.float32 else self.reduce)


@contextmanager
def computing(model: nn.Module, precision: Precision | None) -> Iterator[None]:
    """Inside, ``model`` computes in a precision on any device, on meta too, and follows `torch.autocast` where torch itself would not."""
    kept: list[tuple[nn.Parameter, torch.Tensor]] = []
    layers = [module for module in model.modules() if isinstance(module, nn.RNNBase)] if precision is not None else []
    hooks = [layer.register_forward_pre_hook(_as_weights, with_kwargs=True) for layer in layers]
    try:
        for parameter in model.parameters() if precision is not None else ():
            assert precision is not None
            if precision.lowers(parameter):
                kept.append((parameter, parameter.data))
                parameter.data = parameter.data.to(precision.compute)
        with _Casting(precision.compute if kept and precision is not None else None):
            yield
    finally:
        for parameter, data in kept:
            parameter.data = data
        for hook in hooks:
            hook.remove()


def _as_weights(layer: nn.RNNBase, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """What a recurrent layer is called with, in the dtype of its weights: it compares them before torch is asked for anything."""
    dtype = next(layer.parameters()).dtype
    return _cast(args, dtype), _cast(kwargs, dtype)


def computes_in_half(graph: fx.Graph) -> bool:
    """Whether a gradient goes through float16, by a precision, an autocast or parameters of that dtype."""
    specs = (spec for node in graph.nodes for spec in node.meta.get("specs", ()))
    return any(spec.dtype == torch.float16 and spec.requires_grad for spec in specs)


def autocast_state() -> tuple[tuple[str, torch.dtype], ...]:
    """The autocasts in force around a call: device type and dtype."""
    return tuple((kind, torch.get_autocast_dtype(kind)) for kind in _WIDE_ON if torch.is_autocast_enabled(kind))


class _Casting(TorchFunctionMode):
    """Casts operands as the precision, or an autocast in force, says. An autocast of torch only sees tensors of its own device type, not
    those on meta."""

    def __init__(self, compute: torch.dtype | None) -> None:
        super().__init__()
        self.compute = compute

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name, kwargs = getattr(func, "__name__", ""), dict(kwargs or {})
        state = autocast_state()
        compute = state[0][1] if state else self.compute
        if compute is None:
            return func(*args, **kwargs)
        if name in _LOSSES or (state and name in _WIDE_ON[state[0][0]]):
            return func(*_cast(args, torch.float32), **_cast(kwargs, torch.float32))
        if name in _PRODUCTS or (name in _RECURRENT and (not state or state[0][0] == "cuda")):
            return func(*_cast(args, compute), **_cast(kwargs, compute))
        if name in _NORMS and self.compute is not None:  # their kernels take weights in the dtype of what they are for
            dtype = args[0].dtype if args else kwargs["input"].dtype
            return func(*args[:1], *_cast(args[1:], dtype), **_cast(kwargs, dtype))
        if name == "batch_norm":  # takes weights in the dtype of its statistics, whatever that of its input
            return func(*args[:1], *_cast(args[1:], torch.float32), **_cast(kwargs, torch.float32))
        return func(*args, **kwargs)


def _cast(arguments: Any, dtype: torch.dtype) -> Any:
    """Arguments with what is floating in ``dtype``; float64 stays where float32 is asked for, as in an autocast."""

    def cast(x: torch.Tensor) -> torch.Tensor:
        is_wider = dtype == torch.float32 and x.dtype == torch.float64
        return x if not x.is_floating_point() or x.dtype == dtype or is_wider else x.to(dtype)

    return pytree.tree_map_only(torch.Tensor, cast, arguments)
