"""Numbers as people read them: bytes, seconds, counts and shares."""

from __future__ import annotations

from numbers import Integral


def bytes_text(num_bytes: float) -> str:
    """``1.5 GiB``; three significant digits, powers of 1024."""
    return _scaled(num_bytes, 1024.0, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"))


def count_text(count: float) -> str:
    """``162 k``; three significant digits, powers of 1000."""
    return _scaled(count, 1000.0, ("", "k", "M", "G", "T", "P")).rstrip()


def number_text(count: int, one: str, many: str = "") -> str:
    """``1 node``, ``2 nodes``; ``many`` is for nouns that do not end in s."""
    return f"{count} {one if count == 1 else many or one + 's'}"


def is_whole(value: object) -> bool:
    """Whether it is a whole number; True and False are none."""
    return type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))


def seconds_text(seconds: float) -> str:
    """``25.2 ms``; three significant digits, from nanoseconds to hours."""
    if seconds == 0:
        return "0 s"
    if seconds >= 3600:
        return f"{seconds / 3600:.3g} h"
    if seconds >= 60:
        return f"{seconds / 60:.3g} min"
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if round(seconds / size, 3 if unit == "us" else 6) >= 1:
            return f"{_digits(seconds / size)} {unit}"
    return f"{_digits(seconds / 1e-9)} ns"


def share_text(share: float) -> str:
    """``3.0%``"""
    return f"{100 * share:.1f}%"


def _scaled(value: float, step: float, units: tuple[str, ...]) -> str:
    for unit in units[:-1]:
        if abs(value) < 999.5 and abs(value) < step:
            return f"{_digits(value)} {unit}"
        value /= step
    return f"{_digits(value)} {units[-1]}"


def _digits(value: float) -> str:
    """Three significant digits, never in powers of ten."""
    if value == int(value) and abs(value) < 1000:
        return str(int(value))
    return f"{value:.0f}" if abs(value) >= 99.95 else f"{value:.1f}" if abs(value) >= 9.995 else f"{value:.2f}"
