"""A study made by hand, every field filled, with a user's text that would break a careless page.

Run as a script it writes the page to stdout, to be looked at.
"""

from __future__ import annotations

import sys
from dataclasses import replace

from fuselab.report.html import study_page
from fuselab.study import facts
from fuselab.study.conclude import conclude

HOSTILE = "<script>alert(1)</script>"
LOOP = f"table((sparse[:, column] + 1) % size)  # {HOSTILE}"
OUTER = "return (row.unsqueeze(2) * row.unsqueeze(1)).flatten(1)"
ENVIRONMENT = {
    "date": "2026-11-21T09:00:00+00:00",
    "device": "cpu",
    "device_name": "Intel(R) Xeon(R) Processor",
    "cuda_capability": None,
    "device_memory_bytes": None,
    "driver": None,
    "cpu": "Intel(R) Xeon(R) Processor",
    "cores": 2,
    "threads": 2,
    "platform": "Linux",
    "python": "3.11.7",
    "torch": "2.13.0+cpu",
    "triton": "3.7.1",
    "cuda": None,
    "fuselab": "0.1.0",
}


def way(name: str, title: str, us: float, speedup: float, outcome: str | None) -> facts.Way:
    """A measured way, its limit 13,020 us."""
    return facts.Way(
        name=name,
        title=title,
        us=us,
        low_us=us - 410.0,
        high_us=us + 520.0,
        speedup=speedup,
        outcome=outcome,
        limit_share=float(f"{13020.0 / us:.4g}"),
        peak_bytes=48_900_000,
        prepare_s=14.31,
    )


WAYS = (
    way("eager", "eager", 41230.0, 1.0, None),
    way("fused", "fuselab.fuse", 38840.0, 1.062, "FASTER"),
    way("compiled", "torch.compile", 19870.0, 2.075, "FASTER"),
    way("compiled_fused", "torch.compile of fused", 18960.0, 2.175, "FASTER"),
)
SUBJECT = facts.Subject(
    name="dlrm",
    spec="dlrm",
    file="dlrm.py",
    data="rows.tsv",
    phase="forward",
    parameters=8_450_625,
    arguments=(
        facts.Argument("dense", "64, 13", "float32"),
        facts.Argument("sparse", "64, 26", "int64"),
    ),
)
PROFILE = {
    "name": "dlrm",
    "device": "cpu",
    "steps": 3,
    "step_us": 43120.0,
    "split": {"compute_us": 15210.0, "memory_us": 22870.0, "overhead_us": 4980.0, "data_us": 60.0},
    "lines": [
        {"name": "dlrm.py:116", "text": OUTER, "calls": 2.0, "us": 21840.0, "share": 0.5065},
        {"name": "dlrm.py:101", "text": LOOP, "calls": 104.0, "us": 2311.0, "share": 0.0536},
    ],
    "operators": [
        {
            "name": f"aten::op{number}",
            "shapes": ["64x432x1 64x1x432"],
            "calls": number + 0.5,
            "us": float(f"{21840.0 / 2**number:.4g}"),
            "share": float(f"{0.5065 / 2**number:.4g}"),
        }
        for number in range(20)
    ],
}
LEADS = (
    facts.Lead(
        "chain",
        "3 operators could be one kernel",
        "Each writes its result to memory, and the next reads it back.",
        "dlrm.py:116",
        OUTER,
        14210.0,
        0.3295,
        "compiled",
        "torch.compile fuses this line: it becomes part of cpp_fused_mul_1.",
    ),
    facts.Lead(
        "repeated small operator",
        "104 small operators from one line",
        "Batch them into one call.",
        "dlrm.py:101",
        LOOP,
        1911.0,
        0.0443,
        "open",
        "Left as it is: no operator computes this, nor does a fused kernel.",
    ),
    facts.Lead(
        "chain",
        "bias and activation in two passes",
        "bias_activation does both in one.",
        "dlrm.py:21",
        "",
        311.0,
        0.007213,
        "replaced",
        "Replaced by bias_activation: 1.310× as fast there.",
    ),
)
COMPILER = facts.Compiler(
    graphs=1,
    cold_s=19.2,
    warm_s=3.104,
    breaks=(f"dlrm.py:96: {HOSTILE}",),
    kernels=(
        facts.Kernel(
            "mm", "library call", "inference", "mm", "dlrm.py:96", 71_663_616, 12110.0, 5.918, None
        ),
        facts.Kernel(
            "cpp_fused_mul_1",
            "generated",
            "inference",
            "mul",
            "dlrm.py:116",
            47_886_336,
            3320.0,
            14.42,
            0.3961,
        ),
    ),
)
REPLACED = (
    facts.Replaced(
        "bias_activation",
        "dense_mlp",
        "add → relu",
        "dlrm.py:21",
        "kept",
        "1.31x faster",
        "cpp",
        21.3,
        16.26,
        1.31,
    ),
    facts.Replaced(
        "bias_activation",
        "prediction_mlp",
        "add → relu",
        "dlrm.py:21",
        "not faster",
        "measured SAME 1.003x (0.991 to 1.012)",
        "cpp",
        20140.0,
        20080.0,
        1.003,
    ),
    facts.Replaced(
        "mul_gelu_layer_norm_0a1b2c3d4e",
        "",
        "mul → gelu → layer_norm",
        "dlrm.py:24",
        "kept",
        "1.40x faster",
        "cpp",
        420.0,
        300.0,
        1.4,
        "kernels/mul_gelu_layer_norm_0a1b2c3d4e",
    ),
)
CHECKS = (
    facts.Check("bias_activation", "cpp", "float32", "cpu", "PASS", 214, 0.5, 0.5, None),
    facts.Check(
        "softmax", "triton", "bfloat16", "interpreter", "NOT JUDGED", 0, None, None, "it truncates"
    ),
)
BENCHES = (
    facts.Bench(
        operator="bias_activation",
        case="64x32 32",
        phase="forward",
        dtype="float32",
        bytes=16512,
        flops=4096,
        ceiling_us=1.021,
        records=(
            facts.Record("eager", False, 8.11, 2.036, 0.1259, 1.0, None, None),
            facts.Record("torch.compile", False, 12.3, 1.342, 0.083, 0.6593, "SLOWER", None),
            facts.Record("cpp", True, 3.02, 5.468, 0.3381, 2.685, "FASTER", None),
            facts.Record("cuda", True, None, None, None, None, None, "runs on a GPU"),
        ),
    ),
)


def sample_study(name: str = "dlrm") -> facts.Study:
    """A study of a made-up run; ``name`` is the target's."""
    study = facts.Study(
        subject=replace(SUBJECT, name=name),
        environment=ENVIRONMENT,
        ways=WAYS,
        limit=facts.Limit(13020.0, "arithmetic", 25_312_000, 764_411_904, 36.41, 0.05871, "fp32"),
        profile=PROFILE,
        leads=LEADS,
        compiler=COMPILER,
        replaced=REPLACED,
        left=(f"{HOSTILE}: it has hooks",),
        proof="Outputs and gradients of the whole model proved against float64.",
        checks=CHECKS,
        benches=BENCHES,
        seconds=104.2,
    )
    return replace(study, headline=conclude(study))


if __name__ == "__main__":
    sys.stdout.write(study_page({"schema": 1, "verb": "study", **sample_study().describe()}))
