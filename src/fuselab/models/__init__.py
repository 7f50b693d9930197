"""The case studies' models, in plain PyTorch."""
