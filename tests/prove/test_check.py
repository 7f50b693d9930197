"""``fuselab check``: a seed repeats a run, a failure repeats itself, verdicts and exit statuses."""

from __future__ import annotations

import importlib
import itertools
import json
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gallery import halves, honest, wrong
from torch import Tensor

from fuselab import ops
from fuselab.cli.main import run
from fuselab.errors import UnknownNameError
from fuselab.op import Case, FusedOp, Gradient, Inputs, tensors_in
from fuselab.prove import check_build, check_device, check_gradients, check_group, check_torch
from fuselab.prove.check import Asked, _in_lanes, check, interpreted_time
from fuselab.prove.result import Group, Verdict, group_facts, group_from_facts
from fuselab.prove.rows import Ends
from fuselab.prove.subject import Subject, Trial
from fuselab.prove.trials import (
    MOST_INTERPRETED_ROWS,
    Check,
    Outcome,
    _is_truncated,
    rows_of,
    run_check,
)
from fuselab.report.check_text import notes

EXAMPLES = Path(__file__).parents[2] / "examples"
check_module = importlib.import_module("fuselab.prove.check")  # fuselab.prove.check is shadowed
rows_module = importlib.import_module("fuselab.prove.rows")
QUICK = {"cases", "shapes", "values", "layouts", "gradients"}


@pytest.fixture
def few_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    some = tuple(known for known in check_group.CHECKS if known.name in QUICK)
    monkeypatch.setattr(check_group, "CHECKS", some)


def write_honest(folder: Path, change: str = "", name: str = "honest_file") -> str:
    """The honest operator as a user's own file; ``change`` is appended to its source."""
    text = Path(honest.__file__).read_text() + f"\n{change}\nOP = make_op('{name}')\n"
    path = folder / f"{name}.py"
    path.write_text(text)
    return str(path)


def without_times(facts: dict[str, Any]) -> dict[str, Any]:
    for group in facts["groups"]:
        for result in group["results"]:
            assert result.pop("seconds") >= 0
    return facts


NO_TAIL = """
def forward(input, bias, scale):
    output = empty_output(input, bias).copy_(computed(input, bias, scale))
    output.view(-1)[output.numel() // 8 * 8 :] = 0
    return output

def make_op(name, _make=make_op):
    return _make(name, forward=forward)
"""


@pytest.mark.usefixtures("few_checks")
def test_a_seed_repeats_a_run_exactly() -> None:
    op = honest.make_op("repeats")
    first, again, other = (
        without_times(check(op, dtype=torch.float32, quick=True, seed=seed, device="cpu").facts())
        for seed in (3, 3, 4)
    )
    assert first == again
    assert first["groups"] != other["groups"]


@pytest.mark.usefixtures("few_checks")
def test_a_failure_repeats_itself_and_is_small() -> None:
    op = wrong.only_multiples_of_the_block("cpu")
    report = check(op, seed=0, dtype=torch.float32, quick=True, device="cpu")
    (failure,) = (result for result in report.results("shapes"))
    assert failure.verdict is Verdict.FAIL
    # One element is the smallest size that no block of 8 divides.
    assert failure.case[1] in ("input: float32[1] normal", "input: float32[1, 1] normal")
    assert failure.repeat_call is not None
    case = failure.repeat_call.split("case=")[1].strip("')")
    again = check(op, dtype=torch.float32, quick=True, device="cpu", case=case)
    (repeated,) = again.groups[0].results
    assert (repeated.verdict, repeated.reason) == (Verdict.FAIL, failure.reason)


def test_a_smaller_case_must_miss_the_whole_bar() -> None:
    """The search judges with few copies, and what it finds may be right by all of them."""
    op = honest.make_op("narrow")
    asked: list[tuple[int | None, int]] = []

    def trial(subject: Subject, drawn: Trial) -> Outcome:
        size = drawn.args[0].numel()
        asked.append((subject.copies, size))
        least = 100 if subject.copies is None else 1
        return Outcome(f"{size} elements" if size >= least else None)

    subject = Subject.here(op, "plain", torch.device("cpu"), torch.float32, quick=True)
    result = run_check(subject, Check("narrow", trial, quick=20))
    few = [size for copies, size in asked if copies is not None]
    assert few and min(few) == 1 and result.verdict is Verdict.FAIL
    assert int(str(result.reason).split()[0]) == min(
        size for copies, size in asked if copies is None and size >= 100
    )


