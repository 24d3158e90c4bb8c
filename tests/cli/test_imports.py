"""``autopar compare`` against configurations of other systems."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

from autopar.cli.imports import Imports, read_imports
from autopar.errors import InputError
from autopar.solve.manual import Manual, UnusedSettingWarning
from tests.test_cli import MLP, fails, run

BATCH = (torch.zeros(16, 32, dtype=torch.int64),)
MEGATRON = "--tensor-model-parallel-size 2 --micro-batch-size 1 --global-batch-size 16"


def read(*given: tuple[str, str | Path], taken: tuple[str, ...] = ()) -> Imports:
    by_kind: dict[str, list[str]] = {}
    for kind, text in given:
        by_kind.setdefault(kind, []).append(str(text))
    return read_imports(by_kind, 4, BATCH, taken=dict.fromkeys(taken, Manual()))


def test_names_are_kinds_or_stems_and_differ(tmp_path: Path) -> None:
    for name in ("run.toml", "run.yaml", "launch.sh"):
        (tmp_path / name).write_text(MEGATRON)
    given = [("megatron", text) for text in (MEGATRON, MEGATRON, tmp_path / "launch.sh", tmp_path / "run.toml", tmp_path / "run.yaml")]
    assert list(read(*given, taken=("megatron", "launch")).configs) == ["megatron-2", "megatron-3", "launch-2", "run", "run-2"]


def test_what_cannot_be_expressed_is_a_row(tmp_path: Path) -> None:
    (tmp_path / "long.toml").write_text("[parallelism]\nexpert_parallel_degree = 3\n")
    imports = read(("megatron", MEGATRON), ("torchtitan", tmp_path / "long.toml"))
    assert imports.configs == {"megatron": Manual(dp=2, tp=2, micro_batch=1)}
    (row,) = imports.refused
    assert (row.name, row.fits) == ("long", False)
    assert "cannot be expressed" in row.reason


@pytest.mark.parametrize(
    "text, note",
    [
        ("--fp8-format hybrid", "megatron: left out: --fp8-format"),
        ("--new 1", "megatron: unknown, and not read: --new=1"),
        ("--seq-length 64", "megatron: its sequences have 64 tokens, this comparison's 32 "),
    ],
)
def test_notes(text: str, note: str) -> None:
    with pytest.warns(UnusedSettingWarning, match=note):
        read(("megatron", f"{MEGATRON} {text}"))


def test_a_note_on_another_batch() -> None:
    with pytest.warns(UnusedSettingWarning, match="its global batch is 32, this comparison's 16 "):
        read(("megatron", "--micro-batch-size 8"))


def test_no_notes_on_what_agrees() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read(("megatron", f"{MEGATRON} --seq-length 32 --lr 1e-4"))


def test_neither_a_file_nor_arguments() -> None:
    with pytest.raises(InputError, match=r"'run\.sh' is neither a file nor arguments"):
        read(("megatron", "run.sh"))


@pytest.mark.slow
def test_compare(tmp_path: Path) -> None:
    files = {kind: tmp_path / name for kind, name in (("deepspeed", "ds.json"), ("torchtitan", "titan.toml"), ("nanotron", "nano.yaml"))}
    files["deepspeed"].write_text('{"train_batch_size": 16, "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}')
    files["torchtitan"].write_text("[parallelism]\nexpert_parallel_degree = 3\n")
    files["nanotron"].write_text("parallelism: {dp: 2, tp: 2, pp: 1}\ntokens: {micro_batch_size: 8, batch_accumulation_per_replica: 1}\n")
    options = [part for kind, path in files.items() for part in (f"--{kind}", path)]
    result = run("compare", MLP, "--real", "--mesh", "4", "--against", "ddp:dp=4", "--megatron", f"{MEGATRON} --new", *options)
    assert result.exit_code == 0, result.output
    rows = [line.split()[0] for line in result.stdout.splitlines() if line.split()]
    assert [rows.count(name) for name in ("auto", "ddp", "megatron", "ds", "nano", "titan")] == [1, 1, 1, 1, 1, 2]
    assert "titan does not fit: titan.toml: cannot be expressed: parallelism.expert_parallel_degree is 3" in result.stdout
    assert "warning: megatron: unknown, and not read: --new" in result.stderr
    assert "warning: ds: left out: zero_optimization.offload_param.device=cpu: a Manual offloads all of a kind" in result.stderr


@pytest.mark.slow
def test_compare_with_nothing() -> None:
    fails(run("compare", MLP, "--real", "--mesh", "4"), "--against", "--megatron", "--nanotron")


@pytest.mark.slow
def test_compare_with_no_file() -> None:
    fails(run("compare", MLP, "--real", "--mesh", "4", "--nemo", "none.yaml"), "--nemo 'none.yaml' is no file")
