"""Plans that are right pass the check, on small models; what is broken on purpose is found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
import torch
from torch import fx, nn

import autopar
from autopar import Manual
from autopar.cost.cluster import Cluster
from autopar.dry.build import build
from autopar.dry.check import Checked, check_programs
from autopar.dry.play import Programs
from autopar.errors import PlanError
from autopar.passes.overlap import STARTS
from autopar.plan import Plan
from autopar.planner.session import Session, open_session
from autopar.runtime.module import make_skeleton
from autopar.schedule.actions import Action, Kind, Schedule
from tests import models
from tests.marks import exhaustive, few, only
from tests.models import Example
from tests.planning import planned

pytestmark = pytest.mark.slow

aten = torch.ops.aten
MODELS: dict[str, Callable[..., Example]] = {"gpt2": models.gpt2, "llama": models.llama, "speaker": models.speaker}


@cache
def opened(name: str, layers: int = 2) -> Session:
    example = MODELS[name](layers=layers, batch=8, hidden=128, sequence=32)
    return open_session(make_skeleton(example.model), (), example.batch)


@cache
def built(name: str, wanted: Manual, layers: int = 2) -> tuple[Plan, Programs]:
    session = opened(name, layers)
    plan = planned(session, wanted)
    programs, findings = build(session, plan)
    assert not findings
    return plan, programs


def check(plan: Plan, programs: Programs, *, odd: Programs | None = None, odd_rank: int = 1) -> Checked:
    """All ranks, of which one may run other programs."""
    return check_programs(plan, lambda rank: odd if odd is not None and rank == odd_rank else programs, range(plan.grid.num_ranks))


def but_memory(found: Checked) -> list[str]:
    return [text for text in found.findings if not text.startswith("memory ")]


WHOLE = [Manual(dp=2, zero=2), Manual(dp=2, tp=2, zero=1), Manual(dp=2), Manual(dp=2, zero=1), Manual(dp=2, zero=3), Manual(tp=2)]
STAGED = [
    Manual(dp=2, zero=1, microbatches=4),
    Manual(pp=2, dp=2, zero=1, microbatches=4),
    Manual(pp=2, microbatches=4),
    Manual(pp=2, dp=2, zero=3, microbatches=2),
    Manual(pp=2, tp=2, schedule="zb-h1", microbatches=4),
    Manual(pp=2, schedule="interleaved:2", microbatches=4),
]


@pytest.mark.parametrize("wanted", [*few(1, WHOLE), *only([STAGED[1]], STAGED)], ids=str)
def test_right_plans_pass(wanted: Manual) -> None:
    plan, programs = built("gpt2", wanted)
    found = check(plan, programs)
    assert but_memory(found) == []
    assert found.num_programs == plan.pipeline.degree
    assert found.num_calls > 0


@exhaustive
@pytest.mark.parametrize("wanted", [Manual(dp=2, tp=2), Manual(pp=2, tp=2, dp=2, zero=1, microbatches=2)], ids=str)
def test_right_plans_of_llama_pass(wanted: Manual) -> None:
    assert but_memory(check(*built("llama", wanted))) == []


@cache
def large() -> Session:
    """With activations and parameters that count, beside what lives for one op."""
    example = models.gpt2(layers=4, hidden=256, sequence=64, batch=16)
    return open_session(make_skeleton(example.model), (), example.batch)


CLOSE = [
    Manual(pp=2, dp=2, zero=2, microbatches=4),
    Manual(dp=2, zero=3, microbatches=4),
    Manual(dp=4, zero=3, replicas=2, microbatches=2),
    Manual(pp=2, microbatches=4, recompute="selective"),
    Manual(pp=4, microbatches=4, schedule="zb-h1"),
    Manual(dp=2),
    Manual(dp=2, zero=1),
    Manual(dp=2, zero=3),
    Manual(dp=2, recompute="full"),
    Manual(dp=2, microbatches=4),
    Manual(dp=2, zero=1, microbatches=4),
    Manual(pp=2, microbatches=4),
    Manual(pp=2, microbatches=4, recompute="full"),
    Manual(pp=2, microbatches=4, schedule="interleaved:2"),
]


def checked(session: Session, wanted: Manual) -> Checked:
    """All ranks of a plan that is made for it."""
    plan = planned(session, wanted)
    programs, findings = build(session, plan)
    return check_programs(plan, lambda _: programs, range(plan.grid.num_ranks), findings)


@pytest.mark.parametrize("wanted", few(1, CLOSE), ids=str)
def test_memory_is_as_predicted(wanted: Manual) -> None:
    found = checked(large(), wanted)
    assert found.findings == ()
    assert len(found.memory) == wanted.pp
    for use in found.memory:
        assert use.ratio == pytest.approx(1, abs=0.05)
        assert sum(use.by_kind.values()) == use.counted


@pytest.mark.parametrize("compress", ["topk:0.1", "powersgd:4"])
def test_compressed_gradients_that_wait_take_little(compress: str) -> None:
    """Received and not decoded, those of all layers took 1.6 times as much as everything."""
    width = 1024
    with torch.device("meta"):
        layers = [nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(8)]
        model, batch = nn.Sequential(*layers), (torch.zeros(4 * width, width),)

    def loss_fn(output: torch.Tensor) -> torch.Tensor:
        return output.square().mean()

    wanted = Manual(dp=4, zero=3, microbatches=4)
    plan = autopar.plan(model, 4, batch, plan=wanted, loss_fn=loss_fn, compress=compress)
    for use in autopar.check(model, plan, batch, loss_fn=loss_fn).memory:
        assert use.ratio == pytest.approx(1, abs=0.1)


@cache
def tiny(name: str) -> Session:
    """So small that each activation, each message and each half of a rotary embedding is some hundredths of all."""
    example = MODELS[name](layers=4, hidden=64, batch=16, sequence=64)
    return open_session(make_skeleton(example.model), (), example.batch)


TINY = [
    ("llama", Manual(pp=2, microbatches=4, recompute="full")),
    ("llama", Manual(dp=2, recompute="selective")),
    ("gpt2", Manual(dp=2, recompute="full")),
    ("llama", Manual(pp=2, microbatches=4)),
    *(("llama", config) for config in (Manual(pp=4, microbatches=8, recompute="full"), Manual(dp=2, zero=3), Manual(tp=2))),
    *((name, Manual(pp=2, microbatches=4, recompute="selective")) for name in ("llama", "gpt2")),
    ("llama", Manual(dp=2, recompute="full")),
    *(("gpt2", Manual(pp=pp, microbatches=2 * pp, recompute="full")) for pp in (2, 4)),
    *(("gpt2", Manual(dp=dp, zero=zero, microbatches=dp // 2)) for dp, zero in ((2, 3), (4, 3))),
    *(("gpt2", config) for config in (Manual(pp=2, microbatches=4), Manual(dp=2, recompute="selective"))),
]


@pytest.mark.parametrize("name, wanted", few(1, TINY), ids=str)
def test_memory_of_tiny_models_is_as_predicted(name: str, wanted: Manual) -> None:
    found = checked(tiny(name), wanted)
    assert found.findings == ()
    assert all(0.95 <= use.ratio <= 1.01 for use in found.memory)


IN_TWO = [
    ("llama", Manual(pp=2, microbatches=4, recompute="full")),
    ("gpt2", Manual(pp=4, microbatches=8, recompute="selective")),
    ("gpt2", Manual(pp=2, tp=2, microbatches=4)),
    ("llama", Manual(pp=2, tp=2, microbatches=4)),
    *((name, Manual(pp=4, microbatches=8, recompute="full")) for name in ("llama", "gpt2")),
    *(("gpt2", Manual(pp=2, tp=2, microbatches=4, recompute=level)) for level in ("selective", "full")),
    *(("gpt2", Manual(pp=2, dp=2, zero=zero, microbatches=4, recompute="selective")) for zero in (1, 2, 3)),
    *(("llama", Manual(pp=2, dp=2, zero=zero, microbatches=4, recompute="full")) for zero in (0, 1, 2, 3)),
]


@pytest.mark.parametrize("name, wanted", few(1, IN_TWO), ids=str)
def test_memory_of_backwards_in_two_parts_is_as_predicted(name: str, wanted: Manual) -> None:
    """Of what is computed again, operands of products with weights stay from the first part to the second, with gradients."""
    found = checked(tiny(name), replace(wanted, schedule="zb-h1"))
    assert found.findings == ()
    assert all(0.95 <= use.ratio <= 1.03 for use in found.memory)


@cache
def short() -> Session:
    """With more parameters than activations."""
    example = models.gpt2(layers=4, hidden=256, sequence=16, batch=4)
    return open_session(make_skeleton(example.model), (), example.batch)


@pytest.mark.parametrize("wanted", few(1, [Manual(pp=2, dp=2), Manual(dp=2), Manual(dp=2, zero=3)]), ids=str)
def test_memory_of_an_update_on_gpus_is_as_predicted(wanted: Manual) -> None:
    """AdamW takes there as much again as all parameters, for the time of the update."""
    plan = planned(short(), wanted, cluster=Cluster(1, wanted.dp * wanted.pp, "a100-80gb"))
    programs, findings = build(short(), plan)
    found = check_programs(plan, lambda _: programs, range(plan.grid.num_ranks), findings)
    for use, stage in zip(found.memory, plan.stages, strict=True):
        stored, optimizer = stage.held.together, stage.memory_bytes["optimizer"]
        assert optimizer == 2 * stored
        assert use.predicted == pytest.approx(3 * stored + optimizer, rel=0.01)  # parameters, gradients, and what the update takes
        assert use.ratio == pytest.approx(1, abs=0.02)


@cache
def mixed() -> Session:
    """With experts, whose results one equation takes with what sends tokens to them."""
    example = models.mixture(layers=2, hidden=64, batch=8, sequence=32)
    return open_session(make_skeleton(example.model), (), example.batch)


MIXED = [Manual(pp=2, dp=2, ep=2, microbatches=4), Manual(dp=2, ep=2), Manual(pp=2, microbatches=4)]


@pytest.mark.parametrize("wanted", few(1, MIXED), ids=str)
def test_memory_of_experts_is_as_predicted(wanted: Manual) -> None:
    found = checked(mixed(), wanted)
    assert found.findings == ()
    assert [use.ratio for use in found.memory] == pytest.approx([1] * wanted.pp, abs=0.04)


@exhaustive
def test_copies_that_products_make_of_what_is_computed_again_are_not_kept() -> None:
    example = models.mixture(layers=4, hidden=64, batch=16, sequence=32)
    session = open_session(make_skeleton(example.model), (), example.batch)
    found = checked(session, Manual(pp=2, microbatches=4, recompute="full"))
    assert [use.ratio for use in found.memory] == pytest.approx([1, 1], abs=0.05)


@cache
def dropping() -> Session:
    """With dropout, also of attention, whose scores are larger than all else."""
    example = models.gpt2(layers=4, hidden=128, sequence=128, batch=16, dropout=0.1)
    return open_session(make_skeleton(example.model), (), example.batch)


@pytest.mark.parametrize("wanted", few(1, [Manual(pp=2, microbatches=8), Manual(dp=2), Manual(tp=2)]), ids=str)
def test_masks_take_no_memory_that_is_not_predicted(wanted: Manual) -> None:
    assert all(use.ratio == pytest.approx(1, abs=0.05) for use in checked(dropping(), wanted).memory)


@pytest.mark.parametrize("wanted", few(1, [Manual(tp=2), Manual(dp=2), Manual(dp=2, zero=3)]), ids=str)
def test_what_activations_leave_on_the_device_is_nearly_as_predicted(wanted: Manual) -> None:
    """The scores of attention with dropout are kept, so that what leaves is most of the step; query, key and value share their memory."""
    example = models.gpt2(layers=4, hidden=128, sequence=256, batch=16, dropout=0.1, device="meta")
    cluster = autopar.Cluster(1, 2, "a100-80gb")
    counted = dict[str, int]()
    for offload in ("none", "activations"):
        plan = autopar.plan(example.model, cluster, example.batch, plan=wanted, offload=offload)
        (use, *_) = autopar.check(example.model, plan, example.batch).memory
        assert (0.95 if offload == "none" else 0.8) < use.ratio < (1.05 if offload == "none" else 1.1)
        counted[offload] = use.counted
    assert counted["activations"] < 0.4 * counted["none"]


SEQUENCE_PARALLEL = Manual(tp=4, sequence_parallel=True)
GATHERED = [
    ("gpt2", replace(SEQUENCE_PARALLEL, recompute="full")),  # its last product is column-parallel, and gathers what is four times as wide
    ("gpt2", Manual(pp=2, dp=2, zero=3, microbatches=4, recompute="full")),
    ("llama", replace(SEQUENCE_PARALLEL, recompute="full", pp=2, microbatches=4, schedule="zb-h1")),
    *((name, replace(SEQUENCE_PARALLEL, recompute=level)) for level in ("selective", "pointwise") for name in ("llama", "gpt2")),
    *(("llama", replace(SEQUENCE_PARALLEL, recompute=level)) for level in ("full", "full:1/2")),
    ("gpt2", replace(SEQUENCE_PARALLEL, recompute="full", pp=2, microbatches=4, schedule="zb-h1")),
    *(("llama", replace(SEQUENCE_PARALLEL, recompute="selective", microbatches=4, pp=pp)) for pp in (1, 2)),
    *(("llama", Manual(tp=4, recompute=level)) for level in ("selective", "full")),  # terms as wide, whose sum is scattered
    ("gpt2", Manual(pp=2, tp=2, recompute="full", microbatches=4, schedule="interleaved:2")),
]


@cache
def wide(name: str) -> Session:
    """With sequences whose activations count beside parameters."""
    sizes = {"intermediate": 704} if name == "llama" else {}
    example = MODELS[name](layers=6, hidden=256, heads=8, vocab=512, batch=8, sequence=256, **sizes)
    return open_session(make_skeleton(example.model), (), example.batch, outputs="loss")


@pytest.mark.parametrize("name, wanted", only([GATHERED[1]], GATHERED), ids=str)
def test_what_is_gathered_again_is_counted(name: str, wanted: Manual) -> None:
    """With sequence parallelism the products take whole sequences, of which a rank has a part where there is no product; a block that is
    computed again with ZeRO-3 has all its parameters until its backward is done."""
    found = checked(wide(name), wanted)
    assert found.findings == ()
    assert [use.ratio for use in found.memory] == pytest.approx([1] * wanted.pp, abs=0.05)
    kept = planned(wide(name), replace(wanted, recompute="none")).prediction.peak_memory_bytes
    if wanted.schedule != "zb-h1":  # where what gradients of weights are made of stays, and the shards may be others
        assert max(use.counted for use in found.memory) < 0.9 * max(kept)


@cache
def talkative(outputs: str) -> Session:
    """With logits that are larger than all else."""
    example = models.gpt2(layers=2, hidden=64, vocab=4096, sequence=64, batch=16)
    return open_session(make_skeleton(example.model), (), example.batch, outputs=outputs)


TALKING = [
    Manual(dp=2),
    Manual(tp=4),
    Manual(dp=2, cp=2),
    Manual(dp=2, tp=2),
    Manual(pp=2, microbatches=4),
    Manual(tp=2),
    Manual(dp=2, microbatches=4),
]


def test_the_peak_of_a_rank_is_that_of_its_stage() -> None:
    """In the step that is played, and in the phases of the stage: at the end, with logits, and of ZeRO-1 the shards that have come."""
    plan = planned(talkative("whole"), Manual(dp=2, zero=1, microbatches=4))
    (stage,) = plan.stages
    assert stage.held.coming * 2 == stage.held.gradients > 0
    assert stage.held.gone == stage.held.gradients
    assert plan.prediction.peak_memory_bytes == (sum(stage.memory_bytes.values()),)
    assert stage.memory_bytes["gradients"] == stage.held.coming


@cache
def full_of_parameters() -> Session:
    """With parameters that are most of all, and logits of the whole batch that are as much."""
    example = models.gpt2(layers=2, hidden=256, vocab=4096, sequence=16, batch=64)
    return open_session(make_skeleton(example.model), (), example.batch)


SHARDED = [
    Manual(pp=2, dp=4, zero=1, microbatches=4),
    Manual(dp=4, zero=2, microbatches=8),
    Manual(dp=4, zero=1, microbatches=8),
    Manual(pp=2, dp=2, zero=1, microbatches=4, schedule="interleaved:2"),
    Manual(dp=4, zero=1),
    Manual(pp=2, dp=2, zero=1, microbatches=4, schedule="zb-h1"),
    Manual(dp=4, zero=1, microbatches=8, recompute="full"),
]


@pytest.mark.parametrize("wanted", few(1, SHARDED), ids=str)
def test_at_the_end_gradients_are_what_is_left_of_them(wanted: Manual) -> None:
    """Logits come when gradients of ZeRO-1 are shards, which have come in the last backward; that of the tied embedding comes in parts."""
    found = checked(full_of_parameters(), wanted)
    assert [use.ratio for use in found.memory] == pytest.approx([1] * wanted.pp, abs=0.05)


@pytest.mark.parametrize("wanted", few(1, TALKING), ids=str)
def test_whole_outputs_are_in_the_memory(wanted: Manual) -> None:
    """Every rank holds the logits of the whole batch: 16 MiB, beside their parts where they are joined, and what is gathered on the way."""
    whole, loss = (checked(talkative(outputs), wanted) for outputs in ("whole", "loss"))
    assert whole.findings == loss.findings == ()
    assert [use.ratio for use in whole.memory] == pytest.approx([1] * wanted.pp, abs=0.05)
    for with_logits, without in zip(whole.memory, loss.memory, strict=True):
        assert with_logits.predicted - without.predicted > 8 * 2**20


class Classifier(nn.Module):
    """Its loss reads what a product gives, which is larger than all else."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1024, bias=False))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.layers(x), labels)