def test_a_failing_case_of_the_operators_own_is_named() -> None:
    op = wrong.half_precision_inside("cpu")
    report = check(op, dtype=torch.float32, quick=True, device="cpu", case="cases@16x64")
    (failure,) = report.groups[0].failures
    assert failure.case[0] == "16x64" and "ulp where eager is off by" in str(failure.reason)


def test_results_survive_the_way_from_a_child() -> None:
    op = wrong.half_precision_inside("cpu")
    report = check(op, dtype=torch.float32, quick=True, device="cpu", case="cases@16x64")
    facts = json.loads(json.dumps(group_facts(report.groups[0])))
    assert group_from_facts(facts) == report.groups[0]


def test_an_operator_without_gradient_may_refuse_one() -> None:
    op = honest.make_op("without_gradient", gradient=None, backward=None)
    report = check(op, seed=0, dtype=torch.float32, quick=True, device="cpu")
    assert report.passed, report.failed_checks()
    (present,) = report.results("gradient present")
    assert present.verdict is Verdict.PASS and "defines no gradient" in str(present.reason)
    (gradients,) = report.results("gradients")
    assert gradients.verdict is Verdict.SKIPPED


def rounded(input: Tensor, bias: Tensor, scale: float = 1.0, narrow: bool = False) -> Tensor:
    output = honest.reference(input, bias, scale)
    return output.float() if narrow else output


def draw_rounded(draw: Any) -> Inputs:
    inputs = honest.draw(draw)
    return Inputs((*inputs.args, draw.choice([False, True])))


def rounded_op(name: str, draw: Any) -> FusedOp:
    """The honest operator, whose output is float32 where its last argument says so."""

    def forward(input: Tensor, bias: Tensor, scale: float, narrow: bool) -> Tensor:
        output = honest.forward(input, bias, scale)
        return output.float() if narrow else output

    def save(output: Tensor, input: Tensor, bias: Tensor, scale: float, narrow: bool) -> Any:
        return input, bias, scale

    return honest.make_op(
        name,
        forward=forward,
        reference=rounded,
        gradient=Gradient(save, honest.gradient_reference),
        draw=draw,
        cost=lambda input, bias, scale, narrow: honest.cost(input, bias, scale),
    )


def test_a_rounded_output_has_no_jacobian(monkeypatch: pytest.MonkeyPatch) -> None:
    """Finite differences of an output narrower than its inputs are 0 or a jump."""
    some = tuple(known for known in check_group.CHECKS if known.name == "gradcheck")
    monkeypatch.setattr(check_group, "CHECKS", some)
    report = check(rounded_op("rounded", draw_rounded), seed=0, dtype=torch.float64, device="cpu")
    (result,) = report.results("gradcheck")
    assert result.verdict is Verdict.PASS, result.reason
    assert 0 < result.trials < 12

    def all_rounded(draw: Any) -> Inputs:
        return Inputs((*honest.draw(draw).args, True))

    report = check(
        rounded_op("all_rounded", all_rounded), seed=0, dtype=torch.float64, device="cpu"
    )
    (result,) = report.results("gradcheck")
    assert result.verdict is Verdict.NOT_JUDGED and "no meaning" in str(result.reason)


