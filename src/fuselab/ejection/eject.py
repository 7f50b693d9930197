"""``fuselab.eject``: write a plain PyTorch function as fused kernels."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import keyword
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fuselab
from fuselab.ejection.calls import call_name
from fuselab.ejection.compose import composition_files, describe
from fuselab.ejection.folder import check_folder, write_folder
from fuselab.ejection.package import planned_package
from fuselab.ejection.regions import ALONE, LIBRARY, MOVES_NOTHING, Cut, cut
from fuselab.ejection.taken import mapped
from fuselab.ejection.whole import planned_whole
from fuselab.ejection.write import package_files
from fuselab.ejection.write_launchers import where_it_runs
from fuselab.ejection.write_standalone import standalone_files
from fuselab.errors import EjectError
from fuselab.inspect.user_code import check_arguments, plain, raising_target_error

_DEEPEST = 10_000  # calls of Python within each other


@dataclass(frozen=True)
class Ejected:
    """The text of every file that eject writes, by its name; facts for the manifest and for
    JSON."""

    files: Mapping[str, str]
    about: Mapping[str, Any]
    facts: Mapping[str, Any]


def eject(
    function: Callable[..., Any],
    *example_inputs: Any,
    out: str | Path,
    name: str | None = None,
    inference: bool = False,
    force: bool = False,
    keywords: Mapping[str, Any] | None = None,
    standalone: bool = False,
    whole: bool = False,
) -> Path:
    """Write the kernel package of ``function`` to the folder ``out`` and return its path.

    Where a part of the function cannot become a kernel (a matrix product), the folder holds a
    package for each chain of other calls, and ``composed.py``, the function over them. Dropouts
    take their masks from a seed, a further argument.

    Args:
        function: plain PyTorch or an ``nn.Module``, without control flow that depends on values of
            tensors; a module's parameters and buffers become arguments of the operator.
        example_inputs: its arguments. The kernels hold for other sizes of the same number of
            dimensions; values that are no tensors are fixed.
        out: a folder that does not exist.
        name: the operator's name; the function's by default.
        inference: True writes no backward.
        force: True replaces an earlier package in ``out``, but for files edited by hand.
        keywords: arguments of the call that are given by name.
        standalone: True writes the parts of fuselab's runtime that the kernels use beside them, so
            that the package runs on torch and Triton alone. It has no CUDA C++ kernels.
        whole: True also writes one Triton kernel of the whole forward, small matrix products and
            all, to ``NAME_whole``; the function calls it on a GPU where no gradient is wanted.

    Raises:
        EjectError: the function cannot become kernels, or the folder exists.
        TargetError: the example does not fit the function, or the function raises on it.
        OutputError: the folder cannot be written.
    """
    folder = Path(out)
    check_folder(folder, force)
    name = name or default_name(function)
    made = ejected(function, example_inputs, keywords or {}, name, inference, standalone, whole)
    write_folder(folder, made.files, made.about, force)
    return folder


def ejected(
    function: Callable[..., Any],
    args: Sequence[Any],
    keywords: Mapping[str, Any],
    name: str,
    inference: bool = False,
    standalone: bool = False,
    whole: bool = False,
) -> Ejected:
    """Return the files of ``function``: one operator where all of it can be, else a composition;
    with the ``whole`` as one kernel beside it.

    Raises EjectError where no part of it can become a kernel, or ``name`` names no operator.
    """
    if not re.fullmatch(r"[a-z_][a-z0-9_]*", name) or keyword.iskeyword(name) or name[-1] == "_":
        raise EjectError(
            f"{name!r} cannot name an operator, which is a Python function in lower case whose "
            "name does not end in '_': name another."
        )
    function, args, keywords = unbound(function, args, keywords)
    _check_call(function, args, keywords)
    try:
        with _deep_expressions():
            written = _with_whole if whole else _plain
            return written(function, args, keywords, name, inference, standalone)
    except EjectError:
        _raise_what_it_raises(function, args, keywords)
        raise


def _check_call(
    function: Callable[..., Any], args: Sequence[Any], keywords: Mapping[str, Any]
) -> None:
    """Raise EjectError or TargetError where ``function`` cannot be called with the example."""
    label = getattr(function, "__name__", type(function).__name__)
    if isinstance(function, type) or not callable(function):
        what = (
            f"{label} is a class" if isinstance(function, type) else f"{function!r} is no function"
        )
        raise EjectError(f"{plain(what)}; give a function, or an object of an nn.Module.")
    called = function.forward if isinstance(function, torch.nn.Module) else function
    try:
        inspect.signature(called)
    except ValueError:
        raise EjectError(
            f"{label} has no signature in Python; write a function that calls it, and eject that."
        ) from None
    check_arguments(called, label, "the example", args, keywords)


def _raise_what_it_raises(
    function: Callable[..., Any], args: Sequence[Any], keywords: Mapping[str, Any]
) -> None:
    """Call a function that was refused, on copies, and raise TargetError if it raises: that error
    has the example's sizes, and a tracer's has symbols."""
    label = getattr(function, "__name__", type(function).__name__)

    def copied(tensor: Tensor, _: str) -> Tensor:
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)

    own_args = [mapped(one, copied, "") for one in args]
    own_keywords = {key: mapped(one, copied, key) for key, one in keywords.items()}
    with contextlib.suppress(Exception):  # a module may hold what cannot be copied
        function = copy.deepcopy(function)
    with torch.random.fork_rng(), raising_target_error(f"{label} raised on the example:"):
        function(*own_args, **own_keywords)


@contextlib.contextmanager
def _deep_expressions() -> Iterator[None]:
    """Let functions call themselves as often as the expression of a long chain is deep."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(max(before, _DEEPEST))
    try:
        yield
    finally:
        sys.setrecursionlimit(before)


