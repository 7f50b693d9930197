"""``python -m fuselab``: the command line, also from an uninstalled source tree."""

from fuselab.cli.main import main

if __name__ == "__main__":
    main()
