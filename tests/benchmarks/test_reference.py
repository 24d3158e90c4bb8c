"""Published runs are predicted from a few layers; the sum is what planning the whole model gives."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from autopar import Manual
from autopar.runtime.module import make_skeleton
from autopar.session import open_session
from autopar.solve.search import Search

FOLDER = Path(__file__).parents[2] / "benchmarks" / "reference"


@pytest.fixture
def reference(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module ``predict``, which imports its siblings by their names."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import predict  # type: ignore[import-not-found]

    yield predict
    for name in ("predict", "records", "decoder", "stacks"):
        sys.modules.pop(name, None)


ROW: dict[str, Any] = {
    "id": "small",
    "source": "nobody",
    "model": {"family": "llama", "layers": 8, "hidden": 256, "heads": 4, "kv_heads": 2, "ffn_hidden": 512, "vocab": 1024, "seq": 512},
    "hardware": {"gpu": "A100-80GB", "n_gpus": 8, "gpus_per_node": 8, "inter_gbps": None},
    "config": {
        "dp": 2, "tp": 2, "pp": 2, "cp": 1, "ep": 1, "vpp": None, "zero": 1, "sp": True,
        "micro_batch": 2, "global_batch": 16, "recompute": "full", "precision": "bf16",
    },
    "measured": {"peak_mem_gb": None},
    "iter_time_s": 1.0,
}


def load(tmp_path: Path, row: dict[str, Any]) -> Any:
    from records import load_records  # type: ignore[import-not-found]

    path = tmp_path / "runs.json"
    path.write_text(json.dumps([row]))
    (record,) = load_records(path)
    return record


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_few_layers_stand_for_all(reference: Any, tmp_path: Path, recompute: str) -> None:
    record = load(tmp_path, ROW)
    stack = replace(reference.stack_of(record), layer_overhead_s=0.0, model_overlap=0.9)
    key = reference._Key.of(record, stack, recompute)
    found = reference._Depth(record, reference._staged(key))

    with torch.device("meta"):
        model = reference.Decoder(record.dims, unfused=False).to(torch.bfloat16)
        tokens = torch.empty(16, record.dims.seq, dtype=torch.long)
    session = open_session(make_skeleton(model), (tokens, tokens.clone()), {}, outputs="loss")
    manual = Manual(dp=2, tp=2, pp=2, zero=1, sequence_parallel=True, microbatches=4, stages=("layers.4",), recompute=recompute)
    whole = Search(session.normal_for, lambda grid: key.machine, float("inf"), [manual], "adamw_master").decide(manual.shape(16))
    for stage, price in enumerate(whole.prices):
        made = found._of(found.prices, [4, 4], stage)
        for name in ("forward_s", "backward_s", "reduce_s", "update_s", "live_num_bytes"):
            assert made[name] == pytest.approx(getattr(price, name), rel=0.05), (stage, name)
        held = reference._memory(whole.memory[stage], whole.live[stage])
        assert found._of(found.memory, [4, 4], stage)["static"] == pytest.approx(held["static"], rel=0.05)
    assert whole.timeline is not None
    assert found.played(stack).step_time_s == pytest.approx(whole.step_time_s, rel=0.05)


def test_what_is_wrong_with_a_record(reference: Any, tmp_path: Path) -> None:
    from records import RecordError

    with pytest.raises(RecordError, match=r"record small: KeyError 'dp'"):
        load(tmp_path, ROW | {"config": {}})
    with pytest.raises(RecordError, match=r"global batch of 15 is no multiple of dp \* micro_batch = 4"):
        load(tmp_path, ROW | {"config": ROW["config"] | {"global_batch": 15}})
    with pytest.raises(RecordError, match=r"pp \* dp \* cp \* tp = 8, but the run had 16 GPUs"):
        reference.predict(load(tmp_path, ROW | {"hardware": ROW["hardware"] | {"n_gpus": 16}}))
    with pytest.raises(RecordError, match=r"no profile for GPU 'T4'"):
        reference.predict(load(tmp_path, ROW | {"hardware": ROW["hardware"] | {"gpu": "T4"}}))
