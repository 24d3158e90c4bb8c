"""YAML of NeMo: ``model.*`` of its first version (``megatron_gpt_config.yaml``), ``trainer.strategy.*`` of its second (`MegatronStrategy`).

Data parallelism is what tensor, pipeline and context parallelism leave of the ranks. Apex's distributed Adam is ZeRO-2, Megatron's
distributed optimizer ZeRO-1, ``fsdp`` ZeRO-3. A value that is a reference to another one (``${model.encoder_seq_length}``) is followed.
"""

from __future__ import annotations

import re
from pathlib import Path

from autopar.importers.documents import read_yaml
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
from autopar.units import number_text

ADAMS = {"distributed_fused_adam": 2, "mcore_distributed_optim": 1}
"""Optimizers that shard, and their ZeRO levels."""

STRATEGIES = {"full": 3, "grad": 2}
"""ZeRO levels of ``fsdp_sharding_strategy``; ``hybrid`` shards within a node only, of ranks that are not said."""

LEFT_OUT = (
    LeftOut(
        PRECISION,
        """model.fp8 model.fp32_residual_connection model.fp16_lm_cross_entropy model.optim.param_sync_dtype model.fp8_params
        trainer.plugins.fp8* trainer.plugins.*_dtype trainer.plugins.autocast_enabled trainer.strategy.pipeline_dtype""",
        neutral=(None, False, 32, "32", "32-true"),
    ),
    LeftOut(
        OVERLAP,
        """model.ub_tp_comm_overlap model.ub_tp_comm_overlap_cfg model.overlap_p2p_comm model.batch_p2p_comm
        model.optim.overlap_grad_sync model.optim.overlap_param_sync model.optim.overlap_param_gather_with_optimizer_step
        model.defer_embedding_wgrad_compute model.wgrad_deferral_limit model.optim.align_param_gather
        trainer.strategy.ddp.overlap_grad_reduce trainer.strategy.ddp.overlap_param_gather trainer.strategy.ddp.align_param_gather
        optim.config.overlap_param_gather optim.config.overlap_grad_reduce""",
        neutral=(None,),
    ),
    LeftOut(
        COLLECTIVES,
        """model.optim.bucket_cap_mb model.grad_allreduce_chunk_size_mb model.optim.contiguous_grad_buffer
        model.optim.contiguous_param_buffer model.gradient_as_bucket_view model.grad_div_ar_fusion
        trainer.strategy.ddp.average_in_collective trainer.strategy.ddp.bucket_size model.sharp model.nccl_communicator_config_path""",
        neutral=(None, False),
    ),
    LeftOut(
        KERNELS,
        """model.transformer_engine model.mcore_gpt model.gradient_accumulation_fusion model.bias_activation_fusion
        model.bias_dropout_add_fusion model.masked_softmax_fusion model.apply_rope_fusion model.cross_entropy_loss_fusion
        model.use_flash_attention model.use_emha model.enable_cuda_graph model.persist_layer_norm model.get_attention_mask_from_fusion
        model.config.enable_cuda_graph model.config.cross_entropy_loss_fusion model.config.gradient_accumulation_fusion
        model.config.bias_activation_fusion model.config.bias_dropout_add_fusion model.config.masked_softmax_fusion""",
        neutral=(None, False),
    ),
    LeftOut(
        OPTIMIZER,
        "model.optim.name optim.name optim.config.optimizer",
        neutral=(None, "adam", "adamw", "fused_adam", "distributed_fused_adam", "mcore_distributed_optim"),
    ),
    LeftOut(OFFLOAD, "model.cpu_offloading model.config.cpu_offloading model.optim.offload"),
    LeftOut(
        CUT,
        """model.account_for_embedding_in_pipeline_split model.account_for_loss_in_pipeline_split
        model.num_layers_in_first_pipeline_stage model.num_layers_in_last_pipeline_stage""",
    ),
    LeftOut("the batch is the one at the end of the ramp", "model.rampup_batch_size data.rampup_batch_size"),
    LeftOut(
        "recomputation is the same in every stage and for every micro-batch",
        "model.num_micro_batches_with_partial_activation_checkpoints model.activations_checkpoint_layers_per_pipeline",
    ),
    LeftOut(SELECTIVE, "model.activations_checkpoint_recompute model.config.recompute_modules"),
    LeftOut("the pipeline is the outermost axis of a Manual", "model.use_tp_pp_dp_mapping trainer.strategy.use_tp_pp_dp_mapping"),
)

