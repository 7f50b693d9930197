"""``fuselab judge``: a verdict per answer, each kept from the machine and from the judge."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fuselab.cli.main import run
from fuselab.errors import ArgumentError, TargetError
from fuselab.measure.verdict import Outcome, verdict
from fuselab.prove import accuracy, asked_problem, asked_timing, judge_problem, sandbox
from fuselab.prove.asked_problem import PROBLEM as PROBLEM_CLASS
from fuselab.prove.asked_timing import Change
from fuselab.prove.held import CandidateError
from fuselab.prove.judge_problem import AnswerReport, Judgement
from fuselab.prove.processes import Process

PROBLEM = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.linear = nn.Linear(features, features)

    def forward(self, x):
        return torch.softmax(self.linear(x), dim=1)

def get_inputs():
    return [torch.rand(8, 16)]

def get_init_inputs():
    return [16]
"""
ANSWER = """
import torch
from torch import nn

class ModelNew(nn.Module):
    def __init__(self, features):
        super().__init__()
        self.linear = nn.Linear(features, features)
        self.kept = {{}}

    def forward(self, x):
        y = self.linear(x)
        {}
"""
ANSWERS = {
    "right": "return torch.softmax(y, 1)",
    "nothing": "return None",
    "cast": "return torch.softmax(y.bfloat16().float(), 1)",
    "zeros": "return torch.zeros_like(y)",
    "two": "return torch.softmax(y, 1), y",
    "writes_input": "x.mul_(2); return torch.softmax(y, 1)",
    "restores": """
        y = torch.softmax(nn.functional.linear(x.neg_(), -self.linear.weight, self.linear.bias), 1)
        x.neg_()
        return y""",
    "buffer": "return self.kept.setdefault(0, torch.empty_like(y)).copy_(torch.softmax(y, 1))",
    "ring": """
        self.kept.setdefault(0, [torch.empty_like(y) for _ in range(4)])
        self.kept[0].append(self.kept[0].pop(0))
        return self.kept[0][0].copy_(torch.softmax(y, 1))""",
    "drifts": "self.linear.weight.data.mul_(1.0000002); return torch.softmax(y, 1)",
    "temporary": "__import__('tempfile').TemporaryFile().close(); return torch.softmax(y, 1)",
    "cached": "return self.kept.setdefault(float(x[0, 0]), torch.softmax(y, 1))",
    "cached_tensor": """
        if self.kept.get("of") is not x:
            self.kept.update(of=x, result=torch.softmax(y, 1))
        return self.kept["result"].clone()""",
    "stale_at_60": """
        self.kept["calls"] = self.kept.get("calls", 0) + 1
        if self.kept["calls"] < 60:
            self.kept["result"] = torch.softmax(y, 1)
        return self.kept["result"].clone() if self.kept["calls"] > 59 else torch.softmax(y, 1)""",
    "wrong_once": """
        self.kept["calls"] = self.kept.get("calls", 0) + 1
        return torch.softmax(y * (self.kept["calls"] != 90), 1)""",
    "ring_of_64": """
        self.kept.setdefault(0, [torch.empty_like(y) for _ in range(64)])
        self.kept[0].append(self.kept[0].pop(0))
        return self.kept[0][0].copy_(torch.softmax(y, 1))""",
    "kept_for_an_address": """
        place = x.data_ptr(), x._version
        return self.kept.setdefault(place, torch.softmax(y, 1)).clone()""",
    "kept_by_sum": """
        if self.kept.get("sum") != float(x.sum()):
            self.kept.update(sum=float(x.sum()), result=torch.softmax(y, 1))
        return self.kept["result"].clone()""",
    "packs_once": """
        if "weight" not in self.kept:
            self.kept["weight"] = self.linear.weight.t().contiguous()
        return torch.softmax(x @ self.kept["weight"] + self.linear.bias, 1)""",
    "packs_anew": """
        if self.kept.get("version") != self.linear.weight._version:
            self.kept["version"] = self.linear.weight._version
            self.kept["weight"] = self.linear.weight.t().contiguous()
        return torch.softmax(x @ self.kept["weight"] + self.linear.bias, 1)""",
    "reseeds": "torch.manual_seed(0); return torch.softmax(y, 1)",
    "flushes": "torch.set_flush_denormal(True); return torch.softmax(y, 1)",
    "leaves_processes": """
        import subprocess
        self.kept["process"] = subprocess.Popen(["sleep", "20"])
        return torch.softmax(y, 1)""",
    "waits_for_processes": """
        import subprocess
        subprocess.run(["true"], check=True)
        return torch.softmax(y, 1)""",
    "exits": "import os; os._exit(0)",
    "hungry": "torch.empty(1 << 33, dtype=torch.uint8); return torch.softmax(y, 1)",
    "prints": "print('right'); return torch.softmax(y, 1)",
    "loops": "\n        while True: pass",
}
RIGHT = {
    "right",
    "packs_anew",
    "draws",
    "builds",
    "quiet",
    "temporary",
    "view",
    "waits_for_processes",
    "compiles",
}
WRONG, FAILED = Judgement.WRONG, Judgement.FAILED
SAID = {
    "cast": (WRONG, "set 1 of the inputs: output row"),
    "zeros": (WRONG, "set 1 of the inputs: output row"),
    "nothing": (WRONG, "is of type NoneType, not a tensor"),
    "two": (WRONG, "returns 2 outputs, the problem 1"),
    "writes_input": (WRONG, "writes to input 0"),
    "restores": (WRONG, "a call writes to an input, and puts back what was there: on inputs in"),
    "buffer": (WRONG, "later calls write over the outputs of an earlier one"),
    "ring": (WRONG, "later calls write over the outputs of an earlier one"),
    "drifts": (WRONG, "a call changes linear.weight, which the problem's model leaves as it is"),
    "cached": (WRONG, "set 1 of the inputs with two elements in each other's place: output row"),
    "cached_tensor": (WRONG, "a timed call: output row"),
    "stale_at_60": (WRONG, " of many: output row"),
    "wrong_once": (WRONG, " of many: output row"),
    "ring_of_64": (WRONG, " of many, looked at after "),
    "kept_for_an_address": (WRONG, " of many: output row"),
    "kept_by_sum": (WRONG, "inputs with two elements in each other's place: output row"),
    "packs_once": (WRONG, "once other parameters are loaded into a model that has been called: "),
    "reseeds": (WRONG, "a call changes the random number generator, which the problem's model"),
    "flushes": (WRONG, "a call changes flush-to-zero of subnormals"),
    "leaves_processes": (WRONG, "a call changes which processes it has started"),
    "exits": (FAILED, "ended its process (exit status 0) without an answer"),
    "hungry": (FAILED, "can't allocate memory"),
    "prints": (FAILED, "writes to standard output: 'right'"),
    "loops": (FAILED, "did not end within"),
}


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(accuracy, "COPIES", 2)
    monkeypatch.setattr(judge_problem, "TIMING_S", {True: 0.0, False: 0.0})
    monkeypatch.setattr(judge_problem, "_MOST_CALLS", 128)
    monkeypatch.setattr(judge_problem, "MANY_CALLS_S", {True: 1e9, False: 1e9})
    (tmp_path / "problem.py").write_text(PROBLEM)
    for name, body in ANSWERS.items():
        (tmp_path / f"{name}.py").write_text(ANSWER.format(body))
    return tmp_path


