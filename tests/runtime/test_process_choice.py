"""FUSELAB_IMPLEMENTATION: one implementation for a whole process, read in processes of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from fuselab import ops
from fuselab.runtime import process_choice

# An operator whose implementations say that they ran. "narrow" supports one column alone.
PROGRAM = """
import sys
import torch
import fuselab
from fuselab.errors import UnknownNameError
from fuselab.op import Case, Cost, FusedOp, Gradient, Implementation, Inputs
from torch import Tensor
from collections.abc import Sequence

ran = []

def reference(input: Tensor) -> Tensor:
    return input * input

def gradient(needs: Sequence[bool], grad_output: Tensor, input: Tensor) -> tuple[Tensor | None]:
    return (2 * input * grad_output,)

def implementation(name, supports=lambda *args: None):
    def forward(input):
        ran.append(name)
        return input * input

    def backward(needs, grad_output, input):
        ran.append(f"{name} backward")
        return (2 * input * grad_output,)

    return Implementation("cpu", forward, backward, supports=supports)

narrow = implementation("narrow", lambda input: None if input.shape[1] == 1 else "too wide")
op = FusedOp(
    name="mine::squared",
    reference=reference,
    implementations={"first": implementation("first"), "narrow": narrow},
    cost=lambda *args: Cost(1, 1, 1),
    cases=[Case("one", lambda device, dtype, generator: Inputs((torch.ones(1, 1),)))],
    gradient=Gradient(lambda output, input: (input,), gradient),
)
squared = fuselab.operator(op)

def calls(function, input):
    ran.clear()
    leaf = input.clone().requires_grad_()
    function(leaf).sum().backward()
    assert leaf.grad.tolist() == (2 * input).tolist()
    return list(ran)

"""


def output_of(lines: str, implementation: str | None) -> list[str]:
    """Return what the program prints when ``lines`` follow it, under that variable's value."""
    environment = {**os.environ}
    environment.pop("FUSELAB_IMPLEMENTATION", None)
    if implementation is not None:
        environment["FUSELAB_IMPLEMENTATION"] = implementation
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM + lines], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


EAGER = """
for columns in (1, 2):
    print(calls(squared, torch.full((3, columns), 2.0)))
print(calls(lambda leaf: squared(leaf, implementation="first"), torch.ones(1, 1)))
"""
COMPILED = """
compiled = torch.compile(squared, backend="aot_eager", fullgraph=True)
print(calls(compiled, torch.full((3, 1), 2.0)))
"""


@pytest.mark.parametrize(
    ("value", "narrow_input", "wide_input"),
    [
        (None, ["first", "first backward"], ["first", "first backward"]),
        ("reference", [], []),
        ("narrow", ["narrow", "narrow backward"], []),
        ("triton", [], []),  # an implementation that only other operators have
    ],
)
def test_auto_takes_the_named_one_or_the_reference(
    value: str | None, narrow_input: list[str], wide_input: list[str]
) -> None:
    lines = EAGER + COMPILED if value in ("reference", "narrow") else EAGER
    eager_narrow, eager_wide, by_name, *compiled_narrow = output_of(lines, value)
    assert (eager_narrow, eager_wide) == (str(narrow_input), str(wide_input))
    assert by_name == str(["first", "first backward"])
    assert compiled_narrow == ([str(narrow_input)] if COMPILED in lines else [])


@pytest.fixture
def read_anew() -> Iterator[None]:
    process_choice._value.cache_clear()
    yield
    process_choice._value.cache_clear()


@pytest.mark.usefixtures("read_anew")
@pytest.mark.parametrize("value", ["auto", ""])
def test_values_that_leave_the_choice(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(process_choice.VARIABLE, value)
    assert process_choice.named(ops.contract("square")) is None


@pytest.mark.usefixtures("read_anew")
def test_the_variable_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(process_choice.VARIABLE, "reference")
    assert process_choice.named(ops.contract("square")) == "reference"
    monkeypatch.setenv(process_choice.VARIABLE, "triton")
    assert process_choice.named(ops.contract("square")) == "reference"


ONE_SENTENCE = """
for _ in range(2):
    try:
        squared(torch.ones(1, 1))
    except UnknownNameError as error:
        print(error.kind, error.name, "reference" in error.known, "narrow" in error.known)
        print("triton" in error.known, str(error).endswith("Did you mean 'narrow'?"))
print(squared(torch.ones(1, 1), implementation="first").item())
"""


def test_an_unknown_name_is_refused_at_the_call_and_not_at_the_import() -> None:
    sentence = ["FUSELAB_IMPLEMENTATION narow True True", "True True"]
    assert output_of(ONE_SENTENCE, "narow") == [*sentence, *sentence, "1.0"]


LIBRARY = """
from fuselab import ops
from fuselab.runtime import cpu_choice
from fuselab.runtime.dispatch import choose

args = (torch.randn(4, 64), -1, None)
print(choose(ops.contract("softmax"), args))
with cpu_choice.forced("cpp"):  # as doctor --measure times an implementation
    print(choose(ops.contract("softmax"), args))
print(torch.equal(ops.softmax(args[0]), torch.softmax(args[0], -1)))
"""


@pytest.mark.parametrize(("value", "softmax"), [("reference", "reference"), ("cpp", "cpp")])
def test_the_librarys_operators(value: str, softmax: str) -> None:
    chosen, measured, is_reference = output_of(LIBRARY, value)
    assert (chosen, measured) == (softmax, "cpp")
    assert is_reference == "True" or value == "cpp"
