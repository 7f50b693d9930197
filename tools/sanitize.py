"""Small calls of every CUDA implementation of an operator, for compute-sanitizer to watch.

    python tools/sanitize.py softmax --record calls.json
    compute-sanitizer --tool memcheck --error-exitcode 3 python tools/sanitize.py softmax
    compute-sanitizer --tool racecheck --error-exitcode 3 \\
        python tools/sanitize.py softmax --only calls.json
    compute-sanitizer --tool initcheck --error-exitcode 3 \\
        python tools/sanitize.py softmax --only calls.json --zeroed-products

The script runs the boundary cases of the operators named (of the whole library without a name),
forward and backward, on the first GPU. With ``--draws N`` it also makes N calls per implementation
and dtype on inputs that the operator draws at ``--seed``: any size, strides and offsets, and an
upstream gradient of any strides. The listed cases alone missed a kernel that read past its shared
memory at 9 vectors.

Allocations bypass PyTorch's cache, so that each tensor has its own bounds, and the memory of a
drawn one ends with its last element. The first command compiles, which takes minutes under a
sanitizer, and records the calls that launch a kernel which no earlier call launched. These are
enough for errors that do not depend on bounds.

cuBLAS's kernels for Hopper store by bulk copies, which initcheck does not see, so it reports the
kernels that read a product (``--products-alone`` shows that with PyTorch's own operators only).
Under initcheck products are therefore written to memory that holds zeros.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Any

os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"

import torch

from fuselab import ops
from fuselab.op import tensors_in
from fuselab.prove.arguments import at, mapped
from fuselab.prove.asked_calls import as_leaves, with_gradients
from fuselab.prove.draw import LAYOUTS
from fuselab.prove.held import Held, Here
from fuselab.prove.subject import Subject, Trial
from fuselab.runtime import fallback, kernel_launch, launch_recording

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_addmm_activation")
MOST_ELEMENTS = 1 << 18  # elements of a tensor; the sanitizers slow a kernel down a hundred times
MOST_DRAWN = 4096  # elements of many small calls, each with other strides
DTYPES = (torch.float32, torch.bfloat16)


def zero_products(key: str = "CUDA") -> torch.library.Library:
    """Make products write to memory that held zeros, for as long as the result is kept."""
    library = torch.library.Library("aten", "IMPL")
    for name in PRODUCTS:
        library.impl(name, partial(_into_zeros, getattr(torch.ops.aten, name).out), key)
    return library


def _into_zeros(product: Callable[..., torch.Tensor], *args: Any, **named: Any) -> torch.Tensor:
    left, right = [arg for arg in args if isinstance(arg, torch.Tensor)][-2:]
    zeros = left.new_zeros(*left.shape[:-1], right.shape[-1])
    return product(*args, **named, out=zeros)


def products_alone() -> None:
    """Run PyTorch's products and an operator that reads them, without a kernel of this project."""
    for rows, columns, depth in itertools.product((64, 256), repeat=3):
        left = torch.ones(rows, depth, device="cuda", dtype=torch.bfloat16)
        right = torch.ones(columns, depth, device="cuda", dtype=torch.bfloat16)
        torch.relu(torch.mm(left, right.t()))
    torch.cuda.synchronize()


class Launches:
    """The launches since this was made: kernels, and launches that do not name theirs."""

    def __init__(self) -> None:
        self.kernels: set[int] = set()
        self.opaque = 0
        launch, note = kernel_launch.launch_cuda, launch_recording.note_opaque_launch

        def launch_cuda(function: int, *others: Any) -> None:
            self.kernels.add(function)
            launch(function, *others)

        def note_opaque_launch(what: str) -> None:
            self.opaque += 1
            note(what)

        kernel_launch.launch_cuda = launch_cuda  # type: ignore[assignment]
        launch_recording.note_opaque_launch = note_opaque_launch

    def __len__(self) -> int:
        return len(self.kernels) + self.opaque