def test_both_gradients_that_a_cross_entropy_makes_are_in_the_memory() -> None:
    """The first part of a backward has them as a whole backward has, where the product that makes the logits wants one for its weight."""
    session = open_session(make_skeleton(Classifier()), (torch.randn(1024, 64), torch.randint(1024, (1024,))), {})
    wanted = Manual(pp=2, microbatches=2, schedule="zb-h1")
    held, found = planned(session, wanted).stages[1].held, checked(session, wanted)
    assert held.inputs == held.later == pytest.approx(2 * 4 * 512 * 1024, rel=0.01)
    assert but_memory(found) == []
    assert found.memory[1].ratio == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize("outputs, is_noted", [("whole", True), ("loss", False)])
def test_a_note_tells_of_large_outputs(outputs: str, is_noted: bool) -> None:
    notes = [note for note in planned(talkative(outputs), Manual(dp=2, microbatches=4)).notes if "outputs" in note]
    assert len(notes) == is_noted
    assert not notes or "take up to 32.0 MiB" in notes[0]  # all parts, and what they are joined to


def changed(graph: fx.GraphModule, change: Callable[[fx.GraphModule], None]) -> fx.GraphModule:
    """A copy of a graph, changed."""
    copied = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in graph.graph.nodes:
        env[node] = copied.node_copy(node, env.__getitem__)
    made = fx.GraphModule(graph, copied)
    change(made)
    made.graph.lint()
    return made


