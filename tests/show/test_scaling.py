"""The table, the figures and the picture of a scaling, from plans made up by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from autopar.cost.batch_size import BatchSize
from autopar.errors import PlanError
from autopar.plan import Plan
from autopar.planner import document
from autopar.show import files
from autopar.show.scaling import Scaling, ScalingRow
from autopar.sweep import Sweep
from tests.marks import few
from tests.show.plans import small_plan


def plan(step_time_s: float) -> Plan:
    """Of batches of a million tokens."""
    made = small_plan()
    return replace(made, prediction=replace(made.prediction, step_time_s=step_time_s, tokens_per_s=1e6 / step_time_s))


def scaling(*, tokens: float | None = 3.6e9, price: float | None = 2.5) -> Scaling:
    batch = BatchSize(1e6, 2e6)
    rows = (
        ScalingRow(1, 8, 32, None, "needs 93 GiB\nand more", budget_tokens=tokens, price_per_gpu_hour=price),
        ScalingRow(2, 16, 32, plan(1.0), "", 1.0, tokens, price, batch, 1.0),
        ScalingRow(4, 32, 32, plan(0.625), "", 0.8, tokens, price, batch, 1.0),
    )
    return Scaling("Mlp", "8 h100", rows)


def test_gpu_hours_by_hand() -> None:
    """3.6 G tokens are 3,600 steps: an hour of 16 devices at one second each."""
    _, row, larger = scaling().rows
    assert row.gpu_hours == pytest.approx(16)
    assert row.days == pytest.approx(1 / 24)
    assert row.cost == pytest.approx(40)
    assert larger.gpu_hours == pytest.approx(0.625 * 32)
    assert larger.gpu_hours_of(7.2e9) == pytest.approx(2 * 0.625 * 32)
    assert row.tokens_per_step == pytest.approx(1e6)
    assert row.tokens_per_s_per_gpu == pytest.approx(1e6 / 16)


def test_table() -> None:
    text = str(scaling())
    header, _, missing, base, *_ = text.splitlines()[2:]
    assert " ".join(header.split()) == "nodes ranks rows step tokens/s per GPU MFU efficiency peak GPU-hours days cost"
    assert missing.split() == ["1", "8", "32", *["-"] * 9]
    assert base.split()[:4] == ["2", "16", "32", "1"]
    assert "no plan for 1 node: needs 93 GiB\n" in text
    assert text.count("a batch of 1 M tokens is 0.5 critical batches: 1.5 times the least data and 3 times the least steps") == 1
    assert "GPU-hours and days are of 3.60 G tokens whatever the batch" in text
    assert max(map(len, text.splitlines()[:6])) <= 100


def test_table_without_a_budget() -> None:
    assert "GPU-hours" not in str(scaling(tokens=None))
    assert "cost" not in str(scaling(price=None))


def test_json() -> None:
    missing, row, _ = json.loads(scaling().to_json())
    assert missing["step_time_s"] is None
    assert missing["reason"].startswith("needs 93 GiB")
    assert row["gpu_hours"] == pytest.approx(16)
    assert row["critical_batches"] == 0.5
    assert row["grid"] == str(small_plan().grid)


def test_drawing_without_matplotlib_names_the_extra(tmp_path: Path) -> None:
    with mock.patch.object(files, "find_spec", return_value=None), pytest.raises(PlanError, match=r"pip install 'autopar\[plot\]'"):
        scaling().plot(tmp_path / "out.svg")


@pytest.mark.parametrize("tokens", few(1, [3.6e9, None]))
def test_drawing(tmp_path: Path, tokens: float | None) -> None:
    scaling(tokens=tokens).plot(tmp_path / "out.svg")
    assert "<svg" in (tmp_path / "out.svg").read_text()
    scaling(tokens=tokens).plot(tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_a_figure_of_another_kind(tmp_path: Path) -> None:
    for drawn in (scaling(), Sweep(document.Plan.of(small_plan()), ())):
        with mock.patch.object(files, "find_spec"), pytest.raises(PlanError, match=r"a\.txt would hold a figure as SVG, PNG or PDF"):
            drawn.plot(tmp_path / "a.txt")


def test_nothing_to_draw(tmp_path: Path) -> None:
    empty = replace(scaling(), rows=scaling().rows[:1])
    with mock.patch.object(files, "find_spec"), pytest.raises(PlanError, match="no size of the cluster has a plan"):
        empty.plot(tmp_path / "out.svg")


def test_a_batch_of_images_is_counted_in_samples() -> None:
    found = scaling()
    rows = []
    for row in found.rows:
        made = row.plan
        rows.append(replace(row, plan=made and replace(made, prediction=replace(made.prediction, unit="samples"))))
    text = str(replace(found, rows=tuple(rows)))
    assert " samples/s " in text
    assert "tokens/s" not in text
    assert "GPU-hours and days are of 3.60 G samples whatever the batch" in text
