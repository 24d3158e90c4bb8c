"""A laboratory of data parallelism: a DistilBERT classifier of sentences, trained on two processes by two plans side by side.

    python examples/sst2_lab.py
    python examples/sst2_lab.py --weights path/of/distilbert --data path/of/SST-2

DDP (`Manual(dp=2)`) has all parameters on both processes and reduces their gradients; ZeRO-3 (`Manual(dp=2, zero=3)`) has half of each,
gathers what it needs, and reduces and scatters. The loop knows nothing of either. Both must have the same losses, and what tells them apart
is on view: the log of every collective (what moves, bytes, start, end, what was computed beside), memory, and traces for Perfetto.

Weights: a folder of Hugging Face with config.json, safetensors and its tokenizer. Data: train.tsv of SST-2 (a line of headings, then
sentence, tab, 0 or 1), or the folder that it is in. Without them: random weights, and the words of a small sample.

Logs, traces and the report go to out/sst2_lab/. Exit code 1 if the losses differ by more than rounding.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from logging import ERROR, getLogger
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from safetensors import safe_open
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoTokenizer, DistilBertConfig, DistilBertForSequenceClassification, logging

import autopar
from autopar.cost.measure import measure
from autopar.demo.local import Progress, gradient_bytes, is_started, mebibytes, start, stored_bytes

RANKS = 2
PLANS = {"DDP": autopar.Manual(dp=RANKS), "ZeRO-3": autopar.Manual(dp=RANKS, zero=3)}
TOLERANCE = 1e-5
"""Relative difference of losses that passes for rounding: sums are taken in another order."""
RECORDED_STEPS, LOGGED_ROWS = 2, 14
SAMPLE = Path(__file__).parent / "data" / "sentences.tsv"
OUT = Path("out/sst2_lab")
HEADINGS = ["sentence", "label"]
PAD, UNKNOWN, FIRST = 0, 1, 2
"""Numbers of words that are none: behind the end, not in the vocabulary, before the sentence (its output is classified)."""

Tokenizer = Callable[[Sequence[str]], dict[str, torch.Tensor]]
"""Sentences -> ``input_ids`` and ``attention_mask``, int64 [sentences, length]."""


class LabError(ValueError):
    """A path that does not hold what it should."""


# Data and model, from paths or from what the repository has


def read_sentences(path: Path) -> list[tuple[str, int]]:
    """Sentences with their labels from a file in the form of SST-2, or train.tsv of a folder."""
    file = path / "train.tsv" if path.is_dir() else path
    if not file.is_file():
        raise LabError(f"there is no {file}; --data is a TSV file of SST-2, or the folder of its train.tsv")
    with file.open(newline="") as opened:
        rows = list(csv.reader(opened, delimiter="\t", quoting=csv.QUOTE_NONE))
    if not rows or rows[0] != HEADINGS:
        raise LabError(f"{file} begins with {rows[0] if rows else 'nothing'}, not with the headings {HEADINGS} that SST-2 has")
    for number, row in enumerate(rows[1:], 2):
        if len(row) != 2 or row[1] not in ("0", "1"):
            raise LabError(f"line {number} of {file} is {row}; a line has a sentence, a tab, and 0 or 1")
    if len(rows) == 1:
        raise LabError(f"{file} has no sentences")
    return [(sentence, int(label)) for sentence, label in rows[1:]]


def tokenizer_of_words(sentences: Sequence[str], length: int) -> tuple[Tokenizer, int]:
    """A tokenizer whose vocabulary is the words of some sentences, and its size."""
    counts = Counter(word for sentence in sentences for word in sentence.lower().split())
    numbers = {word: FIRST + 1 + i for i, (word, _) in enumerate(counts.most_common())}

    def tokenize(given: Sequence[str]) -> dict[str, torch.Tensor]:
        ids = torch.full((len(given), length), PAD)
        for row, sentence in enumerate(given):
            words = [FIRST, *(numbers.get(word, UNKNOWN) for word in sentence.lower().split())][:length]
            ids[row, : len(words)] = torch.tensor(words)
        return {"input_ids": ids, "attention_mask": (ids != PAD).long()}

    return tokenize, FIRST + 1 + len(numbers)


def tokenizer_of_folder(folder: Path, length: int) -> Tokenizer:
    """The tokenizer that lies beside weights."""
    if not any((folder / name).is_file() for name in ("tokenizer.json", "vocab.txt")):
        raise LabError(f"there is neither tokenizer.json nor vocab.txt in {folder}; weights mean nothing without their tokenizer")
    made = AutoTokenizer.from_pretrained(folder, local_files_only=True)

    def tokenize(given: Sequence[str]) -> dict[str, torch.Tensor]:
        found = made(list(given), padding="max_length", truncation=True, max_length=length, return_tensors="pt")
        return {name: found[name] for name in ("input_ids", "attention_mask")}

    return tokenize


@dataclass(frozen=True)
class Weights:
    """A folder with a model of Hugging Face."""

    folder: Path
    config: DistilBertConfig
    is_classifier: bool

    @staticmethod
    def of(folder: Path) -> Weights:
        files = sorted(folder.glob("*.safetensors"))
        if not (folder / "config.json").is_file() or not files:
            raise LabError(f"{folder} has no config.json, or no *.safetensors; --weights is a folder of Hugging Face with both")
        config = DistilBertConfig.from_pretrained(folder, local_files_only=True)
        if config.model_type != "distilbert":
            raise LabError(f"{folder} has a model of type {config.model_type!r}; the lab is about 'distilbert'")
        names = {name for file in files for name in _names(file)}
        return Weights(folder, config, "classifier.weight" in names)


def _names(file: Path) -> list[str]:
    with safe_open(file, framework="pt") as opened:
        return list(opened.keys())


@dataclass(frozen=True)
class Lab:
    """What is trained on what; the same for every plan, and on every process."""

    config: DistilBertConfig
    weights: Weights | None
    tokenize: Tokenizer
    sentences: list[tuple[str, int]]
    batch_size: int

    @staticmethod
    def of(arguments: argparse.Namespace) -> Lab:
        sentences = read_sentences(arguments.data)
        if arguments.weights is not None:
            weights = Weights.of(arguments.weights)
            return Lab(weights.config, weights, tokenizer_of_folder(arguments.weights, arguments.length), sentences, arguments.batch)
        tokenize, size = tokenizer_of_words([sentence for sentence, _ in sentences], arguments.length)
        config = DistilBertConfig(
            vocab_size=size, dim=arguments.dim, hidden_dim=4 * arguments.dim, n_layers=arguments.layers, n_heads=4,
            max_position_embeddings=arguments.length, pad_token_id=PAD,
        )  # fmt: skip
        return Lab(config, None, tokenize, sentences, arguments.batch)

    def batches(self) -> Iterator[dict[str, torch.Tensor]]:
        """Global batches without end, in an order that is the same for every plan."""
        generator, size = torch.Generator().manual_seed(1), min(self.batch_size, len(self.sentences))
        while True:
            order = torch.randperm(len(self.sentences), generator=generator).tolist()
            for at in range(0, len(order) - size + 1, size):
                chosen = [self.sentences[i] for i in order[at : at + size]]
                labels = torch.tensor([label for _, label in chosen])
                yield {**self.tokenize([sentence for sentence, _ in chosen]), "labels": labels}

    def build(self) -> DistilBertForSequenceClassification:
        """The model; what the folder of weights does not have is random, the same at every call."""
        torch.manual_seed(0)
        model = DistilBertForSequenceClassification(self.config)
        if self.weights is not None and not self.weights.is_classifier:
            autopar.load_weights(self.weights.folder, model.distilbert)
        return model


# The single-device loop


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterator[dict[str, torch.Tensor]]) -> Iterator[tuple[float, int]]:
    """Yields the loss of each step, and the bytes of gradients that this process has had."""
    for batch in batches:
        loss = model(**batch).loss
        loss.backward()
        num_bytes = gradient_bytes(model)
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item(), num_bytes


# What the lab does with it


@dataclass
class Run:
    """One plan in training, with what was seen of it."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    steps: Iterator[tuple[float, int]]
    losses: list[float] = field(default_factory=list)
    gradient_bytes: int = 0

    def step(self) -> None:
        loss, self.gradient_bytes = next(self.steps)
        self.losses.append(loss)

    def memory(self) -> dict[str, int]:
        """Bytes of this process: parameters and optimizer, and gradients."""
        return {"stored": stored_bytes(self.model, self.optimizer), "gradients": self.gradient_bytes}


