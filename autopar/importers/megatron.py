"""Arguments of Megatron-LM (``megatron/training/arguments.py``): a command line, or the text of a launch script.

Data parallelism is what tensor, pipeline and context parallelism leave of the ranks; the global batch defaults to one micro-batch on each.
Megatron lays ranks out as a `Manual` does: tensor parallelism innermost, pipeline outermost.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from autopar.errors import ConfigError
from autopar.importers.documents import text_of
from autopar.importers.record import Imported
from autopar.importers.settings import (
    COLLECTIVES,
    CUT,
    KERNELS,
    OFFLOAD,
    OPTIMIZER,
    OVERLAP,
    PRECISION,
    SELECTIVE,
    LeftOut,
    Settings,
    matches,
)
from autopar.importers.shell import program_words
from autopar.solve.manual import Manual
from autopar.units import number_text

FLAGS = (
    "--sequence-parallel",
    "--use-distributed-optimizer",
    "--use-torch-fsdp2",
    "--torch-fsdp2-no-reshard-after-forward",
    "--use-megatron-fsdp",
    "--use-custom-fsdp",
    "--recompute-activations",
    "--account-for-embedding-in-pipeline-split",
    "--account-for-loss-in-pipeline-split",
    "--bf16",
    "--fp16",
    "--accumulate-allreduce-grads-in-fp32",
    "--grad-reduce-in-bf16",
)
"""Arguments that are read here and take no value."""

REMOVED = {
    "--model-parallel-size": "--tensor-model-parallel-size",
    "--batch-size": "--micro-batch-size",
    "--checkpoint-activations": "--recompute-activations",
}
"""Arguments that Megatron itself refuses, and what replaced them."""

PATHS = ("--save", "--load", "--tokenizer-model", "--wandb-*", "*-path", "*-dir", "*-file")
"""Arguments whose value may well be a variable of the script. Elsewhere a variable that is not assigned in the text may hold arguments."""

STRATEGIES = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
"""ZeRO levels of ``--data-parallel-sharding-strategy``."""

LEFT_OUT = (
    LeftOut(
        PRECISION,
        """--fp8-* --fp4-* --fp32-residual-connection --attention-softmax-in-fp32 --fp16-lm-cross-entropy
        --disable-bf16-reduced-precision-matmul --first-last-layers-bf16
        --use-precision-aware-optimizer --main-grads-dtype --main-params-dtype --exp-avg-dtype --exp-avg-sq-dtype
        --reuse-grad-buf-for-mxfp8-param-ag --keep-fp8-transpose-cache --moe-router-dtype --moe-router-padding-for-fp8""",
    ),
    LeftOut(
        OVERLAP,
        """--overlap-grad-reduce --overlap-param-gather --overlap-param-gather-with-optimizer-step --no-overlap-p2p-communication
        --overlap-p2p-communication-warmup-flush --tp-comm-overlap --tp-comm-overlap-* --disable-tp-comm-* --no-align-grad-reduce
        --no-align-param-gather --defer-embedding-wgrad-compute --wgrad-deferral-limit --overlap-moe-expert-parallel-comm
        --moe-shared-expert-overlap --delay-wgrad-compute --microbatch-group-size-per-virtual-pipeline-stage""",
    ),
    LeftOut(
        KERNELS,
        """--use-flash-attn --attention-backend --transformer-impl --no-masked-softmax-fusion --no-bias-gelu-fusion
        --no-bias-swiglu-fusion --no-bias-dropout-fusion --no-rope-fusion --cross-entropy-loss-fusion --cross-entropy-fusion-impl
        --no-persist-layer-norm --no-gradient-accumulation-fusion --use-te-activation-func --use-fused-weighted-squared-relu
        --deterministic-mode --use-legacy-models --enable-cuda-graph --external-cuda-graph --cuda-graph-* --moe-grouped-gemm
        --moe-use-legacy-grouped-gemm --moe-permute-fusion --moe-router-fusion""",
        neutral=("none", "auto"),
    ),
    LeftOut(
        COLLECTIVES,
        """--ddp-num-buckets --ddp-bucket-size --ddp-pad-buckets-for-high-nccl-busbw --ddp-average-in-collective
        --ddp-reduce-scatter-with-fp32-accumulation --no-gradient-reduce-div-fusion --use-nccl-ub --disable-symmetric-registration
        --use-sharp --sharp-enabled-group --no-scatter-gather-tensors-in-pipeline --use-ring-exchange-p2p --distributed-backend
        --pipeline-model-parallel-comm-backend --high-priority-stream-groups --nccl-communicator-config-path --fsdp-double-buffer
        --suggested-communication-unit-size""",
        neutral=("nccl",),
    ),
    LeftOut(
        OFFLOAD,
        """--cpu-offloading-num-layers --optimizer-cpu-offload --optimizer-offload-fraction --overlap-cpu-optimizer-d2h-h2d
        --use-torch-optimizer-for-cpu-offload""",
        neutral=(0,),
    ),
    LeftOut(
        CUT,
        """--decoder-first-pipeline-num-layers --decoder-last-pipeline-num-layers --pipeline-model-parallel-layout
        --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split""",
    ),
    LeftOut(OPTIMIZER, "--optimizer", neutral=("adam",)),
    LeftOut("whole blocks keep their inputs on every rank", "--distribute-saved-activations"),
    LeftOut(SELECTIVE, "--recompute-modules --moe-layer-recompute"),
    LeftOut(
        "tokens go to experts and back as is fastest of what their slots in the model allow",
        "--moe-token-dispatcher-type --moe-enable-deepep",
        neutral=("alltoall",),
    ),
    LeftOut("the batch is the one at the end of the ramp", "--rampup-batch-size"),
    LeftOut("the pipeline is the outermost axis of a Manual", "--use-tp-pp-dp-mapping"),
    LeftOut("what a checkpoint says is not read", "--use-checkpoint-args --use-mp-args-from-checkpoint-args"),
)

IRRELEVANT = """
--num-layers --encoder-num-layers --decoder-num-layers --hidden-size --ffn-hidden-size --num-attention-heads --kv-channels
--group-query-attention --num-query-groups --softmax-type --window-size --window-attn-skip-freq --max-position-embeddings
--position-embedding-type --relative-attention-* --use-rotary-position-embeddings --rotary-* --use-rope-scaling --rope-* --no-rope-freq
--no-position-embedding --mrope-section --make-vocab-size-divisible-by --normalization --norm-epsilon --apply-layernorm-1p
--apply-residual-connection-post-layernorm --openai-gelu --squared-relu --swiglu --quick-geglu --activation-func-clamp-value
--glu-linear-offset --onnx-safe --bert-no-binary-head --untie-embeddings-and-output-weights --multi-latent-attention --mtp-*
--disable-bias-linear --add-qkv-bias --qk-layernorm --qk-l2-norm --apply-query-key-layer-scaling --num-experts --moe-layer-freq
--moe-ffn-hidden-size --moe-shared-expert-intermediate-size --moe-router-load-balancing-type --moe-router-score-function
--moe-router-topk --moe-router-pre-softmax --moe-router-num-groups --moe-router-group-topk --moe-router-topk-scaling-factor
--moe-router-enable-expert-bias --moe-router-bias-update-rate --moe-router-force-load-balancing --moe-aux-loss-coeff --moe-z-loss-coeff
--moe-input-jitter-eps --moe-per-layer-logging --moe-deepep-num-sms
--moe-expert-capacity-factor --moe-pad-expert-input-to-capacity --moe-token-drop-policy --moe-apply-probs-on-input --q-lora-rank
--kv-lora-rank --qk-head-dim --qk-pos-emb-head-dim --v-head-dim --mscale --mscale-all-dim --spec --is-hybrid-model --hybrid-*
--mamba-* --heterogeneous-layers-config-* --decoder-seq-length --retriever-* --use-mcore-models --attention-dropout --hidden-dropout
--vocab-size --padded-vocab-size --vocab-file --merge-file --vocab-extra-ids --tokenizer-* --tiktoken-* --legacy-tokenizer
--trust-remote-code --data-path --split --train-data-path --valid-data-path --test-data-path --data-args-path
--per-split-data-args-path --data-cache-path --no-mmap-bin-files --mock-data --sample-rate --mask-prob --short-seq-prob --num-workers
--reset-position-ids --reset-attention-mask --eod-mask-loss --no-create-attention-mask-in-dataloader --num-dataset-builder-threads
--object-storage-cache-path --mid-level-dataset-surplus --allow-ambiguous-pad-tokens --dataloader-type
--lr --lr-* --min-lr --warmup --decoupled-lr --decoupled-min-lr --override-opt_param-scheduler --override-opt-param-scheduler
--use-checkpoint-opt_param-scheduler --use-checkpoint-opt-param-scheduler --weight-decay --start-weight-decay --end-weight-decay
--weight-decay-incr-style --clip-grad --adam-* --sgd-momentum --muon-* --loss-scale --initial-loss-scale --min-loss-scale
--loss-scale-window --hysteresis --calculate-per-token-loss --train-iters --train-samples --decrease-batch-size-if-needed
--seed --data-parallel-random-init --init-method-std --embedding-init-method-std --init-method-xavier-uniform
--use-cpu-initialization --no-initialization --init-model-with-meta-device --lazy-mpu-init --te-rng-tracker --inference-rng-tracker
--save --save-* --persistent-save-interval --no-save-* --load --load-* --no-load-* --no-strict-fsdp-dtensor-load --non-persistent-*
--finetune --pretrained-checkpoint --ckpt-* --no-ckpt-* --async-save --dist-ckpt-* --use-dist-ckpt --use-persistent-ckpt-worker
--auto-detect-ckpt-format --no-use-tokenizer-model-from-checkpoint-args --exit-on-missing-checkpoint
--distrib-optim-fully-reshardable-mem-efficient --replication --replication-*
--log-* --no-log-* --timing-log-* --no-barrier-with-level-1-timing --tensorboard-* --wandb-* --logging-level --one-logger-*
--no-one-logger --app-tag-* --profile --profile-* --use-pytorch-profiler --record-memory-history --memory-snapshot-path
--config-logger-dir --run-workload-inspector-server --result-rejected-tracker-filename --check-for-* --no-check-for-*
--check-weight-hash-across-dp-replicas-interval --eval-* --full-validation --multiple-validation-sets --test-mode --skip-train
--exit-* --iterations-to-skip --rerun-mode --error-injection-* --inprocess-* --enable-ft-package --calc-ft-timeouts --adlr-autoresume
--adlr-autoresume-interval --disable-straggler-on-startup --straggler-* --manual-gc --manual-gc-* --no-manual-gc-eval
--empty-unused-memory-level --train-sync-interval --local-rank --distributed-timeout-* --disable-gloo-process-groups
--no-async-tensor-model-parallel-allreduce --no-clone-scatter-output-in-embedding --enable-experimental --disable-msc
--cp-comm-type --hierarchical-context-parallel-sizes --enable-full-sharding-in-hsdp --sft --sft-* --inference-*
"""
"""The model, which is given apart; its numerics; data, learning rates, checkpoints, logging, evaluation, restarts."""


def read_megatron(arguments: str | Path, num_ranks: int) -> Imported:
    """Read arguments of Megatron-LM.

    Args:
        arguments: as on a command line, or a script that launches one: a file, or its text.
        num_ranks: number of all ranks.

    Raises:
        ConfigError: they cannot be read, a value is missing or of the wrong kind, arguments contradict each other or the ranks, or depend
            on a branch of the script that is not decided, or a `Manual` cannot say them.
    """
    _, text = text_of(arguments, "arguments", kind="arguments, which read like '--micro-batch-size 1'", mark="--")
    ways = [_options(words) for words in program_words(text, "--micro-batch-size")]
    distinct = {repr({name: value for name, value in way.items() if not _is_irrelevant(name)}): way for way in ways}
    return _agreed(list(distinct.values()), num_ranks)


@cache
def _is_irrelevant(name: str) -> bool:
    return matches(name, IRRELEVANT.split())


def _agreed(ways: Sequence[Mapping[str, object]], num_ranks: int) -> Imported:
    """What the arguments mean on all ways through the branches of a script.

    Raises:
        ConfigError: they mean nothing, or another thing on each.
    """
    if len(ways) == 1:
        return _imported(Settings("megatron", ways[0]), num_ranks)
    found, failed, asked = [], [], set[str]()
    for way in ways:
        settings = Settings("megatron", way)
        try:
            found.append(_imported(settings, num_ranks))
        except ConfigError as error:
            failed.append(error)
        asked |= settings.asked
    if not found:
        raise failed[0]
    if failed or len({(one.config, one.batch_size, one.sequence) for one in found}) > 1:
        said = {name: dict.fromkeys(_said(way.get(name)) for way in ways) for way in ways for name in way if not _is_irrelevant(name)}
        differ = [name for name, values in said.items() if len(values) > 1]
        names = [name for name in differ if name in asked] or differ
        unclear = ", ".join(f"{name} is {' or '.join(said[name])}" for name in names)
        raise ConfigError(f"megatron: {unclear}, by the branches that the script takes; give the arguments themselves")
    left_out = dict.fromkeys(note for one in found for note in one.left_out)
    unknown = dict.fromkeys(text for one in found for text in one.unknown)
    return replace(found[0], left_out=tuple(left_out), unknown=tuple(unknown))


def _said(value: object) -> str:
    return "not given" if value is None else "given" if value is True else str(value)


def _imported(settings: Settings, num_ranks: int) -> Imported:
    for name, today in REMOVED.items():
        if settings.stated(name)[1] is not None:
            settings.fail(f"{name} is no longer an argument of Megatron-LM; write {today}")
    tp, pp = settings.degree("--tensor-model-parallel-size"), settings.degree("--pipeline-model-parallel-size")
    cp = settings.context_parallel("--context-parallel-size")
    for part in ("tensor", "pipeline"):
        settings.refuse_degree("parallelism of an encoder of its own", f"--encoder-{part}-model-parallel-size")
    if (settings.integer("--expert-tensor-parallel-size") or tp) != tp:
        settings.refuse("--expert-tensor-parallel-size differs from --tensor-model-parallel-size", "its tp is for all products")
    if (given := settings.stated("--yaml-cfg")[1]) is not None:
        settings.fail(f"--yaml-cfg {given} replaces all arguments, and is not read; give its settings as arguments")
    dp = settings.data_parallel(num_ranks, tp=tp, pp=pp, cp=cp)
    ep = settings.expert_parallel("--expert-model-parallel-size", dp=dp)
    micro_batch = settings.integer("--micro-batch-size")
    if micro_batch is None:
        settings.fail("there is no --micro-batch-size, which Megatron-LM asks for; add it")
    batch = settings.integer("--global-batch-size") or micro_batch * dp
    settings.check_batch(batch, dp=dp, micro_batch=micro_batch)
    zero, instances = _zero(settings, pp), "--num-distributed-optimizer-instances"
    replicas = settings.replicas(instances, dp=dp)
    if replicas > 1 and not zero:
        settings.fail(f"{instances} {replicas} is without a sharded optimizer; give --use-distributed-optimizer, or drop it")
    sequence_parallel, schedule = settings.flag("--sequence-parallel") and tp > 1, _schedule(settings, pp)
    config = Manual(
        dp=dp,
        tp=tp,
        zero=zero,
        sequence_parallel=sequence_parallel,
        pp=pp,
        schedule=schedule,
        micro_batch=micro_batch,
        recompute=_recompute(settings, _held(settings, pp, schedule), sequence_parallel=sequence_parallel),
        cp=cp,
        precision=_precision(settings),
        offload=_offload(settings),
        ep=ep,
        replicas=replicas,
    )
    sequence = settings.integer("--seq-length", "--encoder-seq-length")
    return settings.imported(config, batch_size=batch, sequence=sequence, left_out=LEFT_OUT, irrelevant=IRRELEVANT)


def _offload(settings: Settings) -> str:
    """Its CPU optimizer keeps master weights and state on the host, if all of them (the default of the fraction)."""
    name, fraction = "--optimizer-cpu-offload", "--optimizer-offload-fraction"
    if settings.stated(name)[1] is not True or settings.stated(fraction)[1] not in (None, 1, "1.0"):
        return ""
    settings.honour(name, fraction)
    return "optimizer"


def _options(words: list[str]) -> dict[str, object]:
    """Arguments with their values: a number, a text, or true where there is none."""
    given: dict[str, list[str]] = {}
    variables: dict[str, object] = {}
    current: list[str] | None = None
    settings = Settings("megatron", {})
    for word in words:
        if current is None and word.startswith("$"):
            variables[word] = True
        elif not word.startswith("--"):
            if current is None:
                settings.fail(f"{word!r} stands before the first argument; arguments read like '--micro-batch-size 1'")
            current.append(word)
        else:
            name, equals, value = word.partition("=")
            if name in given:
                settings.fail(f"{name} is given twice ({' '.join(given[name]) or 'first without a value'}); drop one")
            current = given[name] = [value] if equals else []
    if not given:
        settings.fail("there are no arguments; they read like '--tensor-model-parallel-size 8 --micro-batch-size 1'")
    for name, values in given.items():
        loose = values[1:] if matches(name, PATHS) else values
        variables |= {value: True for value in loose if value.startswith("$")}
        kept = 0 if name in FLAGS else 1
        values[kept:] = [value for value in values[kept:] if not value.startswith("$")]
        if values and name in FLAGS:
            settings.fail(f"{name} is followed by {' '.join(values)!r}, but takes no value; drop one")
    return {name: _value(" ".join(values)) for name, values in given.items()} | variables


def _value(text: str) -> object:
    return int(text) if re.fullmatch(r"-?\d+", text) else text or True


def _zero(settings: Settings, pp: int) -> int:
    distributed = settings.flag("--use-distributed-optimizer")
    megatron_fsdp = settings.flag("--use-megatron-fsdp", "--use-custom-fsdp")
    keeps = settings.flag("--torch-fsdp2-no-reshard-after-forward")
    strategy = settings.word("--data-parallel-sharding-strategy", among=tuple(STRATEGIES))
    if settings.flag("--use-torch-fsdp2"):
        for name, other in (("--use-distributed-optimizer", distributed), ("--use-megatron-fsdp", megatron_fsdp), ("a pipeline", pp > 1)):
            if other:
                settings.fail(f"--use-torch-fsdp2 and {name} exclude each other in Megatron-LM; drop one")
        return 2 if keeps else 3
    if keeps:
        settings.leave_out("--torch-fsdp2-no-reshard-after-forward", "it has no effect without --use-torch-fsdp2")
    if megatron_fsdp:
        level = STRATEGIES[strategy or "no_shard"]
        if distributed and level == 0:
            settings.fail(
                "--use-distributed-optimizer shards the optimizer, the strategy no_shard of --use-megatron-fsdp does not; "
                "give --data-parallel-sharding-strategy optim, optim_grads or optim_grads_params"
            )
        return level
    if strategy not in (None, "no_shard"):
        settings.leave_out(f"--data-parallel-sharding-strategy={strategy}", "it has no effect without --use-megatron-fsdp")
    return 1 if distributed else 0


def _precision(settings: Settings) -> str:
    """``--bf16`` accumulates and reduces gradients in float32 unless told, ``--fp16`` only if told (``validate_args``)."""
    bf16, fp16 = settings.flag("--bf16"), settings.flag("--fp16")
    wide, narrow = settings.flag("--accumulate-allreduce-grads-in-fp32"), settings.flag("--grad-reduce-in-bf16")
    if bf16 and fp16:
        settings.fail("--bf16 and --fp16 exclude each other in Megatron-LM; drop one")
    if wide and narrow:
        settings.fail("--accumulate-allreduce-grads-in-fp32 and --grad-reduce-in-bf16 contradict each other; drop one")
    if narrow and not bf16:
        settings.leave_out("--grad-reduce-in-bf16", "it has no effect without --bf16")
    if bf16:
        return "bf16/bf16" if narrow else "bf16"
    if fp16:
        return "fp16" if wide else "fp16/fp16"
    return ""


def _schedule(settings: Settings, pp: int) -> str:
    """1F1B, interleaved if a rank has several stages."""
    layers = settings.integer("--num-layers-per-virtual-pipeline-stage")
    stages = settings.integer("--num-virtual-stages-per-pipeline-rank")
    layout = settings.stated("--pipeline-model-parallel-layout")[1]
    extra = sum(settings.flag(f"--account-for-{part}-in-pipeline-split") for part in ("embedding", "loss"))
    total = settings.integer("--num-layers", "--decoder-num-layers")
    ways = {
        "--num-layers-per-virtual-pipeline-stage": layers,
        "--num-virtual-stages-per-pipeline-rank": stages,
        "--pipeline-model-parallel-layout": layout,
    }
    given = [f"{name} {value}" for name, value in ways.items() if value is not None]
    if len(given) > 1:
        settings.fail(f"{' and '.join(given)} exclude each other in Megatron-LM; keep one")
    if layout is not None:
        stages = _per_rank(settings, "stages of --pipeline-model-parallel-layout", _stages_of(str(layout)), pp)
    if layers is not None:
        if total is None:
            settings.fail(
                f"--num-layers-per-virtual-pipeline-stage {layers} gives the stages of a rank only together with --num-layers; add it, "
                "or write --num-virtual-stages-per-pipeline-rank"
            )
        held = _per_rank(settings, "layers", total + extra, pp)
        if held % layers:
            settings.fail(
                f"--num-layers-per-virtual-pipeline-stage {layers} "
                f"does not divide the {number_text(held, 'layer')} of a pipeline rank; change one"
            )
        stages = held // layers
    if stages is None or stages == 1:
        return "1f1b"
    if pp == 1:
        settings.fail(f"{stages} stages on a rank need a pipeline, but --pipeline-model-parallel-size is 1; change one")
    return f"interleaved:{stages}"


def _held(settings: Settings, pp: int, schedule: str) -> int | None:
    """Layers of every stage, if it has as many as the others."""
    total, stages = settings.integer("--num-layers", "--decoder-num-layers"), pp * int(schedule.partition(":")[2] or 1)
    return total // stages if total is not None and total % stages == 0 else None


def _stages_of(layout: str) -> int:
    """``Et|(tt|)*3,L`` has 5: parts between bars, once ``(..)*n`` and ``x*n`` are written out."""
    short = re.compile(r"\(([^()]*)\)\*(\d+)|([^()*,\d])\*(\d+)")
    while match := short.search(layout):
        layout = layout.replace(match[0], (match[1] or match[3] or "") * int(match[2] or match[4]), 1)
    return layout.count("|") + 1


def _per_rank(settings: Settings, what: str, count: int, pp: int) -> int:
    if count % pp:
        settings.fail(f"{count} {what} are not a multiple of --pipeline-model-parallel-size {pp}; change one")
    return count // pp


def _recompute(settings: Settings, held: int | None, *, sequence_parallel: bool) -> str:
    """With sequence parallelism Megatron keeps no gathered activations: the backward gathers them again, as at the level ``pointwise``.

    Args:
        held: layers of a stage; None if that is not stated, or if stages differ.
    """
    level = settings.word("--recompute-granularity", among=("full", "selective"))
    if settings.flag("--recompute-activations"):
        if level == "full":
            settings.fail("--recompute-activations means --recompute-granularity selective, which is given as full; drop one")
        level = "selective"
    method = settings.word("--recompute-method", among=("uniform", "block"))
    layers = settings.integer("--recompute-num-layers", least=0)
    if level == "selective":
        if method is not None:
            settings.fail(f"--recompute-method {method} is for --recompute-granularity full, which is given as selective; drop one")
        if "--recompute-modules" not in settings.values:
            settings.leave_out("--recompute-granularity=selective (core_attn)", SELECTIVE)
    if level == "full":
        level = settings.recomputed(("--recompute-method", method), ("--recompute-num-layers", layers), held)
    return level or ("pointwise" if sequence_parallel else "none")
