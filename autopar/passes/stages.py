"""Normal graph + the stage of every op -> the part of the graph that each stage runs, and what goes from one to the next.

What is made of inputs, buffers and constants alone (masks, positions, counts) is of no stage: every stage that wants it makes it, since
every rank has the inputs. A value that a later stage wants is handed on from stage to stage, also through those that only pass it on, so
that stages talk to their neighbours alone. A parameter belongs to every stage that uses it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from autopar.capture.trace import Placeholder, Source
from autopar.errors import PlanError
from autopar.graph import Value, is_call, is_getitem, operands_of, outputs_of
from autopar.passes.microbatch import light_nodes


@dataclass(frozen=True, slots=True)
class Part:
    """What one stage runs of a normal graph.

    Args:
        nodes: placeholders, constants and ops, in graph order.
        received: values that come from the stage before.
        sent: values that go to the stage after; one that is also received is passed on.
        outputs: positions of the outputs of the model that are made here.
    """

    nodes: tuple[fx.Node, ...]
    received: tuple[Value, ...] = ()
    sent: tuple[Value, ...] = ()
    outputs: tuple[int, ...] = ()

    @property
    def parameters(self) -> tuple[fx.Node, ...]:
        return tuple(n for n in self.nodes if n.op == "placeholder" and n.meta["placeholder"].source is Source.PARAMETER)


def whole_part(module: fx.GraphModule) -> Part:
    """The one stage of a model without pipeline."""
    nodes = tuple(node for node in module.graph.nodes if node.op != "output" and not is_getitem(node))
    return Part(nodes, outputs=tuple(range(len(outputs_of(module.graph)))))


def staged_ops(module: fx.GraphModule) -> list[fx.Node]:
    """The ops that have a stage, in graph order: those that depend on a parameter."""
    light = light_nodes(module)
    return [node for node in module.graph.nodes if is_call(node) and node not in light]


def cut_stages(module: fx.GraphModule, stage_of: Mapping[fx.Node, int], stages: int) -> tuple[Part, ...]:
    """Cut a normal graph.

    Args:
        module: the graph.
        stage_of: stage of each of its `staged_ops`.
        stages: their number.

    Raises:
        PlanError: a value would have to go back to an earlier stage.
    """
    if stages == 1:
        return (whole_part(module),)
    made: dict[Value, int] = {}
    wanted: dict[Value, int] = {}
    own: list[set[fx.Node]] = [set() for _ in range(stages)]
    for node in module.graph.nodes:
        if node not in stage_of:
            continue
        stage = stage_of[node]
        own[stage].add(node)
        made.update({Value(node, i): stage for i in range(len(node.meta["specs"]))})
        for value in operands_of(node):
            if value in made:
                if made[value] > stage:
                    raise PlanError(
                        f"op {node.name} of stage {stage} needs {value.node.name} of the later stage {made[value]}; "
                        "an op comes no earlier than what it reads"
                    )
                wanted[value] = max(wanted.get(value, 0), stage)
            else:
                _add_sources(value.node, own[stage], made)
    outputs: list[list[int]] = [[] for _ in range(stages)]
    for position, value in enumerate(outputs_of(module.graph)):
        stage = made.get(value, 0)
        outputs[stage].append(position)
        if value not in made:
            _add_sources(value.node, own[stage], made)
    order = [node for node in module.graph.nodes if node.op != "output"]
    crossing = [
        tuple(value for value, stage in made.items() if stage <= border < wanted.get(value, -1)) for border in range(stages - 1)
    ]
    return tuple(
        Part(
            tuple(node for node in order if node in own[stage]),
            received=crossing[stage - 1] if stage else (),
            sent=crossing[stage] if stage < stages - 1 else (),
            outputs=tuple(outputs[stage]),
        )
        for stage in range(stages)
    )


def _add_sources(node: fx.Node, own: set[fx.Node], made: Mapping[Value, int]) -> None:
    """Add a placeholder, constant or light op, with all that it is made of."""
    if node in own:
        return
    own.add(node)
    for value in operands_of(node) if node.op == "call_function" else ():
        assert value not in made, (node, value)
        _add_sources(value.node, own, made)


def follow_parameters(module: fx.GraphModule, homes: Mapping[str, tuple[int, ...]], stages: int) -> dict[fx.Node, int]:
    """The stage of every op of a graph whose parameters lie on known stages: the first that has its parameters and comes no earlier
    than its operands.

    Args:
        module: normal graph.
        homes: stages that hold each parameter, by name.
        stages: their number.

    Raises:
        PlanError: there is no such stage for an op.
    """
    stage_of: dict[fx.Node, int] = {}
    for node in staged_ops(module):
        least = max((stage_of.get(value.node, 0) for value in operands_of(node)), default=0)
        held = [set(homes[p.name]) for p in _parameters_read(node)]
        fitting = [stage for stage in range(least, stages) if all(stage in h for h in held)]
        if not fitting:
            names = ", ".join(p.name for p in _parameters_read(node))
            raise PlanError(
                f"op {node.name} ({node.meta.get('line', '')}) comes after stage {least} but reads {names}, which is on earlier stages; "
                "this kind of call does not fit the stages of the plan"
            )
        stage_of[node] = fitting[0]
    return stage_of


def _parameters_read(node: fx.Node) -> list[Placeholder]:
    found = [value.node.meta.get("placeholder") for value in operands_of(node)]
    return [entry for entry in found if entry is not None and entry.source is Source.PARAMETER]