def test_a_projected_jacobian_shows_a_wrong_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many inputs are judged by a random projection, which other random numbers do not see."""

    def backward(*args: Any) -> tuple[Tensor | None, ...]:
        grads = honest.backward(*args)
        return tuple(None if grad is None else grad * 1.1 for grad in grads)

    some = tuple(known for known in check_group.CHECKS if known.name == "gradcheck")
    monkeypatch.setattr(check_group, "CHECKS", some)
    monkeypatch.setattr(check_gradients, "_MOST_NUMBERS", 0)
    before = torch.get_rng_state()
    for name, passed in (("projected", True), ("projected_wrong", False)):
        op = honest.make_op(name, **({} if passed else {"backward": backward}))
        report = check(op, seed=0, dtype=torch.float64, quick=True, device="cpu")
        assert report.passed is passed
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.usefixtures("few_checks")
def test_a_row_whose_time_ends_first_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    op = honest.make_op("hurried")
    whole = check(op, seed=0, dtype=torch.float32, quick=True, device="cpu")
    assert whole.passed and not whole.cut_short and "cut short" not in str(whole)
    monkeypatch.setattr(check_module, "QUICK_LANE_S", 0.0)
    report = check(op, seed=0, dtype=torch.float32, quick=True, device="cpu")
    assert report.passed and report.cut_short and report.groups[0].cut_short
    assert report.trials < report.planned == whole.trials
    assert f"passes, cut short ({report.trials} of {report.planned} trials)" in str(report)

    target = tmp_path / "check.json"
    arguments = ["check", write_honest(tmp_path), "--quick", "--dtype", "float32"]
    arguments += ["--budget", "1e-9", "--seed", "0"]
    assert run([*arguments, "--device", "cpu", "--json", str(target)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert any(line.startswith("plain") and "PASS, cut short" in line for line in lines)
    assert lines[-1].startswith("PASS, cut short: the time of 1 of 1 rows ended first (")
    assert f"{report.trials} of {report.planned} trials" in lines[-1]
    written = json.loads(target.read_text())
    assert written["cut_short"] is True and written["groups"][0]["cut_short"] is True


def test_a_check_past_its_time_still_makes_a_quarter(monkeypatch: pytest.MonkeyPatch) -> None:
    some = [known for known in check_group.CHECKS if known.name in ("cases", "shapes", "layouts")]
    monkeypatch.setattr(check_group, "CHECKS", tuple(some))
    monkeypatch.setattr(check_group, "QUICK_BUDGET_S", 0.0)
    op, cpu = honest.make_op("late"), torch.device("cpu")
    group = check_group.run_group(Subject.here(op, "plain", cpu, torch.float16, 2, True), None)
    counted = {entry.check: (entry.trials, entry.planned) for entry in group.results}
    assert counted["shapes"] == (10, 40) and counted["layouts"] == (14, 56)
    assert counted["cases"][0] == counted["cases"][1] > 0
    assert group.planned - group.trials == 30 + 42


def test_a_call_that_raises_once_in_a_message_of_many_is_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    some = [known for known in check_group.CHECKS if known.name == "shapes"]
    monkeypatch.setattr(check_group, "CHECKS", tuple(some))
    calls = itertools.count(1)

    def forward(input: Tensor, bias: Tensor, scale: float) -> Tensor:
        if next(calls) == 30:
            raise RuntimeError("now and then")
        return honest.forward(input, bias, scale)

    op, cpu = honest.make_op("now_and_then", forward=forward), torch.device("cpu")
    group = check_group.run_group(Subject.here(op, "plain", cpu, torch.float32, 0, True), None)
    assert [entry.verdict for entry in group.results] == [Verdict.FAIL]
    assert "now and then, and not when it was called again" in str(group.results[0].reason)


@pytest.mark.usefixtures("few_checks")
def test_a_full_check_makes_all_its_trials() -> None:
    report = check(honest.make_op("whole"), seed=0, dtype=torch.float32, device="cpu")
    assert report.passed and not report.cut_short
    assert report.results("shapes")[0].trials == 200


def test_a_huge_sum_meets_the_bar_of_the_other_checks() -> None:
    """Two orders of one long sum differ by more than a fixed tolerance allows; float64 knows."""

    def sums(input: Tensor) -> Tensor:
        """Of the numbers near 1000 and of those near -1000, each alone: large, and they cancel."""
        return input.view(64, -1, 2).sum(1).sum(1, keepdim=True)

    def forward(input: Tensor, bias: Tensor, scale: float) -> Tensor:
        return sums(input.view(64, 8, -1, 2).transpose(1, 2).reshape(64, -1)) * scale + bias

    def reference(input: Tensor, bias: Tensor, scale: float = 1.0) -> Tensor:
        return sums(input) * scale + bias

    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
        input = torch.randn(64, 8000, generator=generator)
        input += torch.tensor([1000.0, -1000.0]).repeat(4000)
        return Inputs((input, torch.zeros(1)))

    case = Case("64 sums", make, frozenset({"huge"}))
    op = honest.make_op(
        "long_sum", forward=forward, reference=reference, gradient=None, cases=(case,)
    )
    subject = Subject.here(op, "plain", torch.device("cpu"), torch.float32)
    trial = subject.from_case("huge", subject.op.cases[0])
    assert trial is not None
    pieces = check_device._compare_in_pieces
    assert pieces(subject.results(*trial.args), subject.expected(*trial.args)) is not None
    outcome = check_device._huge_case(subject, trial)
    assert outcome.problem is None and 0 < outcome.share_of_bar <= 1

    def coarse(input: Tensor, bias: Tensor, scale: float) -> Tensor:
        return forward((input / 64).round() * 64, bias, scale)

    op = honest.make_op("coarse_sum", forward=coarse, reference=reference, gradient=None)
    subject = Subject.here(op, "plain", torch.device("cpu"), torch.float32)
    assert check_device._huge_case(subject, trial).problem is not None


@pytest.mark.usefixtures("few_checks")
def test_an_implementation_that_takes_few_of_the_inputs_says_so() -> None:
    def whole_blocks(input: Tensor, bias: Tensor, scale: float) -> str | None:
        return None if input.shape[-1] % 8 == 0 else "it takes whole blocks"

    op = honest.make_op("whole_blocks")
    plain = replace(op.implementations["plain"], supports=whole_blocks)
    op = replace(op, implementations={"plain": plain})
    report = check(op, seed=0, dtype=torch.float32, quick=True, device="cpu")
    (shapes,) = report.results("shapes")
    assert 0 < shapes.trials < 20 and shapes.trials + shapes.unsupported == 40
    (group,) = report.groups
    assert group.unsupported > group.trials
    said = f"plain float32 takes few of the inputs drawn: {group.trials} of "
    assert any(line.startswith(said) for line in notes(report))
    everything = check(honest.make_op("all"), seed=0, dtype=torch.float32, quick=True, device="cpu")
    assert not any("few of" in line for line in notes(everything))


@pytest.mark.usefixtures("few_checks")
def test_what_an_implementation_does_not_support_is_not_judged() -> None:
    op = honest.make_op("supports_nothing")
    plain = replace(op.implementations["plain"], supports=lambda *args: "it is unfinished")
    op = replace(op, implementations={"plain": plain})
    report = check(op, seed=0, dtype=torch.float32, quick=True, device="cpu")
    assert report.groups[0].verdict is Verdict.NOT_JUDGED
    assert report.passed and "supports no input" in str(report.groups[0].reason)


def test_dtypes_that_an_implementation_does_not_support_take_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def wide(input: Tensor, bias: Tensor, scale: float) -> str | None:
        return None if input.dtype == torch.float32 else "it is for float32"

    some = ("coverage", "cases", "shapes", "values", "gradients")
    checks = tuple(known for known in check_group.CHECKS if known.name in some)
    monkeypatch.setattr(check_group, "CHECKS", checks)
    op = honest.make_op("float32_alone")
    plain = replace(op.implementations["plain"], supports=wide)
    report = check(replace(op, implementations={"plain": plain}), seed=0, quick=True, device="cpu")
    reason = "the implementation supports no input drawn: it is for float32"
    assert notes(report) == [
        f"NOT JUDGED coverage: {reason}; declare dtypes=(torch.float32,) "
        "(plain float16 bfloat16 float64)"
    ]
    verdicts = [group.verdict for group in report.groups]
    assert verdicts == [Verdict.PASS, *[Verdict.NOT_JUDGED] * 3]
    # Where another implementation may take the other dtypes, they stay declared.
    other = replace(op.implementations["plain"], supports=None)
    op = replace(op, implementations={"plain": plain, "other": other})
    report = check(op, "plain", torch.float16, seed=0, quick=True, device="cpu")
    assert report.groups[0].reason == reason


def test_what_autocast_makes_of_inputs_is_asked_only_of_what_supports_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def cast(dtype: torch.dtype, input: Tensor, bias: Tensor, scale: float) -> tuple[Any, ...]:
        return input.to(dtype), bias.to(dtype), scale

    def float32_only(input: Tensor, bias: Tensor, scale: float) -> str | None:
        return None if input.dtype == torch.float32 else "it takes float32"

    op = honest.make_op("float32_only", autocast=cast)
    plain = replace(op.implementations["plain"], supports=float32_only)
    op = replace(op, implementations={"plain": plain})
    some = tuple(known for known in check_group.CHECKS if known.name in ("cases", "autocast"))
    monkeypatch.setattr(check_group, "CHECKS", some)
    report = check(op, seed=0, dtype=torch.float32, quick=True, device="cpu")
    assert report.passed, report.failed_checks()
    (result,) = report.results("autocast")
    assert result.verdict is Verdict.PASS and "it takes float32" in str(result.reason)


def test_an_operator_without_draw_gets_values_and_layouts_in_its_cases() -> None:
    op = replace(wrong.only_contiguous_input("cpu"), draw=None)
    report = check(op, dtype=torch.float32, quick=True, device="cpu", case="cases@8x8")
    assert report.passed
    report = check(op, dtype=torch.float32, quick=True, device="cpu", case="layouts@1.0.3.0.0")
    assert report.failed_checks() == {"layouts"}


@pytest.mark.usefixtures("few_checks")
def test_command_passes_and_writes_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = write_honest(tmp_path)
    target = tmp_path / "check.json"
    asked = ["check", spec, "--quick", "--seed", "7", "--device", "cpu", "--json", str(target)]
    status = run(asked)
    screen = capsys.readouterr()
    assert status == 0
    assert max(map(len, screen.out.splitlines())) <= 80
    assert (
        "PASS (" in screen.out and "seed 7)" in screen.out and "gallery::honest_file" in screen.err
    )
    written = json.loads(target.read_text())
    assert written["verb"] == "check" and written["passed"] is True and written["seed"] == 7
    for group in written["groups"]:
        assert 0 < group["share_of_bar"] <= 1
        assert f"{100 * group['share_of_bar']:.3g}%" in screen.out


@pytest.mark.usefixtures("few_checks")
def test_the_seed_is_drawn_and_what_the_report_says_repeats_it() -> None:
    op = wrong.only_multiples_of_the_block("cpu")
    first, second = (check(op, dtype=torch.float32, quick=True, device="cpu") for _ in range(2))
    assert first.seed != second.seed
    again = check(op, dtype=torch.float32, quick=True, seed=first.seed, device="cpu")
    cases = [[one.case for one in report.groups[0].failures] for report in (first, again)]
    assert again.seed == first.seed and cases[0] == cases[1]
    assert f"--seed {first.seed} " in first.groups[0].failures[0].repeat_command


@pytest.mark.usefixtures("few_checks")
def test_command_fails_with_the_case_and_what_repeats_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = write_honest(tmp_path, NO_TAIL, "no_tail")
    arguments = ["check", spec, "--quick", "--seed", "0", "--dtype", "float32", "--device", "cpu"]
    assert run(arguments) == 1
    out = capsys.readouterr().out
    assert "FAIL shapes: plain float32 (cpu)" in out
    assert "input: float32[1] normal" in out or "input: float32[1, 1] normal" in out
    (command,) = (
        line.strip() for line in out.splitlines() if "fuselab check" in line and "shapes@" in line
    )
    assert command.startswith(f"fuselab check {spec} --implementation plain --dtype float32")
    assert run(command.split()[1:]) == 1
    assert "FAIL shapes" in capsys.readouterr().out


RAISES = """
def forward(input, bias, scale):
    raise RuntimeError("no such instruction")

