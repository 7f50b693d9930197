"""Check and bench for any FusedOp."""
