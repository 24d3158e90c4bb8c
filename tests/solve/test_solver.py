"""Calls of solvers by messages, against ``mathopt.solve``, and relaxations that begin where another ended."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from ortools.math_opt.model_pb2 import ModelProto
from ortools.math_opt.python import mathopt

from autopar.solve.intra import Starts, solve
from autopar.solve.program import Program, add_memory, build_program
from autopar.solve.solver import Answer, call, solve_relaxed
from tests.solve.problems import machine, prices_of, small

GLOP = mathopt.SolverType.GLOP


def program_of(slower: float) -> Program:
    """On links that are so much slower."""
    known = machine(2)
    links = tuple(replace(link, bandwidth=link.bandwidth / slower) for link in known.links)
    prices = prices_of(small("attention"), (2, 2), replace(known, links=links))
    return build_program(prices, [range(len(cluster.variants)) for cluster in prices.problem.clusters])


def iterations(model: ModelProto, answer: Answer | None) -> int:
    parameters = mathopt.SolveParameters(lp_algorithm=mathopt.LPAlgorithm.DUAL_SIMPLEX)
    return int(call(model, GLOP, parameters, answer.basis if answer is not None else None).solve_stats.simplex_iterations)


def test_a_message_is_answered_as_its_model_is() -> None:
    program = program_of(1.0)
    message = program.linear.model(program.time, is_relaxed=True)
    model = mathopt.Model.from_model_proto(message)
    alone, found = mathopt.solve(model, GLOP), solve_relaxed(message, start=None, time_limit_s=5.0)
    assert found.reason is alone.termination.reason is mathopt.TerminationReason.OPTIMAL
    assert found.objective == pytest.approx(alone.objective_value(), rel=1e-9)
    assert found.bound == pytest.approx(found.objective, rel=1e-6)
    assert found.values is not None
    cost = sum(program.time.get(number, 0.0) * value for number, value in found.values.items())
    assert cost == pytest.approx(found.objective, rel=1e-9)


def test_what_cannot_be_has_no_values() -> None:
    program = program_of(1.0)
    program.linear.row({program.x[0][0]: 1.0}, lower=2.0)
    found = solve_relaxed(program.linear.model(program.time, is_relaxed=True), start=None, time_limit_s=5.0)
    assert found.reason is mathopt.TerminationReason.INFEASIBLE
    assert found.values is None


def test_what_time_does_not_let_it_finish_has_no_values() -> None:
    """It would be no bound of anything."""
    program = program_of(1.0)
    found = solve_relaxed(program.linear.model(program.time, is_relaxed=True), start=None, time_limit_s=1e-6)
    assert found.reason is not mathopt.TerminationReason.OPTIMAL
    assert found.values is None


def test_a_relaxation_begins_where_another_ended() -> None:
    """At the same optimum in fewer steps: of other prices, and of one row of memory more."""
    first, other = program_of(1.0), program_of(1.5)
    assert first.linear.size == other.linear.size
    start = solve_relaxed(first.linear.model(first.time, is_relaxed=True), start=None, time_limit_s=5.0)
    model = other.linear.model(other.time, is_relaxed=True)
    cold, warm = (solve_relaxed(model, start=basis, time_limit_s=5.0) for basis in (None, start.basis))
    assert warm.objective == pytest.approx(cold.objective, rel=1e-6)
    assert iterations(model, start) < 0.5 * iterations(model, None)
    assert iterations(model, cold) == 0
    add_memory(other, other.prices.memory([0] * len(other.x)).moment)
    more = other.linear.model(other.time, is_relaxed=True)
    grown = solve_relaxed(more, start=cold.basis, time_limit_s=5.0)
    assert grown.objective == pytest.approx(solve_relaxed(more, start=None, time_limit_s=5.0).objective, rel=1e-6)


def test_starts_are_kept_by_size_and_change_no_optimum() -> None:
    starts: Starts = {}
    for slower in (1.0, 1.5, 2.0):
        prices = program_of(slower).prices
        alone, warm = solve(prices, memory_limit_bytes=np.inf), solve(prices, memory_limit_bytes=np.inf, starts=starts)
        assert warm.objective.total_s == pytest.approx(alone.objective.total_s, rel=1e-3)
    assert program_of(1.0).linear.size in starts
    assert len(starts) <= 3
