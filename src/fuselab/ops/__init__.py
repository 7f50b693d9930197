"""The library: one kernel package per operator."""
