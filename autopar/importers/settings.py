"""Settings of one source by name: each is read with its type, or left out, or does not matter, or is unknown.

A reader asks for what it understands; a setting that was renamed over the years is asked for by all of its names at once. What was not
asked for is sorted by the reader's tables, whose names may hold ``*``: `LeftOut` for what changes a run, a list for what does not.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import NoReturn

from autopar.errors import ConfigError
from autopar.importers.record import Imported
from autopar.solve.manual import Manual
from autopar.solve.recompute import at_share
from autopar.units import number_text

NEUTRAL: tuple[object, ...] = (None, False, 0, "", "none", [])
"""Values that turn a setting off."""

PRECISION = "a Manual computes in bf16, fp16 or fp32, sums gradients in float32 or in that, and keeps the rest in float32"
DTYPES = {
    **dict.fromkeys(("bf16", "bfloat16", "bf16-mixed", "bf16-true"), "bf16"),
    **dict.fromkeys(("fp16", "float16", "half", "16", "16-mixed", "16-true"), "fp16"),
    **dict.fromkeys(("fp32", "float32", "float", "32", "32-true"), "fp32"),
}
"""What dtypes are called, and what a `Manual` calls them."""
OVERLAP = "autopar decides itself what it overlaps"
KERNELS = "kernels are priced by the profile of the device"
COLLECTIVES = "collectives are priced by the profile of the interconnect"
OFFLOAD = "a Manual offloads all of a kind (optimizer, parameters, activations) to the memory of the host, or nothing"
CUT = "autopar finds the cut into stages itself"
OPTIMIZER = "the optimizer is the one that the comparison is asked for"
SELECTIVE = "a Manual's selective recomputation is all but products of matrices, of every block"


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Settings that change a run and that a `Manual` cannot say.

    Args:
        why: what autopar does instead.
        names: their names, with spaces between.
        neutral: values at which they change nothing.
    """

    why: str
    names: str
    neutral: tuple[object, ...] = NEUTRAL


