"""One CUDA device: predicted against measured steps and memory, beside the unmodified model under `torch.autocast`.

    python benchmarks/single_gpu.py [--only 'gpt2/*'] [--profile P.json] [--record]

Rows are named by model and samples of a batch: ``gpt2/b8``. All compute in bfloat16, with parameters, gradients and AdamW in float32 as
under `torch.autocast`, and give the loss alone. The device is measured first, unless a profile is given. Hosts that others share are not as
fast at all times: how long the host takes to launch an op and an update is measured before every few steps, in turns with them, and the row
is predicted by the medians. Memory is the most that torch's allocator gave to tensors in a step. Where a step is as long as the host takes
to launch it, the row says ``host``. What the unmodified model has no room for is left out.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import os
import statistics
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatch
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from steps import step_times
from torch import nn

import autopar
from autopar.cost.machine import MachineProfile
from autopar.cost.measure import measure
from autopar.cost.measure_dispatch import measure_dispatch, measure_update
from autopar.report import silent

RECORDS = Path(__file__).parent / "records"
WARM_UP, STEPS, TURNS = 3, 5, 9
"""Steps that are not timed, steps that are timed together, and how often."""
LEARNING_RATE = 1e-4
META = torch.device("meta")
Step = Callable[[], torch.Tensor]
Batch = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Model:
    """A model of transformers with random weights, and the batches that it is measured with; ``sequence`` is 0 for one of images."""

    config: transformers.PretrainedConfig
    sequence: int
    batches: tuple[int, ...]
    kind: type = transformers.AutoModelForCausalLM

    def make(self, device: torch.device) -> nn.Module:
        torch.manual_seed(0)
        with device:
            model: nn.Module = self.kind.from_config(self.config, attn_implementation="sdpa")  # type: ignore[attr-defined]
        return model

    def batch(self, samples: int, device: torch.device) -> Batch:
        if self.sequence:
            tokens = torch.randint(self.config.vocab_size, (samples, self.sequence), device=device)
            return {"input_ids": tokens, "labels": tokens}
        side, labels = self.config.image_size, torch.randint(self.config.num_labels, (samples,), device=device)
        return {"pixel_values": torch.randn(samples, self.config.num_channels, side, side, device=device), "labels": labels}


def _gpt2(layers: int, hidden: int, heads: int) -> transformers.GPT2Config:
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return transformers.GPT2Config(n_layer=layers, n_embd=hidden, n_head=heads, use_cache=False, **dropout)


MODELS = {
    "gpt2": Model(_gpt2(12, 768, 12), 1024, (4, 8, 16, 32)),
    "gpt2-medium": Model(_gpt2(24, 1024, 16), 1024, (4, 8, 16)),
    "gpt2-large": Model(_gpt2(36, 1280, 20), 1024, (4, 8, 16)),
    "llama-1b": Model(
        transformers.LlamaConfig(
            num_hidden_layers=16,
            hidden_size=2048,
            intermediate_size=8192,
            num_attention_heads=32,
            num_key_value_heads=8,
            vocab_size=128256,
            max_position_embeddings=2048,
            tie_word_embeddings=True,
            use_cache=False,
        ),
        2048,
        (1, 2, 4, 8),
    ),
    "bert-large": Model(
        transformers.BertConfig(
            num_hidden_layers=24,
            hidden_size=1024,
            num_attention_heads=16,
            intermediate_size=4096,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        ),
        512,
        (16, 64),
        transformers.AutoModelForMaskedLM,
    ),
    "vit-large": Model(
        transformers.ViTConfig(num_hidden_layers=24, hidden_size=1024, num_attention_heads=16, intermediate_size=4096, num_labels=1000),
        0,
        (32, 128),
        transformers.AutoModelForImageClassification,
    ),
}
"""GPT-2 as of Radford et al. 2019, the dimensions of Llama-3.2-1B, BERT of Devlin et al. 2018, ViT of Dosovitskiy et al. 2020."""


@dataclass(frozen=True, slots=True)
class Row:
    """What was predicted and measured; seconds of a step and bytes. ``plain`` is the unmodified model, ``op_s`` and ``update_s`` what the
    host takes to launch an op and the update of a parameter."""

    predicted_s: float
    step_s: float
    spread: float
    is_host_bound: bool
    predicted_bytes: int
    allocated_bytes: int
    plain_s: float
    plain_bytes: int
    loss: float
    plain_loss: float
    op_s: float
    update_s: float

    @property
    def error(self) -> float:
        return self.predicted_s / self.step_s - 1

    @property
    def memory_error(self) -> float:
        return self.predicted_bytes / self.allocated_bytes - 1


def _step(model: nn.Module, batch: Batch, *, autocast: bool) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE)

    def step() -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            loss: torch.Tensor = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _measured(step: Step, before: Callable[[], object] = lambda: None) -> tuple[float, float, int, float]:
    """Seconds of a step, their spread, the most bytes of tensors in one, and the first loss; ``before`` is called before each turn."""
    losses = [step() for _ in range(WARM_UP)]
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    times = step_times(step, STEPS, TURNS, before)
    median_s = statistics.median(times)
    return median_s, (max(times) - min(times)) / median_s, torch.cuda.max_memory_allocated(), float(losses[0])


def run_row(model: Model, samples: int, profile: MachineProfile, device: torch.device) -> Row:
    """Measure the unmodified model, then the same by a plan."""
    batch, host = model.batch(samples, device), Host(device)
    plain_s, _, plain_bytes, plain_loss = _measured(_step(model.make(device), batch, autocast=True))
    forget()
    parallel = autopar.parallelize(model.make(device), 1, example_batch=batch, profile=profile, precision="bf16", outputs="loss")
    step_s, spread, allocated, loss = _measured(_step(parallel, batch, autocast=False), host.measure)
    profile = host.as_measured(profile)
    prediction = autopar.plan(model.make(META), 1, batch, profile=profile, precision="bf16", outputs="loss").prediction
    return Row(
        predicted_s=prediction.step_time_s,
        step_s=step_s,
        spread=spread,
        is_host_bound=prediction.is_host_bound,
        predicted_bytes=max(prediction.peak_memory_bytes),
        allocated_bytes=allocated,
        plain_s=plain_s,
        plain_bytes=plain_bytes,
        loss=loss,
        plain_loss=plain_loss,
        op_s=profile.device.dispatch_s,
        update_s=profile.device.update_dispatch_s,
    )


class Host:
    """What the host takes to launch an op and an update, each time that it is measured."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._mesh = device, dist.init_device_mesh("cuda", (1,))
        self.op_s: list[float] = []
        self.update_s: list[float] = []

    def measure(self) -> None:
        self.op_s.append(measure_dispatch(self._device, silent))
        self.update_s.append(measure_update(self._mesh, self._device, silent))

    def as_measured(self, profile: MachineProfile) -> MachineProfile:
        """The profile with the medians."""
        op_s, update_s = statistics.median(self.op_s), statistics.median(self.update_s)
        return replace(profile, device=replace(profile.device, dispatch_s=op_s, update_dispatch_s=update_s))


