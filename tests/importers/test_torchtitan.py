from __future__ import annotations

from pathlib import Path

import pytest

from autopar.errors import ConfigError
from autopar.importers import Imported, read_torchtitan
from autopar.solve.manual import Manual

LLAMA3_70B = """
[job]
dump_folder = "./outputs"
description = "Llama 3 70B training"

[profiling]
enable_profiling = true
save_traces_folder = "profile_trace"
profile_freq = 100

[metrics]
log_freq = 10
enable_tensorboard = true

[model]
name = "llama3"
flavor = "70B"
hf_assets_path = "./assets/hf/Llama-3.1-70B"
# converters = ["float8"]

[optimizer]
name = "AdamW"
lr = 1.5e-4
eps = 1e-8

[lr_scheduler]
warmup_steps = 200

[training]
local_batch_size = 8
seq_len = 8192
max_norm = 1.0
steps = 1000
dataset = "c4"

[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = -1
tensor_parallel_degree = 8
pipeline_parallel_degree = 1
context_parallel_degree = 1

[checkpoint]
enable = false
folder = "checkpoint"

[activation_checkpoint]
mode = "full"

[compile]
enable = true
components = ["model", "loss"]

[quantize.linear.float8]
filter_fqns = ["output"]
"""


def read(path: Path, text: str, num_ranks: int = 8) -> Imported:
    (path / "run.toml").write_text(text)
    return read_torchtitan(path / "run.toml", num_ranks)


def parallel(path: Path, text: str, num_ranks: int = 8) -> Manual:
    return read(path, f"[parallelism]\n{text}", num_ranks).config


def test_llama3(tmp_path: Path) -> None:
    found = read(tmp_path, LLAMA3_70B, 256)
    assert found.config == Manual(dp=32, tp=8, zero=3, sequence_parallel=True, micro_batch=8, recompute="full", precision="bf16")
    assert (found.batch_size, found.sequence) == (256, 8192)
    assert [text.partition(":")[0] for text in found.left_out] == [
        "compile.enable=True",
        "quantize.linear.float8.filter_fqns=['output']",
    ]
    assert found.unknown == ()


def test_defaults(tmp_path: Path) -> None:
    found = read(tmp_path, "")
    assert found.config == Manual(dp=8, zero=3, micro_batch=8, recompute="selective", precision="bf16")
    assert (found.batch_size, found.sequence) == (64, 2048)
    assert "one of 2 blocks is recomputed as a whole" in found.left_out[0]


@pytest.mark.parametrize(
    "text, dp, zero",
    [
        ("data_parallel_replicate_degree = 8", 8, 0),
        ("data_parallel_shard_degree = 8", 8, 3),
        ("data_parallel_replicate_degree = 4\npipeline_parallel_degree = 2\ndata_parallel_shard_degree = 1", 4, 0),
        ('fsdp_reshard_after_forward = "never"', 8, 2),
        ("pipeline_parallel_degree = 2", 4, 2),
        ('pipeline_parallel_degree = 2\nfsdp_reshard_after_forward = "always"', 4, 3),
    ],
)
def test_data_parallelism(tmp_path: Path, text: str, dp: int, zero: int) -> None:
    config = parallel(tmp_path, text)
    assert (config.dp, config.zero) == (dp, zero)


@pytest.mark.parametrize(
    "text, schedule",
    [
        ('pipeline_parallel_schedule = "1F1B"', "1f1b"),
        ('pipeline_parallel_schedule = "GPipe"', "gpipe"),
        ('pipeline_parallel_schedule = "Interleaved1F1B"', "interleaved:2"),
        ('pipeline_parallel_schedule = "LoopedBFS"', "gpipe:2"),
        ('pipeline_parallel_schedule = "Interleaved1F1B"\npipeline_parallel_split_points = ["a", "b", "c", "d", "e"]', "interleaved:3"),
        ('pipeline_parallel_schedule = "InterleavedZeroBubble"\nmodule_fqns_per_model_part = [["a"], ["b"]]', "zb-h1"),
        ("pipeline_parallel_layers_per_stage = 4", "1f1b"),
    ],
)
def test_schedules(tmp_path: Path, text: str, schedule: str) -> None:
    config = parallel(tmp_path, f"pipeline_parallel_degree = 2\n{text}")
    assert config.schedule == schedule
    assert config.micro_batch == 1
    assert config.shape(32).pipeline.degree == 2


