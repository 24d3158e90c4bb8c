"""What is seen while a command works, on stderr where that is a terminal: the time since it began, the phase, and the best plan so far."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from autopar.report import Best, Counted, Report, Stopping, silent

INTERRUPTED = 130
"""Exit code of a command that Ctrl-C has ended, as in every shell."""


def end_at_once(code: int) -> None:
    """End the process as its end would, but for what frees the graphs of torch piece by piece, which takes more than a second."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def width() -> int:
    return max(80, min(Console().width, 160)) if sys.stdout.isatty() else 100


class Display:
    """A bar with the time and the phase, which fills where it is known how much there is; below it the best so far."""

    def __init__(self) -> None:
        self.bar = Progress(
            SpinnerColumn(), TimeElapsedColumn(), BarColumn(bar_width=16), TextColumn("{task.description}", markup=False)
        )
        self.task = self.bar.add_task("starting", total=None)
        self.best = ""

    def __call__(self, text: str) -> None:
        if isinstance(text, Best):
            self.best = text
            return
        self.bar.update(self.task, description=text)
        if isinstance(text, Counted):
            self.bar.update(self.task, completed=text.done, total=text.total)

    def __rich__(self) -> Group:
        lines = [Text(f"  best so far: {self.best}", no_wrap=True, overflow="ellipsis")] if self.best else []
        return Group(self.bar, *lines)


@contextmanager
def progress(fallback: Report = silent) -> Iterator[Report]:
    """Who to report to: the display, or ``fallback`` where stderr is not a terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield fallback
        return
    display = Display()
    with Live(display, console=console, transient=True, refresh_per_second=8):
        yield display


class Interrupts:
    """Reports on, and hears of Ctrl-C: an interrupt that was lost on its way is raised at the next line.

    torch sometimes loses one while it captures a model (seen: torch 2.13).
    """

    def __init__(self, report: Report, stopping: str) -> None:
        self.report, self.stopping = report, stopping
        self.count = 0
        self.is_heeded = False

    def __call__(self, text: str) -> None:
        self.is_heeded |= isinstance(text, Stopping)
        if self.count and not self.is_heeded:
            raise KeyboardInterrupt
        self.report(text)

    def listen(self, source: int) -> None:
        """Take the bytes of signals from a pipe until it is closed; at the second interrupt the process ends."""
        while byte := os.read(source, 1):
            if byte[0] != signal.SIGINT:
                continue
            self.count += 1
            if self.count == 1:
                self.report(self.stopping)
            else:
                Console(stderr=True).show_cursor()
                os._exit(INTERRUPTED)


@contextmanager
def interruptible(report: Report, stopping: str) -> Iterator[Report]:
    """In it the first Ctrl-C is reported at once and raises KeyboardInterrupt as soon as Python runs; a second ends the process.

    Python runs signal handlers between its own instructions only, and torch captures and differentiates for seconds: so a thread hears of
    signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield report
        return
    heard, told = os.pipe()
    os.set_blocking(told, False)
    before = signal.set_wakeup_fd(told, warn_on_full_buffer=False)
    interrupts = Interrupts(report, stopping)
    listener = threading.Thread(target=interrupts.listen, args=(heard,), daemon=True)
    listener.start()
    try:
        yield interrupts
    finally:
        signal.set_wakeup_fd(before)
        os.close(told)
        listener.join()
        os.close(heard)
