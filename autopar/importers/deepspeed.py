"""JSON of DeepSpeed (https://www.deepspeed.ai/docs/config-json).

It says the ZeRO stage and the batch; pipeline stages, activation checkpoints and the ``ep_size`` of a ``MoE`` layer are in the code of a
DeepSpeed program, and not here, but that of its automatic expert parallelism (``autoep_size``).
Of the global batch, the micro-batch and the accumulation steps two give the third:

    train_batch_size = train_micro_batch_size_per_gpu * gradient_accumulation_steps * data-parallel ranks

``"auto"`` stands for what the program around DeepSpeed fills in, and is taken as not stated.
"""

from __future__ import annotations

from pathlib import Path

from autopar.importers.documents import read_json
from autopar.importers.record import Imported
from autopar.importers.settings import (
    COLLECTIVES,
    KERNELS,
    NEUTRAL,
    OFFLOAD,
    OPTIMIZER,
    OVERLAP,
    PRECISION,
    LeftOut,
    Settings,
)
from autopar.solve.manual import Manual

SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")

FILLED_IN = (*NEUTRAL, "auto")

LEFT_OUT = (
    LeftOut(
        PRECISION,
        """amp.enabled torch_autocast.enabled seq_parallel_communication_data_type fp16.fp16_master_weights_and_grads fp16.auto_cast
        zero_optimization.zero_quantized_weights zero_optimization.zero_quantized_gradients
        zero_optimization.zero_quantized_nontrainable_weights""",
        neutral=NEUTRAL,
    ),
    LeftOut(
        OFFLOAD,
        """zero_optimization.offload_optimizer.device zero_optimization.offload_param.device zero_optimization.cpu_offload
        zero_optimization.cpu_offload_param zero_optimization.zenflow.* activation_checkpointing.cpu_checkpointing""",
        neutral=FILLED_IN,
    ),
    LeftOut(OFFLOAD, "zero_optimization.offload_optimizer.ratio", neutral=(None, 1, "auto")),
    LeftOut(
        OVERLAP,
        """zero_optimization.overlap_comm zero_optimization.stage3_prefetch_bucket_size zero_optimization.prefetch_bucket_size
        zero_optimization.stage3_max_reuse_distance zero_optimization.max_reuse_distance tensor_parallel.tp_overlap_comm""",
        neutral=(None, "auto"),
    ),
    LeftOut(
        "parameters are whole or shards by the ZeRO level alone",
        """zero_optimization.stage3_param_persistence_threshold zero_optimization.param_persistence_threshold
        zero_optimization.stage3_model_persistence_threshold zero_optimization.model_persistence_threshold
        zero_optimization.stage3_max_live_parameters zero_optimization.max_live_parameters""",
        neutral=FILLED_IN,
    ),
    LeftOut("a Manual has no secondary shards", "zero_optimization.zero_hpz_partition_size", neutral=(None, 0, 1, "auto")),
    LeftOut(
        COLLECTIVES,
        """zero_optimization.allgather_partitions zero_optimization.allgather_bucket_size zero_optimization.reduce_scatter
        zero_optimization.reduce_bucket_size zero_optimization.use_multi_rank_bucket_allreduce
        zero_optimization.contiguous_gradients zero_optimization.stage3_use_all_reduce_for_fetch_params
        zero_optimization.stage3_allgather_sequential zero_optimization.stage3_module_granularity_threshold disable_allgather
        sparse_gradients""",
        neutral=(True, *FILLED_IN),
    ),
    LeftOut(KERNELS, "compile.* sparse_attention.* graph_harvesting"),
    LeftOut(
        "what is recomputed stands in the code of a program, not here; a Manual recomputes nothing unless told",
        """activation_checkpointing.partition_activations activation_checkpointing.contiguous_memory_optimization
        activation_checkpointing.number_checkpoints""",
    ),
    LeftOut("the stages stand in the code of a program, not here; a Manual of this has none", "pipeline.*", neutral=()),
    LeftOut("DeepSpeed chooses the batch and the micro-batch itself then", "elasticity.enabled"),
    LeftOut("DeepSpeed searches for the ZeRO stage and the micro-batch itself then", "autotuning.enabled"),
    LeftOut(OPTIMIZER, "optimizer.type", neutral=("Adam", "AdamW", "adam", "adamw", "FusedAdam")),
    LeftOut("the whole model is trained at every step", "progressive_layer_drop.enabled compression_training.*"),
)

