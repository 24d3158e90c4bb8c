"""Recurrent layers as one op each: sequences of a batch are free, steps and everything of a step are whole.

A rank that had a part of the steps would wait for the part before it, and one with a part of the state exchanges it at every step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from autopar.rules.lines import letters, line
from autopar.rules.registry import Call, register

aten = torch.ops.aten

LAYERS = (aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input)
"""Arguments: input, state or states, weights, whether there are biases, layers, dropout between them, whether training, whether both
directions, whether the batch comes first."""


def has_dropout(args: Sequence[object]) -> bool:
    """Whether a call with these arguments drops anything."""
    layers, rate, training = args[4:7]
    assert isinstance(layers, int)
    return bool(rate and training and layers > 1)


def _recurrent(call: Call) -> str:
    count = len(call.args[1]) if isinstance(call.args[1], (list, tuple)) else 1
    steps, rest = (["b", "t!"], ["t!", "b"])[not call.args[8]], call.operands[1 + count :]
    states = [[f"l{i}!", "b", f"h{i}!"] for i in range(count)]
    last = [[layers, *["1"] * (len(spec.shape) - 3), *term] for (layers, *term), spec in zip(states, call.results[1:], strict=True)]
    weights = [letters(len(spec.shape), f"w{i}x", "!") for i, spec in enumerate(rest)]
    return line([[*steps, "i!"], *states, *weights], [[*steps, "o!"], *last])  # torch 2.11 says of the last states one dim too many


register(LAYERS, _recurrent)
