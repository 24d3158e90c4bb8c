"""Linear programs written as plain lists, and put into one message for MathOpt: one call for each number takes longer than solving."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ortools.math_opt import model_pb2


@dataclass(slots=True)
class LinearProgram:
    """Variables, called by their numbers, and rows."""

    lower: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    integers: list[bool] = field(default_factory=list)
    _row_lower: list[float] = field(default_factory=list)
    _row_upper: list[float] = field(default_factory=list)
    _entry_rows: list[int] = field(default_factory=list)
    _entry_columns: list[int] = field(default_factory=list)
    _entries: list[float] = field(default_factory=list)

    def variable(self, lower: float = 0.0, upper: float = math.inf, *, is_integer: bool = False) -> int:
        self.lower.append(lower)
        self.upper.append(upper)
        self.integers.append(is_integer)
        return len(self.lower) - 1

    def variables(self, count: int, *, upper: float = math.inf) -> range:
        """Several at once, from 0 to ``upper``."""
        first = len(self.lower)
        self.lower += [0.0] * count
        self.upper += [upper] * count
        self.integers += [False] * count
        return range(first, first + count)

    def row(self, coefficients: Mapping[int, float], *, lower: float = -math.inf, upper: float = math.inf) -> None:
        """lower <= sum of coefficient * variable <= upper."""
        columns = sorted(column for column, coefficient in coefficients.items() if coefficient)
        self._add(columns, [coefficients[column] for column in columns], lower, upper)

    def balance(self, plus: Sequence[int], minus: Sequence[int], *, bound: float = 0.0) -> None:
        """sum of some variables - sum of others = bound, all different."""
        below, above = sorted(minus), sorted(plus)
        assert not (below and above) or below[-1] < above[0], "others were made before"
        self._add(below + above, [-1.0] * len(below) + [1.0] * len(above), bound, bound)

    def _add(self, columns: Sequence[int], coefficients: Sequence[float], lower: float, upper: float) -> None:
        """A row by its columns, in order."""
        self._entry_rows += [len(self._row_lower)] * len(columns)
        self._entry_columns += columns
        self._entries += coefficients
        self._row_lower.append(lower)
        self._row_upper.append(upper)

    @property
    def size(self) -> tuple[int, int]:
        """Variables and rows."""
        return len(self.lower), len(self._row_lower)

    def model(self, objective: Mapping[int, float], *, is_relaxed: bool = False) -> model_pb2.ModelProto:
        """The program with an objective to make least; variables and rows have their numbers as ``ids``.

        Args:
            objective: cost of variables.
            is_relaxed: nothing has to be whole.
        """
        proto = model_pb2.ModelProto()
        proto.variables.ids.extend(range(len(self.lower)))
        proto.variables.lower_bounds.extend(self.lower)
        proto.variables.upper_bounds.extend(self.upper)
        proto.variables.integers.extend([False] * len(self.integers) if is_relaxed else self.integers)
        proto.linear_constraints.ids.extend(range(len(self._row_lower)))
        proto.linear_constraints.lower_bounds.extend(self._row_lower)
        proto.linear_constraints.upper_bounds.extend(self._row_upper)
        proto.linear_constraint_matrix.row_ids.extend(self._entry_rows)
        proto.linear_constraint_matrix.column_ids.extend(self._entry_columns)
        proto.linear_constraint_matrix.coefficients.extend(self._entries)
        columns = sorted(column for column, cost in objective.items() if cost)
        proto.objective.linear_coefficients.ids.extend(columns)
        proto.objective.linear_coefficients.values.extend(objective[column] for column in columns)
        return proto