def with_forward(programs: Programs, change: Callable[[fx.GraphModule], None], stage: int = 0) -> Programs:
    """The programs with another forward graph: of the step, or of a stage."""
    if programs.whole is not None:
        return replace(programs, whole=replace(programs.whole, forward=changed(programs.whole.forward, change)), observed={})
    assert programs.pipeline is not None
    program = programs.pipeline.stages[stage]
    program = replace(program, body=replace(program.body, forward=changed(program.body.forward, change)))
    return with_stage(programs, stage, program)


def with_stage(programs: Programs, stage: int, program: object) -> Programs:
    assert programs.pipeline is not None
    return replace(programs, pipeline=replace(programs.pipeline, stages={**programs.pipeline.stages, stage: program}), observed={})  # type: ignore[dict-item]


def with_schedule(programs: Programs, change: Callable[[list[Action]], None], rank: int) -> Programs:
    assert programs.pipeline is not None
    schedule = programs.pipeline.schedule
    row = list(schedule.ranks[rank])
    change(row)
    rows = tuple(tuple(row) if i == rank else own for i, own in enumerate(schedule.ranks))
    other = Schedule(schedule.name, schedule.degree, schedule.stages, schedule.microbatches, rows)
    return replace(programs, pipeline=replace(programs.pipeline, schedule=other))


