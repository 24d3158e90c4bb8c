"""What all commands have in common: the help of the program, and how errors are shown."""

from __future__ import annotations

import warnings
from typing import Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from autopar.errors import AutoparError

HELP = """Automatic parallelization of PyTorch models: plan, compare and verify from the shell.

A MODEL is [bold]module:function[/bold] (the function returns a model, or a model and a batch), or a configuration of
transformers: [bold]hf:gpt2[/bold], hf:llama, hf:bert, hf:distilbert, hf:vit, or [bold]hf:path/config.json[/bold].
It has random weights and is built on the meta device, without memory, unless --real.

Exit codes: 0 all is well, 1 the request cannot be met (the text says why), 2 wrong usage, 130 interrupted.
"""


class Commands(TyperGroup):
    """Errors that a user can cause are one text on stderr and exit code 1."""

    def invoke(self, ctx: Any) -> Any:
        stderr = Console(stderr=True, markup=False, highlight=False, soft_wrap=True)
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_: stderr.print(f"warning: {message}")
            try:
                return super().invoke(ctx)
            except AutoparError as error:
                reason = str(error)
            except OSError as error:
                reason = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        stderr.print(f"error: {reason}")
        raise typer.Exit(1)
