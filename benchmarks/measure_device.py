"""Measures one device and writes its profile: ``python benchmarks/measure_device.py --out h200.json``.

What is printed last is what the shipped ``autopar/cost/data/*.json`` hold under ``device`` for measured machines.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

import torch

from autopar.cost.measure_device import measure_device


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    profile = measure_device(torch.device(arguments.device), report=print)
    arguments.out.write_text(json.dumps(asdict(profile), indent=1) + "\n")
    print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
