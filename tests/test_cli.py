"""The command line, in this process: what it prints, and its exit codes."""

from __future__ import annotations

import ast
import json
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
import transformers
from torch import nn
from typer.testing import CliRunner, Result

from autopar import api
from autopar.cli import app
from autopar.cli.inputs import load_example, read_cluster, read_configs, read_grid, read_manual, read_mesh, read_pin
from autopar.cli.profile import profile_text
from autopar.cost.cluster import BETWEEN_NODES, Cluster
from autopar.cost.device import DeviceProfile, MatmulSample
from autopar.cost.machine import LinkProfile, MachineProfile
from autopar.errors import InputError, MeshError, PlanError
from autopar.measured import Measured, Recording, Span
from autopar.mesh import Mesh
from autopar.plan import LinkPlan, Pipeline, Recipe
from autopar.planner.document import Plan
from autopar.show.page import plan_html
from autopar.show.text import plan_text
from autopar.show.timeline import about, predicted_processes
from autopar.show.trace import trace_json
from autopar.solve.manual import Manual
from tests import models
from tests.marks import exhaustive
from tests.show.plans import small_plan

pytestmark = pytest.mark.slow

COMMANDS = ("plan", "show", "compare", "sweep", "scale", "verify", "check", "count", "explain", "profile", "rules", "demo")
MLP = "tests.test_cli:small_mlp"


def reads_a_value() -> nn.Module:
    return nn.Dropout(torch.rand(1).item())


def unfinished() -> nn.Module:
    raise NotImplementedError("the decoder is to come")


def bad_file() -> nn.Module:
    raise RuntimeError("bad metadata in the checkpoint")


def small_mlp() -> models.Example:
    return models.mlp(hidden=64, intermediate=256, batch=16)


def small_gpt2() -> nn.Module:
    """A model alone: its batch follows from the options."""
    config = transformers.GPT2Config(n_layer=2, n_embd=96, n_head=4, vocab_size=96, n_positions=64, use_cache=False)
    model: nn.Module = transformers.GPT2LMHeadModel(config)
    return model


def small_gpt2_with_batch() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return small_gpt2(), (torch.zeros(2, 8, dtype=torch.long),)


def smaller_gpt2() -> nn.Module:
    """Not that one."""
    model = small_gpt2()
    del model.transformer.h[1]  # type: ignore[union-attr, operator]
    return model


def not_a_model() -> int:
    return 3


def run(*args: str | Path) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args])


def fails(result: Result, *words: str) -> None:
    """Exit code 1 with one text on stderr that has these words, and no traceback."""
    assert result.exit_code == 1, result.output
    assert result.stderr.startswith("error: ")
    assert "Traceback" not in result.stderr
    for word in words:
        assert word in result.stderr


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    small_plan().save(path)
    return path


def test_help_names_the_commands_and_the_exit_codes() -> None:
    result = run("--help")
    assert result.exit_code == 0
    for word in (*COMMANDS, "hf:gpt2", "module:function", "Exit codes"):
        assert word in result.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str) -> None:
    result = run(command, "--help")
    assert result.exit_code == 0
    assert "Usage" in result.stdout


@pytest.mark.parametrize("args", [["plan"], ["show"], ["nothing"], ["plan", "hf:gpt2", "--batch", "0"], ["rules", "--chek"]])
def test_wrong_usage_is_exit_code_2(args: list[str]) -> None:
    assert run(*args).exit_code == 2


@pytest.mark.parametrize(
    "args",
    [
        ["profile", "--out"],
        ["plan", MLP, "--mesh", "2", "--out"],
        ["scale", "hf:gpt2", "--cluster", "1x8:h100", "--plot"],
        ["sweep", MLP, "--mesh", "2", "--plot"],
        ["compare", MLP, "--mesh", "2", "--against", "dp=2", "--html"],
    ],
)
def test_where_nothing_can_be_written_is_told_before_the_work(args: list[str], tmp_path: Path) -> None:
    for path, what in ((tmp_path / "nowhere" / "file.json", "no"), (tmp_path, "a"), ("", "a")):
        result = run(*args, path)
        assert result.exit_code == 2
        assert f"there is {what} folder" in result.stderr


