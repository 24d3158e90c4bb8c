"""Plans against what they become: one GPT on hosts with a slow network between them, by the automatic plan, by every hand-written 3D
configuration of autopar, and by hand-written PyTorch, in one table.

    python benchmarks/cluster/run.py [--only auto,pp2-*,torch-*] [--record]     (root, Linux, iproute2)

The hosts are network namespaces of this machine that send at no more than ``--rate``. autopar measures the machine, plans and trains; each
row is run by fresh processes, one after the other. The name ``pp2-dp2-zero1-m4`` is ``Manual(pp=2, dp=2, zero=1, microbatches=4)``, 1F1B.
Columns: seconds of a step as predicted and as measured (the median; each as long as that of its slowest rank) with the spread, the
share of the machine that other processes took meanwhile (disturbed steps are done again, up to three times), the most memory that a rank
took beyond what imports take, what all hosts together send in a step to each other and to themselves, and the loss of the last step, which
is to be the same in all rows. Kendall's tau-b compares the order of predicted and measured times: 1 is the same, 0 is chance.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is imported

import argparse
import datetime
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatch
from itertools import combinations
from pathlib import Path

import torch
import transformers
from gpt import SIZES
from hosts import Hosts, Report, RowError
from rows import CALM, MOST_TRIES, WARM_UP_STEPS, Measured, all_rows, measure_machine, quiet

from autopar.cost.machine import MachineProfile

MICROBATCHES = (4, 8)
LOSS_TOLERANCE = 1e-3
RECORDS = Path(__file__).parent.parent / "records"


def kendall_tau(pairs: Sequence[tuple[float, float]]) -> float:
    """Kendall's tau-b (1945): agreeing less disagreeing pairs of pairs, over the geometric mean of those that differ in each."""
    agreement, left, right = 0, 0, 0
    for (a, x), (b, y) in combinations(pairs, 2):
        first, second = (a > b) - (a < b), (x > y) - (x < y)
        agreement, left, right = agreement + first * second, left + abs(first), right + abs(second)
    return agreement / (left * right) ** 0.5 if left and right else float("nan")


