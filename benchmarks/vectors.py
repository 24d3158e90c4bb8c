"""Steps of a GPT-2 under ZeRO with its vectors travelling together and one by one (`autopar/passes/vectors.py`), side by side.

    torchrun --nproc-per-node 2 benchmarks/vectors.py [--rounds 10] [--layers 4] [--hidden 256] [--tokens 64]

Each round runs steps of both kinds, in turns, so that what else the machine does falls on both alike. Printed are medians of rounds: of the
seconds of a step, and of the ratio of both in the same round.
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
from autopar.passes import vectors

STEPS = 5
"""Of a round."""


def build(config: autopar.Manual, options: argparse.Namespace, batch: dict[str, torch.Tensor], *, together: bool) -> Any:
    sizes = {"n_layer": options.layers, "n_embd": options.hidden, "n_head": 4, "vocab_size": 1024, "n_positions": options.tokens}
    torch.manual_seed(0)
    given = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, use_cache=False))
    cluster = autopar.Cluster(nodes=1, gpus_per_node=dist.get_world_size(), device="a100-80gb")  # any: the plan is given
    profile = cluster.with_mesh(config.grid(dist.get_world_size())).profile
    limit, vectors.SMALL_NUM_BYTES = vectors.SMALL_NUM_BYTES, vectors.SMALL_NUM_BYTES if together else 0
    try:
        return autopar.parallelize(given, dist.get_world_size(), plan=config, profile=profile, example_batch=batch, compare_batches=0)
    finally:
        vectors.SMALL_NUM_BYTES = limit


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
        models = {together: build(config, options, batch, together=together) for together in (False, True)}
        found: dict[bool, list[float]] = {together: [] for together in models}
        for round_number in range(options.rounds + 1):
            for together, model in models.items():
                step_s, loss = round_s(model, batch)
                if round_number:  # the first warms up
                    found[together].append(step_s)
        ratio = median(one / other for one, other in zip(found[False], found[True], strict=True))
        if dist.get_rank() == 0:
            text = f"one by one {median(found[False]) * 1e3:7.1f} ms, together {median(found[True]) * 1e3:7.1f} ms, ratio {ratio:.2f}"
            print(f"{config!s:<40} {text}, loss {loss:.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
