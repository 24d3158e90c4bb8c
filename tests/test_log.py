"""`autopar.log` of a model of one process: what is counted and timed, where rows go, how a log goes on, and what is refused."""

from __future__ import annotations

import csv
import logging
import sys
import time
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import LogError
from autopar.show.log import FIGURES, row_text
from autopar.tokens import Amount, amount_of

Row = dict[str, float]


class Clock:
    """A second for each reading of the time."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def perf_counter(self) -> float:
        self.now_s += 1.0
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    known = SimpleNamespace(perf_counter=made.perf_counter, time=time.time, monotonic=time.monotonic, sleep=time.sleep)
    monkeypatch.setattr(import_module("autopar.log"), "time", known)
    return made


def train(model: nn.Module, log: autopar.Log, steps: int, batch: torch.Tensor | None = None, **values: Any) -> None:
    for _ in range(steps):
        model(torch.ones(6, 8) if batch is None else batch).sum().backward()
        log.step(**values)


def linear() -> nn.Module:
    return nn.Linear(8, 2)


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_rows_are_of_the_steps_since_the_last_and_the_first_is_not_timed(clock: Clock) -> None:
    rows: list[Row] = []
    model = linear()
    with autopar.log(model, every=3, to=rows.append) as log:
        train(model, log, 1)
        clock.now_s += 4.0
        train(model, log, 3, loss=1.5)
        model.eval()
        model(torch.ones(99, 8))
        model.train()
        with torch.no_grad():
            model(torch.ones(99, 8))
        train(model, log, 3, loss=torch.tensor([2.5], requires_grad=True))
        assert (log.steps, log.total, log.unit) == (7, 42, "samples")
    assert [row["step"] for row in rows] == [3, 6, 7]  # the last when the log ends
    assert [row.get("loss") for row in rows] == [1.5, 2.5, 2.5]
    assert rows[0]["step_time_s"] == (4 + 1) / 2  # steps 2 and 3; a second is the reading itself
    assert rows[0]["samples_per_s"] == rows[0]["samples_per_s_per_device"] == 2 * 6 / 5
    assert [row["samples"] for row in rows] == [18, 36, 42]
    assert rows[1]["step_time_s"] == 1 / 3
    assert rows[0]["peak_resident_bytes"] > 2**20
    assert not {"mfu", "exposed_comm_s", "predicted_step_time_s", "tokens_per_s"} & set().union(*rows)


def test_what_is_done_in_a_pause_counts_nothing(clock: Clock) -> None:
    rows: list[Row] = []
    model = linear()
    with autopar.log(model, every=2, to=rows.append) as log:
        train(model, log, 1)
        with log.pause():
            model(torch.ones(50, 8))
            clock.now_s += 100.0
        train(model, log, 1)
    assert rows[0]["samples"] == 12
    assert rows[0]["step_time_s"] == 2  # readings of the pause and of the row


def test_calls_that_accumulate_are_one_step_and_tokens_can_be_given() -> None:
    rows: list[Row] = []
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 2))
    ids = torch.zeros(3, 5, dtype=torch.long)
    with autopar.log(model, every=1, to=rows.append) as log:
        for _ in range(2):
            model(ids)
        log.step()
        model(ids)
        log.step(tokens=11)
    assert [row["tokens"] for row in rows] == [30, 41]
    assert "tokens_per_s" not in rows[0]
    assert rows[1]["tokens_per_s"] > 0


@pytest.mark.parametrize(
    "inputs, amount",
    [
        ([torch.ones(4, 7)], Amount(4, "samples")),
        ([torch.ones(4, 7), torch.zeros(4, dtype=torch.long)], Amount(4, "samples")),
        ([torch.ones(4, 7), torch.zeros(4, 9, dtype=torch.int)], Amount(36, "tokens")),
        ([torch.tensor(1.0)], Amount(1, "samples")),
        ([], Amount(1, "samples")),
    ],
)
def test_tokens_are_integers_of_two_dims(inputs: list[torch.Tensor], amount: Amount) -> None:
    assert amount_of(inputs) == amount


def test_csv_files_are_gone_on_with_and_get_new_columns(tmp_path: Path) -> None:
    path, model = tmp_path / "runs" / "metrics.csv", linear()
    with autopar.log(model, every=2, to=str(path)) as log:
        train(model, log, 4, loss=0.5)
    with path.open("a") as file:
        file.write("6,17")  # a process that died in the middle of a line
    with autopar.log(model, every=2, to=path) as log:
        log.load_state_dict({"format": 1, "steps": 4, "total": 24, "unit": "samples"})
        train(model, log, 2, loss=0.25, lr=1e-3)
    lines = path.read_text().splitlines()
    assert lines[0] == ",".join([*FIGURES, "loss", "lr"])
    assert [(row["step"], row["samples"], row["loss"], row["lr"]) for row in read(path)] == [
        ("2", "12", "0.5", ""),
        ("4", "24", "0.5", ""),
        ("6", "36", "0.25", "0.001"),
    ]
    assert [child.name for child in path.parent.iterdir()] == ["metrics.csv"]


def test_steps_that_are_done_again_are_logged_once(tmp_path: Path) -> None:
    path, model = tmp_path / "metrics.csv", linear()
    with autopar.log(model, every=1, to=path) as log:
        train(model, log, 2, loss=1.0)
        state = log.state_dict()
        train(model, log, 3, loss=1.0)
    with autopar.log(model, every=1, to=path) as log:
        log.load_state_dict(state)
        train(model, log, 2, loss=2.0)
    assert [(row["step"], row["loss"]) for row in read(path)] == [("1", "1"), ("2", "1"), ("3", "2"), ("4", "2")]
    with autopar.log(model, every=1, to=path) as log:  # another run: nothing is lost
        train(model, log, 1, loss=3.0)
    assert [row["step"] for row in read(path)] == ["1", "2", "3", "4", "1"]


class Run:
    """As one of wandb."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, Row]] = []

    def log(self, data: Row, step: int) -> None:
        self.seen.append((step, data))


