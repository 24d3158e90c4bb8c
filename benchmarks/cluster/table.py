"""The rows side by side, and what they say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations

from rows import Measured

LOSS_TOLERANCE = 1e-3
"""By how much of it a loss may differ from those of other rows."""


def kendall_tau(pairs: Sequence[tuple[float, float]]) -> float:
    """Kendall's tau-b (1945): agreeing less disagreeing pairs of pairs, over the geometric mean of those that differ in each."""
    agreement, left, right = 0, 0, 0
    for (a, x), (b, y) in combinations(pairs, 2):
        first, second = (a > b) - (a < b), (x > y) - (x < y)
        agreement, left, right = agreement + first * second, left + abs(first), right + abs(second)
    return agreement / (left * right) ** 0.5 if left and right else float("nan")


def table(rows: Mapping[str, Measured | str]) -> str:
    """Markdown that reads well as it is."""
    columns = ["plan", "predicted", "measured", "runs", "spread", "others", "busy", "memory", "between hosts", "inside", "loss"]
    cells = [columns]
    for name, row in rows.items():
        if isinstance(row, str):
            cells.append([name, "-", "failed", "", "", "", "", "", "", "", ""])
            continue
        predicted = f"{row.predicted_s:.2f} s" if row.predicted_s is not None else "-"
        sent = (f"{num_bytes / 1e6:.1f} MB" for num_bytes in (row.across_bytes, row.inside_bytes))
        memory = f"{row.resident_bytes / 2**20:.0f} MiB"
        cells.append(
            [
                name,
                predicted,
                f"{row.step_s:.2f} s",
                str(row.runs),
                f"{row.spread:.0%}",
                f"{row.others:.0%}",
                f"{row.busy:.0%}",
                memory,
                *sent,
                f"{row.loss:.4f}",
            ]
        )
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    lines = ["| " + " | ".join(_aligned(line, widths)) + " |" for line in cells]
    rule = "|".join("-" * (width + 1) + (":" if i else "-") for i, width in enumerate(widths))
    return "\n".join([lines[0], f"|{rule}|", *lines[1:]])


def _aligned(line: Sequence[str], widths: Sequence[int]) -> list[str]:
    return [
        cell.rjust(width) if i else cell.ljust(width) for i, (cell, width) in enumerate(zip(line, widths, strict=True))
    ]


def verdict(rows: Mapping[str, Measured | str]) -> str:
    """What the table says: order, winners, failures."""
    done = {name: row for name, row in rows.items() if isinstance(row, Measured)}
    measured = {name: row.step_s for name, row in done.items()}
    predicted = {name: row.predicted_s for name, row in done.items() if row.predicted_s is not None}
    lines = []
    if len(predicted) > 1:
        tau = kendall_tau([(seconds, measured[name]) for name, seconds in predicted.items()])
        lines.append(
            f"Kendall's tau-b of predicted and measured times over {len(predicted)} rows of autopar: {tau:.2f}"
        )
    for title, times in (("Fastest", measured), ("Predicted to be fastest", predicted)):
        best = sorted(times, key=lambda name: times[name])[:4]
        lines += [f"{title}: {', '.join(f'{name} {times[name]:.2f} s' for name in best)}"] if best else []
    if "auto" in done:
        place = 1 + sorted(measured.values()).index(measured["auto"])
        lines.append(f"The automatic plan is number {place} of {len(done)}: {done['auto'].plan[1]}")
    losses = sorted(row.loss for row in done.values())
    for name, row in done.items():
        usual = losses[len(losses) // 2]
        if not abs(row.loss - usual) <= LOSS_TOLERANCE * usual:
            lines.append(f"WRONG: {name} trains to loss {row.loss:.4f}, the others to {usual:.4f}")
    lines += [f"Failed: {name}: {row}" for name, row in rows.items() if isinstance(row, str)]
    return "\n".join(f"- {line}" for line in lines)
