"""TOML of torchtitan (``torchtitan/config/job_config.py``, and the names of earlier years).

The shards of FSDP take the ranks that are left (``data_parallel_shard_degree = -1``), and replicas of them hold the same (HSDP). FSDP is
ZeRO-3 where parameters are freed after the forward and ZeRO-2 where they are not, by default with a pipeline. Tensor parallelism splits the
sequence between its regions.
Ranks lie as a `Manual` lays them: pipeline outermost, tensor parallelism innermost.
"""

from __future__ import annotations

from pathlib import Path

from autopar.importers.documents import read_toml
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
)
from autopar.solve.manual import Manual
from autopar.solve.recompute import LEVELS
from autopar.units import number_text

SINGLE = {"1f1b": "1f1b", "gpipe": "gpipe"}
LOOPED = {"interleaved1f1b": "interleaved", "loopedbfs": "gpipe"}
"""Schedules of torch.distributed.pipelining with one stage and with several stages on a rank."""

LEFT_OUT = (
    LeftOut(
        PRECISION,
        "training.dtype model.converters float8.* mx.* quantize.*",
        neutral=("float32", [], False, None),
    ),
    LeftOut(KERNELS, "training.compile compile.enable liger_kernel.enable_fused_linear_cross_entropy debug.deterministic"),
    LeftOut(KERNELS, "training.deterministic parallelism.enable_compiled_autograd optimizer.implementation", neutral=(False, "fused")),
    LeftOut(OFFLOAD, "training.enable_cpu_offload"),
    LeftOut(OVERLAP, "parallelism.enable_async_tensor_parallel optimizer.early_step_in_backward"),
    LeftOut(COLLECTIVES, "parallelism.enable_fsdp_symm_mem"),
    LeftOut("the vocabulary is split where it divides", "parallelism.disable_loss_parallel"),
    LeftOut(
        CUT,
        """parallelism.pipeline_parallel_split_points parallelism.module_fqns_per_model_part
        parallelism.pipeline_parallel_layers_per_stage parallelism.pipeline_parallel_first_stage_less_layers
        parallelism.pipeline_parallel_last_stage_less_layers""",
        neutral=(None, []),
    ),
    LeftOut(OPTIMIZER, "optimizer.name", neutral=("AdamW", "Adam")),
    LeftOut("nothing else is run between steps", "fault_tolerance.enable fault_tolerance.semi_sync_method"),
)

IRRELEVANT = """
job.* profiling.* metrics.* checkpoint.* comm.* validation.* experimental.custom_* memory_estimation.* lr_scheduler.* debug.*
model.name model.flavor model.tokenizer_path model.hf_assets_path model.print_after_conversion model.norm_type
optimizer.lr optimizer.beta1 optimizer.beta2 optimizer.eps optimizer.weight_decay
training.dataset training.dataset_path training.max_norm training.steps training.warmup_steps training.gc_freq training.gc_debug
training.seed training.dataloader.* compile.components compile.backend fault_tolerance.*
activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns activation_checkpoint.early_stop
activation_checkpoint.visualize_memory_budget_pareto activation_checkpoint.preserve_rng_state activation_checkpoint.determinism_check
activation_checkpoint.debug activation_checkpoint.memory_budget parallelism.context_parallel_load_balancer
parallelism.context_parallel_rotate_method parallelism.expert_parallel_comm_backend
parallelism.pipeline_parallel_expert_parallel_overlap
"""
"""The model, which is given apart; data, learning rates, checkpoints, metrics, validation; details of what is off or read already."""


