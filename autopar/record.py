"""`model.record()`: what real steps did, as events, as text beside the prediction, and as a trace of all ranks."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist
from torch import nn

from autopar.errors import PlanError
from autopar.measured import PURPOSES, Communication, Measured, Recording
from autopar.plan import Plan
from autopar.runtime.clocks import clock_offset_s
from autopar.runtime.groups import host_group, local_device
from autopar.runtime.meeting import meet
from autopar.runtime.module import Engine
from autopar.runtime.profiling import Profiling
from autopar.runtime.recorder import Recorder
from autopar.runtime.resolve import resolve
from autopar.show.measured import recorded_processes
from autopar.show.page import plan_html
from autopar.show.record import Compared, compare_collectives, compare_phases, log_text, record_text
from autopar.show.trace import trace_json


class Record:
    """Steps of a parallel model, recorded on this rank inside of a ``with``.

    A *step* goes from the first call of the model to the end of the optimizer's step. Each collective and message is an event of
    `events`; what the rank computed and waited for is in ``recording.spans``. A collective begins when it is issued, or when its group is
    free for it, and ends when its future is completed. Collectives of DTensors, as for the norm of gradients, and of loaders are no events.

    For example:

        with model.record() as record:
            for batch in batches:
                train(batch)
        print(record)                    # predicted beside measured
        print(record.log())              # all communication of the last step
        record.save_trace("trace.json")  # on all ranks
        record.to_html("steps.html")     # on all ranks: measured beside predicted

    Recording is each rank's own: others need not record, or not as many steps. An error that leaves the ``with`` leaves nothing recorded.
    Predicted figures are those of the plan of most steps (a call with another batch, or an evaluation, has a plan of its own), and are
    compared with these steps alone.

    With ``model.record(profiler=True)`` the profiler of torch runs beside it: its ops stand in ``recording.profiled`` and in traces.
    """

    def __init__(self, model: nn.Module, engine: Engine, profiler: bool) -> None:
        self._model, self._engine, self._has_profiler = model, engine, profiler
        self._recorder: Recorder | None = None
        self._recording: Recording | None = None
        self._plans: list[list[Plan]] = []

    def __enter__(self) -> Record:
        other = self._engine.recorder
        if other is not None and not other.yields:
            raise PlanError("this model is being recorded already; leave the other `with model.record()` first")
        device = local_device(self._engine.device_type)
        profiling = Profiling(device) if self._has_profiler else None
        if profiling is not None:
            profiling.start()
        if other is not None:
            other.close()
        self._recording = None
        self._recorder = Recorder(device, self._model.parameters(), profiling=profiling)
        self._engine.recorder = self._recorder
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._recorder is not None
        self._engine.recorder = None
        self._recorder.close()
        profiling = self._recorder.profiling
        if profiling is not None:
            profiling.stop()
        if error is None:
            self._recording, self._plans = resolve(self._recorder, dist.get_rank()), self._recorder.plans
            if profiling is not None:
                profiled, not_told = profiling.profiled(self._recording.origin_s, self._recording.steps)
                self._recording = replace(self._recording, profiled=profiled, not_told=not_told)
        self._recorder = None

    @property
    def recording(self) -> Recording:
        """Spans, events and steps of this rank; PlanError before the ``with`` is left."""
        if self._recording is None:
            raise PlanError("nothing is recorded yet: a record is complete when its `with` is left without an error")
        return self._recording

    @property
    def plan(self) -> Plan:
        """The plan of most of the steps, or else the one in force; PlanError if there was no call yet."""
        plans = [each[0] for each in self._plans]
        most = max(plans, key=lambda plan: sum(other is plan for other in plans), default=self._engine.plan)
        if most is None:
            raise PlanError("there is no plan yet: the model has not been called")
        return most

    @property
    def _compared(self) -> Recording:
        """The steps of `plan`."""
        plan = self.plan
        return self.recording.only([i for i, plans in enumerate(self._plans) if all(each is plan for each in plans)])

    @property
    def events(self) -> tuple[Communication, ...]:
        """All communication of this rank, in order of start."""
        return self.recording.events

    @property
    def phases(self) -> tuple[Compared, ...]:
        """Forward, backward, exposed communication, update and others: seconds of a step, the largest surprise first; last the step."""
        return compare_phases(self._compared, self.plan)

    @property
    def surprises(self) -> tuple[Compared, ...]:
        """The same of collectives by what they move."""
        return compare_collectives(self._compared, self.plan)

    def log(self, step: int = -1, *, phases: Collection[str] = (), width: int = 160) -> str:
        """All communication of a step as a table; milliseconds count from its begin.

        Args:
            step: number of the recorded step; negative ones count from the end.
            phases: to tell (`measured.Communication`); empty for all.
            width: of the table.

        Raises:
            PlanError: there is no such step, or no such phase.
        """
        steps, unknown = self.recording.steps, sorted({*phases} - {*PURPOSES})
        if unknown:
            raise PlanError(f"phases are {', '.join(PURPOSES)}; got {', '.join(map(repr, unknown))}")
        if not -len(steps) <= step < len(steps):
            raise PlanError(f"there is no step {step}: {len(steps)} were recorded, from 0")
        number = range(len(steps))[step]
        events = [event for event in self.events if event.step == number and (not phases or event.phase in phases)]
        return log_text(events, self.plan, begin_s=steps[number][0], width=width)

    def __str__(self) -> str:
        if not self.recording.steps:
            return f"rank {self.recording.rank}: no steps were recorded"
        left_out = len(self.recording.steps) - len(self._compared.steps)
        text = record_text(self._compared, self.plan)
        return f"{text}\n\n{left_out} of the recorded steps had calls of another plan, and are left out" if left_out else text

    def save(self, path: str | Path, *, alone: bool = False) -> None:
        """Write the steps of all ranks, for ``plan.to_html(html, record=path)`` and ``autopar show --record``; arguments and errors as of
        `save_trace`. All ranks call this; rank 0 writes."""
        measured = self._gathered("save", self._compared, alone=alone)
        if measured is not None:
            _write(path, measured.to_json())

    def to_html(self, path: str | Path, *, alone: bool = False) -> None:
        """Write the page of the plan (`autopar.Plan.to_html`) with the steps of all ranks beside the predicted one; arguments and errors
        as of `save_trace`. All ranks call this; rank 0 writes."""
        measured = self._gathered("to_html", self._compared, alone=alone)
        if measured is not None:
            _write(path, plan_html(self.plan, measured=checked(measured, self.plan)))

    def save_trace(self, path: str | Path, *, alone: bool = False) -> None:
        """Write the steps of all ranks on one timeline as a Chrome trace, for Perfetto (ui.perfetto.dev) or ``chrome://tracing``.

        All ranks call this; rank 0 writes. The clocks of ranks are aligned by asking for the time (`runtime.clocks`).

        Args:
            path: of the file; its folder is made.
            alone: write what this rank recorded, on this rank, and ask no other.

        Raises:
            RankError: some ranks did not come, which it names.
        """
        measured = self._gathered("save_trace", self.recording, alone=alone)
        if measured is not None:
            _write(path, trace_json(recorded_processes(measured.recordings)))

    @property
    def measured(self) -> Measured:
        """What this rank recorded of steps under `plan`, as `save` writes it of all."""
        return self._measured((self._compared,))

    def _measured(self, recordings: Sequence[Recording]) -> Measured:
        return Measured(self.plan.model, str(self.plan.grid), self.plan.graph_hash, tuple(recordings))

    def _gathered(self, method: str, own: Recording, *, alone: bool) -> Measured | None:
        """What all ranks recorded, on the clock of rank 0; None on ranks that have nothing to write."""
        if dist.get_world_size() == 1 or alone:
            return self._measured((own,))
        remedy = f"call it on all ranks, after a `with model.record()` on each, or {method}(path, alone=True) for this one"
        meet(f"record.{method}", remedy)
        group = host_group("records")
        own = replace(own, origin_s=own.origin_s - clock_offset_s(group))
        recordings: list[Any] = [own] * dist.get_world_size()
        dist.gather_object(own, recordings if dist.get_rank() == 0 else None, group=group)
        return self._measured(recordings) if dist.get_rank() == 0 else None


def _write(path: str | Path, text: str) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text, encoding="utf-8")


def measured_of(record: Record | str | Path, plan: Plan) -> Measured:
    """A record of steps under a plan, or the file in which `Record.save` wrote it.

    Raises:
        PlanError: it is no record, it is of another plan, or no step is in it.
    """
    if isinstance(record, Record):
        return checked(record.measured, plan)
    return checked(Measured.from_json(Path(record).read_text(encoding="utf-8")), plan)


def checked(measured: Measured, plan: Plan) -> Measured:
    """What was measured; PlanError if it is of another plan, or a rank has no step."""
    for what, was, own in (
        ("model", measured.model, plan.model),
        ("grid", measured.grid, str(plan.grid)),
        ("graph hash", measured.graph_hash, plan.graph_hash),
    ):
        if was != own:
            raise PlanError(f"the record is not of this plan: its {what} is {was}, that of the plan is {own}; give the plan that was run")
    if not all(recording.steps for recording in measured.recordings):
        raise PlanError("the record has no whole step: record at least one call of the model with its backward and optimizer step")
    return measured
