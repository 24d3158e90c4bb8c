"""What is timed of a step is its graphs, as they are compiled and as they run."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch.distributed as dist
import transformers


def test_steps_and_graphs_are_timed(launches: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kind, config = launches.MODELS["GPT-2"]
    monkeypatch.setitem(launches.MODELS, "GPT-2", (kind, transformers.GPT2Config(**config.to_dict() | {"n_layer": 1})))
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        row, functions = launches.compare("GPT-2", "float32", "cpu", rounds=1, is_by_op=True)
    finally:
        dist.destroy_process_group()
    assert row.count(" ms |") == 4
    calls = {name: int(count) for name, count, *_ in (line.strip("| ").split(" | ") for line in functions[2:])}
    assert (calls["addmm"], calls["native_layer_norm"]) == (4, 3)
