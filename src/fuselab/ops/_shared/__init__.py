"""The code that several kernel packages share. Each module's first line says what it has.

A package imports from here, and from another package only to run that package's kernels.
"""
