"""Train a small GPT-2 on one device, or on all processes of torchrun: the loop is the same.

    python examples/train.py
    torchrun --nproc-per-node 4 examples/train.py
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel, logging

import autopar

VOCABULARY, BATCH, SEQUENCE, STEPS = 1000, 8, 64, 20


def batches() -> Iterator[dict[str, torch.Tensor]]:
    """The global batch of each step, the same on every process: rows that count upwards."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        first = torch.randint(VOCABULARY, (BATCH, 1), generator=generator)
        tokens = (first + torch.arange(SEQUENCE)) % VOCABULARY
        yield {"input_ids": tokens, "labels": tokens}


def main() -> None:
    logging.set_verbosity_error()  # transformers' own
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=2, n_embd=128, n_head=4, vocab_size=VOCABULARY, n_positions=SEQUENCE,
        bos_token_id=0, eos_token_id=0, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, use_cache=False,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)

    parallel = "RANK" in os.environ  # torchrun sets it
    if parallel:
        model = autopar.parallelize(model)  # plans at the first call, for the batch that it gets

    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    with autopar.log(model, every=5) as log:  # lines; to=["stdout", "metrics.csv", "tensorboard:runs/gpt2"] for files too
        for batch in batches():
            loss = model(**batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            log.step(loss=loss)

    if parallel:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
