"""The skeleton of a model follows what is switched on the model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autopar.errors import CaptureError, PlanError
from autopar.runtime.mirror import Mirror
from autopar.runtime.module import make_skeleton


def build() -> tuple[nn.Sequential, nn.Module, Mirror]:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    skeleton = make_skeleton(model)
    return model, skeleton, Mirror.of(model, skeleton)


@pytest.mark.parametrize("has_stages", [False, True])
def test_the_skeleton_has_the_modes_of_the_model(has_stages: bool) -> None:
    model, skeleton, mirror = build()
    before = mirror.follow(has_stages=has_stages)
    model[1].eval()
    assert mirror.follow(has_stages=has_stages) != before
    assert [module.training for module in skeleton.modules()] == [True, True, False, True]
    model[1].train()
    assert mirror.follow(has_stages=has_stages) == before


def test_the_skeleton_trains_what_the_model_does() -> None:
    model, skeleton, mirror = build()
    model[0].requires_grad_(True)
    model[2].bias.requires_grad_(False)
    mirror.follow(has_stages=False)
    assert [name for name, p in skeleton.named_parameters() if not p.requires_grad] == ["2.bias"]


def test_stages_train_no_more_than_they_were_cut_for() -> None:
    model, _, mirror = build()
    before = mirror.follow(has_stages=True)
    model[2].bias.requires_grad_(False)
    assert mirror.follow(has_stages=True) == before
    model[0].weight.requires_grad_(True)
    with pytest.raises(PlanError, match=r"parameter 0.weight was frozen when .* before the first call"):
        mirror.follow(has_stages=True)


def test_hooks_of_modules_inside_are_those_of_the_capture() -> None:
    model, _, mirror = build()
    model.register_forward_hook(lambda module, given, made: None)
    mirror.follow(has_stages=False)
    for add, what in (
        (model[2].register_forward_hook, "module 2 has other forward hooks"),
        (model[2].register_forward_pre_hook, "module 2 has other forward hooks"),
        (model[2].register_full_backward_hook, "module 2 has backward hooks"),
    ):
        handle = add(lambda *_: None)
        with pytest.raises(CaptureError, match=what):
            mirror.follow(has_stages=False)
        handle.remove()
    mirror.follow(has_stages=False)


def test_the_skeleton_gets_attributes_before_a_capture() -> None:
    """What it has a copy of is copied, as far as it has changed; what came later is the model's own."""
    model, skeleton, mirror = build()
    first, dropout, last = (vars(module) for module in model)
    shadows = [vars(module) for module in skeleton.children()]
    first["table"], last["sizes"] = [1, 2], [3]
    mirror.refresh()
    assert shadows[0]["table"] is first["table"]
    shadows[2]["sizes"] = [3]  # a copy, as of a skeleton that was made then
    copied = shadows[2]["sizes"]
    dropout["p"], last["scale"] = 0.25, torch.ones(2)
    mirror.refresh()
    assert shadows[1]["p"] == 0.25
    assert shadows[2]["sizes"] is copied
    assert shadows[2]["scale"] is last["scale"]
    last["sizes"].append(4)
    del last["scale"]
    mirror.refresh()
    assert shadows[2]["sizes"] == [3, 4]
    assert shadows[2]["sizes"] is not last["sizes"]
    assert "scale" not in shadows[2]


def test_what_is_put_in_the_place_of_modules_and_parameters_is_refused() -> None:
    model, _, mirror = build()
    before = model[2]
    model[2] = nn.Linear(4, 4)
    with pytest.raises(CaptureError, match="the model has other modules inside than when parallelize was called"):
        mirror.follow(has_stages=False)
    model[2] = before
    model[0].weight = nn.Parameter(torch.ones(4, 4))
    with pytest.raises(CaptureError, match=r"parameter 0\.weight is no shard, .* of shape \(4, 4\) that was put in its place"):
        mirror.follow(has_stages=False)


def test_what_the_model_holds_is_found_by_its_first_names() -> None:
    """A parameter and a buffer that it has twice, and a module; one that is taken away, and one that comes later."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4))
    model[1].weight = model[0].weight
    model.append(model[2])
    model.register_buffer("mean", model.get_buffer("2.running_mean"))
    mirror = Mirror.of(model, make_skeleton(model))
    model[1].register_parameter("bias", None)
    model.register_buffer("later", torch.ones(2))
    expected = dict(model.named_parameters()) | dict(model.named_buffers())
    found = mirror.state()
    assert list(found) == list(expected)
    assert all(found[name] is tensor for name, tensor in expected.items())