IRRELEVANT = """
name run.* hydra.* defaults restore_from_path exp_manager.* cluster.* log.* resume.* executor.* base_results_dir data_dir _target_
_partial_ *._target_ *._partial_ *._call_ tokenizer.* trainer.accelerator trainer.logger trainer.enable_checkpointing
trainer.use_distributed_sampler model.sync_batch_comm
trainer.replace_sampler_ddp trainer.max_* trainer.min_* trainer.log_every_n_steps trainer.val_check_interval trainer.check_val_every_n_epoch
trainer.limit_* trainer.num_sanity_val_steps trainer.accumulate_grad_batches trainer.gradient_clip_val trainer.gradient_clip_algorithm
trainer.benchmark trainer.callbacks trainer.enable_model_summary trainer.enable_progress_bar trainer.strategy.ckpt_*
trainer.strategy.save_ckpt_format trainer.strategy.progress_interval trainer.strategy.replace_progress_bar
trainer.strategy.find_unused_parameters trainer.strategy.gradient_as_bucket_view trainer.strategy.lazy_init
trainer.plugins.fp16_* trainer.strategy.ddp.check_for_nan_in_grad trainer.strategy.setup_optimizers trainer.strategy.init_model_parallel
model.resume_from_checkpoint model.num_layers model.hidden_size model.ffn_hidden_size model.num_attention_heads model.num_query_groups
model.max_position_embeddings model.init_method_std model.use_scaled_init_method model.hidden_dropout model.attention_dropout
model.ffn_dropout model.kv_channels model.apply_query_key_layer_scaling model.normalization model.layernorm_epsilon
model.do_layer_norm_weight_decay model.make_vocab_size_divisible_by model.pre_process model.post_process model.bias model.activation
model.headscale model.transformer_block_type model.openai_gelu model.normalize_attention_scores model.position_embedding_type
model.rotary_percentage model.rotary_base model.seq_len_interpolation_factor model.attention_type
model.share_embeddings_and_output_weights model.overlap_p2p_comm_warmup model.tokenizer.* model.data.* model.nsys_profile.*
model.native_amp_* model.hysteresis model.fp8_* model.seed model.use_cpu_initialization model.onnx_safe
model.apex_transformer_log_level model.gc_interval model.dist_ckpt_* model.fsdp_sharded_checkpoint model.fsdp_use_orig_params
model.optim.lr model.optim.weight_decay model.optim.betas model.optim.eps model.optim.sched.* model.sync_in_gradient model.reduce_amax
model.reset_lr model.reset_lr_steps model.name model.config.num_layers model.config.hidden_size model.config.ffn_hidden_size
model.config.num_attention_heads model.config.num_query_groups model.config.init_method_std model.config.hidden_dropout
model.config.attention_dropout model.config.layernorm_epsilon model.config.make_vocab_size_divisible_by model.config.rotary_*
model.config.normalization model.config.share_embeddings_and_output_weights model.config.position_embedding_type
data.paths data.split data.num_workers data.tokenizer.* data.index_mapping_dir data.seed data.dataset_kwargs.* data.num_train_samples
data.num_val_samples data.num_test_samples data.reset_* data.eod_mask_loss
optim.config.lr optim.config.weight_decay optim.config.adam_* optim.config.clip_grad optim.lr_scheduler.*
"""
"""The model, which is given apart; data, learning rates, loss scales, checkpoints, logging; details of what is reported already."""


def read_nemo(configuration: str | Path, num_ranks: int) -> Imported:
    """Read a YAML of NeMo.

    Args:
        configuration: a file, or its text.
        num_ranks: number of all ranks.

    Raises:
        ConfigError: it cannot be read, a value is missing or of the wrong kind, settings contradict each other or the ranks, or a
            `Manual` cannot say them.
    """
    settings = read_yaml(configuration)
    settings.values |= {name: _followed(settings, value) for name, value in settings.values.items()}
    tp, pp = (settings.degree(*_places(f"{kind}_model_parallel_size")) for kind in ("tensor", "pipeline"))
    cp = settings.context_parallel(*_places("context_parallel_size"))
    dp = settings.data_parallel(num_ranks, tp=tp, pp=pp, cp=cp)
    ep = settings.expert_parallel(*_places("expert_model_parallel_size"), dp=dp)
    if (settings.integer(*_places("expert_tensor_parallel_size")) or tp) != tp:
        settings.refuse("expert_tensor_parallel_size differs from tensor_model_parallel_size", "its tp is for all products")
    micro_batch = settings.integer("model.micro_batch_size", "data.micro_batch_size")
    if micro_batch is None:
        settings.fail("there is no model.micro_batch_size (data.micro_batch_size in NeMo 2); add it")
    batch = settings.integer("model.global_batch_size", "data.global_batch_size") or micro_batch * dp
    settings.check_batch(batch, dp=dp, micro_batch=micro_batch)
    stages = settings.degree(*_places("virtual_pipeline_model_parallel_size"))
    if stages > 1 and pp == 1:
        settings.fail(f"virtual_pipeline_model_parallel_size is {stages}, but pipeline_model_parallel_size is 1; change one")
    _check_ranks(settings, num_ranks)
    total = settings.integer("model.num_layers", "model.config.num_layers")
    held = total // (pp * stages) if total is not None and total % (pp * stages) == 0 else None
    sequence_parallel = settings.flag(*_places("sequence_parallel")) and tp > 1
    config = Manual(
        dp=dp,
        tp=tp,
        zero=_zero(settings, pp),
        sequence_parallel=sequence_parallel,
        pp=pp,
        schedule=f"interleaved:{stages}" if stages > 1 else "1f1b",
        micro_batch=micro_batch,
        recompute=_recompute(settings, held, sequence_parallel=sequence_parallel),
        cp=cp,
        precision=_precision(settings),
        ep=ep,
    )
    sequence = settings.integer("model.encoder_seq_length", "data.seq_length", "model.data.seq_length", "model.config.seq_length")
    return settings.imported(config, batch_size=batch, sequence=sequence, left_out=LEFT_OUT, irrelevant=IRRELEVANT)


