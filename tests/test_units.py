from __future__ import annotations

import pytest

from autopar.units import bytes_text, count_text, number_text, seconds_text, share_text


@pytest.mark.parametrize(
    "num_bytes, text",
    [
        (0, "0 B"),
        (1, "1 B"),
        (1023, "1.00 KiB"),
        (1024, "1 KiB"),
        (1536, "1.50 KiB"),
        (2**20 * 101, "101 MiB"),
        (80 * 2**30, "80 GiB"),
        (2**60 * 5, "5120 PiB"),
    ],
)
def test_bytes(num_bytes: int, text: str) -> None:
    assert bytes_text(num_bytes) == text


@pytest.mark.parametrize(
    "seconds, text",
    [
        (0.0, "0 s"),
        (1.0, "1 s"),
        (0.02524, "25.2 ms"),
        (0.9999, "1000 ms"),
        (0.000414, "414 us"),
        (3e-9, "3 ns"),
        (90, "1.5 min"),
        (7200, "2 h"),
    ],
)
def test_seconds(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text


@pytest.mark.parametrize("count, text", [(162252.2, "162 k"), (999, "999"), (67.2e6, "67.2 M"), (175e9, "175 G")])
def test_counts(count: float, text: str) -> None:
    assert count_text(count) == text


def test_share() -> None:
    assert share_text(0.0305) == "3.0%"


def test_a_number_of_things() -> None:
    assert [number_text(count, "node") for count in (0, 1, 2)] == ["0 nodes", "1 node", "2 nodes"]
    assert [number_text(count, "axis", "axes") for count in (0, 1, 2)] == ["0 axes", "1 axis", "2 axes"]
