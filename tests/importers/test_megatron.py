from __future__ import annotations

import pytest

from autopar.errors import ConfigError
from autopar.importers import read_megatron
from autopar.solve.manual import Manual

GPT3_175B = """
--tensor-model-parallel-size 8 --pipeline-model-parallel-size 16 --num-layers-per-virtual-pipeline-stage 3 --sequence-parallel
--num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048 --max-position-embeddings 2048
--micro-batch-size 1 --global-batch-size 1536 --use-distributed-optimizer --overlap-grad-reduce --recompute-granularity selective
--train-iters 500000 --lr 6.0e-5 --min-lr 6.0e-6 --lr-decay-style cosine --lr-warmup-fraction .001 --clip-grad 1.0 --bf16
--adam-beta1 0.9 --adam-beta2 0.95 --init-method-std 0.006 --weight-decay 0.1 --data-path my-gpt2_text_document 0.5 other
--vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt --split 949,50,1 --log-interval 100 --save-interval 10000
--eval-interval 1000 --eval-iters 10 --save "$CHECKPOINT" --tensorboard-dir logs --distributed-backend nccl --no-load-rng
"""

LLAMA3_8B_SCRIPT = """
#!/bin/bash
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS_PER_NODE=8
TP_SIZE=2
DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes 1
)
MODEL_ARGS=(
    --use-mcore-models
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
    --group-query-attention --num-query-groups 8 --kv-channels 128
    --seq-length 8192 --max-position-embeddings 8192
    --position-embedding-type rope --rotary-base 1000000 --rotary-percent 1.0
    --attention-dropout 0.0 --hidden-dropout 0.0 --swiglu --init-method-std 0.0134
    --attention-backend fused --untie-embeddings-and-output-weights --disable-bias-linear
)
TRAINING_ARGS=(
    --micro-batch-size=1
    --global-batch-size=128
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
)
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py ${MODEL_ARGS[@]} ${TRAINING_ARGS[@]} \\
    --tensor-model-parallel-size $TP_SIZE --pipeline-model-parallel-size 1 --context-parallel-size 1
"""

SMALL = "--micro-batch-size 1 "


def read(text: str, num_ranks: int = 8) -> Manual:
    return read_megatron(SMALL + text, num_ranks).config


def test_experts() -> None:
    """Those of a layer lie on some of the ranks that tensor and pipeline parallelism leave."""
    assert read("--expert-model-parallel-size 4 --tensor-model-parallel-size 2 --num-experts 8") == Manual(4, 2, ep=4, micro_batch=1)
    found = read_megatron(SMALL + "--expert-model-parallel-size 2 --moe-token-dispatcher-type allgather", 8)
    assert [text.partition(":")[0] for text in found.left_out] == ["--moe-token-dispatcher-type=allgather"]
    assert not read_megatron(SMALL + "--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall", 8).left_out


def test_gpt3() -> None:
    found = read_megatron(GPT3_175B, 1024)
    assert found.config == Manual(
        dp=8, tp=8, zero=1, sequence_parallel=True, pp=16, schedule="interleaved:2", micro_batch=1, recompute="selective",
        precision="bf16",
    )  # fmt: skip
    assert (found.batch_size, found.sequence) == (1536, 2048)
    assert [text.partition(":")[0] for text in found.left_out] == [
        "--recompute-granularity=selective (core_attn)",
        "--overlap-grad-reduce",
    ]
    assert found.unknown == ()


def test_a_launch_script() -> None:
    found = read_megatron(LLAMA3_8B_SCRIPT, 8)
    assert found.config == Manual(dp=4, tp=2, micro_batch=1, recompute="full")
    assert (found.batch_size, found.sequence) == (128, 8192)
    assert found.left_out == ("--attention-backend=fused: kernels are priced by the profile of the device",)
    assert found.unknown == ()