def table(rows: Mapping[str, Measured | str]) -> str:
    """Markdown that reads well as it is."""
    columns = ["plan", "predicted", "measured", "spread", "others", "memory", "between hosts", "inside", "loss"]
    cells = [columns]
    for name, row in rows.items():
        if isinstance(row, str):
            cells.append([name, "-", "failed", "", "", "", "", "", ""])
            continue
        predicted = f"{row.predicted_s:.2f} s" if row.predicted_s is not None else "-"
        sent = (f"{num_bytes / 1e6:.1f} MB" for num_bytes in (row.across_bytes, row.inside_bytes))
        memory = f"{row.resident_bytes / 2**20:.0f} MiB"
        cells.append(
            [
                name,
                predicted,
                f"{row.step_s:.2f} s",
                f"{row.spread:.0%}",
                f"{row.others:.0%}",
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


def _machine_text(profile: MachineProfile) -> str:
    rates = [f"{s.m}: {s.flops_per_s / 1e9:.0f}" for s in profile.device.matmul if s.dtype == "float32"]
    places = zip(("between hosts", "inside"), profile.links, strict=True)
    links = [f"{place} {link.alpha_s * 1e6:.0f} us, {link.bandwidth / 1e6:.0f} MB/s" for place, link in places]
    return (
        f"float32 matmuls in GFLOP/s by side {', '.join(rates)}; copies {profile.device.memory_bandwidth / 1e9:.1f} GB/s; "
        f"launch {profile.device.launch_overhead_s * 1e6:.1f} us; links {'; '.join(links)}; overlap {profile.overlap:.2f}"
    )


class Progress:
    """Lines on stderr, with what is left of the rows; what goes on inside of one at most every 5 s."""

    def __init__(self, count: int) -> None:
        self.count, self.done = count, 0
        self.started = self.said = time.monotonic()

    def say(self, text: str) -> None:
        self.said = time.monotonic()
        print(f"[{self.said - self.started:4.0f} s] {text}", file=sys.stderr, flush=True)

    def detail(self, text: str) -> None:
        if time.monotonic() - self.said > 5:
            self.say(f"  {text}")

    def row(self, text: str) -> None:
        self.done += 1
        left_s = (time.monotonic() - self.started) / self.done * (self.count - self.done)
        self.say(
            f"{self.done}/{self.count} {text}"
            + (f"; about {left_s / 60:.0f} min left" if self.done < self.count else "")
        )


def run_rows(
    rows: Mapping[str, Callable[[Report], Measured]],
    hosts: Hosts,
    per_host: int,
    timeout_s: float,
    folder: Path,
    progress: Progress,
) -> dict[str, Measured | str]:
    """Every row, or why it failed; an interrupt ends the run with those so far."""
    found: dict[str, Measured | str] = {}
    try:
        for name, task in rows.items():
            log = folder / f"{name}.log"
            try:
                row = hosts.run(task, per_host=per_host, timeout_s=timeout_s, log=log, report=progress.detail)
            except RowError as error:
                found[name] = str(error)
                progress.row(f"{name}: {error} (log: {log})")
                continue
            assert isinstance(row, Measured)
            found[name] = row
            if row.plan[0]:
                (folder / f"{name}.json").write_text(row.plan[0])
            predicted = f", predicted {row.predicted_s:.2f} s" if row.predicted_s is not None else ""
            progress.row(f"{name}: {row.step_s:.2f} s{predicted}")
    except KeyboardInterrupt:
        progress.say("interrupted")
    return found


def _profile(
    hosts: Hosts, per_host: int, timeout_s: float, folder: Path, progress: Progress
) -> tuple[MachineProfile, float]:
    """The machine as autopar measures it, and the share of others meanwhile; if that is large, again."""
    for _ in range(MOST_TRIES):
        measured = hosts.run(
            lambda report: measure_machine(per_host, report),
            per_host=per_host,
            timeout_s=timeout_s,
            log=folder / "profile.log",
            report=progress.detail,
        )
        assert isinstance(measured, tuple)
        profile, others = measured
        if others <= CALM:
            break
        progress.say(f"  measured while other processes took {others:.0%} of the machine")
    profile.save(folder / "profile.json")
    return profile, others


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--per-host", type=int, default=2, help="ranks on each host")
    parser.add_argument("--rate", default="400mbit", help="what a host may send, as tc reads it, or 'none'")
    parser.add_argument("--steps", type=int, default=5, help=f"measured steps, after {WARM_UP_STEPS} that are not")
    parser.add_argument("--only", metavar="NAME,...", help="rows to run; * and ? stand for any characters")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds that one row may take, planning included")
    parser.add_argument(
        "--keep", type=Path, metavar="FOLDER", help="where to leave profile, plans and logs; by default they go"
    )
    parser.add_argument("--record", action="store_true", help="write the table to benchmarks/records/")
    return parser.parse_args()


def main() -> int:
    arguments = _arguments()
    num_ranks = arguments.hosts * arguments.per_host
    rows = all_rows(num_ranks, arguments.per_host, MICROBATCHES, arguments.steps)
    if arguments.only:
        patterns = arguments.only.split(",")
        unknown = [pattern for pattern in patterns if not any(fnmatch(name, pattern) for name in rows)]
        if unknown:
            sys.exit(f"--only: no row is called {', '.join(unknown)}; rows are {', '.join(rows)}")
        rows = {name: row for name, row in rows.items() if any(fnmatch(name, pattern) for pattern in patterns)}
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        os.environ["XDG_CACHE_HOME"] = scratch  # autopar's profile of this machine, made anew
        quiet()
        progress = Progress(len(rows) + 1)
        hosts = Hosts(arguments.hosts, arguments.rate)
        profile, others = _profile(hosts, arguments.per_host, arguments.timeout, folder, progress)
        machine = f"{_machine_text(profile)}; other processes took {others:.0%} meanwhile"
        progress.row(f"measured: {machine}")
        found = run_rows(rows, hosts, arguments.per_host, arguments.timeout, folder, progress)
    shape = f"{arguments.hosts} hosts x {arguments.per_host} ranks, {arguments.rate} from each host"
    text = f"{SIZES}; AdamW; {shape}; median of {arguments.steps} steps.\n\n{table(found)}\n\n{verdict(found)}"
    print(text)
    if arguments.record:
        progress.say(f"wrote {_record(text, machine, load)}")
    return 0 if all(isinstance(row, Measured) for row in found.values()) else 1


def _record(text: str, machine: str, load: float) -> Path:
    today = datetime.date.today().isoformat()
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    command = shlex.join(["python", *sys.argv])
    path = RECORDS / f"{today}-cluster.md"
    path.write_text(
        f"# Plans on two slow hosts, {today}\n\n"
        f"`{command}` at {commit}; load average {load:.2f} at the start, {os.getloadavg()[0]:.2f} at the end.\n"
        f"Machine: {os.cpu_count()} cores for all ranks, no GPU, Python {sys.version.split()[0]}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}.\nMeasured: {machine}.\n\n{text}\n"
    )
    return path


if __name__ == "__main__":
    sys.exit(main())