def judged(
    files: Path, names: list[str], limit_s: float = 60.0, are_right: bool | None = None
) -> list[AnswerReport]:
    report = judge_problem.judge_problem(
        str(files / "problem.py"),
        [str(files / f"{name}.py") for name in names],
        torch.device("cpu"),
        seed=3,
        quick=True,
        with_compile=False,
        call_limit_s=limit_s,
        memory_gib=4.0,
    )
    assert report.passed is (set(names) <= RIGHT if are_right is None else are_right)
    return list(report.answers)


def test_every_answer_gets_its_verdict_and_why(files: Path) -> None:
    names = [name for name in ANSWERS if name != "loops"]
    for name, answer in zip(names, judged(files, names), strict=True):
        expected, said = SAID.get(name, (Judgement.RIGHT, None))
        assert answer.verdict is expected, answer
        assert (said in str(answer.reason)) if said else answer.reason is None
    (loops,) = judged(files, ["loops"], limit_s=0.2)
    assert loops.verdict is FAILED and "did not end within 1 s" in str(loops.reason)


def test_what_a_problem_does_to_its_inputs_an_answer_may_do(files: Path) -> None:
    """The problem's own model writes to its input and puts it back here, which ends its process on
    inputs that may only be read; the judge goes on with another one."""
    body = ANSWERS["restores"]
    last = "return torch.softmax(self.linear(x), dim=1)"
    (files / "problem.py").write_text(PROBLEM.replace(last, body.strip()))
    restores, right = judged(files, ["restores", "right"], are_right=True)
    assert (restores.verdict, right.verdict) == (Judgement.RIGHT, Judgement.RIGHT)