def read_torchtitan(configuration: str | Path, num_ranks: int) -> Imported:
    """Read a TOML of torchtitan.

    Args:
        configuration: a file, or its text.
        num_ranks: number of all ranks.

    Raises:
        ConfigError: it cannot be read, a value is of the wrong kind, settings contradict each other or the ranks, or a
            `Manual` cannot say them.
    """
    settings = read_toml(configuration)
    tp = settings.degree("parallelism.tensor_parallel_degree", "training.tensor_parallel_degree")
    pp = settings.degree("parallelism.pipeline_parallel_degree", "experimental.pipeline_parallel_degree")
    cp = settings.context_parallel("parallelism.context_parallel_degree", "experimental.context_parallel_degree")
    replicas, shards = _data_parallel(settings, num_ranks, tp=tp, pp=pp, cp=cp)
    dp, is_sharded = replicas * shards, shards * cp > 1
    ep = _expert_parallel(settings, dp=shards, tp=tp, cp=cp)
    local = settings.integer("training.local_batch_size", "training.batch_size") or 8
    stated = settings.integer("training.global_batch_size", least=-1) or -1
    batch = stated if stated > 0 else local * dp
    settings.check_batch(batch, dp=dp, micro_batch=local)
    config = Manual(
        dp=dp,
        tp=tp,
        zero=_zero(settings, pp) if is_sharded else 0,
        sequence_parallel=settings.flag("parallelism.enable_sequence_parallel", default=True) and tp > 1,
        pp=pp,
        schedule=_schedule(settings, pp),
        micro_batch=_micro_batch(settings, local, pp),
        recompute=_recompute(settings),
        cp=cp,
        precision=_precision(settings, is_sharded=is_sharded, is_split=tp * pp > 1),
        offload=_offload(settings, is_sharded=is_sharded),
        ep=ep,
        replicas=replicas if is_sharded else 1,
    )
    if pp > 1 and batch > local * dp:
        steps = batch // (local * dp)
        settings.leave_out(f"training.global_batch_size={batch}", f"the pipeline does not drain between its {steps} local batches")
    sequence = settings.integer("training.seq_len") or 2048
    return settings.imported(config, batch_size=batch, sequence=sequence, left_out=LEFT_OUT, irrelevant=IRRELEVANT)


def _offload(settings: Settings, *, is_sharded: bool) -> str:
    """FSDP's CPUOffloadPolicy has stored shards, gradients and optimizer state on the host, and fetches shards for each use."""
    name = "training.enable_cpu_offload"
    if not is_sharded or settings.values.get(name) is not True:
        return ""
    settings.honour(name)
    return "parameters"


def _data_parallel(settings: Settings, num_ranks: int, *, tp: int, pp: int, cp: int) -> tuple[int, int]:
    """Replicas, and the data-parallel ranks of each, over which parameters are sharded, and over those of context parallelism."""
    replicas = settings.degree("parallelism.data_parallel_replicate_degree", "training.data_parallel_replicate_degree")
    names = ("parallelism.data_parallel_shard_degree", "training.data_parallel_shard_degree", "training.data_parallel_degree")
    shards = settings.integer(*names, least=-1)
    if shards == 0:
        settings.fail(f"{names[0]} is 0; write -1 for the ranks that are left, or a whole number of at least 1")
    left = settings.data_parallel(num_ranks, replicas=replicas, tp=tp, pp=pp, cp=cp)
    if shards is None or shards == -1:
        shards = left
    if shards != left:
        settings.fail(
            f"replicas {replicas} * shards {shards} * tp {tp} * pp {pp} * cp {cp} = {replicas * shards * tp * pp * cp}, but this is "
            f"for {number_text(num_ranks, 'rank')}; write data_parallel_shard_degree = {left} or -1"
        )
    return replicas, shards


def _expert_parallel(settings: Settings, *, dp: int, tp: int, cp: int) -> int:
    """Experts lie on all ranks of context parallelism, on those of tensor parallelism unless each is split over these, and on some of
    data parallelism (``ParallelDims``)."""
    name = "parallelism.expert_parallel_degree"
    split = settings.degree("parallelism.expert_tensor_parallel_degree")
    ep = settings.expert_parallel(name, dp=dp * cp * (tp if split == 1 else 1))
    if split not in (1, tp):
        settings.fail(f"parallelism.expert_tensor_parallel_degree is {split}; torchtitan takes 1 or the tensor_parallel_degree, {tp}")
    borrowed = [text for text, degree in ((f"tp {tp}", tp if split == 1 else 1), (f"cp {cp}", cp)) if degree > 1]
    if ep > 1 and borrowed:
        settings.refuse(f"{name} is {ep} with {' and '.join(borrowed)}, whose ranks have experts of their own", "dp alone shares experts")
    return ep


def _zero(settings: Settings, pp: int) -> int:
    name = "parallelism.fsdp_reshard_after_forward"
    policy = settings.word(name, among=("default", "always", "never")) or "default"
    return 3 if policy == "always" or (policy == "default" and pp == 1) else 2


