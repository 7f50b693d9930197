"""Check and benchmark any FusedOp."""
