"""What README and docs say is so: their code runs, their commands have the options that they are given, the reference has every name."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from markdown_it import MarkdownIt

import autopar
from autopar.cli import app
from tests.page import ROOT, Block, PageError, blocks_of, run_page

RUN = ("README.md", "docs/getting_started.md")
DOCS = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))
NOT_RUN = [page for page in ("CONTRIBUTING.md", *DOCS) if page not in RUN]


def blocks(page: str) -> list[Block]:
    return list(blocks_of((ROOT / page).read_text()))


@pytest.mark.slow
@pytest.mark.parametrize("page", RUN)
def test_the_code_of_a_page_runs(page: str, tmp_path: Path) -> None:
    """In a process and a folder of its own, as for a reader who begins at its top."""
    # torchrun --standalone: another one on this machine may have the port that it takes by default
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "PET_STANDALONE": "1"}
    command = [sys.executable, "-m", "tests.page", str(ROOT / page)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=220, check=False)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"[-6000:]


def test_what_is_not_run_is_known() -> None:
    assert [(page, block.skipped) for page in RUN for block in blocks(page) if block.skipped] == [
        ("docs/getting_started.md", "it installs"),
        ("docs/getting_started.md", "it needs GPUs"),
    ]


def check_command(line: str) -> None:
    """Parse a command of a page without running it.

    Raises:
        UsageError: it has no such option (typer's own).
        PageError: it runs a script that is not there.
    """
    words = shlex.split(line, comments=True)
    if words[:1] == ["autopar"]:
        group: Any = typer.main.get_command(app)
        for command in group.commands.values():
            command.callback = None
        group.main(words[1:], standalone_mode=False)
    for word in words:
        if word.startswith(("examples/", "benchmarks/")) and not (ROOT / word).is_file():
            raise PageError(f"there is no {word}: {line}")


@pytest.mark.parametrize("page", NOT_RUN)
def test_code_that_is_not_run_can_be_read(page: str) -> None:
    for block in blocks(page):
        if block.language == "python":
            ast.parse(block.text)
        if block.language == "bash":
            for line in block.text.replace("\\\n", " ").splitlines():
                check_command(line)


def test_a_command_with_an_option_that_is_not_there_is_found() -> None:
    check_command("autopar plan hf:gpt2 --mesh 8  # a comment")
    with pytest.raises(Exception, match="--mash"):
        check_command("autopar plan hf:gpt2 --mash 8")
    with pytest.raises(Exception, match="No such command"):
        check_command("autopar plain hf:gpt2")
    with pytest.raises(PageError, match=r"there is no examples/nothing\.py"):
        check_command("python examples/nothing.py")


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_links_outside_of_the_site_lead_somewhere(page: str) -> None:
    """Those of docs/ are checked when `make docs` builds it."""
    parsed = MarkdownIt("commonmark").enable("table").parse((ROOT / page).read_text())
    tokens = [child for token in parsed for child in token.children or ()]
    links = [str(token.attrGet("href") or token.attrGet("src")) for token in tokens if token.type in ("link_open", "image")]
    missing = [link for link in links if "://" not in link and not (ROOT / link.partition("#")[0]).exists()]
    assert missing == []
    assert page != "README.md" or len(links) > 10


def test_the_reference_has_every_public_name() -> None:
    told = {path for page in (ROOT / "docs" / "api").glob("*.md") for path in re.findall(r"^::: (\S+)", page.read_text(), re.M)}
    public = {name: getattr(autopar, name) for name in autopar.__all__}
    missing = [name for name, thing in public.items() if not {thing.__module__, f"{thing.__module__}.{thing.__qualname__}"} & told]
    assert missing == []


PAGE = '''
```python title="mine.py"
answer = 42
```

Prose.

```python
import mine
print(mine.answer, "and", 7)
```

```text
42 ...
```

```bash
make demo  # is not run
python -c 'import mine; print(mine.answer)'
```

```bash
# not run by the tests: no time
exit 3
```
'''


def test_a_page_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "page.md").write_text(PAGE)
    run_page(tmp_path / "page.md")
    sys.modules.pop("mine")
    assert capfd.readouterr().out == ""
    assert (tmp_path / "mine.py").read_text() == "answer = 42\n"


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("42 ...", "43 ...", r"page\.md:14: Expected:\n    43 \.\.\.\nGot:\n    42 and 7"),
        ("make demo", "make demon", r"page\.md:18: exit code 2\n(.|\n)*demon"),
        ("# not run by the tests: no time\n", "", r"page\.md:23: exit code 3"),
        ("```bash\n# not", "```sh\n# it is not", r"page\.md:23: a block of sh; it can be python, bash or text"),
        ("Prose.", "    indented", r"page\.md:6: a block of no language"),
        ("```text\n42", "```python title='x'\n```\n```text\n42", r"page\.md:16: nothing has been printed that this could be"),
    ],
)
def test_a_page_that_is_wrong_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert PAGE.count(old) == 1
    (tmp_path / "page.md").write_text(PAGE.replace(old, new))
    try:
        with pytest.raises(PageError, match=message):
            run_page(Path("page.md"))
    finally:
        sys.modules.pop("mine", None)
