"""Same numbers: GPT-2 and Llama, 5 AdamW steps on 4 ranks, by automatic plans and hand-written ones, against one device.

    torchrun --nproc-per-node 4 benchmarks/equality.py [--model gpt2|llama]

For each plan: the largest relative difference of the losses to plain torch on one device in float32; the largest parameter error after 5
steps against plain torch in float64, over that of plain torch in float32; the same difference when both run in float64; and the share of
all weights that a rank stores. The last lines list what a rank stores under TP4 and ZeRO-3. Exits 1 if a loss differs by more than 1e-5.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import autopar

STEPS, BATCH, SEQUENCE = 5, 8, 32
MAX_LOSS_DIFFERENCE = 1e-5


def build(name: str, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    if name == "gpt2":
        dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        gpt2 = GPT2Config(
            n_layer=4,
            n_embd=192,
            n_head=6,
            vocab_size=1003,
            n_positions=SEQUENCE,
            use_cache=False,
            bos_token_id=0,
            eos_token_id=0,
            **dropout,
        )
        return GPT2LMHeadModel(gpt2).to(dtype)
    llama = LlamaConfig(
        num_hidden_layers=4,
        hidden_size=256,
        intermediate_size=688,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=1000,
        use_cache=False,
    )
    return LlamaForCausalLM(llama).to(dtype)


def batches(vocabulary: int) -> Iterator[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        tokens, labels = torch.randint(vocabulary, (2, BATCH, SEQUENCE), generator=generator)
        yield {"input_ids": tokens, "labels": labels}


def train(model: nn.Module) -> list[float]:
    """The loop of a single-device script."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for batch in batches(1000):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for name, p in model.named_parameters()}


def difference(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    return max(float((ours[name].double() - tensor.double()).abs().max()) for name, tensor in theirs.items())


TIGHT = 0.75
"""Second memory limit of the automatic plan, as a part of the peak of the first."""


def configurations() -> dict[str, object]:
    return {
        "auto": None,
        "auto, tight": None,
        "DP4": autopar.Manual(dp=4),
        "TP4": autopar.Manual(tp=4),
        "DP2xTP2": autopar.Manual(dp=2, tp=2),
        "ZeRO-1": autopar.Manual(dp=4, zero=1),
        "ZeRO-2": autopar.Manual(dp=4, zero=2),
        "ZeRO-3": autopar.Manual(dp=4, zero=3),
    }


def run(model_name: str, say: object) -> bool:
    """All configurations of one model; whether all losses agree."""
    assert callable(say)
    references = {dtype: build(model_name, dtype) for dtype in (torch.float32, torch.float64)}
    losses = {dtype: train(reference) for dtype, reference in references.items()}
    exact = whole(references[torch.float64])
    plain_error = difference(whole(references[torch.float32]), exact)
    say(f"{model_name}: one device, losses {', '.join(f'{loss:.6f}' for loss in losses[torch.float32])}")
    say(f"  plain torch in float32 after {STEPS} steps: parameter error {plain_error:.1e} against float64")
    say(f"  {'plan':<14}{'mesh':<14}{'loss diff':>11}{'param error':>13}{'x plain':>9}{'in float64':>12}{'stored':>8}{'predicted':>11}")
    agree = True
    peaks: dict[torch.dtype, float] = {}
    for name, config in configurations().items():
        found = {}
        for dtype in (torch.float32, torch.float64):
            limit = TIGHT * peaks[dtype] if name == "auto, tight" else None
            model = autopar.parallelize(build(model_name, dtype), 4, plan=config, memory_limit=limit)
            own = train(model)
            peaks.setdefault(dtype, model.plan.prediction.peak_memory_bytes[0])
            found[dtype] = (max(abs(a - b) / b for a, b in zip(own, losses[dtype], strict=True)), difference(whole(model), exact))
            if dtype is torch.float32:
                stored = sum(p.to_local().numel() for p in model.parameters()) / sum(p.numel() for p in model.parameters())
                plan, shapes = model.plan, {n: (tuple(p.shape), tuple(p.to_local().shape)) for n, p in model.named_parameters()}
        loss, error = found[torch.float32]
        agree &= loss <= MAX_LOSS_DIFFERENCE
        peak = f"{plan.prediction.peak_memory_bytes[0] / 2**20:.1f} MiB"
        ratio, exactly = error / plain_error, found[torch.float64][1]
        say(f"  {name:<14}{plan.mesh!s:<14}{loss:>11.1e}{error:>13.1e}{ratio:>9.2f}{exactly:>12.1e}{stored:>8.1%}{peak:>11}")
        if name in ("TP4", "ZeRO-3"):
            for parameter, (shape, local) in shapes.items():
                if ".0." in parameter or (name == "ZeRO-3" and "wte" in parameter):
                    say(f"      {parameter:<44}{shape!s:>14} -> {local!s:<14}")
    return agree


def main() -> int:
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("gpt2", "llama"), action="append")
    chosen = parser.parse_args().model or ["gpt2", "llama"]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    first = dist.get_rank() == 0

    def say(text: str) -> None:
        if first:
            print(text, flush=True)

    verdicts = [run(name, say) for name in chosen]
    dist.barrier()
    dist.destroy_process_group()
    return 0 if all(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
