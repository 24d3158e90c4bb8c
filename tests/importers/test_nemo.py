from __future__ import annotations

from pathlib import Path

import pytest

from autopar.errors import ConfigError
from autopar.importers import Imported, read_nemo
from autopar.solve.manual import Manual

GPT3_175B = """
run:
  name: gpt3_175b
  results_dir: ${base_results_dir}/${.name}
trainer:
  num_nodes: 128
  devices: 8
  accelerator: gpu
  precision: bf16
  max_steps: 75000
  log_every_n_steps: 10
  gradient_clip_val: 1.0
exp_manager:
  name: megatron_gpt
  checkpoint_callback_params:
    model_parallel_size: ${multiply:${training.model.tensor_model_parallel_size}, ${training.model.pipeline_model_parallel_size}}
model:
  micro_batch_size: 1
  global_batch_size: 2048
  rampup_batch_size: null
  tensor_model_parallel_size: 4
  pipeline_model_parallel_size: 8
  virtual_pipeline_model_parallel_size: 12
  encoder_seq_length: 2048
  max_position_embeddings: 2048
  num_layers: 96
  hidden_size: 12288
  ffn_hidden_size: ${multiply:4, ${.hidden_size}}
  num_attention_heads: 96
  layernorm_epsilon: 1e-5
  activations_checkpoint_granularity: selective
  activations_checkpoint_method: block
  activations_checkpoint_num_layers: 0
  sequence_parallel: True
  tokenizer:
    library: megatron
  megatron_amp_O2: True
  transformer_engine: True
  fp8: False
  ub_tp_comm_overlap: True
  seed: 1234
  optim:
    name: distributed_fused_adam
    lr: 0.9e-4
    betas:
    - 0.9
    - 0.95
    sched:
      name: CosineAnnealing
  data:
    data_impl: mmap
    seq_length: ${model.encoder_seq_length}
"""

SECOND = """
trainer:
  devices: 8
  num_nodes: 1
  strategy:
    _target_: nemo.lightning.MegatronStrategy
    tensor_model_parallel_size: 2
    pipeline_model_parallel_size: 2
    virtual_pipeline_model_parallel_size: null
    context_parallel_size: 1
    sequence_parallel: true
    ckpt_async_save: true
data:
  _target_: nemo.collections.llm.MockDataModule
  seq_length: 8192
  micro_batch_size: 1
  global_batch_size: 512
model:
  config:
    num_layers: 32
    recompute_granularity: full
    recompute_method: uniform
    recompute_num_layers: 1
optim:
  config:
    lr: 3e-4
    use_distributed_optimizer: true
"""

SMALL = "model:\n  micro_batch_size: 1\n"


def read(path: Path, text: str, num_ranks: int = 8) -> Imported:
    (path / "run.yaml").write_text(text)
    return read_nemo(path / "run.yaml", num_ranks)


def test_gpt3(tmp_path: Path) -> None:
    found = read(tmp_path, GPT3_175B, 1024)
    assert found.config == Manual(
        dp=32, tp=4, zero=2, sequence_parallel=True, pp=8, schedule="interleaved:12", micro_batch=1, recompute="selective",
        precision="bf16",
    )  # fmt: skip
    assert (found.batch_size, found.sequence) == (2048, 2048)
    assert [text.partition(":")[0] for text in found.left_out] == [
        "model.activations_checkpoint_granularity=selective (the inside of attention)",
        "model.transformer_engine=True",
        "model.ub_tp_comm_overlap=True",
    ]
    assert found.unknown == ()


def test_the_second_version(tmp_path: Path) -> None:
    found = read(tmp_path, SECOND)
    assert found.config == Manual(dp=2, tp=2, zero=1, sequence_parallel=True, pp=2, micro_batch=1, recompute="full")
    assert (found.batch_size, found.sequence) == (512, 8192)
    assert (found.left_out, found.unknown) == ((), ())


@pytest.mark.parametrize(
    "lines, level",
    [
        ("optim: {name: fused_adam}", 0),
        ("optim: {name: mcore_distributed_optim}", 1),
        ("fsdp: true", 3),
        ("fsdp: true\n  fsdp_sharding_strategy: grad", 2),
        ("fsdp: false\n  fsdp_sharding_strategy: full", 0),
    ],
)
def test_zero_levels(tmp_path: Path, lines: str, level: int) -> None:
    assert read(tmp_path, f"{SMALL}  {lines}").config.zero == level


def test_other_ranks_than_those_at_hand_are_said(tmp_path: Path) -> None:
    found = read(tmp_path, GPT3_175B, 64)
    assert found.config.dp == 2
    assert "trainer.num_nodes=128, devices=8: 1024 ranks there, 64 here" in found.left_out


def test_context_parallelism(tmp_path: Path) -> None:
    config = read(tmp_path, f"{SMALL}  context_parallel_size: 2").config
    assert (config.dp, config.cp) == (4, 2)