def open_run(lab: Lab, plan: autopar.Manual, machine: autopar.Cluster, progress: Progress) -> Run:
    model = lab.build()
    torch.manual_seed(2)  # the masks of dropout are drawn from here, the same under every plan
    model = autopar.parallelize(
        model,
        RANKS,
        example_batch=next(lab.batches()),
        plan=plan,
        profile=machine.with_mesh(plan.grid(RANKS)).profile,
        report=progress.detail,
    )
    if lab.weights is not None and lab.weights.is_classifier:
        autopar.load_weights(lab.weights.folder, model)  # each process reads its own part
    optimizer = torch.optim.AdamW(model.parameters(), 3e-4)
    return Run(model, optimizer, train(model, optimizer, lab.batches()))


def losses_table(runs: dict[str, Run]) -> Table:
    table = Table("step", title="Losses of both plans", title_justify="left")
    for name in (*runs, "difference"):
        table.add_column(name, justify="right")
    columns = [run.losses for run in runs.values()]
    for step, losses in enumerate(zip(*columns, strict=True)):
        table.add_row(str(step), *(f"{loss:.7f}" for loss in losses), f"{_difference(losses):.0e}")
    return table


def _difference(losses: Sequence[float]) -> float:
    return (max(losses) - min(losses)) / abs(losses[0])


