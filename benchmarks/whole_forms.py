"""Functions with matrix products in all their forms: PyTorch calls, torch.compile, operators, and
one kernel of the whole, as ``fuselab eject --whole`` writes them.

    python benchmarks/whole_forms.py --json whole_forms.json [--function swiglu ...]

Each line is a function in bfloat16, without a gradient: microseconds of device time (CUDA graphs,
cold L2, medians) of every form, and of ``function``, which is what a user calls and which takes the
faster of the last two, as timed in its first call. The file also has the largest error of PyTorch's
calls and of the one kernel against float64, over the largest value. Needs a CUDA device; takes a
minute or two.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import fuselab
from fuselab.device.environment import describe
from fuselab.report.files import write_json


def swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def block(x: Tensor, up: Tensor, ub: Tensor, down: Tensor, db: Tensor, scale: Tensor) -> Tensor:
    hidden = F.gelu(x @ up + ub)
    hidden = x + scale * (hidden @ down + db)
    return F.layer_norm(hidden, hidden.shape[-1:])


def bottom(
    x: Tensor, a: Tensor, ab: Tensor, b: Tensor, bb: Tensor, c: Tensor, cb: Tensor
) -> Tensor:
    hidden = F.relu(F.linear(x, a, ab))
    hidden = F.relu(F.linear(hidden, b, bb))
    return F.relu(F.linear(hidden, c, cb))


def low_rank(x: Tensor, a: Tensor, b: Tensor, y: Tensor) -> Tensor:
    return y + 2.0 * F.linear(F.linear(x, a), b)


def head(x: Tensor, w: Tensor, b: Tensor, v: Tensor, c: Tensor) -> Tensor:
    hidden = F.layer_norm(x, x.shape[-1:])
    return torch.sigmoid(F.linear(F.gelu(F.linear(hidden, w, b)), v, c))


# The shapes of a function's arguments; the first one's rows are those of the call.
FUNCTIONS: dict[Callable[..., Tensor], list[tuple[int, ...]]] = {
    swiglu: [(32768, 256), (1024, 256), (1024, 256), (256, 1024)],
    block: [(65536, 128), (128, 512), (512,), (512, 128), (128,), (128,)],
    bottom: [(65536, 13), (512, 13), (512,), (256, 512), (256,), (16, 256), (16,)],
    low_rank: [(32768, 768), (16, 768), (768, 16), (32768, 768)],
    head: [(131072, 128), (128, 128), (128,), (1, 128), (1,)],
}


def measured(function: Callable[..., Tensor], folder: Path) -> dict[str, Any]:
    """Return the times and errors of one function's forms."""
    name = function.__name__
    generator = torch.Generator().manual_seed(0)
    args = [
        (torch.randn(shape, generator=generator) / shape[-1] ** 0.5).to("cuda", torch.bfloat16)
        for shape in FUNCTIONS[function]
    ]
    fuselab.eject(function, *args, out=folder / name, whole=True)
    package = importlib.import_module(f"{name}.composed")
    exact = function(*(one.double() for one in args))

    def error(form: Callable[..., Tensor]) -> float:
        return float((form(*args).double() - exact).abs().max() / exact.abs().max())

    whole = getattr(package, f"{name}_whole")
    forms = {
        "eager": function,
        "compile": torch.compile(function),
        "operators": getattr(package, f"{name}_of_operators"),
        "whole": whole,
        "function": getattr(package, name),
    }
    with torch.no_grad():
        errors = {"eager": error(function), "whole": error(whole)}
        for form in forms.values():
            form(*args)  # compiles, and lets the function choose
        times = {
            kind: round(fuselab.time(form, *args, graph=True).median_us, 2)
            for kind, form in forms.items()
        }
    return {"function": name, "shapes": FUNCTIONS[function], "us": times, "error": errors}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = {one.__name__: one for one in FUNCTIONS}
    parser.add_argument("--function", action="append", choices=names)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        sys.path.insert(0, folder)
        for name in options.function or names:
            row = measured(names[name], Path(folder))
            rows.append(row)
            times = ", ".join(f"{kind} {us:.1f}" for kind, us in row["us"].items())
            print(f"{name}: {times} us", flush=True)
    if options.json is not None:
        named = [f"--function {name}" for name in options.function or ()]
        words = [*named, f"--json {options.json.name}"]
        command = f"python benchmarks/{Path(__file__).name} {' '.join(words)}"
        write_json(options.json, {"environment": describe(), "command": command, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
