"""Predicted against measured: models, plans and numbers of ranks on this machine, by prices that are measured at the start.

    python benchmarks/predict_vs_measure.py [--only 'local4/*'] [--record]       (root, Linux, iproute2)

Rows are named by place, model and configuration: ``local4/gpt/dp4`` is four processes of one host, ``hosts2x2/gpt/pp4-m4`` two shaped hosts
with two each. For each place autopar measures the machine anew, then every row is run by fresh processes. Errors are predicted over
measured less one; the mean absolute one, Kendall's tau-b (1 is the same order, 0 is chance) and the memory stand below, for each place
and in all. Memory is the most that the tensors of a rank take at one time in a step, as torch's allocator counts them.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is imported
sys.path.insert(0, str(Path(__file__).parent / "cluster"))

import argparse
import datetime
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatch

from hosts import Hosts, Report
from rows import Measured, measure_steps, parallelized, quiet
from run import Progress, Runner, commit
from table import kendall_tau
from workloads import WORKLOADS

import autopar

RECORDS = Path(__file__).parent / "records"
STEPS = 5
PLACES = {"local1": (1, 1), "local2": (1, 2), "local4": (1, 4), "hosts2x2": (2, 2)}
"""Hosts, and ranks on each."""
Manual = autopar.Manual
ALONE = {"whole": Manual(), "m4": Manual(microbatches=4)}
AGAIN = {level.replace(":1/2", "-half"): Manual(recompute=level) for level in ("pointwise", "selective", "full:1/2", "full")}
PAIRS_AGAIN = {
    "tp2-sequences-pointwise": Manual(tp=2, sequence_parallel=True, recompute="pointwise"),
    "pp2-m4-full-half": Manual(pp=2, microbatches=4, recompute="full:1/2"),
}
PAIRS = {"dp2": Manual(dp=2), "tp2": Manual(tp=2), "dp2-zero3": Manual(dp=2, zero=3), "pp2-m4": Manual(pp=2, microbatches=4)}
FOURS = {
    "dp4": Manual(dp=4),
    "dp4-zero2": Manual(dp=4, zero=2),
    "tp4": Manual(tp=4),
    "dp2-tp2": Manual(dp=2, tp=2),
    "pp2-dp2-m4": Manual(pp=2, dp=2, microbatches=4),
    "pp4-m4": Manual(pp=4, microbatches=4),
}
SMALL = {
    "dp4": Manual(dp=4),
    "pp2-dp2-m4": Manual(pp=2, dp=2, microbatches=4),
    "pp4-m4": Manual(pp=4, microbatches=4),
    "pp4-m4-zb": Manual(pp=4, microbatches=4, schedule="zb-h1"),
    "pp4-m8": Manual(pp=4, microbatches=8),
}
TABLE = (
    ("local1", ("gpt", "llama", "bert", "wide"), ALONE),
    ("local1", ("gpt", "llama"), AGAIN),
    ("local2", ("gpt", "bert", "wide"), PAIRS),
    ("local2", ("gpt", "llama"), PAIRS_AGAIN),
    ("local4", ("gpt", "llama"), FOURS),
    ("local4", ("small",), SMALL),
    ("hosts2x2", ("gpt", "wide"), FOURS),
)


def rows_of(place: str) -> dict[str, Callable[[Report], Measured]]:
    """What to run there, by name."""
    per_host = PLACES[place][1]

    def row(model: str, config: autopar.Manual) -> Callable[[Report], Measured]:
        workload = WORKLOADS[model]
        return lambda report: measure_steps(lambda: parallelized(workload, config, per_host, report), workload.batches(), STEPS, per_host)

    return {
        f"{place}/{model}/{name}": row(model, config)
        for where, models, configs in TABLE
        if where == place
        for model in models
        for name, config in configs.items()
    }


def table(rows: Mapping[str, Measured | str]) -> str:
    """A line for each row in Markdown."""
    lines = ["| row | predicted | measured | error | spread | memory predicted | measured | error |", "|---|--:|--:|--:|--:|--:|--:|--:|"]
    for name, row in rows.items():
        if isinstance(row, str):
            lines.append(f"| {name} | | failed: {row} | | | | | |")
            continue
        assert row.predicted_s and row.predicted_bytes  # noqa: PT018
        memory = (f"{num_bytes / 2**20:.0f} MiB" for num_bytes in (row.predicted_bytes, row.allocated_bytes))
        lines.append(
            f"| {name} | {row.predicted_s * 1e3:.0f} ms | {row.step_s * 1e3:.0f} ms | {row.predicted_s / row.step_s - 1:+.0%} | "
            f"{row.spread:.0%} | {' | '.join(memory)} | {row.predicted_bytes / row.allocated_bytes - 1:+.0%} |"
        )
    return "\n".join(lines)


def verdict(title: str, rows: Sequence[Measured]) -> str:
    """Errors and order of some rows."""
    pairs = [(row.predicted_s or 0.0, row.step_s) for row in rows]
    errors = [predicted / measured - 1 for predicted, measured in pairs]
    memory = [(row.predicted_bytes or 0) / (row.allocated_bytes) - 1 for row in rows]
    tau, median, bias = kendall_tau(pairs), statistics.median(map(abs, errors)), statistics.mean(errors)
    return (
        f"- {title}, {len(rows)} rows: mean absolute error {_mean_of(errors):.1%}, median {median:.1%}, bias {bias:+.1%}, Kendall's tau-b "
        f"{tau:.2f}; memory: mean absolute error {_mean_of(memory):.1%}, bias {statistics.mean(memory):+.1%}"
    )


def _mean_of(errors: Sequence[float]) -> float:
    return statistics.mean(map(abs, errors))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="NAME,...", help="rows to run; * and ? stand for any characters")
    parser.add_argument("--rate", default="400mbit", help="what a host may send, as tc reads it")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds that one row may take, planning included")
    parser.add_argument("--record", action="store_true", help="write the table to benchmarks/records/")
    arguments = parser.parse_args()
    patterns = arguments.only.split(",") if arguments.only else ["*"]
    wanted = {
        place: {name: row for name, row in rows_of(place).items() if any(fnmatch(name, pattern) for pattern in patterns)}
        for place in PLACES
    }
    wanted = {place: rows for place, rows in wanted.items() if rows}
    if not wanted:
        names = ", ".join(name for place in PLACES for name in rows_of(place))
        sys.exit(f"--only: no row is called {arguments.only}; rows are {names}")
    quiet()
    found: dict[str, Measured | str] = {}
    progress = Progress(sum(1 + len(rows) for rows in wanted.values()))
    for place, rows in wanted.items():
        with tempfile.TemporaryDirectory() as scratch:
            os.environ["XDG_CACHE_HOME"] = scratch  # autopar's profile of this machine, made anew
            hosts, per_host = PLACES[place]
            runner = Runner(Hosts(hosts, arguments.rate), per_host, arguments.timeout, 0.0, 0, Path(scratch), progress)
            runner.profile()
            progress.row(f"{place}: measured the machine")
            found |= runner.rows(rows)
    done = {name: row for name, row in found.items() if isinstance(row, Measured)}
    lines = [table(found), ""]
    for place in wanted:
        own = [row for name, row in done.items() if name.startswith(f"{place}/")]
        lines += [verdict(place, own)] if len(own) > 1 else []
    lines += [verdict("all", list(done.values()))] if len(done) > 1 else []
    text = "\n".join(lines)
    print(text)
    if arguments.record:
        path = RECORDS / f"{datetime.date.today().isoformat()}-predict-vs-measure.md"
        path.write_text(f"# Predicted against measured, {datetime.date.today()}\n\n`{' '.join(sys.argv)}` at {commit()}.\n\n{text}\n")
        progress.say(f"wrote {path}")
    return 0 if len(done) == len(found) else 1


if __name__ == "__main__":
    sys.exit(main())
