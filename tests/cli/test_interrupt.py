"""Ctrl-C while a plan is searched: the best so far where it is asked for, and KeyboardInterrupt everywhere else."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
import transformers
from rich.console import Console

from autopar import api, cli
from autopar.cli.progress import Display, Interrupts, end_at_once, interruptible, width
from autopar.errors import PlanError
from autopar.planner.document import Plan
from autopar.report import Best, Counted, Report, Stopping
from autopar.solve.search import Search
from tests import models
from tests.test_cli import MLP, run

pytestmark = pytest.mark.slow


def interrupt_after(kind: type[str], times: int = 1) -> tuple[Report, list[str]]:
    """A report that is interrupted once, when it has been told so many lines of a kind; and what it is told."""
    lines: list[str] = []

    def report(text: str) -> None:
        lines.append(text)
        if type(text) is kind and sum(type(line) is kind for line in lines) == times:
            raise KeyboardInterrupt

    return report, lines


def planned(report: Report, on_interrupt: str = "best", **settings: object) -> Plan:
    example = models.mlp(hidden=64, intermediate=256, batch=16)
    return api.plan(example.model, 4, example.batch, on_interrupt=on_interrupt, report=report, **settings)  # type: ignore[arg-type]


def test_the_best_so_far_is_given() -> None:
    report, lines = interrupt_after(Best)
    plan = planned(report)
    assert plan.stats.is_interrupted
    assert any(note.startswith("interrupted: the best of 1 shape tried") for note in plan.notes)
    assert "the search was interrupted" in str(plan)
    assert isinstance(lines[-1], Stopping)
    whole = planned(lambda _: None)
    assert not whole.stats.is_interrupted
    assert len(whole.alternatives) > len(plan.alternatives)
    assert Plan.from_json(plan.to_json()).stats.is_interrupted


def test_it_is_raised_unless_asked() -> None:
    with pytest.raises(KeyboardInterrupt):
        planned(interrupt_after(Best)[0], "raise")
    with pytest.raises(PlanError, match="'raise' or 'best', got 'keep'"):
        planned(lambda _: None, "keep")


def test_it_is_raised_where_there_is_no_plan_yet() -> None:
    with pytest.raises(KeyboardInterrupt):
        planned(interrupt_after(str)[0])
    with pytest.raises(KeyboardInterrupt):
        planned(interrupt_after(Counted)[0])


def test_a_changed_request_keeps_to_it() -> None:
    plan = planned(lambda _: None)
    assert plan.question is not None
    with mock.patch.object(Search, "report_best", side_effect=KeyboardInterrupt):
        assert plan.with_(optimizer="sgd").stats.is_interrupted


def deep(report: Report, on_interrupt: str = "best") -> Plan:
    config = transformers.GPT2Config(n_layer=12, n_embd=64, n_head=4, vocab_size=96, n_positions=16, use_cache=False)
    with torch.device("meta"):
        model, tokens = transformers.GPT2LMHeadModel(config), torch.zeros(16, 16, dtype=torch.int64)
    return api.plan(model, "2x2", {"input_ids": tokens, "labels": tokens}, on_interrupt=on_interrupt, report=report)


def test_sketches_of_a_deep_model_are_made_whole() -> None:
    report, lines = interrupt_after(Best)
    plan = deep(report)
    assert plan.stats.is_interrupted
    assert any("sketched shapes whole" in line for line in lines)
    assert len(plan.parameters) > 12 * 8


def test_a_deep_model_without_a_sketch() -> None:
    with pytest.raises(KeyboardInterrupt):
        deep(interrupt_after(Counted)[0])


def interrupted_plan(*, kind: type[str]) -> Callable[..., Plan]:
    """`api.plan`, interrupted after the first line of a kind."""
    real = api.plan

    def plan(*args: object, report: Report, **kwargs: object) -> Plan:
        seen: list[str] = []

        def told(text: str) -> None:
            report(text)
            seen.append(text)
            if type(text) is kind and sum(type(line) is kind for line in seen) == 1:
                raise KeyboardInterrupt

        return real(*args, report=told, **kwargs)  # type: ignore[arg-type]

    return plan


def test_exit_codes(tmp_path: Path) -> None:
    asked = ("plan", MLP, "--real", "--mesh", "4", "--out", tmp_path / "plan.json")
    with mock.patch.object(api, "plan", interrupted_plan(kind=Best)):
        result, data = run(*asked), run(*asked, "--json")
    assert (result.exit_code, data.exit_code, data.stderr) == (3, 3, "")
    assert "note: interrupted" in result.stdout
    assert Plan.load(tmp_path / "plan.json").stats.is_interrupted
    with mock.patch.object(api, "plan", interrupted_plan(kind=Counted)):
        assert run(*asked).exit_code == 130


@pytest.mark.usefixtures("listening")
def test_a_signal_is_heard_and_raised() -> None:
    lines: list[str] = []

    def interrupted() -> None:
        with interruptible(lines.append, "stopping"):
            os.kill(os.getpid(), signal.SIGINT)
            threading.Event().wait(5)

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert lines == ["stopping"]
    assert signal.set_wakeup_fd(-1) == -1


def test_a_lost_interrupt_is_raised_at_the_next_line() -> None:
    lines: list[str] = []
    interrupts = Interrupts(lines.append, "stopping")
    source, told = os.pipe()
    os.write(told, bytes([signal.SIGINT]))
    os.close(told)
    interrupts.listen(source)
    with pytest.raises(KeyboardInterrupt):
        interrupts("capturing")
    interrupts(Stopping("heeded"))
    interrupts("and on")
    assert lines == ["stopping", "heeded", "and on"]
    os.close(source)


def test_the_second_ends_the_process_at_once() -> None:
    source, told = os.pipe()
    os.write(told, bytes([signal.SIGINT, signal.SIGCHLD, signal.SIGINT]))
    os.close(told)
    with mock.patch.object(os, "_exit") as end:
        Interrupts(lambda _: None, "stopping").listen(source)
    end.assert_called_once_with(130)
    os.close(source)


def test_the_display_keeps_the_best_in_view() -> None:
    display = Display()
    display(Counted("trying d0=2", 1, 4))
    display(Best("step 1 ms"))
    display("solving [2]")
    console = Console(width=100, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(display)
    text = console.export_text()
    assert "solving [2]" in text
    assert "best so far: step 1 ms" in text
    assert display.bar.tasks[0].completed == 1


@pytest.mark.parametrize("code", [None, 0, 1, 3, 130])
def test_commands_end_at_once(code: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "app", mock.Mock(side_effect=SystemExit(code)))
    monkeypatch.setattr(cli, "end_at_once", end := mock.Mock())
    with pytest.raises(SystemExit):
        cli.main()
    assert end.call_args_list == [mock.call(code or 0)]


def test_streams_that_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in ``autopar show plan.json >&-``, where Python has None in their place."""
    monkeypatch.setattr(cli, "app", lambda **_: print(width()))
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    cli.main()
    for stream in (sys.stdout, sys.stderr):
        assert stream.name == os.devnull
        stream.close()


def test_the_end_at_once_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    done = mock.Mock()
    monkeypatch.setattr(atexit, "_run_exitfuncs", done.at_exit)
    monkeypatch.setattr(sys, "stdout", done.stdout)
    monkeypatch.setattr(sys, "stderr", done.stderr)
    monkeypatch.setattr(os, "_exit", done.end)
    end_at_once(3)
    assert done.mock_calls == [mock.call.at_exit(), mock.call.stdout.flush(), mock.call.stderr.flush(), mock.call.end(3)]
