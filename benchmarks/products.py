"""Times the three products of a linear layer by MKL (what `aten` calls) and by oneDNN, each in turn, in all processes at once.

    python benchmarks/products.py [--processes 2]

Per shape, rounds of all products in turn; median over rounds of flops per second of processor time of one process, one thread each.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.multiprocessing as mp

from autopar.ops import onednn

SMALL = ((64, 192, 768), (128, 192, 576), (128, 192, 768))
SHAPES = SMALL + tuple((rows, *sides) for rows in (256, 512, 2048) for sides in ((512, 512), (512, 2048), (2048, 512), (512, 4096)))
"""Rows, inputs and outputs of a layer."""
ROUNDS = 7
TURN_S = 0.1


def products(rows: int, inputs: int, outputs: int) -> dict[str, tuple[Callable[[], object], Callable[[], object]]]:
    """What a layer computes, by MKL and by oneDNN; w is outputs x inputs, as `torch.nn.Linear` has it."""
    x, w, b, g = torch.randn(rows, inputs), torch.randn(outputs, inputs), torch.randn(outputs), torch.randn(rows, outputs)
    return {
        "x w' + b": (lambda: torch.addmm(b, x, w.t()), lambda: onednn.linear(x, w, b)),
        "g w": (lambda: torch.mm(g, w), lambda: onednn.linear(g, w.t())),
        "g' x": (lambda: torch.mm(g.t(), x), lambda: onednn.linear(g.t(), x.t())),
    }


def processor_s(run: Callable[[], object]) -> float:
    """Processor seconds of one call."""
    run()
    start_s, calls = time.process_time(), 0
    while time.process_time() - start_s < TURN_S:
        run()
        calls += 1
    return (time.process_time() - start_s) / calls


def compare(prints: bool) -> None:
    """Time all shapes; with ``prints`` print them, the other processes only work."""
    if prints:
        print("| rows | in | out | " + " | ".join(f"{name}: MKL | oneDNN | ratio" for name in products(1, 1, 1)) + " |")
        print("|" + "---:|" * 12)
    for shape in SHAPES:
        cells = []
        for pair in products(*shape).values():
            rounds = [tuple(map(processor_s, pair)) for _ in range(ROUNDS)]
            mkl_s, onednn_s = (statistics.median(times) for times in zip(*rounds, strict=True))
            flops = 2.0 * shape[0] * shape[1] * shape[2]
            ratio = statistics.median(first / second for first, second in rounds)
            cells += [f"{flops / mkl_s / 1e9:.0f}", f"{flops / onednn_s / 1e9:.0f}", f"{ratio:.2f}"]
        if prints:
            print("| " + " | ".join([*map(str, shape), *cells]) + " |", flush=True)


def work(index: int) -> None:
    """One process of several."""
    torch.set_num_threads(1)
    compare(index == 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2, help="how many work at once (default: %(default)s)")
    mp.spawn(work, nprocs=parser.parse_args().processes)


if __name__ == "__main__":
    main()