@pytest.mark.parametrize(
    "text, level, notes",
    [
        ('mode = "none"', "none", 0),
        ('mode = "full"', "full", 0),
        ('mode = "selective"\nselective_ac_option = "op"', "selective", 1),
        ('mode = "selective"\nselective_ac_option = "1"', "full", 0),
        ('mode = "selective"\nselective_ac_option = 3', "selective", 1),
        ('mode = "memory_budget"', "selective", 1),
    ],
)
def test_recomputation(tmp_path: Path, text: str, level: str, notes: int) -> None:
    found = read(tmp_path, f"[training]\nmixed_precision_param = 'float32'\n[activation_checkpoint]\n{text}")
    assert (found.config.recompute, len(found.left_out)) == (level, notes)


def test_local_batches_are_cut_in_a_pipeline_alone(tmp_path: Path) -> None:
    text = "[training]\nlocal_batch_size = 8\nglobal_batch_size = 64\n[parallelism]\npipeline_parallel_microbatch_size = 2\n"
    assert read(tmp_path, text).config.micro_batch == 8
    found = read(tmp_path, text + "pipeline_parallel_degree = 4")
    assert (found.config.micro_batch, found.batch_size) == (2, 64)
    assert any("does not drain between its 4 local batches" in note for note in found.left_out)


def test_context_parallelism(tmp_path: Path) -> None:
    """Parameters are sharded over its ranks, too."""
    config = parallel(tmp_path, "context_parallel_degree = 2\ntensor_parallel_degree = 4\ndata_parallel_shard_degree = 1")
    assert (config.dp, config.cp, config.tp, config.zero) == (1, 2, 4, 3)
    assert parallel(tmp_path, "context_parallel_degree = 2").dp == 4


def test_names_of_earlier_years(tmp_path: Path) -> None:
    text = "[training]\nbatch_size = 8\ntensor_parallel_degree = 2\ndata_parallel_shard_degree = -1\n"
    text += "[experimental]\npipeline_parallel_degree = 2\npipeline_parallel_microbatches = 4"
    assert read(tmp_path, text).config == Manual(
        dp=2, tp=2, zero=2, sequence_parallel=True, pp=2, micro_batch=2, recompute="selective", precision="bf16"
    )


def test_experts(tmp_path: Path) -> None:
    """On data-parallel ranks, if tensor parallelism splits each of them."""
    assert read(tmp_path, "[parallelism]\nexpert_parallel_degree = 4").config.ep == 4
    split = "[parallelism]\nexpert_parallel_degree = 2\ntensor_parallel_degree = 2\nexpert_tensor_parallel_degree = 2"
    found = read(tmp_path, split)
    assert (found.config.dp, found.config.tp, found.config.ep, found.unknown) == (4, 2, 2, ())


def test_hybrid_shards(tmp_path: Path) -> None:
    """What is replicated beside no shards is plain data parallelism."""
    found = read(tmp_path, "[parallelism]\ndata_parallel_replicate_degree = 2\nexpert_parallel_degree = 4").config
    assert (found.dp, found.replicas, found.zero_ranks, found.zero, found.ep) == (8, 2, 4, 3, 4)
    found = read(tmp_path, "[parallelism]\ndata_parallel_replicate_degree = 4\ncontext_parallel_degree = 2").config
    assert (found.dp, found.replicas, found.cp, found.zero_ranks, found.zero) == (4, 4, 2, 2, 3)
    found = read(tmp_path, "[parallelism]\ndata_parallel_replicate_degree = 8").config
    assert (found.dp, found.replicas, found.zero) == (8, 1, 0)


def test_what_is_unknown_is_reported(tmp_path: Path) -> None:
    assert read(tmp_path, "[parallelism]\nnew_degree = 2\n[new]\nx.y = 'z'").unknown == ("parallelism.new_degree=2", "new.x.y=z")