def test_experts_and_context(tmp_path: Path) -> None:
    found = read(tmp_path, f"{SMALL}  expert_model_parallel_size: 2\n  context_parallel_size: 2")
    assert (found.config.dp, found.config.cp, found.config.ep, found.unknown) == (4, 2, 2, ())


def test_what_is_unknown_is_reported(tmp_path: Path) -> None:
    assert read(tmp_path, f"{SMALL}  new_size: 2").unknown == ("model.new_size=2",)


@pytest.mark.parametrize(
    "lines, error",
    [
        ("expert_model_parallel_size: 3", "model.expert_model_parallel_size is 3 of 8 data-parallel ranks"),
        ("tensor_model_parallel_size: 2\n  expert_tensor_parallel_size: 1", "cannot be expressed"),
        ("fsdp: true\n  fsdp_sharding_strategy: hybrid", "cannot be expressed"),
        ("fsdp: true\n  pipeline_model_parallel_size: 2", "exclude each other"),
        ("tensor_model_parallel_size: 3", "does not divide the 8 ranks"),
        ("tensor_model_parallel_size: ${tp}", r"'\$\{tp\}', a variable that is assigned elsewhere"),
        ("tensor_model_parallel_size: 2\ntrainer: {strategy: {tensor_model_parallel_size: 4}}", "they mean the same"),
        ("virtual_pipeline_model_parallel_size: 2", "but pipeline_model_parallel_size is 1"),
        ("global_batch_size: 12", "not a multiple of dp 8"),
        ("sequence_parallel: 1", "write true or false"),
        ("activations_checkpoint_granularity: some", "write one of full, selective"),
    ],
)
def test_errors(tmp_path: Path, lines: str, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        read(tmp_path, f"{SMALL}  {lines}")


def test_no_micro_batch(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no model\.micro_batch_size"):
        read(tmp_path, "trainer: {devices: 8}")


def test_an_optimizer_of_another_kind_is_said(tmp_path: Path) -> None:
    settings = "model:\n  micro_batch_size: 1\n  global_batch_size: 8\n  optim:\n    name: {}\n"
    assert read(tmp_path, settings.format("fused_adam")).left_out == ()
    (said,) = read(tmp_path, settings.format("lion")).left_out
    assert said.startswith("model.optim.name=lion")


@pytest.mark.parametrize(
    "text, precision, notes",
    [
        ("", "", 0),
        ("trainer: {precision: 32}", "fp32", 0),
        ("trainer: {precision: 16-mixed}", "fp16", 0),
        ("trainer: {precision: bf16-true}", "bf16", 1),
        ("trainer: {plugins: {precision: bf16-mixed, grad_reduce_in_fp32: false}}", "bf16/bf16", 0),
        ("trainer: {precision: bf16, strategy: {ddp: {grad_reduce_in_fp32: false}}}", "bf16/bf16", 0),
        ("trainer: {precision: bf16-mixed, plugins: {fp8: hybrid}}", "bf16", 1),
        ("optim: {config: {bf16: true}}", "bf16", 0),
    ],
)
def test_precision(tmp_path: Path, text: str, precision: str, notes: int) -> None:
    found = read(tmp_path, SMALL + text)
    assert (found.config.precision, len(found.left_out), found.unknown) == (precision, notes, ())


@pytest.mark.parametrize("whole, notes", [("true", 0), ("false", 1)])
def test_precision_of_the_first_version(tmp_path: Path, whole: str, notes: int) -> None:
    lines = f"  megatron_amp_O2: {whole}\n  precision: bf16\n  optim: {{name: fused_adam, grad_sync_dtype: bf16}}\n"
    found = read(tmp_path, f"{SMALL}{lines}trainer: {{precision: bf16-mixed}}")
    assert (found.config.precision, len(found.left_out)) == ("bf16/bf16", notes)


@pytest.mark.parametrize(
    "text, error",
    [
        ("  precision: 16\ntrainer: {precision: bf16}", "trainer.precision=bf16 and model.precision=16 contradict each other"),
        ("trainer: {precision: bf16}\noptim: {config: {fp16: true}}", "optim.config.fp16 is true, but the precision is bf16"),
        ("trainer: {precision: transformer-engine}", "write a dtype"),
    ],
)
def test_precision_that_contradicts_itself(tmp_path: Path, text: str, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        read(tmp_path, SMALL + text)


def test_some_layers_of_each_stage_are_recomputed(tmp_path: Path) -> None:
    """Of 32 layers on two stages."""
    found = read(tmp_path, SECOND.replace("recompute_method: uniform", "recompute_method: block").replace("layers: 1", "layers: 4"))
    assert found.config.recompute == "full:4/16"


def test_what_sequence_parallelism_gathers_is_gathered_again(tmp_path: Path) -> None:
    model = SMALL + "  tensor_model_parallel_size: 2\n  sequence_parallel: "
    assert read(tmp_path, model + "true\n").config.recompute == "pointwise"
    assert read(tmp_path, model + "false\n").config.recompute == "none"
