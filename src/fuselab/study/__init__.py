"""The whole loop for one target: find, see, own, prove, use; one report."""
