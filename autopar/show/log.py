"""Rows of `autopar.log` as lines of text."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.plan import Plan
from autopar.units import bytes_text, count_text, seconds_text, share_text

Row = Mapping[str, float]
"""Figures and the script's own values by name; what is not known is not there."""

FIGURES = (
    "step", "unix_time_s", "tokens", "samples",
    "step_time_s", "median_step_time_s", "slowest_step_time_s", "slowest_rank", "predicted_step_time_s",
    "tokens_per_s", "tokens_per_s_per_device", "samples_per_s", "samples_per_s_per_device", "mfu",
    "exposed_comm_s", "predicted_exposed_comm_s", "bubble_s", "least_waiting_rank",
    "peak_memory_bytes", "peak_resident_bytes", "num_ranks",
)  # fmt: skip
"""All columns of autopar's own, in the order in which they stand."""

NOTABLE = 0.02
"""Part of a step by which the slowest rank must be behind the median to be named."""


def row_text(row: Row) -> str:
    """``step 120 | loss 2.301 | 25.2 ms, predicted 24.8 ms | 162 k tokens/s, 20.3 k a device | MFU 38.2% | ...``"""
    own = [f"{name} {value:.6g}" for name, value in row.items() if name not in FIGURES]
    parts = [f"step {row['step']:.0f}", "  ".join(own), _times(row), _rates(row)]
    parts += [f"MFU {share_text(row['mfu'])}"] if "mfu" in row else []
    parts += [_waits(row)]
    for name, what in (("peak_memory_bytes", "peak"), ("peak_resident_bytes", "resident")):
        parts += [f"{what} {bytes_text(row[name])}"] if name in row else []
    return " | ".join(part for part in parts if part)


def _times(row: Row) -> str:
    if "step_time_s" not in row:
        return ""
    parts = [seconds_text(row["step_time_s"])]
    median_s, slowest_s = row.get("median_step_time_s", 0.0), row.get("slowest_step_time_s", 0.0)
    if slowest_s > (1 + NOTABLE) * median_s:
        parts.append(f"slowest {seconds_text(slowest_s)} on rank {row['slowest_rank']:.0f}")
    if "predicted_step_time_s" in row:
        parts.append(f"predicted {seconds_text(row['predicted_step_time_s'])}")
    return ", ".join(parts)


def _rates(row: Row) -> str:
    for unit in ("tokens", "samples"):
        if f"{unit}_per_s" in row:
            whole, each = row[f"{unit}_per_s"], row[f"{unit}_per_s_per_device"]
            return f"{count_text(whole)} {unit}/s" + (f", {count_text(each)} a device" if each != whole else "")
    return ""


def _waits(row: Row) -> str:
    if "exposed_comm_s" not in row:
        return ""
    text = f"exposed comm {seconds_text(row['exposed_comm_s'])}"
    if "predicted_exposed_comm_s" in row:
        text += f", predicted {seconds_text(row['predicted_exposed_comm_s'])}"
    return text + (f", bubble {seconds_text(row['bubble_s'])}" if "bubble_s" in row else "")


def header_text(model: str, unit: str, plan: Plan | None) -> str:
    """What stands above the rows: what is predicted of a step, and what the figures are of.

    Args:
        model: its class.
        unit: that is counted.
        plan: of the model; None for one that is not parallel.
    """
    counted = "elements of the first integer input" if unit == "tokens" else "rows"
    if plan is None:
        return f"{model}, not parallelized: no prediction, MFU or exposed communication; {unit} are {counted}"
    p, machine = plan.prediction, f" ({plan.machine})" if plan.machine else ""
    predicted = f"{seconds_text(p.step_time_s)} a step, {seconds_text(p.exposed_comm_s)} of it exposed communication"
    if p.mfu:
        mfu = f"MFU {share_text(p.mfu)} of the fastest matmul in the profile{machine}"
    else:
        mfu = f"no MFU, as the profile{machine} has no rate of matmuls"
    return f"{model} on {plan.grid}: predicted {predicted}, {bytes_text(max(p.peak_memory_bytes))}, {mfu}; {unit} are {counted}"

