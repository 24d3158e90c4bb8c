"""What the script says of published runs, and writes, whatever is among them."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.benchmarks.test_records import MOE, changed
from tests.benchmarks.test_reference import ROW

pytestmark = pytest.mark.slow

FIELDS = [
    "id",
    "predicted_step_time_s",
    "measured_step_time_s",
    "predicted_peak_memory_bytes",
    "measured_peak_memory_bytes",
    "note",
]


def run(published: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rows: list[Any], *options: str) -> tuple[int, list[Any]]:
    """The status, and what was written, all in this process."""
    monkeypatch.setattr(published, "predicted_rows", lambda records, report: list(map(published._predicted, records)))
    runs, out = tmp_path / "runs.json", tmp_path / "out.json"
    runs.write_text(json.dumps(rows))
    monkeypatch.setattr("sys.argv", ["published.py", str(runs), "--json", str(out), *options])
    status = published.main()
    return status, json.loads(out.read_text(), parse_constant=lambda name: pytest.fail(f"JSON has no {name}"))


def test_what_is_wrong_with_one_record_is_not_in_the_way_of_others(
    published: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = changed("config.tp", [1]) | {"id": "bad", "measured": {"peak_mem_gb": 1.0}}
    unpriced = [changed("hardware.gpu", "T4") | {"id": f"t4\n-{i}"} for i in range(7)]
    rows = [ROW, None, bad, *unpriced, changed("iter_time_s", -1.0) | {"id": 7}]
    status, found = run(published, monkeypatch, tmp_path, rows, "--each")
    assert status == 0
    assert [list(row) for row in found] == [FIELDS] * len(rows)
    by_id = {row["id"]: row for row in found}
    assert by_id["small"]["predicted_step_time_s"] == by_id["7"]["predicted_step_time_s"] > 0
    assert (by_id["small"]["measured_step_time_s"], by_id["7"]["measured_step_time_s"]) == (1.0, None)
    assert by_id["7"]["note"].endswith("iter_time_s is -1.0, and so not measured")
    assert (by_id["bad"]["measured_step_time_s"], by_id["bad"]["measured_peak_memory_bytes"]) == (1.0, 2.0**30)
    assert by_id["bad"]["note"] == "config.tp is [1]; it should be a whole number from 1 to 1,000,000,000"
    said = capsys.readouterr().out
    assert "- not predicted, 7 (t4?-0, t4?-1, t4?-2, t4?-3, t4?-4, 2 more): no profile for GPU 'T4'" in said
    assert "- not predicted, 1 (1): record 1 of the file is null" in said


def test_the_status_where_nothing_is_predicted(published: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    status, (row,) = run(published, monkeypatch, tmp_path, [None])
    assert (status, row["id"], row["predicted_step_time_s"]) == (1, "0", None)


def test_what_nobody_foresaw_is_said_without_its_insides(published: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(published, "predict", lambda record: 1 // 0)
    _, (row,) = run(published, monkeypatch, tmp_path, [ROW])
    assert row["note"].startswith("nobody foresaw a record like this (ZeroDivisionError at test_published.py:")


@pytest.mark.parametrize("out, why", [("", "is a folder"), ("no/out.json", "no folder")])
def test_where_nothing_can_be_written_is_said_before_the_work(
    published: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    out: str,
    why: str,
) -> None:
    (tmp_path / "runs.json").write_text(json.dumps([ROW]))
    monkeypatch.setattr(published, "predicted_rows", lambda *_: pytest.fail("the work has begun"))
    monkeypatch.setattr("sys.argv", ["published.py", str(tmp_path / "runs.json"), "--json", str(tmp_path / out)])
    with pytest.raises(SystemExit) as caught:
        published.main()
    assert caught.value.code == 2
    assert why in capsys.readouterr().err


def test_what_does_not_fit_is_said(
    published: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Logits of 2 x 131,072 tokens and half of 262,144 words alone are 128 GiB."""
    large = ROW | {"id": "large", "model": ROW["model"] | {"seq": 2**17, "vocab": 2**18}}
    _, rows = run(published, monkeypatch, tmp_path, [ROW, large, large | {"config": ROW["config"] | {"recompute": None}}])
    assert "does not fit" not in rows[0]["note"]
    assert rows[1]["note"].endswith("; does not fit 80 GiB")
    assert "recompute not stated: full, as none fits; " in rows[2]["note"]
    assert "- predicted not to fit, 2 (large, large)" in capsys.readouterr().out


