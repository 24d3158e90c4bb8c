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
from autopar.solve.heed import heeding
from autopar.solve.program import build_program
from tests.solve.problems import machine, prices_of, small


def test_a_call_gives_its_result_and_its_error() -> None:
    def wrong() -> None:
        raise PlanError("no plan")

    stop = mock.Mock()
    assert heeding(lambda: 7, stop=stop) == 7
    with pytest.raises(PlanError, match="no plan"):
        heeding(wrong, stop=stop)
    stop.assert_not_called()


@pytest.mark.usefixtures("listening")
def test_an_interrupt_stops_the_relaxation() -> None:
    prices = prices_of(small("chain"), (2,), machine(1))
    program = build_program(prices, [range(len(cluster.variants)) for cluster in prices.problem.clusters])
    is_stopped = list[bool]()

    def slow(_: mathopt.Model, solver: mathopt.SolverType, *, interrupter: SolveInterrupter, **_settings: object) -> None:
        assert solver is mathopt.SolverType.GLOP
        os.kill(os.getpid(), signal.SIGINT)
        until_s = time.monotonic() + 2
        while not interrupter.interrupted and time.monotonic() < until_s:
            threading.Event().wait(0.01)  # in the main thread it would raise here
        is_stopped.append(interrupter.interrupted)

    with mock.patch.object(mathopt, "solve", slow), pytest.raises(KeyboardInterrupt):
        intra._relax(program, program.time, 5.0)
    assert is_stopped == [True]