def starts(graph: fx.GraphModule) -> list[fx.Node]:
    return [node for node in graph.graph.nodes if node.target in STARTS]


def other_reduction(graph: fx.GraphModule) -> None:
    node = next(node for node in starts(graph) if "sum" in node.args)
    node.args = tuple("max" if arg == "sum" else arg for arg in node.args)


def other_dtype(graph: fx.GraphModule) -> None:
    node = next(node for node in starts(graph) if node.all_input_nodes[0].meta["val"].dtype == torch.float32)
    with graph.graph.inserting_before(node):
        half = graph.graph.call_function(torch.ops.prims.convert_element_type.default, (node.args[0], torch.bfloat16))
    node.args = (half, *node.args[1:])


def other_order(graph: fx.GraphModule) -> None:
    """The second of two collectives that do not need each other goes before the first, with what it is made of."""
    order = {node: i for i, node in enumerate(graph.graph.nodes)}
    for first, second in pairwise(starts(graph)):
        needed, stack = set(), [second]
        while stack:
            node = stack.pop()
            if order[node] >= order[first] and node not in needed:
                needed.add(node)
                stack += node.all_input_nodes
        if first not in needed and first.all_input_nodes[0].meta["val"].shape != second.all_input_nodes[0].meta["val"].shape:
            for node in sorted(needed, key=order.__getitem__):
                first.prepend(node)
            return
    raise AssertionError("no two collectives can change places")


