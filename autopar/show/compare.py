"""Plans side by side: one row for each, the automatic one and those written by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.plan import Prediction
from autopar.show.table import table_text
from autopar.units import bytes_text, count_text, seconds_text, share_text


@dataclass(frozen=True, slots=True)
class Row:
    """One plan of a comparison. The figures of ``prediction`` can be read from the row itself.

    Args:
        name: what the plan is called.
        fits: whether it is legal and fits the memory; ``reason`` says why not.
        prediction: predicted figures; None if there is no plan.
        measured_step_time_s: seconds per step when it was run; None if it was not.
        moved_bytes: bytes of all collectives of a step, per rank.
        is_short_of_memory: whether it does not fit for want of memory.
    """

    name: str
    fits: bool
    reason: str
    prediction: Prediction | None
    measured_step_time_s: float | None
    moved_bytes: int
    is_short_of_memory: bool = False

    @property
    def step_time_s(self) -> float:
        return self.prediction.step_time_s if self.prediction else float("nan")

    @property
    def tokens_per_s(self) -> float:
        return self.prediction.tokens_per_s if self.prediction else float("nan")

    @property
    def mfu(self) -> float:
        return self.prediction.mfu if self.prediction else float("nan")

    @property
    def bubble_fraction(self) -> float:
        return self.prediction.bubble_fraction if self.prediction else float("nan")

    @property
    def exposed_comm_s(self) -> float:
        return self.prediction.exposed_comm_s if self.prediction else float("nan")

    @property
    def peak_memory_bytes(self) -> tuple[int, ...]:
        return self.prediction.peak_memory_bytes if self.prediction else ()


def _cells(row: Row, best: float) -> list[str]:
    if row.prediction is None:
        return [row.name, *["-"] * 9]
    measured = row.measured_step_time_s
    return [
        row.name,
        seconds_text(row.step_time_s) if row.fits else f"({seconds_text(row.step_time_s)})",
        f"{row.step_time_s / best:.2f}" if row.fits and best else "-",
        seconds_text(measured) if measured is not None else "-",
        count_text(row.tokens_per_s),
        share_text(row.mfu) if row.mfu else "-",
        share_text(row.bubble_fraction),
        seconds_text(row.exposed_comm_s),
        bytes_text(max(row.peak_memory_bytes, default=0)),
        bytes_text(row.moved_bytes),
    ]


def compare_text(rows: Sequence[Row], width: int = 100) -> str:
    """The table; rows that do not fit have their step time in brackets and their reason below."""
    best = min((row.step_time_s for row in rows if row.fits and row.prediction), default=0.0)
    columns = ("plan", ">step", ">to best", ">measured", ">tokens/s", ">MFU", ">bubble", ">exposed", ">peak", ">moved")
    text = table_text(columns, [_cells(row, best) for row in rows], width=width, wide=("plan",))
    reasons = [f"{row.name} does not fit: {row.reason}" for row in rows if not row.fits]
    return "\n".join([text, *reasons])
