"""`autopar.log`: step time, tokens/s, MFU and exposed communication of a training loop, as rows for people and for files."""

from __future__ import annotations

import resource
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.callers import user_level
from autopar.capture.trace import flatten_call
from autopar.errors import LogError
from autopar.plan import Plan
from autopar.runtime.groups import local_device
from autopar.runtime.module import Engine, ParallelModule
from autopar.runtime.recorder import Recorder
from autopar.runtime.reports import Report, Reports
from autopar.runtime.resolve import waits_s
from autopar.runtime.sample import Sampler
from autopar.show.log import FIGURES, header_text
from autopar.show.sinks import sink_of
from autopar.tokens import Amount, amount_of

FORMAT = 1
FLUSH_S = 5.0
"""How long the last row waits for the reports of other ranks."""

Number = float | torch.Tensor


@dataclass(slots=True)
class _Interval:
    """What has happened since the last row; ``begin_s`` is None in the first step of all, which is not timed."""

    begin_s: float | None = None
    paused_s: float = 0.0
    steps: int = 0
    amount: int = 0
    predicted_s: float = 0.0
    predicted_exposed_s: float = 0.0
    at_peak_s: float = 0.0


@dataclass(slots=True)
class _Step:
    """The calls of the model since the last step: what they were given, and what their plans predict."""

    amount: int = 0
    plans: list[Plan] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Pending:
    """A row that waits for the reports of other ranks."""

    number: int
    step: int
    row: dict[str, float]


