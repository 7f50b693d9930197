"""An operator as the process that imported it holds it, and how that process is asked.

A *procedure* is a function of this folder whose first argument is a ``Held``. The judge asks for
one by ``End.ask`` and gets what it returns: plain values and tensors. The same procedure runs in
the process that holds the reference and in the one that runs an implementation; ``Held`` is the
function under question there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from fuselab.composition import Composition
from fuselab.errors import summary
from fuselab.op import FusedOp, tensors_in
from fuselab.prove.arguments import mapped, with_own_copies
from fuselab.runtime import dispatch, fallback


@dataclass(frozen=True)
class Held:
    """An operator and the function of it that procedures call: the reference, or the
    ``implementation`` where one is named."""

    op: FusedOp
    implementation: str | None = None
    _public: Callable[..., Any] = field(init=False, repr=False)
    _is_written: tuple[bool, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        # Dynamo traces calls, and should not meet how the public function is found.
        object.__setattr__(self, "_public", dispatch.operator(self.op))
        is_written = tuple(name in self.op.mutates for name in self.op.parameters)
        object.__setattr__(self, "_is_written", is_written)

    def __call__(self, *args: Any) -> Any:
        """Call the function under question.

        Of an operator that overwrites arguments this returns their new values, which are written to
        copies.
        """
        if self.implementation is None:
            return self.op.reference(*args)
        return self._called(self.public, args)

    def alone(self, *args: Any) -> Any:
        """Call the implementation's own forward, without the public function around it."""
        assert self.implementation is not None
        return self._called(self.op.implementations[self.implementation].forward, args)

    def public(self, *args: Any) -> Any:
        """Call the public function with the implementation asked for by name."""
        return self._public(*args, implementation=self.implementation)

    def _called(self, function: Callable[..., Any], args: Sequence[Any]) -> Any:
        if not self.op.mutates:
            return function(*args)
        if torch.compiler.is_compiling():
            return self._called_in_a_graph(args)
        args = with_own_copies(self.op, args)
        function(*args)
        return self.op.mutated(args)

    def _called_in_a_graph(self, args: Sequence[Any]) -> Any:
        copies = [
            mapped(torch.clone, [value])[0] if is_written else value
            for value, is_written in zip(args, self._is_written, strict=True)
        ]
        self.public(*copies)
        return tensors_in(
            [copy for copy, is_written in zip(copies, self._is_written, strict=True) if is_written]
        )


@dataclass(frozen=True)
class HeldWhole:
    """A composition and the function of it that procedures call."""

    composition: Composition
    is_reference: bool

    def __call__(self, *args: Any) -> Any:
        """Call the function under question."""
        whole = self.composition
        return whole.reference(*args) if self.is_reference else whole.function(*args)


Holds = Held | HeldWhole


class End(Protocol):
    """The place where procedures run: this process, or one of its own."""

    def ask(self, procedure: Callable[..., Any], *args: Any) -> Any:
        """Return what ``procedure`` returns for the held operator and ``args``.

        Raises what it raises, a process of its own as ``RemoteError``, and ``CandidateError`` where
        that process gives no answer.
        """

    def renew(self) -> bool:
        """Begin again in a fresh process, and return whether that is possible."""


@dataclass(frozen=True)
class Here:
    """The end of an operator that the judge's own process holds; nothing is protected."""

    held: Holds

    def ask(self, procedure: Callable[..., Any], *args: Any) -> Any:
        """Run ``procedure`` in this process."""
        try:
            return answer(self.held, procedure, *args)
        except Exception as error:
            if isinstance(self.held, Held) and self.held.implementation is None:
                vars(error)["of_reference"] = calls_the_reference(procedure)
            raise

    def renew(self) -> bool:
        """Return False."""
        return False


def answer(held: Any, procedure: Callable[..., Any], *args: Any) -> Any:
    """Run a procedure in this process. A kernel that does not build raises, and so does an error
    that kernels meet after the call returned; the CUDA stream that was current stays so."""
    stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None
    try:
        with fallback.strict():
            found = procedure(held, *args)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return found
    finally:
        if stream is not None:
            torch.cuda.set_stream(stream)


def runs_kernels(held: Holds, device: torch.device) -> bool:
    """Return whether a device still runs kernels here; an illegal access ends its context."""
    if device.type != "cuda":
        return True
    try:
        torch.cuda.synchronize(device)
        torch.rand(1, device=device).item()
    except RuntimeError:
        return False
    return True


class RemoteError(Exception):
    """An error that a procedure raised in another process.

    ``kinds`` are the names of its classes, the most special first. They are what that process says.
    ``of_reference`` tells that the procedure called the reference, and not the implementation.
    """

    def __init__(self, kinds: Sequence[str], text: str, of_reference: bool = False) -> None:
        super().__init__(text)
        self.kinds = tuple(kinds)
        self.of_reference = of_reference


class CandidateError(Exception):
    """An end of a candidate's process, or its silence, or an answer that is none.

    ``hangs`` tells that the call did not end within its time, so that it is not worth repeating.
    """

    def __init__(self, text: str, hangs: bool = False) -> None:
        super().__init__(text)
        self.hangs = hangs


def calls_the_reference(procedure: Callable[..., Any]) -> bool:
    """Return whether a procedure, in the reference's process, calls the reference; those of
    ``asked_inputs`` call what else the operator declares."""
    return not procedure.__module__.endswith(".asked_inputs")


def is_of_reference(error: BaseException) -> bool:
    """Return whether the reference raised an error, in this process or in its own."""
    return bool(getattr(error, "of_reference", False))


def is_a(error: BaseException, *kinds: type[BaseException]) -> bool:
    """Return whether an error is of one of ``kinds``, in this process or as another one said."""
    if isinstance(error, RemoteError):
        return any(kind.__name__ in error.kinds for kind in kinds)
    return isinstance(error, kinds)


def kinds_of(error: BaseException) -> tuple[str, ...]:
    """Return the names of an error's classes, the most special first."""
    if isinstance(error, RemoteError):
        return error.kinds
    return tuple(kind.__name__ for kind in type(error).__mro__)


def said(error: BaseException, most: int) -> str:
    """Return an error's class and first line, of at most ``most`` characters."""
    if isinstance(error, RemoteError):
        return f"{error.kinds[0]}: {_first_line(error)[:most]}".removesuffix(": ")
    if isinstance(error, CandidateError):
        return str(error)
    return summary(error, most)


def fault_of(error: BaseException, most: int) -> str:
    """Return what a call did wrong, as a predicate: what it raised, or returned in place of a
    tensor."""
    if isinstance(error, CandidateError) or "WireError" in kinds_of(error):
        return _first_line(error)
    if "0 active drivers" in str(error):
        return "launches a Triton kernel, which needs a GPU, and there is none here"
    if is_of_reference(error):
        advice = "let validate or draw leave such inputs out"
        return f"the reference raised {said(error, most)}; {advice}"
    return f"raised {said(error, most)}"


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), "")


def on_cpu(op: FusedOp, implementation: str) -> FusedOp:
    """Return an operator whose Triton implementation runs on the CPU, interpreted, untuned."""
    only = {implementation: replace(op.implementations[implementation], device="cpu")}
    return replace(op, implementations=only, configs={}, prefer=None)


def results(held: Callable[..., Any], *args: Any) -> list[Tensor]:
    """Return the tensors that a call returns, as a list."""
    return list(tensors_in((held(*args),)))
