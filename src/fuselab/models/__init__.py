"""The case studies' models, in plain PyTorch."""

# Name on the command line: where the model is, as a TARGET.
BUILT_IN = {
    "dlrm": "fuselab.models.dlrm:Dlrm",
    "dlrm-dot": "fuselab.models.dlrm_dot:Dlrm",
}