def test_runs_functions_and_loggers_get_rows(caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]) -> None:
    run, rows, model = Run(), list[Row](), linear()
    with (
        caplog.at_level(logging.INFO),
        autopar.log(model, every=2, to=[run, rows.append, logging.getLogger("training"), "stdout"]) as log,
    ):
        train(model, log, 2, loss=0.125)
    ((step, data),) = run.seen
    assert step == 2
    assert {"step": step} | data == rows[0]
    header, line = capsys.readouterr().out.splitlines()
    assert [record.message for record in caplog.records] == [header, line]
    assert header.startswith("Linear, not parallelized: no prediction, MFU or exposed communication; samples are rows")
    assert line.startswith("step 2 | loss 0.125 | ")
    assert "samples/s" in line


def test_lines_go_above_the_bars_of_tqdm(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setitem(sys.modules, "tqdm", SimpleNamespace(tqdm=SimpleNamespace(write=lines.append)))
    model = linear()
    with autopar.log(model, every=1) as log:
        train(model, log, 1)
    assert [line.split()[0] for line in lines] == ["Linear,", "step"]


def test_tensorboard_reads_what_is_logged(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    model = linear()
    with autopar.log(model, every=1, to=f"tensorboard:{tmp_path}") as log:
        train(model, log, 3, loss=1.0)
        state = {"format": 1, "steps": 1, "total": 6, "unit": "samples"}
        log.load_state_dict(state)
        train(model, log, 1, loss=2.0)
    found = EventAccumulator(str(tmp_path))
    found.Reload()
    assert [(event.step, event.value) for event in found.Scalars("loss")] == [(1, 1.0), (2, 2.0)]
    assert found.Scalars("samples_per_s") == []  # the steps that were timed are done again, the first of them untimed
    assert "step" not in found.Tags()["scalars"]


@pytest.fixture
def no_tensorboard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    for name in [name for name in sys.modules if name.startswith("torch.utils.tensorboard")]:
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.usefixtures("no_tensorboard")
def test_tensorboard_that_is_not_installed_is_named() -> None:
    with pytest.raises(LogError, match=r"needs TensorBoard, which is not installed .* pip install tensorboard"):
        autopar.log(linear(), to="tensorboard:runs/x")


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"every": 0}, "every is 0; it is a number of steps"),
        ({"every": True}, "every is True"),
        ({"to": []}, "to is empty"),
        ({"to": "metrics.txt"}, "cannot log to 'metrics.txt'; to is \"stdout\", a path that ends in .csv"),
        ({"to": ["stdout", 3]}, "cannot log to 3 of type int"),
        ({"to": "tensorboard:"}, "names no folder"),
    ],
)
def test_wrong_arguments_are_explained(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(LogError, match=message):
        autopar.log(linear(), **settings)


def test_a_file_of_something_else_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "people.csv"
    path.write_text("name,age\nada,36\n")
    with pytest.raises(LogError, match=r"has no column step .it begins 'name,age'"):
        autopar.log(linear(), to=path)
    assert path.read_text() == "name,age\nada,36\n"


@pytest.mark.parametrize(
    "values, message",
    [
        ({"step_time_s": 1.0}, "step_time_s is a figure of autopar.log itself"),
        ({"loss": torch.ones(2)}, r"loss is a tensor of shape \(2,\).*; a value is one number"),
        ({"loss": "low"}, "loss is 'low' of type str; a value is a number"),
        ({"loss": None}, "loss is None of type NoneType"),
        ({"loss": torch.ones(3).numpy()}, "of type ndarray; a value is a number"),
    ],
)
def test_wrong_values_are_explained(values: dict[str, Any], message: str) -> None:
    with autopar.log(linear(), every=99, to=print) as log, pytest.raises(LogError, match=message):
        log.step(**values)


def test_an_error_ends_a_log_and_leaves_the_model_as_it_was() -> None:
    rows: list[Row] = []
    model = linear()
    log = autopar.log(model, every=2, to=rows.append)

    def fail() -> None:
        with log:
            train(model, log, 3)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert [row["step"] for row in rows] == [2]
    assert not model._forward_hooks
    with pytest.raises(LogError, match="this log is closed"):
        log.step()
    with pytest.raises(LogError, match="not the state of a log"):
        log.load_state_dict({"step": 3})


def test_a_line_names_the_slowest_rank_if_it_is_far_behind() -> None:
    row = {
        "step": 120, "unix_time_s": 1.0, "loss": 2.25, "tokens": 9.0, "step_time_s": 0.025, "predicted_step_time_s": 0.024,
        "median_step_time_s": 0.025, "slowest_step_time_s": 0.03, "slowest_rank": 3, "tokens_per_s": 1e6, "tokens_per_s_per_device": 1.25e5,
        "mfu": 0.382, "exposed_comm_s": 0.003, "predicted_exposed_comm_s": 0.002, "peak_memory_bytes": 2**30,
    }  # fmt: skip
    times = "25 ms, slowest 30 ms on rank 3, predicted 24 ms"
    rates = "1 M tokens/s, 125 k a device | MFU 38.2% | exposed comm 3 ms, predicted 2 ms | peak 1 GiB"
    assert row_text(row) == f"step 120 | loss 2.25 | {times} | {rates}"
    assert "slowest" not in row_text(row | {"slowest_step_time_s": 0.0251})
