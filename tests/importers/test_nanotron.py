from __future__ import annotations

from pathlib import Path

import pytest

from autopar.errors import ConfigError
from autopar.importers import Imported, read_nanotron
from autopar.solve.manual import Manual

TINY_LLAMA = """
checkpoints:
  checkpoint_interval: 10
  checkpoints_path: checkpoints
  resume_checkpoint_path: null
data_stages:
- data:
    dataset:
      hf_dataset_or_datasets: stas/openwebtext-10k
    num_loading_workers: 1
    seed: 42
  name: Stable Training Stage
  start_training_step: 1
general:
  project: debug
  run: tiny_llama_%date_%jobid
  seed: 42
lighteval: null
logging:
  log_level: info
model:
  ddp_bucket_cap_mb: 25
  dtype: bfloat16
  init_method:
    std: 0.025
  make_vocab_size_divisible_by: 1
  model_config:
    hidden_size: 16
    is_llama_config: true
    num_hidden_layers: 2
optimizer:
  accumulate_grad_in_fp32: true
  clip_grad: 1.0
  learning_rate_scheduler:
    learning_rate: 0.0003
    lr_warmup_style: linear
  optimizer_factory:
    adam_beta1: 0.9
    name: adamW
    torch_adam_is_fused: true
  weight_decay: 0.01
  zero_stage: 1
parallelism:
  dp: 2
  expert_parallel_size: 1
  pp: 2
  pp_engine: 1f1b
  tp: 2
  tp_linear_async_communication: true
  tp_mode: REDUCE_SCATTER
profiler: null
tokenizer:
  tokenizer_name_or_path: gpt2
tokens:
  batch_accumulation_per_replica: 4
  limit_val_batches: 0
  micro_batch_size: 2
  sequence_length: 256
  train_steps: 15
  val_check_interval: -1
"""


def read(path: Path, *changes: tuple[str, str], num_ranks: int = 8) -> Imported:
    text = TINY_LLAMA
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    (path / "run.yaml").write_text(text)
    return read_nanotron(path / "run.yaml", num_ranks)


def test_tiny_llama(tmp_path: Path) -> None:
    found = read(tmp_path)
    assert found.config == Manual(dp=2, tp=2, zero=1, sequence_parallel=True, pp=2, schedule="1f1b", micro_batch=2, precision="bf16")
    assert (found.batch_size, found.sequence) == (16, 256)
    assert [text.partition(":")[0] for text in found.left_out] == ["parallelism.tp_linear_async_communication=True"]
    assert found.unknown == ()


def test_defaults(tmp_path: Path) -> None:
    found = read(tmp_path, ("  pp_engine: 1f1b\n", ""), ("  tp_mode: REDUCE_SCATTER\n", ""))
    assert (found.config.schedule, found.config.sequence_parallel) == ("gpipe", False)


@pytest.mark.parametrize(
    "line, level",
    [("recompute_layer: true", "full"), ("recompute_granularity: SELECTIVE", "selective"), ("recompute_layer: false", "none")],
)
def test_recomputation(tmp_path: Path, line: str, level: str) -> None:
    assert read(tmp_path, ("  pp: 2", f"  pp: 2\n  {line}")).config.recompute == level


def test_context_parallelism(tmp_path: Path) -> None:
    found = read(tmp_path, ("expert_parallel_size: 1", "context_parallel_size: 2"), ("  dp: 2", "  dp: 1"))
    assert (found.config.dp, found.config.cp) == (1, 2)
    assert any("keys and values are gathered" in note for note in found.left_out)


def test_what_is_unknown_is_reported(tmp_path: Path) -> None:
    assert read(tmp_path, ("  pp: 2", "  pp: 2\n  domino: {size: 2}")).unknown == ("parallelism.domino.size=2",)


@pytest.mark.parametrize(
    "old, new, error",
    [
        ("  dp: 2", "  dp: 4", "dp 4 [*] tp 2 [*] pp 2 [*] cp 1 = 16, but this is for 8 ranks"),
        ("  dp: 2\n", "", "there is no parallelism.dp"),
        ("  dp: 2", "  dp: two", "run.yaml: parallelism.dp is 'two'; write a whole number"),
        ("  dp: 2", "  dp: 2\n  dp: 3", "run.yaml: dp is set twice"),
        ("  micro_batch_size: 2\n", "", "there is no tokens.micro_batch_size"),
        ("expert_parallel_size: 1", "expert_parallel_size: 2", "cannot be expressed"),
        ("zero_stage: 1", "zero_stage: 3", "nanotron has 0 and 1"),
        ("pp_engine: 1f1b", "pp_engine: zb", "write one of afab, 1f1b"),
        ("tp_mode: REDUCE_SCATTER", "tp_mode: some", "write one of all_reduce, reduce_scatter"),
        ("pp_engine: 1f1b", "recompute_layer: true\n  recompute_granularity: selective", "drop one"),
        ("parallelism:", "parallelism: [", "run.yaml is not YAML"),
    ],
)
def test_errors(tmp_path: Path, old: str, new: str, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        read(tmp_path, (old, new))


@pytest.mark.parametrize(
    "dtype, wide, precision, notes",
    [
        ("bfloat16", "true", "bf16", 0),
        ("bfloat16", "false", "bf16/bf16", 1),
        ("float16", "true", "fp16", 0),
        ("float32", "false", "fp32", 0),
        ("null", "true", "", 0),
    ],
)
def test_precision(tmp_path: Path, dtype: str, wide: str, precision: str, notes: int) -> None:
    found = read(tmp_path, ("dtype: bfloat16", f"dtype: {dtype}"), ("accumulate_grad_in_fp32: true", f"accumulate_grad_in_fp32: {wide}"))
    assert found.config.precision == precision
    assert len([note for note in found.left_out if "in_fp32" in note]) == notes


def test_a_dtype_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.dtype is 'float8'; write a dtype"):
        read(tmp_path, ("dtype: bfloat16", "dtype: float8"))
