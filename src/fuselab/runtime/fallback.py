"""When a kernel does not build: the reference with one warning, or a failure where it counts."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

import torch

from fuselab.errors import BuildError


class FallbackWarning(UserWarning):
    """A kernel did not build, and the reference runs in its place."""


class _State:
    # Of the whole process: on CUDA, autograd runs backwards in threads of its own.
    strict: bool = False


_state = _State()
_broken: dict[tuple[str, str], BuildError] = {}


@contextlib.contextmanager
def strict() -> Iterator[None]:
    """Within this context a kernel that does not build raises ``BuildError``; nothing falls back.

    ``check``, ``bench``, ``study`` and the tests run in it: there a fallback is a failure.
    """
    before, _state.strict = _state.strict, True
    try:
        yield
    finally:
        _state.strict = before


def is_strict() -> bool:
    """Whether a failed build raises here instead of falling back."""
    return _state.strict


def is_broken(op_name: str, implementation: str) -> bool:
    """Whether this implementation failed to build before in this process."""
    return (op_name, implementation) in _broken


def note_failed_build(op_name: str, implementation: str, error: BuildError) -> None:
    """Raise ``error`` where strict; else warn once per operator and implementation. While a CUDA
    graph is captured it is not remembered: what does not load then can load later."""
    if _state.strict:
        raise error
    if not is_broken(op_name, implementation):
        if not _is_capturing():
            _broken[op_name, implementation] = error
        warnings.warn(
            f"{op_name}: the {implementation} kernel did not build, the PyTorch reference runs in "
            f"its place: {error}",
            FallbackWarning,
            stacklevel=2,
        )


def _is_capturing() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def forget() -> None:
    """Try every implementation that failed to build again."""
    _broken.clear()
