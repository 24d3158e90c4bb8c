"""What it takes to trace a graph with its backward.

`autopar.passes.joint` records each kind of call once, `make_fx` records the whole, and AOTAutograd makes functions of all ops besides.

    python benchmarks/differentiate.py [--layers 12] [--repeats 5]

The graphs are those of one rank of GPT-2 and of a Llama with tensor parallelism over 2 and ZeRO-3 over 2; the three take turns. Printed are
seconds (median), the calls in each joint graph that something uses, and the time as a part of that of AOTAutograd. The calls are the same
but for SiLU, whose backward AOTAutograd reads as a formula, and views.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable

import torch
from torch import fx, nn
from torch._functorch.aot_autograd import aot_export_joint_simple
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import autopar
from autopar.compile import compile_plan
from autopar.graph import specs_of
from autopar.passes.joint import trace_joint

CPU = torch.device("cpu")


def models(layers: int) -> dict[str, nn.Module]:
    with torch.device("meta"):
        return {
            "GPT-2": GPT2LMHeadModel(GPT2Config(n_layer=layers, use_cache=False, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)),
            "Llama": LlamaForCausalLM(
                LlamaConfig(hidden_size=512, intermediate_size=1024, num_hidden_layers=layers, num_key_value_heads=4, use_cache=False)
            ),
        }


def local_graph(model: nn.Module) -> fx.GraphModule:
    tokens = torch.zeros(8, 64, dtype=torch.long, device="meta")
    batch = {"input_ids": tokens, "labels": tokens.clone()}
    plan = autopar.plan(model, autopar.Cluster(1, 4, "h100"), batch, plan=autopar.Manual(dp=2, tp=2, zero=3), outputs="loss")
    assert plan.normal is not None
    return compile_plan(plan.normal, plan, device=CPU, training=True).local


def ways_of(local: fx.GraphModule) -> dict[str, Callable[[], fx.GraphModule]]:
    specs = [specs_of(node)[0] for node in local.graph.find_nodes(op="placeholder")]

    def inputs() -> list[torch.Tensor]:
        with FakeTensorMode(allow_non_fake_inputs=True):
            return [torch.empty(spec.shape, dtype=spec.dtype, device=CPU, requires_grad=spec.requires_grad) for spec in specs]

    def by_joint() -> fx.GraphModule:
        return trace_joint(local, inputs(), [torch.ones(())], [0])

    def by_make_fx() -> fx.GraphModule:
        def step(*primals: torch.Tensor) -> list[torch.Tensor | None]:
            outputs = fx.Interpreter(local).run(*primals)
            wanted = [x for x in primals if x.requires_grad]
            made = iter(torch.autograd.grad(outputs[0], wanted, torch.ones(()), allow_unused=True))
            return [*outputs, *(next(made) if x.requires_grad else None for x in primals)]

        module = make_fx(step, tracing_mode="fake")(*inputs())
        module.graph.eliminate_dead_code()
        return module

    def by_aot() -> fx.GraphModule:
        traced = aot_export_joint_simple(lambda *x: fx.Interpreter(local).run(*x), tuple(inputs()), trace_joint=True)
        assert isinstance(traced, fx.GraphModule)
        return traced

    return {"joint": by_joint, "make_fx": by_make_fx, "AOTAutograd": by_aot}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    gc.disable()  # as where plans are compiled
    for name, model in models(args.layers).items():
        ways = ways_of(local_graph(model))
        times: dict[str, list[float]] = {way: [] for way in ways}
        sizes: dict[str, int] = {}
        for _ in range(args.repeats):
            for way, trace in ways.items():
                start = time.perf_counter()
                graph = trace().graph
                times[way].append(time.perf_counter() - start)
                sizes[way] = sum(node.op == "call_function" for node in graph.nodes)
        found = {way: statistics.median(row) for way, row in times.items()}
        told = ", ".join(f"{way} {found[way]:.2f} s ({sizes[way]} calls, {found[way] / found['AOTAutograd']:.2f})" for way in ways)
        print(f"{name} of {args.layers} layers: {told}")


if __name__ == "__main__":
    main()
