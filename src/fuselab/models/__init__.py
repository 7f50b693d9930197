"""The case studies' models, in plain PyTorch."""

# Names on the command line, each with the model's place as a TARGET.
BUILT_IN = {
    "dlrm": "fuselab.models.dlrm:Dlrm",
    "dlrm-dot": "fuselab.models.dlrm_dot:Dlrm",
}