@pytest.mark.parametrize(
    "args, kind",
    [
        (["scale", "hf:gpt2", "--cluster", "1x8:h100", "--sizes", "1", "--plot"], ".svg or .png or .pdf"),
        (["sweep", MLP, "--mesh", "2", "--plot"], ".svg or .png or .pdf"),
        (["compare", MLP, "--mesh", "2", "--against", "dp=2", "--html"], ".html or .htm or .svg"),
    ],
)
def test_a_name_of_another_kind_of_file_is_told_before_the_work(args: list[str], kind: str, tmp_path: Path) -> None:
    with mock.patch("autopar.show.files.find_spec"):
        result = run(*args, tmp_path / "file.txt")
    assert result.exit_code == 2
    assert kind in " ".join(result.stderr.replace("\u2502", " ").split())


def test_interrupted_is_exit_code_130() -> None:
    with mock.patch.object(api, "plan", side_effect=KeyboardInterrupt):
        assert run("plan", MLP, "--real", "--mesh", "2").exit_code == 130


def test_show(saved: Path) -> None:
    result = run("show", saved)
    assert result.exit_code == 0
    assert result.stdout == plan_text(small_plan()) + "\n"
    assert result.stderr == ""


def test_show_draws(saved: Path, tmp_path: Path) -> None:
    assert run("show", saved, "--dot", tmp_path / "plan.dot").exit_code == 0
    assert (tmp_path / "plan.dot").read_text().startswith("digraph plan {")
    assert run("show", saved, "--html", tmp_path / "plan.html", "--trace", tmp_path / "step.json").exit_code == 0
    assert (tmp_path / "plan.html").read_text() == plan_html(Plan.load(saved))
    assert (tmp_path / "step.json").read_text() == trace_json(predicted_processes(Plan.load(saved)), about(Plan.load(saved)))


def test_show_has_recorded_steps_beside_the_predicted_one(saved: Path, tmp_path: Path) -> None:
    plan, record = Plan.load(saved), tmp_path / "record.json"
    recording = Recording(0, 0.0, ((0.0, 1.0),), (Span(0, "h.0", "forward", 0.0, 1.0),), ())
    record.write_text(Measured(plan.model, str(plan.grid), plan.graph_hash, (recording,)).to_json())
    assert run("show", saved, "--html", tmp_path / "plan.html", "--record", record).exit_code == 0
    plan.to_html(tmp_path / "expected.html", record=record)
    assert (tmp_path / "plan.html").read_text() == (tmp_path / "expected.html").read_text() != plan_html(plan)
    nowhere = run("show", saved, "--record", record)
    assert nowhere.exit_code != 0
    assert "add --html FILE or --trace FILE" in nowhere.stderr


def test_show_of_what_differs(saved: Path, tmp_path: Path) -> None:
    assert "no parameter differs" in run("show", saved, "--diff", saved).stdout
    replace(small_plan(), precision="bf16").save(tmp_path / "other.json")
    result = run("show", saved, "--diff", tmp_path / "other.json")
    assert result.exit_code == 0
    assert "precision: none, now bf16" in result.stdout


def test_show_of_a_stage(tmp_path: Path) -> None:
    plan = small_plan(4)
    ops = tuple(replace(op, stage=int(op.name.endswith("3"))) for op in plan.ops)
    links = (LinkPlan("pp", (BETWEEN_NODES,), (2,)), *plan.links)
    prediction = replace(plan.prediction, peak_memory_bytes=plan.prediction.peak_memory_bytes * 2)
    pipeline = Pipeline(degree=2, stages=2, microbatches=2)
    made = replace(plan, ops=ops, pipeline=pipeline, prediction=prediction, stages=plan.stages * 2, links=links)
    made.save(tmp_path / "plan.json")
    page = run("show", tmp_path / "plan.json", "--stage", "1").stdout
    assert "h.3.attn.c_attn" in page
    assert "h.2" not in page
    assert "inside a node a rank sends 6 MiB a step: all_reduce 6 MiB" in page
    fails(run("show", tmp_path / "plan.json", "--stage", "2"), "no stage 2", "0 to 1")


def test_show_of_a_module(saved: Path) -> None:
    page = run("show", saved, "--module", "h.1").stdout
    assert "h.1.attn.c_attn.weight" in page
    assert "h.{" not in page
    assert "h.11" not in page
    assert "inside a node a rank sends 3 MiB a step: all_reduce 3 MiB" in page
    assert "wte" not in page


