"""The package itself: its public names, and that it is imported without what they stand for."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import autopar
from autopar import api


def test_the_command_line_is_read_without_torch() -> None:
    program = "import sys, autopar.cli; print([name for name in ('torch', 'numpy', 'ortools', 'sympy') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_every_public_name_is_there() -> None:
    assert set(autopar.__all__) == {name for names in autopar._HOMES.values() for name in names}
    for name in autopar.__all__:
        assert getattr(autopar, name).__module__.startswith("autopar.")
    assert set(autopar.__all__) <= set(dir(autopar))
    assert not hasattr(autopar, "nothing")
    assert autopar.AutoparError is import_module("autopar.errors").AutoparError


def test_a_module_does_not_take_the_name_of_a_function() -> None:
    setattr(autopar, "plan", import_module("autopar.plan"))  # noqa: B010  as importing it does
    assert autopar.plan is api.plan
    assert import_module("autopar.errors") is autopar.errors
