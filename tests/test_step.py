"""What a stage does between the actions of a schedule."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from autopar import Manual
from autopar.compile import compile_stage
from autopar.step import Arithmetic, StageRun
from tests.planning import opened, planned

ARITHMETIC: Arithmetic[torch.Tensor] = Arithmetic(
    run=lambda graph, given: list(graph(*given)),
    add=torch.add,
    full_like=torch.full_like,
    zeros_like=torch.zeros_like,
    number=lambda number: torch.tensor([number]),
    contiguous=torch.Tensor.contiguous,
    part=lambda value, position, count: value.chunk(count)[position],
    fetch=list,
)


def test_gradients_that_were_sent_are_held_by_the_backward_alone() -> None:
    """So that each is freed after its last use."""
    example, session = opened("mlp")
    program = compile_stage(session.normal, planned(session, Manual(pp=2, microbatches=2)), 0, device=torch.device("cpu"), training=True)
    tangents: list[torch.Tensor] = []
    left: list[int] = []

    def compute(graph: fx.GraphModule, given: list[torch.Tensor]) -> list[torch.Tensor]:
        left.append(len(tangents))
        return list(graph(*given))

    state = {**dict(example.model.named_parameters()), **dict(example.model.named_buffers()), **example.batch}
    placeholders = [state[name].detach() for name in program.names]
    coordinates = [torch.tensor([0])] * 2
    run = StageRun(program, replace(ARITHMETIC, run=compute), placeholders, coordinates, torch.tensor([0]), 2)
    sent = run.forward(0, [])
    tangents += [torch.ones_like(value) for value in sent]
    run.backward(0, tangents)
    assert sent
    assert left[-1] == 0
    assert run.grads


def test_a_stage_without_gradients_has_a_backward_that_does_nothing() -> None:
    """Schedules have a backward for every stage, also for one of which nothing reaches the loss."""
    _, session = opened("mlp")
    program = compile_stage(session.normal, planned(session, Manual(microbatches=2)), 0, device=torch.device("cpu"), training=False)
    run = StageRun(program, ARITHMETIC, [], [], torch.tensor([0]), 2)
    assert program.ending is None
    assert run.backward(0, []) == []
    run.weight_backward(0)
    assert run.input_backward(1, []) == []
    assert run.grads == {}
