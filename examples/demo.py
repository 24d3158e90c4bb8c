"""Plan and train a small GPT-2 on four processes of this machine, beside one device and hand-written plans: what `autopar demo` does.

    python examples/demo.py

The script is `autopar/demo/run.py`, a part of the package; the shortest that trains by a plan is `train.py` beside this file.
"""

from __future__ import annotations

import sys

from autopar.demo.local import RANKS, start_module

if __name__ == "__main__":
    sys.exit(start_module("autopar.demo", RANKS, sys.argv[1:]))
