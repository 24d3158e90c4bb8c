"""What `write_pages` runs on real processes; a module of its own, for workers to import."""

from __future__ import annotations

import torch

import autopar
from autopar import Manual
from tests.models import gpt2


def train(rank: int, path: str) -> None:
    """Steps of a GPT-2 of four layers on real processes, beside the predicted one."""
    given, batch = gpt2(layers=4, hidden=256, heads=4, vocab=512, sequence=128, batch=16)
    model = autopar.parallelize(given, 4, plan=Manual(dp=2, tp=2))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)

    def step() -> None:
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    with model.record() as record:
        for _ in range(3):
            step()
    record.to_html(path)
