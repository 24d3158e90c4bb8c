"""A small plan written by hand, with one of everything that a page may have to show."""

from __future__ import annotations

from autopar.mesh import Mesh
from autopar.plan import (
    MEMORY_KINDS,
    CollectivePlan,
    LinkPlan,
    OpPlan,
    ParameterPlan,
    Plan,
    Prediction,
    StagePlan,
    Stats,
)
from autopar.resident import StageBytes

MIB = 2**20


STAGE = StagePlan(
    begins="wte", num_ops=3, forward_s=2e-3, backward_s=4e-3, forward_comm_s=5e-4, backward_comm_s=1e-3, input_s=2e-3, weight_s=2e-3,
    gather_s=0.0, reduce_s=1e-3, covered_s=0.0, update_s=1e-4, send_forward_s=0.0, send_backward_s=0.0,
    send_forward_bytes=0, send_backward_bytes=0, core_s=0.0, live=1,
    recompute="none", memory_bytes=dict.fromkeys(MEMORY_KINDS, 0) | {"parameters": 4 * MIB, "activations": 5 * MIB},
    held=StageBytes(static=4 * MIB, kept=3 * MIB, left=0, first=2 * MIB, later=2 * MIB),
)  # fmt: skip


def parameters(blocks: int) -> tuple[ParameterPlan, ...]:
    embedding = ParameterPlan("wte.weight", ("lm_head.weight",), (50304, 768), ((50304,), (768,)), ("Z1", "S0"), (6288, 768), 19316736)
    rows = [embedding]
    for i in range(blocks):
        weight = f"h.{i}.attn.c_attn.weight"
        rows.append(ParameterPlan(weight, (), (768, 2304), ((768,), (3, 12, 64)), ("Z3", "S1.1"), (384, 576), 884736))
        rows.append(ParameterPlan(f"h.{i}.ln.bias", (), (768,), ((768,),), ("R", "R"), (768,), 3072))
    return tuple(rows)


def ops(blocks: int) -> tuple[OpPlan, ...]:
    rows = [
        OpPlan(
            "embedding", "aten.embedding", "wte", "model.py:10 x = self.wte(ids)", (16, 256, 768),
            "v@ d, b s -> b s d ; 0", ("b", "v"), ("S0", "P"), 5.4e-05, ("wte.weight", "ids"),
        )
    ]  # fmt: skip
    before = "embedding"
    for i in range(blocks):
        line = "model.py:21 x = self.c_attn(x)"
        rule = "b s k, k n -> b s n ; 0 | 1"
        weight = f"h.{i}.attn.c_attn.weight"
        layout, shape = ("S0", "S2.1"), (16, 256, 2304)
        module = f"h.{i}.attn.c_attn"
        rows.append(OpPlan(f"mm_{i}", "aten.mm", module, line, shape, rule, ("b", "n.1"), layout, 3e-4, (before, weight)))
        rows.append(OpPlan(f"relu_{i}", "aten.relu", f"h.{i}.act", "", shape, "a -> a", ("a", "a"), layout, 0.0, (f"mm_{i}",)))
        before = f"relu_{i}"
    return tuple(rows)


def collectives(blocks: int) -> tuple[CollectivePlan, ...]:
    shared = [
        CollectivePlan("all_gather", "dp", phase, "h.0.attn.c_attn.weight", "", 7 * MIB, 1.5e-4, blocks)
        for phase in ("forward", "backward")
    ]
    many = [
        CollectivePlan("all_reduce", "tp", "backward", f"mm_{i}", f"h.{i}.attn.c_attn", (i + 1) * MIB, 1e-6 * (i + 1), 1)
        for i in range(blocks)
    ]
    return (CollectivePlan("reduce_scatter", "tp", "forward", "embedding", "wte", 12 * MIB, 4e-4, 1), *shared, *many)


def small_plan(blocks: int = 12) -> Plan:
    """Equal blocks, a mesh of two axes."""
    return Plan(
        model="TinyGPT",
        mesh=Mesh.parse("dp=2,tp=4"),
        machine="2 nodes x 4 a100-80gb, ib-200",
        batch={"ids": "int64[16, 256]", "labels": "int64[16, 256]"},
        memory_limit_bytes=80 * 2**30,
        parameters=parameters(blocks),
        ops=ops(blocks),
        collectives=collectives(blocks),
        prediction=Prediction(
            step_time_s=0.02524,
            compute_s=0.02166,
            update_s=0.000414,
            blocking_comm_s=0.0021,
            exposed_comm_s=0.00317,
            tokens_per_s=162252.2,
            mfu=0.412,
            bubble_fraction=0.0,
            peak_memory_bytes=(1075879936,),
            memory_bytes=dict.fromkeys(MEMORY_KINDS, 0)
            | {"parameters": 53003776, "gradients": 52938240, "optimizer": 105876480, "activations": 864061440},
        ),
        stats=Stats(2.96, 1.36, 0.00098, 6172, 45),
        stages=(STAGE,),
        dtypes=("float32",),
        links=(LinkPlan("dp", ("between nodes",), (2,)), LinkPlan("tp", ("inside a node",), (4,))),
        graph_hash="0123456789abcdef",
        notes=("the batch is static: the forward reads the batch size",),
    )
