"""Values that the shell completes, without importing torch: devices, models of transformers, settings, files.

What a list is of parts (``4x8:a100-80gb+2x8:h100``, ``dp=2,tp=4``) is completed in its last part.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

Completer = Callable[[str], Sequence[str]]
"""Gives whole values for what is typed so far; typer leaves out those that do not go on from it."""

VARIABLE = "_AUTOPAR_COMPLETE"
"""By which the shell asks."""
FAMILIES = {
    "gpt2": ("GPT2Config", "GPT2LMHeadModel"),
    "llama": ("LlamaConfig", "LlamaForCausalLM"),
    "bert": ("BertConfig", "BertForMaskedLM"),
    "distilbert": ("DistilBertConfig", "DistilBertForMaskedLM"),
    "vit": ("ViTConfig", "ViTForImageClassification"),
}
"""What ``hf:NAME`` stands for: the defaults of the configuration class, and the model class."""
GPT_SIZES = ("layers", "hidden", "heads", "vocab", "positions", "intermediate")
"""What ``--gpt`` may say."""
MANUAL = (
    "dp=",
    "tp=",
    "pp=",
    "cp=",
    "ep=",
    "zero=",
    "sequence_parallel",
    "schedule=",
    "microbatches=",
    "micro_batch=",
    "recompute=",
    "stages=",
    "precision=",
    "offload=",
    "experts=",
    "replicas=",
)
"""What a configuration may say; a test holds it against `autopar.Manual`."""


def devices() -> list[str]:
    """Names of shipped profiles."""
    folder = resources.files("autopar.cost") / "data"
    names = sorted(entry.name.removesuffix(".json") for entry in folder.iterdir() if entry.name.endswith(".json"))
    return [name for name in names if name != "links"]


def links() -> list[str]:
    """Names of shipped links."""
    return sorted(json.loads((resources.files("autopar.cost") / "data" / "links.json").read_text()))


def one_of(*values: str) -> Completer:
    """One of some values."""
    return lambda incomplete: values


def files(*endings: str) -> Completer:
    """Folders, and files with these endings."""
    return lambda incomplete: _files(incomplete, endings)


def model(incomplete: str) -> list[str]:
    """``hf:NAME``, ``hf:FOLDER/config.json`` and ``gpt:layers=..``; functions of modules are not looked up."""
    kind, _, rest = incomplete.partition(":")
    if kind == "gpt":
        return [f"gpt:{value}" for value in gpt(rest)]
    paths = [f"hf:{path}" for path in _files(rest, (".json",))] if kind == "hf" and rest else []
    return [*(f"hf:{name}" for name in FAMILIES), "gpt:", *paths]


def gpt(incomplete: str) -> list[str]:
    return _last_of_list(incomplete, [f"{name}=" for name in GPT_SIZES])


def cluster(incomplete: str) -> list[str]:
    """``4x8:h100+2x8:a100-80gb``, ``4x8:h100@eth-100``, ``local``, or a file."""
    before, plus, part = incomplete.rpartition("+")
    grid, colon, device = part.partition(":")
    if "@" in device:
        return [f"{incomplete.rpartition('@')[0]}@{name}" for name in links()]
    if colon:
        return [f"{before}{plus}{grid}:{name}" for name in devices()]
    is_grid = bool(re.fullmatch(r"\d+(x\d+)?", part))
    return [*(f"{incomplete}:{name}" for name in devices() if is_grid), "local", *_files(incomplete, (".json",))]


def manual(incomplete: str) -> list[str]:
    return _last_of_list(incomplete, MANUAL)


def joined(*values: str) -> Completer:
    """Some values joined by +."""
    return lambda incomplete: _last_of_list(incomplete, values, "+")


def _last_of_list(incomplete: str, values: Sequence[str], separator: str = ",") -> list[str]:
    before, found, _ = incomplete.rpartition(separator)
    used = {re.sub("=.*", "", part) for part in before.split(separator)}
    return [f"{before}{found}{value}" for value in values if value.removesuffix("=") not in used]


def _files(incomplete: str, endings: Sequence[str]) -> list[str]:
    folder, name = os.path.split(incomplete)
    try:
        entries = sorted(Path(folder or ".").iterdir())
    except OSError:
        return []
    shown = [entry for entry in entries if entry.name.startswith(name) and not (entry.name.startswith(".") and not name)]
    return [os.path.join(folder, entry.name) + "/" * entry.is_dir() for entry in shown if entry.is_dir() or entry.suffix in endings]


@dataclass(frozen=True, slots=True)
class BashLine:
    """A command line that bash asks about, whose words it splits at colons and equals signs.

    Args:
        words: one a line, joined again.
        at: number of the word to be completed.
    """

    words: tuple[str, ...]
    at: int

    @staticmethod
    def of(environment: Mapping[str, str]) -> BashLine:
        """As bash says it."""
        words: list[str] = []
        position = at = int(environment["COMP_CWORD"])
        for number, word in enumerate(environment["COMP_WORDS"].split("\n")):
            if number > 1 and (word in (":", "=") or words[-1].endswith((":", "="))):
                words[-1] += word
                at -= number <= position
            else:
                words.append(word)
        return BashLine(tuple(words), at)

    @property
    def environment(self) -> dict[str, str]:
        return {"COMP_WORDS": "\n".join(self.words), "COMP_CWORD": str(self.at)}

    def shortened(self, value: str) -> str:
        """Of a value the part after the last colon or equals sign that is typed, which is all that bash replaces."""
        word = self.words[self.at] if self.at < len(self.words) else ""
        typed = word.partition("=")[2] if word.startswith("--") else word
        return value.removeprefix(re.sub(r"[^:=]*$", "", typed))
