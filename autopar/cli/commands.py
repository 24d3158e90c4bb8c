"""What all commands have in common: the help of the program, and how errors and warnings are shown."""

from __future__ import annotations

import json
import warnings
from typing import Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from autopar.cli.figures import error_data, json_text
from autopar.cli.options import JSON_MODE
from autopar.errors import AutoparError

_PARAGRAPHS = (
    "Automatic parallelization of PyTorch models: plan, compare and verify from the shell.",
    "A MODEL is [bold]module:function[/bold] (the function returns a model, or a model and a batch); a configuration of transformers, "
    "as [bold]hf:gpt2[/bold], hf:llama, hf:bert, hf:distilbert, hf:vit, [bold]hf:path/config.json[/bold], or the name of one that was "
    "downloaded before; or a GPT-2 by its sizes, [bold]--gpt layers=24,hidden=2048,heads=16[/bold]. It has random weights and is built on "
    "the meta device, without memory, unless --real.",
    "A cluster is [bold]4x8:a100-80gb[/bold] (nodes x devices : device), the file of a saved one, or [bold]local[/bold], this machine as "
    "`autopar profile` measures it.",
    "With --json stdout is one JSON document, in bytes and seconds; warnings and errors are JSON on stderr, one a line.",
    "Exit codes: 0 all is well; 1 the request cannot be met, or something is wrong (the text says what); 2 no such option, or no value for "
    "it; 3 interrupted, with the best plan found until then; 130 interrupted without one.",
    "`autopar --install-completion` completes commands, options and values in bash, zsh and fish.",
)
HELP = "\n\n".join(_PARAGRAPHS)

STOPPED = 3
"""Exit code of a command that was interrupted and has a plan nevertheless."""

WRONG_USAGE = 2
"""Exit code where there is no such option, or no value for it."""
_UsageError: Any = typer.BadParameter.__base__
"""Of click, or of the copy of it that newer versions of typer have."""


class Commands(TyperGroup):
    """Errors that a user can cause are one text on stderr and exit code 1, or 2 where options are wrong."""

    def invoke(self, ctx: Any) -> Any:
        stderr = Console(stderr=True, markup=False, highlight=False, soft_wrap=True)

        def warn(message: Warning | str, *_: Any, **__: Any) -> None:
            stderr.print(json.dumps({"warning": str(message)}) if ctx.meta.get(JSON_MODE) else f"warning: {message}")

        code = 1
        with warnings.catch_warnings():
            warnings.showwarning = warn
            try:
                return super().invoke(ctx)
            except (typer.Exit, BrokenPipeError):  # an end with a code; or whom it is printed to has seen enough, as head
                raise
            except AutoparError as error:
                raised: Exception = error
                text = str(error)
            except OSError as error:
                raised = error
                text = f"{error.filename}: {error.strerror}" if error.filename else str(error)
            except Exception as error:  # of the user's own code
                if not ctx.meta.get(JSON_MODE):
                    raise
                raised, text = error, f"{type(error).__name__}: {error}"
                code = WRONG_USAGE if isinstance(error, _UsageError) else 1
        if ctx.meta.get(JSON_MODE):
            stderr.print(json_text({"error": error_data(raised, text), "exit_code": code}, indent=None))
        else:
            stderr.print(f"error: {text}")
        raise typer.Exit(code)