def memory_table(runs: dict[str, Run], memory: dict[str, list[dict[str, int]]]) -> Table:
    title = "MiB of a process: parameters and optimizer between steps, gradients, and the predicted peak"
    table = Table("plan", title=title, title_justify="left")
    for name in (*(f"stored, rank {rank}" for rank in range(RANKS)), "gradients", "predicted peak"):
        table.add_column(name, justify="right")
    for name, run in runs.items():
        seen, peak = memory[name], max(run.model.plan.prediction.peak_memory_bytes)
        table.add_row(name, *(mebibytes(own["stored"]) for own in seen), mebibytes(seen[0]["gradients"]), mebibytes(peak))
    return table


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, help="folder of config.json, *.safetensors and a tokenizer (default: random weights)")
    parser.add_argument("--data", type=Path, default=SAMPLE, help="TSV file of SST-2, or the folder of its train.tsv (default: the sample)")
    parser.add_argument("--steps", type=int, default=10, help=f"of each plan, of which the last {RECORDED_STEPS} are recorded (10)")
    parser.add_argument("--batch", type=int, default=16, help="sentences of a global batch (16)")
    parser.add_argument("--length", type=int, default=32, help="tokens of a sentence (32)")
    parser.add_argument("--layers", type=int, default=2, help="of the model of random weights (2)")
    parser.add_argument("--dim", type=int, default=256, help="of the model of random weights, a multiple of 4 (256)")
    parser.add_argument("--device", help="take prices of this shipped device instead of measuring this machine, such as a100-80gb")
    parser.add_argument("--out", type=Path, default=OUT, help=f"folder of logs and traces ({OUT})")
    chosen = parser.parse_args(arguments)
    if chosen.steps <= RECORDED_STEPS:
        parser.error(f"--steps is {chosen.steps}, but the last {RECORDED_STEPS} are recorded, and the first ones warm up; give more")
    return chosen


def _machine(device: str | None, progress: Progress) -> autopar.Cluster:
    if device is not None:
        return autopar.Cluster(nodes=1, gpus_per_node=RANKS, device=device)
    progress.phase("measuring this machine, or reading what was measured before")
    whole = autopar.Mesh.of(RANKS)
    mesh = init_device_mesh("cpu", whole.sizes, mesh_dim_names=whole.names)
    return autopar.Cluster.from_mesh(whole, measure(mesh, report=progress.detail))


def main(arguments: argparse.Namespace) -> int:
    """On each of the processes; the exit code."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    logging.set_verbosity_error()  # transformers' own
    getLogger("torch.distributed.tensor._redistribute").setLevel(ERROR)
    progress, lab = Progress(), Lab.of(arguments)
    machine = _machine(arguments.device, progress)
    runs = {}
    for name, plan in PLANS.items():
        progress.phase(f"planning {name}: {plan}")
        runs[name] = open_run(lab, plan, machine, progress)
    arguments.out.mkdir(parents=True, exist_ok=True)
    records, memory = {}, {}
    for name, run in runs.items():
        progress.phase(f"training by {name}, {arguments.steps} steps of {min(lab.batch_size, len(lab.sentences))} sentences")
        for _ in range(arguments.steps - RECORDED_STEPS):
            run.step()
        with run.model.record() as records[name]:
            for _ in range(RECORDED_STEPS):
                run.step()
        records[name].save_trace(arguments.out / f"{name}.trace.json")
        memory[name] = [run.memory()] * RANKS
        dist.all_gather_object(memory[name], run.memory())
    differences = [_difference(losses) for losses in zip(*(run.losses for run in runs.values()), strict=True)]
    is_wrong = max(differences) > TOLERANCE
    if dist.get_rank() == 0:
        console = Console(record=True, width=140, highlight=False)
        for name, record in records.items():
            (arguments.out / f"{name}.log").write_text(f"{record}\n\n{record.log()}\n")
            console.print(f"{name}: how gradients are synchronised; {arguments.out / name}.log has all communication", markup=False)
            log = record.log(phases=("reduce",), width=140).splitlines()
            console.print("\n".join(log[: LOGGED_ROWS + 2]), markup=False)
            if len(log) > LOGGED_ROWS + 2:
                console.print(f"... {len(log) - LOGGED_ROWS - 2} more")
            console.print(f"\n{record}\n", markup=False)
        console.print(losses_table(runs))
        console.print(memory_table(runs, memory))
        verdict = "FAILED: losses differ by" if is_wrong else "Losses of both plans agree within"
        console.print(f"{verdict} {max(differences):.0e} relative; {TOLERANCE:g} passes for rounding.")
        (arguments.out / "report.txt").write_text(console.export_text())
        traces = ", ".join(str(arguments.out / f"{name}.trace.json") for name in runs)
        progress.phase(f"done; traces of both processes, for ui.perfetto.dev: {traces}")
    dist.barrier()
    dist.destroy_process_group()
    return int(is_wrong)


if __name__ == "__main__":
    given = parse(sys.argv[1:])
    if is_started():
        sys.exit(main(given))
    try:
        Lab.of(given)  # says what is wrong with paths once, before there are processes
    except LabError as error:
        sys.exit(f"error: {error}")
    sys.exit(start(__file__, RANKS, sys.argv[1:]))
