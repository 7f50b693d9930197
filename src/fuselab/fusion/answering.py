"""Functions of PyTorch and Python that do not see a traced value, replaced while a trace runs."""

from __future__ import annotations

import builtins
import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree

from fuselab.fusion.facts import (
    NotTraceableError,
    ReadableAttribute,
    ReadableProxy,
    as_it_is,
)

# The functions of torch that make tensors of nothing but sizes and numbers: a trace does not see
# their calls.
_FACTORIES = (
    *("zeros", "ones", "full", "empty", "eye", "arange", "linspace", "tensor"),
    *("tril_indices", "triu_indices"),
)
# Code that tells proxies from tensors.
_OF_PROXIES = ("torch.fx", "torch.utils", "torch.overrides", "torch.nn.parameter", "fuselab.")


@contextlib.contextmanager
def answering(tracer: Any, all_factories: bool) -> Iterator[None]:
    """Let code that a trace of this thread runs find out about traced values what it would find
    out about the tensors of the recorded call.

    Calls that make a tensor of a size of another are recorded, or ``all_factories``: without that a
    tensor is a constant of the trace. ``isinstance``, a dtype's limits and the grad mode are those
    of the recorded call. NotTraceableError is raised where a trace would lose what a call does.
    """
    stand_ins = _StandIns(tracer, all_factories)
    replaced: list[tuple[Any, str, Callable[[Any], Any]]] = [
        *((torch, name, stand_ins.factory) for name in _FACTORIES),
        *((torch, name, stand_ins.limits) for name in ("finfo", "iinfo")),
        (torch, "is_grad_enabled", stand_ins.grad_mode),
        (torch.autograd.Function, "apply", stand_ins.own_backward),
        (saved_tensors_hooks, "__enter__", stand_ins.saved_hooks),
        (torch.autocast, "__enter__", stand_ins.autocast),
        (builtins, "isinstance", stand_ins.instance),
    ]
    originals = [vars(owner)[name] for owner, name, _ in replaced]
    try:
        for (owner, name, stand_in), original in zip(replaced, originals, strict=True):
            setattr(owner, name, stand_in(original))
        yield
    finally:
        for (owner, name, _), original in zip(replaced, originals, strict=True):
            setattr(owner, name, original)


class _StandIns:
    """Makes what is called in place of a function, given the function."""

    def __init__(self, tracer: Any, all_factories: bool) -> None:
        self.tracer, self.all_factories = tracer, all_factories
        self.thread = threading.get_ident()

    @property
    def traces(self) -> bool:
        """Whether the code that runs now is being traced."""
        return threading.get_ident() == self.thread and not self.tracer.evaluates

    def factory(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def make(*args: Any, **kwargs: Any) -> Any:
            leaves = pytree.tree_leaves((args, kwargs))
            follows = any(isinstance(leaf, fx.Proxy) for leaf in leaves)
            if self.traces and (follows or self.all_factories):
                return self.tracer.create_proxy("call_function", original, args, kwargs)
            return original(*args, **kwargs)

        return make

    def limits(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def read(*dtypes: Any) -> Any:
            return original(*(self._as_read(dtype) for dtype in dtypes))

        return read

    def _as_read(self, dtype: Any) -> Any:
        return self.tracer.read(dtype, as_it_is) if _is_traced(dtype) else dtype

    def grad_mode(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def read() -> Any:
            # no_grad asks for the mode too, which it restores.
            if self.traces and _caller() != "torch.autograd.grad_mode":
                self.tracer.asks_grad_mode = True
            return original()

        return read

    def own_backward(self, original: Any) -> Any:
        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            if any(map(_is_traced, args)):
                raise NotTraceableError(f"it calls {cls.__name__}, which has a backward of its own")
            return original.__func__(cls, *args, **kwargs)

        return classmethod(apply)

    def saved_hooks(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def enter(hooks: Any) -> Any:
            if self.traces:
                raise NotTraceableError(
                    "it computes a part again in the backward, as torch.utils.checkpoint does"
                )
            return original(hooks)

        return enter

    def autocast(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def enter(context: Any) -> Any:
            if self.traces:
                raise NotTraceableError("it turns torch.autocast on or off for a part of it")
            return original(context)

        return enter

    def instance(self, original: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
        def is_instance(value: Any, kinds: Any) -> bool:
            if original(value, kinds):
                return True
            if not _is_traced(value) or not self.traces or _caller().startswith(_OF_PROXIES):
                return False
            return issubclass(self.tracer.class_of(value), kinds)

        return is_instance


def _is_traced(value: Any) -> bool:
    return type(value) in (ReadableProxy, ReadableAttribute)


def _caller() -> str:
    """Return the name of the module whose code calls the function that calls this one."""
    return str(sys._getframe(2).f_globals.get("__name__", ""))