def one_less(graph: fx.GraphModule) -> None:
    node = starts(graph)[-1]
    (wait,) = node.users
    wait.replace_all_uses_with(node.all_input_nodes[0])
    graph.graph.erase_node(wait)
    graph.graph.erase_node(node)


@pytest.mark.parametrize(
    "change, words",
    [(other_reduction, ("(sum 2)", "(max 2)")), (other_dtype, ("float32[", "bfloat16["))],
)
def test_a_rank_with_another_collective_is_found(change: Callable[[fx.GraphModule], None], words: tuple[str, ...]) -> None:
    plan, programs = built("speaker", Manual(dp=2, tp=2, sequence_parallel=True))
    found = check(plan, programs, odd=with_forward(programs, change))
    disagreeing = [text for text in found.findings if text.startswith("the group of ranks")]
    assert any("[0, 1] on axis tp" in text for text in disagreeing)
    for word in words:
        assert word in disagreeing[0]


def test_a_rank_with_fewer_collectives_is_found() -> None:
    plan, programs = built("speaker", Manual(dp=2))
    found = check(plan, programs, odd=with_forward(programs, one_less))
    assert any("ranks [0, 1] on axis dp does not agree on its call" in text for text in found.findings), found


def test_collectives_in_another_order_are_found() -> None:
    plan, programs = built("speaker", Manual(dp=2, zero=3))
    odd = programs.whole
    assert odd is not None
    assert odd.backward is not None
    other = replace(programs, whole=replace(odd, backward=changed(odd.backward, other_order)), observed={})
    assert but_memory(check(plan, other)) == []  # all ranks alike
    found = check(plan, programs, odd=other)
    assert any("on axis dp does not agree on its call" in text for text in found.findings), found


