"""How many times as long ops of a transformer take beside a collective, by the SMs that it holds and the bytes that it copies.

    python benchmarks/beside_collectives.py

For one CUDA device, by the kernel of `paced`. Ops are those of a layer of width 5120 with 4,096 tokens in bfloat16. 1 over the last row is
what links call their *overlap*.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
import torch.nn.functional as F
from paced import paced

WIDTH, HEADS, TOKENS, SEQUENCE = 5120, 40, 4096, 2048
BESIDE = ((4, 0.0), (8, 0.0), (16, 0.0), (24, 0.0), (32, 0.0), (8, 120e9), (24, 360e9), (0, 0.0))
"""SMs that are held, and bytes/s that these copy; last nothing again."""
HOLD_S, BURST_S, TURNS = 0.03, 0.012, 4
AHEAD_CYCLES, REST_CYCLES = 2_000_000, 20_000_000
"""In which what is timed is enqueued, and the device cools."""


def ops(device: torch.device) -> dict[str, Callable[[], object]]:
    """Calls by name."""

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.bfloat16, device=device)

    x, wide, heads, up, down = (
        random(*shape) for shape in ((TOKENS, WIDTH), (TOKENS, 4 * WIDTH), (3 * WIDTH, WIDTH), (4 * WIDTH, WIDTH), (WIDTH, 4 * WIDTH))
    )
    shape = (TOKENS // SEQUENCE, HEADS, SEQUENCE, WIDTH // HEADS)
    attended = [random(*shape).requires_grad_() for _ in range(3)]
    result = F.scaled_dot_product_attention(*attended, is_causal=True)
    grad, norm = torch.randn_like(result), torch.nn.LayerNorm(WIDTH, device=device, dtype=torch.bfloat16)

    def layer() -> None:
        F.linear(x, heads)
        F.scaled_dot_product_attention(*(value.detach() for value in attended), is_causal=True)
        F.linear(F.gelu(F.linear(norm(x), up)), down)

    return {
        f"product {TOKENS} x {WIDTH} x {4 * WIDTH}": lambda: F.linear(x, up),
        f"product {TOKENS} x {4 * WIDTH} x {WIDTH}": lambda: F.linear(wide, down),
        "attention, forward": lambda: F.scaled_dot_product_attention(*(value.detach() for value in attended), is_causal=True),
        "attention, backward": lambda: torch.autograd.grad(result, attended, grad, retain_graph=True),
        "gelu": lambda: F.gelu(wide),
        "layer norm": lambda: norm(x),
        "layer": layer,
    }


def timed(run: Callable[[], object], calls: int, channels: int, rate: float, side: torch.cuda.Stream) -> float:
    """Seconds of a call beside the other kernel, which is there before."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(REST_CYCLES)
    torch.cuda.synchronize()
    if channels:
        source, target = (torch.zeros(max(16, int(num_bytes)), dtype=torch.uint8, device="cuda") for num_bytes in (2**27, rate * HOLD_S))
        torch.cuda.synchronize()
        paced(target, source, HOLD_S, channels, side)
    torch.cuda._sleep(AHEAD_CYCLES)
    start.record()
    for _ in range(calls):
        run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e-3 / calls


def main() -> None:
    side = torch.cuda.Stream()
    heads = (f"{channels} SMs{f', {rate / 1e9:.0f} GB/s' if rate else ''}" for channels, rate in BESIDE)
    print(f"| {torch.cuda.get_device_name()} | alone | {' | '.join(heads)} |\n|---|--:|{'--:|' * len(BESIDE)}")
    for name, run in ops(torch.device("cuda")).items():
        with torch.set_grad_enabled("backward" in name):
            alone_s = min(timed(run, 3, 0, 0.0, side) for _ in range(TURNS))
            calls = max(2, int(BURST_S / alone_s))
            beside_s = (statistics.median(timed(run, calls, *beside, side) for _ in range(TURNS)) for beside in BESIDE)
            print(f"| {name} | {alone_s * 1e6:.1f} us | {' | '.join(f'{time_s / alone_s:.2f}' for time_s in beside_s)} |", flush=True)


if __name__ == "__main__":
    main()
