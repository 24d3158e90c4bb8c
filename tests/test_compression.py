"""Compression of gradients: what can be asked for, what it sends and keeps, what it costs, and that its ops lose nothing on the way."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence

import pytest
import torch

import autopar
from autopar import Compression, Manual
from autopar.compression import BLOCK, KINDS, MIN_NUM_ELEMENTS, SUGGESTED, packed_bytes
from autopar.cost.machine import LinkProfile, MachineProfile
from autopar.cost.pricing import Pricer
from autopar.dry.count import Traffic
from autopar.errors import PlanError
from autopar.layout import REPLICATED, REPLICATED_PARTIAL_GRAD
from autopar.mesh import Mesh
from autopar.ops.codec import States, orthonormal, use_states
from autopar.plan import CollectivePlan
from autopar.planner.payoff import payoff_text
from autopar.rules.registry import TensorSpec
from autopar.solve.decide import PLAN_GAP
from autopar.storage import Held, Stored
from tests import models
from tests.cost.test_pricing import DEVICE
from tests.marks import only

pytestmark = pytest.mark.slow

ops = torch.ops.autopar


@pytest.mark.parametrize("text", [*SUGGESTED, "topk:0.5", "powersgd:1", "powersgd:4 after 100", "int8 after 7"])
def test_text_reads_back(text: str) -> None:
    how = Compression.of(text)
    assert str(how) == text
    assert Compression.of(how) is how


def test_nothing_is_no_compression() -> None:
    assert Compression.of(None) is None
    assert Compression.of("") is None


@pytest.mark.parametrize(
    "text",
    [
        *("int4", "topk", "topk:", "topk:2", "topk:0", "topk:x", "topk:nan", "powersgd", "powersgd:0", "powersgd:1.5", "bf16:2"),
        *("int8 after", "int8 after ", "int8 after x", "int8 after -1"),
    ],
)
def test_what_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match="compress"):
        Compression.of(text)


@pytest.mark.parametrize("given", [3, True, [], ["int8"]], ids=str)
def test_what_is_no_text_is_refused(given: object) -> None:
    with pytest.raises(PlanError, match=re.escape(f"a Compression or None; got {given!r}")):
        Compression.of(given)  # type: ignore[arg-type]


def reduction(text: str, shape: tuple[int, ...], size: int = 4, *, is_scattered: bool = False) -> autopar.compression.Reduction | None:
    how = Compression.of(text)
    assert how is not None
    return how.reduction(shape, 4, size, is_scattered=is_scattered)


@pytest.mark.parametrize(
    "text, messages",
    [
        ("bf16", [("all_reduce", 2 * 2**20)]),
        ("fp16", [("all_reduce", 2 * 2**20)]),
        ("int8", [("all_to_all", 2**20 // 256 * 260), ("all_gather", 2**20 // 256 * 260)]),
        ("topk:0.01", [("all_gather", 4 * 10486 * 8)]),
        ("powersgd:4", [("all_reduce", 4 * 4 * 512), ("all_reduce", 4 * 4 * 2048)]),
    ],
)
def test_messages(text: str, messages: list[tuple[str, int]]) -> None:
    found = reduction(text, (512, 2048))
    assert found is not None
    assert [(m.kind, m.num_bytes) for m in found.messages] == messages


def test_with_zero_casts_and_int8_scatter() -> None:
    for text, kind in (("bf16", "reduce_scatter"), ("int8", "all_to_all"), ("topk:0.01", "all_gather")):
        found = reduction(text, (512, 2048), is_scattered=True)
        assert found is not None
        assert [m.kind for m in found.messages] == [kind]


@pytest.mark.parametrize("text", SUGGESTED)
def test_what_is_small_or_would_not_shrink_stays_exact(text: str) -> None:
    assert reduction(text, (2**20,)) is None, "one dim"
    assert reduction(text, (1, MIN_NUM_ELEMENTS - 1)) is None
    assert reduction(text, (512, 2048), size=1) is None
    assert reduction(text, (512, 2048)) is not None


def test_sparse_and_low_rank_must_be_worth_it() -> None:
    assert reduction("topk:0.01", (512, 2048), size=64) is not None
    assert reduction("topk:0.01", (512, 2048), size=128) is None, "all ranks get what all others send"
    assert reduction("powersgd:4", (2**16, 4)) is None
    how = Compression.of("bf16")
    assert how is not None
    assert how.reduction((512, 2048), 2, 4, is_scattered=False) is None, "gradients that travel in 16 bits already"


@pytest.mark.parametrize("parts", [1, 3, 4])
@pytest.mark.parametrize("count", [1, 255, 256, 1000])
def test_int8_is_within_half_a_step(parts: int, count: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(parts, count) * torch.logspace(-6, 3, parts).view(-1, 1)
    packed = ops.quantize(x, parts)
    assert packed.numel() == parts * packed_bytes(count)
    back = ops.dequantize(packed, parts, x.shape, torch.float32)
    for row, own in zip(x, back, strict=True):
        for block, coded in zip(row.split(BLOCK), own.split(BLOCK), strict=True):
            assert float((block - coded).abs().max()) <= float(block.abs().max()) / 254 * 1.001
    torch.testing.assert_close(ops.sum_quantized(packed, parts, count, torch.float32), back.sum(0))


def exchange(kind: str, grads: list[torch.Tensor], states: list[States]) -> list[torch.Tensor]:
    """What `compressed.all_reduce` does, with the collectives written out, for the kinds that keep something."""
    sent = []
    for grad, state in zip(grads, states, strict=True):
        use_states(state, state.scale)
        sent.append(ops.take_largest(grad, 40, "w") if kind == "topk" else ops.project(grad, 2, "w"))
    found = []
    if kind == "topk":
        gathered = torch.cat([packed for packed, _ in sent])
        for (packed, whole), grad, state in zip(sent, grads, states, strict=True):
            use_states(state, state.scale)
            found.append(ops.put_largest(gathered, packed, whole, grad.shape, grad.dtype, "w"))
        return found
    projected = torch.stack([own for _, own in sent]).sum(0)
    backs = []
    for (matrix, _), grad, state in zip(sent, grads, states, strict=True):
        use_states(state, state.scale)
        backs.append(ops.project_back(matrix, projected, grad.shape, "w"))
    summed = torch.stack([back for _, back in backs]).sum(0)
    for (basis, _), grad, state in zip(backs, grads, states, strict=True):
        use_states(state, state.scale)
        found.append(ops.expand(basis, summed, grad.shape, grad.dtype, "w"))
    return found


def unsent(states: list[States]) -> torch.Tensor:
    errors = [value for state in states for name, value in state.held.items() if name.endswith("error")]
    return torch.stack(errors).sum(0) if errors else torch.zeros(16, 50)


@pytest.mark.parametrize("kind", ["topk", "powersgd"])
def test_what_was_sent_and_what_is_kept_is_all_there_was(kind: str) -> None:
    torch.manual_seed(0)
    states, given, sent = [States() for _ in range(3)], torch.zeros(16, 50), torch.zeros(16, 50)
    for _ in range(5):
        grads = [torch.randn(16, 50) for _ in states]
        results = exchange(kind, grads, states)
        assert all(torch.equal(result, results[0]) for result in results)
        given, sent = given + sum(grads), sent + results[0]
        torch.testing.assert_close(sent + unsent(states), given, atol=1e-4, rtol=0.0)
    assert float(unsent(states).abs().max()) > 0.1


@pytest.mark.parametrize("kind", ["topk", "powersgd"])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_on_one_rank_is_so_on_all_and_leaves_states_alone(kind: str, bad: float) -> None:
    torch.manual_seed(0)
    states = [States() for _ in range(3)]
    exchange(kind, [torch.randn(16, 50) for _ in states], states)
    before = [{name: value.clone() for name, value in state.held.items()} for state in states]
    grads = [torch.randn(16, 50) for _ in states]
    grads[1][3, 4] = bad
    for result in exchange(kind, grads, states):
        assert not bool(result.isfinite().all())
    for state, kept in zip(states, before, strict=True):
        assert all(torch.equal(value, kept[name]) for name, value in state.held.items())


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_stays_so_in_int8_and_casts(bad: float) -> None:
    x = torch.randn(4, 300)
    x[2, 7] = bad
    assert not bool(ops.dequantize(ops.quantize(x, 4), 4, x.shape, torch.float32)[2].isfinite().all())
    assert not bool(ops.widen(ops.narrow(x, torch.float16, 0.25), torch.float32, 4.0).isfinite().all())


def test_what_is_kept_is_without_the_scale_of_losses() -> None:
    torch.manual_seed(0)
    plain, scaled = [States()], [States()]
    for scale in (1024.0, 512.0, 2048.0):
        grad = torch.randn(16, 50)
        scaled[0].scale = scale
        (expected,), (found,) = exchange("topk", [grad], plain), exchange("topk", [grad * scale], scaled)
        assert torch.equal(found, expected * scale)


def test_a_matrix_of_low_rank_goes_through_powersgd_whole() -> None:
    torch.manual_seed(0)
    states = [States() for _ in range(2)]
    left, right = torch.randn(16, 2), torch.randn(2, 50)
    found = exchange("powersgd", [left @ right, 2 * left @ right], states)[0]
    torch.testing.assert_close(found, 3 * left @ right, atol=1e-4, rtol=1e-4)


def test_a_gradient_of_zeros_does_not_end_powersgd() -> None:
    torch.manual_seed(0)
    states = [States()]
    assert not bool(exchange("powersgd", [torch.zeros(16, 50)], states)[0].any())
    left, right = torch.randn(16, 1), torch.randn(1, 50)
    torch.testing.assert_close(exchange("powersgd", [left @ right], states)[0], left @ right, atol=1e-4, rtol=1e-4)


def test_dependent_columns_are_left_out() -> None:
    columns = torch.randn(20, 2)
    basis = orthonormal(torch.cat((columns, columns.sum(1, keepdim=True)), 1))
    torch.testing.assert_close(basis.t() @ basis, torch.diag(torch.tensor([1.0, 1.0, 0.0])), atol=1e-5, rtol=0.0)


def pricer(text: str) -> Pricer:
    return Pricer(MachineProfile(DEVICE, (LinkProfile(alpha_s=0.0, bandwidth=1e9),)), Mesh.of(4), compression=Compression.of(text))


def reduce_s(text: str, held: Held = REPLICATED) -> float:
    spec = TensorSpec((1000, 1024), requires_grad=True)
    price = pricer(text).parameter_edge(held, REPLICATED_PARTIAL_GRAD, spec.num_bytes, 0, needs_grad=True, shape=spec.shape)
    assert price is not None
    return price.blocking_s + price.backward_s


def test_reductions_are_priced_by_what_travels() -> None:
    exact = 4 * 1000 * 1024 * 1.5 / 1e9
    assert reduce_s("") == pytest.approx(exact)
    assert reduce_s("bf16") == pytest.approx(exact / 2)
    assert reduce_s("int8") == pytest.approx(exact * 260 / 1024)
    assert reduce_s("topk:0.01") == pytest.approx(4 * 10240 * 8 * 0.75 / 1e9)
    assert reduce_s("bf16", Stored(2)) == pytest.approx(exact / 4)
    assert reduce_s("powersgd:4") < exact / 50


def test_coding_and_what_is_kept_are_priced() -> None:
    spec = TensorSpec((1000, 1024), requires_grad=True)
    plain, coded = pricer(""), pricer("topk:0.01")
    assert coded.update_time_s(spec, (REPLICATED,)) > plain.update_time_s(spec, (REPLICATED,))
    assert coded.parameter_bytes(spec, (Stored(3),)).optimizer - plain.parameter_bytes(spec, (Stored(3),)).optimizer == 4 * spec.numel
    assert pricer("int8").parameter_bytes(spec, (REPLICATED,)) == plain.parameter_bytes(spec, (REPLICATED,))


def test_kinds_are_all_suggested() -> None:
    assert {text.partition(":")[0] for text in SUGGESTED} == set(KINDS)


SLOW = LinkProfile(alpha_s=1e-6, bandwidth=1e7, overlap=0.0)
FAST = LinkProfile(alpha_s=1e-6, bandwidth=1e12, overlap=0.0)
CONFIGS = {
    "dp4": Manual(dp=4),
    "zero1": Manual(dp=4, zero=1),
    "dp2_tp2": Manual(dp=2, tp=2),
    "zero3_tp2_in_parts": Manual(dp=2, tp=2, zero=3, microbatches=2),
}


def made(wanted: Manual, compress: str | None, link: LinkProfile = SLOW) -> tuple[models.Example, autopar.Plan]:
    example = models.gpt2(layers=1, hidden=64, vocab=128, batch=8, sequence=8)
    profile = MachineProfile(DEVICE, (link,) * len(wanted.grid(4).sizes))
    return example, autopar.plan(example.model, 4, example.batch, plan=wanted, profile=profile, compress=compress)


def by_kind(rows: Sequence[CollectivePlan] | Sequence[Traffic]) -> Counter[str]:
    found: Counter[str] = Counter()
    for row in rows:
        found[row.kind] += row.num_bytes * (row.count if isinstance(row, CollectivePlan) else 1)
    return found


@pytest.mark.parametrize("config", only(["zero1"], CONFIGS))
@pytest.mark.parametrize("text", only(["topk:0.05", "int8"], ["topk:0.05", "int8", "powersgd:4", "bf16"]))
def test_the_graphs_send_what_the_plan_says(config: str, text: str) -> None:
    """The table of the plan is worked out from shapes, `count` counts in the graphs: compression changes both alike."""
    told, found = [], []
    for compress in (text, None):
        example, plan = made(CONFIGS[config], compress)
        (rank,) = autopar.count(example.model, plan, example.batch).positions
        told.append(by_kind(plan.collectives))
        found.append(by_kind(rank.traffic))
    for counts in (told, found):
        counts[0].subtract(counts[1])
    assert {k: n for k, n in found[0].items() if n} == {k: n for k, n in told[0].items() if n}
    assert any(told[0].values())


def test_a_plan_says_what_travels_and_reads_back() -> None:
    _, plan = made(CONFIGS["dp4"], "int8")
    assert plan.compression == "int8"
    assert "gradients travel in int8" in str(plan)
    assert any("reductions of gradients travel compressed (int8)" in note for note in plan.notes)
    assert autopar.Plan.from_json(plan.to_json()).compression == "int8"


def test_a_plan_is_bound_to_its_compression() -> None:
    example, plan = made(CONFIGS["dp4"], "int8")
    again = autopar.plan(example.model, 4, example.batch, plan=plan)
    assert again.compression == "int8"
    with pytest.raises(PlanError, match="made for compress='int8'"):
        autopar.plan(example.model, 4, example.batch, plan=plan, compress="bf16")


def test_with_changes_and_takes_away() -> None:
    _, plan = made(CONFIGS["dp4"], None)
    coded = plan.with_(compress="powersgd:2")
    assert coded.compression == "powersgd:2"
    assert coded.with_(memory_limit="1GiB").compression == "powersgd:2"
    assert coded.with_(compress="").compression == ""
    assert coded.prediction.step_time_s < plan.prediction.step_time_s


def test_what_would_pay_depends_on_the_link() -> None:
    _, plan = made(CONFIGS["dp4"], None)
    rows = plan.compressions()
    assert [row.step_time_s for row in rows] == sorted(row.step_time_s for row in rows)
    assert {row.compress for row in rows} == {"", *SUGGESTED}
    assert {row.compress for row in rows if row.pays} >= {"bf16", "int8", "powersgd:4"}
    exact = next(row for row in rows if not row.compress)
    assert exact.step_time_s == pytest.approx(plan.prediction.step_time_s)
    for row in rows:
        if row.compress:
            again = plan.with_(compress=row.compress).prediction.step_time_s  # which may choose otherwise
            assert again <= row.step_time_s * (1 + PLAN_GAP)
            assert again == pytest.approx(row.step_time_s, rel=0.1)
            assert row.sent_bytes < exact.sent_bytes
    _, plan = made(CONFIGS["dp4"], None, FAST)
    assert not any(row.pays for row in plan.compressions())
    assert payoff_text(plan.compressions(), 100).endswith("none would pay")


def test_a_loaded_plan_does_not_know_what_would_pay() -> None:
    _, plan = made(CONFIGS["dp4"], None)
    with pytest.raises(PlanError, match="bind it"):
        autopar.Plan.from_json(plan.to_json()).compressions()


def test_verify_holds_the_plan_without_its_compression_against_the_model() -> None:
    example, plan = made(CONFIGS["dp4"], "topk:0.05")
    found = autopar.verify(example.model, 4, example.batch, plan)
    assert found.grad_error <= 4 * found.reference_error + 1e-7
