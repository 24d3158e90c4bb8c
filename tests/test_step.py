"""What a stage does between the actions of a schedule."""

from __future__ import annotations

import torch

from autopar import Manual
from autopar.compile import compile_stage
from autopar.step import Arithmetic, StageRun
from tests.planning import opened, planned


def test_a_stage_without_gradients_has_a_backward_that_does_nothing() -> None:
    """Schedules have a backward for every stage, also for one of which nothing reaches the loss."""
    _, session = opened("mlp")
    program = compile_stage(session.normal, planned(session, Manual(microbatches=2)), 0, device=torch.device("cpu"), training=False)
    arithmetic: Arithmetic[torch.Tensor] = Arithmetic(
        run=lambda graph, given: list(graph(*given)),
        add=torch.add,
        full_like=torch.full_like,
        zeros_like=torch.zeros_like,
        number=lambda number: torch.tensor([number]),
        contiguous=torch.Tensor.contiguous,
        part=lambda value, position, count: value.chunk(count)[position],
        fetch=list,
    )
    run = StageRun(program, arithmetic, [], [], torch.tensor([0]), 2)
    assert program.ending is None
    assert run.backward(0, []) == []
    run.weight_backward(0)
    assert run.input_backward(1, []) == []
    assert run.grads == {}
