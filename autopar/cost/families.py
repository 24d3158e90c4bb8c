"""The table of what ops do with their bytes: one row per family, with what autograd keeps (torch's ``tools/autograd/derivatives.yaml``).

What is kept is written ``0`` (operand 0), ``r0`` (result 0), ``1+`` (operand 1 and all after it), ``0?1`` (operand 0 if operand 1 needs
a gradient). An op that is not there is bound by memory and keeps its operands.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

import torch


class Work(Enum):
    """What an op does with its bytes."""

    STREAM = auto()  # reads operands, writes results; the backward reads gradients and what was kept, writes gradients
    VIEW = auto()  # nothing, in both directions
    WINDOW = auto()  # nothing forward; the backward writes a gradient of the operand's size
    PRODUCT = auto()  # as STREAM, but the backward multiplies by itself for each gradient
    POWER = auto()  # as STREAM, but the backward makes a power, scales it, and multiplies by it
    ADD = auto()  # as STREAM, but the gradient passes through untouched unless the operand was broadcast
    ROWS = (
        auto()
    )  # reads only the rows of operand 0 that the others name; the backward zeroes a whole gradient and adds rows
    LOSS = auto()  # log-softmax of operand 0, then picks from it
    DROPOUT = auto()  # as STREAM, and keeps a mask
    POOL = auto()  # as STREAM, and keeps where each result was, in int64
    COSINE = auto()  # as STREAM, and keeps of each operand that has a gradient the other one over its norm, and two numbers per row
    NORM = auto()  # as STREAM, and keeps two float32 statistics per row
    MATMUL = auto()  # result x last dim of the first factor
    CONVOLUTION = auto()  # result x all but the first dim of the weight
    ATTENTION = auto()  # two matmuls, scores stay on chip
    RECURRENT = auto()  # every step by all weights, with the gates kept


@dataclass(frozen=True, slots=True)
class Family:
    """One row of the table. ``product`` are the operands that a contraction multiplies."""

    work: Work
    kept: str
    ops: str
    product: tuple[int, int] = (0, 1)


_FAMILIES = (
    Family(
        Work.VIEW,
        "",
        "view reshape _unsafe_view transpose permute t numpy_T mT T squeeze unsqueeze flatten unflatten detach alias movedim swapaxes"
        " swapdims view_as reshape_as contiguous real view_as_real view_as_complex imag"
        " conj _conj resolve_conj",
    ),
    Family(
        Work.WINDOW,
        "",
        "slice select narrow split split_with_sizes chunk tensor_split unbind expand expand_as broadcast_to diagonal unfold as_strided",
    ),
    Family(Work.ADD, "", "add sub rsub add_ sub_"),
    Family(
        Work.STREAM,
        "",
        "neg sum mean cumsum cat stack concat repeat repeat_interleave tril triu flip roll to _to_copy type_as clone copy lift_fresh_copy"
        " pad constant_pad_nd mul.Scalar div.Scalar zeros_like ones_like full_like logical_not eq ne lt le gt ge arange ones zeros full"
        " floor ceil round sign rand_like upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d"
        " upsample_bicubic2d upsample_trilinear3d lerp.Scalar pixel_shuffle pixel_unshuffle channel_shuffle im2col fliplr flipud"
        " _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d _upsample_bilinear2d_aa diag_embed frac"
        " rot90 col2im conj_physical deg2rad rad2deg fft_fft fft_ifft fft_irfft fft_hfft fft_fft2 fft_ifft2 fft_irfft2"
        " fft_fftn fft_ifftn fft_irfftn row_of_mark tile diff fill slice_scatter select_scatter trunc remainder.Scalar fmod.Scalar",
    ),
    Family(Work.PRODUCT, "0?1 1?0", "mul mul_"),
    Family(Work.STREAM, "1 0?1", "div div_"),
    Family(
        Work.STREAM,
        "r0",
        "relu relu_ sigmoid tanh exp exp2 expm1 sqrt rsqrt reciprocal tan softmax log_softmax _softmax _safe_softmax _log_softmax polar",
    ),
    Family(
        Work.STREAM,
        "0",
        "gelu silu leaky_relu elu selu celu softplus hardtanh hardswish hardsigmoid mish log_sigmoid glu log log1p log2 sin cos erf"
        " erfinv abs clamp clamp_min clamp_max square var where avg_pool2d _adaptive_avg_pool2d adaptive_avg_pool2d",
    ),
    Family(
        Work.STREAM,
        "0 r0",
        "pow.Scalar cumprod amax amin max.default min.default median.default nanmedian.default prod std std_mean linalg_vector_norm norm"
        " logsumexp logcumsumexp sgn copysign",
    ),
    Family(Work.POWER, "0", "pow.Tensor_Scalar"),
    Family(Work.STREAM, "0 1 r0", "pow.Tensor_Tensor float_power.Tensor_Tensor hypot cdist"),
    Family(Work.STREAM, "0 1 2 r0", "scatter_reduce"),
    Family(
        Work.STREAM,
        "0 1",
        "maximum minimum clamp_min.Tensor clamp_max.Tensor atan2 mse_loss l1_loss smooth_l1_loss huber_loss",
    ),
    Family(Work.STREAM, "0+", "clamp.Tensor binary_cross_entropy binary_cross_entropy_with_logits"),
    Family(Work.COSINE, "0 1", "cosine_similarity"),
    Family(Work.STREAM, "1", "masked_fill scatter scatter_add index_put index_put_ index_fill"),
    Family(Work.STREAM, "r1", "max.dim min.dim median.dim nanmedian.dim kthvalue sort topk sort_ids"),
    Family(
        Work.STREAM,
        "0 r1",
        "max_pool1d_with_indices max_pool2d_with_indices max_pool3d_with_indices adaptive_max_pool1d adaptive_max_pool2d"
        " adaptive_max_pool3d cummax cummin",
    ),
    Family(Work.POOL, "0", "max_pool1d max_pool2d max_pool3d"),
    Family(Work.STREAM, "1+", "index_add index_copy addcmul addcdiv"),
    Family(Work.STREAM, "0 1+", "nll_loss nll_loss_nd"),
    Family(Work.ROWS, "1+", "embedding index_select index"),
    Family(Work.ROWS, "0 1", "gather take_along_dim"),
    Family(Work.ROWS, "1", "take_sorted"),
    Family(Work.STREAM, "1", "put_back"),
    Family(Work.LOSS, "0 1+", "cross_entropy_loss"),
    Family(Work.DROPOUT, "", "dropout dropout_ feature_dropout"),
    Family(Work.STREAM, "r1", "native_dropout"),
    Family(Work.NORM, "0 1 2", "layer_norm"),
    Family(Work.NORM, "0 1", "rms_norm group_norm instance_norm"),
    Family(Work.NORM, "0 1 3+", "batch_norm _native_batch_norm_legit_functional"),
    Family(Work.STREAM, "0 1 2 r1 r2", "native_layer_norm"),
    Family(Work.STREAM, "0 1 r1", "_fused_rms_norm"),
    Family(Work.STREAM, "0 1 r1 r2", "native_group_norm native_batch_norm _native_batch_norm_legit cudnn_batch_norm"),
    Family(Work.MATMUL, "0?1 1?0", "linear mm bmm matmul mv dot vdot einsum"),
    Family(Work.MATMUL, "0?1 1?0 2+", "_grouped_mm grouped_mm"),
    Family(Work.MATMUL, "0?1 1?0", "sorted_mm"),
    Family(Work.MATMUL, "1?2 2?1", "addmm baddbmm addbmm addmv", product=(1, 2)),
    Family(
        Work.CONVOLUTION,
        "0?1 1?0",
        "conv1d conv2d conv3d convolution conv_transpose1d conv_transpose2d conv_transpose3d _convolution",
    ),
    Family(Work.RECURRENT, "0 1+ r0", "lstm gru rnn_tanh rnn_relu", product=(0, -1)),
    Family(
        Work.ATTENTION,
        "0 1 2 3+ r0",
        "scaled_dot_product_attention _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu"
        " _scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention",
    ),
)
_DEFAULT = Family(Work.STREAM, "0+", "")
TABLE = {op: family for family in _FAMILIES for op in family.ops.split()}
assert len(TABLE) == sum(len(family.ops.split()) for family in _FAMILIES), "an op stands in two rows"

MATMULS = (Work.MATMUL, Work.CONVOLUTION, Work.ATTENTION, Work.RECURRENT)
_STREAMS = {
    "gelu": "gelu silu sigmoid exp exp2 elu selu celu glu",
    "gelu_tanh": "",
    "tanh": "tanh erf erfinv expm1 log log1p log2 sin cos tan softplus mish log_sigmoid",
    "softmax": "softmax log_softmax _softmax _safe_softmax _log_softmax logsumexp logcumsumexp",
    "cross_entropy_loss": "cross_entropy_loss",
    "layer_norm": "layer_norm rms_norm group_norm instance_norm batch_norm _native_batch_norm_legit_functional native_layer_norm"
    " _fused_rms_norm native_group_norm native_batch_norm _native_batch_norm_legit cudnn_batch_norm",
    "embedding": "embedding index_select index gather take_along_dim",
    "cast": "",
    "broadcast": "",
}
"""Ops that are measured, and those whose time is like theirs; other ops move bytes as a copy does. ``gelu_tanh`` is GELU by its
approximation, ``cast`` a copy in a dtype of another width, ``broadcast`` what reads an operand that is smaller than the result."""
STREAMS = tuple(_STREAMS)
CASTS = ("to", "_to_copy", "type_as")
STREAM_OF = {op: name for name, ops in _STREAMS.items() for op in ops.split()}


def names_of(op: object) -> tuple[str, str]:
    """``add.Tensor`` and ``add`` of an op; functions have one name."""
    if isinstance(op, torch._ops.OpOverload):
        packet = op.overloadpacket.__name__
        return f"{packet}.{op._overloadname}", packet
    name = str(getattr(op, "__name__", op))
    return name, name


def family_of(names: tuple[str, str]) -> Family:
    """The row of an op of these names."""
    full, packet = names
    return TABLE.get(full) or TABLE.get(packet) or _DEFAULT