def run(
    name: str, launches: Launches, only: Collection[str] | None, draws: int, seed: int
) -> tuple[int, list[str]]:
    """Call every CUDA implementation of ``name`` on its boundary cases and on ``draws`` drawn ones.

    ``only`` limits the calls to those named. Returns how many calls were made, and the names of
    those with a new kernel.
    """
    op = ops.contract(name)
    device = torch.device("cuda", 0)
    calls, with_new = 0, []
    for implementation, declared in op.implementations.items():
        if declared.device != "cuda":
            continue
        for dtype in (dtype for dtype in op.dtypes if dtype in DTYPES):
            subject = Subject.here(op, implementation, device, dtype, seed, quick=True)
            for label, trial, call in (*_cases(subject), *_draws(subject, draws)):
                if only is not None and label not in only:
                    continue
                before = len(launches)
                call(subject, trial)
                calls += 1
                if len(launches) > before:
                    with_new.append(label)
    torch.cuda.synchronize()
    return calls, with_new


Call = tuple[str, Trial, Callable[[Subject, Trial], None]]


def _cases(subject: Subject) -> list[Call]:
    """Return the operator's own cases, the largest first, since these show races best."""

    def largest(trial: Trial) -> int:
        return max(tensor.numel() for tensor in tensors_in(trial.args))

    found: list[Call] = []
    for case in subject.small_cases():
        trial = subject.from_case("sanitize", case)
        if trial is not None and largest(trial) <= MOST_ELEMENTS:
            found.append((f"{_label(subject)} {case.name}", trial, call_case))
    return sorted(found, key=lambda call: -largest(call[1]))


def _draws(subject: Subject, count: int) -> Iterator[Call]:
    """Yield drawn calls; a label names the same call whatever ran before it."""
    for index in range(count):
        # Infinities take paths of a kernel that finite numbers do not.
        values = ("normal", "normal", "infinities")
        trial = subject.draw("sanitize", index, LAYOUTS, values, max_numel=MOST_DRAWN)
        if trial is not None:
            yield f"{_label(subject)} draw {subject.seed}.{index}", trial, call_drawn


def _label(subject: Subject) -> str:
    return f"{subject.op.name} {subject.implementation} {subject.dtype}"


def _held(subject: Subject) -> Held:
    """Return the operator of a subject whose ends are in this process."""
    assert isinstance(subject.candidate, Here) and isinstance(subject.candidate.held, Held)
    return subject.candidate.held


def call_case(subject: Subject, trial: Trial) -> None:
    """Call on one of the operator's own cases, with all gradients from an upstream gradient of
    ones."""
    places = subject.differentiable(trial.args)
    if subject.op.gradient is None or not places:
        subject.results(*trial.args)
        return
    leaves = as_leaves(trial.args, places)
    output = _held(subject)(*leaves)
    torch.autograd.grad(output, at(leaves, places), torch.ones_like(output), allow_unused=True)


def call_drawn(subject: Subject, trial: Trial) -> None:
    """Call on drawn inputs: all gradients and a single one, from a drawn upstream gradient."""
    args = mapped(tight, trial.args)
    places = subject.differentiable(args)
    if subject.op.gradient is None or not places:
        subject.results(*args)
        return
    upstream = tight(subject.upstream(trial))
    for wanted in (places, [trial.draw.choice(places)]):
        with_gradients(_held(subject), wanted, [*args, upstream])


def tight(value: Any) -> Any:
    """Copy a tensor to memory that ends with its last element, in the same layout; return anything
    else as it is."""
    if not isinstance(value, torch.Tensor) or value.numel() == 0:
        return value
    reach = sum(
        (size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True)
    )
    whole = torch.as_strided(value, (value.storage_offset() + reach + 1,), (1,), 0).clone()
    return torch.as_strided(whole, value.shape, value.stride(), value.storage_offset())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("operators", nargs="*", metavar="NAME")
    parser.add_argument("--record", type=Path, metavar="FILE")
    parser.add_argument("--only", type=Path, metavar="FILE")
    parser.add_argument("--draws", type=int, default=0, metavar="N")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--zeroed-products", action="store_true")
    parser.add_argument("--products-alone", action="store_true")
    options = parser.parse_args()
    only = None if options.only is None else frozenset(json.loads(options.only.read_text()))
    kept = zero_products() if options.zeroed_products else None  # noqa: F841 - while we run
    if options.products_alone:
        products_alone()
        return
    launches, recorded = Launches(), []
    with fallback.strict():
        for name in options.operators or ops.operators():
            calls, with_new = run(name, launches, only, options.draws, options.seed)
            recorded += with_new
            print(f"{name}: {calls} calls, {len(with_new)} of them with a kernel of their own")
    if options.record is not None:
        options.record.write_text(json.dumps(recorded))


if __name__ == "__main__":
    main()
