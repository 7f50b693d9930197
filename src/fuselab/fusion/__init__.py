"""Put fused operators into a model: find chains, replace them, prove them, keep what is faster.

The package knows no operator: everything it replaces, it reads from ``FusedOp.rewrites``.
"""
