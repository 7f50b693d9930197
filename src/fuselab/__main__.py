"""Start the command line: the console script ``fuselab``, and ``python -m fuselab``."""

from __future__ import annotations

import importlib
import sys

from fuselab.errors import MissingDependencyError


def main() -> None:
    """Run the command line; without its packages say how to get them, with exit status 2."""
    for package in ("click", "rich", "typer"):
        try:
            importlib.import_module(package)
        except ImportError:
            missing = MissingDependencyError.of_extra("the command line needs", package, "cli")
            print(f"fuselab: {missing}", file=sys.stderr)
            sys.exit(2)
    from fuselab.cli.main import main as run_command_line
    from fuselab.runtime import inductor_cache

    inductor_cache.keep_apart()
    run_command_line()


if __name__ == "__main__":
    main()