def _places(name: str) -> tuple[str, str]:
    return f"model.{name}", f"trainer.strategy.{name}"


def _followed(settings: Settings, value: object) -> object:
    """The value that a reference stands for; a relative or computed one stays as it is written."""
    reference = re.fullmatch(r"\$\{(\w[\w.]*)\}", value) if isinstance(value, str) else None
    return settings.values.get(reference[1], value) if reference else value


def _check_ranks(settings: Settings, num_ranks: int) -> None:
    """A launch on other ranks than these is worth a word: data parallelism is then another."""
    nodes, devices = settings.integer("trainer.num_nodes"), settings.integer("trainer.devices", least=-1)
    if nodes is not None and devices is not None and devices > 0 and nodes * devices != num_ranks:
        there = number_text(nodes * devices, "rank")
        settings.leave_out(f"trainer.num_nodes={nodes}, devices={devices}", f"{there} there, {num_ranks} here")


def _zero(settings: Settings, pp: int) -> int:
    adam = settings.word("model.optim.name", "optim.name")
    distributed = settings.flag("optim.config.use_distributed_optimizer", "trainer.strategy.ddp.use_distributed_optimizer")
    strategy = settings.word("model.fsdp_sharding_strategy", among=(*STRATEGIES, "hybrid"))
    if settings.flag("model.fsdp"):
        if pp > 1 or adam in ADAMS:
            settings.fail(f"model.fsdp and {'a pipeline' if pp > 1 else f'optimizer {adam}'} exclude each other in NeMo; drop one")
        if strategy == "hybrid":
            settings.refuse("model.fsdp_sharding_strategy is 'hybrid'", "how many ranks share its shards is not said here")
        return STRATEGIES[strategy or "full"]
    return ADAMS.get(adam or "", 1 if distributed else 0)


def _precision(settings: Settings) -> str:
    """Gradients are reduced in float32 unless told. In NeMo 1 ``megatron_amp_O2`` keeps copies of parameters in the dtype that is computed
    in; without it an autocast narrows them at each use (``megatron_base_model``)."""
    names = ("trainer.precision", "model.precision", "trainer.plugins.precision")
    compute = settings.dtype(*names)
    if any(str(settings.values.get(name)).endswith("-true") for name in names) and compute != "fp32":
        settings.leave_out(f"precision {compute}-true", "parameters and the optimizer stay in float32")
    for dtype in ("bf16", "fp16"):
        if settings.flag(f"optim.config.{dtype}"):
            if compute not in (None, dtype):
                settings.fail(f"optim.config.{dtype} is true, but the precision is {compute}; change one")
            compute = dtype
    reduce = settings.dtype("model.optim.grad_sync_dtype", "model.fsdp_grad_reduce_dtype")
    is_wide = settings.flag("trainer.strategy.ddp.grad_reduce_in_fp32", "trainer.plugins.grad_reduce_in_fp32", default=True)
    reduce = reduce if is_wide else compute
    is_whole = settings.flag("model.megatron_amp_O2")
    if compute not in (None, "fp32") and not is_whole and any(name.startswith("model.optim.") for name in settings.values):
        settings.leave_out("model.megatron_amp_O2=False", "copies of parameters in the narrow dtype are made once a step")
    return settings.precision(compute, reduce)


def _recompute(settings: Settings, held: int | None, *, sequence_parallel: bool) -> str:
    """As in Megatron-LM (`megatron._recompute`)."""
    names = ("model.activations_checkpoint_granularity", "model.config.recompute_granularity", "model.recompute_granularity")
    level = settings.word(*names, among=("full", "selective"))
    methods = ("model.activations_checkpoint_method", "model.config.recompute_method", "model.recompute_method")
    method = settings.word(*methods, among=("uniform", "block"))
    counts = ("model.activations_checkpoint_num_layers", "model.config.recompute_num_layers", "model.recompute_num_layers")
    layers = settings.integer(*counts, least=0)
    if level == "selective":
        settings.leave_out(f"{settings.stated(*names)[0]}=selective (the inside of attention)", SELECTIVE)
    if level == "full":
        level = settings.recomputed((settings.stated(*methods)[0], method), (settings.stated(*counts)[0], layers), held)
    return level or ("pointwise" if sequence_parallel else "none")
