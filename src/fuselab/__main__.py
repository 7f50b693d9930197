"""Run the command line as ``python -m fuselab``, also from an uninstalled source tree."""

from fuselab.cli.main import main

if __name__ == "__main__":
    main()
