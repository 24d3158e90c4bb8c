"""``--json``: one document on stdout with the data of the text, and errors on stderr."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from autopar.cli import work
from autopar.cli.figures import json_text
from autopar.cost.machine import MachineProfile
from autopar.errors import InfeasibleError
from autopar.mesh import Mesh
from autopar.planner.document import Plan
from tests.cli.test_inputs import MEASURED
from tests.show.plans import small_plan
from tests.test_cli import MLP, run

pytestmark = pytest.mark.slow


def document(*args: str | Path, exit_code: int = 0) -> Any:
    result = run(*args, "--json")
    assert result.exit_code == exit_code, result.output
    assert ('"error"' in result.stderr) == (exit_code != 0)
    return json.loads(result.stdout)


def test_plain_values() -> None:
    assert json.loads(json_text({"a": float("nan"), "b": (1, Mesh.of(2)), "c": InfeasibleError("no").members})) == {
        "a": None,
        "b": [1, "d0=2"],
        "c": [],
    }


def test_plan_is_the_saved_document(tmp_path: Path) -> None:
    found = document("plan", MLP, "--real", "--mesh", "2", "--out", tmp_path / "plan.json", "--compressions")
    rows = found.pop("compressions")
    assert found == json.loads((tmp_path / "plan.json").read_text())
    assert found["stats"]["is_interrupted"] is False
    assert {"compress", "step_time_s", "sent_bytes", "peak_memory_bytes"} <= rows[0].keys()
    assert Plan.from_json(json.dumps(found)).source is not None


def test_relief() -> None:
    found = document("plan", MLP, "--real", "--mesh", "dp=2,tp=2", "--pin", "blocks.*.1.weight:dp=R,tp=S0", "--relief")
    assert found["relief"][0]["what"] == "as asked"
    assert found["relief"][0]["step_time_s"] == found["prediction"]["step_time_s"]


def test_relief_where_nothing_fits() -> None:
    """The table is what was asked for; the error says the same as without it."""
    result = run("plan", MLP, "--real", "--mesh", "4", "--manual", "dp=4", "--memory-limit", "900KiB", "--relief", "--json")
    assert result.exit_code == 1
    found, error = json.loads(result.stdout), json.loads(result.stderr)["error"]
    assert [*found] == ["relief"]
    rows = {row["what"]: row for row in found["relief"]}
    assert rows["zero=1"]["fits"]
    assert not rows["as asked"]["fits"]
    assert error["kind"] == "InfeasibleError"
    assert error["limit_bytes"] == 900 * 1024 < error["least_bytes"] == rows["as asked"]["least_bytes"]


def test_so_are_those_of_the_code_that_makes_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_model.py").write_text("def build():\n    return None.shape\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    result = run("plan", "broken_model:build", "--mesh", "2", "--json")
    assert (result.exit_code, result.stdout) == (1, "")
    assert json.loads(result.stderr)["error"]["kind"] == "AttributeError"


def test_errors_are_a_line_on_stderr() -> None:
    result = run("plan", MLP, "--real", "--mesh", "2", "--memory-limit", "1KiB", "--json")
    assert result.exit_code == 1
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    found = json.loads(line)
    assert found["exit_code"] == 1
    assert found["error"]["kind"] == "InfeasibleError"
    assert found["error"]["limit_bytes"] == 1024


@pytest.mark.parametrize("args", [["count", "plan.json", "another.json"], ["plan", MLP, "--sequence", "many"]], ids=" ".join)
def test_wrong_usage_is_told_from_what_cannot_be(args: list[str]) -> None:
    result = run(*args, "--json")
    plain = run(*args)
    assert (result.exit_code, plain.exit_code) == (2, 2)


def test_a_file_that_is_not_there() -> None:
    result = run("show", "none.json", "--json")
    assert json.loads(result.stderr)["error"] == {"kind": "FileNotFoundError", "text": "none.json: No such file or directory"}


def test_compare() -> None:
    rows = document("compare", MLP, "--real", "--mesh", "4", "--against", "dp=4", "--against", "dp=5")["rows"]
    assert [(row["name"], row["fits"]) for row in rows] == [("auto", True), ("dp=4", True), ("dp=5", False)]
    assert rows[0]["step_time_s"] > 0
    assert rows[0]["moved_bytes"] == sum(rows[0]["bytes_by_axis"].values())
    assert rows[2]["step_time_s"] is None
    assert "5" in rows[2]["reason"]


def test_compare_without_outputs() -> None:
    """A hand-written row, which is the same plan either way, does not gather the logits."""
    asked = ("compare", "tests.test_cli:small_gpt2", "--batch", "8", "--sequence", "16", "--mesh", "2", "--against", "dp=2")
    whole, loss = (document(*asked, *more)["rows"][1] for more in ((), ("--outputs", "loss")))
    assert whole["layout"] == loss["layout"]
    assert whole["moved_bytes"] - loss["moved_bytes"] == 8 * 16 * 96 * 4  # the vocabulary is of 96


def test_sweep() -> None:
    found = document("sweep", MLP, "--real", "--mesh", "2")
    assert found["automatic"]["grid"]
    fitting = [point for point in found["configurations"] if point["fits"]]
    assert fitting[0]["config"]["dp"] * fitting[0]["config"]["tp"] * fitting[0]["config"]["pp"] == 2


def test_scale() -> None:
    rows = document("scale", MLP, "--real", "--cluster", "1x2:a100-80gb", "--sizes", "1")
    assert [row["ranks"] for row in rows] == [2]


def test_verify() -> None:
    asked = ("verify", MLP, "--mesh", "2", "--manual", "dp=2")
    found = document(*asked)
    assert found["grad_error"] < 1e-4
    assert document(*asked, "--tolerance", "-1", exit_code=1).keys() == found.keys()


def test_explain() -> None:
    found = document("explain", MLP, "blocks.0.1.weight", "--real", "--mesh", "2")
    assert found["name"] == "blocks.0.1.weight"
    assert sum(choice["is_in_force"] for choice in found["choices"]) == 1
    assert all(choice["step_time_s"] is not None or choice["reason"] for choice in found["choices"])
    formulas = document("explain", MLP, "blocks.0.1.weight", "--real", "--mesh", "2", "--formula")
    assert {row["what"] for row in formulas["amounts"]} >= {"parameter", "gradient", "optimizer"}


def test_check_and_count(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    assert run("plan", MLP, "--real", "--mesh", "2", "--manual", "dp=2", "--out", path).exit_code == 0
    result = run("check", path, "--json")
    found = json.loads(result.stdout)
    assert found["ranks"] == [0, 1]
    assert result.exit_code == bool(found["findings"])
    assert document("count", path)["num_ranks"] == 2


def test_rules() -> None:
    assert document("rules", "mm") == [{"op": "aten.mm.default", "rule": "m k, k n -> m n ; 0 | 1"}]
    assert document("rules", "mm", "--check") == {"ops": ["aten.mm.default"], "findings": []}


def test_show(tmp_path: Path) -> None:
    small_plan().save(tmp_path / "plan.json")
    assert document("show", tmp_path / "plan.json") == json.loads((tmp_path / "plan.json").read_text())
    assert len(document("show", tmp_path / "plan.json", "--module", "h.1")["parameters"]) == 2


def test_show_of_what_differs(tmp_path: Path) -> None:
    plan = small_plan()
    first, *others = plan.parameters
    slower = replace(plan.prediction, step_time_s=2 * plan.prediction.step_time_s)
    other = replace(plan, parameters=(replace(first, held=("R", "R")), *others), collectives=plan.collectives[1:], prediction=slower)
    plan.save(tmp_path / "plan.json")
    replace(other, precision="bf16").save(tmp_path / "other.json")
    found = document("show", tmp_path / "plan.json", "--diff", tmp_path / "other.json")
    assert found["request"] == {"precision": {"old": "", "new": "bf16"}}
    assert found["parameters"] == [{"name": first.name, "old": f"[{' '.join(first.held)}]", "new": "[R R]"}]
    assert found["new"]["step_time_s"] == 2 * found["old"]["step_time_s"]
    assert len(found["collectives"]) == 1
    assert found["ops"] == []


def test_profile() -> None:
    with mock.patch.object(work, "profile_machine", return_value=MEASURED):
        assert MachineProfile.from_json(document("profile", "--mesh", "2")) == MEASURED
