"""What recording costs: CPU time and length of a step of 2 ranks, plain, inside of ``model.record()``, and under ``torch.profiler``.

    torchrun --nproc-per-node 2 benchmarks/recording.py [--rounds 5]

A small GPT-2 under ZeRO-3, which starts a collective for each use of a parameter. The three take turns of 4 steps each, and the first
step of a turn does not count. CPU time is that of the thread that trains. The least of all steps is told, which is what others on the
machine disturb least.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel

import autopar

STEPS = 4


def main() -> None:
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=128, n_head=4, vocab_size=1024, n_positions=64, use_cache=False))
    tokens = torch.randint(1024, (8, 64))
    batch = {"input_ids": tokens, "labels": tokens}
    plan = autopar.Manual(dp=2, zero=3)
    profile = autopar.Cluster(nodes=1, gpus_per_node=2, device="a100-80gb").with_mesh(plan.grid(2)).profile  # any: the plan is given
    model = autopar.parallelize(model, 2, plan=plan, profile=profile, example_batch=batch)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    def step() -> tuple[float, float]:
        begin_s, begin_cpu_s = time.perf_counter(), time.thread_time()
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - begin_s, time.thread_time() - begin_cpu_s

    ways: dict[str, Callable[[], AbstractContextManager[object]]] = {
        "plain": nullcontext,
        "model.record()": model.record,
        "torch.profiler": lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
    }
    times: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for _ in range(arguments.rounds):
        for name, way in ways.items():
            dist.barrier()
            with way():
                times[name] += [step() for _ in range(STEPS)][1:]
    if dist.get_rank() == 0:
        plain_cpu_s = min(cpu_s for _, cpu_s in times["plain"])
        for name, seen in times.items():
            step_s, cpu_s = (min(column) for column in zip(*seen, strict=True))
            print(f"{name:<16} step {step_s * 1e3:7.1f} ms   CPU {cpu_s * 1e3:7.1f} ms   {cpu_s / plain_cpu_s - 1:+.1%}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
