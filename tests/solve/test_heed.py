"""Ctrl-C while a call into C++ works, by real signals."""

from __future__ import annotations

import os
import signal
import threading
import time
from unittest import mock

import pytest
from ortools.math_opt.python import mathopt
from ortools.util.python.solve_interrupter import SolveInterrupter

from autopar.errors import PlanError
from autopar.solve import intra
from autopar.solve.heed import Running
from autopar.solve.program import build_program
from tests.solve.problems import machine, prices_of, small


def test_a_call_gives_its_result_and_its_error() -> None:
    def wrong() -> None:
        raise PlanError("no plan")

    stop = mock.Mock()
    assert Running(lambda: 7, stop=stop).result() == 7
    with pytest.raises(PlanError, match="no plan"):
        Running(wrong, stop=stop).result()
    stop.assert_not_called()


def test_one_that_is_left_is_stopped_and_waited_for() -> None:
    is_told, is_over = threading.Event(), threading.Event()

    def wait() -> None:
        is_told.wait(10)
        is_over.set()

    running = Running(wait, stop=is_told.set)
    running.leave()
    assert is_over.is_set()
    running.leave()  # it has ended


@pytest.mark.usefixtures("listening")
def test_an_interrupt_stops_the_relaxation() -> None:
    prices = prices_of(small("chain"), (2,), machine(1))
    program = build_program(prices, [range(len(cluster.variants)) for cluster in prices.problem.clusters])
    is_stopped = list[bool]()

    def slow(_: object, solver: mathopt.SolverType, _parameters: object, _start: object, interrupter: SolveInterrupter) -> None:
        assert solver is mathopt.SolverType.GLOP
        os.kill(os.getpid(), signal.SIGINT)
        until_s = time.monotonic() + 2
        while not interrupter.interrupted and time.monotonic() < until_s:
            threading.Event().wait(0.01)  # in the main thread it would raise here
        is_stopped.append(interrupter.interrupted)

    with mock.patch("autopar.solve.solver.call", slow), pytest.raises(KeyboardInterrupt):
        intra._optimum(program, program.time, 1e-3, 5.0)
    assert is_stopped == [True]
