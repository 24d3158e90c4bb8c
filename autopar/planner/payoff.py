"""Whether it would pay to compress gradients: the same plan, priced with each way to do so. Nothing is chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.compression import Compression
from autopar.plan import Plan
from autopar.planner.question import Question
from autopar.planner.request import shapes_in_force
from autopar.show.table import table_text
from autopar.solve.decide import PLAN_GAP, Decision
from autopar.solve.recompute import LEVELS
from autopar.solve.search import Search
from autopar.solve.traffic import gradient_traffic
from autopar.units import bytes_text, seconds_text


@dataclass(frozen=True, slots=True)
class Payoff:
    """A plan with its gradients compressed in one way, as predicted.

    Args:
        compress: what to give to `parallelize`; empty: as they are.
        step_time_s: of a step; ``saved_s`` of it is less than without compression.
        sent_bytes: that a rank sends in a step to reduce gradients.
        num_compressed: reductions of a step that travel compressed, of ``num_reductions``.
        peak_memory_bytes: of the rank that needs most, with what is kept from step to step.
    """

    compress: str
    step_time_s: float
    saved_s: float
    sent_bytes: float
    num_compressed: int
    num_reductions: int
    peak_memory_bytes: int

    @property
    def pays(self) -> bool:
        """Whether it saves more of a step than prices are certain of."""
        return self.saved_s > PLAN_GAP * (self.step_time_s + self.saved_s)


def find_payoffs(plan: Plan, decision: Decision, question: Question, kinds: Sequence[str | Compression]) -> list[Payoff]:
    """Price a plan without compression and with each of some kinds, the fastest first.

    Args:
        plan: the plan; what is decided in it stays.
        decision: of the plan.
        question: that it answers.
    """
    shape = shapes_in_force(plan, question.session)[0]
    again = max((op.recompute or "none" for op in plan.ops), key=LEVELS.index, default="none")
    levels = [stage.recompute for stage in plan.stages] or [again]
    search = Search(question.session.normal_for, question.machine_of, question.limit, optimizer=plan.optimizer)
    rows: list[Payoff] = []
    for how in (None, *map(Compression.of, kinds)):
        staged = search.compressed(shape, levels, decision, how)
        traffic = gradient_traffic(staged.decision)
        saved_s = rows[0].step_time_s - staged.step_time_s if rows else 0.0
        peak = int(max(staged.rank_bytes))
        rows.append(
            Payoff(str(how or ""), staged.step_time_s, saved_s, traffic.sent_bytes, traffic.num_compressed, traffic.count, peak)
        )
    return sorted(rows, key=lambda row: row.step_time_s)


def payoff_text(rows: Sequence[Payoff], width: int) -> str:
    """A table, and what it says."""
    cells = [
        [
            row.compress or "none",
            seconds_text(row.step_time_s),
            f"{100 * row.saved_s / (row.step_time_s + row.saved_s):+.1f}%" if row.compress else "",
            bytes_text(row.sent_bytes),
            f"{row.num_compressed} of {row.num_reductions}",
            bytes_text(row.peak_memory_bytes),
        ]
        for row in rows
    ]
    table = table_text(("gradients", ">step", ">saved", ">sent by a rank", ">compressed", ">memory"), cells, width=width)
    paying = ", ".join(row.compress for row in rows if row.pays)
    said = f"would pay: {paying}; all are lossy" if paying else "none would pay"
    return f"{table}\n{said}"