def _precision(settings: Settings, *, is_sharded: bool, is_split: bool) -> str:
    """FSDP computes in bfloat16 and reduces in float32 by default. Without shards it is an autocast (``maybe_enable_amp``), which is not
    there under tensor or pipeline parallelism."""
    name = "training.mixed_precision_param"
    compute, reduce = settings.dtype(name) or "bf16", settings.dtype("training.mixed_precision_reduce") or "fp32"
    if (settings.word("training.dtype") or "float32") != "float32":
        return ""  # a model without copies in float32
    if is_sharded or compute == "fp32":
        return settings.precision(compute, reduce)
    if is_split:
        settings.leave_out(f"{name}={compute}", "torchtitan has no mixed precision over tensor or pipeline ranks without shards")
        return "fp32"
    settings.leave_out(f"{name}={compute}", "without shards it is an autocast there; here the model computes in it")
    return settings.precision(compute, "fp32")


def _micro_batch(settings: Settings, local: int, pp: int) -> int:
    """Without a pipeline a local batch is one; with one it is cut further."""
    size = settings.integer("parallelism.pipeline_parallel_microbatch_size")
    count = settings.integer("experimental.pipeline_parallel_microbatches")
    if pp == 1:
        return local
    size = size or (local // count if count else 1)
    if local % size or (count is not None and size * count != local):
        settings.fail(
            f"a local batch of {local} is not cut into {f'{count} ' if count else ''}micro-batches of {size}; change "
            "training.local_batch_size or parallelism.pipeline_parallel_microbatch_size"
        )
    return size


def _schedule(settings: Settings, pp: int) -> str:
    names = tuple(f"{section}.pipeline_parallel_schedule" for section in ("parallelism", "experimental"))
    found = settings.stated(*names)[1] or "1F1B"
    name = (settings.word(*names) or "1f1b").removeprefix("schedule")
    points = settings.stated("parallelism.pipeline_parallel_split_points", "experimental.pipeline_parallel_split_points")[1]
    parts = settings.stated("parallelism.module_fqns_per_model_part")[1]
    layers = settings.integer("parallelism.pipeline_parallel_layers_per_stage")
    if pp == 1:
        return "1f1b"
    table = settings.word("parallelism.pipeline_parallel_schedule_csv")
    if table:
        settings.refuse(f"pipeline_parallel_schedule_csv is {table!r}", "its schedules have names")
    if name not in (*SINGLE, *LOOPED, "interleavedzerobubble"):
        settings.refuse(f"pipeline_parallel_schedule is {found!r}", "no schedule of its is that one")
    stages = pp if name in SINGLE else 2 * pp
    if isinstance(parts, list) and parts:
        stages = len(parts)
    elif isinstance(points, list) and points:
        stages = len(points) + 1
    elif layers is not None and name not in SINGLE:
        settings.fail(
            f"pipeline_parallel_layers_per_stage is {layers}, and the number of layers, which the stages of a rank follow from, is not "
            "here; write module_fqns_per_model_part"
        )
    per_rank = stages // pp
    if stages % pp or (name in SINGLE and per_rank != 1):
        cut = f"{number_text(stages, 'stage')} on {number_text(pp, 'pipeline rank')}"
        settings.fail(f"{cut} cannot be of schedule {found}; change the split or the degree")
    if name == "interleavedzerobubble":
        if per_rank > 1:
            settings.refuse(f"pipeline_parallel_schedule is {found!r} with {per_rank} stages on a rank", "its zb-h1 has one")
        return "zb-h1"
    return SINGLE[name] if name in SINGLE else f"{LOOPED[name]}:{per_rank}"


def _recompute(settings: Settings) -> str:
    """``selective`` counts blocks, every second by default, or keeps every second product."""
    option = settings.stated("activation_checkpoint.selective_ac_option")[1]
    mode = settings.word("activation_checkpoint.mode", among=("selective", "full", "memory_budget", "none")) or "selective"
    if mode == "memory_budget":
        settings.leave_out("activation_checkpoint.mode=memory_budget", f"a Manual has {', '.join(LEVELS)}; taken as selective")
        return "selective"
    if mode != "selective":
        return mode
    option = "2" if option is None else str(option)
    if option == "1":
        return "full"
    if option != "op" and not (option.isdecimal() and int(option)):
        settings.fail(f"activation_checkpoint.selective_ac_option is {option!r}; write 'op' or a whole number of at least 1")
    what = "products but every second are recomputed too" if option == "op" else f"one of {option} blocks is recomputed as a whole"
    settings.leave_out(f"activation_checkpoint.selective_ac_option={option} ({what})", SELECTIVE)
    return "selective"