@pytest.mark.parametrize(
    "text, error",
    [
        ("expert_parallel_degree = 3", "cannot be expressed: parallelism.expert_parallel_degree is 3 of 8 data-parallel ranks"),
        ("expert_parallel_degree = 4\ntensor_parallel_degree = 2", "is 4 with tp 2, whose ranks have experts of their own"),
        ("expert_parallel_degree = 4\ncontext_parallel_degree = 2", "is 4 with cp 2, whose ranks have experts of their own"),
        ("tensor_parallel_degree = 4\nexpert_tensor_parallel_degree = 2", "torchtitan takes 1 or the tensor_parallel_degree, 4"),
        ("data_parallel_replicate_degree = 2\nexpert_parallel_degree = 8", "expert_parallel_degree is 8 of 4 data-parallel ranks"),
        ("data_parallel_shard_degree = 2", "= 2, but this is for 8 ranks; write data_parallel_shard_degree = 8 or -1"),
        ("data_parallel_shard_degree = 0", "write -1"),
        ("tensor_parallel_degree = 3", "does not divide the 8 ranks"),
        ("tensor_parallel_degree = true", "write a whole number"),
        ("tensor_parallel_degree = 2.0", "write a whole number"),
        ("enable_sequence_parallel = 1", "write true or false"),
        ("fsdp_reshard_after_forward = true", "write one of default, always, never"),
        ('pipeline_parallel_degree = 2\npipeline_parallel_schedule = "ZBVZeroBubble"', "cannot be expressed: .* 'ZBVZeroBubble'"),
        ('pipeline_parallel_degree = 2\npipeline_parallel_schedule = "InterleavedZeroBubble"', "with 2 stages on a rank"),
        ('pipeline_parallel_degree = 2\npipeline_parallel_schedule_csv = "a.csv"', "cannot be expressed"),
        ('pipeline_parallel_degree = 2\npipeline_parallel_split_points = ["a", "b"]', "ranks cannot be of schedule 1F1B"),
        ('pipeline_parallel_degree = 2\npipeline_parallel_schedule = "Interleaved1F1B"\npipeline_parallel_layers_per_stage = 4',
         "write module_fqns_per_model_part"),
        ("pipeline_parallel_degree = 2\npipeline_parallel_microbatch_size = 3", "a local batch of 8 is not cut into micro-batches of 3"),
        ("[training]\nglobal_batch_size = 72", "a global batch of 72 is not a multiple of dp 8"),
        ('[activation_checkpoint]\nselective_ac_option = "some"', "write 'op'"),
        ('[activation_checkpoint]\nmode = "some"', "write one of selective, full"),
        ("a = 1\na = 2", "run.toml is not TOML"),
    ],
)  # fmt: skip
def test_errors(tmp_path: Path, text: str, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        parallel(tmp_path, text)


def test_offload_of_what_is_sharded(tmp_path: Path) -> None:
    text = "[training]\nenable_cpu_offload = true\n[parallelism]\n"
    assert read(tmp_path, text).config.offload == "parameters"
    replicated = read(tmp_path, text + "data_parallel_replicate_degree = 8\n" + "data_parallel_shard_degree = 1\n")
    assert not replicated.config.offload
    assert any("enable_cpu_offload" in note for note in replicated.left_out)


@pytest.mark.parametrize(
    "text, precision, notes",
    [
        ("", "bf16", 0),
        ("[training]\nmixed_precision_param = 'float32'", "fp32", 0),
        ("[training]\nmixed_precision_reduce = 'bfloat16'", "bf16/bf16", 0),
        ("[training]\ndtype = 'bfloat16'", "", 1),
        ("[parallelism]\ndata_parallel_replicate_degree = 8", "bf16", 1),
        ("[parallelism]\ntensor_parallel_degree = 8", "fp32", 1),
    ],
)
def test_precision(tmp_path: Path, text: str, precision: str, notes: int) -> None:
    found = read(tmp_path, f"{text}\n[activation_checkpoint]\nmode = 'none'")
    assert (found.config.precision, len(found.left_out), found.unknown) == (precision, notes, ())


def test_a_dtype_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="mixed_precision_param is 'int8'; write a dtype"):
        read(tmp_path, "[training]\nmixed_precision_param = 'int8'")
