"""The report of the demo, of runs that were not run; and what the command starts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

from autopar.demo import local
from autopar.demo.run import COMPARED_STEPS, Run, report
from autopar.planner.document import Plan
from tests.show.plans import small_plan
from tests.test_cli import fails, run


def ran(losses: float, plan: Plan | None = None) -> Run:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    return Run(model, optimizer, iter(()), plan, [losses] * COMPARED_STEPS, [0.25] * COMPARED_STEPS)


@pytest.mark.parametrize("loss, is_right", [(2.0, True), (2.0001, False), (float("nan"), False)])
def test_report(loss: float, is_right: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = {"automatic": ran(loss, Plan.of(replace(small_plan())))}
    assert report(ran(2.0), runs, tmp_path, as_json=False) is is_right
    text = capsys.readouterr().out
    assert ("Losses of all plans equal" in text) is is_right
    assert ("FAILED: losses of automatic differ" in text) is not is_right
    assert (tmp_path / "report.txt").read_text() == text
    assert Plan.load(tmp_path / "plan.json") == runs["automatic"].plan


def test_report_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report(ran(2.0), {"automatic": ran(2.0, Plan.of(small_plan()))}, tmp_path, as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["one_device"]["losses"] == [2.0] * COMPARED_STEPS
    assert found["plans"][0]["measured_step_time_s"] == 0.25
    assert found["plans"][0]["stored_bytes"] == 20 * 4


def test_the_command_starts_processes_and_ends_as_they_do(tmp_path: Path) -> None:
    with mock.patch.object(local, "start_module", return_value=1) as started:
        assert run("demo", "--out", tmp_path, "--json").exit_code == 1
    started.assert_called_once_with("autopar.demo", 4, ["--out", str(tmp_path), "--json"])


def test_what_it_lacks(tmp_path: Path) -> None:
    with mock.patch.object(local, "find_spec", return_value=None):
        fails(run("demo", "--out", tmp_path), "pip install 'autopar[examples]'")
