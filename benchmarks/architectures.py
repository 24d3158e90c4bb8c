"""Architectures of transformers, small and with random weights: which of them plans are made for, and whether these compute the same.

    python benchmarks/architectures.py [--tasks causal masked ...] [--only llama mixtral] [--workers 2] [--json OUT]

Each model that transformers names for a task is built from its own default configuration, with the sizes of `SMALL` in place of what it
has under these names. What runs so by itself is verified (`autopar.verify`) under three plans of four ranks: data and tensor parallelism
with ZeRO-3, a pipeline of micro-batches with tensor parallelism, and data and tensor parallelism with sequence parallelism, micro-batches
and full recomputation. Nothing here knows a model by its name.
"""

from __future__ import annotations

import argparse
import inspect
import json
import math
import multiprocessing
import os
import queue
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from torch import nn
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import autopar
from autopar import Manual
from autopar.errors import AutoparError
from autopar.factors import MissingRuleWarning

BATCH, LENGTH, VOCABULARY, LAYERS = 8, 16, 64, 2
MAX_PARAMETERS = 40_000_000
TIME_LIMIT_S = 300.0
PLACES = (16, 4, 1, 17, 64, 2, 8)
"""How many places an image may have among the tokens: as many as the model takes, which its configuration says in a way of its own."""
PLANS = {
    "dp 2, tp 2, ZeRO-3": Manual(dp=2, tp=2, zero=3),
    "pp 2, tp 2, 2 micro-batches": Manual(tp=2, pp=2, microbatches=2),
    "dp 2, tp 2, sequences, recomputation": Manual(dp=2, tp=2, sequence_parallel=True, recompute="full", microbatches=2),
}
TASKS = {
    "causal": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "masked": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "seq2seq": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "sequences": modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    "images": modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    "segments": modeling_auto.MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING_NAMES,
    "masked images": modeling_auto.MODEL_FOR_MASKED_IMAGE_MODELING_MAPPING_NAMES,
    "pairs": modeling_auto.MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    "image and text": modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    "sounds": modeling_auto.MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES,
    "letters of speech": modeling_auto.MODEL_FOR_CTC_MAPPING_NAMES,
    "speech": modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
}
_WIDE = """hidden_size n_embd d_model embedding_size dim attention_hidden_size rnn_hidden_size embed_dim lru_width vocab_size
    vocab_size_per_layer_input max_position_embeddings n_positions n_ctx max_seq_len max_target_positions"""
_HIDDEN = "intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff hidden_dim n_inner"
_LAYERS = "num_hidden_layers n_layer num_layers n_layers encoder_layers decoder_layers num_encoder_layers num_decoder_layers"
_FOUR = """num_attention_heads n_head num_heads encoder_attention_heads decoder_attention_heads num_key_value_heads num_kv_heads
    index_n_heads num_experts num_local_experts n_routed_experts moe_num_experts time_step_rank linear_num_key_heads
    linear_num_value_heads"""
_TWO = "num_experts_per_tok moe_k expand type_vocab_size"
_ONE = "n_group topk_group n_groups moe_layer_start_index first_k_dense_replace"
_EIGHT = """qk_rope_head_dim qk_nope_head_dim rotary_dim state_size ssm_state_size mamba_d_state mamba_n_heads mamba_num_heads
    num_heads_mamba chunk_size mamba_chunk_size sliding_window index_topk patch_size num_mel_bins"""
_SIXTEEN = """head_dim d_kv kv_lora_rank v_head_dim qk_head_dim mamba_d_head mamba_head_dim linear_key_head_dim linear_value_head_dim
    index_head_dim hidden_size_per_layer_input sequence_length max_source_positions"""
_THIRTY_TWO = "moe_intermediate_size shared_expert_intermediate_size q_lora_rank image_size"
_NO_CHANCE = """attention_dropout hidden_dropout resid_pdrop embd_pdrop attn_pdrop dropout activation_dropout hidden_dropout_prob
    attention_probs_dropout_prob classifier_dropout layerdrop encoder_layerdrop decoder_layerdrop dropout_rate attention_dropout_rate
    embd_dropout mlp_dropout embedding_dropout emb_pdrop drop_path_rate residual_dropout final_dropout attn_dropout ff_dropout
    summary_last_dropout router_jitter_noise input_jitter_noise classifier_dropout_prob conformer_conv_dropout feat_proj_dropout"""