IRRELEVANT = """
steps_per_print wall_clock_breakdown memory_breakdown dump_state gradient_clipping prescale_gradients gradient_predivide_factor
zero_allow_untested_optimizer zero_force_ds_cpu_optimizer dataloader_drop_last vocabulary_size zero_optimization
optimizer.params.* optimizer.legacy_fusion scheduler.* fp16.* bf16.* bfloat16.* amp.* torch_autocast.* flops_profiler.* tensorboard.*
wandb.* csv_monitor.* comet.* monitor_config.* comms_logger.* checkpoint.* nebula.* autotuning.* elasticity.* aio.* eigenvalue.*
data_efficiency.* curriculum_learning.* progressive_layer_drop.* activation_checkpointing.synchronize_checkpoint_boundary
activation_checkpointing.profile zero_optimization.offload_optimizer.* zero_optimization.offload_param.*
zero_optimization.cpu_offload_use_pin_memory zero_optimization.sub_group_size zero_optimization.load_from_fp32_weights
zero_optimization.elastic_checkpoint zero_optimization.ignore_unused_parameters zero_optimization.legacy_stage1
zero_optimization.round_robin_gradients zero_optimization.zeropp_loco_param.* zero_optimization.memory_efficient_linear
zero_optimization.mics_hierarchical_params_gather
zero_optimization.pipeline_loading_checkpoint zero_optimization.override_module_apply zero_optimization.log_trace_cache_warnings
zero_optimization.enable_sanity_checks zero_optimization.gather_16bit_weights_on_model_save zero_optimization.leaf_module.*
zero_optimization.stage3_gather_16bit_weights_on_model_save zero_optimization.stage3_gather_fp16_weights_on_model_save
zero_optimization.stage3_partition_stream_chunk_size use_data_before_expert_parallelism
"""
"""Learning rates, loss scales, checkpoints, logging and profiling; details of what is reported as left out already."""


def read_deepspeed(configuration: str | Path, num_ranks: int) -> Imported:
    """Read a JSON of DeepSpeed.

    Args:
        configuration: a file, or its text.
        num_ranks: number of all ranks.

    Raises:
        ConfigError: it cannot be read, a value is of the wrong kind, settings contradict each other or the ranks, or a
            `Manual` cannot say them.
    """
    settings = read_json(configuration)
    tp = settings.integer("tensor_parallel.autotp_size", least=0) or 1
    settings.refuse_degree("sequence parallelism over ranks (Ulysses)", "sequence_parallel_size")
    dp = settings.data_parallel(num_ranks, tp=tp)
    ep = settings.expert_parallel("expert_parallel.autoep_size", "moe.ep_size", "ep_size", dp=dp)
    shards = settings.integer("zero_optimization.mics_shard_size", least=-1)
    zero = _stage(settings)
    if shards in (None, -1, 0):
        shards = dp
    elif zero != 3:
        settings.leave_out(f"zero_optimization.mics_shard_size={shards}", "it has no effect without ZeRO stage 3")
        shards = dp
    if dp % shards:
        settings.refuse(f"zero_optimization.mics_shard_size is {shards} of {dp} data-parallel ranks", "replicas are equal parts")
    batch, micro_batch = _batch(settings, dp)
    config = Manual(
        dp=dp,
        tp=tp,
        zero=zero,
        micro_batch=micro_batch,
        precision=_precision(settings),
        offload=_offload(settings, zero),
        ep=ep,
        replicas=dp // shards,
    )
    return settings.imported(config, batch_size=batch, sequence=None, left_out=LEFT_OUT, irrelevant=IRRELEVANT)


def _stage(settings: Settings) -> int:
    if "zero_optimization" in settings.values and settings.flag("zero_optimization"):
        return 1  # the form of the first releases
    stage = settings.integer("zero_optimization.stage", least=0) or 0
    if stage > 3:
        settings.fail(f"zero_optimization.stage is {stage}; write 0, 1, 2 or 3")
    return stage


