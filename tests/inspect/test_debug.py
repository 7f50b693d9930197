"""``fuselab debug``: accesses, stops, prints, the picture, the comparison and the refusals."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from fuselab import errors
from fuselab.cli.main import run
from fuselab.inspect.assembly.architectures import architecture
from fuselab.inspect.assembly.subjects import Request, compiled
from fuselab.inspect.debugger.offsets import grouped, runs
from fuselab.inspect.debugger.session import grid_of
from fuselab.report.debug_text import _offsets, debug_text
from fuselab.runtime import interpreter

CLONE = Path(__file__).resolve().parents[2]
ADD = str(CLONE / "examples" / "bare_kernel.py")
TARGETS = Path(__file__).parent / "targets"
FAULTY = str(TARGETS / "faulty_kernels.py")
LINES = {
    text.split("(")[0].strip(): number
    for number, text in enumerate(Path(ADD).read_text().splitlines(), 1)
}
SUM_LINE, STORE_LINE = LINES["total = tl.load"], LINES["tl.store"]


def seen(spec: str, **fields: Any) -> dict[str, Any]:
    """Return what a session sees; the tests of this file share one process of the interpreter."""
    answer = "fuselab.inspect.debugger.child:answered"
    found: dict[str, Any] = json.loads(json.dumps(interpreter.run(answer, spec=spec, **fields)))
    return found


def test_every_access_of_every_program_is_seen() -> None:
    facts = seen(ADD, against="x + y")
    (kernel,) = facts["kernels"]
    assert (kernel["name"], kernel["grid"], kernel["file"]) == ("add_kernel", [2], ADD)
    assert kernel["tensors"]["x"] == {"shape": [7], "dtype": "float32", "span": 7}
    found = [
        (one["program"][0], one["line"], one["kind"], one["tensor"], one["offsets"], one["cut"])
        for one in facts["accesses"]
    ]
    assert found == [
        (0, SUM_LINE, "load", "x", [0, 1, 2, 3], []),
        (0, SUM_LINE, "load", "y", [0, 1, 2, 3], []),
        (0, STORE_LINE, "store", "out", [0, 1, 2, 3], []),
        (1, SUM_LINE, "load", "x", [4, 5, 6], [7]),
        (1, SUM_LINE, "load", "y", [4, 5, 6], [7]),
        (1, STORE_LINE, "store", "out", [4, 5, 6], [7]),
    ]
    (compared,) = facts["against"]
    assert compared["within"] and compared["difference"] == 0 and compared["numel"] == 7
    text = debug_text(facts)
    assert "program 1: 4..6; the mask cuts 7" in text
    assert max(map(len, text.splitlines())) <= 80


def test_only_the_programs_that_were_asked_for() -> None:
    facts = seen(ADD, programs=[[1]], names=["offsets", "total"])
    assert {one["program"][0] for one in facts["accesses"]} == {1}
    assert [(one["name"], one["value"]) for one in facts["printed"]] == [
        ("offsets", "[4 5 6 7]"),
        ("total", "[5. 6. 7. 0.]"),
    ]
    tiled = seen(f"{FAULTY}:tiled", programs=[[0, 1]], against="2 * torch.arange(16.0).view(4, 4)")
    assert [one["offsets"] for one in tiled["accesses"]] == [[2, 3, 6, 7], [2, 3, 6, 7]]
    assert tiled["against"][0]["within"]


def test_printing_at_a_line_shows_the_value_before_it_runs() -> None:
    facts = seen(ADD, at=STORE_LINE, names=["total"])
    assert [(one["program"][0], one["line"], one["value"]) for one in facts["printed"]] == [
        (0, STORE_LINE, "[1. 2. 3. 4.]"),
        (1, STORE_LINE, "[5. 6. 7. 0.]"),
    ]


def test_an_access_outside_the_tensor_is_found() -> None:
    facts = seen(f"{FAULTY}:unmasked")
    outside = {one.kind: one.outside for one in grouped(facts)}
    assert outside == {"load": {(1, 0, 0): [7]}, "store": {(1, 0, 0): [7]}}
    assert "OUTSIDE x, which spans 7 elements: program 1 loads 7; mask it" in debug_text(facts)


def test_elements_that_two_programs_store_and_the_largest_difference() -> None:
    facts = seen(f"{FAULTY}:overlapping", against="x")
    store = next(one for one in grouped(facts) if one.kind == "store")
    assert store.written_twice == {3: [(0, 0, 0), (1, 0, 0)]}
    assert "out[3] by programs 0 and 1" in " ".join(debug_text(facts).split())
    (compared,) = facts["against"]
    assert (compared["at"], compared["difference"], compared["kernel"]) == ([5], 5.0, 0.0)
    assert not compared["within"] and compared["different"] == 1
    assert "DIFFERENT at 1 of 7 elements" in debug_text(facts)


def test_a_bare_kernel_with_a_grid_and_an_operator(tmp_path: Path) -> None:
    file = tmp_path / "kernel_only.py"
    text = (
        Path(ADD)
        .read_text()
        .replace(
            "return [torch.arange(7.0), torch.ones(7)]",
            "return [torch.arange(7.0), torch.ones(7), torch.zeros(7), 7, 4]",
        )
    )
    file.write_text(text)
    facts = seen(f"{file}:add_kernel", grid=[2], against="x + y")
    assert facts["against"][0]["name"] == "out" and facts["against"][0]["within"]
    square = seen("square", against="input * input")
    assert square["kernels"][0]["name"] == "square" and square["against"][0]["within"]
    backward = seen("square", backward=True, case="4x4")
    assert {one["kind"] for one in backward["accesses"]} == {"load", "store"}


def test_a_kernel_that_is_tuned_automatically_takes_its_first_configuration(tmp_path: Path) -> None:
    file = tmp_path / "tuned.py"
    file.write_text(
        Path(ADD)
        .read_text()
        .replace(
            "@triton.jit",
            "@triton.autotune([triton.Config({'BLOCK': n}) for n in (2, 8)], key=['numel'])\n"
            "@triton.jit",
        )
        .replace(", BLOCK=block)", ")")
        .replace("(triton.cdiv(x.numel(), block),)", "lambda meta: (-(-7 // meta['BLOCK']),)")
    )
    facts = seen(str(file), against="x + y")
    assert facts["kernels"][0]["grid"] == [4] and facts["against"][0]["within"]
    found = compiled(Request(str(file), architecture("sm_90")))
    assert (found.kernels[0].settings["BLOCK"], found.kernels[0].grid) == (2, (4, 1, 1))


DESCRIBED = """
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor


@triton.jit
def double_kernel(x, source, y, rows, width, first, HIGH: tl.constexpr, WIDE: tl.constexpr):
    target = tl.make_tensor_descriptor(y, [rows, width], [width, 1], [HIGH, WIDE])
    row, column = tl.program_id(0) * HIGH, tl.program_id(1) * WIDE
    block = source.load([row, column])
    target.store([row, column], 2 * block)
    tl.atomic_cas(first, -1, tl.program_id(1))


def double(x):
    y, first = torch.empty_like(x), torch.full((1,), -1)
    source = TensorDescriptor.from_tensor(x, [2, 4])
    double_kernel[(2, 2)](x, source, y, 3, 8, first, HIGH=2, WIDE=4)
    return y


def get_inputs():
    return [torch.arange(24.0).view(3, 8)]
"""


def test_accesses_by_tensor_descriptors_and_compare_and_swap(tmp_path: Path) -> None:
    file = tmp_path / "described.py"
    file.write_text(DESCRIBED)
    facts = seen(str(file), against="2 * x")
    assert facts["against"][0]["within"]
    last = {one["kind"]: one for one in facts["accesses"] if one["program"] == [1, 1, 0]}
    whole, cut = [20, 21, 22, 23], [28, 29, 30, 31]  # of rows 2 and 3, of which there are 0 to 2
    assert (last["load"]["offsets"], last["load"]["cut"]) == (whole, cut)
    assert (last["store"]["tensor"], last["store"]["offsets"]) == ("y", whole)
    assert (last["atomic"]["tensor"], last["atomic"]["offsets"]) == ("first", [0])


SUMS = """
import torch
import triton
import triton.language as tl