SMALL: Mapping[str, object] = {
    **{
        name: value
        for names, value in (
            (_WIDE, 64), (_HIDDEN, 128), (_LAYERS, LAYERS), (_FOUR, 4), (_TWO, 2), (_ONE, 1), (_EIGHT, 8), (_SIXTEEN, 16),
            (_THIRTY_TWO, 32), (_NO_CHANCE, 0.0),
        )
        for name in names.split()
    },
    "num_channels": 3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "image_token_id": VOCABULARY - 2,
    "image_token_index": VOCABULARY - 2,
    "video_token_id": VOCABULARY - 1,
    "mask_time_prob": 0.0,
    "mask_feature_prob": 0.0,
    "mm_tokens_per_image": 4,
    "crop_size": 32,
    "use_cache": False,
}  # fmt: skip
"""Sizes by the names that configurations have for them; dropout is off, since verify needs a model without random numbers."""
_KINDS = ("layer_types", "mlp_layer_types", "layers_block_type")
"""Lists of a kind for each layer, of which as many are left as there are layers, of different kinds where there are."""


@dataclass
class Outcome:
    """What came of one architecture.

    Args:
        skipped: why it was not tried: its small form does not run by itself.
        found: by plan, what verify found, or the error.
        ended: by plan, whether the numbers are the ``same``, ``differ``, or it was ``refused``; ``error`` is what no user should see.
        missing: ops without a rule.
        time_s: of all of it.
    """

    task: str
    name: str
    skipped: str = ""
    found: dict[str, str] = field(default_factory=dict)
    ended: dict[str, str] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    time_s: float = 0.0


def small(config: Any) -> Any:
    """The configuration with `SMALL` sizes, and those that it is made of."""
    for name, value in SMALL.items():
        old = getattr(config, name, None)
        if hasattr(config, name) and not isinstance(old, list | tuple | dict) and not (old is None and name in ("head_dim", "q_lora_rank")):
            with suppress(Exception):  # some are properties, some are checked against others that are not small yet
                setattr(config, name, value)
    if hasattr(config, "qk_rope_head_dim") and hasattr(config, "head_dim"):
        config.head_dim = config.qk_rope_head_dim
    for name in _KINDS:
        if isinstance(kinds := getattr(config, name, None), list) and kinds:
            with suppress(Exception):
                setattr(config, name, (list(dict.fromkeys(kinds)) * LAYERS)[:LAYERS])
    for part in list(vars(config).values()):
        if isinstance(part, transformers.PretrainedConfig):
            small(part)
    return config


def build(task: str, name: str, kind: str) -> tuple[nn.Module, dict[str, Any]]:
    """A model and a batch with labels."""
    config = small(CONFIG_MAPPING[name]())
    torch.manual_seed(0)
    model = getattr(transformers, kind)(config).float().train()
    taken = inspect.signature(model.forward).parameters
    for places in PLACES if task == "image and text" else (0,):
        batch = _batch(task, config, taken, places) | ({"use_cache": False} if "use_cache" in taken else {})
        with suppress(Exception):  # a model that takes another number of them says so, and is asked again by `try_out`
            model(**batch)
            break
    return model, batch


