"""`python -m foresight` is the command `foresight`."""

from __future__ import annotations

import sys

from foresight.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