def test_a_message_of_another_dtype_is_found() -> None:
    plan, programs = built("speaker", Manual(pp=2, microbatches=4))
    assert programs.pipeline is not None
    second = programs.pipeline.stages[1]
    wire = replace(second.received[0], dtype=torch.bfloat16)
    found = check(plan, with_stage(programs, 1, replace(second, received=(wire, *second.received[1:]))))
    assert any("message 0 from rank 0 to rank 1" in text and "bfloat16" in text for text in found.findings), found
    assert any("but gets bfloat16" in text for text in found.findings)


def test_a_missing_receive_is_found() -> None:
    plan, programs = built("speaker", Manual(pp=2, microbatches=4))
    found = check(plan, with_schedule(programs, lambda row: row.remove(Action(1, Kind.RECV_F, 2)), 1))
    assert any("1RECV_F2" in text and "is missing on rank 1" in text for text in found.findings), found


def test_receives_in_another_order_are_found() -> None:
    def swap(row: list[Action]) -> None:
        first, second = (row.index(Action(1, Kind.RECV_F, k)) for k in (0, 1))
        row[first], row[second] = row[second], row[first]

    plan, programs = built("speaker", Manual(pp=2, microbatches=4))
    found = check(plan, with_schedule(programs, swap, 1))
    assert any("messages have no tags" in text or "stands before" in text for text in found.findings), found


