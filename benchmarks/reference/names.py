"""What names in records stand for, however they are spelled: families of models, GPUs, precisions."""

from __future__ import annotations

import re
from typing import NamedTuple

from fields import RecordError


class Family(NamedTuple):
    """What the models of a family have.

    Args:
        rotary: rotary positions, RMSNorm and no biases; else learned positions, LayerNorm and biases.
        gated: whether the MLP has a gate.
        head: width of heads where it is not that of the model over their number, by their public configurations (``head_dim``).
        window: tokens that the attention of every second layer looks at, likewise (``sliding_window``, ``layer_types``); 0: all.
        biased_experts: whether experts have biases and clamp what they multiply, likewise (``swiglu_limit``).
    """

    rotary: bool = False
    gated: bool = False
    head: int | None = None
    window: int = 0
    biased_experts: bool = False


_GPT, _LLAMA = Family(), Family(rotary=True, gated=True)
_LIKE_GPT = ("gpt", "mpt", "bloom", "mt-nlg", "opt", "megatron")
_LIKE_LLAMA = ("llama", "meta-llama", "codellama", "internlm", "qwen", "grok", "deepseek", "kimi", "mixtral", "mistral", "gemma", "phi-3")
_LIKE_LLAMA += ("phi3", "phi-4", "phi4", "yi", "baichuan", "glm", "chatglm", "olmo", "dbrx")
FAMILIES = {
    **dict.fromkeys(_LIKE_GPT, _GPT),
    **dict.fromkeys(_LIKE_LLAMA, _LLAMA),
    "gpt-oss": _LLAMA._replace(head=64, window=128, biased_experts=True),
    "qwen3": _LLAMA._replace(head=128),
    "nemotron": Family(rotary=True),
}
"""By what their names begin with, the longest that does."""
_OTHER_MODELS = re.compile(r"(m|by|flan)?t5|ul2|\w*bert|bart|electra|w?resnet|vit|mamba")

GPUS = {
    "V100": {16: "V100-16GB", 32: "V100-32GB"},
    "A100": {80: "A100-80GB", 40: "A100-40GB"},
    "H100": {80: "H100-80GB"},
    "H200": {141: "H200"},
    "B200": {192: "B200", 180: "B200"},
}
"""By chip and GB, the first where these are not said."""
POWER_LIMITED = "H100-96GB-HBM2e-500W"
_ADORNS = re.compile(r"NVIDIA|TESLA|[DH]GX|SXM\d?|HBM\d?E?")
_PRECISIONS = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "fp8-cs": "fp8", "fp8-ds": "fp8"}
"""With scaling of whole tensors, by what they hold or held, 8 bits are one precision here."""


def spelled(name: str) -> str:
    """A name as tables here have it."""
    return re.sub(r"[\s_]+", "-", name.strip().lower())


def family_of(name: str) -> Family | None:
    """What a family is known to have, by its name as `spelled`; None if nothing is.

    Raises:
        RecordError: it is no transformer with a decoder alone.
    """
    name = name.rsplit("/", maxsplit=1)[-1]
    if any(re.fullmatch(rf"({_OTHER_MODELS.pattern})[v\d.]*", word) for word in name.split("-")):
        raise RecordError(f"model.family {name!r} is no decoder-only transformer, and nothing else is predicted")
    known = max((begin for begin in FAMILIES if name.startswith(begin)), key=len, default=None)
    return FAMILIES[known] if known else None


def gpu_of(name: str) -> tuple[str, bool]:
    """A GPU as tables here have it, or the name as it is; and whether its memory, of which there are several sizes, is not said."""
    plain = re.sub(r"\s+(?=GI?B)", "", name.upper())
    if plain == POWER_LIMITED.upper():
        return POWER_LIMITED, False
    chip, *rest = [word for word in re.split(r"[^A-Z0-9]+", plain) if word and not _ADORNS.fullmatch(word)] or [plain]
    sizes = GPUS.get(chip, {})
    if sizes and not rest:
        return next(iter(sizes.values())), len(set(sizes.values())) > 1
    said = re.fullmatch(r"(\d+)GI?B?", rest[0]) if len(rest) == 1 else None
    return sizes.get(int(said[1]), name) if said else name, False


def precision_of(name: str) -> str:
    """A precision as tables here have it, or the name as it is."""
    name = spelled(name)
    return _PRECISIONS.get(name, name)
