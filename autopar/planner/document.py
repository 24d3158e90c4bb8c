"""The plan as users meet it: it prints as a table, draws, explains itself, and knows the graph that it was made for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from html import escape
from pathlib import Path

import torch
from torch import fx

from autopar.compile import Normal, local_graph
from autopar.compression import SUGGESTED, Compression
from autopar.errors import PlanError
from autopar.offload import Offload
from autopar.plan import Plan as PlanRecord
from autopar.planner.damage import check_whole, load_whole
from autopar.planner.explain import explain
from autopar.planner.formula import formulas
from autopar.planner.payoff import Payoff, find_payoffs
from autopar.planner.question import Question, answer
from autopar.planner.reasons import Reasons, find_reasons
from autopar.planner.request import Batch, Grid, Wanted
from autopar.precision import Precision
from autopar.record import Record, measured_of
from autopar.show.dot import graph_svg, plan_dot
from autopar.show.files import check_ending
from autopar.show.measured import begin_of, recorded_processes, step_of
from autopar.show.page import plan_html
from autopar.show.pictures import memory_svg, timeline_svg
from autopar.show.text import plan_text
from autopar.show.timeline import about, predicted_processes
from autopar.show.trace import trace_json
from autopar.solve.decide import Decision
from autopar.solve.pins import Pin


@dataclass(frozen=True, slots=True)
class Plan(PlanRecord):
    """A plan, with what can be asked of it; what it holds is that of `autopar.plan.Plan`.

    ``normal``, ``decision`` and ``question`` are there if it was made in this process, not if it was loaded; ``question`` if `autopar.plan`
    made it.
    """

    normal: Normal | None = field(default=None, compare=False, repr=False)
    decision: Decision | None = field(default=None, compare=False, repr=False)
    question: Question | None = field(default=None, compare=False, repr=False)

    @staticmethod
    def of(
        record: PlanRecord, normal: Normal | None = None, decision: Decision | None = None, question: Question | None = None
    ) -> Plan:
        known = {f.name: getattr(record, f.name) for f in fields(PlanRecord)}
        return Plan(**known, normal=normal, decision=decision, question=question)

    @staticmethod
    def answer(question: Question) -> Plan:
        """The plan that a question asks for; the errors are those of `question.answer`."""
        return Plan.of(*answer(question), question)

    def __str__(self) -> str:
        return plan_text(self)

    def _repr_html_(self) -> str:
        """The page of `to_html`, as notebooks show it."""
        reasons = self._reasons()
        page = plan_html(self, reasons=asdict(reasons) if reasons.of else None)
        return f'<iframe srcdoc="{escape(page)}" style="width:100%;height:720px;border:1px solid #ccc"></iframe>'

    @staticmethod
    def from_json(text: str) -> Plan:
        """Inverse of `to_json`; PlanError if the text is not a plan of this version, or is damaged."""
        record = PlanRecord.from_json(text)
        check_whole(record)
        return Plan.of(record)

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read a plan that `save` wrote; PlanError if it is not one, or is damaged."""
        return Plan.of(load_whole(path))

    @property
    def graph(self) -> fx.GraphModule:
        """The normal graph, every node with its layout under ``meta["layout"]``.

        Raises:
            PlanError: the plan was loaded and not yet bound to a model.
        """
        normal = self._bound()
        copied = fx.Graph()  # other plans may share the normal graph
        copied.output(copied.graph_copy(normal.module.graph, {}))
        layouts = {op.name: " ".join(op.layout) for op in self.ops} | {p.name: " ".join(p.held) for p in self.parameters}
        for node in copied.nodes:
            placeholder = node.meta.get("placeholder")
            layout = layouts.get(placeholder.name if placeholder else node.name)
            if layout is not None:
                node.meta["layout"] = f"[{layout}]"
        return fx.GraphModule(normal.module, copied)

    def local_graph(self) -> fx.GraphModule:
        """What every rank runs before it is differentiated: local shapes, collectives as named nodes."""
        return local_graph(self._bound(), self, device=torch.device("cpu"), training=True)

    def to_dot(self, path: str | Path | None = None) -> str:
        """Graphviz text of the plan; also written to ``path`` if given."""
        text = plan_dot(self)
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text

    def to_svg(self, path: str | Path, view: str = "timeline") -> None:
        """Write a picture as SVG, for papers: it needs no browser and no matplotlib.

        Args:
            path: of the file, which ends in ``.svg``.
            view: ``timeline`` (the simulated step), ``memory`` (over the step), or ``graph``, which Graphviz draws from `to_dot`.

        Raises:
            PlanError: there is no such view; the file would have another kind's name; or ``dot`` of Graphviz, which the graph wants, is not
                installed or fails.
        """
        check_ending(path, ("", ".svg"), "SVG")
        draw = {"timeline": timeline_svg, "memory": memory_svg, "graph": graph_svg}.get(view)
        if draw is None:
            raise PlanError(f"view {view!r} is none of timeline, memory, graph")
        Path(path).write_text(draw(self), encoding="utf-8")

    def to_html(self, path: str | Path, *, explain: str | Sequence[str] = (), record: Record | str | Path | None = None) -> None:
        """Write a page to look at the plan on: graph, timeline, memory and cluster, in one file that opens from disk without a network.

        Args:
            path: of the file.
            explain: parameters and ops around whose alternatives the rest is solved again, as by `explain`; each takes as long as that
                does. ``"all"``: all of them, equal ones once. Without it, what a plan made in this process shows of each is its price as a
                formula, and the step with it alone otherwise.
            record: of steps under this plan, which the page shows beside the predicted one: of this rank (`Record`), or the file in which
                ``record.save`` wrote those of all.

        Raises:
            PlanError: there is no such parameter or op, or the plan is not bound to a model and ``explain`` names something; or the record
                is not of this plan.
        """
        measured = measured_of(record, self) if record is not None else None
        reasons = self._reasons()
        names = reasons.of if explain == "all" else [explain] if isinstance(explain, str) else explain
        texts = {name: self.explain(name) for name in dict.fromkeys(reasons.of.get(name, name) for name in names)}
        why = {name: texts[reasons.of.get(name, name)] for name in names}
        Path(path).write_text(plan_html(self, why, measured, asdict(reasons) if reasons.of else None), encoding="utf-8")

    def to_trace(self, path: str | Path, *, record: Record | str | Path | None = None) -> None:
        """Write the simulated step as a trace for https://ui.perfetto.dev or chrome://tracing: a process for each rank of the pipeline.

        Args:
            path: of the file.
            record: as for `to_html`; all its steps, the one of median length aligned with the predicted step.
        """
        processes = predicted_processes(self)
        if record is not None:
            recordings = measured_of(record, self).recordings
            begin_s = begin_of(recordings, step_of(recordings))
            first = 1 + max(recording.rank for recording in recordings)
            processes = [*recorded_processes(recordings, begin_s), *predicted_processes(self, first)]
        Path(path).write_text(trace_json(processes, about(self)), encoding="utf-8")

    def explain(self, name: str, *, formula: bool = False) -> str:
        """Why a parameter or op lies as it does: its layout against every alternative, each with the price of the whole step.

        Args:
            name: a parameter, or an op by the name of its node.
            formula: instead, what it costs a rank as formulas in the sizes of factors and axes.

        Raises:
            PlanError: there is no such parameter or op, or the plan is not bound to a model.
        """
        self._bound()
        assert self.decision is not None
        if formula:
            return str(formulas(self.decision, name))
        return str(explain(self.decision, name, plan=self))

    def compressions(self, kinds: Sequence[Compression | str] = SUGGESTED) -> list[Payoff]:
        """What the step would take if gradients travelled compressed, by each of some kinds and without (`Payoff`), the fastest first.

        The plan stays as it is; none is ever chosen, since all are lossy.

        Raises:
            PlanError: the plan was loaded, or made by `parallelize`, and the machine that it was asked for is not known.
        """
        if self.question is None or self.decision is None:
            raise PlanError(
                "this plan was loaded or made by parallelize, and its prices are not known; bind it with "
                "autopar.plan(model, cluster, batch, plan=plan)"
            )
        return find_payoffs(self, self.decision, self.question, kinds)

    def with_(
        self,
        *,
        cluster: Grid | None = None,
        batch: Batch | None = None,
        constraints: Sequence[Pin] | Pin | None = None,
        memory_limit: float | str | None = None,
        optimizer: str | None = None,
        precision: Precision | torch.dtype | str | None = None,
        offload: Offload | str | None = None,
        compress: Compression | str | None = None,
        plan: Wanted = None,
        pipeline: bool | None = None,
    ) -> Plan:
        """The plan for the same request with something changed: what is not given, or None, stays as it was.

        It is the plan that `autopar.plan` makes of the changed request, sooner: a batch of the same shapes takes the capture that there
        is, the first of another size is captured again with the size left open, for all that follow. Another memory limit also takes what
        was found without one.
        ``stats.capture_time_s`` is 0 where nothing was captured.

        Args:
            cluster: as for `autopar.plan`, as are the others. A ``profile`` of the request stays, in place of the prices of every cluster.
            constraints: in place of those of the request; ``()`` takes them away.
            offload: ``"none"`` takes it away.
            compress: ``""`` takes it away.
            plan: a configuration (`Manual`) of the request stays in force where none is given; a saved plan that was bound by it does not,
                for it answers the old question: the solver chooses anew.

        Raises:
            PlanError: the plan was loaded, or made by `parallelize`, and there is no request to change; or as `autopar.plan` raises it.
            MeshError, CaptureError, InfeasibleError: as `autopar.plan` raises them.
        """
        if self.question is None:
            raise PlanError(
                "this plan was loaded or made by parallelize, and what it was asked for is not known; "
                "make one with autopar.plan(model, cluster, batch), and change that by with_"
            )
        changed = self.question.changed(
            cluster=cluster,
            batch=batch,
            constraints=constraints,
            memory_limit=memory_limit,
            optimizer=optimizer,
            precision=precision,
            offload=offload,
            compress=compress,
            plan=plan,
            pipeline=pipeline,
        )
        return Plan.answer(changed)

    def _reasons(self) -> Reasons:
        return find_reasons(self.decision) if self.decision is not None else Reasons({}, {})

    def _bound(self) -> Normal:
        if self.normal is None or self.decision is None:
            raise PlanError("this plan was loaded and knows no graph; bind it with autopar.plan(model, cluster, batch, plan=plan)")
        return self.normal