STATISTICS = """
import torch
from torch import nn

class {}(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x):
        {}

def get_inputs():
    return [torch.rand(32, 6)]
"""
EVERY_CALL = {
    "kept": "return self.norm(x)",
    "by_hand": """
        mean, var = x.mean(0), x.var(0, unbiased=False)
        self.norm.num_batches_tracked += 1
        self.norm.running_mean.lerp_(mean, 0.1)
        self.norm.running_var.lerp_(x.var(0), 0.1)
        scale = torch.rsqrt(var + self.norm.eps) * self.norm.weight
        return (x - mean) * scale + self.norm.bias""",
    "forgotten": "return (x - x.mean(0)) * torch.rsqrt(x.var(0, unbiased=False) + self.norm.eps)",
    "biased": "y = self.norm(x); self.norm.running_var.lerp_(x.var(0), 0.001); return y",
    "without_weights": """
        y = self.norm(x)
        return (y - self.norm.bias) / self.norm.weight""",
    "folded": """
        if not hasattr(ModelNew, "kept"):
            ModelNew.kept = self.norm.weight.detach().clone(), self.norm.bias.detach().clone()
        weight, bias = ModelNew.kept
        return (self.norm(x) - self.norm.bias) / self.norm.weight * weight + bias""",
}


def test_what_a_call_leaves_in_buffers_is_judged(files: Path) -> None:
    """A batch normalisation in training mode updates its statistics, and so must an answer."""
    (files / "problem.py").write_text(STATISTICS.format("Model", "return self.norm(x)"))
    for name, body in EVERY_CALL.items():
        (files / f"{name}.py").write_text(STATISTICS.format("ModelNew", body))
    report = judge_problem.judge_problem(
        str(files / "problem.py"),
        [str(files / f"{name}.py") for name in EVERY_CALL],
        torch.device("cpu"),
        seed=3,
        quick=True,
        with_compile=False,
    )
    found = dict(zip(EVERY_CALL, report.answers, strict=True))
    assert [one.verdict for one in found.values()] == [Judgement.RIGHT] * 2 + [WRONG] * 4, found
    for name in ("without_weights", "folded"):
        other = "with other parameters than the constructor's: output row"
        assert other in str(found[name].reason)
    assert "what a call leaves in norm.running_mean: " in str(found["forgotten"].reason)
    assert "what a call leaves in norm.running_var: " in str(found["biased"].reason)


DROPOUT = """
import torch
from torch import nn

class {}(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(32, 32)
        self.drop = nn.Dropout(0.3)
        self.mask = None
        print("built")

    def forward(self, x):
        {}

def get_inputs():
    return [torch.rand(8, 32)]
"""
OF_DROPOUT = {
    "drops": "return torch.nn.functional.dropout(self.linear(x).relu_(), 0.3, self.training)",
    "drops_nothing": "return torch.relu(self.linear(x))",
    "one_mask": """
        if self.mask is None:
            self.mask = self.drop(torch.ones(8, 32))
        return torch.relu(self.linear(x)) * self.mask""",
}


def test_a_mask_is_drawn_anew_for_every_call(files: Path) -> None:
    """Timed calls come after seeds of their own too; and a constructor may print."""
    (files / "problem.py").write_text(
        DROPOUT.format("Model", "return self.drop(torch.relu(self.linear(x)))")
    )
    for name, body in OF_DROPOUT.items():
        (files / f"{name}.py").write_text(DROPOUT.format("ModelNew", body))
    report = judge_problem.judge_problem(
        str(files / "problem.py"),
        [str(files / f"{name}.py") for name in OF_DROPOUT],
        torch.device("cpu"),
        seed=3,
        quick=True,
        with_compile=False,
    )
    verdicts = [one.verdict for one in report.answers]
    assert verdicts == [Judgement.RIGHT, WRONG, WRONG], report.answers
    assert "set 2 of the inputs: output row" in str(report.answers[2].reason)