def note(reference: Any, row: dict[str, Any]) -> str:
    from records import read_record  # type: ignore[import-not-found]

    return str(reference.predict(read_record(row)).note)


def test_schedules_that_are_priced_as_others(reference: Any) -> None:
    from records import read_record

    config = ROW["config"] | {"global_batch": 32}
    notes = {
        name: note(reference, ROW | {"config": config | {"schedule": name, "vpp": vpp}})
        for name, vpp in (("1F1B", 1), ("gpipe", 1), ("zero-bubble", 1), ("interleaved-1f1b", 2), ("dualpipe", 2))
    }
    plain = "stack mcore-2024 assumed, as the source is not known"
    assert notes == dict.fromkeys(("1F1B", "gpipe", "interleaved-1f1b"), plain) | {
        "zero-bubble": f"{plain}; schedule zero-bubble priced as 1f1b",
        "dualpipe": f"{plain}; schedule dualpipe priced as interleaved",
    }
    lean, wide = (
        reference.predict(read_record(ROW | {"config": config | {"schedule": name}})).peak_memory_bytes for name in ("1f1b", "gpipe")
    )
    assert lean < wide, "GPipe keeps all micro-batches"
    unstated = config | {"schedule": "interleaved-1f1b", "vpp": None}
    assert "chunks not stated: 4 for each rank" in note(reference, ROW | {"source": "Megatron-LM images", "config": unstated})
    sharded = {"zero": 3, "tp": 1, "sp": False, "dp": 4, "global_batch": 16}
    assert "; zero 3 priced as zero 1, as a pipeline" in note(reference, ROW | {"config": config | sharded})


def test_links_between_the_shipped_ones(reference: Any, depths: Any) -> None:
    """Half of 50 Gb/s is half the bandwidth; inside of a node nobody asks for it."""
    from records import read_record

    config = ROW["config"] | {"tp": 1, "pp": 1, "dp": 16, "sp": False, "global_batch": 32}

    def row(gbps: float | None, **hardware: int) -> dict[str, Any]:
        return ROW | {"config": config, "hardware": ROW["hardware"] | {"n_gpus": 16, "inter_gbps": gbps} | hardware}

    slow, shipped, fast = (depths.links_of(read_record(row(gbps)))[1] for gbps in (25, 50, 1600))
    assert slow.bandwidth == shipped.bandwidth / 2
    assert (slow.lanes, slow.inside) == (shipped.lanes, shipped.inside) == (8, shipped.inside)
    assert fast.lanes * fast.bandwidth == pytest.approx(fast.inside.bandwidth), "no more than a node carries"
    assert "; 25 Gb/s per GPU scaled from ib-50" in note(reference, row(25))
    assert "scaled" not in note(reference, row(50)) + note(reference, row(25, gpus_per_node=16)) + note(reference, row(None))


@pytest.mark.parametrize(
    "source, gpu, precision, stack",
    [
        ("yanring/Megatron-MoE-ModelZoo best_practice", "H100", "bf16", "mcore-2024"),
        ("NVIDIA/Megatron-LM README.md", "A100", "fp16", "megatron-2021"),
        ("NVIDIA/Megatron-LM README.md", "H100", "bf16", "mcore-2024"),
        ("arXiv 2104.04473 Table 1", "A100", "bf16", "megatron-2021"),
        ("MosaicML/LLM-Foundry", "H100", "bf16", "fsdp-2023"),
        ("nobody", "V100-32GB", "fp16", "megatron-2021 assumed, as the source is not known"),
        ("nobody", "A100", "fp16", "megatron-2021 assumed, as the source is not known"),
        ("nobody", "A100", "bf16", "mcore-2024 assumed, as the source is not known"),
        ("NVIDIA/dgxc-benchmarking", "V100", "fp16", "megatron-2021 assumed, as mcore-2024 has no attention for V100"),
    ],
)
def test_the_stack_of_a_source(reference: Any, source: str, gpu: str, precision: str, stack: str) -> None:
    row = ROW | {
        "source": source,
        "hardware": ROW["hardware"] | {"gpu": gpu},
        "config": ROW["config"] | {"precision": precision},
    }
    assert note(reference, row).split(";")[0] == f"stack {stack}"


def test_shares_of_experts_come_out_even(reference: Any) -> None:
    row = ROW | {"model": ROW["model"] | {"moe": MOE}, "config": ROW["config"] | {"ep": 3}}
    with pytest.raises(ValueError, match=r"ep = 3 ranks share 8 experts; it should divide them, and dp \* cp \* tp = 4"):
        note(reference, row)
