"""Configurations are files or text; what is neither says so."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from autopar.errors import ConfigError
from autopar.importers import Imported, read_deepspeed, read_megatron, read_nanotron, read_nemo, read_torchtitan

Reader = Callable[[str | Path, int], Imported]
TEXTS: dict[str, tuple[Reader, str]] = {
    "deepspeed": (read_deepspeed, '{"train_batch_size": 8}'),
    "megatron": (read_megatron, "--micro-batch-size 1"),
    "nanotron": (read_nanotron, "parallelism: {dp: 8, tp: 1, pp: 1}\ntokens: {micro_batch_size: 1, batch_accumulation_per_replica: 1}\n"),
    "nemo": (read_nemo, "model: {micro_batch_size: 1}"),
    "torchtitan": (read_torchtitan, "training.local_batch_size = 1"),
}


@pytest.mark.parametrize("name", TEXTS)
def test_a_file_or_its_text(name: str, tmp_path: Path) -> None:
    read, text = TEXTS[name]
    path = tmp_path / "given"
    path.write_text(text)
    assert read(text, 8) == read(path, 8) == read(str(path), 8)
    assert read(text, 8).config.dp == 8


@pytest.mark.parametrize("name", TEXTS)
def test_what_is_neither(name: str, tmp_path: Path) -> None:
    read, _ = TEXTS[name]
    argument = "arguments" if name == "megatron" else "configuration"
    for given in ("run.cfg", "x" * 5000, tmp_path, tmp_path / "none"):
        with pytest.raises(ConfigError, match=f"^{argument}={re.escape(repr(str(given)))} is neither a file nor "):
            read(given, 8)
    path = tmp_path / "bytes"
    path.write_bytes(b"\xff\xfe\n")
    with pytest.raises(ConfigError, match=f"^{argument}=.* cannot be read as text"):
        read(path, 8)


@pytest.mark.parametrize("name", TEXTS)
def test_arguments_of_another_kind(name: str) -> None:
    read, text = TEXTS[name]
    for num_ranks in (0, -8, "8", True, 8.0, None):
        with pytest.raises(ConfigError, match=f"num_ranks is {re.escape(repr(num_ranks))}; write a whole number"):
            read(text, num_ranks)  # type: ignore[arg-type]
    for given in (None, ["--micro-batch-size", "1"], {"train_batch_size": 8}, 3, text.encode()):
        with pytest.raises(ConfigError, match=f"is a {type(given).__name__}; give the path of a file, or its text"):
            read(given, 8)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", TEXTS)
def test_lines_of_windows(name: str) -> None:
    read, text = TEXTS[name]
    assert read(f"{text}\r\n\r\n", 8) == read(text, 8)
    assert read_megatron("python a.py \\\r\n --micro-batch-size 1\r\necho\r\n", 8) == read_megatron("--micro-batch-size 1", 8)


@pytest.mark.parametrize("read, text", [(read_nemo, "model: &m\n  micro_batch_size: 1\n  same: *m\n"), (read_deepspeed, '{"a":' * 100_000)])
def test_what_holds_itself_or_too_much(read: Reader, text: str) -> None:
    with pytest.raises(ConfigError, match=r"^configuration is nested too deep, or a part of it holds itself"):
        read(text, 8)


def test_text_that_is_wrong_is_called_by_its_argument() -> None:
    with pytest.raises(ConfigError, match=r"^configuration is not JSON"):
        read_deepspeed("{", 8)
