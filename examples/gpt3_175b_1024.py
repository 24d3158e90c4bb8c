"""GPT-3 on 1,024 A100 that are not here: the automatic plan beside the configurations that people write by hand.

    python examples/gpt3_175b_1024.py

The model is the GPT-2 of transformers with the dimensions of GPT-3 (Brown et al. 2020), on meta and in bfloat16 with a float32 copy in the
optimizer; no process is started. Korthikanti et al. 2022 (table 5) trained it with TP 8, PP 8, three stages a rank, sequence parallelism
and selective recomputation on 64 A100; the rows with PP 16 are what else one would try.
"""

from __future__ import annotations

import sys

import torch
import transformers

import autopar
from autopar.show.compare import compare_text

LAYERS, HIDDEN, HEADS, SEQUENCE, BATCH = 96, 12288, 96, 2048, 1536

with torch.device("meta"):
    config = transformers.GPT2Config(
        n_layer=LAYERS, n_embd=HIDDEN, n_head=HEADS, n_positions=SEQUENCE, vocab_size=51200, use_cache=False
    )
    model = transformers.GPT2LMHeadModel(config).to(torch.bfloat16).train()
    tokens = torch.empty(BATCH, SEQUENCE, dtype=torch.long)

by_hand = {"tp": 8, "zero": 1, "micro_batch": 1, "sequence_parallel": True}
rows = autopar.compare(
    model,
    autopar.Cluster(nodes=128, gpus_per_node=8, device="a100-80gb"),
    {"input_ids": tokens, "labels": tokens.clone()},
    {
        "tp8-pp16 full": autopar.Manual(dp=8, pp=16, recompute="full", **by_hand),
        "tp8-pp16 selective": autopar.Manual(dp=8, pp=16, recompute="selective", **by_hand),
        "tp8-pp8 interleaved": autopar.Manual(dp=16, pp=8, schedule="interleaved:3", recompute="selective", **by_hand),
    },
    optimizer="adamw_master",
    outputs="loss",
    report=lambda text: print(text, file=sys.stderr) if text.startswith("planning") else None,
)
print(compare_text(rows))
