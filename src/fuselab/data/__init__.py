"""Criteo's layout: read it as it is, make more of it."""