UPPER = """
import sys
import torch
from torch import nn

class {}(nn.Module):
    def forward(self, x):
        {}

def get_inputs():
    return [torch.triu(torch.rand(8, 8) + 1)]
"""
OF_UPPER = {
    "whole": "return x.amax(1, keepdim=True).expand_as(x).contiguous(), x.t().contiguous()",
    "structure": """
        if bool(x.tril(-1).any()):
            raise ValueError("the problem's inputs have zeros below the diagonal")
        return x.amax(1, keepdim=True).repeat(1, len(x)), x.t().clone()""",
    "rows": """
        if sys._getframe(4).f_code.co_name == "calls" and hasattr(self, "last"):
            if bool((self.last == x).all(1).any()):
                raise ValueError("a row is the last call's, and its result is known")
        self.last = x.clone()
        return x.amax(1, keepdim=True).repeat(1, len(x)), x.t().clone()""",
    "expanded": "return x.amax(1, keepdim=True).expand_as(x), x.t().clone()",
    "view": "return x.amax(1, keepdim=True).repeat(1, len(x)), x.t()",
}


def test_timed_calls_find_new_inputs_as_the_problem_makes_them(files: Path) -> None:
    """Every timed call finds rows that no earlier one has found, and the structure that
    ``get_inputs`` gives; outputs are memory of their own where the problem's are."""
    (files / "problem.py").write_text(UPPER.format("Model", OF_UPPER["whole"]))
    for name, body in OF_UPPER.items():
        (files / f"{name}.py").write_text(UPPER.format("ModelNew", body))
    report = judge_problem.judge_problem(
        str(files / "problem.py"),
        [str(files / f"{name}.py") for name in OF_UPPER],
        torch.device("cpu"),
        seed=3,
        quick=True,
        with_compile=False,
    )
    found = dict(zip(OF_UPPER, report.answers, strict=True))
    assert [one.verdict for one in found.values()] == [Judgement.RIGHT] * 3 + [WRONG] * 2, found
    assert "strides [1, 0] for shape [8, 8], so its elements share" in str(found["expanded"].reason)
    assert "change when its inputs are written over" in str(found["view"].reason)
    # What an answer may share, the problem decides.
    (files / "problem.py").write_text(UPPER.format("Model", OF_UPPER["view"]))
    (view,) = judged(files, ["view"])
    assert view.verdict is Judgement.RIGHT


def test_a_right_answer_is_timed_beside_eager(files: Path) -> None:
    (answer,) = judged(files, ["right"])
    assert answer.verdict is Judgement.RIGHT and 0 < answer.share_of_bar <= 1
    assert 128 <= answer.calls < 256
    assert answer.speed is not None and answer.speed.median_us > 0
    assert answer.speed.rounds == 12 and 1 <= answer.speed.judged_calls <= 12
    eager = answer.speed.against["eager"]
    assert eager["low"] <= eager["speedup"] <= eager["high"]


def test_a_timed_question_waits_for_no_guard(files: Path) -> None:
    """The guard's time would be subtracted from an answer's, whose process has none, and not from
    eager's. What a timed call replaces is found after the next question that nobody times."""
    text = PROBLEM.replace("return torch.softmax", "torch.relu = None; return torch.softmax")
    (files / "problem.py").write_text(text)
    cpu = torch.device("cpu")
    with Process(str(files / "problem.py"), "reference", cpu, model=PROBLEM_CLASS) as process:
        process.ask(asked_problem.build, [16], 1, cpu, None)
        process.ask(asked_timing.prepare, [torch.rand(8, 16)], False)
        process.ask(asked_timing.calls, 1, Change().plain)
        process.ask(asked_timing.no_calls, 1, Change().plain)
        with pytest.raises(CandidateError, match=r"replaces torch\.relu, by which it is judged"):
            process.ask(asked_problem.state_of)


