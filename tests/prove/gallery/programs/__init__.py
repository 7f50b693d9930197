"""Triton kernels whose programs depend on their order, which the interpreter does not show."""
