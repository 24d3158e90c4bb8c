"""Measures time and memory of planning, each case in a process of its own.

    python benchmarks/planning.py [--case gpt2-8] [--no-pipeline]

Model and batch are on meta. ``import`` includes torch and transformers, ``total`` everything from the start of the interpreter,
``rss`` is the peak resident memory of the process.
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

CASES = {
    "gpt2-8": "GPT-2 small, batch 32, sequence 1024, 8 devices on one axis",
    "gpt2-2x4": "GPT-2 small, batch 32, sequence 1024, 2 x 4 devices",
    "llama8b-4x8": "Llama-8B, batch 32, sequence 2048, 4 x 8 devices",
}
PHASES = ("import", "model", "capture", "solve", "other", "total")
REFERENCE = "for comparison: meta-pytorch/autoparallel takes 33 s, 64 s and 191 s (6.0 GB) on the same kind of machine"


def measure(case: str, *, pipeline: bool = True) -> dict[str, float]:
    """Plan one case here and now; seconds by phase, and bytes."""
    import torch
    import transformers

    import autopar

    imported_s = time.perf_counter()
    transformers.logging.set_verbosity_error()
    with torch.device("meta"):
        model: torch.nn.Module
        if case == "llama8b-4x8":
            vocabulary, batch, sequence = 128256, 32, 2048
            llama = transformers.LlamaConfig(
                num_hidden_layers=32,
                hidden_size=4096,
                intermediate_size=14336,
                num_attention_heads=32,
                num_key_value_heads=8,
                vocab_size=vocabulary,
                max_position_embeddings=8192,
                use_cache=False,
            )
            model = transformers.LlamaForCausalLM(llama).train()
            cluster = autopar.Cluster(nodes=4, gpus_per_node=8, device="h100")
        else:
            vocabulary, batch, sequence = 50257, 32, 1024
            model = transformers.GPT2LMHeadModel(transformers.GPT2Config(use_cache=False)).train()
            nodes, devices = (1, 8) if case == "gpt2-8" else (2, 4)
            cluster = autopar.Cluster(nodes=nodes, gpus_per_node=devices, device="a100-80gb")
        tokens = {name: torch.randint(vocabulary, (batch, sequence)) for name in ("input_ids", "labels")}
    built_s = time.perf_counter()
    plan = autopar.plan(model, cluster, tokens, pipeline=pipeline)
    done_s = time.perf_counter()
    capture, solve = plan.stats.capture_time_s, plan.stats.solve_time_s
    return {
        "import": imported_s - STARTED_S,
        "model": built_s - imported_s,
        "capture": capture,
        "solve": solve,
        "other": done_s - built_s - capture - solve,
        "total": done_s - STARTED_S,
        "rss": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "gap": plan.stats.gap,
        "predicted": plan.prediction.step_time_s,
    }


def measure_apart(case: str, *options: str) -> dict[str, float]:
    """The same in a fresh process; ``total`` is as seen from outside, with the interpreter's start and end."""
    started_s = time.perf_counter()
    environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **os.environ}
    command = [sys.executable, __file__, "--inside", case, *options]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        sys.exit(f"{case} failed:\n{done.stderr}")
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures | {"total": time.perf_counter() - started_s}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=CASES, action="append", help="default: all; repeat it for several")
    parser.add_argument("--repeats", type=int, default=3, help="the row is the run with the median total")
    parser.add_argument("--no-pipeline", action="store_true", help="plans without stages only")
    parser.add_argument("--inside", choices=CASES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        print(json.dumps(measure(arguments.inside, pipeline=not arguments.no_pipeline)))
        return
    print(f"load {os.getloadavg()[0]:.2f}, {os.cpu_count()} cores; median of {arguments.repeats}")
    print(f"{'case':12}" + "".join(f"{phase:>10}" for phase in PHASES) + f"{'totals':>14}{'peak rss':>12}{'gap':>9}")
    for case in arguments.case or CASES:
        options = ["--no-pipeline"] if arguments.no_pipeline else []
        runs = [measure_apart(case, *options) for _ in range(arguments.repeats)]
        totals = sorted(run["total"] for run in runs)
        median = next(run for run in runs if run["total"] == statistics.median_low(totals))
        seconds = "".join(f"{median[phase]:>8.2f} s" for phase in PHASES)
        span = f"{totals[0]:.1f}-{totals[-1]:.1f} s"
        print(f"{case:12}{seconds}{span:>14}{median['rss'] / 1e9:>9.2f} GB{median['gap']:>9.1e}", flush=True)
    print("\n".join(f"{name}: {text}" for name, text in CASES.items()))
    print(REFERENCE)


if __name__ == "__main__":
    main()
