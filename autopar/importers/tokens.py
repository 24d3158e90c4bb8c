r"""Text as words and marks, as a shell splits it: quotes and comments are gone, and ``$`` with what follows stays as it is written.

    OPTIONS=(--lr 1  # a comment       array  OPTIONS=  ("--lr", "1", "--bf16")
        --bf16)                        mark   \n
    python "a b.py" $OPTIONS; wait     word   python, a b.py, $OPTIONS    mark  ;    word  wait

A comment ends with its line, also where a backslash is the last of it. Redirections are left out with their files; the lines of a
``<<EOF`` are a document. A text that begins with an option is arguments alone: a new line does not end them, and their words may have
brackets and bars (``Et|(tt|)*6,L``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal, NamedTuple

from autopar.errors import ConfigError


class Token(NamedTuple):
    """A word, an array with what is assigned to it, a mark that ends a command, or a document.

    Args:
        kind: which of them.
        text: the word, the mark, the document, or ``NAME=`` and ``NAME+=`` of an array.
        items: words of the array.
    """

    kind: Literal["word", "array", "mark", "document"]
    text: str
    items: tuple[str, ...] = ()


_REDIRECTION = re.compile(r"(?:\d*(?:>>|>&|>\||<<<|<<-|<<|<>|<&|>|<)|&>>?)(?!\()")
_MARK = re.compile(r"\n|;;&|;;|;&|&&|\|\||\|&|[;&|()]")
_BLANK = re.compile(r"(?:[ \t\r]|\\\n)+")
_COMMENT = re.compile(r"#[^\n]*")
_ARRAY = re.compile(r"[A-Za-z_]\w*\+?=")
_SPACE = re.compile(r"(?:\s|\\\n)+")
_LINE = re.compile(r".*")
_CLOSED = re.compile(r"\)")
_BEFORE = re.compile(r"(?:\s|\\\n|#[^\n]*(?:\n|$))*--")
_COMMAND = re.compile(r"[$<>]\(")
_PLAIN = re.compile(r"""'|\\(?!["\\$`\n])""")
"""What stays as it is between double quotes."""
_QUOTED = "'\"`"


class _Text:
    """A text, and how far it is read."""

    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0
        self.is_script = not _BEFORE.match(text)
        self.blank = _BLANK if self.is_script else _SPACE
        self.ends = " \t\r\n;&<>" + ("|()" if self.is_script else "")

    @property
    def is_read(self) -> bool:
        return self.at >= len(self.text)

    def take(self, pattern: re.Pattern[str]) -> str:
        found = pattern.match(self.text, self.at)
        self.at = found.end() if found else self.at
        return found[0] if found else ""

    def skip(self, blank: re.Pattern[str] | None = None) -> None:
        """Go on to the next word or mark."""
        while self.take(blank or self.blank) or self.take(_COMMENT):
            pass

    def next(self, start: int) -> str:
        """One more character of what was opened at ``start``."""
        if self.is_read:
            line = self.text.count("\n", 0, start) + 1
            opened = self.text[start] if self.text[start] in _QUOTED else self.text[start : start + 2]
            raise ConfigError(f"the {opened} in line {line} of the arguments is not closed; close every quote and bracket, as a shell asks")
        self.at += 1
        return self.text[self.at - 1]

    def word(self) -> Token:
        """The word or the array that begins here."""
        parts: list[str] = []
        while not self.is_read and (self.text[self.at] not in self.ends or _COMMAND.match(self.text, self.at)):
            parts.append(self.part())
            if self.text.startswith("(", self.at) and _ARRAY.fullmatch("".join(parts)):
                self.at += 1
                return Token("array", "".join(parts), tuple(self.items()))
        return Token("word", "".join(parts))

    def part(self) -> str:
        """A character, or what stands in quotes or brackets: quotes are taken off."""
        if _COMMAND.match(self.text, self.at) or self.text[self.at] == "`":
            return self.command()
        if self.text.startswith("${", self.at):
            return self.variable()
        char = self.next(self.at)
        if char == "\\":
            return "" if self.is_read else self.next(self.at).replace("\n", "")
        return self.single() if char == "'" else self.double() if char == '"' else char

    def single(self) -> str:
        start = self.at
        while self.next(start - 1) != "'":
            pass
        return self.text[start : self.at - 1]

    def double(self) -> str:
        start, parts = self.at - 1, [""]
        while not self.text.startswith('"', self.at):
            if self.take(_PLAIN):
                parts.append(self.text[self.at - 1])
            elif self.is_read:
                self.next(start)
            else:
                parts.append(self.part())
        self.at += 1
        return "".join(parts)

    def variable(self) -> str:
        start, parts = self.at, ["${"]
        self.at += 2
        while parts[-1] != "}":
            parts.append(self.next(start) if self.is_read else self.part())
        return "".join(parts)

    def command(self) -> str:
        """A command or a sum, which is not run: as it is written."""
        start, depth = self.at, 0
        while True:
            char = self.next(start)
            if char == "\\":
                self.next(start)
            elif char == "'":
                self.single()
            elif char == '"':
                self.double()
            elif char == "`" and self.text[start] == "`":
                depth += 1 if self.at - 1 == start else -1
            elif char in "()" and self.text[start] != "`":
                depth += 1 if char == "(" else -1
            if depth == 0 and char in "`)":
                return self.text[start : self.at]

    def items(self) -> Iterator[str]:
        """Words up to the bracket that closes an array; lines do not matter there."""
        while True:
            self.skip(_SPACE)
            if self.is_read or self.take(_CLOSED):
                return
            start = self.at
            yield self.word().text
            self.at = max(self.at, start + 1)  # a mark is no part of an array


def tokens(text: str) -> Iterator[Token]:
    """
    Raises:
        ConfigError: a quote or a bracket is not closed.
    """
    left, ends = _Text(text), list[str]()
    left.skip()
    while not left.is_read:
        if redirection := left.take(_REDIRECTION):
            left.skip()
            target = left.word().text
            ends += [target] if redirection.endswith(("<<", "<<-")) else []
        elif mark := left.take(_MARK):
            yield Token("mark", mark)
            while mark == "\n" and ends:
                yield Token("document", left.take(re.compile(rf"(?:(?!\t*{re.escape(ends.pop(0))}$).*\n)*", re.MULTILINE)))
                left.take(_LINE)
        else:
            yield left.word()
        left.skip()
