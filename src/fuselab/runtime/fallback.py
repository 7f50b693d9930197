"""The fallback of a kernel that does not build: the reference with one warning, or an error."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

import torch

from fuselab.errors import BuildError


class FallbackWarning(UserWarning):
    """The warning that a kernel did not build and the reference runs in its place."""


class _State:
    # Process-wide, because autograd on CUDA runs backwards in its own threads.
    strict: bool = False


_state = _State()
_broken: dict[tuple[str, str], BuildError] = {}


@contextlib.contextmanager
def strict() -> Iterator[None]:
    """Let a kernel that does not build raise ``BuildError`` within this context, without fallback.

    ``check``, ``bench``, ``study`` and the tests use it, because there a fallback is a failure.
    """
    before, _state.strict = _state.strict, True
    try:
        yield
    finally:
        _state.strict = before


def is_strict() -> bool:
    """Return whether a failed build raises here instead of falling back."""
    return _state.strict


def is_broken(op_name: str, implementation: str) -> bool:
    """Return whether this implementation failed to build before in this process."""
    return (op_name, implementation) in _broken


def note_failed_build(op_name: str, implementation: str, error: BuildError) -> None:
    """Raise ``error`` if strict, else warn once per operator and implementation. A failure while a
    CUDA graph is captured is not remembered, because the same kernel may load later."""
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
