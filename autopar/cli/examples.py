"""Examples of every command, as its ``--help`` shows them. A test parses all, and runs those that take no time."""

from __future__ import annotations

EXAMPLES: dict[str, tuple[str, ...]] = {
    "plan": (
        "autopar plan hf:gpt2 --cluster 1x8:a100-80gb --out plan.json --html plan.html",
        "autopar plan --gpt layers=24,hidden=2048,heads=16 --cluster 4x8:h100 --batch 64 --precision bf16",
        "autopar plan hf:llama --cluster 16x8:a100-80gb --batch 256 --sequence 2048 --json > plan.json",
        "autopar plan hf:gpt2 --mesh 8 --pin 'transformer.h.*.attn.c_attn.weight:d0=column'",
        "autopar plan hf:gpt2 --mesh 4 --manual dp=4 --memory-limit 10GiB --relief",
        "autopar plan train:build --real --cluster local",
    ),
    "show": (
        "autopar show plan.json --module transformer.h.0",
        "autopar show plan.json --stage 2 --html plan.html",
        "autopar show plan.json --diff other.json",
        "autopar show plan.json --json",
    ),
    "compare": (
        "autopar compare hf:gpt2 --cluster 1x8:a100-80gb --against megatron:tp=8 --against zero:dp=8,zero=3 --html rows.html",
        "autopar compare hf:llama --cluster 16x8:a100-80gb --batch 256 --deepspeed ds.json --torchtitan run.toml",
        "autopar compare --gpt layers=24,hidden=1024,heads=16 --cluster 2x8:h100 --against dp=2,tp=8,zero=1 --json",
    ),
    "sweep": (
        "autopar sweep hf:gpt2 --cluster 1x8:a100-80gb --plot sweep.svg",
        "autopar sweep --gpt layers=12,hidden=768,heads=12 --cluster 1x8:h100 --json",
    ),
    "scale": (
        "autopar scale hf:gpt2 --cluster 1x8:h100 --sizes 1,2,4 --tokens 300B --price 2.5 --plot scaling.svg",
        "autopar scale --gpt layers=48,hidden=6144,heads=48 --cluster 1x8:h100 --sizes 8,16,32 --batch 512 --weak",
    ),
    "explain": (
        "autopar explain hf:gpt2 transformer.h.0.attn.c_attn.weight --mesh 8",
        "autopar explain --gpt layers=2,hidden=256,heads=4 transformer.wte.weight --cluster 1x4:h100 --formula",
    ),
    "verify": (
        "autopar verify module:function --mesh 2x2",
        "autopar verify --gpt layers=2,hidden=64,heads=4,vocab=96 --mesh 4 --manual dp=2,tp=2",
        "autopar verify module:function --mesh 8 --plan plan.json --tolerance 1e-5",
    ),
    "check": (
        "autopar check plan.json --rank 517",
        "autopar check plan.json --model module:function --json",
    ),
    "count": (
        "autopar count plan.json",
        "autopar count plan.json --json",
    ),
    "profile": (
        "autopar profile --mesh 4",
        "autopar profile --mesh 2x2 --refresh --out profile.json",
        "torchrun --nproc-per-node 8 -m autopar profile",
    ),
    "rules": (
        "autopar rules aten.linear",
        "autopar rules --json",
        "autopar rules mm --check",
    ),
    "demo": (
        "autopar demo",
        "autopar demo --out out/demo --json",
    ),
}


def examples_text(command: str) -> str:
    """As the epilogue of a help: one example a line."""
    return "\n\n".join(["[bold]Examples[/bold]", *EXAMPLES[command]])
