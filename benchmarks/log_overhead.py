"""What `autopar.log` costs: steps of a small GPT-2 with and without it, side by side, under DDP and ZeRO-3.

    torchrun --nproc-per-node 2 benchmarks/log_overhead.py [--rounds 10]

Each round runs ten steps of each kind, in turns, so that what else the machine does falls on all kinds alike. A figure is the least of all
rounds, per step, and the median; the difference to ``plain`` is what a step pays. ``log.step`` is the call alone, without a row.
"""

from __future__ import annotations

import argparse
import time
import warnings
from contextlib import nullcontext
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel, logging

import autopar

STEPS = 10
"""Of a round, and between rows."""
KINDS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "log, no sample": {"every": STEPS, "sample": False},
    "log": {"every": STEPS},
    "log, every step": {"every": 1},
}


def build(config: autopar.Manual, batch: dict[str, torch.Tensor]) -> Any:
    sizes = {"n_layer": 2, "n_embd": 128, "n_head": 4, "vocab_size": 1024, "n_positions": 64}
    torch.manual_seed(0)
    given = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, use_cache=False))
    cluster = autopar.Cluster(nodes=1, gpus_per_node=dist.get_world_size(), device="a100-80gb")  # any: the plan is given
    profile = cluster.with_mesh(config.grid(dist.get_world_size())).profile
    return autopar.parallelize(given, dist.get_world_size(), plan=config, profile=profile, example_batch=batch, compare_batches=0)


def round_s(model: Any, batch: dict[str, torch.Tensor], settings: dict[str, Any] | None) -> tuple[float, float]:
    """Seconds of a step, and of a ``log.step`` that writes no row."""
    optimizer, calls_s = torch.optim.SGD(model.parameters(), 0.0), []

    def step() -> torch.Tensor:
        loss: torch.Tensor = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    with nullcontext() if settings is None else autopar.log(model, to=lambda row: None, **settings) as log:
        loss = step()
        if log is not None:
            log.step(loss=loss)  # the first marks the graphs
        dist.barrier()
        begin_s = time.perf_counter()
        for _ in range(STEPS):
            loss = step()
            if log is not None:
                called_s = time.perf_counter()
                log.step(loss=loss)
                calls_s.append(time.perf_counter() - called_s)
        return (time.perf_counter() - begin_s) / STEPS, min(calls_s, default=0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10, help="of each kind")
    rounds = parser.parse_args().rounds
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    tokens = torch.randint(1024, (8, 64), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": tokens, "labels": tokens}
    for config in (autopar.Manual(dp=2), autopar.Manual(dp=2, zero=3)):
        model = build(config, batch)
        found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
        for _ in range(rounds):
            for kind, settings in KINDS.items():
                found[kind].append(round_s(model, batch, settings))
        for kind, times in found.items() if dist.get_rank() == 0 else ():
            steps_s, calls_s = zip(*times, strict=True)
            text = f"least {min(steps_s) * 1e3:7.2f} ms  median {median(steps_s) * 1e3:7.2f} ms  log.step {min(calls_s) * 1e6:6.1f} us"
            print(f"{config!s:<30} {kind:<16} {text}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