@triton.jit
def sums_kernel(x, rows, total, width, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    found = tl.sum(tl.load(x + row * width + place, place < width, 0.0))
    tl.atomic_add(rows + row, found)
    tl.atomic_add(total, found)


def sums(x):
    rows, total = torch.zeros(x.shape[0]), torch.zeros(1)
    sums_kernel[(x.shape[0], 2)](x, rows, total, x.shape[1], BLOCK=4)
    return rows, total


def plain(x):
    return x.sum(1), x.sum()


def get_inputs():
    return [torch.ones(2, 7)]
"""


def test_each_of_several_results_is_compared_and_programs_have_the_grids_dimensions(
    tmp_path: Path,
) -> None:
    file = tmp_path / "sums.py"
    file.write_text(SUMS)
    facts = seen(str(file), against="(x.sum(1), x.sum().reshape(1) + 1)")
    assert [one["name"] for one in facts["against"]] == ["result 0", "result 1"]
    assert [one["within"] for one in facts["against"]] == [True, False]
    assert facts["against"][1]["kernel"] == 14 and facts["against"][1]["expected"] == 15
    text = debug_text(facts)
    assert "program 0,0: 0..3" in text and "program 1,1: 11..13; the mask cuts 14" in text
    assert "updates atomically rows" in text
    with pytest.raises(errors.TargetError, match="gives a tuple of 1 for 2 results"):
        seen(str(file), against="(x,)")
    with pytest.raises(errors.ArgumentError, match="--grid 4,0 runs no program; write 1 or more"):
        grid_of("4,0")
    with pytest.raises(errors.ArgumentError, match="--grid is for a kernel alone"):
        seen(str(file), grid=[2])
    with pytest.raises(errors.ArgumentError, match="--backward is for an operator"):
        seen(str(file), backward=True)


BFLOAT16 = """
import torch
import triton
import triton.language as tl

@triton.jit
def pointwise(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n)
    y = tl.where(x < 0.5, x * 2.5 + x, -x) + i.to(tl.bfloat16)
    tl.store(out_ptr + i, tl.maximum(y, 0.25), mask=i < n)

@triton.jit
def product(x_ptr, out_ptr, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    x = tl.load(x_ptr + i[:, None] * SIZE + i[None, :])
    tl.store(out_ptr + i[:, None] * SIZE + i[None, :], tl.dot(x, x))

def mixed(x):
    out = torch.empty_like(x)
    pointwise[(1,)](x, out, x.numel(), BLOCK=16)
    square = x.new_ones(16, 16) * 1.5
    twice = torch.empty(16, 16)
    product[(1,)](square, twice, SIZE=16)
    return out, twice

def get_inputs():
    return [torch.arange(13).div(4).sub(1.5).bfloat16()]
"""


def test_kernels_compute_in_bfloat16(tmp_path: Path, capfd) -> None:
    """The interpreter keeps bfloat16 as 16-bit integers; every number here is exact in it."""
    (tmp_path / "kernels.py").write_text(BFLOAT16)
    pointwise = "torch.where(x < 0.5, x * 3.5, -x).add(torch.arange(13)).clamp_min(0.25)"
    expected = f"({pointwise}, torch.full((16, 16), 36.0))"
    assert run(["debug", f"{tmp_path / 'kernels.py'}:mixed", "--against", expected]) == 0
    assert capfd.readouterr().out.count("largest difference 0 ") == 2


def test_bfloat16_is_printed_as_numbers_and_only_the_kernels_variables(
    tmp_path: Path, capfd
) -> None:
    (tmp_path / "kernels.py").write_text(BFLOAT16)
    assert run(["debug", f"{tmp_path / 'kernels.py'}:mixed", "--print", "x"]) == 0
    printed = capfd.readouterr().out
    assert "x = [-1.5  -1.25 -1.   -0.75" in printed
    assert "def mixed(x)" not in printed  # the function that launches has an x too


def test_one_program_is_no_programs() -> None:
    facts = {"against": [], "left_out": 0, "accesses": []}
    kernel = {"name": "rows", "grid": [1], "tensors": {}}
    assert debug_text(facts | {"kernels": [kernel]}).startswith("rows, 1 program:")
    assert debug_text(facts | {"kernels": [kernel | {"grid": [2]}]}).startswith("rows, 2 programs:")


def test_runs_of_offsets() -> None:
    assert _offsets(range(0, 10, 2)).endswith(" and 1 run more")
    assert _offsets(range(0, 12, 2)).endswith(" and 2 runs more")
    assert runs([3, 1, 2, 8, 8]) == [(1, 3), (8, 8)] and runs([]) == []


@pytest.mark.parametrize(
    ("spec", "fields", "error", "words"),
    [
        ("nope", {}, errors.UnknownNameError, "unknown operator 'nope'"),
        ("nope.py", {}, errors.MissingTargetError, "nope.py: no such file"),
        ("x.cu", {}, errors.TargetError, "x.cu is no Python file"),
        (ADD, {"at": 3}, errors.ArgumentError, "--at 3 is no line of a kernel that runs"),
        (ADD, {"names": ["gone"]}, errors.ArgumentError, "no such variable in add_kernel"),
        (
            ADD,
            {"programs": [[5]]},
            errors.ArgumentError,
            "outside the grid of 2; programs count from 0, so that the last is 1",
        ),
        (ADD, {"against": "x + z"}, errors.TargetError, "name 'z' is not defined"),
        (ADD, {"against": "x[:3]"}, errors.TargetError, "has shape (3,)"),
        (ADD, {"against": "7"}, errors.TargetError, "gives a int, no tensor"),
        (ADD, {"case": "4x4"}, errors.ArgumentError, "are for an operator"),
        (f"{ADD}:gone", {}, errors.TargetError, "has no 'gone'"),
        (f"{ADD}:add_kernel", {}, errors.ArgumentError, "--grid 4"),
        (
            f"{ADD}:add_kernel",
            {"grid": [2]},
            errors.TargetError,
            "add_kernel(x, y, out, numel, BLOCK): without out, numel, BLOCK. Return those, or name",
        ),
        (FAULTY, {}, errors.TargetError, "name one"),
        (f"{FAULTY}:raising", {}, errors.TargetError, "raising_kernel raised"),
        (str(TARGETS / "linear_relu.py"), {}, errors.TargetError, "no @triton.jit kernel"),
        (str(TARGETS / "sins.py"), {}, errors.TargetError, "no @triton.jit kernel"),
        ("square", {"implementation": "metal"}, errors.UnknownNameError, "'metal'"),
        ("square", {"case": "17"}, errors.UnknownNameError, "unknown case '17'"),
    ],
)
def test_refusals_say_what_to_do(
    spec: str, fields: dict, error: type[Exception], words: str
) -> None:
    with pytest.raises(error) as raised:
        seen(spec, **fields)
    assert words in str(raised.value)


def test_a_kernel_that_raises_names_the_line() -> None:
    with pytest.raises(errors.TargetError) as raised:
        seen(f"{FAULTY}:raising")
    line = next(
        number
        for number, text in enumerate(Path(FAULTY).read_text().splitlines(), 1)
        if "values + tl.arange" in text
    )
    assert f"on line {line} of {FAULTY}" in str(raised.value)


# --- from the command line: a process of its own -------------------------------------------------


def test_the_verb_draws_compares_and_writes_json(tmp_path: Path, capfd) -> None:
    picture, file = tmp_path / "add.svg", tmp_path / "debug.json"
    call = ["debug", ADD, "--against", "x - y", "--picture", str(picture), "--json", str(file)]
    assert run(call) == 1  # the answer is no
    text = capfd.readouterr().out
    assert "the result against x - y: DIFFERENT at 7 of 7 elements" in text
    assert "TRITON_INTERPRET" not in os.environ
    facts = json.loads(file.read_text())
    assert (facts["schema"], facts["verb"], len(facts["accesses"])) == (1, "debug", 6)
    drawn = picture.read_text()
    assert drawn.count("line 20: loads") == 2 and "hatched is cut by the mask" in drawn


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--program", "one"], "--program one: write the program's id"),
        (["--grid", "0.5"], "--grid 0.5: write the number of programs"),
        (["--picture", "x.txt"], "a plot is written as"),
        (["--picture", "/nowhere/x.png"], "cannot write /nowhere/x.png"),
        (["--at", "3"], "--at 3 is no line of a kernel that runs"),
    ],
)
def test_mistakes_are_one_sentence_and_status_2(arguments, words, capfd) -> None:
    assert run(["debug", ADD, *arguments]) == 2
    error = capfd.readouterr().err
    assert words in error and error.startswith("fuselab: ") and error.count("\n") == 1


def test_a_picture_that_cannot_be_written_is_one_sentence(capsys):
    bare = Path(__file__).resolve().parents[2] / "examples" / "bare_kernel.py"
    assert run(["debug", str(bare), "--picture", "/proc/picture.png"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("fuselab: cannot write /proc/picture.png") and said.count("\n") == 1