class Settings:
    """The settings of a source.

    Args:
        source: what errors call it.
        values: by full name; None is a setting that is not stated.
    """

    def __init__(self, source: str, values: Mapping[str, object]) -> None:
        self.source = source
        self.values = dict(values)
        self._read: set[str] = set()
        self._notes: list[str] = []

    @property
    def asked(self) -> frozenset[str]:
        """Names that were asked for."""
        return frozenset(self._read)

    def fail(self, text: str) -> NoReturn:
        raise ConfigError(f"{self.source}: {text}")

    def refuse(self, what: str, why: str) -> NoReturn:
        self.fail(
            f"cannot be expressed: {what}: {why}; a Manual has dp, tp, pp, cp, ep, replicas, one ZeRO level, and schedules gpipe, 1f1b, "
            "zb-h1 and interleaved"
        )

    def stated(self, *names: str) -> tuple[str, object]:
        """The name and the value of a setting that has several names; the value is None if none of them is stated."""
        self._read.update(names)
        found = [(name, self.values[name]) for name in names if self.values.get(name) is not None]
        for name, value in found[1:]:
            if value != found[0][1]:
                self.fail(f"{found[0][0]} is {found[0][1]!r}, but {name} is {value!r}; they mean the same, so drop one")
        return found[0] if found else (names[0], None)

    def recomputed(self, method: tuple[str, str | None], layers: tuple[str, int | None], held: int | None) -> str | None:
        """The level of Megatron's full recomputation: of every layer, or by the method ``block`` of the first ``layers`` of a stage; None
        if these are none.

        Args:
            method, layers: names of both settings, and their values.
            held: layers of a stage, if they are known and alike.

        Raises:
            ConfigError: ``uniform`` groups are of no layers.
        """
        (method_name, how), (name, count) = method, layers
        if how is None or (how == "uniform" and count in (None, 1)):
            return "full"
        if how == "block" and count == 0:
            return None
        if how == "uniform" and count == 0:
            self.fail(f"{name} is 0 with {method_name} uniform, whose groups have layers; write a whole number of at least 1")
        if how == "block" and held is not None and count:
            if count < held:
                self.leave_out(f"{name}={count}", f"in the other {held - count} of {held} layers a Manual computes pointwise ops again")
            return at_share("full", count, held)
        self.leave_out(f"{method_name}={how} {name}={count}", "a Manual recomputes every block on its own")
        return "full"

    def integer(self, *names: str, least: int = 1) -> int | None:
        """A whole number, or None.

        Raises:
            ConfigError: it is something else, or smaller than ``least``.
        """
        name, value = self.stated(*names)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            self.fail(f"{name} {_said(value)}; write a whole number of at least {least}")
        return value

    def degree(self, *names: str) -> int:
        return self.integer(*names) or 1

    def flag(self, *names: str, default: bool = False) -> bool:
        """True or false.

        Raises:
            ConfigError: it is something else.
        """
        name, value = self.stated(*names)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.fail(f"{name} {_said(value)}; write true or false")
        return value

    def word(self, *names: str, among: Sequence[str] = ()) -> str | None:
        """A text in lower case, or None.

        Raises:
            ConfigError: it is something else, or not one of ``among``.
        """
        name, value = self.stated(*names)
        if value is None:
            return None
        if not isinstance(value, str) or (among and value.lower() not in among):
            self.fail(f"{name} {_said(value)}; write {'one of ' + ', '.join(among) if among else 'a text'}")
        return value.lower()

    def dtype(self, *names: str) -> str | None:
        """``bf16``, ``fp16``, ``fp32``, or None. Names that mean the same may write it differently.

        Raises:
            ConfigError: it is another one, or two names contradict each other.
        """
        self._read.update(names)
        found: dict[str, str] = {}
        for name in names:
            value = self.values.get(name)
            if value is not None:
                text = str(value).lower().removeprefix("torch.")
                if text not in DTYPES:
                    self.fail(f"{name} is {value!r}; write a dtype, such as bf16, fp16 or fp32")
                found[name] = DTYPES[text]
        if len({*found.values()}) > 1:
            self.fail(f"{' and '.join(f'{name}={self.values[name]}' for name in found)} contradict each other; change one")
        return next(iter(found.values()), None)

    def precision(self, compute: str | None, reduce: str | None) -> str:
        """What a `Manual` says of both dtypes; nothing if it is not said what the program computes in."""
        if compute is None:
            return ""
        if reduce not in (None, "fp32", compute):
            self.leave_out(f"gradients reduced in {reduce} beside {compute}", f"{PRECISION}; taken as {compute}")
            reduce = compute
        return compute if compute == "fp32" or reduce in (None, "fp32") else f"{compute}/{reduce}"

    def refuse_degree(self, what: str, *names: str) -> None:
        """
        Raises:
            ConfigError: the degree is more than 1.
        """
        name, _ = self.stated(*names)
        if (self.integer(*names, least=0) or 1) > 1:
            self.refuse(f"{name} is {self.values[name]}", f"{what} is none of its degrees")

    def context_parallel(self, *names: str) -> int:
        """The degree, with a note that it is done otherwise here."""
        cp, (name, _) = self.degree(*names), self.stated(*names)
        if cp > 1:
            self.leave_out(f"{name}={cp}", "keys and values are gathered and all scores computed; they are not sent around a ring")
        return cp

    def expert_parallel(self, *names: str, dp: int) -> int:
        """The degree.

        Raises:
            ConfigError: it does not divide the data-parallel ranks.
        """
        name, _ = self.stated(*names)
        ep = self.integer(*names, least=0) or 1
        if dp % ep:
            self.refuse(f"{name} is {self.values[name]} of {dp} data-parallel ranks", "only data-parallel ranks share its experts")
        return ep

    def replicas(self, name: str, *, dp: int) -> int:
        """Parts of the data-parallel ranks that hold the same shards.

        Raises:
            ConfigError: they do not divide the data-parallel ranks.
        """
        replicas = self.degree(name)
        if dp % replicas:
            self.refuse(f"{name} is {replicas} of {dp} data-parallel ranks", "its replicas are parts of them")
        return replicas

    def leave_out(self, what: str, why: str) -> None:
        self._notes.append(f"{what}: {why}")

    def honour(self, *names: str) -> None:
        """Settings that the tables know as left out, and that this configuration can say."""
        self.values |= dict.fromkeys(names)

    def check_ranks(self, num_ranks: object) -> None:
        """
        Raises:
            ConfigError: it is no number of ranks.
        """
        if isinstance(num_ranks, bool) or not isinstance(num_ranks, int) or num_ranks < 1:
            self.fail(f"num_ranks is {num_ranks!r}; write a whole number of at least 1")

    def data_parallel(self, num_ranks: int, **degrees: int) -> int:
        """The ranks that the other degrees leave.

        Raises:
            ConfigError: they do not divide the ranks, or there are none.
        """
        self.check_ranks(num_ranks)
        product = math.prod(degrees.values())
        if num_ranks % product:
            text = " * ".join(f"{name} {degree}" for name, degree in degrees.items())
            self.fail(f"{text} = {product} does not divide the {number_text(num_ranks, 'rank')}; change a degree or the number of ranks")
        return num_ranks // product

    def check_batch(self, batch: int, *, dp: int, micro_batch: int) -> None:
        """
        Raises:
            ConfigError: the global batch is no multiple of what one micro-batch takes on all data-parallel ranks.
        """
        if batch % (dp * micro_batch):
            self.fail(
                f"a global batch of {batch} is not a multiple of dp {dp} * micro-batch {micro_batch} = {dp * micro_batch}; change one"
            )

    def imported(
        self,
        config: Manual,
        *,
        batch_size: int | None,
        sequence: int | None,
        left_out: Iterable[LeftOut],
        irrelevant: str,
    ) -> Imported:
        """The record, once all that matters has been asked for; the tables sort the rest."""
        notes, unknown, tables = list(self._notes), [], list(left_out)
        patterns = irrelevant.split()
        for name, value in self.values.items():
            table = next((t for t in tables if matches(name, t.names.split())), None)
            text = name if value is True and name.startswith(("--", "$")) else f"{name}={value}"
            if table is not None:
                notes += [f"{text}: {table.why}"] if value not in table.neutral else []
            elif name not in self._read and not matches(name, patterns):
                unknown.append(text)
        return Imported(config, batch_size, sequence, tuple(notes), tuple(unknown))


def _said(value: object) -> str:
    if value is True:
        return "is true, or has no value"
    return f"is {value!r}" + (", a variable that is assigned elsewhere" if isinstance(value, str) and "$" in value else "")


def matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
