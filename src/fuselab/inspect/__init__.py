"""Targets, profile, findings, explain."""