def _offload(settings: Settings, zero: int) -> str:
    """What is on the host: as here, parameters only with their optimizer; what is offloaded otherwise stays for the notes.

    DeepSpeed offloads the optimizer from stage 1 on, a part of it (``ratio``) and parameters at stage 3 alone.
    """
    section = "zero_optimization"
    optimizer, parameters, once = f"{section}.offload_optimizer.device", f"{section}.offload_param.device", f"{section}.cpu_offload"
    for name, least in ((optimizer, 1), (once, 1), (parameters, 3), (f"{section}.cpu_offload_param", 3)):
        if zero < least and (value := settings.values.get(name)) not in FILLED_IN:
            settings.leave_out(f"{name}={value}", f"it has no effect {'without ZeRO stage 3' if least == 3 else 'at ZeRO stage 0'}")
            settings.honour(name)
    ratio = _ratio(settings)
    if settings.values.get(optimizer) is None and settings.values.get(once) is True:  # as it was called once
        settings.honour(once)
        return "optimizer"
    if settings.values.get(optimizer) != "cpu":
        settings.honour(f"{section}.offload_optimizer.ratio")
        return ""
    if ratio < 1 and zero < 3:
        what = f"{section}.offload_optimizer.ratio is {ratio:g} at stage {zero}"
        settings.fail(f"{what}, and DeepSpeed offloads a part at stage 3 alone; drop the ratio, or write stage 3")
    if ratio < 1:
        return ""
    settings.honour(optimizer)
    if settings.values.get(parameters) != "cpu":
        return "optimizer"
    settings.honour(parameters)
    return "parameters"


def _ratio(settings: Settings) -> float:
    """The part of the optimizer that is offloaded."""
    name = "zero_optimization.offload_optimizer.ratio"
    value = settings.values.get(name)
    if value in (None, "auto"):
        return 1.0
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        settings.fail(f"{name} is {value!r}; write a number from 0 to 1")
    return value


def _precision(settings: Settings) -> str:
    """Gradients are reduced in what is computed in, unless ``communication_data_type`` says otherwise (``DeepSpeedEngine``)."""
    enabled = {"bf16": ("bf16.enabled", "bfloat16.enabled"), "fp16": ("fp16.enabled",)}
    for name in (*(name for names in enabled.values() for name in names), "communication_data_type", "data_types.grad_accum_dtype"):
        if settings.values.get(name) == "auto":
            settings.values[name] = None
            settings.leave_out(f"{name}=auto", "it is filled in by a program that is not read")
    on = [dtype for dtype, names in enabled.items() if settings.flag(*names)]
    if len(on) > 1:
        settings.fail("bf16.enabled and fp16.enabled exclude each other in DeepSpeed; disable one")
    compute = on[0] if on else None
    reduce, summed = settings.dtype("communication_data_type"), settings.dtype("data_types.grad_accum_dtype")
    if summed not in (None, "fp32"):
        settings.leave_out(f"data_types.grad_accum_dtype={summed}", "gradients of micro-batches are summed in float32")
    if compute is None and reduce is not None:
        settings.leave_out(f"communication_data_type={reduce}", PRECISION)
    return settings.precision(compute, reduce or compute)


def _batch(settings: Settings, dp: int) -> tuple[int | None, int | None]:
    """The global batch and the micro-batch, completed and checked as DeepSpeed does."""
    filled_in = [name for name in SIZES if settings.values.get(name) == "auto"]
    for name in filled_in:
        settings.values[name] = None
    batch, micro_batch, steps = (settings.integer(name) for name in SIZES)
    if filled_in:
        settings.leave_out(f"{', '.join(filled_in)}=auto", "it is filled in by a program that is not read")
    elif batch is None and micro_batch is None:
        settings.fail(f"neither {SIZES[0]} nor {SIZES[1]} is there, and DeepSpeed asks for one of them; add it")
    if batch is None and micro_batch is not None and SIZES[0] not in filled_in and SIZES[2] not in filled_in:
        return micro_batch * (steps or 1) * dp, micro_batch
    if batch is not None and micro_batch is None and SIZES[1] not in filled_in and SIZES[2] not in filled_in:
        settings.check_batch(batch, dp=dp, micro_batch=steps or 1)
        return batch, batch // (dp * (steps or 1))
    if batch is None or micro_batch is None:
        return batch, micro_batch
    settings.check_batch(batch, dp=dp, micro_batch=micro_batch)
    if steps is not None and batch != micro_batch * steps * dp:
        settings.fail(
            f"train_batch_size {batch} is not train_micro_batch_size_per_gpu {micro_batch} * gradient_accumulation_steps {steps} * "
            f"{dp} data-parallel ranks = {micro_batch * steps * dp}; change one, or drop gradient_accumulation_steps"
        )
    return batch, micro_batch
