"""Lines of rules: read, printed, read again; bound to shapes; refused."""

from __future__ import annotations

import pytest

from autopar.errors import RuleError
from autopar.rules.notation import Rule

LINES = [
    "b s k, n k -> b s n ; 0 | 1",
    "b s (n! d) -> b s d, b s d, b s d ; 0",
    "v@ d, b -> b d ; 0",
    "n c&, n -> .",
    "a0 a1, 1 a1 -> a0 a1 ; 0 1",
    "b (h g) s! d!, b h t! d!, b h t! e, 1 s! t! -> b (h g) s! e ; 2",
    " -> a!",
    "k, k -> . ; 0 | 1",
]


@pytest.mark.parametrize("text", LINES)
def test_a_line_prints_as_it_was_written(text: str) -> None:
    rule = Rule.parse(text)
    assert str(rule) == text
    assert Rule.parse(str(rule)) == rule


def test_what_a_line_says() -> None:
    rule = Rule.parse("v@ (h d) x!, b c& -> b h 1 ; 0 | 0 1", h=2)
    assert rule.operands == ((("v",), ("h", "d"), ("x",)), (("b",), ("c",)))
    assert rule.results == ((("b",), ("h",), ()),)
    assert rule.whole == {"x"}
    assert rule.ranged == {"v", "c"}
    assert rule.reduced == {"c"}
    assert rule.summed == {"v", "d"}
    assert rule.linear == (frozenset({0}), frozenset({0, 1}))
    assert rule.letters == ("v", "h", "d", "x", "b", "c")


def test_bind_finds_the_size_of_every_factor() -> None:
    rule = Rule.parse("b (n! d) -> b d, b d")
    assert rule.bind([(4, 12)], [(4, 6), (4, 6)]) == {"b": 4, "n": 2, "d": 6}
    assert Rule.parse("(h d) -> h d").bind([(12,)], [(3, 4)]) == {"h": 3, "d": 4}
    assert Rule.parse("(h d) -> (h d)", h=3).bind([(12,)], [(12,)]) == {"h": 3, "d": 4}


@pytest.mark.parametrize(
    "text, complaint",
    [
        ("b k, n k", "has no '->'"),
        ("b K -> b", "cannot read factor 'K'"),
        ("b -> b ; 1", "calls an operand linear that it has not"),
        ("b (k -> b", "cannot read factor"),
    ],
)
def test_a_bad_line_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(RuleError, match=complaint.replace("(", r"\(")):
        Rule.parse(text)


@pytest.mark.parametrize(
    "text, operands, results",
    [
        ("b k -> b", [(4, 2)], [(2,)]),
        ("b k -> b", [(4,)], [(4,)]),
        ("b, b -> b", [(4,)], [(4,)]),
        ("b 1 -> b", [(4, 2)], [(4,)]),
        ("(h d) -> (h d)", [(12,)], [(12,)]),
        ("(h d) -> h d", [(12,)], [(5, 2)]),
    ],
)
def test_a_line_that_does_not_fit_is_refused(
    text: str, operands: list[tuple[int, ...]], results: list[tuple[int, ...]]
) -> None:
    with pytest.raises(RuleError, match=r"does not fit"):
        Rule.parse(text).bind(operands, results)
