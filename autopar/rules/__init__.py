"""Rules of ops. Importing this package fills the table: one module for each family, tables of one-line rules."""

from autopar.rules import (  # noqa: F401  each fills the table
    attention,
    block,
    conv,
    create,
    function,
    grouped,
    index,
    linalg,
    loss,
    marked,
    matmul,
    norm,
    pointwise,
    recurrent,
    reduce,
    sorted_rows,
    view,
)
from autopar.rules.notation import Rule
from autopar.rules.registry import (
    Arguments,
    Call,
    Coordinate,
    Local,
    TensorSpec,
    local_form,
    register,
    registered,
    rule_of,
)
from autopar.rules.strategies import Choice, axis_choices

__all__ = [
    "Arguments",
    "Call",
    "Choice",
    "Coordinate",
    "Local",
    "Rule",
    "TensorSpec",
    "axis_choices",
    "local_form",
    "register",
    "registered",
    "rule_of",
]
