"""Plans against what they become: one GPT on hosts with a slow network between them, by the automatic plan, by every hand-written 3D
configuration of autopar, and by hand-written PyTorch, in one table.

    python benchmarks/cluster/run.py [--only auto,pp2-*,torch-*] [--record]     (root, Linux, iproute2)

The hosts are network namespaces of this machine that send at no more than ``--rate``. autopar measures the machine, plans and trains; each
row is run by fresh processes, one after the other. The name ``pp2-dp2-zero1-m4`` is ``Manual(pp=2, dp=2, zero=1, microbatches=4)``, 1F1B.
Columns: seconds of a step as predicted and as measured (the median; each as long as that of its slowest rank) with the spread, the shares
of the machine that other processes took meanwhile (disturbed steps are done again, up to three times) and that the ranks took, the most
memory that a rank took beyond what imports take, what all hosts together send in a step to each other and to themselves, and the loss of
the last step, which is to be the same in all rows. What is near the fastest is run again in turns (``--finals``), since a machine is not as
fast at all times: its median is that of all runs, its spread is between them. Kendall's tau-b compares the order of predicted and measured
times: 1 is the same, 0 is chance.
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
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import torch
import transformers
from gpt import SIZES
from hosts import Hosts, Report, RowError
from rows import CALM, MOST_TRIES, WARM_UP_STEPS, Measured, Watch, all_rows, measure_machine, quiet, together
from table import table, verdict

from autopar.cost.machine import MachineProfile

MICROBATCHES = (4, 8)
NEAR = 1.2
"""Rows that took no more than this times the fastest are run again."""
RECORDS = Path(__file__).parent.parent / "records"


def _machine_text(profile: MachineProfile) -> str:
    rates = [f"{s.m}: {s.flops_per_s / 1e9:.0f}" for s in profile.device.matmul if s.dtype == "float32"]
    places = zip(("between hosts", "inside"), profile.links, strict=True)
    links = [f"{at} {link.alpha_s * 1e6:.0f} us, {link.bandwidth / 1e6:.0f} MB/s, overlap {link.overlap:.2f}" for at, link in places]
    return (
        f"float32 matmuls in GFLOP/s by side {', '.join(rates)}; copies {profile.device.memory_bandwidth / 1e9:.1f} GB/s; "
        f"launch {profile.device.launch_overhead_s * 1e6:.1f} us; sharing {profile.device.sharing:.2f}; links {'; '.join(links)}"
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


@dataclass(frozen=True, slots=True)
class Runner:
    """Where and how rows are run; ``patience_s`` is how long to wait for other processes to be calm before each, ``finals`` how often those
    near the fastest are run again."""

    hosts: Hosts
    per_host: int
    timeout_s: float
    patience_s: float
    finals: int
    folder: Path
    progress: Progress

    def run(self, name: str, task: Callable[[Report], object]) -> object:
        """What rank 0 returns; RowError if it failed. What the ranks print is in the folder."""
        deadline = time.monotonic() + self.patience_s
        while time.monotonic() < deadline:
            watch = Watch()
            time.sleep(2)
            others = watch.all_s() / watch.passed_s()
            if others <= CALM:
                break
            self.progress.detail(f"waiting: other processes take {others:.0%} of the machine")
        log, report = self.folder / f"{name.replace('/', '-')}.log", self.progress.detail
        return self.hosts.run(task, per_host=self.per_host, timeout_s=self.timeout_s, log=log, report=report)

    def profile(self) -> tuple[MachineProfile, float]:
        """The machine as autopar measures it, and the share of others meanwhile; if that is large, again."""
        for _ in range(MOST_TRIES):
            measured = self.run("profile", lambda report: measure_machine(self.per_host, report))
            assert isinstance(measured, tuple)
            profile, others = measured
            if others <= CALM:
                break
            self.progress.say(f"  measured while other processes took {others:.0%} of the machine")
        profile.save(self.folder / "profile.json")
        return profile, others

    def rows(self, rows: Mapping[str, Callable[[Report], Measured]]) -> dict[str, Measured | str]:
        """Every row, or why it failed; an interrupt ends the run with those so far."""
        runs: dict[str, list[Measured]] = {name: [] for name in rows}
        failed: dict[str, str] = {}
        try:
            self.turn(rows, runs, failed)
            fastest_s = min((own[0].step_s for own in runs.values() if own), default=0.0)
            near = {name: task for name, task in rows.items() if runs[name] and runs[name][0].step_s <= NEAR * fastest_s}
            self.progress.count += self.finals * len(near) if len(near) > 1 else 0
            for _ in range(self.finals if len(near) > 1 else 0):
                self.turn(near, runs, failed)
        except KeyboardInterrupt:
            self.progress.say("interrupted")
        done = {name: together(own) for name, own in runs.items() if own}
        return {name: failed.get(name) or done[name] for name in rows if name in failed or name in done}

    def turn(self, rows: Mapping[str, Callable[[Report], Measured]], runs: dict[str, list[Measured]], failed: dict[str, str]) -> None:
        """Run each row once."""
        for name, task in rows.items():
            try:
                row = self.run(name, task)
            except RowError as error:
                failed[name] = str(error)
                self.progress.row(f"{name}: {error}")
                continue
            assert isinstance(row, Measured)
            runs[name].append(row)
            if row.plan[0]:
                (self.folder / f"{name.replace('/', '-')}.json").write_text(row.plan[0])
            predicted = f", predicted {row.predicted_s:.2f} s" if row.predicted_s is not None else ""
            self.progress.row(f"{name}: {row.step_s:.2f} s{predicted}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--per-host", type=int, default=2, help="ranks on each host")
    parser.add_argument("--rate", default="400mbit", help="what a host may send, as tc reads it, or 'none'")
    parser.add_argument("--steps", type=int, default=5, help=f"measured steps, after {WARM_UP_STEPS} that are not")
    parser.add_argument("--finals", type=int, default=3, help=f"more runs of rows that take no more than {NEAR} times the fastest")
    parser.add_argument("--only", metavar="NAME,...", help="rows to run; * and ? stand for any characters")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds that one row may take, planning included")
    parser.add_argument("--patience", type=float, default=0.0, help="seconds to wait for a calm machine before a row")
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
        runner = Runner(hosts, arguments.per_host, arguments.timeout, arguments.patience, arguments.finals, folder, progress)
        profile, others = runner.profile()
        machine = f"{_machine_text(profile)}; other processes took {others:.0%} meanwhile"
        progress.row(f"measured: {machine}")
        found = runner.rows(rows)
    shape = f"{arguments.hosts} hosts x {arguments.per_host} ranks, {arguments.rate} from each host"
    text = f"{SIZES}; AdamW; {shape}; median of {arguments.steps} steps.\n\n{table(found)}\n\n{verdict(found)}"
    print(text)
    if arguments.record:
        progress.say(f"wrote {_record(text, machine, load)}")
    return 0 if all(isinstance(row, Measured) for row in found.values()) else 1


def _record(text: str, machine: str, load: float) -> Path:
    today = datetime.date.today().isoformat()
    command = shlex.join(["python", f"benchmarks/cluster/{Path(sys.argv[0]).name}", *sys.argv[1:]])
    names = (f"{today}-cluster{suffix}.md" for suffix in ("", *(f"-{n}" for n in range(2, 100))))
    path = next(path for path in map(RECORDS.joinpath, names) if not path.exists())  # records are never changed
    path.write_text(
        f"# Plans on two slow hosts, {today}\n\n"
        f"`{command}` at {commit()}; load average {load:.2f} at the start, {os.getloadavg()[0]:.2f} at the end.\n"
        f"Machine: {os.cpu_count()} cores for all ranks, no GPU, Python {sys.version.split()[0]}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}.\nMeasured: {machine}.\n\n{text}\n"
    )
    return path


def commit() -> str:
    """What is run, in git's words."""
    words = ["git", "describe", "--always", "--dirty=, with changes"]
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip() or "no commit"


if __name__ == "__main__":
    sys.exit(main())
