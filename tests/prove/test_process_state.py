"""Changes of the process's state are reported by name and undone."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo
from gallery import honest

from fuselab.prove import check_group
from fuselab.prove.check import check
from fuselab.prove.process_state import ProcessState
from fuselab.prove.result import CheckReport, Verdict

FILE = """
import torch
from fuselab.op import Case, FusedOp, Implementation

torch.set_num_threads(torch.get_num_threads() + 1)

def reference(input: torch.Tensor) -> torch.Tensor:
    return input * 2

OP = FusedOp(
    name="gallery::threads_at_import",
    reference=reference,
    implementations={"plain": Implementation("cpu", reference)},
    cases=(Case.normal([(4, 4)], "boundary"),),
)
"""


def test_nothing_has_changed_at_first() -> None:
    assert ProcessState().changed() == []


def test_what_pytorchs_compiler_changes_by_its_first_import_is_none_of_a_calls_doing() -> None:
    program = (
        "from fuselab.prove.process_state import ProcessState\n"
        "before = ProcessState()\n"
        "import torch._dynamo, torch._inductor.compile_fx\n"
        "print(before.changed())\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


def test_changes_are_named_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.setenv("OMP_SCHEDULE", "static")
    state, threads = ProcessState(), torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    torch.rand(1)
    os.environ["OMP_WAIT_POLICY"] = "passive"
    del os.environ["OMP_SCHEDULE"]
    assert state.changed() == [
        "the random number generator",
        "the number of threads",
        "the environment (OMP_SCHEDULE, OMP_WAIT_POLICY)",
    ]
    state.restore()
    assert state.changed() == []
    assert torch.get_num_threads() == threads
    assert "OMP_WAIT_POLICY" not in os.environ
    assert os.environ["OMP_SCHEDULE"] == "static"


def test_settings_hooks_and_attributes_are_given_back() -> None:
    state = ProcessState()
    with torch._dynamo.config.patch(suppress_errors=True):
        assert state.changed() == [
            "the settings of torch.compile (torch._dynamo.config.suppress_errors)"
        ]
    assert state.changed() == []  # set, and set back
    torch._dynamo.config.suppress_errors = True
    torch.nn.modules.module.register_module_forward_hook(lambda layer, args, output: None)
    torch.gallery_ready = True  # type: ignore[attr-defined]
    np.random.rand()
    torch.set_printoptions(precision=2)
    torch.set_autocast_dtype("cpu", torch.float16)
    assert state.changed() == [
        "the hooks of all layers (_global_forward_hooks)",
        "autocast",
        "attributes of PyTorch (torch.gallery_ready)",
        "NumPy's random numbers",
        "how tensors are printed (precision)",
        "the settings of torch.compile (torch._dynamo.config.suppress_errors)",
    ]
    state.restore()
    assert state.changed() == []
    assert not torch._dynamo.config.suppress_errors and not hasattr(torch, "gallery_ready")


def test_settings_that_few_know_are_given_back() -> None:
    state = ProcessState()
    digits = sys.get_int_max_str_digits()
    torch.sparse.check_sparse_tensor_invariants.enable()
    sys.set_int_max_str_digits(700)
    threading.stack_size(1 << 20)
    assert state.changed() == [
        "settings of PyTorch (check_sparse_tensor_invariants)",
        "settings of Python (sys.set_int_max_str_digits, threading.stack_size)",
    ]
    state.restore()
    assert state.changed() == []
    assert not torch.sparse.check_sparse_tensor_invariants.is_enabled()
    assert sys.get_int_max_str_digits() == digits


def test_a_filter_for_one_message_hides_little() -> None:
    with warnings.catch_warnings():
        state = ProcessState()
        warnings.filterwarnings("ignore", message="of one library", category=UserWarning)
        assert state.changed() == []
        warnings.filterwarnings("ignore", category=UserWarning)
        assert state.changed() == ["which warnings are shown"]
        state.restore()
        assert state.changed() == []


def test_an_import_may_set_variables_that_pytorch_does_not_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("MY_KERNELS", raising=False)
    of_import, of_call = ProcessState(of_import=True), ProcessState()
    monkeypatch.setenv("MY_KERNELS", "1")
    assert of_import.changed() == []
    assert of_call.changed() == ["the environment (MY_KERNELS)"]


def test_what_an_import_changes_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "threads_at_import.py"
    file.write_text(FILE)
    wanted = [known for known in check_group.CHECKS if known.name == "global state"]
    monkeypatch.setattr(check_group, "CHECKS", tuple(wanted))
    threads = torch.get_num_threads()
    report = check(str(file), seed=0, dtype=torch.float32, quick=True, device="cpu")
    assert torch.get_num_threads() == threads
    (failure,) = report.groups[0].failures
    assert failure.reason == "importing it changes the number of threads"


PRECISIONS = [
    lambda: setattr(torch.backends.cudnn.conv, "fp32_precision", "ieee"),
    lambda: torch.set_float32_matmul_precision("medium"),
    lambda: setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32"),
    lambda: setattr(torch.backends.mkldnn.conv, "fp32_precision", "bf16"),
]


@pytest.mark.parametrize("is_mixed", [False, True])
@pytest.mark.parametrize("change", PRECISIONS)
def test_a_change_of_precision_is_named_and_given_back(
    change: Callable[[], None], is_mixed: bool
) -> None:
    """PyTorch's older settings cannot be read where a program also uses the newer ones."""
    outer = ProcessState()
    try:
        if is_mixed:
            torch.backends.cudnn.rnn.fp32_precision = "ieee"
            torch.backends.cudnn.conv.fp32_precision = "tf32"
        state = ProcessState()
        change()
        assert state.changed() == ["the precision of float32 products"]
        state.restore()
        assert state.changed() == []
    finally:
        outer.restore()
    assert outer.changed() == []


