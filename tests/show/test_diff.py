from __future__ import annotations

from dataclasses import replace

from autopar.show.diff import diff_text
from tests.show.plans import small_plan


def test_equal_plans() -> None:
    text = diff_text(small_plan(), small_plan())
    for kind in ("parameter", "op", "collective"):
        assert f"no {kind} differs" in text


def test_rates_of_other_units_do_not_stand_beside_each_other() -> None:
    old = small_plan(4)
    new = replace(old, prediction=replace(old.prediction, unit="rows"))
    assert f"{old.prediction.unit}/s" in diff_text(old, old)
    assert "/s " not in diff_text(old, new)


def test_what_differs_is_told_with_what_it_costs() -> None:
    old = small_plan(4)
    parameters = tuple(replace(p, held=("R", "R"), num_bytes=8 * p.num_bytes) if "c_attn" in p.name else p for p in old.parameters)
    ops = tuple(replace(op, choices=("b", "R"), recompute="full") if op.name == "mm_2" else op for op in old.ops)
    faster = replace(old.prediction, step_time_s=old.prediction.step_time_s / 2)
    gone = tuple(c for c in old.collectives if c.kind != "reduce_scatter")
    new = replace(old, parameters=parameters, ops=ops, prediction=faster, collectives=gone, precision="bf16")
    lines = diff_text(old, new).splitlines()

    def line(start: str) -> str:
        (found,) = [line for line in lines if line.startswith(start)]
        return " ".join(found.split())

    assert line("precision") == "precision: none, now bf16"
    assert line("step").endswith("0.500")
    assert line("h.{0..3}.attn.c_attn.weight") == "h.{0..3}.attn.c_attn.weight x4 [Z3 S1.1] 864 KiB [R R] 6.75 MiB"
    assert line("h.2.attn.c_attn.mm") == "h.2.attn.c_attn.mm [b n.1] [b R] again: full"
    assert line("reduce_scatter") == "reduce_scatter tp 1 0 12 MiB 0 B 400 us 0 s"
    assert not [line for line in lines if line.startswith("h.{0..3}.ln")]


def test_lines_fit() -> None:
    old = small_plan()
    new = replace(old, ops=tuple(replace(op, stage=1) for op in old.ops), config="Manual(dp=2, tp=4, zero=1)")
    assert max(map(len, diff_text(old, new, 80).splitlines())) <= 80
