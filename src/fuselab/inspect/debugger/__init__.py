"""Triton kernels run line by line on the CPU, with their tensors to look at."""
