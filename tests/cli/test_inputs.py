"""Models by their sizes, and this machine as a cluster."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

from autopar.cli import profile
from autopar.cli.inputs import load_example, read_cluster, read_configs, read_gpt, read_grid
from autopar.cost.cluster import INSIDE_NODE, Cluster
from autopar.cost.device import DeviceProfile
from autopar.cost.machine import LinkProfile, MachineProfile
from autopar.cost.measure import cache_path
from autopar.cost.measure_device import device_name
from autopar.errors import InputError, MeshError
from autopar.mesh import Mesh
from tests.test_cli import fails, run

MEASURED = MachineProfile(DeviceProfile("cpu", 2**30, (), 1e10, 1e-6, ""), (LinkProfile(1e-5, 1e9),), "measured here")


def test_a_gpt_by_its_sizes() -> None:
    model, batch = load_example("gpt:layers=3,hidden=128,vocab=96,intermediate=256", batch=2, sequence=16, real=False)
    config = model.config
    assert (config.n_layer, config.n_embd, config.n_head, config.n_positions) == (3, 128, 2, 16)  # type: ignore[union-attr]
    assert model.transformer.h[2].mlp.c_fc.weight.shape == (128, 256)  # type: ignore[union-attr, index]
    assert isinstance(batch, dict)
    assert batch["input_ids"].is_meta


@pytest.mark.parametrize(
    "text, words",
    [
        ("layers=2", "needs hidden"),
        ("heads=2", "needs layers and hidden"),
        ("layers=2,hidden=100,heads=3", "hidden=100 is not divided by heads=3"),
        ("layers=2,hidden=big", "'hidden=big'"),
        ("layers=2,hidden=0", "'hidden=0'"),
        ("layers=2,width=64", "it may have layers, hidden, heads"),
    ],
)
def test_wrong_sizes(text: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        read_gpt(text, 16)


def test_a_module_of_that_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = """
import torch
from torch import nn

def build():
    return nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4)), (torch.zeros(2, dtype=torch.long),)

def alone():
    return build()[0]
"""
    (tmp_path / "gpt.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(sys.modules, "gpt", sys)  # so that the module is forgotten after this test
    monkeypatch.delitem(sys.modules, "gpt")
    model, _ = load_example("gpt:build", batch=2, sequence=4, real=False)
    assert len(list(model.parameters())) == 3
    with pytest.raises(InputError, match=r"Sequential takes input, and not input_ids and labels; let the function return \(model, batch\)"):
        load_example("gpt:alone", batch=2, sequence=4, real=False)


def test_two_configurations_of_one_name() -> None:
    assert [*read_configs(["a:dp=2", "b:dp=2", "dp=2", "c:schedule=interleaved:2"])] == ["a", "b", "dp=2", "c"]
    for texts in (["a:dp=2", "a:dp=1,tp=2"], ["dp=2", "dp=2"]):
        with pytest.raises(InputError, match=f"two configurations are called '{texts[0].partition(':')[0]}'"):
            read_configs(texts)


def test_one_model_is_named() -> None:
    for args in (("plan", "--mesh", "2"), ("plan", "hf:gpt2", "--gpt", "layers=1,hidden=64", "--mesh", "2"), ("explain", "hf:gpt2")):
        assert run(*args).exit_code == 2


@pytest.mark.parametrize("option", ["--html", "--trace", "--dot"])
def test_a_folder_that_is_not_there_is_told_before_the_search(option: str, tmp_path: Path) -> None:
    result = run("plan", "hf:gpt2", "--cluster", "1x2:h100", option, tmp_path / "none" / "plan")
    assert result.exit_code == 2
    assert "there is no folder" in result.stderr


def test_a_broken_configuration(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text("{}")
    with pytest.raises(InputError, match="cannot be read as a configuration"):
        load_example(f"hf:{path}", batch=1, sequence=8, real=False)


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `autopar profile --ranks 2` leaves it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    path = cache_path((2,), device_name(torch.device("cpu"), profile.RANK_THREADS), "gloo")
    path.parent.mkdir()
    MEASURED.save(path)


@pytest.mark.usefixtures("measured")
def test_this_machine() -> None:
    with mock.patch.object(profile, "profile_machine", return_value=MEASURED) as measuring:
        found = read_grid("2", "local")
        assert isinstance(found, Cluster)
        assert found.profile == replace(MEASURED, links=(replace(MEASURED.links[0], level=INSIDE_NODE),))
        assert found.mesh == Mesh.of(2)
        measuring.assert_not_called()
        assert isinstance(read_grid("2x2", "local"), Cluster)  # four ranks were not measured
        measuring.assert_called_once_with(Mesh.of(4), refresh=False)


def test_this_machine_where_it_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MeshError, match="8x8:h100"):
        read_cluster("local")
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.setenv(name, "1")
    fails(run("plan", "--gpt", "layers=1,hidden=64", "--cluster", "local"), "without torchrun")