def test_context_parallelism() -> None:
    found = read_megatron(SMALL + "--context-parallel-size 2 --tensor-model-parallel-size 2", 8)
    assert found.config == Manual(dp=2, tp=2, cp=2, micro_batch=1)
    assert found.batch_size == 2
    assert any(note.startswith("--context-parallel-size=2: keys and values are gathered") for note in found.left_out)


def test_the_batch_defaults_to_one_micro_batch_on_each_rank() -> None:
    found = read_megatron("--micro-batch-size 4", 8)
    assert (found.batch_size, found.sequence, found.config.dp) == (32, None, 8)


def test_sequence_parallelism_needs_tensor_parallelism() -> None:
    assert not read("--sequence-parallel").sequence_parallel
    assert read("--sequence-parallel --tensor-model-parallel-size 2").sequence_parallel


def test_what_sequence_parallelism_gathers_is_gathered_again() -> None:
    assert read("--sequence-parallel").recompute == "none"
    assert read("--sequence-parallel --tensor-model-parallel-size 2").recompute == "pointwise"
    full = "--sequence-parallel --tensor-model-parallel-size 2 --recompute-granularity full"
    assert read(full).recompute == "full"
    assert read(f"{full} --recompute-method block --recompute-num-layers 0").recompute == "pointwise"


@pytest.mark.parametrize(
    "text, level",
    [
        ("", 0),
        ("--use-distributed-optimizer", 1),
        ("--use-torch-fsdp2", 3),
        ("--use-torch-fsdp2 --torch-fsdp2-no-reshard-after-forward", 2),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params --use-distributed-optimizer", 3),
        ("--use-custom-fsdp --data-parallel-sharding-strategy optim_grads", 2),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy optim", 1),
        ("--use-megatron-fsdp", 0),
    ],
)
def test_zero_levels(text: str, level: int) -> None:
    assert read(text).zero == level


def test_instances_of_the_optimizer() -> None:
    found = read("--num-distributed-optimizer-instances 2 --use-distributed-optimizer")
    assert (found.dp, found.zero, found.replicas, found.zero_ranks) == (8, 1, 2, 4)


@pytest.mark.parametrize(
    "text, schedule",
    [
        ("", "1f1b"),
        ("--num-virtual-stages-per-pipeline-rank 3", "interleaved:3"),
        ("--num-virtual-stages-per-pipeline-rank 1", "1f1b"),
        ("--num-layers 16 --num-layers-per-virtual-pipeline-stage 2", "interleaved:2"),
        ("--num-layers 14 --num-layers-per-virtual-pipeline-stage 2 --account-for-embedding-in-pipeline-split "
         "--account-for-loss-in-pipeline-split", "interleaved:2"),
        ("--pipeline-model-parallel-layout 'Et|(tt|)*6,L'", "interleaved:2"),
        ("--pipeline-model-parallel-layout 'Et*3|t*4|tttt|tL'", "1f1b"),
    ],
)  # fmt: skip
def test_schedules(text: str, schedule: str) -> None:
    assert read(f"--pipeline-model-parallel-size 4 {text}").schedule == schedule


@pytest.mark.parametrize(
    "text, level, left_out",
    [
        ("", "none", ""),
        ("--recompute-activations", "selective", "core_attn"),
        ("--recompute-granularity selective --recompute-modules core_attn mlp", "selective", "--recompute-modules=core_attn mlp"),
        ("--recompute-granularity full", "full", ""),
        ("--recompute-granularity full --recompute-method block --recompute-num-layers 3", "full", "--recompute-num-layers=3"),
        ("--recompute-granularity full --recompute-method block --recompute-num-layers 3 --num-layers 8", "full:3/8", "other 5 of 8"),
        ("--recompute-granularity full --recompute-method block --recompute-num-layers 8 --num-layers 8", "full", ""),
        ("--recompute-granularity full --recompute-method block --recompute-num-layers 0", "none", ""),
        ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 2", "full", "every block on its own"),
    ],
)
def test_recomputation(text: str, level: str, left_out: str) -> None:
    found = read_megatron(SMALL + text, 8)
    assert found.config.recompute == level
    assert left_out in " ".join(found.left_out)
    assert len(found.left_out) == bool(left_out)