def make_op(name, _make=make_op):
    return _make(name, forward=forward)
"""


@pytest.mark.usefixtures("few_checks")
def test_an_error_that_many_checks_raise_is_shown_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = write_honest(tmp_path, RAISES, "raises")
    arguments = ["check", spec, "--quick", "--seed", "0", "--dtype", "float32", "--device", "cpu"]
    assert run(arguments) == 1
    out = capsys.readouterr().out
    assert [line for line in out.splitlines() if line.startswith("FAIL ")] == [
        "FAIL cases: plain float32 (cpu)"
    ]
    assert out.count("raised RuntimeError: no such instruction") == 1
    assert "The same error in 4 more: shapes, values, layouts, gradients." in " ".join(out.split())
    assert "FAIL: 5 checks" in out


def test_a_reference_that_wants_a_python_number_is_told_what_a_float_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def reference(input: Tensor, bias: Tensor, scale: float = 1.0) -> Tensor:
        return torch.nn.functional.silu(input * float(scale) + bias)

    compiling = tuple(known for known in check_group.CHECKS if known.name == "compile")
    monkeypatch.setattr(check_group, "CHECKS", compiling)
    op = honest.make_op("wants_a_number", reference=reference)
    report = check(op, seed=0, dtype=torch.float32, quick=True, device="cpu")
    (result,) = report.groups[0].failures
    assert "a float (scale) arrives as a 0-d tensor, in the reference" in str(result.reason)


@pytest.mark.parametrize("fixed", [False, True])
def test_as_many_graphs_as_the_reference_needs(
    fixed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch compiles a half of size 1 apart, so the reference needs two graphs for three sizes;
    an operator whose fake reads a size as a number needs three and fails."""

    def fake(input: Tensor) -> Tensor:
        return input.new_empty(int(input.shape[0]) // 2 * input.shape[1])

    compiling = tuple(known for known in check_group.CHECKS if known.name == "compile")
    monkeypatch.setattr(check_group, "CHECKS", compiling)
    sizes = ((2, 8), (6, 8), (10, 8))
    listed = [(torch.ones(size),) for size in sizes]
    monkeypatch.setattr(check_torch, "_of_one_structure", lambda *_: listed)
    op = halves.make_op(
        "halves_by_number" if fixed else "halves", **({"fake": fake} if fixed else {})
    )
    report = check(op, seed=0, dtype=torch.float32, quick=True, device="cpu")
    reasons = [str(failure.reason) for failure in report.groups[0].failures]
    assert reasons == (["3 sizes made torch.compile build 3 graphs"] if fixed else [])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nothing"], "unknown operator 'nothing'"),
        (["nothing.py"], "nothing.py: no such file"),
        (["{spec}", "--implementation", "tritn"], "unknown implementation 'tritn'; known: plain"),
        (["{spec}", "--dtype", "float23"], "unknown dtype 'float23'"),
        (["{spec}", "--dtype", "int64"], "unknown dtype 'int64'; known: "),
        (["{spec}", "--device", "gpu"], "'gpu' is no device"),
        (["{spec}", "--budget", "0"], "the budget is 0.0 s; it must be above 0"),
        (["{spec}", "--case", "shape@1"], "unknown check 'shape'"),
        (["{spec}", "--case", "values@3x257"], "'values@3x257' names no trial of 'values'"),
        (["{spec}", "--json", "{folder}/no/where.json", "--case", "cases@8x8"], "where.json"),
    ],
)
def test_wrong_calls_say_one_sentence(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = write_honest(tmp_path)
    filled = [argument.format(spec=spec, folder=tmp_path) for argument in arguments]
    assert run(["check", *filled]) == 2
    (sentence,) = [
        line for line in capsys.readouterr().err.splitlines() if line.startswith("fuselab: ")
    ]
    assert said in sentence


def test_unknown_implementation_in_python() -> None:
    with pytest.raises(UnknownNameError) as refused:
        check(honest.make_op("named"), implementation="cuda")
    assert refused.value.name == "cuda" and "plain" in refused.value.known


def test_triton_is_checked_under_the_interpreter() -> None:
    spec = str(EXAMPLES / "own_triton_op.py")
    for dtype, verdict in (
        (torch.float16, Verdict.PASS),
        (torch.bfloat16, Verdict.NOT_JUDGED),  # the interpreter's stores truncate
    ):
        lines: list[str] = []
        report = check(spec, seed=0, dtype=dtype, quick=True, device="cpu", progress=lines.append)
        assert report.passed, report.failed_checks()
        (group,) = report.groups
        assert (group.where, group.verdict) == ("interpreter", verdict)
        assert [line.split()[0] for line in lines] == ["mine::squared_relu:", "triton"]


def test_a_wrong_triton_kernel_is_caught_under_the_interpreter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = [known for known in check_group.CHECKS if known.name in ("shapes", "written")]
    monkeypatch.setattr(check_group, "CHECKS", tuple(wanted))  # each failure takes seconds
    text = (EXAMPLES / "own_triton_op.py").read_text()
    wrong_text = text.replace("inside = offsets < numel", "inside = offsets < numel - 1", 1)
    assert wrong_text != text
    path = tmp_path / "wrong_mask.py"
    path.write_text(wrong_text.replace("mine::squared_relu", "mine::wrong_mask"))
    report = check(str(path), seed=0, dtype=torch.float32, quick=True, device="cpu")
    assert {"shapes", "written"} <= report.failed_checks()
    (failure,) = report.results("shapes")
    assert failure.case[1] in ("input: float32[1] normal", "input: float32[1, 1] normal")


def test_autocast_judges_no_bfloat16_under_the_interpreter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that a right kernel passes which computes in the input's own dtype, although the
    interpreter truncates each of its steps in bfloat16."""
    wanted = [known for known in check_group.CHECKS if known.name in ("cases", "autocast")]
    monkeypatch.setattr(check_group, "CHECKS", tuple(wanted))
    text = (EXAMPLES / "own_triton_op.py").read_text()
    own_dtype = text.replace(
        "tl.load(input + offsets, inside).to(wide)",
        "(tl.load(input + offsets, inside) * 1.1 / 1.1 * 1.3 / 1.3 * 1.7 / 1.7).to(wide)",
    )
    assert own_dtype != text
    path = tmp_path / "own_dtype.py"
    path.write_text(own_dtype.replace("mine::squared_relu", "mine::own_dtype"))
    report = check(str(path), seed=0, dtype=torch.float32, quick=True, device="cpu")
    assert report.passed, report.failed_checks()
    (result,) = report.results("autocast")
    assert result.verdict is Verdict.PASS


def test_an_operator_that_no_file_holds_is_not_judged_under_the_interpreter() -> None:
    op = honest.make_op("nowhere", "cuda")
    op = replace(op, implementations={"triton": op.implementations["plain"]})
    report = check(op, seed=0, dtype=torch.float32, quick=True, device="cpu")
    assert report.groups[0].verdict is Verdict.NOT_JUDGED
    assert "cannot import it" in str(report.groups[0].reason)


def test_every_cuda_implementation_of_the_library_has_kernels_to_compile() -> None:
    """Launchers may be partials, methods, or another package's (embedding_sgd_, log_softmax)."""
    # A library's products between Triton's kernels, and another operator layer by layer.
    without = {("outer_interaction_linear", "cublas"), ("mlp", "layers")}
    found = {}
    for name in ops.operators():
        op = ops.contract(name)
        for implementation, declared in op.implementations.items():
            if declared.device == "cuda" and not implementation.startswith("triton"):
                listed = check_build._sources(op, implementation)
                if (name, implementation) in without:
                    assert not listed
                    continue
                assert listed and all(expressions for _, expressions in listed), name
                found[name] = {source.path.parent.name for source, _ in listed}
    assert found["log_softmax_"] == found["softmax"] == {"softmax"}
    assert found["embedding_adagrad_"] == {"embedding_lookup"}
    assert found["bias_activation"] == {"bias_activation"}
    assert found["outer_interaction_linear"] == {"outer_interaction_linear"}


def test_cuda_is_compiled_where_it_cannot_run() -> None:
    report = check(str(EXAMPLES / "own_cuda_op.py"), seed=0, device="cpu")
    (group,) = report.groups
    assert (group.where, group.verdict) == ("compiled", Verdict.NOT_JUDGED)
    (build,) = report.results("build")
    assert build.reason == "8 kernels of own_cuda_op.cu compile for sm_80, sm_90, sm_100"


@pytest.mark.parametrize("asked", [None, "cuda"])
def test_one_case_compiles_no_cuda_that_cannot_run(
    monkeypatch: pytest.MonkeyPatch, asked: str | None
) -> None:
    monkeypatch.setattr(check_build, "_build", lambda *args: pytest.fail("compiled"))
    op = str(EXAMPLES / "own_cuda_op.py")
    report = check(op, asked, device="cpu", case="values@1.2.3")
    (group,) = report.groups
    assert (group.verdict, group.trials) == (Verdict.NOT_JUDGED, 0)
    assert [result.check for result in group.results] == ["run"]
    assert "needs a GPU" in str(group.reason)


def test_cuda_that_does_not_compile_fails_with_the_compilers_words(tmp_path: Path) -> None:
    for name in ("own_cuda_op.py", "own_cuda_op.cu"):
        text = (EXAMPLES / name).read_text().replace("mine::swiglu", "mine::broken")
        (tmp_path / name).write_text(
            text.replace("const Wide silu =", "const Wide silu = undefined +")
        )
    report = check(str(tmp_path / "own_cuda_op.py"), seed=0, quick=True, device="cpu")
    (failure,) = report.groups[0].failures
    assert failure.check == "build"
    assert "undefined" in " ".join(failure.case)


def test_interpreted_rows_are_judged_beside_the_others_and_keep_their_places(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    together = threading.Barrier(2, timeout=60)
    cpu = torch.device("cpu")
    op = honest.make_op("in_lanes")
    native = Subject.here(op, "plain", cpu, torch.float32)
    later = replace(native, first=False, quick=True)
    rows = [replace(one, interpreted=True) for one in (native, later)] + [native, later]

    lane_s = 40.0
    monkeypatch.setattr(check_module, "QUICK_LANE_S", lane_s)
    given: dict[bool, list[float]] = {True: [], False: []}

    def judged(row: Subject, case: str | None) -> Group:
        if row.first:
            together.wait()  # each lane's first row waits for the other's
        assert row.budget_s is not None
        given[row.interpreted].append(row.budget_s)
        return Group(str(row.interpreted), "float32", "cpu", ())

    monkeypatch.setattr(check_module, "_row", judged)
    asked = Asked(None, None, True, 0, cpu, None, None, 1.0, lambda line: None)
    groups = _in_lanes(asked, Ends("a_file.py"), rows)
    assert [group.implementation for group in groups] == ["True", "True", "False", "False"]
    # A lane shares its time, of which a first dtype has twice as much; what it leaves over, as all
    # of it here, goes to those after it.
    for first, second in given.values():
        assert 0.6 * lane_s < first <= lane_s * 2 / 3 < second <= lane_s
    for operators, each_s in ((2, lane_s / 2), (30, check_module._LEAST_LANE_S)):
        given[False].clear()
        _in_lanes(replace(asked, operators=operators), Ends("a_file.py"), rows)
        assert 0.6 * each_s < given[False][0] <= each_s * 2 / 3
    with_budget = replace(asked, budget_s=7.0)
    monkeypatch.setattr(check_module, "_row", lambda row, case: seen.append(row.budget_s) or group)
    seen: list[float | None] = []
    group = groups[0]
    _in_lanes(with_budget, Ends("a_file.py"), rows)
    assert seen == [None] * 4  # they have the budget that was asked for, here by none


def test_in_a_hurry_the_interpreter_takes_small_cases_and_few_rows() -> None:
    op = honest.make_op("small_cases_first")
    hurried = Subject.here(
        op, "plain", torch.device("cpu"), torch.float32, quick=True, interpreted=True
    )
    taken: list[int] = []

    def trial(subject: Subject, drawn: Trial) -> Outcome:
        taken.append(sum(one.numel() for one in tensors_in(drawn.args)))
        return Outcome()

    run_check(hurried, Check("cases", trial, source="cases"))
    assert len(taken) == len(hurried.small_cases()) > 1
    assert taken == sorted(taken)
    smallest = taken[0]
    taken.clear()
    result = run_check(hurried, Check("cases", trial, source="cases"), until=0.0)
    assert taken == [smallest]
    assert result.planned == len(hurried.small_cases())
    taken.clear()
    run_check(replace(hurried, interpreted=False), Check("cases", trial, source="cases"), until=0.0)
    assert len(taken) == result.planned

    rows: list[int] = []

    def few(subject: Subject, drawn: Trial) -> Outcome:
        rows.append(rows_of(drawn))
        return Outcome()

    run_check(hurried, Check("shapes", few, quick=60))
    assert max(rows) <= MOST_INTERPRETED_ROWS
    rows.clear()
    run_check(replace(hurried, interpreted=False), Check("shapes", few, quick=60))
    assert max(rows) > MOST_INTERPRETED_ROWS
    # Once the time is up, one trial is made, a small one.
    late: list[int] = []
    for seed in range(12):
        rows.clear()
        run_check(replace(hurried, seed=seed), Check("shapes", few, quick=60), until=0.0)
        late += rows
    assert len(late) == 12 and sum(row <= 8 for row in late) >= 10


def test_in_a_hurry_the_interpreter_leaves_out_what_calls_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wanted = ("shapes", "leaks", "modes")
    some = [known for known in check_group.CHECKS if known.name in wanted]
    monkeypatch.setattr(check_group, "CHECKS", tuple(some))
    cpu = torch.device("cpu")
    op = honest.make_op("no_time_for_many_calls")
    hurried = Subject.here(op, "plain", cpu, torch.float32, 2, True, interpreted=True, budget_s=0.0)
    verdicts = {one.check: one.verdict for one in check_group.run_group(hurried, None).results}
    assert verdicts == {
        "shapes": Verdict.PASS,
        "leaks": Verdict.NOT_JUDGED,
        "modes": Verdict.NOT_JUDGED,
    }
    slow = replace(hurried, budget_s=600.0)
    verdicts = {one.check: one.verdict for one in check_group.run_group(slow, None).results}
    assert set(verdicts.values()) == {Verdict.PASS}


@pytest.mark.parametrize("cores, halved", [(1, 1), (2, 1), (16, 8)])
def test_the_threads_of_processes(cores: int, halved: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_module.os, "sched_getaffinity", lambda _: set(range(cores)))
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert rows_module._threads("reference", cpu, apart=False) == halved
    assert rows_module._threads("candidate", cpu, apart=False) is None
    assert rows_module._threads("candidate", gpu, apart=True) == 1
    assert rows_module._threads("candidate", cpu, apart=True) is None
    assert rows_module._threads("reference", gpu, apart=True) == 1


def test_the_interpreter_judges_no_output_that_it_truncates_to_bfloat16() -> None:
    """Its stores of bfloat16 do not round to nearest; an operator may be asked for such an output
    of float32 inputs."""
    wide: Any
    narrow: Any
    subject: Any = SimpleNamespace(interpreted=True)
    wide, narrow = (
        SimpleNamespace(args=(torch.ones(2), dtype)) for dtype in (None, torch.bfloat16)
    )
    assert _is_truncated(subject, narrow)
    assert not _is_truncated(subject, wide)
    subject.interpreted = False
    assert not _is_truncated(subject, narrow)


def test_how_long_an_interpreted_dtype_takes_is_said() -> None:
    assert interpreted_time(True, None) == "about a minute per dtype"
    assert interpreted_time(False, None) == "up to 20 minutes per dtype; with --quick, about one"
    assert interpreted_time(False, 30.0) == "about 30 s per dtype"
