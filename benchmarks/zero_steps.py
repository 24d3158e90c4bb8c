"""Steps of a GPT-2 under ZeRO as they are, with vectors one by one (`autopar/passes/vectors.py`), and with more reductions in flight
(`autopar/passes/overlap.py`), side by side.

    torchrun --nproc-per-node 2 benchmarks/zero_steps.py [--rounds 10] [--layers 4] [--hidden 256] [--tokens 64]

Each round runs steps of all kinds, in turns, so that what else the machine does falls on all alike. Printed are medians of rounds: of the
seconds of a step, and of what it takes longer than one as it is in the same round.
"""

from __future__ import annotations

import argparse
import time
import warnings
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel, logging

import autopar
from autopar.passes import overlap, vectors
from autopar.passes.buckets import SMALL_NUM_BYTES
from autopar.passes.overlap import REDUCE_SCATTER

STEPS = 5
"""Of a round."""
KINDS = {
    "as it is": (SMALL_NUM_BYTES, overlap.IN_FLIGHT[REDUCE_SCATTER]),
    "one by one": (0, overlap.IN_FLIGHT[REDUCE_SCATTER]),
    "4 in flight": (SMALL_NUM_BYTES, 4),
}
"""Bytes below which vectors travel together, and how many reduce-scatters are in flight."""


def build(config: autopar.Manual, options: argparse.Namespace, batch: dict[str, torch.Tensor], kind: str) -> Any:
    sizes = {"n_layer": options.layers, "n_embd": options.hidden, "n_head": 4, "vocab_size": 1024, "n_positions": options.tokens}
    torch.manual_seed(0)
    given = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, use_cache=False))
    cluster = autopar.Cluster(nodes=1, gpus_per_node=dist.get_world_size(), device="a100-80gb")  # any: the plan is given
    profile = cluster.with_mesh(config.grid(dist.get_world_size())).profile
    vectors.SMALL_NUM_BYTES, overlap.IN_FLIGHT[REDUCE_SCATTER] = KINDS[kind]
    return autopar.parallelize(given, dist.get_world_size(), plan=config, profile=profile, example_batch=batch, compare_batches=0)


def round_s(model: Any, batch: dict[str, torch.Tensor]) -> tuple[float, float]:
    """Seconds of a step, and its last loss."""
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    dist.barrier()
    begin_s = time.perf_counter()
    for _ in range(STEPS):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return (time.perf_counter() - begin_s) / STEPS, float(loss)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("rounds", 10), ("layers", 4), ("hidden", 256), ("tokens", 64)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    size = dist.get_world_size()
    tokens = torch.randint(1024, (4 * size, options.tokens), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": tokens, "labels": tokens}
    for config in (autopar.Manual(dp=size, zero=1), autopar.Manual(dp=size, zero=2, microbatches=2), autopar.Manual(dp=size, zero=3)):
        models = {kind: build(config, options, batch, kind) for kind in KINDS}
        found: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for round_number in range(options.rounds + 1):
            for kind, model in models.items():
                step_s, loss = round_s(model, batch)
                if round_number:  # the first warms up
                    found[kind].append(step_s)
        for kind, steps_s in found.items() if dist.get_rank() == 0 else ():
            ratio = median(step_s / as_it_is_s for step_s, as_it_is_s in zip(steps_s, found["as it is"], strict=True))
            print(f"{config!s:<44} {kind:<12} {median(steps_s) * 1e3:7.1f} ms, {ratio:.2f} times, loss {loss:.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
