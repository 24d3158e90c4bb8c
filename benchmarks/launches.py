"""How long Python takes to launch a step of a model too small for anything else to take time: eager, and by a plan of one rank.

    torchrun --nproc-per-node 1 benchmarks/launches.py [--device cpu] [--rounds 30] [--by-op] [--record]

Steps with AdamW, and the graphs of the plan alone, forward and backward, once as they are compiled and once as they run
(`autopar.passes.launches`). All take turns in each round; medians over rounds, one thread. With ``--by-op`` also what the graphs take by
the functions that they call: a host takes unlike times for kinds of ops, and prices have one for all.
"""

from __future__ import annotations

import argparse
import datetime
import statistics
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import fx, nn

import autopar
from autopar.cost.cluster import Cluster
from autopar.runtime.release import released, run_released

RECORDS = Path(__file__).parent / "records"
LAYERS, WIDTH, HEADS, VOCABULARY, TOKENS = 12, 32, 4, 64, 8
WARM_UP = 5
_SIDES = {
    "num_hidden_layers": LAYERS,
    "hidden_size": WIDTH,
    "intermediate_size": 4 * WIDTH,
    "num_attention_heads": HEADS,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": TOKENS,
}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
MODELS: dict[str, tuple[Any, transformers.PretrainedConfig]] = {
    "GPT-2": (
        transformers.AutoModelForCausalLM,
        transformers.GPT2Config(
            n_layer=LAYERS, n_embd=WIDTH, n_head=HEADS, vocab_size=VOCABULARY, n_positions=TOKENS, use_cache=False,
            bos_token_id=0, eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        ),
    ),
    "Llama": (transformers.AutoModelForCausalLM, transformers.LlamaConfig(**_SIDES, num_key_value_heads=2, use_cache=False)),
    "BERT": (transformers.AutoModelForMaskedLM, transformers.BertConfig(**_SIDES, **_NO_DROPOUT)),
}  # fmt: skip
PRECISIONS = {"float32": None, "bfloat16": "bf16"}


def made(name: str, device: str) -> nn.Module:
    kind, config = MODELS[name]
    torch.manual_seed(0)
    with torch.device(device):
        model: nn.Module = kind.from_config(config, attn_implementation="sdpa")
    return model


def stepping(model: nn.Module, batch: dict[str, torch.Tensor], autocast: bool) -> Callable[[], object]:
    device = next(iter(batch.values())).device.type
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, foreach=True)

    def step() -> None:
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


Run = Callable[[fx.GraphModule, list[torch.Tensor]], list[torch.Tensor]]
"""How a graph is run on its inputs."""


def graphs(model: Any, batch: dict[str, torch.Tensor], run: Run) -> Callable[[], object]:
    """Forward and backward of a parallel model."""
    (((_, built),),) = model._autopar.programs.values()
    halves, state = built.program.halves, dict(model.named_parameters()) | dict(model.named_buffers())
    own = iter(batch.values())
    tensors = [next(own) if name is None else state[name] for name in built.program.parameters]
    device = tensors[0].device
    given = [x.to_local().detach() if hasattr(x, "to_local") else x for x in tensors]
    given += [torch.zeros((), dtype=torch.long, device=device)] * (len(halves.forward.graph.find_nodes(op="placeholder")) - len(given))
    tangents = [torch.ones((), device=device) for _ in halves.differentiable]

    @torch.no_grad()
    def both() -> None:
        run(halves.backward, [*run(halves.forward, [*given])[halves.num_outputs :], *tangents])

    return both


def as_compiled(module: fx.GraphModule, values: list[torch.Tensor]) -> list[torch.Tensor]:
    return list(module(*values))


class Timed(fx.Interpreter):
    """Runs a graph as it runs in a step, and adds up seconds by the name of the function that is called."""

    def __init__(self, module: fx.GraphModule, taken: defaultdict[str, list[float]]) -> None:
        super().__init__(module)
        self.taken = taken

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        begin_s = time.perf_counter()
        made = target(*args, **kwargs)
        self.taken[getattr(target, "__name__", str(target))].append(time.perf_counter() - begin_s)
        return made


