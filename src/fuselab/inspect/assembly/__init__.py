"""Compilation of kernels for GPUs that are not there, and what their assembly says about them."""
