"""A configuration that an expert would write, TP 8 x PP 16 x DP 8, and every other that could be written, beside the automatic plan.

    python examples/three_d_by_hand.py [PICTURE.svg]

GPT-3 on 1,024 A100, as in gpt3_175b_1024.py. With a path, a picture of time against memory is drawn, which needs matplotlib.
"""

from __future__ import annotations

import sys

import torch
import transformers

import autopar

LAYERS, HIDDEN, HEADS, SEQUENCE, BATCH = 96, 12288, 96, 2048, 1536

with torch.device("meta"):
    config = transformers.GPT2Config(
        n_layer=LAYERS, n_embd=HIDDEN, n_head=HEADS, n_positions=SEQUENCE, vocab_size=51200, use_cache=False
    )
    model = transformers.GPT2LMHeadModel(config).to(torch.bfloat16).train()
    tokens = torch.empty(BATCH, SEQUENCE, dtype=torch.long)

expert = {"dp": 8, "tp": 8, "pp": 16}
sweep = autopar.sweep(
    model,
    autopar.Cluster(nodes=128, gpus_per_node=8, device="a100-80gb"),
    {"input_ids": tokens, "labels": tokens.clone()},
    optimizer="adamw_master",
    outputs="loss",
    report=lambda text: print(text, file=sys.stderr) if "configurations" in text else None,
)
print(sweep)
own = [p for p in sweep.fitting if (p.config.dp, p.config.tp, p.config.pp) == (expert["dp"], expert["tp"], expert["pp"])]
auto_s = sweep.auto.prediction.step_time_s
print(f"the best of TP 8 x PP 16 x DP 8 is {own[0].config}: {own[0].step_time_s:.2f} s, {own[0].step_time_s / auto_s:.3f} of automatic")
if len(sys.argv) > 1:
    sweep.plot(sys.argv[1])
