"""YAML of nanotron (``src/nanotron/config``).

All degrees are stated, and their product has to be the ranks. A replica's batch passes the pipeline in ``batch_accumulation_per_replica``
micro-batches, all forwards first unless ``pp_engine`` is ``1f1b``; ``tp_mode: REDUCE_SCATTER`` is sequence parallelism.
"""

from __future__ import annotations

from pathlib import Path

from autopar.importers.documents import read_yaml
from autopar.importers.record import Imported
from autopar.importers.settings import OPTIMIZER, OVERLAP, SELECTIVE, LeftOut, Settings
from autopar.solve.manual import Manual
from autopar.units import number_text

ENGINES = {"afab": "gpipe", "1f1b": "1f1b"}

LEFT_OUT = (
    LeftOut(OVERLAP, "parallelism.tp_linear_async_communication", neutral=(None,)),
    LeftOut("the gathered input of a product is kept", "parallelism.tp_recompute_allgather", neutral=(None, False)),
    LeftOut(SELECTIVE, "parallelism.moe_layer_recompute"),
    LeftOut("gradients are reduced in buckets of autopar's own size", "model.ddp_bucket_cap_mb", neutral=(None, 25)),
    LeftOut(OPTIMIZER, "optimizer.optimizer_factory.name optimizer.name", neutral=("adamW", "adam", None)),
)

IRRELEVANT = """
general general.* checkpoints checkpoints.* data data.* data_stages logging logging.* lighteval lighteval.* profiler profiler.* tokenizer
tokenizer.* s3_upload s3_upload.* metrics_logging metrics_logging.* generation generation.* model.model_config.* model.init_method.*
model.make_vocab_size_divisible_by optimizer.adam_* optimizer.torch_adam_is_fused optimizer.weight_decay optimizer.clip_grad
optimizer.weight_decay_exclude_named_params optimizer.learning_rate_scheduler.* optimizer.optimizer_factory.adam_*
optimizer.optimizer_factory.torch_adam_is_fused tokens.train_steps tokens.val_check_interval tokens.limit_val_batches
tokens.limit_test_batches
"""
"""The model, which is given apart; data, learning rates, checkpoints, logging, evaluation."""


def read_nanotron(configuration: str | Path, num_ranks: int) -> Imported:
    """Read a YAML of nanotron.

    Args:
        configuration: a file, or its text.
        num_ranks: number of all ranks.

    Raises:
        ConfigError: it cannot be read, a value is missing or of the wrong kind, settings contradict each other or the ranks, or a
            `Manual` cannot say them.
    """
    settings = read_yaml(configuration)
    dp, tp, pp = (_required(settings, f"parallelism.{name}") for name in ("dp", "tp", "pp"))
    cp = settings.context_parallel("parallelism.context_parallel_size")
    settings.refuse_degree("expert parallelism on ranks of its own, beside the data-parallel ones,", "parallelism.expert_parallel_size")
    settings.check_ranks(num_ranks)
    if dp * tp * pp * cp != num_ranks:
        ranks = number_text(num_ranks, "rank")
        settings.fail(f"dp {dp} * tp {tp} * pp {pp} * cp {cp} = {dp * tp * pp * cp}, but this is for {ranks}; change one")
    engine = settings.word("parallelism.pp_engine", among=tuple(ENGINES)) or "afab"
    mode = settings.word("parallelism.tp_mode", among=("all_reduce", "reduce_scatter"))
    micro_batch = _required(settings, "tokens.micro_batch_size")
    batch = micro_batch * _required(settings, "tokens.batch_accumulation_per_replica") * dp
    zero = settings.integer("optimizer.zero_stage", least=0) or 0
    if zero > 1:
        settings.fail(f"optimizer.zero_stage is {zero}; nanotron has 0 and 1")
    config = Manual(
        dp=dp,
        tp=tp,
        zero=zero,
        sequence_parallel=mode == "reduce_scatter" and tp > 1,
        pp=pp,
        schedule=ENGINES[engine] if pp > 1 else "1f1b",
        micro_batch=micro_batch,
        recompute=_recompute(settings),
        cp=cp,
        precision=_precision(settings),
    )
    sequence = settings.integer("tokens.sequence_length")
    return settings.imported(config, batch_size=batch, sequence=sequence, left_out=LEFT_OUT, irrelevant=IRRELEVANT)


def _required(settings: Settings, name: str) -> int:
    value = settings.integer(name)
    if value is None:
        settings.fail(f"there is no {name}, which nanotron asks for; add it")
    return value


def _precision(settings: Settings) -> str:
    """``accumulate_grad_in_fp32`` keeps float32 copies of parameters and reduces gradients in float32 (``FP32GradientAccumulator``)."""
    compute, is_wide = settings.dtype("model.dtype"), settings.flag("optimizer.accumulate_grad_in_fp32")
    if compute not in (None, "fp32") and not is_wide:
        settings.leave_out("optimizer.accumulate_grad_in_fp32=False", "parameters, sums of gradients and the optimizer stay in float32")
    return settings.precision(compute, "fp32" if is_wide else compute)


def _recompute(settings: Settings) -> str:
    level = settings.word("parallelism.recompute_granularity", among=("full", "selective"))
    if settings.flag("parallelism.recompute_layer"):
        if level == "selective":
            settings.fail("parallelism.recompute_layer means full recomputation, recompute_granularity is selective; drop one")
        return "full"
    if level == "selective":
        settings.leave_out("parallelism.recompute_granularity=selective", SELECTIVE)
    return level or "none"
