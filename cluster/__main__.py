"""``python -m cluster ...``: the same as the installed command ``hsdump``."""

from __future__ import annotations

import sys

from cluster.cli import run_cli


def main() -> None:
    """Runs the command line and exits with its code: 0 complete, 1 incomplete, 2 the user's error."""
    sys.exit(run_cli(sys.argv[1:]))


if __name__ == "__main__":
    main()