class Log:
    """What `autopar.log` gives. Also a ``with``, which ends it.

    Attributes:
        steps: how many there were, before a resume too.
        total: tokens or samples (``unit``) of all of them.
    """

    def __init__(self, model: nn.Module, *, every: int, sinks: Sequence[object], sample: bool) -> None:
        self.steps, self.total, self.unit = 0, 0, ""
        self._engine: Engine | None = model._autopar if isinstance(model, ParallelModule) else None
        self._name, self._every = type(model).__name__.removeprefix("Parallel" if self._engine is not None else ""), every
        self._sinks = [sink_of(each) for each in sinks]
        self._reports = Reports(_name_of_log(self._engine))
        self._is_first = not dist.is_initialized() or dist.get_rank() == 0
        self._device = _device_of(model, self._engine)
        self._hook = model.register_forward_hook(self._count, with_kwargs=True)
        self._sampler = Sampler(model, self._engine) if sample and self._engine is not None else None
        self._sampled: Recorder | None = None
        self._interval, self._step = _Interval(), _Step()
        self._values: Mapping[str, Number] = {}
        self._pending: list[_Pending] = []
        self._is_open = self._is_paused = self._is_told = False
        self._is_closed = False
        if self._sampler is not None:
            self._sampler.begin()  # the first step only learns the graphs

    def __enter__(self) -> Log:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._close(is_whole=error is None)

    def step(self, *, tokens: int | None = None, **values: Number) -> None:
        """End a step, after the optimizer's; all ranks call this.

        Args:
            tokens: of this step, of all ranks together, where counting the batch would be wrong (padding, packed rows).
            values: of the script, by name: numbers, or tensors of one element, which are read for the steps of rows alone, so that no other
                step waits for its loss. Rank 0's are written.

        Raises:
            LogError: a value is no number, or its name is one of the log's own; the log is closed.
        """
        if self._is_closed:
            raise LogError("this log is closed; make another with autopar.log")
        _check(values)
        self.steps += 1
        self._values = {name: value.detach() if isinstance(value, torch.Tensor) else value for name, value in values.items()}
        if tokens is not None:
            self.unit = "tokens"
            self._count_amount(Amount(int(tokens) - self._step.amount, self.unit))
        sampled = self._sampler.end() if self._sampler is not None else None
        self._sampled = sampled or self._sampled
        if self._interval.begin_s is not None:
            self._add_step()
        self._step, is_row = _Step(), self.steps % self._every == 0
        if is_row:
            self._report()
        if self._interval.begin_s is None:  # the first: it has planned, compiled and warmed up
            self._interval, self._sampled = _Interval(self._now_s()), None
            is_row = True
        self._deliver()
        if is_row and self._sampler is not None:
            self._sampler.begin()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Count nothing of what is done inside (an evaluation, a checkpoint), neither time nor tokens nor communication."""
        begin_s, self._is_paused = self._now_s(), True
        try:
            if self._sampler is None:
                yield
            else:
                with self._sampler.paused():
                    yield
        finally:
            self._is_paused = False
            self._interval.paused_s += self._now_s() - begin_s

    def close(self) -> None:
        """Write the row of the steps since the last, and close files. A ``with`` does it."""
        self._close(is_whole=True)

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` needs to go on: steps, and tokens or samples. For ``autopar.save(extra={"log": log})``."""
        return {"format": FORMAT, "steps": self.steps, "total": self.total, "unit": self.unit}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after the step of a `state_dict`. Rows of later steps, which are done again, are taken out of CSV files and TensorBoard.

        Raises:
            LogError: the state is none of a log.
        """
        if state.get("format") != FORMAT or not {"steps", "total", "unit"} <= state.keys():
            raise LogError(f"not the state of a log of format {FORMAT}: it has {', '.join(map(str, state)) or 'nothing'}")
        self.steps, self.total, self.unit = state["steps"], state["total"], state["unit"]
        self._interval, self._step, self._pending = _Interval(), _Step(), []
        for sink in self._sinks if self._is_first else ():
            sink.rewind(self.steps)

    # Counting

    def _count(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: object) -> None:
        """A call of the model; those that are not differentiated are none of training."""
        if self._is_paused or not (model.training and torch.is_grad_enabled()):
            return
        self._count_amount(amount_of([x for x in flatten_call(args, kwargs)[0] if isinstance(x, torch.Tensor)]))
        if self._engine is not None and self._engine.called is not None:
            self._step.plans.append(self._engine.called)

    def _count_amount(self, amount: Amount) -> None:
        self.unit = self.unit or amount.unit
        self.total += amount.count
        self._step.amount += amount.count

    def _add_step(self) -> None:
        """To the interval; the plan's update is once a step, however many calls it has."""
        interval, predictions = self._interval, [plan.prediction for plan in self._step.plans]
        interval.steps += 1
        interval.amount += self._step.amount
        interval.predicted_s += sum(p.step_time_s - p.update_s for p in predictions) + (predictions[-1].update_s if predictions else 0.0)
        interval.predicted_exposed_s += sum(p.exposed_comm_s for p in predictions)
        interval.at_peak_s += sum(p.mfu * p.step_time_s for p in predictions)

    def _now_s(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    # Rows

    def _report(self) -> None:
        """Tell rank 0 of the steps since the last row, and begin anew."""
        interval, now_s = self._interval, self._now_s()
        elapsed_s = now_s - interval.begin_s - interval.paused_s if interval.begin_s is not None and interval.steps else 0.0
        wait_s, idle_s = waits_s(self._sampled) if self._sampled is not None and interval.steps else (None, None)
        step_s = elapsed_s / interval.steps if elapsed_s else None
        report = Report(self.steps, step_s, wait_s, idle_s, _peak_bytes(self._device))
        number = self._reports.put(report)
        if self._is_first:
            own = {name: float(value) for name, value in self._values.items()}
            row = {"step": self.steps, "unix_time_s": time.time(), **own, **self._rates(elapsed_s)}
            self._pending.append(_Pending(number, self.steps, row))
        if interval.begin_s is not None:
            self._interval, self._sampled = _Interval(now_s), None

    def _rates(self, elapsed_s: float) -> dict[str, float]:
        """What rank 0 knows by itself."""
        interval, unit, row = self._interval, self.unit, dict[str, float]()
        if unit:
            row[unit] = self.total
        if not elapsed_s:
            return row
        if interval.predicted_s:
            row["predicted_step_time_s"] = interval.predicted_s / interval.steps
        if interval.amount:
            row[f"{unit}_per_s"] = interval.amount / elapsed_s
            row[f"{unit}_per_s_per_device"] = interval.amount / elapsed_s / self._reports.num_ranks
        if interval.at_peak_s:
            row["mfu"] = interval.at_peak_s / elapsed_s
        if interval.predicted_s and self._sampled is not None:
            row["predicted_exposed_comm_s"] = interval.predicted_exposed_s / interval.steps
        return row

    def _deliver(self, patience_s: float = 0.0) -> None:
        """Write the rows of which all ranks have told, and those that a later row follows."""
        until_s = time.monotonic() + patience_s
        while self._pending:
            pending = self._pending[0]
            reports = self._reports.get(pending.number, pending.step)
            lacking = sorted({*range(self._reports.num_ranks)} - {*reports})
            if lacking and time.monotonic() < until_s:
                time.sleep(0.01)
                continue
            if lacking and len(self._pending) == 1 and not self._is_closed:
                return
            if lacking and not self._is_told:
                self._is_told = True
                warnings.warn(
                    f"ranks {lacking} have told nothing of step {pending.step}: figures are of the others. Make the log, and call its "
                    "step, on all ranks; only rank 0 writes",
                    stacklevel=user_level(),
                )
            self._pending.pop(0)
            self._write(pending.row | _of_ranks(reports, self._device, self._engine))

    def _write(self, row: dict[str, float]) -> None:
        if not self._is_open:
            self._is_open = True
            for sink in self._sinks:
                sink.open(header_text(self._name, self.unit or "tokens", self._engine.plan if self._engine is not None else None))
        ordered = {name: row[name] for name in ("step", "unix_time_s")} | row
        for sink in self._sinks:
            sink.write(ordered)

    def _close(self, *, is_whole: bool) -> None:
        if self._is_closed:
            return
        self._hook.remove()
        self._is_told = self._is_told or not is_whole  # then ranks may well be silent
        if self._sampler is not None:
            self._sampler.end()
        try:
            if is_whole and self._interval.steps:
                self._report()
            self._is_closed = True
            self._deliver(FLUSH_S if is_whole else 0.0)
        finally:
            self._is_closed = True
            for sink in self._sinks if self._is_open else ():
                sink.close()


def _of_ranks(reports: Mapping[int, Report], device: torch.device, engine: Engine | None) -> dict[str, float]:
    """What the reports of ranks come to."""
    row: dict[str, float] = {"num_ranks": len(reports)}
    times = {rank: report.step_time_s for rank, report in reports.items() if report.step_time_s is not None}
    if times:
        row["step_time_s"] = times[min(times)]
    if len(times) > 1:
        slowest = max(times, key=times.__getitem__)
        row |= {"median_step_time_s": median(times.values()), "slowest_step_time_s": times[slowest], "slowest_rank": slowest}
    waits = {rank: report.wait_s for rank, report in reports.items() if report.wait_s is not None}
    idle = {rank: report.idle_s for rank, report in reports.items() if report.idle_s is not None}
    if waits:
        row["exposed_comm_s"] = median(waits.values())
    if waits and engine is not None and engine.plan is not None and engine.plan.pipeline.stages > 1:
        row["bubble_s"] = median(idle.values())
    if len(waits) > 1:
        row["least_waiting_rank"] = min(waits, key=lambda rank: waits[rank] + idle[rank])
    name = "peak_memory_bytes" if device.type == "cuda" else "peak_resident_bytes"
    row[name] = max(report.peak_memory_bytes for report in reports.values())
    return row


def _device_of(model: nn.Module, engine: Engine | None) -> torch.device:
    """Where it runs, which with offload is not where its parameters lie."""
    if engine is not None:
        return local_device(engine.device_type)
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def _peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _check(values: Mapping[str, object]) -> None:
    for name, value in values.items():
        if name in FIGURES:
            raise LogError(f"{name} is a figure of autopar.log itself; call that value something else")
        if isinstance(value, DTensor):
            raise LogError(f"{name} is a DTensor, of which a rank has a part; give its full_tensor(), or model.clip_grad_norm_ for a norm")
        if isinstance(value, torch.Tensor):
            if value.numel() != 1 or value.is_complex():
                shape = tuple(value.shape)
                raise LogError(f"{name} is a tensor of shape {shape} ({value.dtype}); a value is one number: give its mean, say")
        elif isinstance(value, str | bytes) or not hasattr(value, "__float__") or getattr(value, "ndim", False):
            raise LogError(f"{name} is {value!r} of type {type(value).__name__}; a value is a number")


def _name_of_log(engine: Engine | None) -> str:
    """The same on all ranks: models are made parallel on all of them, in one order."""
    if engine is None:
        return ""
    engine.logs += 1
    return f"log/{engine.number}/{engine.logs}"


def log(model: nn.Module, *, every: int = 10, to: object = "stdout", sample: bool = True) -> Log:
    """Log the steps of a training loop: seconds of a step, tokens/s, MFU, exposed communication, peak memory, and the script's own values.

    All ranks make the log and call its `Log.step`; rank 0 writes. A row is of the steps since the one before; it is written as soon as all
    ranks have told of it, a step later as a rule, and no rank waits for another. The first step is not timed, as it plans and compiles.

    Example::

        with autopar.log(model, to=["stdout", "metrics.csv"]) as log:
            for batch in loader:
                ...
                optimizer.step()
                log.step(loss=loss, lr=scheduler.get_last_lr()[0])

    Figures of a row; what is not known is left out:

    ==========================  ========================================================================================================
    ``step_time_s``             seconds of a step on rank 0, loading and Python included, on average; with several ranks also the median
                                and the slowest, and ``predicted_step_time_s`` of the plan, once more for each call that accumulates
    ``tokens_per_s``            elements of the first integer input of the global batch; where that has one a row, or there is none, rows:
                                ``samples_per_s``. Both also ``_per_device``, and since the beginning as ``tokens`` or ``samples``
    ``mfu``                     flops of the model's contractions, forward and backward, none computed again, over what all devices could
                                do in the time (Chowdhery et al. 2022, appendix B), by the rate of the fastest matmul in the plan's profile
    ``exposed_comm_s``          seconds in which a rank did nothing but wait for collectives, in one step of the interval, as
                                `model.record()` tells it; the median of ranks. ``bubble_s``: for other stages. ``least_waiting_rank`` is
                                the one that the others wait for
    ``peak_memory_bytes``       of torch's allocator, on CUDA, the most of all ranks; on CPUs ``peak_resident_bytes`` of the process
    ``num_ranks``               how many told of it
    ==========================  ========================================================================================================

    Args:
        model: a parallel model, or any model of a single process, of which neither MFU nor communication nor predictions are known.
        every: steps between rows.
        to: ``"stdout"`` (lines, through tqdm where the script has loaded it), a path of a CSV file (gone on with if it is there; new names
            add columns), ``"tensorboard:folder"``, a `logging.Logger`, a function of a dict, an object with ``.log(dict, step=)`` such as
            a run of wandb, or a list of these.
        sample: record the one step in ``every`` that tells communication; False for none, which costs nothing.

    Raises:
        LogError: ``every`` is no number of steps; something cannot be logged to; the model is not parallel, and there are several ranks.
    """
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise LogError(f"every is {every!r}; it is a number of steps, 1 or more")
    if not isinstance(model, nn.Module):
        raise LogError(f"model is a {type(model).__name__}; it is the torch.nn.Module that autopar.parallelize returned")
    if not isinstance(model, ParallelModule) and dist.is_initialized() and dist.get_world_size() > 1:
        raise LogError(f"{type(model).__name__} is not parallel, and each process would log its own; give it to autopar.parallelize")
    sinks = list(to) if isinstance(to, list | tuple) else [to]
    if not sinks:
        raise LogError("to is empty; name what is written to, as \"stdout\"")
    return Log(model, every=every, sinks=sinks, sample=sample)
