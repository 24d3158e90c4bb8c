"""A linear program as a message -> what a solver of MathOpt finds.

The messages go to the same call as those of ``mathopt.solve``, which makes objects of every variable on the way there and back: that takes
longer than the relaxation of a program that was solved in other numbers before.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from ortools.math_opt import callback_pb2, model_parameters_pb2, model_pb2, parameters_pb2, result_pb2, solution_pb2
from ortools.math_opt.core.python import solver as core
from ortools.math_opt.python import mathopt
from ortools.math_opt.solution_pb2 import BasisProto
from ortools.util.python.solve_interrupter import SolveInterrupter


@dataclass(frozen=True, slots=True)
class Answer:
    """What a solver found.

    Args:
        reason: why it ended.
        values: of the variables that are not zero, by number; None if nothing was found.
        objective, bound: of the values, and of whatever there may be.
        basis: of a relaxation, where the simplex method ended: a status for each variable and each row.
    """

    reason: mathopt.TerminationReason
    values: Mapping[int, float] | None = None
    objective: float = math.inf
    bound: float = -math.inf
    basis: BasisProto | None = field(default=None, repr=False)

    @staticmethod
    def of(result: result_pb2.SolveResultProto) -> Answer:
        reason = mathopt.TerminationReason(result.termination.reason)
        if not result.solutions or not result.solutions[0].HasField("primal_solution"):
            return Answer(reason)
        best = result.solutions[0]
        found = best.primal_solution
        if found.feasibility_status != solution_pb2.SOLUTION_STATUS_FEASIBLE:
            return Answer(reason)
        values = dict(zip(found.variable_values.ids, found.variable_values.values, strict=True))
        basis = best.basis if best.HasField("basis") else None
        return Answer(reason, values, found.objective_value, result.termination.objective_bounds.dual_bound, basis)


def call(
    model: model_pb2.ModelProto,
    solver: mathopt.SolverType,
    parameters: mathopt.SolveParameters,
    start: BasisProto | None = None,
    interrupter: SolveInterrupter | None = None,
) -> result_pb2.SolveResultProto:
    """One call of a solver, which brings back no zeros, nor duals and reduced costs."""
    of_model = model_parameters_pb2.ModelSolveParametersProto()
    of_model.variable_values_filter.skip_zero_values = True
    of_model.dual_values_filter.filter_by_ids = True
    of_model.reduced_costs_filter.filter_by_ids = True
    if start is not None:
        of_model.initial_basis.CopyFrom(start)
    return core.solve(
        model,
        solver.value,
        parameters_pb2.SolverInitializerProto(),
        parameters.to_proto(),
        of_model,
        None,
        callback_pb2.CallbackRegistrationProto(),
        None,
        interrupter.pybind_interrupter if interrupter is not None else None,
    )


def solve_relaxed(
    model: model_pb2.ModelProto, *, start: BasisProto | None, time_limit_s: float, interrupter: SolveInterrupter | None = None
) -> Answer:
    """The optimum of a program in which nothing has to be whole, and nothing less, begun where another of the same variables and rows
    ended, or one that had fewer: those that are new then count as not used."""
    parameters = mathopt.SolveParameters(
        lp_algorithm=mathopt.LPAlgorithm.DUAL_SIMPLEX, time_limit=datetime.timedelta(seconds=time_limit_s), random_seed=1
    )
    begun = None if start is None else _grown(start, model)
    found = Answer.of(call(model, mathopt.SolverType.GLOP, parameters, begun, interrupter))
    return found if found.reason is mathopt.TerminationReason.OPTIMAL else Answer(found.reason)


def _grown(start: BasisProto, model: model_pb2.ModelProto) -> BasisProto:
    """A basis with the variables and rows that a model has more."""
    basis = BasisProto()
    basis.CopyFrom(start)
    for statuses, ids, status in (
        (basis.variable_status, model.variables.ids, solution_pb2.BASIS_STATUS_AT_LOWER_BOUND),
        (basis.constraint_status, model.linear_constraints.ids, solution_pb2.BASIS_STATUS_BASIC),
    ):
        more = ids[len(statuses.ids) :]
        statuses.ids.extend(more)
        statuses.values.extend([status] * len(more))
    return basis
