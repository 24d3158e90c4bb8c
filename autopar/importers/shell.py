r"""The words of a launch script: what a shell would give to the program, as far as the text itself says.

Comments and continued lines are read, and so are the two ways in which launch scripts keep their arguments:

    OPTIONS=(--num-layers 96 --hidden-size 12288)        OPTIONS="--num-layers 96"
    torchrun --nproc-per-node 8 pretrain_gpt.py ${OPTIONS[@]} --bf16

Variables that are assigned elsewhere have their default, as in `${TP:-4}`, or stay as they are written. No command is run.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

from autopar.errors import ConfigError

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_BRANCHES = frozenset({"if", "case"})
_VARIABLE = re.compile(r"\$(?:\{([A-Za-z_]\w*|\d+)(?:\[[@*]\])?(?:(:?-)((?:[^{}]|\{[^{}]*\})*))?\}|([A-Za-z_]\w*))")
_END = re.compile(r"(\||&|;|\d?>|<)")


def _expanded(word: str, variables: dict[str, list[str]]) -> list[str]:
    """A word with the variables that are known; one that is a variable and nothing else may become several words."""
    whole = _VARIABLE.fullmatch(word)
    if whole and (values := _values(whole, variables)) is not None:
        return [part for value in values for part in value.split()]
    return [_VARIABLE.sub(lambda match: match[0] if (values := _values(match, variables)) is None else " ".join(values), word)]


def _values(variable: re.Match[str], variables: dict[str, list[str]]) -> list[str] | None:
    """What a variable holds, or the default that stands beside it; None if neither is known."""
    bare, sign, default, plain = variable.groups()
    known = variables.get(bare or plain)
    if default is None or (known is not None and (sign == "-" or any(known))):
        return known
    return _expanded(default, variables)


def _commands(words: Iterator[str]) -> Iterator[str]:
    """The words that are no assignments, expanded by the assignments before them.

    Raises:
        ConfigError: a script with branches assigns a variable twice, so that its value is not told by the text.
    """
    variables: dict[str, list[str]] = {}
    has_branches = False
    for word in words:
        assignment = None if word.startswith("-") else _ASSIGNMENT.fullmatch(word)
        if assignment is None:
            has_branches |= word in _BRANCHES
            yield from _expanded(word, variables)
            continue
        name, more, value = assignment.groups()
        before = variables.get(name, [])
        if value.startswith("("):
            found = [*(before if more else []), *_listed(value[1:], words, variables)]
        else:
            found = [" ".join(before if more else []) + " ".join(_expanded(value, variables))]
        if has_branches and name in variables and found != before:
            raise ConfigError(
                f"the script has branches and assigns {name} more than once, so that its value is not clear; give the arguments themselves"
            )
        variables[name] = found


def _listed(part: str, words: Iterator[str], variables: dict[str, list[str]]) -> list[str]:
    """The words of an array from its first on."""
    listed = []
    while not part.endswith(")"):
        listed.append(part)
        part = next(words, ")")
    listed.append(part[:-1])
    return [item for part in listed if part for item in _expanded(part, variables)]


def program_words(text: str) -> list[str]:
    """The words after the last Python file that is run, else those from the first option on; a pipe or redirection ends them. A Python file
    after an option of one that is run is the value of that option.

    Raises:
        ConfigError: a quote is not closed, or the script branches.
    """
    try:
        words = list(_commands(iter(shlex.split(text.replace("\\\n", " "), comments=True))))
    except ValueError as error:
        raise ConfigError(f"the arguments cannot be read as a shell reads them ({error}); close every quote") from error
    files = [i for i, word in enumerate(words) if word.endswith(".py")]
    programs = [i for i in files if i == files[0] or not words[i - 1].startswith("--")]
    options = [i for i, word in enumerate(words) if word.startswith("--")]
    words = words[programs[-1] + 1 :] if programs else words[options[0] :] if options else []
    end = next((i for i, word in enumerate(words) if _END.match(word)), len(words))
    return words[:end]
