"""`autopar.log` on real ranks: what all of them tell, and what does not stop them; and records that not all ranks make."""

from __future__ import annotations

import json
import time
import warnings
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import autopar
from autopar import Manual
from autopar.cost.device import DeviceProfile, MatmulSample
from autopar.cost.machine import LinkProfile, MachineProfile
from autopar.errors import PlanError, RankError
from autopar.measured import Recording
from autopar.plan import Prediction
from autopar.runtime import meeting
from autopar.show.record import Compared
from tests import models
from tests.marks import exhaustive
from tests.pool import RankPool

pytestmark = pytest.mark.slow

DEVICE = DeviceProfile("test", 2**33, (MatmulSample(64, 64, 64, "float32", 1e9),), 1e9, 1e-6, "for tests")
PROFILE = MachineProfile(DEVICE, (LinkProfile(alpha_s=1e-6, bandwidth=1e9),) * 2)
LATE_S = 1.5  # far more than a busy machine makes another rank late
SAMPLED = (1, 3)  # of `log_and_resume`: what its first two rows tell of
Row = dict[str, float]


@dataclass
class Loop:
    """A training loop, on this rank."""

    batch: dict[str, torch.Tensor]
    model: Any
    optimizer: torch.optim.Optimizer
    rows: list[Row] = field(default_factory=list)

    @staticmethod
    def of() -> Loop:
        given, batch = models.mlp(layers=1)
        model = autopar.parallelize(given, 4, plan=Manual(dp=4), profile=PROFILE, compare_batches=0)
        return Loop(batch, model, torch.optim.SGD(model.parameters(), 0.1))

    def step(self, log: autopar.Log | None = None, *, calls: int = 1) -> None:
        for _ in range(calls):
            loss = self.model(**self.batch)
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if log is not None:
            log.step(loss=loss)


@dataclass(frozen=True)
class Found:
    """What a rank has seen."""

    rows: list[Row]
    is_sampling: list[bool]
    prediction: Prediction
    samples: int
    recorded: int


def log_and_resume(rank: int, folder: str) -> Found:
    loop = Loop.of()
    engine = loop.model._autopar
    is_sampling = []
    with autopar.log(loop.model, every=3, to=loop.rows.append) as log:
        for step in range(6):
            is_sampling.append(engine.recorder is not None)
            time.sleep(LATE_S * (rank == 1 and step in SAMPLED))
            loop.step(log, calls=2)
        with loop.model.record() as record:  # in the step that would be sampled
            loop.step(log, calls=2)
        for _ in range(2):
            loop.step(log, calls=2)
        autopar.save(folder, loop.model, extra={"log": log})
    assert engine.recorder is None
    with autopar.log(loop.model, every=2, to=loop.rows.append) as log:
        autopar.load(folder, loop.model, extra={"log": log})
        for _ in range(3):
            loop.step(log)
    samples = next(iter(loop.batch.values())).shape[0]
    return Found(loop.rows, is_sampling, loop.model.plan.prediction, samples, len(record.recording.steps))


def test_ranks_tell_rank_0_of_their_steps(ranks: RankPool, tmp_path: Path) -> None:
    first, *others = ranks.run(log_and_resume, str(tmp_path / "run"))
    assert all(not other.rows for other in others)
    assert all(found.is_sampling == [True, True, False, True, False, False] for found in (first, *others))
    assert all(found.recorded == 1 for found in (first, *others))
    rows, plan = first.rows, first.prediction
    assert [row["step"] for row in rows] == [3, 6, 9, 10, 12]
    assert [row["samples"] for row in rows] == [first.samples * calls for calls in (6, 12, 18, 19, 21)]
    assert all(row["num_ranks"] == 4 for row in rows)
    assert ["exposed_comm_s" in row for row in rows] == [True, True, False, False, True]
    for row in rows[:3]:
        step_s = row["step_time_s"]
        assert step_s <= row["slowest_step_time_s"] >= row["median_step_time_s"] > 0
        assert row["predicted_step_time_s"] == pytest.approx(2 * (plan.step_time_s - plan.update_s) + plan.update_s)
        assert row["mfu"] == pytest.approx(2 * plan.mfu * plan.step_time_s / step_s)
        assert row["samples_per_s_per_device"] == pytest.approx(2 * first.samples / step_s / 4)
    for row in rows[:2]:
        assert row["exposed_comm_s"] > LATE_S / 2
        assert row["least_waiting_rank"] == 1  # for which the others wait


def misuse(rank: int, folder: str) -> tuple[list[Row], list[str], int, str, tuple[Compared, ...], int, str, str]:
    """A log and a record on rank 0 alone; a record of calls of two kinds, and one that an error has left."""
    loop = Loop.of()
    loop.step()
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        log = autopar.log(loop.model, every=1, to=loop.rows.append) if rank == 0 else None
        for _ in range(3):
            loop.step(log)
        if log is not None:
            with mock.patch("autopar.log.FLUSH_S", 0.5):
                log.close()
        texts = [str(each.message) for each in warned if issubclass(each.category, UserWarning)]
    number, refused = 0, ""
    if rank == 0:
        with loop.model.record() as record:
            loop.step()
        record.save_trace(Path(folder, "new", "alone.json"), alone=True)
        meeting.PATIENCE = timedelta(seconds=1)
        with pytest.raises(RankError) as alone:
            record.save_trace(Path(folder, "all.json"))
        refused = str(alone.value)
        number = len(json.loads(Path(folder, "new", "alone.json").read_text())["traceEvents"])
        meeting.PATIENCE = timedelta(minutes=5)
    else:
        loop.step()
    with loop.model.record() as record:
        for calls in (2, 2):
            loop.step(calls=calls)
        with torch.no_grad():
            loop.model(**loop.batch)
    record.save_trace(Path(folder, "together.json"))
    with pytest.raises(PlanError) as early:
        record.log(step=7)
    with pytest.raises(KeyError), loop.model.record() as left:
        raise KeyError
    with pytest.raises(PlanError) as nothing:
        print(left)
    assert loop.model._autopar.recorder is None
    loop.step()
    recording: Recording = record.recording
    assert recording.calls == (2, 2, 1)
    text = f"{early.value}\n{record}"
    return loop.rows, texts, number, refused, record.phases, len(record._compared.steps), text, str(nothing.value)


@exhaustive
def test_ranks_that_log_or_record_alone_stop_nobody(ranks: RankPool, tmp_path: Path) -> None:
    found = ranks.run(misuse, str(tmp_path))
    rows, texts, number, refused, *_ = found[0]
    assert [(row["step"], row["num_ranks"]) for row in rows] == [(1, 1), (2, 1), (3, 1)]
    assert len(texts) == 1
    assert "ranks [1, 2, 3] have told nothing of step 1" in texts[0]
    assert number > 0
    assert "ranks [1, 2, 3] did not come to record.save_trace within 1 s; call it on all ranks" in refused
    assert {event["pid"] for event in json.loads((tmp_path / "together.json").read_text())["traceEvents"]} == {0, 1, 2, 3}
    for *_, phases, count, text, nothing in found:
        assert count == 2
        assert "there is no step 7: 3 were recorded" in text
        assert "1 of the recorded steps had calls of another plan, and are left out" in text
        assert "nothing is recorded yet" in nothing
        assert {row.name for row in phases} >= {"forward", "backward", "step"}
