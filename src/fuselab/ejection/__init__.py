"""Eject: a plain PyTorch function in, a package of fused kernels that the user keeps out."""