def forget() -> None:
    """Let go of what the row before has taken."""
    gc.collect()
    torch.cuda.empty_cache()


COLUMNS = (
    ("row", "predicted", "measured", "error", "spread", "bound", "host for an op", "unmodified", "ratio")
    + ("memory predicted", "measured", "error", "unmodified")
)


def table(rows: Mapping[str, Row]) -> str:
    """A line for each row in Markdown."""
    lines = [COLUMNS, ("---", *("--:" for _ in COLUMNS[1:]))]
    for name, row in rows.items():
        times = (f"{seconds * 1e3:.1f} ms" for seconds in (row.predicted_s, row.step_s))
        memory = (f"{num_bytes / 2**30:.2f} GiB" for num_bytes in (row.predicted_bytes, row.allocated_bytes))
        bound, plain = "host" if row.is_host_bound else "device", (f"{row.plain_s * 1e3:.1f} ms", f"{row.step_s / row.plain_s:.2f}")
        about = (f"{row.error:+.1%}", f"{row.spread:.0%}", bound, f"{row.op_s * 1e6:.1f} us", *plain)
        lines.append((name, *times, *about, *memory, f"{row.memory_error:+.1%}", f"{row.plain_bytes / 2**30:.2f} GiB"))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def verdict(title: str, rows: list[Row]) -> str:
    """Errors of some rows."""
    errors, memory = [row.error for row in rows], [row.memory_error for row in rows]
    return (
        f"- {title}, {len(rows)} rows: mean absolute error {statistics.mean(map(abs, errors)):.1%}, worst "
        f"{max(errors, key=abs):+.1%}, bias {statistics.mean(errors):+.1%}; memory: mean absolute error "
        f"{statistics.mean(map(abs, memory)):.1%}, worst {max(memory, key=abs):+.1%}"
    )


def report_of(rows: Mapping[str, Row]) -> str:
    """The table, and what it says."""
    bound = {kind: [row for row in rows.values() if row.is_host_bound is is_host] for kind, is_host in (("device", False), ("host", True))}
    said = [verdict(f"bound by the {kind}", own) for kind, own in bound.items() if own]
    apart = max(abs(row.loss - row.plain_loss) / row.plain_loss for row in rows.values())
    return "\n".join([table(rows), "", *said, f"- first losses differ from those of the unmodified models by {apart:.1e} at most"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="*", metavar="NAME,...", help="rows to run; * and ? stand for any characters")
    parser.add_argument("--profile", type=Path, help="of this machine, in place of measuring it")
    parser.add_argument("--save-profile", type=Path, help="where to write the profile")
    parser.add_argument("--json", type=Path, help="where to write the rows, as they come")
    parser.add_argument("--record", action="store_true", help="write the table to benchmarks/records/")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no CUDA device; benchmarks/predict_vs_measure.py is that of CPUs")
    names = [(f"{name}/b{samples}", model, samples) for name, model in MODELS.items() for samples in model.batches]
    wanted = [entry for entry in names if any(fnmatch(entry[0], pattern) for pattern in arguments.only.split(","))]
    if not wanted:
        sys.exit(f"--only: no row is called {arguments.only}; rows are {', '.join(name for name, *_ in names)}")
    transformers.logging.set_verbosity_error()
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
    dist.init_process_group("cpu:gloo,cuda:nccl", rank=0, world_size=1)
    if arguments.profile is not None:
        profile = MachineProfile.load(arguments.profile)
    else:
        profile = measure(dist.init_device_mesh("cuda", (1,)), report=print, refresh=True)
    if arguments.save_profile:
        profile.save(arguments.save_profile)
    rows = {}
    for name, model, samples in wanted:
        try:
            rows[name] = run_row(model, samples, profile, device)
            print(name, rows[name], flush=True)
        except torch.OutOfMemoryError as error:
            print(f"{name}: left out, {error}", flush=True)
        forget()
        if arguments.json:
            arguments.json.write_text(json.dumps({name: asdict(row) for name, row in rows.items()}, indent=1))
    text = report_of(rows)
    print(text)
    if arguments.record:
        today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
        origin = f"`benchmarks/single_gpu.py --record` on {torch.cuda.get_device_name(device)}, torch {torch.__version__}."
        (RECORDS / f"{today}-single-gpu.md").write_text(f"# One GPU, {today}\n\n{origin}\n\n{text}\n")
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