def test_show_of_no_module(saved: Path) -> None:
    fails(run("show", saved, "--module", "transformer"), "'transformer'", "h, wte")


def test_show_of_no_file(tmp_path: Path) -> None:
    fails(run("show", tmp_path / "none.json"), "none.json", "No such file")


def test_show_of_no_plan(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text("{}")
    fails(run("show", path), "not a plan")


def test_rules_lists_every_op() -> None:
    result = run("rules")
    assert result.exit_code == 0
    for op in ("aten.linear.default", "aten.mm.default", "aten.embedding.default"):
        assert op in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 100


@pytest.mark.parametrize("name", ["mm", "aten.mm", "aten.mm.default"])
def test_rules_of_one_op_by_any_name(name: str) -> None:
    result = run("rules", name)
    assert result.exit_code == 0
    assert "m k, k n -> m n" in result.stdout
    assert len(result.stdout.splitlines()) == 3


def test_a_rule_that_depends_on_the_call_is_shown_for_one() -> None:
    assert "b0 b1 k, n k -> b0 b1 n" in run("rules", "linear").stdout


def test_no_rule_of_that_name() -> None:
    fails(run("rules", "aten.linaer"), "aten.linaer", "did you mean linear")


def test_rules_are_checked() -> None:
    result = run("rules", "mm", "--check")
    assert result.exit_code == 0, result.output
    assert "1 op checked" in result.stdout


def test_plan_of_a_function_that_returns_a_batch(tmp_path: Path) -> None:
    files = {name: tmp_path / name for name in ("plan.json", "plan.dot", "graph.py")}
    options = ("--out", files["plan.json"], "--dot", files["plan.dot"], "--code", files["graph.py"])
    result = run("plan", MLP, "--real", "--mesh", "dp=2,tp=2", *options)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("Mlp on mesh dp=2,tp=2 (4 ranks): automatic")
    assert max(map(len, result.stdout.splitlines())) <= 100
    assert plan_text(Plan.load(files["plan.json"])) + "\n" == result.stdout
    assert "aten.linear.default" in files["graph.py"].read_text()
    ast.parse(files["graph.py"].read_text())


def test_plan_of_a_model_on_meta_with_tokens() -> None:
    result = run("plan", "tests.test_cli:small_gpt2", "--cluster", "2x2:a100-80gb", "--batch", "8", "--sequence", "16")
    assert result.exit_code == 0, result.output
    assert "input_ids int64[8, 16]" in result.stdout
    assert "2 nodes x 2 a100-80gb" in result.stdout


def test_plan_with_a_pin_and_by_hand() -> None:
    pinned = run("plan", MLP, "--real", "--mesh", "dp=2,tp=2", "--pin", "blocks.*.1.weight:dp=R,tp=S0")
    assert pinned.exit_code == 0, pinned.output
    (row,) = [line for line in pinned.stdout.splitlines() if line.startswith("blocks.{0,1}.1.weight")]
    assert row.split()[5:7] == ["R", "S0"]
    manual = run("plan", MLP, "--real", "--mesh", "4", "--manual", "dp=2,tp=2,zero=1")
    assert manual.exit_code == 0, manual.output
    assert "Manual(dp=2, tp=2, zero=1)" in manual.stdout


def test_plan_without_a_grid() -> None:
    fails(run("plan", MLP, "--real"), "--mesh", "--cluster")


def test_plan_that_does_not_fit() -> None:
    fails(run("plan", MLP, "--real", "--mesh", "2", "--memory-limit", "1KiB"), "1")


def test_relief_of_a_plan_that_does_not_fit() -> None:
    asked = ("plan", MLP, "--real", "--mesh", "4", "--manual", "dp=4", "--memory-limit", "900KiB")
    fails(run(*asked), "cannot hold together: Manual(dp=4, tp=1, zero=0), memory limit 900 KiB", "`autopar plan ... --relief`")
    result = run(*asked, "--relief")
    fails(result, "cannot hold together")
    assert "--relief" not in result.stderr
    fits = {line[:34].strip(): line[34:].split()[0] for line in result.stdout.splitlines() if line[34:].split()[:1] in (["yes"], ["no"])}
    assert fits["as asked"] == fits["recompute=full"] == "no"
    assert fits["zero=1"] == fits["optimizer sgd"] == "yes"


def test_relief_of_a_plan_that_fits_prices_its_pins() -> None:
    pinned = "blocks.*.1.weight:dp=R,tp=S0"
    result = run("plan", MLP, "--real", "--mesh", "dp=2,tp=2", "--pin", pinned, "--relief")
    assert result.exit_code == 0, result.output
    assert f"without pin {pinned}  yes " in result.stdout
    assert "Mlp on mesh dp=2,tp=2 (4 ranks): automatic" in result.stdout


def test_plan_with_a_pin_that_names_nothing() -> None:
    fails(run("plan", MLP, "--real", "--mesh", "2", "--pin", "none.weight:d0=R"), "none.weight")


def test_a_function_that_cannot_build_on_meta() -> None:
    fails(run("plan", MLP, "--mesh", "2"), "meta", "--real")
    fails(run("plan", "tests.test_cli:reads_a_value", "--mesh", "2"), "Tensor.item() cannot be called on meta tensors", "--real")


@pytest.mark.parametrize("function, kind", [("unfinished", NotImplementedError), ("bad_file", RuntimeError)])
def test_an_error_of_the_function_itself_is_its_own(function: str, kind: type[Exception]) -> None:
    result = run("plan", f"tests.test_cli:{function}", "--mesh", "2")
    assert type(result.exception) is kind
    assert "--real" not in result.output


def test_compare() -> None:
    result = run("compare", MLP, "--real", "--mesh", "4", "--against", "megatron:dp=1,tp=4", "--against", "dp=5")
    assert result.exit_code == 0, result.output
    for word in ("auto", "megatron", "dp=5 does not fit:"):
        assert word in result.stdout
    assert "--relief" not in result.stdout
    short = run("compare", MLP, "--real", "--mesh", "4", "--against", "dp=4", "--memory-limit", "900KiB")
    assert short.stdout.splitlines()[-1].startswith("`autopar plan ... --relief`")


def test_verify() -> None:
    right = run("verify", MLP, "--mesh", "4", "--manual", "dp=2,tp=2")
    assert right.exit_code == 0, right.output
    assert "gradients" in right.stdout
    fails(run("verify", MLP, "--mesh", "4", "--manual", "dp=2,tp=2", "--tolerance", "-1"), "the plan is wrong")


def test_verify_a_saved_plan_of_the_command_line(tmp_path: Path) -> None:
    path, gpt = tmp_path / "plan.json", ("--gpt", "layers=1,hidden=64,vocab=96", "--batch", "4", "--sequence", "16")
    assert run("plan", *gpt, "--mesh", "2", "--manual", "dp=2", "--out", path).exit_code == 0
    result = run("verify", "--plan", path)
    assert result.exit_code == 0, result.output
    fails(run("verify", "--plan", path, "--mesh", "4"), "mesh")


def test_verify_a_saved_plan_of_another_model(saved: Path) -> None:
    fails(run("verify", MLP, "--mesh", "8", "--plan", saved), "another graph")


def test_explain() -> None:
    result = run("explain", MLP, "blocks.0.1.weight", "--real", "--mesh", "2")
    assert result.exit_code == 0, result.output
    assert "blocks.0.1.weight" in result.stdout
    fails(run("explain", MLP, "blocks.9.weight", "--real", "--mesh", "2"), "blocks.9.weight")


@pytest.mark.slow
@exhaustive
def test_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    result = run("profile", "--ranks", "2", "--out", tmp_path / "profile.json")
    assert result.exit_code == 0, result.output
    assert "axis 0" in result.stdout
    assert len(MachineProfile.load(tmp_path / "profile.json").links) == 1
    for asked in ([], ["--manual", "dp=2"], ["--manual", "pp=2"]):
        planned = run("plan", MLP, "--real", "--profile", tmp_path / "profile.json", "--mesh", "2", *asked)
        assert planned.exit_code == 0, planned.output


def test_a_profile_as_text() -> None:
    matmul, batched = MatmulSample(64, 32, 16, "float32", 1.5e11, 1.2e11), MatmulSample(8, 8, 8, "float32", 4e10)
    device = DeviceProfile("cpu", 2**33, (matmul,), 2.0**34, 2.6e-6, "", batched=(batched,))
    text = profile_text(MachineProfile(device, (LinkProfile(2e-4, 2.0**30, source="measured"),), "here, today"))
    assert text.startswith("here, today")
    rates = ("150 Gflop/s", "120 Gflop/s", "64 x 16 x 32", "8 x 8 x 8, many", "40 Gflop/s")
    for word in (*rates, "8 GiB", "16 GiB/s", "200 us", "1 GiB/s", "measured"):
        assert word in text


def test_meshes() -> None:
    assert read_mesh("8") == 8
    assert read_mesh("2x4") == Mesh.of((2, 4))
    assert read_mesh("dp=2,tp=4") == Mesh(("dp", "tp"), (2, 4))
    with pytest.raises(MeshError, match="'2by4'"):
        read_mesh("2by4")


def test_clusters(tmp_path: Path) -> None:
    assert read_cluster("4x8:h100") == Cluster(4, 8, "h100")
    assert read_cluster("8:h100") == Cluster(1, 8, "h100")
    assert read_cluster("4x8:h100@eth-100+1x8:h100") == Cluster(4, 8, "h100", "eth-100") + Cluster(1, 8, "h100")
    with pytest.raises(PlanError, match="no link called 'ib'; there are efa-400"):
        read_cluster("4x8:h100@ib")
    assert read_cluster("4x8:a100-80gb + 2x8:h100") == Cluster(4, 8, "a100-80gb") + Cluster(2, 8, "h100")
    Cluster(2, 4, "h100").save(tmp_path / "cluster.json")
    assert read_cluster(str(tmp_path / "cluster.json")) == Cluster(2, 4, "h100")
    with pytest.raises(MeshError, match="4x8:h100"):
        read_cluster("4x8")
    with pytest.raises(PlanError, match="h1000"):
        read_cluster("4x8:h1000")


def test_a_mesh_regroups_a_cluster() -> None:
    grid = read_grid("dp=2,tp=16", "4x8:h100")
    assert isinstance(grid, Cluster)
    assert grid.mesh == Mesh.parse("dp=2,tp=16")
    with pytest.raises(MeshError, match="32"):
        read_grid("dp=2,tp=2", "4x8:h100")


def test_configurations() -> None:
    assert read_manual("dp=2, tp=4,zero=1,sequence_parallel") == Manual(2, 4, 1, True)
    assert read_configs(["megatron:tp=8", "dp=8"]) == {"megatron": Manual(tp=8), "dp=8": Manual(dp=8)}
    text = "pp=2,schedule=interleaved:2,recompute=full:1/2"
    expected = Manual(pp=2, schedule="interleaved:2", recompute="full:1/2")
    assert read_configs([text, f"a:b:{text}"]) == {text: expected, "a:b": expected}
    assert read_configs(["name:sequence_parallel", "sequence_parallel"]) == {
        "name": Manual(sequence_parallel=True), "sequence_parallel": Manual(sequence_parallel=True)
    }  # fmt: skip
    for wrong in ("dp", "dp=two", "dp=²", "qp=2", ""):
        with pytest.raises(PlanError, match="a configuration reads like"):
            read_manual(wrong)


def test_pins() -> None:
    pin = read_pin("h.*.c_attn.weight:dp=R,tp=S1.1")
    assert pin.pattern == "h.*.c_attn.weight"
    assert dict(pin.axes) == {"dp": "R", "tp": "S1.1"}
    for wrong in ("h.weight", "h.weight:", ":tp=R", "h.weight:tp"):
        with pytest.raises(PlanError, match="a pin reads like"):
            read_pin(wrong)


@pytest.mark.parametrize("name", ["hf:gpt2", "hf:distilbert", "hf:vit"])
def test_models_of_transformers_on_meta(name: str) -> None:
    model, batch = load_example(name, batch=2, sequence=16, real=False)
    assert isinstance(batch, dict)
    assert all(tensor.is_meta for tensor in (*model.parameters(), *batch.values()))
    assert "labels" in batch
    first = next(iter(batch.values()))
    assert first.shape[0] == 2
    assert first is not batch["labels"]


def test_a_configuration_file(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    fields = {"model_type": "gpt2", "n_layer": 1, "n_embd": 32, "n_head": 2, "vocab_size": 50, "n_positions": 8}
    path.write_text(json.dumps(fields | {"architectures": ["GPT2LMHeadModel"]}))
    model, batch = load_example(f"hf:{path}", batch=2, sequence=8, real=True)
    assert isinstance(batch, dict)
    assert torch.isfinite(model(**batch).loss)
    with pytest.raises(InputError, match="longer than the 8 positions"):
        load_example(f"hf:{path}", batch=2, sequence=9, real=False)
    path.write_text(json.dumps(fields))
    with pytest.raises(InputError, match="architectures"):
        load_example(f"hf:{path}", batch=2, sequence=8, real=False)


@pytest.mark.parametrize(
    "name, words",
    [
        ("gpt2", "module:function"),
        ("hf:gpt9", "nothing is downloaded"),
        ("no_such_module:build", "no module 'no_such_module'"),
        ("tests.test_cli:no_such_function", "no function 'no_such_function'"),
        ("tests.test_cli:not_a_model", "returned a int"),
    ],
)
def test_no_such_model(name: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        load_example(name, batch=2, sequence=8, real=False)


@pytest.fixture
def planned(tmp_path: Path) -> Path:
    """A plan of the command line, which knows its model."""
    path = tmp_path / "plan.json"
    args = ("--mesh", "2x2", "--manual", "dp=2,tp=2", "--batch", "4", "--sequence", "16", "--out", path)
    assert run("plan", "tests.test_cli:small_gpt2", *args).exit_code == 0
    return path


def test_a_saved_plan_says_how_its_model_is_built(planned: Path) -> None:
    assert Plan.load(planned).source == Recipe("tests.test_cli:small_gpt2", 4, 16)


def test_check(planned: Path) -> None:
    result = run("check", planned, "--rank", "3")
    assert "rank 3: 1 program" in result.stdout
    findings = [line for line in result.stdout.splitlines() if line.startswith("finding: ")]
    assert all("memory is not within" in line for line in findings)
    assert result.exit_code == bool(findings)


def test_check_finds_what_is_wrong(planned: Path) -> None:
    data = json.loads(planned.read_text())
    data["prediction"]["peak_memory_bytes"] = [1000]
    planned.write_text(json.dumps(data))
    result = run("check", planned)
    assert "finding: memory is not within 5.0% of the prediction: rank 0" in result.stdout
    fails(result, "1 finding")


@pytest.mark.parametrize("given", [["--batch", "4"], ["--sequence", "8"], ["--batch", "4", "--sequence", "8"]], ids=" ".join)
def test_sizes_of_a_batch_that_the_function_returns(given: list[str]) -> None:
    result = run("plan", "tests.test_cli:small_gpt2_with_batch", "--mesh", "2", *given)
    fails(result, f"{' and '.join(given[::2])} would change nothing; leave out")


def test_check_of_no_such_rank(planned: Path) -> None:
    fails(run("check", planned, "--rank", "7"), "there is no rank 7", "ranks 0 to 3")


def test_check_of_a_plan_that_does_not_know_its_model(saved: Path) -> None:
    fails(run("check", saved), "does not say how its model (TinyGPT) is built", "--model")


def test_check_with_another_model(planned: Path) -> None:
    fails(run("check", planned, "--model", "tests.test_cli:smaller_gpt2"), "made for another graph")


def test_check_of_a_plan_from_python(tmp_path: Path) -> None:
    example = load_example("tests.test_cli:small_gpt2", batch=4, sequence=16, real=False)
    made = api.plan(example.model, 2, example.batch, plan=Manual(dp=2, microbatches=2), outputs="loss")
    made.save(tmp_path / "plan.json")
    result = run("check", tmp_path / "plan.json", "--model", "tests.test_cli:small_gpt2", "--outputs", "loss")
    assert "2 ranks: 1 program" in result.stdout


def test_count(planned: Path) -> None:
    result = run("count", planned)
    assert result.exit_code == 0, result.output
    for word in ("position", "flops", "peak memory", "all_gather", "all ranks:"):
        assert word in result.stdout
    counted = json.loads(run("count", planned, "--json").stdout)
    assert counted["num_ranks"] == 4
    assert {row["axis"] for row in counted["positions"][0]["traffic"]} == {"dp", "tp"}


def test_plan_without_pipeline() -> None:
    with mock.patch.object(api, "plan", wraps=api.plan) as called:
        assert run("plan", MLP, "--real", "--mesh", "2", "--no-pipeline").exit_code == 0
    assert called.call_args.kwargs["pipeline"] is False
