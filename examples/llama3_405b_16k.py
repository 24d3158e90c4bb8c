"""Llama-3 405B on 16,384 H100 that are not here: the automatic plan beside the kind of configuration that such runs are given by hand.

    python examples/llama3_405b_16k.py

The model is the Llama of transformers with the dimensions of Grattafiori et al. 2024 (The Llama 3 Herd of Models, table 3), on meta and in
bfloat16 with a float32 copy in the optimizer: 16.8 million tokens a step in sequences of 8,192. No process is started.
"""

from __future__ import annotations

import sys

import torch
import transformers

import autopar
from autopar.show.compare import compare_text

SEQUENCE, BATCH = 8192, 2048

with torch.device("meta"):
    config = transformers.LlamaConfig(
        hidden_size=16384,
        num_hidden_layers=126,
        num_attention_heads=128,
        num_key_value_heads=8,
        intermediate_size=53248,
        vocab_size=128256,
        max_position_embeddings=SEQUENCE,
        use_cache=False,
    )
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16).train()
    tokens = torch.empty(BATCH, SEQUENCE, dtype=torch.long)

by_hand = {"tp": 8, "micro_batch": 1, "sequence_parallel": True}
rows = autopar.compare(
    model,
    autopar.Cluster(nodes=2048, gpus_per_node=8, device="h100"),
    {"input_ids": tokens, "labels": tokens.clone()},
    {
        "tp8-pp16-dp128": autopar.Manual(dp=128, pp=16, zero=1, **by_hand),
        "tp8-pp16 selective": autopar.Manual(dp=128, pp=16, zero=1, recompute="selective", **by_hand),
        "tp8-pp16 interleaved": autopar.Manual(dp=128, pp=16, zero=1, schedule="interleaved:4", recompute="pointwise", **by_hand),
    },
    optimizer="adamw_master",
    outputs="loss",
    report=lambda text: print(text, file=sys.stderr) if text.startswith("planning") else None,
)
print(compare_text(rows))
