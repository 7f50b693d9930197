"""Deliberately wrong operators, one fault each, and the honest one they differ from."""
