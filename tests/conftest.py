"""What every test may use: ``golden(name, text)`` compares with a file, ``ranks.run(fn, *args)`` runs on 4 processes."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"

import difflib
import gc
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from xdist.remote import Producer

from tests import captures
from tests.pool import RankPool
from tests.shares import RANKS, Shares, share_of

torch.set_num_threads(1)
captures.share()
settings.register_profile("every time", deadline=None, max_examples=50)  # a busy machine fails no test
settings.register_profile("exhaustive", deadline=None)

GOLDEN = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write tests/golden from what the code does now")


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("every time" if "not exhaustive" in config.option.markexpr else "exhaustive")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Shares:
    return Shares(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those that use ranks, the longest share, come first."""
    for item in items:
        if (share_of(item.nodeid) == RANKS) != (RANKS in getattr(item, "fixturenames", ())):
            raise pytest.UsageError(f"{item.nodeid} uses ranks where tests.shares does not see it: let it take `ranks: RankPool` itself")
    items.sort(key=lambda item: share_of(item.nodeid) != RANKS)


def pytest_collection_finish() -> None:
    """What is imported stays: there is no garbage to look for in it."""
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()


def compare_golden(path: Path, text: str, *, update: bool) -> None:
    """Fail unless the file at ``path`` holds ``text``; with ``update``, make it so."""
    text = text.rstrip("\n") + "\n"
    if update:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return
    if not path.exists():
        pytest.fail(f"no golden file {path}; create it with --update-golden if this is right:\n{text}", pytrace=False)
    want = path.read_text()
    if want != text:
        diff = difflib.unified_diff(want.splitlines(), text.splitlines(), str(path), "now", lineterm="")
        pytest.fail("differs from its golden file (--update-golden accepts it):\n" + "\n".join(diff), pytrace=False)


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """``golden("passes/local_gpt2", text)`` compares with ``tests/golden/passes/local_gpt2.txt``."""
    update = bool(request.config.getoption("--update-golden"))
    return lambda name, text: compare_golden(GOLDEN / f"{name}.txt", text, update=update)


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Four processes in one gloo group, shared by the whole session."""
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture
def listening() -> Iterator[None]:
    """Ctrl-C as Python has it at a terminal; what a script runs in the background is born deaf."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
