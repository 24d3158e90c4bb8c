r"""The words of a launch script: what a shell would give to the program, as far as the text itself says.

Commands are read as in a shell, and so are the two ways in which launch scripts keep their arguments:

    OPTIONS=(--num-layers 96 --hidden-size 12288)        OPTIONS="--num-layers 96"
    torchrun --nproc-per-node 8 pretrain_gpt.py ${OPTIONS[@]} --bf16

Variables that are assigned elsewhere have their default, as in `${TP:-4}`, or stay as they are written. No command is run. A test of what
is known (`[ "$DTYPE" = fp8 ]`) is decided; where one is not, the script goes on in both ways, so that it may give several lists of words.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from itertools import takewhile

from autopar.errors import ConfigError
from autopar.importers.tokens import Token, tokens
from autopar.importers.variables import (
    Values,
    assigned,
    expanded,
    holds,
    is_assignment,
    is_known,
    name_of,
    runs_command,
)

MOST_WAYS = 4096
"""Ways through a script beyond which it is not read."""
MOST_DEEP = 4
"""Scripts in a script beyond which they are not looked into."""

_LAUNCH = re.compile(r"\.py\s")
_DECLARATIONS = frozenset({"export", "declare", "local", "readonly", "typeset", "env"})
_LOOPS = ("for", "select", "while", "until")
_BEFORE_COMMANDS = frozenset({"then", "else", "do", "{", "!", "time"})
_CLOSING = {"fi": "if", "esac": "case", "done": "loop", "}": "{"}


@dataclass(frozen=True, slots=True)
class _Way:
    """One way through a script up to a command.

    Args:
        values: of the variables.
        is_done: whether the last command succeeded; None if that is not known.
    """

    values: Values
    is_done: bool | None = None


@dataclass(slots=True)
class _Block:
    """What a reserved word has opened.

    Args:
        kind: ``if``, ``case``, ``loop``, or the bracket.
        around: ways that the chain around it leaves out.
        rest: ways that no branch has taken so far; of a loop or a bracket, those before it.
        ends: ways at the ends of branches.
        word: what a ``case`` looks at.
        patterns: of the branch that is to come; None within a branch.
    """

    kind: str
    around: list[_Way]
    rest: list[_Way]
    ends: list[_Way] = field(default_factory=list)
    word: str = ""
    patterns: list[str] | None = None


@dataclass(frozen=True, slots=True)
class _Launch:
    """A command that runs a program.

    Args:
        ways: lists of words that the program may be given.
        has_program: whether it names a Python file.
        is_certain: whether it stands outside of branches and loops.
    """

    ways: list[list[str]]
    has_program: bool
    is_certain: bool


def _merged(ways: Iterable[_Way], names: Iterable[str]) -> list[_Way]:
    """Ways that differ. Of these names, what one of them does not assign is empty in it.

    Raises:
        ConfigError: there are too many.
    """
    empty: Values = dict.fromkeys(names, ())
    found = [_Way({**empty, **way.values}, way.is_done) for way in ways]
    distinct = {(frozenset(way.values.items()), way.is_done): way for way in found}
    if len(distinct) > MOST_WAYS:
        raise ConfigError(f"the branches of the script leave more than {MOST_WAYS} ways through it; give the arguments themselves")
    return list(distinct.values())


def _chosen(launches: Sequence[_Launch], wanted: str) -> _Launch:
    """The last launch that is given what is wanted; those on branches are as many ways if none is certain."""
    given = [launch for launch in launches if any(word.partition("=")[0] == wanted for words in launch.ways for word in words)]
    named = [launch for launch in given or launches if launch.has_program] or given or launches
    certain = [launch for launch in named if launch.is_certain][-1:]
    ways = {tuple(words): words for launch in certain or named for words in launch.ways}
    return _Launch(list(ways.values()), any(launch.has_program for launch in named), bool(certain))


class _Script:
    """A script as far as it is read: the ways that lead here, and the launches on them.

    Args:
        found: its tokens.
        wanted: an option that launches have.
        depth: number of scripts around it.
    """

    def __init__(self, found: Iterable[Token], wanted: str, depth: int = 0) -> None:
        self.wanted, self.depth = wanted, depth
        self.ways = [_Way({})]
        self.left_out: list[_Way] = []  # by ``&&`` and ``||`` of this chain
        self.blocks: list[_Block] = []
        self.launches: list[_Launch] = []
        self.names: dict[str, None] = {}  # of the variables that are assigned on some way
        self.bodies: dict[str, list[Token]] = {}  # of functions
        self.returned: list[list[_Way]] = []  # from each function that is running
        self._read(found)

    def _read(self, found: Iterable[Token]) -> None:
        command: list[Token] = []
        mark, is_launch = "\n", False
        for token in (*self._without_functions(list(found)), Token("mark", "\n")):
            if token.kind == "document":
                self._launch([token])
            elif token.kind != "mark":
                command.append(token)
            elif command or token.text != "\n":
                if is_launch and mark == "\n" and command:
                    _check_begin(command[0].text)
                known = len(self.launches)
                self._end(command, token.text)
                is_launch = len(self.launches) > known
                command, mark = [], token.text

    def _without_functions(self, found: Sequence[Token]) -> Iterator[Token]:
        """Tokens outside of functions, whose bodies are kept: they run where they are called."""
        at, is_first = 0, True
        while at < len(found):
            function = _function(found, at) if is_first else None
            if function is None:
                is_first = found[at].kind == "mark" or found[at].text in _BEFORE_COMMANDS
                yield found[at]
                at += 1
            else:
                name, begin, at = function
                self.bodies[name] = list(found[begin : at - 1])

    def _call(self, name: str) -> None:
        """Run the body of a function; arguments are not followed."""
        if len(self.returned) >= MOST_DEEP:
            raise ConfigError(f"function {name} of the script is called more than {MOST_DEEP} deep; give the arguments themselves")
        self.returned.append([])
        blocks, self.blocks = self.blocks, []
        self._read(self.bodies[name])
        self.blocks = blocks
        self.ways = _merged([*self.ways, *self.returned.pop()], self.names)

    @property
    def block(self) -> _Block | None:
        return self.blocks[-1] if self.blocks else None

    def _open(self, kind: str) -> _Block:
        self.blocks.append(_Block(kind, self.left_out, self.ways))
        self.left_out = []
        return self.blocks[-1]

    def _close(self, kind: str) -> None:
        if self.block is None or self.block.kind != kind:
            return
        block = self.blocks.pop()
        branches = {"(": block.rest, "{": self.ways}
        ways = branches.get(kind, [*block.ends, *self.ways, *block.rest])
        self.ways, self.left_out = _merged((replace(way, is_done=None) for way in ways), self.names), block.around

    def _end(self, command: list[Token], mark: str) -> None:
        """Read a command that a mark ends."""
        if self.block is not None and self.block.patterns is not None and not (command and command[0].text == "esac"):
            self.block.patterns += [token.text for token in command]
        else:
            self._command(command)
        block = self.block
        if block is not None and block.patterns is not None:
            if mark == ")":
                self._take_case(block, block.patterns)
        elif mark in ("&&", "||"):
            pool = [*self.ways, *self.left_out]
            self.ways = [replace(way, is_done=mark == "&&") for way in pool if way.is_done in (None, mark == "&&")]
            self.left_out = [replace(way, is_done=mark == "||") for way in pool if way.is_done in (None, mark == "||")]
        elif mark == "(":
            self._open("(")
        elif mark not in ("|", "|&"):
            if self.left_out:
                self.ways, self.left_out = _merged([*self.left_out, *self.ways], self.names), []
            if mark == ")":
                self._close("(")
            elif mark.startswith(";;") and block is not None and block.kind == "case":
                block.ends += self.ways
                self.ways, block.patterns = [], []

    def _take_case(self, block: _Block, patterns: Sequence[str]) -> None:
        """Begin the branch of a ``case`` that has these patterns."""
        self.ways, left = [], []
        for way in block.rest:
            text = " ".join(expanded(block.word, way.values))
            is_clear = "*" in patterns or is_known(text)
            is_taken = any(fnmatchcase(text, pattern) for pattern in patterns)
            self.ways += [way] if is_taken or not is_clear else []
            left += [way] if not is_taken or not is_clear else []
        block.rest, block.patterns = left, None

    def _command(self, command: list[Token]) -> None:
        """Take reserved words from the front of a command, and read what is left of it."""
        while command and command[0].kind == "word":
            head, block, rest = command[0].text, self.block, command[1:]
            if head in ("if", "{", *_LOOPS):
                self._open("loop" if head in _LOOPS else head)
                if head in ("for", "select"):
                    return self._loop_over(rest)
            elif head == "case" and rest:
                block = self._open("case")
                block.word, block.patterns, self.ways = rest[0].text, [token.text for token in rest[2:]], []
                return None
            elif head in ("then", "elif", "else") and block is not None and block.kind == "if":
                self._branch(block, head)
            elif head in _CLOSING:
                self._close(_CLOSING[head])
            elif head == "!":
                self._command(rest)
                self.ways = [replace(way, is_done=None if way.is_done is None else not way.is_done) for way in self.ways]
                return None
            elif head not in ("do", "time"):
                break
            command = rest
        return self._run(command) if command else None

    def _branch(self, block: _Block, word: str) -> None:
        if word == "then":
            block.rest = [way for way in self.ways if way.is_done is not True]
            self.ways = [way for way in self.ways if way.is_done is not False]
        else:
            block.ends += self.ways
            self.ways, block.rest = block.rest, []

    def _assign(self, name: str, values: Iterable[tuple[_Way, tuple[str, ...]]], *, is_done: bool | None = None) -> None:
        """Go on in ways in which a variable has these values."""
        self.names[name] = None
        self.ways = [_Way({**way.values, name: value}, is_done) for way, value in values]

    def _loop_over(self, words: Sequence[Token]) -> None:
        """A loop sets its variable to each of the words after ``in``, if they are there."""
        if not words:
            return
        name, items = words[0].text, words[2:]
        values = [(way, (item,)) for way in self.ways for token in items for item in expanded(token.text, way.values)]
        self._assign(name, values if items else [(way, (f"${name}",)) for way in self.ways])
        self.ways = _merged(self.ways, self.names)

    def _run(self, command: Sequence[Token]) -> None:
        """Read assignments, and a command that runs a program."""
        head = command[0].text if command[0].kind == "word" else ""
        is_declaration = head in _DECLARATIONS
        given = [token for token in command if is_assignment(token)] if is_declaration else list(takewhile(is_assignment, command))
        for token in given:
            name, is_done = name_of(token), None if runs_command(token) else True
            self._assign(name, [(way, assigned(token, way.values)) for way in self.ways], is_done=is_done)
        rest = [token for token in command if token not in given] if is_declaration else command[len(given) :]
        if head == "exit" or (head == "return" and not self.returned):
            self.ways = []
        elif head == "return":
            self.returned[-1] += self.ways
            self.ways = []
        elif head in self.bodies:
            self._call(head)
        elif head in ("read", "unset"):
            for token in rest[1:]:
                self._assign(token.text, [(way, (f"${token.text}",) if head == "read" else ()) for way in self.ways])
        elif rest and not (is_declaration and head != "env"):
            self.ways = [replace(way, is_done=holds([" ".join(expanded(t.text, way.values)) for t in rest])) for way in self.ways]
            self._launch(rest)

    def _launch(self, command: Sequence[Token]) -> None:
        """Keep what a program is given, by this command or by a script that is a word of it, as of ``bash -c``."""
        inner: dict[str, list[_Launch]] = {}
        found: list[_Launch] = []
        for way in self.ways:
            words = [expanded(token.text, way.values) for token in command]
            text = next((text for parts in words if (text := " ".join(parts)).endswith(".py") or _LAUNCH.search(text)), "")
            if not _LAUNCH.search(text):
                found += _given([part for parts in words for part in parts])
            elif text not in inner:
                inner[text] = _inner(text, self.wanted, self.depth + 1)
                found += inner[text]
        if found:
            ways = [words for launch in found for words in launch.ways]
            is_certain = all(block.kind in ("{", "(") for block in self.blocks)
            self.launches.append(_Launch(ways, any(launch.has_program for launch in found), is_certain))


def _function(found: Sequence[Token], at: int) -> tuple[str, int, int] | None:
    """The function that is defined at a token: its name, where its body begins, and where what follows does."""
    texts = [token.text if token.kind in ("word", "mark") else "" for token in found[at : at + 5]]
    has_word = texts[0] == "function"
    name, rest = texts[has_word], texts[has_word + 1 :]
    begin = at + has_word + 1 + (2 if rest[:2] == ["(", ")"] else 0)
    if not (has_word or rest[:2] == ["(", ")"]) or found[at].kind != "word":
        return None
    while begin < len(found) and found[begin].text == "\n":
        begin += 1
    if begin >= len(found) or found[begin].text != "{":
        return None
    depth, end = 1, begin + 1
    while depth and end < len(found):
        depth += {"{": 1, "}": -1}.get(found[end].text if found[end].kind == "word" else "", 0)
        end += 1
    return name, begin + 1, end


def _check_begin(word: str) -> None:
    if word.startswith("--"):
        raise ConfigError(
            f"{word} begins a line of its own after the launch, where a shell takes it for a command; end the line before it with a "
            "backslash, and leave no comment between them"
        )


def _given(words: Sequence[str]) -> list[_Launch]:
    """What stands after the Python file that is run, else from the first option on. A Python file after an option of one that is run is
    the value of that option."""
    files = [i for i, word in enumerate(words) if word.endswith(".py") and not word.startswith("-")]
    programs = [i for i in files if i == files[0] or not words[i - 1].startswith("--")]
    options = [i for i, word in enumerate(words) if word.startswith("--")]
    if programs:
        return [_Launch([list(words[programs[-1] + 1 :])], has_program=True, is_certain=True)]
    return [_Launch([list(words[options[0] :])], has_program=False, is_certain=True)] if options else []


def _inner(text: str, wanted: str, depth: int) -> list[_Launch]:
    """The launch of a script in a script, if it is one and has one."""
    try:
        found = list(tokens(text))
    except ConfigError:
        return []  # some text that names a Python file
    launches = _Script(found, wanted, depth).launches if depth <= MOST_DEEP else []
    return [_chosen(launches, wanted)] if launches else []


def program_words(text: str, wanted: str = "") -> list[list[str]]:
    """The words that a script gives to its program: one list for each way through its branches that gives others.

    The program is the last Python file that is run and is given the option ``wanted``; if none is, the last one.

    Raises:
        ConfigError: a quote or a bracket is not closed, a line after the launch begins with an option, or there are too many branches.
    """
    try:
        launches = _Script(tokens(text), wanted).launches
    except RecursionError as error:
        raise ConfigError("the brackets and quotes of the arguments are nested too deep; give the arguments themselves") from error
    return _chosen(launches, wanted).ways if launches else [[]]
