"""The call of a Triton kernel that a function of the user's makes: its arguments, and its grid."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from fuselab.errors import FuselabError, TargetError
from fuselab.inspect.assembly import triton_compile
from fuselab.inspect.assembly.architectures import architecture
from fuselab.inspect.assembly.pretended_gpu import pretended_gpu

_ANY = "sm_90"  # where there is no GPU, launchers run for this one


@dataclass(frozen=True)
class RecordedLaunch:
    """A kernel's first launch: its arguments by name, ``num_warps`` and the like among them, and
    the grid as it was given, a tuple or a function of the arguments."""

    kernel: Any
    values: Mapping[str, Any]
    grid: Any


class _Launched(BaseException):
    """Ends a launcher at the launch that was waited for."""


def recorded(
    launcher: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    kernels: Sequence[Any],
    device: torch.device | None,
) -> RecordedLaunch:
    """Return the first launch of one of ``kernels`` in a call of ``launcher``.

    The call's tensors lie on ``device``, and what it launches before runs; without a device
    they are fake tensors of a GPU that is not there. Raises TargetError where the function raises,
    or launches none of them.
    """
    name = getattr(launcher, "__name__", "the function")
    found: list[RecordedLaunch] = []
    with contextlib.ExitStack() as stack:
        if device is None:
            gpu = stack.enter_context(pretended_gpu(architecture(_ANY), _nothing, _nothing))
            moved, named = gpu.moved(tuple(args)), gpu.moved(dict(kwargs))
            stack.enter_context(gpu.fake)
        else:
            moved, named = on_device((tuple(args), dict(kwargs)), device)
        stack.enter_context(_watched(kernels, found))
        try:
            launcher(*moved, **named)
        except _Launched:
            return found[0]
        except FuselabError:
            raise
        except Exception as error:
            said = str(error).strip().splitlines()
            raise TargetError(
                f"{name} raised {type(error).__name__}: {said[0].rstrip('.') if said else ''}."
            ) from error
    wanted = ", ".join(triton_compile.jit_function(one).__name__ for one in kernels)
    raise TargetError(f"{name} does not launch {wanted} for the inputs of get_inputs().")


def _nothing(*args: Any) -> None:
    """Launch nothing, on a GPU that is not there."""


@contextlib.contextmanager
def _watched(kernels: Sequence[Any], found: list[RecordedLaunch]) -> Iterator[None]:
    """End the call inside at the first launch of one of the kernels, and note that launch."""
    from triton.runtime.autotuner import Autotuner, Heuristics
    from triton.runtime.jit import JITFunction

    def watching(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(kernel: Any, *args: Any, grid: Any, **keywords: Any) -> Any:
            if not any(kernel is one for one in kernels):
                return original(kernel, *args, grid=grid, **keywords)
            names = triton_compile.jit_function(kernel).arg_names
            keywords.pop("warmup", None)
            values = dict(zip(names, args, strict=False)) | keywords
            found.append(RecordedLaunch(kernel, values, grid))
            raise _Launched

        return run

    with contextlib.ExitStack() as stack:
        for kind in (JITFunction, Autotuner, Heuristics):
            stack.enter_context(mock.patch.object(kind, "run", watching(kind.run)))
        yield


def on_device(value: Any, device: torch.device) -> Any:
    """Return ``value`` with its tensors copied to ``device``, with the same strides; tensors that
    share memory share it there."""
    storages: dict[int, Tensor] = {}

    def moved(one: Any) -> Any:
        if isinstance(one, Tensor):
            return _moved(one, device, storages)
        if isinstance(one, tuple | list):
            return type(one)(map(moved, one))
        if isinstance(one, dict):
            return {name: moved(item) for name, item in one.items()}
        return one

    return moved(value)


def _moved(tensor: Tensor, device: torch.device, storages: dict[int, Tensor]) -> Tensor:
    storage = tensor.untyped_storage()
    key = storage._cdata
    if key not in storages:
        whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        whole = whole.set_(storage, 0, (storage.nbytes(),), (1,))
        storages[key] = whole.to(device, copy=True)
    held = torch.empty(0, dtype=tensor.dtype, device=device)
    return held.set_(
        storages[key].untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
    )
