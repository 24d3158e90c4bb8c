"""HiGHS in its process: the answers of one in this process, and Ctrl-C by real signals."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from ortools.math_opt.python import mathopt
from ortools.util.python.solve_interrupter import SolveInterrupter

from autopar.errors import SolverError
from autopar.solve import highs
from autopar.solve.heed import Running
from autopar.solve.highs import solve_integer, stop_integer


def knapsacks(size: int, rows: int) -> mathopt.Model:
    """Of 60 rows and 150 columns a program that takes HiGHS far longer than a test."""
    numbers, model = random.Random(3), mathopt.Model()
    chosen = [model.add_binary_variable() for _ in range(size)]
    for _ in range(rows):
        weights = [numbers.randint(1, 100) for _ in chosen]
        model.add_linear_constraint(mathopt.LinearSum(w * x for w, x in zip(weights, chosen, strict=True)) <= sum(weights) // 3)
    model.maximize(mathopt.LinearSum(numbers.randint(1, 100) * x for x in chosen))
    return model


def running() -> int:
    """The number of the process."""
    process = highs._process(os.getpid())._running
    assert process is not None
    return process[0].pid


def test_its_answer_is_that_of_this_process() -> None:
    model = knapsacks(20, 6)
    found = solve_integer(model.export_model(), gap=1e-3, time_limit_s=5.0)
    alone = mathopt.solve(model, mathopt.SolverType.HIGHS, params=mathopt.SolveParameters(relative_gap_tolerance=1e-3, random_seed=1))
    assert found.reason is mathopt.TerminationReason.OPTIMAL
    assert found.values == {variable.id: value for variable, value in alone.variable_values().items() if value}
    assert (found.objective, found.bound) == (alone.objective_value(), alone.best_objective_bound())
    before = running()
    solve_integer(model.export_model(), gap=1e-3, time_limit_s=5.0)
    assert running() == before


def test_what_it_says_is_raised() -> None:
    with pytest.raises(SolverError, match="the solver HiGHS failed: "):
        solve_integer(knapsacks(3, 1).export_model(), gap=-1.0, time_limit_s=5.0)


def test_one_that_dies_is_missed() -> None:
    solve_integer(knapsacks(3, 1).export_model(), gap=1e-3, time_limit_s=5.0)
    os.kill(running(), signal.SIGKILL)
    with pytest.raises(SolverError, match="ended while it worked, with exit code -9"):
        solve_integer(knapsacks(3, 1).export_model(), gap=1e-3, time_limit_s=5.0)


@pytest.mark.usefixtures("listening")
def test_an_interrupt_ends_it_and_another_takes_its_place() -> None:
    solve_integer(knapsacks(3, 1).export_model(), gap=1e-3, time_limit_s=5.0)
    before, long = running(), knapsacks(150, 60).export_model()
    started_s = time.monotonic()
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        solve_integer(long, gap=0.0, time_limit_s=60.0)
    assert time.monotonic() - started_s < 30
    with pytest.raises(ProcessLookupError):
        os.kill(before, 0)
    assert solve_integer(knapsacks(3, 1).export_model(), gap=1e-3, time_limit_s=5.0).values
    assert running() != before


def test_who_asks_from_another_thread_can_stop_it() -> None:
    interrupter, other = SolveInterrupter(), SolveInterrupter()
    solve_integer(knapsacks(3, 1).export_model(), gap=1e-3, time_limit_s=5.0, interrupter=interrupter)
    before = running()
    stop_integer(interrupter)  # it does not ask any more
    assert running() == before
    long = knapsacks(150, 60).export_model()
    asking = Running(lambda: solve_integer(long, gap=0.0, time_limit_s=60.0, interrupter=interrupter), stop=interrupter.interrupt)
    until(lambda: highs._process(os.getpid())._asks is interrupter)
    stop_integer(other)
    assert running() == before
    interrupter.interrupt()
    stop_integer(interrupter)
    with pytest.raises(SolverError, match="ended while it worked"):
        asking.result()
    with pytest.raises(SolverError, match="interrupted before it began"):
        solve_integer(long, gap=0.0, time_limit_s=60.0, interrupter=interrupter)


def test_it_ends_with_whom_it_works_for() -> None:
    """Killed, that one can say nothing; where HiGHS was left to itself it would take a core until its time limit."""
    asking = multiprocessing.get_context("fork").Process(target=work_long, daemon=True)
    asking.start()
    children = Path(f"/proc/{asking.pid}/task/{asking.pid}/children")
    until(lambda: children.read_text() != "")
    solver = int(children.read_text())
    until(lambda: cpu_s(solver) > 3.0)  # what it imports takes less
    asking.kill()
    until(lambda: not Path(f"/proc/{solver}").exists())


def test_it_ends_where_nobody_hears_its_answer() -> None:
    """Who asked was ended while it worked, as by SIGTERM."""
    (questions, to), (heard, answers) = os.pipe(), os.pipe()
    os.close(heard)
    command = [sys.executable, "-P", "-m", highs.__name__, str(os.getpid())]
    process = subprocess.Popen(command, stdin=questions, stdout=answers, stderr=subprocess.PIPE)
    with Connection(to, readable=False) as asking:
        asking.send((knapsacks(3, 1).export_model().SerializeToString(), 1e-3, 5.0))
        _, said = process.communicate(timeout=60)
    os.close(questions)
    os.close(answers)
    assert (process.returncode, said) == (0, b"")


def work_long() -> None:
    solve_integer(knapsacks(150, 60).export_model(), gap=0.0, time_limit_s=120.0)


def until(is_so: Callable[[], bool], limit_s: float = 60.0) -> None:
    end_s = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < end_s
        time.sleep(0.05)


def cpu_s(process: int) -> float:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[11]) / os.sysconf("SC_CLK_TCK")
