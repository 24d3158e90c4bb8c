"""The examples of every ``--help``."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import typer

from autopar.cli import app
from autopar.cli.examples import EXAMPLES
from tests.show.plans import small_plan
from tests.test_cli import COMMANDS, run

ALL = [(name, line) for name, lines in EXAMPLES.items() for line in lines]
COMMAND_LINE = typer.main.get_command(app)


def arguments(line: str) -> list[str]:
    """What follows the name of the program."""
    words = shlex.split(line.partition(" > ")[0])
    return words[words.index("autopar") + 1 :]


def test_every_command_has_examples() -> None:
    assert set(EXAMPLES) == set(COMMANDS)


@pytest.mark.parametrize("name, line", ALL)
def test_examples_parse(name: str, line: str) -> None:
    first, *rest = arguments(line)
    assert first == name
    COMMAND_LINE.commands[name].make_context(name, rest)  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", EXAMPLES)
def test_help_shows_them(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    shown = run(name, "--help").stdout
    assert all(line in shown for line in EXAMPLES[name])


@pytest.mark.slow
@pytest.mark.parametrize("line", [line for name, line in ALL if name in ("show", "rules") and not {"--check", "--stage"} & {*line.split()}])
def test_those_that_are_quick_run(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("plan.json", "other.json"):
        small_plan().save(name)
    result = run(*(word.replace("transformer.h.0", "h.0") for word in arguments(line)))
    assert result.exit_code == 0, result.output
    if "--json" in line:
        json.loads(result.stdout)


@pytest.mark.slow
def test_a_gpt_is_explained() -> None:
    (line,) = (line for line in EXAMPLES["explain"] if "--gpt" in line)
    result = run(*arguments(line), "--batch", "4", "--sequence", "32")
    assert result.exit_code == 0, result.output
    assert "parameter 4*N" in " ".join(result.stdout.split())
