"""The examples that start their own processes, as a user starts them, on the smallest models."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module ``sst2_lab``."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    yield import_module("sst2_lab")
    sys.modules.pop("sst2_lab", None)


def arguments(lab: ModuleType, *given: str) -> Namespace:
    parsed: Namespace = lab.parse(given)
    return parsed


@pytest.mark.slow
def test_the_laboratory_trains_saved_weights_by_two_plans(lab: ModuleType, tmp_path: Path) -> None:
    """Weights and data come from paths, as those of a user."""
    folder, data, out = tmp_path / "weights", tmp_path / "SST-2", tmp_path / "out"
    made = lab.Lab.of(arguments(lab, "--layers", "1", "--dim", "16"))
    made.build().save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "film", "and"]) + "\n")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "DistilBertTokenizer"}))
    data.mkdir()
    (data / "train.tsv").write_text("".join(lab.SAMPLE.read_text().splitlines(keepends=True)[:9]))
    sizes = ["--steps", "4", "--batch", "4", "--length", "8", "--device", "a100-80gb"]
    command = [sys.executable, str(EXAMPLES / "sst2_lab.py"), "--weights", str(folder), "--data", str(data), "--out", str(out), *sizes]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "Losses of both plans agree" in done.stdout
    assert (out / "report.txt").is_file()
    logs = {name: " ".join((out / f"{name}.log").read_text().split()) for name in ("DDP", "ZeRO-3")}
    assert "reduce all_reduce dp" in logs["DDP"]
    assert " gather " not in logs["DDP"]
    assert "reduce reduce_scatter dp" in logs["ZeRO-3"]
    assert "gather all_gather dp" in logs["ZeRO-3"]
    for name in logs:
        events = json.loads((out / f"{name}.trace.json").read_text())["traceEvents"]
        assert {event["pid"] for event in events} == {0, 1}


@pytest.mark.parametrize(
    "text, message",
    [
        (None, "there is no .*train.tsv"),
        ("a film\t1\n", r"begins with \['a film', '1'\], not with the headings"),
        ("sentence\tlabel\na film\t1\nanother\tgood\n", r"line 3 of .* is \['another', 'good'\]"),
        ("sentence\tlabel\n", "has no sentences"),
    ],
)
def test_wrong_data_is_explained(lab: ModuleType, tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "train.tsv").write_text(text)
    with pytest.raises(lab.LabError, match=message):
        lab.read_sentences(tmp_path)


def test_wrong_weights_are_explained(lab: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(lab.LabError, match=r"has no config.json, or no \*.safetensors"):
        lab.Lab.of(arguments(lab, "--weights", str(tmp_path)))
    lab.Lab.of(arguments(lab, "--layers", "1", "--dim", "16")).build().save_pretrained(tmp_path)
    with pytest.raises(lab.LabError, match=r"neither tokenizer.json nor vocab.txt"):
        lab.Lab.of(arguments(lab, "--weights", str(tmp_path)))
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"model_type": "bert"}))
    with pytest.raises(lab.LabError, match=r"a model of type 'bert'"):
        lab.Lab.of(arguments(lab, "--weights", str(tmp_path)))


def test_the_sample_has_as_many_sentences_of_each_label(lab: ModuleType) -> None:
    labels = [label for _, label in lab.read_sentences(lab.SAMPLE)]
    assert len(labels) == 128
    assert sum(labels) == 64
    batch = next(lab.Lab.of(arguments(lab, "--batch", "4", "--length", "8")).batches())
    assert {name: tuple(x.shape) for name, x in batch.items()} == {"input_ids": (4, 8), "attention_mask": (4, 8), "labels": (4,)}


def test_headless_weights_are_told_from_those_of_a_classifier(lab: ModuleType, tmp_path: Path) -> None:
    model = lab.Lab.of(arguments(lab, "--layers", "1", "--dim", "16")).build()
    model.save_pretrained(tmp_path / "whole")
    model.distilbert.save_pretrained(tmp_path / "headless")
    assert lab.Weights.of(tmp_path / "whole").is_classifier
    assert not lab.Weights.of(tmp_path / "headless").is_classifier
