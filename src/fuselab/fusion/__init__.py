"""Put fused operators into a model: find chains, replace, prove, keep what is faster."""
