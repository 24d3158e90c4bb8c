"""Where rows of `autopar.log` go: standard output, a CSV file, TensorBoard, or what the script gives."""

from __future__ import annotations

import csv
import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from autopar.errors import LogError
from autopar.show.log import FIGURES, Row, row_text

TENSORBOARD = "tensorboard:"
KINDS = (
    'to is "stdout", a path that ends in .csv, "tensorboard:folder", a logging.Logger, a function of a dict, an object with '
    ".log(dict, step=), or a list of these"
)


class Sink(Protocol):
    def open(self, header: str) -> None:
        """Called once, before the first row."""

    def write(self, row: Row) -> None:
        """One more row, of a later step than all before."""

    def rewind(self, step: int) -> None:
        """Training goes on after that step: later rows are those of steps that are done again."""

    def close(self) -> None:
        """No row comes any more."""


class _Given:
    """A sink that needs nothing but rows."""

    def open(self, header: str) -> None: ...

    def rewind(self, step: int) -> None: ...

    def close(self) -> None: ...


class Stdout(_Given):
    """Lines, above the bars of tqdm where the script has it."""

    def open(self, header: str) -> None:
        self._print(header)

    def write(self, row: Row) -> None:
        self._print(row_text(row))

    def _print(self, line: str) -> None:
        bars = getattr(sys.modules.get("tqdm"), "tqdm", None)
        if bars is not None:
            bars.write(line)  # which prints, where there are no bars
        else:
            print(line, flush=True)


@dataclass
class Lines(_Given):
    """Lines of a logger, as information."""

    logger: logging.Logger

    def open(self, header: str) -> None:
        self.logger.info(header)

    def write(self, row: Row) -> None:
        self.logger.info(row_text(row))


@dataclass
class Called(_Given):
    """A function of a row."""

    take: Callable[[dict[str, float]], object]

    def write(self, row: Row) -> None:
        self.take(dict(row))


@dataclass
class Logged(_Given):
    """An object with ``.log(dict, step=)``, as a run of wandb."""

    run: Any

    def write(self, row: Row) -> None:
        self.run.log({name: value for name, value in row.items() if name != "step"}, step=int(row["step"]))


@dataclass
class Csv(_Given):
    """A file of comma-separated values with one header. A file that is there is gone on with.

    Its columns are those of its header. A row with another name adds a column at the right end, empty in the rows before, for which the
    file is written anew beside itself and put in place. A last line without its end, of a process that died, is dropped.
    """

    path: Path
    _columns: list[str] = field(default_factory=list)
    _rewinds_to: int | None = None

    def open(self, header: str) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        rows = self.read()
        self._columns = [*(rows[0] if rows else FIGURES)]
        if rows and self._rewinds_to is not None:
            at, last = self._columns.index("step"), self._rewinds_to
            rows = [rows[0], *(row for row in rows[1:] if len(row) > at and row[at] and float(row[at]) <= last)]
        self._replace(rows or [self._columns])

    def read(self) -> list[list[str]]:
        """Header and rows of the file that is there.

        Raises:
            LogError: it is not one of these.
        """
        text = self.path.read_text() if self.path.exists() else ""
        rows = [row for row in csv.reader(text[: text.rfind("\n") + 1].splitlines()) if row]
        if rows and "step" not in rows[0]:
            begin = ",".join(rows[0])[:60]
            raise LogError(f"{self.path} is there and has no column step (it begins {begin!r}); give autopar.log another path")
        return rows

    def write(self, row: Row) -> None:
        new = [name for name in row if name not in self._columns]
        if new:
            rows = self.read()
            self._columns += new
            self._replace([self._columns, *rows[1:]])
        with self.path.open("a", newline="") as file:
            csv.writer(file, lineterminator="\n").writerow([_cell(row.get(name)) for name in self._columns])

    def rewind(self, step: int) -> None:
        self._rewinds_to = step
        if self._columns:
            self.open("")

    def _replace(self, rows: Sequence[Sequence[str]]) -> None:
        beside = self.path.with_name(f".{self.path.name}.new")
        with beside.open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([*row, *[""] * (len(self._columns) - len(row))] for row in rows)
        os.replace(beside, self.path)


def _cell(value: float | None) -> str:
    return "" if value is None else str(int(value)) if float(value).is_integer() and abs(value) < 2**53 else repr(float(value))


@dataclass
class TensorBoard(_Given):
    """Scalars of a `torch.utils.tensorboard.SummaryWriter`.

    Raises:
        LogError: TensorBoard is not installed.
    """

    folder: str
    _writer: Any = None
    _purge_step: int | None = None

    def __post_init__(self) -> None:
        self._make = _summary_writer()

    def open(self, header: str) -> None:
        self._writer = self._make(self.folder, purge_step=self._purge_step)
        self._writer.add_text("autopar", header, self._purge_step)

    def write(self, row: Row) -> None:
        for name, value in row.items():
            if name not in ("step", "unix_time_s"):  # which every event has
                self._writer.add_scalar(name, value, int(row["step"]), walltime=row["unix_time_s"])

    def rewind(self, step: int) -> None:
        self._purge_step = step + 1
        if self._writer is not None:
            self._writer.close()
            self._writer = self._make(self.folder, purge_step=self._purge_step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def _summary_writer() -> Callable[..., Any]:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise LogError(f"{TENSORBOARD!r} needs TensorBoard, which is not installed ({error}): pip install tensorboard") from error
    return SummaryWriter


def sink_of(given: object) -> Sink:
    """The sink that a word, a path, a function or an object stands for.

    Raises:
        LogError: none, or it cannot be written to.
    """
    if given == "stdout":
        return Stdout()
    if isinstance(given, str) and given.startswith(TENSORBOARD):
        folder = given.removeprefix(TENSORBOARD)
        if not folder:
            raise LogError(f"{given!r} names no folder; write {TENSORBOARD}runs/name")
        return TensorBoard(folder)
    if isinstance(given, str | Path):
        if Path(given).suffix != ".csv":
            raise LogError(f"cannot log to {str(given)!r}; {KINDS}")
        made = Csv(Path(given))
        made.read()
        return made
    if isinstance(given, logging.Logger):
        return Lines(given)
    if callable(getattr(given, "log", None)):
        return Logged(given)
    if callable(given):
        return Called(given)
    raise LogError(f"cannot log to {given!r} of type {type(given).__name__}; {KINDS}")