def _plain(
    function: Callable[..., Any],
    args: Sequence[Any],
    keywords: Mapping[str, Any],
    name: str,
    inference: bool,
    standalone: bool,
) -> Ejected:
    try:
        package = planned_package(function, args, keywords, name, inference)
    except EjectError as refused:
        parts = cut(function, args, keywords, name, inference)
        if not parts.regions:
            raise _nothing_gained(refused, parts) from None
        return Ejected(composition_files(parts, standalone), about(name), describe(parts))
    if not package.captured.arguments:
        raise EjectError(
            f"{name} takes no tensors, so each call computes the same; there is no kernel to write."
        )
    files = standalone_files(package) if standalone else package_files(package)
    facts = {**package.describe(), "where": where_it_runs(package)}
    return Ejected(files, about(name), facts)


def _nothing_gained(refused: EjectError, parts: Cut) -> EjectError:
    """Return the error of a function of which no part becomes a kernel: the sentence on the call
    that has none, and, where the others could have one, why they do not get it."""
    could = [call_name(one) for one in parts.calls if parts.reason(one) == ALONE]
    plain = str(refused).removesuffix(".").removesuffix("; eject the parts before and after it")
    reasons = {parts.reason(one) for one in parts.calls}
    if LIBRARY in reasons and reasons <= {LIBRARY, MOVES_NOTHING}:
        return EjectError(
            f"{plain}, and nothing else is computed; kernels are written for the chains of "
            "operations between such calls."
        )
    if not could:
        return refused
    names = ", ".join(dict.fromkeys(could))
    return EjectError(
        f"{plain}, and of what remains ({names}) no two calls could share a kernel; a kernel of "
        "one call would gain nothing."
    )


def _with_whole(
    function: Callable[..., Any],
    args: Sequence[Any],
    keywords: Mapping[str, Any],
    name: str,
    inference: bool,
    standalone: bool,
) -> Ejected:
    if standalone:
        raise EjectError(
            "one kernel of the whole runs on fuselab's runtime: leave --standalone away."
        )
    one = planned_whole(function, args, keywords, f"{name}_whole")
    parts = cut(function, args, keywords, name, inference)
    facts = describe(parts)
    facts["whole"] = one.describe()
    return Ejected(composition_files(parts, whole=one), about(name), facts)


def about(name: str) -> dict[str, Any]:
    """Return the facts of a package for its manifest."""
    return {
        "operator": f"ejected::{name}",
        "fuselab": fuselab.__version__,
        "torch": torch.__version__.partition("+")[0],
    }


def unbound(
    function: Callable[..., Any], args: Sequence[Any], keywords: Mapping[str, Any]
) -> tuple[Callable[..., Any], Sequence[Any], Mapping[str, Any]]:
    """Return the function behind a ``functools.partial``, and the arguments that it is called
    with."""
    while isinstance(function, functools.partial):
        args, keywords = (*function.args, *args), {**function.keywords, **keywords}
        function = function.func
    return function, args, keywords


def default_name(function: Callable[..., Any]) -> str:
    """Return the name of a function, or of a module's class, as an operator's name: without the
    ``_`` at the end, which would say that the operator itself writes over its arguments."""
    function, _, _ = unbound(function, (), {})
    name = getattr(function, "__name__", type(function).__name__)
    name = "function" if name == "<lambda>" else name.rstrip("_")
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
