"""What recording costs: a mark of a graph, and a watched collective, beside what ``torch.profiler`` takes of an op and a collective.

    torchrun --nproc-per-node 2 benchmarks/recording.py

Each figure is the least of many tries, which other work on the machine does not change; collectives are of 4 bytes, in a group of one rank.
Then how many of each a step of a small GPT-2 has, under DDP and ZeRO-3 on two ranks, what that comes to, and how much longer a step takes
with a record, without and with ``profiler=True``, side by side.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from statistics import median

import torch
import torch.distributed as dist
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import autopar
from autopar.runtime.groups import put_group
from autopar.runtime.marks import Marks
from autopar.runtime.watch import Ends, HostClock, Watched

TRIES, REPEATS = 300, 20
ROUNDS, STEPS = 8, 6
_c10d = torch.ops._c10d_functional


def least_s(do: Callable[[], object]) -> float:
    """Seconds of one call."""
    found = float("inf")
    for _ in range(TRIES):
        begin_s = time.perf_counter()
        for _ in range(REPEATS):
            do()
        found = min(found, (time.perf_counter() - begin_s) / REPEATS)
    return found


def costs_s() -> dict[str, float]:
    """What recording adds to one of each."""
    x, y = torch.ones(1), torch.ones(1)
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    marks = Marks(HostClock(), Ends(HostClock()))

    def add() -> None:
        torch.ops.aten.add_.Tensor(y, x)

    def reduce() -> None:
        _c10d.wait_tensor(_c10d.all_reduce_(x, "sum", "alone"))

    put_group("alone", alone)
    plain_op_s, plain_s = least_s(add), least_s(reduce)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        profiled_op_s, profiled_s = least_s(add), least_s(reduce)
    watched = Watched(alone, "dp", HostClock(), Ends(HostClock()), lambda axis, flight: None)
    put_group("alone", watched)
    watched_s = least_s(reduce)
    put_group("alone", alone)
    return {
        "mark": least_s(marks.take),
        "collective": watched_s - plain_s,
        "op, torch.profiler": profiled_op_s - plain_op_s,
        "collective, torch.profiler": profiled_s - plain_s,
    }


def forward_and_backward(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> None:
    model(**batch).loss.backward()


def alternating_s(step: Callable[[], object], ways: Sequence[Callable[[], AbstractContextManager[object]]]) -> list[float]:
    """Median seconds of a step under each of some contexts, which take turns."""
    taken: list[list[float]] = [[] for _ in ways]
    for _ in range(ROUNDS):
        for way, own in zip(ways, taken, strict=True):
            with way():
                step()  # the first one under a profiler is slow
                for _ in range(STEPS):
                    dist.barrier()
                    begin_s = time.perf_counter()
                    step()
                    own.append(time.perf_counter() - begin_s)
    return [median(own[STEPS:]) for own in taken]


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    costs = costs_s()
    torch.manual_seed(0)
    first = dist.get_rank() == 0
    for name, cost_s in costs.items() if first else ():
        print(f"{name:<28} {cost_s * 1e6:6.2f} us")
    tokens = torch.randint(1024, (8, 64))
    batch = {"input_ids": tokens, "labels": tokens}
    sizes = {"n_layer": 2, "n_embd": 128, "n_head": 4, "vocab_size": 1024, "n_positions": 64}
    for plan in (autopar.Manual(dp=2), autopar.Manual(dp=2, zero=3)):
        config = GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, use_cache=False)
        profile = autopar.Cluster(nodes=1, gpus_per_node=2, device="a100-80gb").with_mesh(plan.grid(2)).profile  # any: the plan is given
        model = autopar.parallelize(GPT2LMHeadModel(config), 2, plan=plan, profile=profile, example_batch=batch)
        model(**batch).loss.backward()
        step = partial(forward_and_backward, model, batch)
        steps_s = alternating_s(step, [nullcontext, model.record, partial(model.record, profiler=True)])
        with model.record() as record:
            step()
        spans, events = len(record.recording.spans), len(record.events)
        if first:
            text = f"{spans} marks, {events} collectives: {(spans * costs['mark'] + events * costs['collective']) * 1e3:.2f} ms"
            print(f"{plan}: {text} of {steps_s[0] * 1e3:.0f} ms")
            more = [f"{taken_s / steps_s[0] - 1:+.1%}" for taken_s in steps_s[1:]]
            print(f"{plan}: a step takes {more[0]} with a record, {more[1]} with profiler=True")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
