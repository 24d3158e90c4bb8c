"""What the shell completes."""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path

import pytest

from autopar import cli
from autopar.cli import complete
from autopar.cli.complete import BashLine
from autopar.cli.inputs import GPT_CONFIG
from autopar.cli.options import OPTIMIZERS
from autopar.cost.updates import OPTIMIZER_STATE_BYTES
from autopar.solve.manual import Manual


def completed(words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> set[str]:
    """What bash is told at the end of a line, of which it has split the words as it does."""
    split = words.replace(":", "\n:\n").replace("=", "\n=\n").replace(" ", "\n").replace("\n\n", "\n")
    asked = {"COMP_WORDS": split, "COMP_CWORD": str(split.count("\n")), complete.VARIABLE: "complete_bash"}
    for name, value in asked.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code in (0, None)
    return set(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    "line, values",
    [
        ("autopar pl", {"plan"}),
        ("autopar plan hf:g", {"gpt2"}),
        ("autopar plan hf:gpt2 --cluster 4x8:h", {"h100", "h200"}),
        ("autopar plan hf:gpt2 --cluster=4x8:h1", {"h100"}),
        ("autopar plan hf:gpt2 --cluster lo", {"local"}),
        ("autopar plan hf:gpt2 --cluster 4x8:l4+2x8:v", {"v100"}),
        ("autopar plan hf:gpt2 --cluster 4x8:h100@ef", {"h100@efa-400"}),
        ("autopar plan --gpt layers=2,hi", {"2,hidden="}),
        ("autopar plan gpt:layers=2,hi", {"2,hidden="}),
        ("autopar verify hf:gpt2 --manual tp=2,d", {"2,dp="}),
        ("autopar plan hf:gpt2 --optimizer sgd", {"sgd", "sgd_momentum"}),
        ("autopar plan hf:gpt2 --offload optimizer+p", {"optimizer+parameters"}),
        ("autopar plan hf:gpt2 --precision f", {"fp16", "fp32"}),
        ("autopar rules aten.embedd", {"aten.embedding"}),
        ("autopar show p", {"plan.json"}),
        ("autopar show s", {"sub/"}),
        ("autopar plan hf:sub/c", {"sub/config.json"}),
        ("autopar plan hf:gpt2 --mem", {"--memory-limit"}),
    ],
)
def test_bash(
    line: str, values: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sub").mkdir()
    for name in ("plan.json", "plain.txt", "sub/config.json"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    assert completed(line, monkeypatch, capsys) == values


def test_another_shell_is_given_whole_values(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv(complete.VARIABLE, "complete_zsh")
    monkeypatch.setenv("_TYPER_COMPLETE_ARGS", "autopar plan hf:gpt2 --cluster 4x8:h1")
    monkeypatch.setattr(cli, "end_at_once", lambda code: None)
    with pytest.raises(SystemExit):
        cli.main()
    assert "4x8" in capsys.readouterr().out


def test_words_before_the_cursor_stay_as_they_are() -> None:
    line = BashLine.of({"COMP_WORDS": "autopar\nplan\nhf\n:\ngpt2\n--mesh\ndp\n=\n2", "COMP_CWORD": "4"})
    assert line == BashLine(("autopar", "plan", "hf:gpt2", "--mesh", "dp=2"), 2)
    assert line.shortened("hf:gpt2") == "gpt2"


def test_a_folder_that_is_not_there_completes_nothing() -> None:
    assert complete.files(".json")(os.path.join("no", "such", "p")) == []


def test_the_lists_are_those_of_what_is_completed() -> None:
    assert set(complete.GPT_SIZES) == set(GPT_CONFIG)
    assert {name.removesuffix("=") for name in complete.MANUAL} == {field.name for field in fields(Manual)}
    assert set(OPTIMIZERS) == set(OPTIMIZER_STATE_BYTES)