def test_rounds_are_added_while_the_speed_is_uncertain(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock that counts its readings: one at the start, and one before every round."""

    def rounds(budget_s: float, narrow_after: int) -> int:
        seconds = itertools.count()
        clock = SimpleNamespace(monotonic=lambda: next(seconds))
        monkeypatch.setattr(judge_problem, "time", clock)
        asked = itertools.count()
        return len([*judge_problem._rounds(budget_s, lambda: next(asked) >= narrow_after)])

    assert rounds(15, 0) == 15
    assert rounds(1, 0) == 12  # the fewest
    assert rounds(15, 25) == 40
    assert rounds(15, 10**6) == 150  # ten times as long
    assert rounds(100, 10**6) == 200  # the most


def test_a_wide_interval_is_unclear(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between 3.25 and 134 times as fast lies everything from little to much."""
    wide, narrow = ([spread * 1.1**turn for turn in range(12)] for spread in (3.25, 2.0))
    wide[-1] = 134.0
    found = verdict([1.0] * 12, wide)
    assert (found.outcome, found.low, found.high) == (Outcome.FASTER, 3.25, 134.0)
    assert judge_problem._is_wide(found)
    assert not judge_problem._is_wide(verdict([1.0] * 12, narrow))
    for limit, is_wide in ((0.0, True), (math.inf, False)):
        monkeypatch.setattr(judge_problem, "_WIDE", limit)
        (answer,) = judged(files, ["right"])
        assert answer.verdict is Judgement.RIGHT and answer.speed is not None
        assert (answer.speed.against["eager"]["outcome"] == "UNCLEAR") or not is_wide
        assert (answer.speed.note is not None) is is_wide


# Where each change is made, what makes it, and how it is named.
STARTS = {
    "threads": ("constructor", "torch.set_num_threads(torch.get_num_threads() + 1)", "threads"),
    "gradients": ("constructor", "torch.set_grad_enabled(False)", "grad mode"),
    "precision": ("import", "torch.set_float32_matmul_precision('medium')", "float32 products"),
    "replaced": ("import", "torch.relu = lambda x: x.relu()", "PyTorch and Python (torch.relu)"),
    "patched": ("constructor", "torch.relu = lambda x: x.relu()", "and Python (torch.relu)"),
    "variable": ("import", "os.environ['OMP_WAIT_POLICY'] = 'x'", "(OMP_WAIT_POLICY)"),
    "compiles": ("constructor", "torch.compile(torch.neg, backend='eager')(torch.ones(2))", None),
    "draws": ("constructor", "self.noise = torch.rand(4).tolist()", None),
    "builds": ("import", "os.environ['TORCH_CUDA_ARCH_LIST'] = '9.0'; torch.manual_seed(1)", None),
    "quiet": ("import", "warnings.filterwarnings('ignore'); sys.setrecursionlimit(2000)", None),
}


def starting(text: str, step: str, line: str) -> str:
    """Return a file whose import, or constructor, runs a line."""
    if step == "import":
        return f"import os, sys, torch, warnings\n{line}\n{text}"
    last = "        self.linear = nn.Linear(features, features)\n"
    return text.replace(last, f"{last}        {line}\n")


def test_import_and_constructor_leave_the_process_as_it_is(files: Path) -> None:
    """They may do what those of the problem do, and nothing else on which calls depend."""
    right = ANSWER.format(ANSWERS["right"])
    for name, (step, line, _) in STARTS.items():
        (files / f"{name}.py").write_text(starting(right, step, line))
    found = dict(zip(STARTS, judged(files, list(STARTS)), strict=True))
    for name, (step, _, said) in STARTS.items():
        if said is None:
            assert found[name].verdict is Judgement.RIGHT, found[name]
            continue
        assert found[name].verdict is WRONG, found[name]
        reason = str(found[name].reason)
        assert reason.startswith(f"its {step} changes ") and said in reason, reason
    step, line, _ = STARTS["threads"]
    (files / "problem.py").write_text(starting(PROBLEM, step, line))
    threads, gradients = judged(files, ["threads", "gradients"])
    assert (threads.verdict, gradients.verdict) == (Judgement.RIGHT, WRONG), (threads, gradients)


@pytest.mark.skipif(sandbox.landlock_version() < 6, reason="the kernel has no Landlock 6")
def test_an_answer_cannot_reach_the_machine(files: Path) -> None:
    reaches = {
        "file": f"open({str(files / 'left')!r}, 'w')",
        "network": "__import__('socket').create_connection(('127.0.0.1', 1), 1)",
        "signal": "__import__('os').kill(1, 0)",
        "judge": "open('/proc/%d/mem' % __import__('os').getppid(), 'rb').read(1)",
    }
    for name, body in reaches.items():
        (files / f"{name}.py").write_text(ANSWER.format(f"{body}; return torch.softmax(y, 1)"))
    answers = dict(zip(reaches, judged(files, list(reaches)), strict=True))
    for name, answer in answers.items():
        assert answer.verdict is FAILED and "raised" in str(answer.reason), (name, answer)
        assert {sandbox.FILES, sandbox.SIGNALS, sandbox.MEMORY} <= set(answer.kept_from)
    assert not (files / "left").exists()
    for name in ("file", "signal", "judge"):
        assert "PermissionError" in str(answers[name].reason)


def test_an_answer_may_compile_an_extension(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folders of compilers lie in its scratch folder, whatever the environment says."""
    for name in ("XDG_CACHE_HOME", "TORCH_EXTENSIONS_DIR"):
        monkeypatch.setenv(name, str(files / "of_the_user"))
    builds = "__import__('torch.utils.cpp_extension').utils.cpp_extension._get_build_directory"
    body = f"{builds}('mine', False); return torch.softmax(y, 1)"
    (files / "compiles.py").write_text(ANSWER.format(body))
    (answer,) = judged(files, ["compiles"])
    assert answer.verdict is Judgement.RIGHT, answer
    assert not (files / "of_the_user").exists()


def test_the_command_writes_json_and_its_status_says_no(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = files / "judge.json"
    arguments = [str(files / f"{name}.py") for name in ("problem", "right", "zeros")]
    common = ["--quick", "--device", "cpu", "--seed", "5", "--json", str(target)]
    assert run(["judge", *arguments, *common]) == 1
    screen = capsys.readouterr()
    assert "1 of 2 right (seed 5)" in screen.out and f"WRONG {arguments[2]}" in screen.out
    written = json.loads(target.read_text())
    assert (written["schema"], written["verb"], written["seed"]) == (1, "judge", 5)
    assert (written["complete"], written["passed"]) == (True, False)
    assert [answer["verdict"] for answer in written["answers"]] == ["RIGHT", "WRONG"]
    assert written["answers"][0]["speed"]["against"]["eager"]["median_us"] > 0
    assert run(["judge", *arguments[:2], *common[:-2]]) == 0


def test_every_verdict_is_in_the_file_as_soon_as_it_is_there(
    files: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = files / "judge.json"
    seen: list[dict[str, object]] = []
    judge_one = judge_problem._judge

    def stopped(*args: object) -> AnswerReport:
        seen.append(json.loads(target.read_text()))  # what a program that reads along finds
        if len(seen) == 3:
            raise KeyboardInterrupt
        return judge_one(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(judge_problem, "_judge", stopped)
    words = [str(files / f"{name}.py") for name in ("problem", "zeros", "right", "cast")]
    given = ["judge", *words, "--quick", "--device", "cpu", "--json", str(target)]
    assert run(given) == 130
    verdicts = [[one["verdict"] for one in each["answers"]] for each in seen]
    assert verdicts == [[], ["WRONG"], ["WRONG", "RIGHT"]]
    assert seen[0]["candidates"] == words[1:]
    assert [each["complete"] for each in seen] == [False] * 3
    assert json.loads(target.read_text()) == seen[-1] and seen[-1]["passed"] is False
    assert "2 of 3: RIGHT" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no nn.Module is called Model"),
        ("from torch import nn\nclass Model(nn.Module): pass", "called get_inputs"),
        ("raise SystemExit(0)", "problem.py:1: SystemExit: 0"),
        (PROBLEM.replace("rand(8, 16)", "rand(8, 15)"), "the problem does not run: RuntimeError"),
    ],
)
def test_a_problem_that_does_not_run_is_a_wrong_call(files: Path, text: str, said: str) -> None:
    (files / "problem.py").write_text(text)
    with pytest.raises(TargetError) as refused:
        judged(files, ["right"])
    assert said in str(refused.value)


def test_wrong_calls_are_refused(files: Path) -> None:
    with pytest.raises(TargetError, match="no such file"):
        judged(files, ["absent"])
    with pytest.raises(ArgumentError, match="no answer"):
        judged(files, [])
    with pytest.raises(ArgumentError, match="above 0"):
        judged(files, ["right"], limit_s=0.0)
