"""The ``autopar`` command: plans, prices and proofs without writing a script.

Every command is a few lines on the public functions of `autopar.api`. What is asked for goes to stdout, progress and errors to stderr.
This module and what it imports are read for every ``--help`` and every completion; the rest comes with the work (`cli.work`).
"""

from __future__ import annotations

import os
import sys
from contextlib import redirect_stdout
from io import StringIO

import typer

from autopar.cli import comparing, machine, planning, proving, showing
from autopar.cli.commands import HELP, Commands
from autopar.cli.complete import VARIABLE, BashLine
from autopar.cli.examples import examples_text
from autopar.cli.progress import end_at_once

app = typer.Typer(
    name="autopar", help=HELP, cls=Commands, no_args_is_help=True, rich_markup_mode="rich", pretty_exceptions_show_locals=False
)
for _command in (
    planning.plan,
    showing.show,
    comparing.compare,
    comparing.sweep,
    comparing.scale,
    planning.explain,
    proving.verify,
    proving.check,
    proving.count,
    machine.profile,
    proving.rules,
    machine.demo,
):
    app.command(epilog=examples_text(_command.__name__))(_command)


def main() -> None:
    """The console entry; to a stream that is closed nothing is said."""
    sys.stdout, sys.stderr = (stream or open(os.devnull, "w") for stream in (sys.stdout, sys.stderr))  # noqa: SIM115
    if os.environ.get(VARIABLE) != "complete_bash":
        try:
            app(prog_name="autopar")
        except SystemExit as end:
            if end.code is None or isinstance(end.code, int):
                end_at_once(end.code or 0)
            raise
        return
    line, values = BashLine.of(os.environ), StringIO()
    os.environ.update(line.environment)
    try:
        with redirect_stdout(values):
            app(prog_name="autopar")
    finally:
        for value in values.getvalue().splitlines():
            print(line.shortened(value))
