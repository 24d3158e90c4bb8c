"""Run the code of a page of Markdown from its top to its end, as a reader would who follows it:

    cd "$(mktemp -d)" && python -m tests.page README.md

| block                    | what is done with it                                                                                |
|--------------------------|-----------------------------------------------------------------------------------------------------|
| ``python title="x.py"``  | written to that file                                                                                |
| ``python``               | run, with the names that the blocks before it have left                                             |
| ``bash``                 | run; of ``make x`` only that there is such a target, for pages are run inside of ``make test``     |
| ``text``                 | compared with what the block before it has printed; ``...`` stands for anything, spaces are alike   |

A block that begins with `SKIP` is not run, nor compared; other blocks are an error.
"""

from __future__ import annotations

import contextlib
import doctest
import io
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[1]
SKIP = "# not run by the tests: "
LIKE_IT = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
PRELUDE = f"set -euo pipefail\nmake() {{ command make -C '{ROOT}' --dry-run \"$@\"; }}\n"


@dataclass(frozen=True, slots=True)
class Block:
    """A block of code.

    Args:
        language: the first word behind its fence; empty for an indented block.
        title: a file that it is.
        text: the code.
        line: of its first line in the page, from 1.
    """

    language: str
    title: str
    text: str
    line: int

    @property
    def skipped(self) -> str:
        """Why it is not run; empty if it is."""
        first = self.text.partition("\n")[0]
        return first.removeprefix(SKIP) if first.startswith(SKIP) else ""


def blocks_of(page: str) -> Iterator[Block]:
    """All blocks of code of a page of Markdown, in order."""
    for token in MarkdownIt("commonmark").parse(page):
        if token.type in ("fence", "code_block"):
            assert token.map is not None
            language, _, rest = token.info.partition(" ")
            title = rest.removeprefix('title="').removesuffix('"')
            yield Block(language, title, token.content, token.map[0] + (2 if token.type == "fence" else 1))


class PageError(Exception):
    """A block does not do what the page says; the text begins with its place."""


@dataclass(slots=True)
class Run:
    """A page that is run in the working folder; ``printed`` is what its last block has printed."""

    path: str
    names: dict[str, object] = field(default_factory=lambda: {"__name__": "__main__"})
    printed: str | None = None

    def do(self, block: Block) -> None:
        """Run a block, write it, or compare it.

        Raises:
            PageError: it has no language that is known, its command fails, or it is not what was printed.
        """
        if block.skipped or block.title:
            self.printed = None
        if block.skipped:
            return
        if block.title:
            Path(block.title).write_text(block.text)
        elif block.language == "python":
            self.printed = self._python(block)
        elif block.language == "bash":
            self.printed = self._bash(block)
        elif block.language == "text":
            self._compare(block)
        else:
            raise self._error(block, f"a block of {block.language or 'no language'}; it can be python, bash or text")

    def _python(self, block: Block) -> str:
        code = compile("\n" * (block.line - 1) + block.text, self.path, "exec")
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(code, self.names)
        return printed.getvalue()

    def _bash(self, block: Block) -> str:
        environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        command = ["bash", "-c", PRELUDE + block.text]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise self._error(block, f"exit code {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout

    def _compare(self, block: Block) -> None:
        if self.printed is None:
            raise self._error(block, "nothing has been printed that this could be; it follows no block that was run")
        checker, example = doctest.OutputChecker(), doctest.Example("", block.text)
        if not checker.check_output(example.want, self.printed, LIKE_IT):
            raise self._error(block, checker.output_difference(example, self.printed, LIKE_IT))

    def _error(self, block: Block, text: str) -> PageError:
        return PageError(f"{self.path}:{block.line}: {text}")


def run_page(path: Path) -> None:
    """Run all blocks of a page in the working folder; errors are those of the blocks."""
    run = Run(str(path))
    sys.path.insert(0, "")  # files that the page writes can be imported
    for block in blocks_of(path.read_text()):
        run.do(block)


if __name__ == "__main__":
    run_page(Path(sys.argv[1]))
