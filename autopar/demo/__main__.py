"""``python -m autopar.demo`` starts the processes, and is what each of them runs."""

import sys

from autopar.demo.local import RANKS, check_installed, is_started, start_module
from autopar.demo.run import main

if __name__ == "__main__":
    check_installed()
    sys.exit(main(sys.argv[1:]) if is_started() else start_module("autopar.demo", RANKS, sys.argv[1:]))
