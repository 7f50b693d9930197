"""Put fused operators into a model: find chains, replace them, prove them, keep what is faster.

The package contains no operator's name: it reads all replacements from ``FusedOp.rewrites``.
"""
