from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from autopar.mesh import Mesh
from autopar.plan import Pipeline, Plan
from autopar.show.text import factors_text, plan_text, symbol_words
from autopar.units import seconds_text
from tests.show.plans import STAGE, small_plan


def test_the_page(golden: Callable[[str, str], None]) -> None:
    golden("show/plan_text", plan_text(small_plan()))


def test_a_step_that_waits_for_its_hosts() -> None:
    plan = small_plan()
    slow = replace(plan.prediction, dispatch_s=plan.prediction.step_time_s)
    assert "devices wait for their hosts" not in plan_text(plan)
    assert f"devices wait for their hosts, which take {seconds_text(slow.dispatch_s)}" in plan_text(replace(plan, prediction=slow), 200)


def test_the_page_survives_json() -> None:
    plan = small_plan()
    assert plan_text(Plan.from_json(plan.to_json())) == plan_text(plan)


@pytest.mark.parametrize("width", [80, 100, 140])
def test_no_line_is_wider_than_asked(width: int) -> None:
    plan = small_plan()
    long = tuple(replace(p, name="a_rather_long_root_name.transformer.decoder." + p.name) for p in plan.parameters)
    plan = replace(plan, parameters=long, notes=("a long note " * 20,), config="dp=2, tp=4, zero=1, " * 8)
    assert max(map(len, plan_text(plan, width).splitlines())) <= width


def test_nothing_is_lost_in_long_names() -> None:
    name = "module_with_a_long_name." * 6 + "weight"
    plan = small_plan(1)
    plan = replace(plan, parameters=(replace(plan.parameters[0], name=name, aliases=()),))
    assert name in "".join(line.split()[0] for line in plan_text(plan).splitlines() if "module" in line or "weight" in line)


def test_equal_blocks_are_one_row() -> None:
    lines = plan_text(small_plan(12)).splitlines()
    (row,) = [line for line in lines if "c_attn.weight" in line and "768 x (3)(12)(64)" in line]
    assert "h.{0..11}.attn.c_attn.weight" in row
    assert "x12" in row
    assert "S1.1" in row


def test_the_page_does_not_grow_with_depth() -> None:
    def length(blocks: int) -> int:
        plan = replace(small_plan(blocks), collectives=())
        return len(plan_text(plan).splitlines())

    assert length(3) == length(96)


def test_a_block_that_differs_has_its_own_row() -> None:
    plan = small_plan(4)
    rows = list(plan.parameters)
    rows[3] = replace(rows[3], held=("R", "S1.1"), local_shape=(768, 576))
    page = plan_text(replace(plan, parameters=tuple(rows)))
    assert "h.{0,2,3}.attn.c_attn.weight" in page
    assert "h.1.attn.c_attn.weight" in page


def test_the_slowest_collectives_come_first_and_the_rest_is_summed() -> None:
    page = plan_text(small_plan(20))
    table = page[page.index("collective  ") :].splitlines()
    assert "h.{0..19}.attn.c_attn.weight" in table[2]
    assert any(line.startswith("others") and "11 more rows" in line for line in table)
    assert any(line.startswith("axis tp: 21 collectives") for line in table)


def test_a_plan_without_communication() -> None:
    plan = replace(small_plan(), mesh=Mesh.parse("dp=1,tp=1"), collectives=(), config="Manual(dp=1)")
    page = plan_text(plan)
    assert "no communication" in page
    assert "Manual(dp=1)" in page.splitlines()[0]


def test_the_page_is_plain_ascii() -> None:
    page = plan_text(small_plan())
    assert page.isascii()
    assert "\x1b" not in page


def test_square_brackets_are_text() -> None:
    assert "int64[16, 256]" in plan_text(small_plan())


@pytest.mark.parametrize(
    "factors, text", [(((768,), (3, 12, 64)), "768 x (3)(12)(64)"), ((), "scalar"), (((8, 4),), "(8)(4)")]
)
def test_factors(factors: tuple[tuple[int, ...], ...], text: str) -> None:
    assert factors_text(factors) == text


