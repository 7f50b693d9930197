"""The version of the JSON that the verbs write; see docs/contract.md."""

# Raised when a key changes its meaning or is removed, not for a new key.
SCHEMA = 1