def by_op(model: Any, batch: dict[str, torch.Tensor], rounds: int) -> list[str]:
    """A table of what the graphs of a parallel model take by function, the longest first; medians over rounds."""
    found: list[dict[str, tuple[int, float]]] = []
    for _ in range(WARM_UP + rounds):
        taken = defaultdict[str, list[float]](list)
        graphs(model, batch, lambda module, values, taken=taken: list(Timed(released(module), taken).run(values)))()  # type: ignore[misc]
        if next(iter(batch.values())).is_cuda:
            torch.cuda.synchronize()
        found.append({name: (len(times), sum(times)) for name, times in taken.items()})
    rows = {name: (count, statistics.median(one[name][1] for one in found[WARM_UP:])) for name, (count, _) in found[0].items()}
    lines = ["| function | calls | a step | a call |", "|---|--:|--:|--:|"]
    for name, (count, time_s) in sorted(rows.items(), key=lambda row: -row[1][1]):
        lines.append(f"| {name} | {count} | {time_s * 1e3:.2f} ms | {time_s / count * 1e6:.1f} us |")
    return lines


def compare(name: str, precision: str, device: str, rounds: int, *, is_by_op: bool = False) -> tuple[str, list[str]]:
    """A row of the table, and that of its functions if it is wanted."""
    tokens = torch.randint(VOCABULARY, (1, TOKENS), device=device)
    batch, asked = {"input_ids": tokens, "labels": tokens.clone()}, PRECISIONS[precision]
    profile = Cluster(nodes=1, gpus_per_node=1, device="h200").profile  # any: there is nothing to choose
    parallel = autopar.parallelize(made(name, device), 1, example_batch=batch, precision=asked, outputs="loss", profile=profile)
    ways = [
        stepping(made(name, device), batch, asked is not None),
        stepping(parallel, batch, autocast=False),
        graphs(parallel, batch, as_compiled),
        graphs(parallel, batch, run_released),
    ]
    taken: list[list[float]] = [[] for _ in ways]
    for turn in range(WARM_UP + rounds):
        for way, own in zip(ways, taken, strict=True):
            begin_s = time.perf_counter()
            way()
            if device == "cuda":
                torch.cuda.synchronize()
            if turn >= WARM_UP:
                own.append(time.perf_counter() - begin_s)
    eager_s, step_s, plain_s, fast_s = map(statistics.median, taken)
    cells = [name, precision, *(f"{s * 1e3:.1f} ms" for s in (eager_s, step_s)), f"{step_s / eager_s:.2f}"]
    cells += [*(f"{s * 1e3:.1f} ms" for s in (plain_s, fast_s)), f"{fast_s / plain_s:.2f}"]
    return f"| {' | '.join(cells)} |", by_op(parallel, batch, rounds) if is_by_op else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="(default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=30, help="(default: %(default)s)")
    parser.add_argument("--by-op", action="store_true", help="also what graphs take by the functions that they call")
    parser.add_argument("--record", action="store_true", help=f"write the table to {RECORDS.name}/")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    lines = [
        "| model | computes in | eager step | step of the plan | ratio | graphs as compiled | as they run | ratio |",
        "|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    print("\n".join(lines))
    functions: list[str] = []
    for name in MODELS:
        for precision in PRECISIONS:
            row, of_functions = compare(name, precision, asked.device, asked.rounds, is_by_op=asked.by_op)
            lines.append(row)
            print(row, flush=True)
            functions += ["", f"## {name}, {precision}", "", *of_functions] if of_functions else []
    lines += functions
    print("\n".join(functions))
    if asked.record:
        today = datetime.date.today()
        by = f"`benchmarks/launches.py --device {asked.device}`, torch {torch.__version__}"
        title = f"# Launching a step, {today}\n\n{by}; {LAYERS} layers, {WIDTH} wide, {TOKENS} tokens.\n"
        path = RECORDS / f"{today}-launches-{asked.device}.md"
        path.write_text("\n".join([title, *lines, ""]))
        print(path)


if __name__ == "__main__":
    main()