@pytest.mark.parametrize("symbol, words", [("S1.1", "sharded on factor 1 of dim 1"), ("S0", "sharded on dim 0"), ("R", "replicated")])
def test_symbols_in_words(symbol: str, words: str) -> None:
    assert symbol_words(symbol) == words


def test_equal_stages_are_one_row_and_the_table_of_memory_is_of_the_fullest_rank() -> None:
    lean = replace(STAGE, memory_bytes={"parameters": 1 * 2**20, "gradients": 0, "activations": 2 * 2**20})
    full = replace(lean, memory_bytes={"parameters": 3 * 2**20, "gradients": 0, "activations": 2 * 2**20})
    plan = small_plan()
    prediction = replace(plan.prediction, peak_memory_bytes=(3 * 2**20, 10 * 2**20), memory_bytes=lean.memory_bytes)
    pipeline = replace(plan.pipeline, stages=6, microbatches=2)
    page = plan_text(replace(plan, stages=(lean, full) * 2 + (lean, lean), pipeline=pipeline, prediction=prediction))
    assert [line.split()[0] for line in page.splitlines() if line.startswith(("0 ", "1 ", "4.."))] == ["0", "1", "4..5"]
    rows = dict(line.split()[:2] for line in page.split("memory of the fullest rank")[1].splitlines()[2:6] if line[0] != "-")
    assert rows == {"parameters": "7", "gradients": "0", "activations": "3"}
    assert sum(map(int, rows.values())) == 10


def test_stages_send_activations_forward_and_gradients_backward() -> None:
    small = small_plan(1)
    stages = [replace(STAGE, begins=begins, send_forward_s=f, send_backward_s=b) for begins, f, b in (("a", 2e-3, 0), ("b", 0, 5e-3))]
    between = replace(STAGE, begins="middle", send_forward_s=2e-3, send_backward_s=5e-3)
    page = plan_text(replace(small, pipeline=Pipeline(3, 3, 2), stages=(stages[0], between, stages[1]), links=()))
    rows = [line.split() for line in page.partition("stage  begins")[2].splitlines()[2:5]]
    assert [(row[1], " ".join(row[7:9])) for row in rows] == [("a", "2 ms"), ("middle", "7 ms"), ("b", "5 ms")]


def test_a_collective_of_every_micro_batch_is_told_of_all_blocks() -> None:
    plan = small_plan(4)
    often = tuple(replace(c, count=8 * c.count) for c in plan.collectives)
    assert "h.{0..3}.attn.c_attn.weight" in plan_text(replace(plan, collectives=often)).split("collective  ")[1]


def test_samples_are_not_called_tokens() -> None:
    plan = small_plan()
    page = plan_text(replace(plan, prediction=replace(plan.prediction, unit="samples")))
    assert "162 k samples/s" in page
    assert "tokens/s" not in page


def test_the_precision_of_the_prices_is_told() -> None:
    def told(precision: str, *dtypes: str) -> list[str]:
        plan = replace(small_plan(1), precision=precision, dtypes=dtypes)
        return [line for line in plan_text(plan).splitlines() if line.startswith("  computes in")]

    assert told("", "float32") == ["  computes in float32, as the model does by itself; precision='bf16' would compute in bf16"]
    assert told("", "bfloat16") == ["  computes in bfloat16, as the model does by itself"]
    assert told("bf16", "bfloat16") == ["  computes in bf16, gradients are summed over ranks in the dtype of the parameters"]


def test_one_is_not_many() -> None:
    plan = replace(small_plan(1), links=(), pipeline=Pipeline(2, 2, 1), stages=small_plan(1).stages * 2)
    one = replace(plan.parameters[0], shape=(1,))
    page = plan_text(replace(plan, parameters=(one,)))
    assert "2 stages on axis pp, 1 micro-batch, 1f1b" in page
    assert "1 parameter  " in page
    assert "2 micro-batches" in plan_text(replace(plan, pipeline=Pipeline(2, 2, 2)))
    assert "2 averaged micro-batches" in plan_text(replace(plan, pipeline=Pipeline(2, 2, 2, is_average=True)))
