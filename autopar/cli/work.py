"""What commands do their work with, in one place that is imported when the first of them begins (`cli.lazy`)."""

from autopar import api
from autopar.cli.check import counted_text, load_planned
from autopar.cli.imports import READERS, read_imports
from autopar.cli.inputs import (
    Example,
    load_example,
    read_cluster,
    read_configs,
    read_grid,
    read_manual,
    read_mesh,
    read_pin,
)
from autopar.cli.part import part_of_plan, sent_by_part, write_pictures
from autopar.cli.profile import profile_machine, profile_text
from autopar.cli.relief import HINT, asked_plan, hinted
from autopar.cli.rules import chosen_rules, op_names, rule_lines
from autopar.cli.scale import read_count, read_sizes
from autopar.cost.machine import MachineProfile
from autopar.dry.check import check
from autopar.dry.count import count
from autopar.mesh import Mesh
from autopar.plan import Recipe
from autopar.planner.document import Plan
from autopar.planner.explain import explain
from autopar.planner.formula import formulas
from autopar.planner.payoff import payoff_text
from autopar.planner.relief import Relief, relief_text
from autopar.rules.check import check_op
from autopar.scale import scale
from autopar.show.code import graph_code
from autopar.show.compare import Row, compare_text
from autopar.show.diff import diff_data, diff_text
from autopar.show.page import draw
from autopar.show.scaling import scaling_text
from autopar.show.table import table_text
from autopar.show.text import plan_text
from autopar.solve.manual import Manual
from autopar.sweep import Sweep, sweep, sweep_text

__all__ = [
    "HINT",
    "READERS",
    "Example",
    "MachineProfile",
    "Manual",
    "Mesh",
    "Plan",
    "Recipe",
    "Relief",
    "Row",
    "Sweep",
    "api",
    "asked_plan",
    "check",
    "check_op",
    "chosen_rules",
    "compare_text",
    "count",
    "counted_text",
    "diff_data",
    "diff_text",
    "draw",
    "explain",
    "formulas",
    "graph_code",
    "hinted",
    "load_example",
    "load_planned",
    "op_names",
    "part_of_plan",
    "payoff_text",
    "plan_text",
    "profile_machine",
    "profile_text",
    "read_cluster",
    "read_configs",
    "read_count",
    "read_grid",
    "read_imports",
    "read_manual",
    "read_mesh",
    "read_pin",
    "read_sizes",
    "relief_text",
    "rule_lines",
    "scale",
    "scaling_text",
    "sent_by_part",
    "sweep",
    "sweep_text",
    "table_text",
    "write_pictures",
]
