"""The case studies' models, in plain PyTorch."""

# A built-in TARGET by name: "module:class". The module offers get_inputs() and get_init_inputs().
BUILT_IN: dict[str, str] = {}