def state_and_others(
    name: str, forward: Callable[..., torch.Tensor], others: set[str], monkeypatch: Any
) -> CheckReport:
    """Check an operator with this forward for what its first calls do, and by some other checks."""
    wanted = [known for known in check_group.CHECKS if known.name in {"global state", *others}]
    monkeypatch.setattr(
        check_group, "CHECKS", tuple(replace(known, shrink_tries=0) for known in wanted)
    )
    op = honest.make_op(name, forward=forward)
    return check(op, dtype=torch.float32, quick=True, seed=0, device="cpu")


def test_a_wrong_value_is_no_matter_of_state(monkeypatch: pytest.MonkeyPatch) -> None:
    def doubled(input: torch.Tensor, bias: torch.Tensor, scale: float) -> torch.Tensor:
        return honest.forward(input, bias, scale).mul_(2)

    report = state_and_others("doubled", doubled, {"cases", "shapes"}, monkeypatch)
    assert report.failed_checks() == {"cases", "shapes"}
    (state,) = report.results("global state")
    assert state.verdict is Verdict.NOT_JUDGED
    assert state.reason == "its calls give wrong values, or raise, which other checks show"
    # Where no other check finds it, it stands under what it is, and its case repeats it.
    report = state_and_others("doubled_alone", doubled, set(), monkeypatch)
    (failure,) = report.groups[0].failures
    assert failure.check == "shapes" and str(failure.reason).startswith("output row ")
    assert failure.guide == 'docs/check.md, "A value misses the bar"'
    assert "--case global-state@" in str(failure.repeat_command)


def test_what_raises_in_every_call_is_no_matter_of_state(monkeypatch: pytest.MonkeyPatch) -> None:
    def raising(input: torch.Tensor, bias: torch.Tensor, scale: float) -> torch.Tensor:
        raise RuntimeError("no such instruction")

    report = state_and_others("raising", raising, {"cases", "shapes"}, monkeypatch)
    assert report.failed_checks() == {"cases", "shapes"}


def test_a_wrong_value_of_the_first_call_alone_is_one_of_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[int] = []

    def first_is_doubled(input: torch.Tensor, bias: torch.Tensor, scale: float) -> torch.Tensor:
        output = honest.forward(input, bias, scale)
        calls.append(output.numel())
        is_first = output.numel() > 0 and sum(map(bool, calls)) == 1
        return output.mul_(2) if is_first else output

    report = state_and_others("first_doubled", first_is_doubled, {"cases", "shapes"}, monkeypatch)
    assert report.failed_checks() == {"global state"}
    assert "of the first calls" in str(report.results("global state")[0].reason)
