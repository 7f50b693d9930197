"""The choice between one kernel of the whole and operators: what is timed, and what is kept."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fuselab.runtime import forms
from fuselab.runtime.forms import Forms, may_be_whole


class Form:
    """A form that takes its time and counts its calls."""

    def __init__(self, milliseconds: float, error: Exception | None = None) -> None:
        self.milliseconds, self.error, self.calls = milliseconds, error, 0

    def __call__(self, *_: Tensor) -> Form:
        self.calls += 1
        if self.error is not None:
            raise self.error
        time.sleep(self.milliseconds / 1e3)
        return self


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Let calls look as if they were on a GPU, whose stream is captured or not."""
    captured = {"is": False}
    monkeypatch.setattr(forms, "may_be_whole", lambda *_: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captured["is"])
    return lambda value: captured.update({"is": value})


def made(
    whole: Form, operators: Form, reason: Callable[..., str | None] = lambda *_: None
) -> Forms:
    return Forms(whole, operators, reason)


def test_the_faster_form_is_kept_for_calls_alike(on_gpu: Callable[[bool], None]) -> None:
    for fast, slow in ((0.1, 3.0), (3.0, 0.1)):
        whole, operators = Form(fast), Form(slow)
        choice = made(whole, operators)
        quicker, other = (whole, operators) if fast < slow else (operators, whole)
        assert choice(torch.empty(33, 4)) is quicker
        counted = other.calls
        # Up to the next power of two, and in other layouts, the answer is the same.
        for one in (torch.empty(33, 4), torch.empty(64, 4), torch.empty(4, 40).t()):
            assert choice(one) is quicker
        assert other.calls == counted
        choice(torch.empty(65, 4))
        assert other.calls > counted  # of other sizes: timed again
        choice(torch.empty(65, 4, dtype=torch.float16))
        assert len(choice._is_faster) == 3


def test_what_the_kernel_does_not_take(on_gpu: Callable[[bool], None]) -> None:
    whole, operators = Form(0), Form(0)

    def reason(tensor: Tensor) -> str | None:
        return "too wide" if tensor.shape[1] > 9 else None

    choice = made(whole, operators, reason)
    assert choice(torch.empty(4, 10)) is operators
    assert (whole.calls, operators.calls) == (0, 1)


def test_a_capture_takes_operators_and_decides_nothing(on_gpu: Callable[[bool], None]) -> None:
    whole, operators = Form(0.1), Form(3.0)
    choice = made(whole, operators)
    on_gpu(True)
    assert choice(torch.empty(4, 4)) is operators
    assert (whole.calls, operators.calls) == (0, 1)
    on_gpu(False)
    assert choice(torch.empty(4, 4)) is whole
    on_gpu(True)
    assert choice(torch.empty(4, 4)) is whole  # known by now


def test_the_form_that_fits_into_memory(on_gpu: Callable[[bool], None]) -> None:
    none_left = torch.OutOfMemoryError("none left")
    whole, operators = Form(1), Form(0, none_left)
    assert made(whole, operators)(torch.empty(4)) is whole
    whole, operators = Form(1, none_left), Form(5)
    assert made(whole, operators)(torch.empty(4)) is operators


def test_where_one_kernel_may_be_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not may_be_whole(torch.empty(3))

    class OnGpu:
        """A tensor as far as the choice looks at it."""

        device = torch.device("cuda")

        def __init__(self, requires_grad: bool = False) -> None:
            self.requires_grad = requires_grad

    monkeypatch.setattr(forms, "Tensor", OnGpu)
    plain: Any = OnGpu()
    wanting: Any = OnGpu(True)
    assert may_be_whole(plain, plain)
    assert not may_be_whole(plain, wanting)
    with torch.no_grad():
        assert may_be_whole(plain, wanting)
    assert not may_be_whole(plain, torch.empty(3).as_subclass(Other))
    with monkeypatch.context() as within:
        within.setattr(torch, "is_autocast_enabled", lambda device: device == "cuda")
        assert not may_be_whole(plain)
    with monkeypatch.context() as within:
        within.setattr(torch.compiler, "is_compiling", lambda: True)
        assert not may_be_whole(plain)
    with deterministic():
        assert not may_be_whole(plain)
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        assert not may_be_whole(plain)
    seen = []
    torch.func.vmap(lambda one: (seen.append(may_be_whole(plain)), one)[1])(torch.ones(2))
    assert seen == [False]


class Other(Tensor):
    pass


@contextlib.contextmanager
def deterministic() -> Any:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
