"""Micro-batching is an axis in time: which ops may run on a part of the batch at a time, read off the rules.

The batch is split on an axis of the mesh whose positions come one after the other (`mesh.MICROBATCH`). Every op takes one choice on that
axis, as on any other, but nothing can be gathered or reduced over it inside a step. What is left:

| on the axis in time | value                                                                        |
|---------------------|------------------------------------------------------------------------------|
| S                   | each micro-batch has its samples                                             |
| P                   | each micro-batch has a summand (the loss; the runtime adds them up), of what |
|                     | is whole in each an equal part                                               |
| R                   | made of inputs alone, from the whole batch, alike in each (counts of tokens) |
| R*                  | made of parameters alone, alike in each; its gradients are summands          |

An op that fits none of these needs the whole batch at once: batch statistics, contrastive losses, losses that are not linear in
the parts. A model that has one cannot be split; `split_batch` says which op it is. What a user may allow instead is `passes.average`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import fx

from autopar.capture.trace import Source
from autopar.errors import MicrobatchError
from autopar.factors import Factors
from autopar.graph import Value, is_call, is_sorted, operands_of, outputs_of, specs_of, value_spec
from autopar.layout import PARTIAL, REPLICATED, REPLICATED_PARTIAL_GRAD, Atoms, Placement, shard
from autopar.rules.strategies import Choice, replicated_choice


@dataclass(frozen=True, slots=True)
class Split:
    """How every op of a normal graph goes on the axis in time.

    Args:
        microbatches: size of the axis.
        choices: of every op that is no constant.
        outputs: placement of every output of the graph.
        atoms: shape of every output when its parts are joined, in factors.
        is_average: whether the parts are batches of their own (`passes.average`): sums over them are averages.
    """

    microbatches: int
    choices: Mapping[fx.Node, Choice]
    outputs: tuple[Placement, ...]
    atoms: tuple[Atoms, ...]
    is_average: bool = False

    @property
    def scale(self) -> float:
        """What a summand of the loss counts."""
        return 1 / self.microbatches if self.is_average else 1.0


def whole_batch(module: fx.GraphModule) -> Split:
    """One micro-batch: the axis in time has one position, and everything is whole on it."""
    choices = {node: replicated_choice(len(operands_of(node)), len(specs_of(node))) for node in _calls(module)}
    values = outputs_of(module.graph)
    atoms = tuple(tuple((n,) for n in value_spec(value).shape) for value in values)
    return Split(1, choices, (REPLICATED,) * len(values), atoms)


def split_batch(module: fx.GraphModule, factors: Factors, microbatches: int) -> Split:
    """Split the batch of a normal graph into ``microbatches`` equal parts. An input of as many numbers as the batch has rows goes with
    these if that can be, or else is whole, as positions of as many tokens are.

    Raises:
        MicrobatchError: an op needs the whole batch, or the number does not divide it.
    """
    if microbatches == 1:
        return whole_batch(module)
    rows = (batch_size(module),)
    vectors = [node for node in _inputs(module) if specs_of(node)[0].shape == rows and node is not batch_input(module)]
    first: MicrobatchError | None = None
    for whole in dict.fromkeys((frozenset[fx.Node](), *(frozenset([node]) for node in vectors), frozenset(vectors))):
        try:
            return _Splitter(module, factors, microbatches, whole).run()
        except MicrobatchError as error:
            first = first or error
    assert first is not None
    raise first


def light_nodes(module: fx.GraphModule) -> set[fx.Node]:
    """Nodes that are made of inputs, buffers and constants alone: masks, positions, counts."""
    light: set[fx.Node] = set()
    for node in module.graph.nodes:
        if node.op == "placeholder":
            if node.meta["placeholder"].source is not Source.PARAMETER:
                light.add(node)
        elif node.op == "get_attr" or (node.op == "call_function" and all(used in light for used in node.all_input_nodes)):
            light.add(node)
    return light


def _calls(module: fx.GraphModule) -> Iterable[fx.Node]:
    return (node for node in module.graph.nodes if is_call(node) and not node.meta["constant"])


def batch_size(module: fx.GraphModule) -> int:
    """Size of dim 0 of the `batch_input`; 1 without inputs."""
    node = batch_input(module)
    return specs_of(node)[0].shape[0] if node is not None else 1


def batch_input(module: fx.GraphModule) -> fx.Node | None:
    """The input whose dim 0 is taken for the batch: the first of as many rows as most inputs have, if any has rows."""
    nodes = _inputs(module)
    rows = Counter(specs_of(n)[0].shape[0] for n in nodes if specs_of(n)[0].shape[:1] > (0,))
    most = max(rows, key=lambda size: rows[size], default=0)  # of equals the first
    return next((n for n in nodes if specs_of(n)[0].shape[:1] == (most,)), None)


def _inputs(module: fx.GraphModule) -> list[fx.Node]:
    return [n for n in module.graph.find_nodes(op="placeholder") if n.meta["placeholder"].source is Source.INPUT]


def _batch_text(module: fx.GraphModule) -> str:
    """What is taken for the batch, in words."""
    node = batch_input(module)
    return f"dim 0 of input {node.meta['placeholder'].name}" if node is not None else "there is no input"


@dataclass(slots=True)
class _Splitter:
    module: fx.GraphModule
    factors: Factors
    microbatches: int
    whole: frozenset[fx.Node] = frozenset()
    light: set[fx.Node] = field(default_factory=set)
    placed: dict[Value, Placement] = field(default_factory=dict)
    batch: dict[Value, set[Placement]] = field(default_factory=dict)
    chosen: dict[fx.Node, Choice] = field(default_factory=dict)

    def run(self) -> Split:
        size = batch_size(self.module)
        self._check_size(size)
        self.light = light_nodes(self.module)
        for node in self.module.graph.nodes:
            if node.op == "placeholder":
                self._placeholder(node, size)
            elif node.op == "get_attr" or (is_call(node) and node.meta["constant"]):
                self.placed.update({Value(node, i): REPLICATED for i in range(len(specs_of(node)))})
            elif is_call(node):
                self._take(node, self._choose(node))
        outputs = outputs_of(self.module.graph)
        for position, value in enumerate(outputs):
            self._check_output(value, position)
        atoms = tuple(self.factors.values[value] for value in outputs)
        return Split(self.microbatches, self.chosen, tuple(self.placed[value] for value in outputs), atoms)

    def _check_size(self, size: int) -> None:
        if size % self.microbatches:
            raise MicrobatchError(
                f"{self.microbatches} micro-batches do not divide the batch of {size} ({_batch_text(self.module)}); choose a divisor of it"
            )

    def _placeholder(self, node: fx.Node, size: int) -> None:
        spec, value = specs_of(node)[0], Value(node)
        self.placed[value] = REPLICATED_PARTIAL_GRAD if spec.requires_grad else REPLICATED
        if node.meta["placeholder"].source is Source.INPUT and spec.shape[:1] == (size,) and node not in self.whole:
            self.batch[value] = {shard(0, atom) for atom in range(len(self.factors.values[value][0]))}

    def _take(self, node: fx.Node, choice: Choice) -> None:
        self.chosen[node] = choice
        for i, placement in enumerate(choice.results):
            self.placed[Value(node, i)] = placement
            if placement.is_sharded:
                self.batch[Value(node, i)] = {placement}

    def _choose(self, node: fx.Node) -> Choice:
        operands = operands_of(node)
        choices = self.factors.choices(node, self.microbatches)
        fitting = [choice for choice in choices if self._fits(node, choice, operands)]
        if not fitting:
            # what comes of inputs alone can be made from the whole batch instead, and sliced where a part is wanted
            for value in operands:
                self._make_whole(value)
            fitting = [choice for choice in choices if self._fits(node, choice, operands)]
        if not fitting and any(self.placed[value] == PARTIAL for value in operands):
            fitting = [choice for choice in choices if self._fits(node, choice, operands, is_shared=True)]
        if not fitting:
            raise MicrobatchError(self._reason(node, operands))
        return self._as_it_comes(max(fitting, key=lambda choice: self._worth(choice, operands)), operands)

    def _as_it_comes(self, choice: Choice, operands: Sequence[Value]) -> Choice:
        """The choice, with what is made of parameters alone wanted as it is (R*) where no gradient goes back to it: it need not move."""
        is_made = [self.placed[value] == REPLICATED_PARTIAL_GRAD and value.node.op != "placeholder" for value in operands]
        pairs = zip(choice.operands, is_made, strict=True)
        wanted = tuple(REPLICATED_PARTIAL_GRAD if made and place == REPLICATED else place for place, made in pairs)
        return choice if wanted == choice.operands else replace(choice, operands=wanted)

    def _fits(self, node: fx.Node, choice: Choice, operands: Sequence[Value], *, is_shared: bool = False) -> bool:
        """Whether all operands can come as a choice wants them; ``is_shared``: of what is whole a summand its equal part."""
        if node in self.light and PARTIAL in choice.results:
            return False  # a count is of the whole batch
        flows = any(spec.requires_grad for spec in specs_of(node))
        pairs = zip(operands, choice.operands, strict=True)
        return all(self._reaches(value, wanted, flows) or (is_shared and self._is_shared(value, wanted)) for value, wanted in pairs)

    def _is_shared(self, value: Value, wanted: Placement) -> bool:
        return wanted == PARTIAL and self.placed[value].holds_whole and value_spec(value).dtype.is_floating_point

    def _reaches(self, value: Value, wanted: Placement, flows: bool) -> bool:
        """Whether a value can come as it is wanted without any communication over time; ``flows``: and its gradient back."""
        have, needs_grad = self.placed[value], value_spec(value).requires_grad and flows
        if have == wanted or is_sorted(value):
            return have == wanted
        if have == REPLICATED_PARTIAL_GRAD or (have == REPLICATED and not needs_grad):
            return wanted.is_sharded or wanted == (REPLICATED_PARTIAL_GRAD if needs_grad else REPLICATED)
        return False

    def _worth(self, choice: Choice, operands: Sequence[Value]) -> tuple[bool, int, int]:
        """Splits of the batch first, whatever they slice besides, as what is matched with it: noise of the size of the batch, parameters of
        each sample, samples in another order; then what slices least."""
        pairs = [(value, wanted) for value, wanted in zip(operands, choice.operands, strict=True) if wanted.is_sharded]
        along = sum(wanted in self.batch.get(value, ()) for value, wanted in pairs)
        across = len(pairs) - along
        return along > 0, along - 2 * across, -across

    def _make_whole(self, value: Value) -> None:
        """Let what comes of inputs alone be computed from the whole batch, with all that it is made of."""
        node = value.node
        if node not in self.light or node not in self.chosen or self.placed[value] == REPLICATED:
            return
        for operand in operands_of(node):
            self._make_whole(operand)
        kept = {Value(node, i): self.batch.get(Value(node, i), set()) for i in range(len(specs_of(node)))}
        self._take(node, replicated_choice(len(operands_of(node)), len(specs_of(node))))
        self.batch.update(kept)

    def _reason(self, node: fx.Node, operands: Sequence[Value]) -> str:
        held = ", ".join(f"{value.node.name} {self.placed[value]}" for value in operands)
        rule = self.factors.rules.get(node)
        return (
            f"the batch cannot be split into micro-batches: {str(node.target).removesuffix('.default')} ({node.meta.get('line', '')}) "
            f"needs all samples at once, or is not linear in their sum (rule {rule}; operands over time: {held}); train with one "
            "micro-batch, or let micro-batches be batches of their own: average_microbatches=True"
        )

    def _check_output(self, value: Value, position: int) -> None:
        spec, placed = value_spec(value), self.placed[value]
        if spec.requires_grad and spec.shape == () and placed != PARTIAL:
            made = "is made of parameters alone" if placed == REPLICATED_PARTIAL_GRAD else "is not a sum over them"
            line, batch = value.node.meta.get("line", ""), _batch_text(self.module)
            raise MicrobatchError(
                f"the batch ({batch}) cannot be split into micro-batches: output {position}, a scalar with a gradient and so a loss "
                f"({line}), {made}; .detach() it if it is no loss, else train with one micro-batch, or let micro-batches be batches of "
                "their own: average_microbatches=True"
            )