def test_what_is_unknown_is_reported() -> None:
    found = read_megatron(SMALL + "--new-thing --tensor-model-paralel-size 8 --swiglu ${MORE[@]} --save $DIR --lr $LR", 8)
    assert found.unknown == ("--new-thing", "--tensor-model-paralel-size=8", "${MORE[@]}", "$LR")


def test_what_has_no_effect_is_reported() -> None:
    found = read_megatron(SMALL + "--data-parallel-sharding-strategy optim --torch-fsdp2-no-reshard-after-forward", 8)
    assert [text.split(":")[0] for text in found.left_out] == [
        "--torch-fsdp2-no-reshard-after-forward",
        "--data-parallel-sharding-strategy=optim",
    ]


@pytest.mark.parametrize(
    "text, error",
    [
        ("--tensor-model-parallel-size eight", "--tensor-model-parallel-size is 'eight'; write a whole number"),
        ("--tensor-model-parallel-size", "--tensor-model-parallel-size is true, or has no value; write a whole number"),
        ("--tensor-model-parallel-size 0", "--tensor-model-parallel-size is 0"),
        ("--tensor-model-parallel-size $TP", r"'\$TP', a variable that is assigned elsewhere"),
        ("--tensor-model-parallel-size 3", "tp 3 [*] pp 1 [*] cp 1 = 3 does not divide the 8 ranks"),
        ("--micro-batch-size 1", "--micro-batch-size is given twice"),
        ("--sequence-parallel yes", "--sequence-parallel is followed by 'yes', but takes no value"),
        ("--global-batch-size 12", "a global batch of 12 is not a multiple of dp 8 [*] micro-batch 1 = 8"),
        ("--model-parallel-size 8", "no longer an argument of Megatron-LM; write --tensor-model-parallel-size"),
        ("--tensor-model-parallel-size 4 --expert-model-parallel-size 4", "--expert-model-parallel-size is 4 of 2 data-parallel ranks"),
        ("--expert-model-parallel-size two", "write a whole number"),
        ("--num-distributed-optimizer-instances 2", "2 is without a sharded optimizer; give --use-distributed-optimizer"),
        ("--num-distributed-optimizer-instances 3 --use-distributed-optimizer", "is 3 of 8 data-parallel ranks: its replicas are parts"),
        ("--encoder-pipeline-model-parallel-size 1 --encoder-tensor-model-parallel-size 2", "cannot be expressed"),
        ("--tensor-model-parallel-size 2 --expert-tensor-parallel-size 1", "cannot be expressed"),
        ("--yaml-cfg run.yaml", "--yaml-cfg run.yaml replaces all arguments"),
        ("--use-torch-fsdp2 --use-distributed-optimizer", "exclude each other"),
        ("--use-torch-fsdp2 --pipeline-model-parallel-size 2", "--use-torch-fsdp2 and a pipeline exclude each other"),
        ("--use-megatron-fsdp --use-distributed-optimizer", "give --data-parallel-sharding-strategy"),
        ("--data-parallel-sharding-strategy some", "write one of no_shard, optim"),
        ("--num-virtual-stages-per-pipeline-rank 2", "2 stages on a rank need a pipeline"),
        ("--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2", "only together with --num-layers"),
        ("--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 3 --num-layers 8", "does not divide the 4 layers"),
        ("--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 3 --num-layers 9", "9 layers are not a multiple"),
        ("--num-layers-per-virtual-pipeline-stage 3 --num-virtual-stages-per-pipeline-rank 2", "exclude each other"),
        ("--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout t|t|t", "3 stages .* are not a multiple"),
        ("--recompute-activations --recompute-granularity full", "drop one"),
        ("--recompute-granularity selective --recompute-method uniform", "drop one"),
        ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 0", "--recompute-num-layers is 0 with"),
        ("--recompute-granularity some", "write one of full, selective"),
        ("--seq-length 1024 --encoder-seq-length 512", "they mean the same"),
    ],
)
def test_errors(text: str, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        read(text)


@pytest.mark.parametrize(
    "text, error",
    [
        ("", "there are no arguments"),
        ("--bf16", "there is no --micro-batch-size"),
        ("pretrain_gpt.py 8 --micro-batch-size 1", "'8' stands before the first argument"),
    ],
)
def test_arguments_that_are_none(text: str, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        read_megatron(text, 8)


def test_offload_of_all_optimizer_state() -> None:
    start = "--micro-batch-size 1 --optimizer-cpu-offload"
    assert read_megatron(start, 8).config.offload == "optimizer"
    half = read_megatron(f"{start} --optimizer-offload-fraction 0.5", 8)
    assert not half.config.offload
    assert any("--optimizer-cpu-offload" in note for note in half.left_out)


@pytest.mark.parametrize(
    "text, precision",
    [
        ("", ""),
        ("--bf16", "bf16"),
        ("--bf16 --accumulate-allreduce-grads-in-fp32", "bf16"),
        ("--bf16 --grad-reduce-in-bf16", "bf16/bf16"),
        ("--fp16", "fp16/fp16"),
        ("--fp16 --accumulate-allreduce-grads-in-fp32", "fp16"),
    ],
)
def test_precision(text: str, precision: str) -> None:
    found = read_megatron(SMALL + text, 8)
    assert (found.config.precision, found.left_out, found.unknown) == (precision, (), ())


def test_a_precision_of_no_effect_is_said() -> None:
    found = read_megatron(SMALL + "--grad-reduce-in-bf16 --fp8-format hybrid", 8)
    assert found.config.precision == ""
    assert [note.partition(":")[0] for note in found.left_out] == ["--grad-reduce-in-bf16", "--fp8-format=hybrid"]


@pytest.mark.parametrize(
    "text, error",
    [
        ("--bf16 --fp16", "--bf16 and --fp16 exclude each other"),
        ("--bf16 --grad-reduce-in-bf16 --accumulate-allreduce-grads-in-fp32", "contradict each other"),
        ("--bf16 1", "takes no value"),
    ],
)
def test_precision_that_contradicts_itself(text: str, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        read(text)


SWITCH = """
DTYPE=fp8
ARGS=(--bf16)
if [ -n "$WANDB" ]; then
    ARGS+=(--wandb-project x --no-pipeline-parallel)
fi
%s
torchrun pretrain_gpt.py --micro-batch-size 1 --tensor-model-parallel-size 8 $EXTRA ${ARGS[@]}
python tools/report.py --log x
"""


@pytest.mark.parametrize("line", ["", 'if [ "$DTYPE" = fp16 ]; then EXTRA="--sequence-parallel"; fi', "[ $X ] && EXTRA=--swiglu"])
def test_branches_over_what_is_not_read(line: str) -> None:
    found = read_megatron(SWITCH % line, 8)
    assert found.config == Manual(dp=1, tp=8, micro_batch=1, precision="bf16")
    assert "--no-pipeline-parallel" in found.unknown


@pytest.mark.parametrize(
    "line, error",
    [
        ('if [ "$X" ]; then EXTRA="--sequence-parallel"; fi', "megatron: --sequence-parallel is given or not given, by the branches"),
        ("[ $X ] && EXTRA='--seq-length 8' || EXTRA='--seq-length 16'", "--seq-length is 8 or 16, by the branches"),
        ("[ $X ] && EXTRA='--bf16'", "--bf16 is given twice"),
        ("[ $X ] && EXTRA='--checkpoint-activations'", "megatron: --checkpoint-activations is not given or given, by the branches"),
    ],
)
def test_branches_over_what_is_read(line: str, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        read_megatron(SWITCH % line, 8)


def test_arguments_of_the_script_itself() -> None:
    assert read_megatron("python pretrain_gpt.py $@ --micro-batch-size 1", 8).unknown == ("$@",)
