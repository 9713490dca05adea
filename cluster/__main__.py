"""``python -m cluster ...``: the same as the installed command ``hsdump``."""

from __future__ import annotations

import sys


def main() -> None:
    """Runs the command line and exits with its code: 0 complete, 1 incomplete, 2 the user's error."""
    try:
        from cluster.cli import run_cli
    except ModuleNotFoundError as error:  # `pip install hsdump` alone is the reading side
        print(
            f"hsdump: error: {error.name} isn't installed, and the command needs it: pip install 'hsdump[service]'. "
            "Reading a dump from Python doesn't",
            file=sys.stderr,
        )
        sys.exit(2)
    sys.exit(run_cli(sys.argv[1:]))


if __name__ == "__main__":
    main()
