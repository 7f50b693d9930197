"""fuselab: find slow PyTorch operators, see what the compiler does, own, prove and use fused kernels."""
