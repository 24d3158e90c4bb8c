"""Measures time and memory of planning, each case in a process of its own.

    python benchmarks/planning.py [--case gpt2-8] [--no-pipeline] [--complete]

Model and batch are on meta. ``import`` includes torch and transformers, ``saved`` is the time from the start of the interpreter to the
saved plan, ``total`` also has the end of the process, in which Python frees what torch and the plan are made of; ``rss`` is the peak
resident memory of the process, ``programs`` how many integer programs were solved, ``gap`` that of the best shape's.
"""

from __future__ import annotations

import time

STARTED_S = time.perf_counter()

import argparse  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import resource  # noqa: E402
import statistics  # noqa: E402
import subprocess  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402
from dataclasses import dataclass  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

GPT3 = {"n_embd": 12288, "n_layer": 96, "n_head": 96}
GPT_1T = {"n_embd": 25600, "n_layer": 128, "n_head": 160}
LLAMA_8B = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 14336}
LLAMA_405B = {"hidden_size": 16384, "num_hidden_layers": 126, "num_attention_heads": 128, "intermediate_size": 53248}


@dataclass(frozen=True, slots=True)
class Case:
    """A model, a batch and a cluster; large models are in bfloat16 with a float32 copy in the optimizer."""

    text: str
    dims: dict[str, int]
    vocabulary: int
    batch: int
    sequence: int
    nodes: int
    gpus_per_node: int
    device: str
    is_large: bool = False

    def model(self) -> Any:
        """On meta: a GPT, or a Llama if the dims are called so."""
        import torch
        import transformers

        transformers.logging.set_verbosity_error()
        with torch.device("meta"):
            if "n_embd" in self.dims or not self.dims:
                gpt = transformers.GPT2Config(vocab_size=self.vocabulary, n_positions=self.sequence, use_cache=False, **self.dims)
                model: torch.nn.Module = transformers.GPT2LMHeadModel(gpt)
            else:
                llama = transformers.LlamaConfig(
                    vocab_size=self.vocabulary, num_key_value_heads=8, max_position_embeddings=self.sequence, use_cache=False, **self.dims
                )
                model = transformers.LlamaForCausalLM(llama)
        return model.to(torch.bfloat16 if self.is_large else torch.float32).train()


CASES = {
    "gpt2-8": Case("GPT-2 small", {}, 50257, 32, 1024, 1, 8, "a100-80gb"),
    "gpt2-2x4": Case("GPT-2 small", {}, 50257, 32, 1024, 2, 4, "a100-80gb"),
    "llama8b-4x8": Case("Llama-8B", LLAMA_8B, 128256, 32, 2048, 4, 8, "h100"),
    "gpt3-128x8": Case("GPT-3 175B", GPT3, 51200, 1536, 2048, 128, 8, "a100-80gb", is_large=True),
    "llama405b-2048x8": Case("Llama-3 405B", LLAMA_405B, 128256, 2048, 8192, 2048, 8, "h100", is_large=True),
    "gpt1t-12500x8": Case("GPT of 1T parameters", GPT_1T, 51200, 12500, 2048, 12500, 8, "h100", is_large=True),
}
PHASES = ("import", "model", "capture", "solve", "other", "saved", "total")
REFERENCE = "for comparison: on the first three meta-pytorch/autoparallel takes 33 s, 64 s and 191 s (6.0 GB) on the same kind of machine"


def measure(case: str, *, pipeline: bool = True, complete: bool = False) -> dict[str, Any]:
    """Plan one case here and now, and save the plan; seconds by phase, bytes, and what was searched."""
    import torch
    import transformers  # noqa: F401

    import autopar

    imported_s, described = time.perf_counter(), CASES[case]
    model = described.model()
    tokens = torch.empty(described.batch, described.sequence, dtype=torch.long, device="meta")
    cluster = autopar.Cluster(described.nodes, described.gpus_per_node, described.device)
    phases: list[str] = []
    built_s = time.perf_counter()
    plan = autopar.plan(
        model,
        cluster,
        {"input_ids": tokens, "labels": tokens.clone()},
        pipeline=pipeline,
        complete=complete,
        optimizer="adamw_master" if described.is_large else "adamw",
        outputs="loss" if described.is_large else "whole",
        report=phases.append,
    )
    with tempfile.TemporaryDirectory() as folder:
        plan.save(Path(folder, "plan.json"))
    done_s = time.perf_counter()
    capture, solve = plan.stats.capture_time_s, plan.stats.solve_time_s
    return {
        "import": imported_s - STARTED_S,
        "model": built_s - imported_s,
        "capture": capture,
        "solve": solve,
        "other": done_s - built_s - capture - solve,
        "saved": time.time(),
        "rss": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "gap": plan.stats.gap,
        "predicted": plan.prediction.step_time_s,
        "programs": sum(line.startswith("solving") for line in phases),
        "shapes": "; ".join(note for note in plan.notes if "shapes" in note),
    }


def measure_apart(case: str, *options: str) -> dict[str, Any]:
    """The same in a fresh process, with what is seen from outside."""
    started_s = time.time()
    environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **os.environ}
    command = [sys.executable, __file__, "--inside", case, *options]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        sys.exit(f"{case} failed:\n{done.stderr}")
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures | {"saved": figures["saved"] - started_s, "total": time.time() - started_s}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=CASES, action="append", help="default: all; repeat it for several")
    parser.add_argument("--repeats", type=int, default=3, help="the row is the run with the median total")
    parser.add_argument("--no-pipeline", action="store_true", help="plans without stages only")
    parser.add_argument("--complete", action="store_true", help="leave out only what is proved to be no faster")
    parser.add_argument("--inside", choices=CASES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        print(json.dumps(measure(arguments.inside, pipeline=not arguments.no_pipeline, complete=arguments.complete)))
        return
    print(f"load {os.getloadavg()[0]:.2f}, {os.cpu_count()} cores; median of {arguments.repeats}")
    print(f"{'case':17}" + "".join(f"{phase:>10}" for phase in PHASES) + f"{'totals':>14}{'peak rss':>12}{'gap':>9}{'programs':>10}")
    for name in arguments.case or CASES:
        options = [*["--no-pipeline"] * arguments.no_pipeline, *["--complete"] * arguments.complete]
        runs = [measure_apart(name, *options) for _ in range(arguments.repeats)]
        totals = sorted(run["total"] for run in runs)
        median = next(run for run in runs if run["total"] == statistics.median_low(totals))
        seconds = "".join(f"{median[phase]:>8.2f} s" for phase in PHASES)
        span = f"{totals[0]:.1f}-{totals[-1]:.1f} s"
        print(f"{name:17}{seconds}{span:>14}{median['rss'] / 1e9:>9.2f} GB{median['gap']:>9.1e}{median['programs']:>10}", flush=True)
        print(f"  step {median['predicted']:.3f} s; {median['shapes'] or 'every shape is tried'}", flush=True)
    for name, case in CASES.items():
        print(f"{name}: {case.text}, batch {case.batch}, sequence {case.sequence}, {case.nodes} x {case.gpus_per_node} {case.device}")
    print(REFERENCE)


if __name__ == "__main__":
    main()
