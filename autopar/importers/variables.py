"""Variables of a shell script: words with what they hold in their place, assignments, and tests of them."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase

from autopar.importers.tokens import Token

Values = Mapping[str, tuple[str, ...]]
"""Words by the name of their variable."""

_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*\+?=.*", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:\{([A-Za-z_]\w*|\d+)(?:\[[@*]\])?(?:(:?-)((?:[^{}]|\{[^{}]*\})*))?\}|([A-Za-z_]\w*))")
_UNKNOWN = re.compile(r"[$`]")
_COMMAND = re.compile(r"\$\((?!\()|`")
_NUMBERS: Mapping[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-gt": operator.gt,
    "-ge": operator.ge,
    "-lt": operator.lt,
    "-le": operator.le,
}


def expanded(word: str, variables: Values) -> list[str]:
    """A word with the variables that are known; one that is a variable and nothing else may become several words."""
    whole = _VARIABLE.fullmatch(word)
    if whole and (values := _values(whole, variables)) is not None:
        return [part for value in values for part in value.split()]
    return [_VARIABLE.sub(lambda match: match[0] if (values := _values(match, variables)) is None else " ".join(values), word)]


def _values(variable: re.Match[str], variables: Values) -> Sequence[str] | None:
    """What a variable holds, or the default that stands beside it; None if neither is known."""
    bare, sign, default, plain = variable.groups()
    known = variables.get(bare or plain)
    if default is None or (known is not None and (sign == "-" or any(known))):
        return known
    return expanded(default, variables)


def name_of(token: Token) -> str:
    """The variable that an assignment is to."""
    return token.text.partition("=")[0].removesuffix("+")


def assigned(token: Token, values: Values) -> tuple[str, ...]:
    """What an assignment gives to its variable."""
    before = values.get(name_of(token), ()) if token.text.partition("=")[0].endswith("+") else ()
    if token.kind == "array":
        return (*before, *(part for item in token.items for part in expanded(item, values)))
    return (" ".join(before) + " ".join(expanded(token.text.partition("=")[2], values)),)


def is_known(text: str) -> bool:
    """Whether a text without the variables that are known has no others, and no command."""
    return not _UNKNOWN.search(text)


def runs_command(token: Token) -> bool:
    """Whether a word or an array runs a command to know its value."""
    return any(_COMMAND.search(text) for text in (token.text, *token.items))


def is_assignment(token: Token) -> bool:
    return token.kind == "array" or (token.kind == "word" and _ASSIGNMENT.fullmatch(token.text) is not None)


def holds(words: Sequence[str]) -> bool | None:
    """Whether a command succeeds; None if that is not known."""
    if words in (["true"], [":"], ["false"]):
        return words != ["false"]
    if words[0] not in ("[", "[[", "test") or not all(map(is_known, words)):
        return None
    match [word for word in words[1:] if word not in ("]", "]]")]:
        case ["-z" | "-n" as sign, text]:
            return (text == "") == (sign == "-z")
        case [left, "=" | "==" | "!=" as sign, right]:
            is_equal = fnmatchcase(left, right) if words[0] == "[[" else left == right
            return is_equal == (sign != "!=")
        case [left, sign, right] if sign in _NUMBERS and re.fullmatch(r"-?\d+", left) and re.fullmatch(r"-?\d+", right):
            return bool(_NUMBERS[sign](int(left), int(right)))
    return None