def _batch(task: str, config: Any, taken: Collection[str], places: int) -> dict[str, Any]:
    """What a model for a task is given, and ``taken`` by its forward, with so many places for an image among the tokens."""
    parts = [config, *(getattr(config, name, None) for name in ("vision_config", "encoder", "backbone_config"))]
    side = next((part.image_size for part in parts if isinstance(getattr(part, "image_size", None), int)), 32)
    pixels = {"pixel_values": torch.randn(BATCH, 3, side, side)}
    ids = torch.randint(5, VOCABULARY - 4, (BATCH, LENGTH))
    ids[:, -1] = 2  # where a sequence ends
    of_two = {"labels": torch.randint(2, (BATCH,))}
    match task:
        case "images":
            return pixels | of_two
        case "segments":
            return pixels | {"labels": torch.randint(2, (BATCH, side, side))}
        case "masked images":
            return pixels | {"bool_masked_pos": torch.rand(BATCH, (side // config.patch_size) ** 2) < 0.5}
        case "pairs":
            return pixels | {"input_ids": ids, "return_loss": True}
        case "image and text":
            image = next(getattr(config, name) for name in ("image_token_id", "image_token_index") if hasattr(config, name))
            text = torch.cat([torch.full((BATCH, places), image), ids], 1)
            return pixels | {"input_ids": text, "labels": text.masked_fill(text == image, -100)}
        case "sounds" | "letters of speech" | "speech":
            labels = ids[:, :4] if task == "letters of speech" else ids if task == "speech" else of_two["labels"]
            if "input_values" in taken and not hasattr(config, "num_mel_bins"):
                return {"input_values": torch.randn(BATCH, 4000), "labels": labels}
            bins, name = getattr(config, "num_mel_bins", 8), next(x for x in ("input_features", "input_values") if x in taken)
            frames = 2 * getattr(config, "max_source_positions", 64)
            shape = (BATCH, frames, bins) if name == "input_values" else (BATCH, bins, frames)
            return {name: torch.randn(shape), "labels": labels}
        case "seq2seq":
            return {"input_ids": ids, "labels": ids.clone(), "decoder_input_ids": ids.clone()}
    return {"input_ids": ids, "labels": of_two["labels"] if task == "sequences" else ids.clone()}


def try_out(task: str, name: str, kind: str) -> Outcome:
    outcome, start = Outcome(task, name), time.perf_counter()
    try:
        model, batch = build(task, name, kind)
        if sum(p.numel() for p in model.parameters()) > MAX_PARAMETERS:
            raise ValueError("it stays large")
        loss = model(**batch).loss
        loss.backward()
        model.zero_grad(set_to_none=True)
        if not math.isfinite(loss.item()):
            raise ValueError(f"its loss is {loss.item()}")
    except Exception as error:  # whatever a model raises for sizes that it is not made for
        outcome.skipped = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
        return outcome
    for plan, manual in PLANS.items():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                found = autopar.verify(model, 4, batch, manual)
                bound = 2e-5 if math.isnan(found.reference_error) else max(2e-5, 10 * found.reference_error)
                is_same = max(found.loss_error, found.output_error, found.grad_error) < bound
                outcome.found[plan], outcome.ended[plan] = str(found), "same" if is_same else "differ"
            except Exception as error:  # all are reported
                outcome.found[plan] = f"{type(error).__name__}: {error}"
                outcome.ended[plan] = "refused" if isinstance(error, AutoparError) else "error"
        outcome.missing += [str(w.message) for w in caught if issubclass(w.category, MissingRuleWarning)]
    outcome.time_s = time.perf_counter() - start
    return outcome


def _in_child(results: Any, *of: str) -> None:
    torch.set_num_threads(1)
    results.put(try_out(*of))


def in_process(of: tuple[str, str, str]) -> Outcome:
    """Try an architecture out in a process of its own, which may crash or take too long."""
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    process = context.Process(target=_in_child, args=(results, *of))
    process.start()
    try:
        outcome: Outcome = results.get(timeout=TIME_LIMIT_S)
        return outcome
    except queue.Empty:
        return Outcome(of[0], of[1], found={"all": f"no result in {TIME_LIMIT_S:.0f} s"}, ended={"all": "error"})
    finally:
        process.kill()
        process.join()


def wanted(tasks: list[str], only: list[str]) -> Iterator[tuple[str, str, str]]:
    for task in tasks:
        for name, kinds in TASKS[task].items():
            if not only or name in only:
                yield task, name, kinds if isinstance(kinds, str) else kinds[0]


def report(outcomes: list[Outcome]) -> None:
    print("\n| task | named | run small | same under all plans | refused under some | differ | errors |\n|---|--:|--:|--:|--:|--:|--:|")
    for task in dict.fromkeys(outcome.task for outcome in outcomes):
        own = [outcome for outcome in outcomes if outcome.task == task]
        ran = [set(outcome.ended.values()) for outcome in own if not outcome.skipped]
        others = [sum(end in ends for ends in ran) for end in ("refused", "differ", "error")]
        print(f"| {task} | {len(own)} | {len(ran)} | {sum(ends == {'same'} for ends in ran)} | {' | '.join(map(str, others))} |")
    reasons: dict[str, list[str]] = defaultdict(list)
    for outcome in outcomes:
        for found in dict.fromkeys(outcome.found[plan] for plan, end in outcome.ended.items() if end != "same"):
            reasons[found.splitlines()[0]].append(f"{outcome.task} {outcome.name}")
    for reason, names in reasons.items():
        print(f"- {', '.join(names)}: {reason}")
    missing = Counter(text.partition(" has no rule")[0] for outcome in outcomes for text in set(outcome.missing))
    print(f"- ops without a rule: {', '.join(f'{op} ({count})' for op, count in missing.most_common()) or 'none'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--only", nargs="+", default=[], help="names of architectures")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    tried, outcomes, start = list(wanted(args.tasks, args.only)), list[Outcome](), time.perf_counter()
    with ThreadPoolExecutor(args.workers) as pool:
        for i, outcome in enumerate(pool.map(in_process, tried), 1):
            outcomes.append(outcome)
            what = f"not tried, {outcome.skipped}" if outcome.skipped else ", ".join(dict.fromkeys(outcome.ended.values()))
            print(f"[{time.perf_counter() - start:5.0f} s] {i} of {len(tried)}: {outcome.task} {outcome.name}: {what}", flush=True)
    report(outcomes)
    if args.json:
        args.json.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1))


if __name__ == "__main__":
    main()
