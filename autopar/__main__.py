"""``python -m autopar`` is ``autopar``."""

from autopar.cli import main

if __name__ == "__main__":
    main()
