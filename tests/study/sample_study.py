"""A study made by hand, every field filled, with a user's text that would break a careless page."""

from __future__ import annotations

from dataclasses import replace

from fuselab.study.conclude import conclude
from fuselab.study.facts import (
    Argument,
    Bench,
    Check,
    Compiler,
    Kernel,
    Lead,
    Limit,
    Record,
    Replaced,
    Study,
    Subject,
    Way,
)

HOSTILE = "<script>alert(1)</script>"
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
WAYS = (
    Way("eager", "eager", 41230.0, 40110.0, 43020.0, 1.0, None, 0.3158, 97_910_784),
    Way("fused", "fuselab.fuse", 38840.0, 38020.0, 39410.0, 1.062, "FASTER", 0.3352, 97_910_784, 9.2),
    Way("compiled", "torch.compile", 19870.0, 19400.0, 20350.0, 2.075, "FASTER", 0.6553, 48_900_000, 14.31),
    Way("compiled_fused", "torch.compile of fused", 18960.0, 18400.0, 19350.0, 2.175, "FASTER", 0.6867, 48_900_000, 11.08),
)  # fmt: skip


def sample_study(name: str = "dlrm") -> Study:
    """A study of a made-up run; ``name`` is the target's."""
    study = Study(
        subject=Subject(
            name=name,
            spec="dlrm",
            file="dlrm.py",
            data="rows.tsv",
            phase="forward and backward",
            parameters=8_450_625,
            arguments=(
                Argument("dense", "64, 13", "float32"),
                Argument("sparse", "64, 26", "int64"),
            ),
        ),
        environment=ENVIRONMENT,
        ways=WAYS,
        limit=Limit(13020.0, "arithmetic", 25_312_000, 764_411_904, 36.41, 0.05871, "fp32"),
        profile={
            "name": name,
            "device": "cpu",
            "steps": 3,
            "step_us": 43120.0,
            "split": {
                "compute_us": 15210.0,
                "memory_us": 22870.0,
                "overhead_us": 4980.0,
                "data_us": 60.0,
            },
            "lines": [
                {"name": "dlrm.py:118", "text": "return (row.unsqueeze(2) * row.unsqueeze(1)).flatten(1)", "calls": 2.0, "us": 21840.0, "share": 0.5065},
                {"name": "dlrm.py:97", "text": "return self.prediction_mlp(self.interact(vectors))", "calls": 4.0, "us": 15210.0, "share": 0.3527},
                {"name": "dlrm.py:102", "text": f"table((sparse[:, column] + 1) % size)  # {HOSTILE}", "calls": 104.0, "us": 2311.0, "share": 0.0536},
            ],
            "operators": [
                {"name": f"aten::op{number}", "shapes": ["64x432x1 64x1x432"], "calls": number + 0.5, "us": 21840.0 / 2**number, "share": 0.5065 / 2**number}
                for number in range(20)
            ],
        },
        leads=(
            Lead("A chain of 3 memory-bound operators could be one kernel", "Each writes its result to memory and the next reads it back; one kernel reads and writes once.", "dlrm.py:118", "return (row.unsqueeze(2) * row.unsqueeze(1)).flatten(1)", 14210.0, 0.3295, "compiled", "torch.compile fuses it: triton_poi_fused_mul_0 computes unsqueeze, mul, view."),
            Lead("104 small operators from one line", "Each costs more to start than to run: hash all columns at once.", "dlrm.py:102", f"table((sparse[:, column] + 1) % size)  # {HOSTILE}", 1911.0, 0.0443, "open", "Left as it is: no operator of the library computes it."),
            Lead("Bias and activation as two passes", "bias_activation does both in one.", "dlrm.py:21", "layers += [nn.Linear(inputs, outputs), nn.ReLU()]", 311.0, 0.0072, "replaced", "Replaced by bias_activation (cpp): 1.310× as fast there."),
        ),
        compiler=Compiler(
            graphs=1,
            breaks=(),
            kernels=(
                Kernel("cpp_fused_addmm_relu_0", "generated", "relu, addmm", "dlrm.py:21", 1_664_000, 82.1, 20.27, 0.5567),
                Kernel("extern_kernels.mm", "library", "mm", "dlrm.py:97", 71_663_616, 12110.0, 5.918, None),
                Kernel("cpp_fused_mul_1", "generated", "unsqueeze, mul", "dlrm.py:118", 47_886_336, 3320.0, 14.42, 0.3961),
            ),
        ),
        replaced=(
            Replaced("bias_activation", "dense_mlp", "add → relu", "dlrm.py:21", "kept", "1.31x faster", "cpp", 21.3, 16.26, 1.31),
            Replaced("bias_activation", "prediction_mlp", "add → relu", "dlrm.py:21", "not faster", "measured SAME 1.003x (0.991 to 1.012)", "cpp", 20140.0, 20080.0, 1.003),
        ),
        left=(f"{HOSTILE}: it has hooks",),
        proof="Outputs and gradients of the whole model proved against float64.",
        checks=(
            Check("bias_activation", "cpp", "float32", "cpu", "PASS", 214, 0.5, 0.5, None),
            Check("bias_activation", "triton", "bfloat16", "interpreter", "NOT JUDGED", 0, None, None, "its stores truncate"),
        ),
        benches=(
            Bench("bias_activation", "dense_mlp 64x32", "forward", "float32", 16512, 4096, 1.021, (
                Record("eager", False, 8.11, 2.036, 0.1259, 1.0, None, None),
                Record("torch.compile", False, 12.3, 1.342, 0.083, 0.6593, "SLOWER", None),
                Record("cpp", True, 3.02, 5.468, 0.3381, 2.685, "FASTER", None),
                Record("cuda", True, None, None, None, None, None, "runs on a GPU"),
            )),
        ),
        seconds=104.2,
    )  # fmt: skip
    return replace(study, headline=conclude(study))


if __name__ == "__main__":
    import sys

    from fuselab.report.html import study_page
    from fuselab.report.result import SCHEMA

    sys.stdout.write(study_page({"schema": SCHEMA, "verb": "study", **sample_study().describe()}))