def test_a_rank_with_another_row_is_found() -> None:
    """The rows of each rank's own table are right; they do not fit each other."""
    plan, programs = built("speaker", Manual(pp=2, microbatches=4))
    assert programs.pipeline is not None
    fewer = built("speaker", Manual(pp=2, microbatches=2))[1].pipeline
    assert fewer is not None
    odd = replace(programs, pipeline=replace(programs.pipeline, schedule=fewer.schedule))
    found = check(plan, programs, odd=odd)
    assert any("from rank 0 to rank 1: send" in text and "has no receive" in text for text in found.findings), found
    assert any("wait for each other forever" in text for text in found.findings)


def test_a_wrong_local_shape_is_found() -> None:
    def half(graph: fx.GraphModule) -> None:
        node = next(node for node in graph.graph.nodes if node.target is aten.mm.default)
        with graph.graph.inserting_before(node):
            part = graph.graph.call_function(aten.slice.Tensor, (node.args[0], 0, 0, 1))
        node.args = (part, *node.args[1:])

    plan, programs = built("speaker", Manual(tp=2))
    found = check(plan, with_forward(programs, half))
    assert any("was traced" in text for text in found.findings), found


def test_a_layout_that_the_graph_has_not_is_found() -> None:
    session, wanted = opened("speaker"), Manual(tp=2)
    plan, _ = built("speaker", wanted)
    at = next(i for i, op in enumerate(plan.ops) if op.op == "aten.tanh")
    ops = list(plan.ops)
    ops[at] = replace(ops[at], layout=("R", "R"))
    _, findings = build(session, replace(plan, ops=tuple(ops)))
    assert findings == ["op tanh has local shape (8, 32, 128), where the plan says (8, 32, 256)"]


def test_a_wrong_size_of_a_parameter_is_found() -> None:
    plan, _ = built("speaker", Manual(dp=2, zero=1))
    entry = plan.parameters[0]
    wrong = replace(entry, local_shape=(entry.local_shape[0] // 2, *entry.local_shape[1:]))
    other = replace(plan, parameters=(wrong, *plan.parameters[1:]))
    programs, findings = build(opened("speaker"), other)
    assert any(f"parameter {entry.name} has local shape" in text for text in findings)
    assert any(f"the gradient of {entry.name} is" in text for text in check(other, programs).findings)


def test_memory_that_is_not_predicted_is_found() -> None:
    plan, programs = built("speaker", Manual(dp=2, microbatches=4))
    less = replace(plan, prediction=replace(plan.prediction, peak_memory_bytes=(1000,)))
    assert any("memory is not within 5.0%" in text for text in check(less, programs).findings)


BY_BLOCK = Manual(pp=4, microbatches=2, stages=tuple(f"blocks.{i}" for i in (1, 2, 3)))


def test_equal_stages_share_their_graphs() -> None:
    _, programs = built("speaker", BY_BLOCK, layers=4)
    assert programs.pipeline is not None
    bodies = [program.body for program in programs.pipeline.stages.values()]
    assert bodies[1] is bodies[2]
    assert len({id(body) for body in bodies}) == 3


def test_dropout_does_not_tell_stages_apart() -> None:
    example = models.speaker(layers=4, dropout=0.1)
    session = open_session(make_skeleton(example.model), (), example.batch)
    programs, findings = build(session, planned(session, BY_BLOCK))
    assert not findings
    assert programs.pipeline is not None
    stages = programs.pipeline.stages
    assert stages[1].body is stages[2].body


def test_a_frozen_parameter_of_two_stages_has_no_gradient_to_share() -> None:
    example = models.speaker(layers=2)
    example.model.get_parameter("embed.weight").requires_grad_(False)
    session = open_session(make_skeleton(example.model), (), example.batch)
    plan = planned(session, Manual(pp=2, microbatches=2))
    assert plan.parameter("embed.weight").stages == (0, 1)
    programs, findings = build(session, plan)
    assert not findings
    assert but_memory(check(plan, programs)) == []


ROWS = [Manual(dp=4), Manual(dp=4, zero=3, microbatches=2), Manual(pp=2, dp=2, zero=3, microbatches=2)]


@pytest.mark.parametrize("config", ROWS, ids=str)
def test_rows_of_vectors_are_in_the_memory(config: Manual) -> None:
    """Of a model of vectors alone, which all lie in one row under ZeRO-3, and in none where they are whole."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.LayerNorm(512) for _ in range(24)))
    x, profile = torch.empty(8, 512, device="meta"), Cluster(1, 4, "a100-80gb").with_mesh(config.grid(4)).profile
    plan = autopar.plan(model, 4, (x,), plan=config, profile=profile, loss_fn=torch.sum)
    assert autopar.check(model, plan, (x,), loss_fn=torch.sum).findings == ()


def test_the_public_function() -> None:
    model, batch = models.speaker(layers=2, device="meta")
    plan = autopar.plan(model, "2x2", batch, plan=Manual(dp=2, tp=2, zero=1))
    found = autopar.check(model, plan, batch, ranks=[3])
    assert found.ranks == (3,)
    assert but_memory(found) == []
    assert "rank 3: 1 program," in str(found)


WRONG_RANKS = [
    ([0, 4], "there is no rank 4: .*ranks 0 to 3"),
    ([-1], "there is no rank -1: .*ranks 0 to 3"),
    ([], "no ranks are given: .*ranks 0 to 3"),
    (4, "there is no rank 4: .*ranks 0 to 3"),
    ("01", r"ranks are whole numbers, as \[0, 3\], got '01'"),
]


@pytest.mark.parametrize("given, words", WRONG_RANKS)
def test_wrong_ranks(given: object, words: str) -> None:
    model, batch = models.speaker(layers=2, device="meta")
    plan = autopar.plan(model, "2x2", batch, plan=Manual(dp=2, tp=2))
    with pytest.raises(PlanError, match=words):
        autopar.check(model, plan, batch, ranks=given)  # type: ignore[arg-type]


def test_a_plan_of_another_model() -> None:
    model, batch = models.speaker(layers=2, device="meta")
    plan = autopar.plan(model, 2, batch, plan=Manual(dp=2))
    other, _ = models.speaker(layers=1, device="meta")
    with pytest.raises(PlanError, match="made for another graph"):
        autopar.check(other, plan, batch)
    with pytest.raises(PlanError, match="a plan is wanted"):
        autopar.check(model, Manual(dp=2), batch)  # type: ignore[arg-type]


class Shared(nn.Module):
    """A weight of two stages, of which the second does not differentiate it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.both = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).tanh()
        x = self.last(x + self.both(x))
        loss: torch.Tensor = (x + self.both(x).detach()).square().mean()
        return loss


def test_a_stage_that_does_not_differentiate_what_it_shares_takes_part() -> None:
    model, batch = Shared(), (torch.ones(8, 8),)
    plan = autopar.plan(model, 2, batch, plan=Manual(pp=2, microbatches=2, stages=("last",)))
    assert plan.parameter("both.weight").stages == (0, 1)
    found = autopar.check(model, plan, batch)
    assert but_memory(found) == []


@pytest.mark.parametrize("wanted", [Manual(dp=2, microbatches=2), Manual(dp=2, zero=3)], ids=str)
def test_a_frozen_model_needs_no_loss(wanted: Manual) -> None:
    model, batch = nn.Linear(64, 64).requires_grad_(False), (torch.randn(16, 64),)
    plan = autopar.plan(model, Cluster(1, 2, "h100"), batch, plan=wanted)
    assert autopar.check(model, plan, batch).num_graphs == 1
    assert all(t.kind != "reduce_scatter" for position in autopar.count(model, plan, batch).positions for t in position.traffic)
