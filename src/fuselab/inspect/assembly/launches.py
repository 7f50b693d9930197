"""The kernels that an operator or a function launches, recorded on a GPU that is not there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fuselab.errors import FuselabError, TargetError, UnknownNameError, UnsupportedError
from fuselab.inspect.assembly import cuda_compile, triton_compile
from fuselab.inspect.assembly.architectures import Architecture
from fuselab.inspect.assembly.kernel import Kernel
from fuselab.inspect.assembly.pretended_gpu import PretendedGpu, pretended_gpu
from fuselab.op import Case, FusedOp, Inputs, dtype_name
from fuselab.runtime.cuda_source import CudaSource

SEED = 0
# PyTorch's operators that compute or copy; views and allocations launch no kernel.
_QUIET = (
    frozenset(
        (
            "alias",
            "as_strided",
            "detach",
            "device",
            "diagonal",
            "empty",
            "empty_like",
            "empty_strided",
        )
    )
    | frozenset(
        ("expand", "lift_fresh", "narrow", "new_empty", "new_empty_strided", "permute", "prim", "t")
    )
    | frozenset(
        (
            "promote_types",
            "reshape",
            "select",
            "set_",
            "slice",
            "split",
            "split_with_sizes",
            "squeeze",
        )
    )
    | frozenset(
        (
            "transpose",
            "unbind",
            "unfold",
            "unsqueeze",
            "view",
            "view_as",
            "_to_copy",
            "_unsafe_view",
        )
    )
)


@dataclass
class Recording:
    """The launches of a run: compiled kernels, library calls of PyTorch, and what was left out."""

    kernels: list[Kernel] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)


class _Calls(TorchDispatchMode):
    """A note of PyTorch's own computing operators among a launcher's calls."""

    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self._found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.partition(".")[0]
        # On meta tensors a launcher asks the reference for shapes; nothing is computed.
        is_meta = any(
            isinstance(one, Tensor) and one.device.type == "meta"
            for one in pytree.tree_leaves((args, kwargs))
        )
        is_new = name not in _QUIET and name not in self._found
        if is_new and func.namespace == "aten" and not is_meta:
            self._found.append(name)
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _recorded(
    architecture: Architecture,
    wanted: str | None,
    settings: Mapping[str, Any],
    launched_by: Callable[[], str],
    found: Recording,
) -> Iterator[PretendedGpu]:
    """Compile, into ``found``, each kernel launched inside whose name is ``wanted``."""
    seen: set[object] = set()

    def keep(kernel: Kernel) -> None:
        key = (kernel.name, kernel.binary, kernel.launched_by)
        if key not in seen:
            seen.add(key)
            found.kernels.append(kernel)

    def on_triton(kernel: Any, grid: Any, args: Any, keywords: Any, run: Any) -> None:
        function = triton_compile.jit_function(kernel)
        if wanted is not None and wanted != function.__name__:
            return
        bound = dict(zip(function.arg_names, args, strict=False)) | keywords
        chosen = {**bound, **_known(function, settings)}
        made = triton_compile.compiled_launch(
            kernel, architecture, (), chosen, None if settings else grid, run
        )
        keep(replace(made, launched_by=launched_by()))

    def on_cuda(
        source: CudaSource, expression: str, grid: Any, block: Any, args: Any, shared_bytes: int
    ) -> None:
        if wanted is not None and wanted not in (expression, expression.partition("<")[0]):
            return
        if architecture.vendor != "nvidia":
            note = f"{launched_by()} is CUDA C++, which does not compile for {architecture.name}"
            if note not in found.skipped:
                found.skipped.append(note)
            return
        made = cuda_compile.compiled(
            source, expression, architecture, grid, block, args, shared_bytes
        )
        keep(replace(made, launched_by=launched_by()))

    with pretended_gpu(architecture, on_triton, on_cuda) as gpu:
        yield gpu


def _known(function: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that this kernel has: its arguments, and how it is launched."""
    names = {*function.arg_names, *triton_compile.OPTIONS}
    return {name: value for name, value in settings.items() if name in names}


def check_settings(kernels: Sequence[Kernel], settings: Mapping[str, Any]) -> None:
    """Raise UnknownNameError for a setting that none of the kernels has."""
    known = {name for kernel in kernels for name in kernel.settings}
    for name in settings:
        if name not in known | set(triton_compile.OPTIONS):
            raise UnknownNameError("setting", name, known)


def of_operator(
    op: FusedOp,
    architecture: Architecture,
    *,
    implementation: str | None = None,
    case: str | None = None,
    dtype: torch.dtype | None = None,
    kernel: str | None = None,
    settings: Mapping[str, Any] | None = None,
) -> tuple[Recording, str]:
    """Return what the operator's implementations launch, forward and backward, and the case that
    they launch it for.

    Raises UnknownNameError, UnsupportedError if no implementation takes the case, BuildError.
    """
    names = _implementations(op, implementation)
    chosen = _case(op, case)
    element = dtype or op.dtypes[0]
    if element not in op.dtypes:
        raise UnknownNameError(
            f"dtype of {op.name}", dtype_name(element), [dtype_name(each) for each in op.dtypes]
        )
    found = Recording()
    running = ""
    with _recorded(architecture, kernel, settings or {}, lambda: running, found) as gpu:
        args = _arguments(op, chosen, element, gpu)
        for name in names:
            declared = op.implementations[name]
            reason = declared.supports(*args)
            if reason is not None:
                found.skipped.append(f"{name} does not take this case: {reason}")
                continue
            with gpu.fake, _Calls(found.calls):
                running = f"{name} forward"
                output = _called(declared.forward, op.arranged(args), running)
            if declared.backward is not None and op.gradient is not None:
                running = f"{name} backward"
                backward = _backward_arguments(op, args, output, gpu)
                reason = declared.supports_backward(*backward)
                if reason is not None:
                    found.skipped.append(f"{running} does not take this case: {reason}")
                    continue
                with gpu.fake, _Calls(found.calls):
                    _called(declared.backward, backward, running)
    if len(found.skipped) == len(names) and not found.kernels:
        raise UnsupportedError(f"{op.name}: {'; '.join(found.skipped)}.")
    return found, f"{chosen.name} {dtype_name(element)}"


def _implementations(op: FusedOp, wanted: str | None) -> list[str]:
    on_gpu = [name for name, each in op.implementations.items() if each.device == "cuda"]
    if wanted is None:
        if not on_gpu:
            raise UnsupportedError(f"{op.name} has no implementation for a GPU.")
        return on_gpu
    if wanted not in op.implementations:
        raise UnknownNameError("implementation", wanted, op.implementations)
    if wanted not in on_gpu:
        raise UnsupportedError(
            f"{wanted} of {op.name} runs on the CPU; asm shows GPU kernels: {', '.join(on_gpu)}."
        )
    return [wanted]


def _case(op: FusedOp, name: str | None) -> Case:
    if name is not None:
        for case in op.cases:
            if case.name == name:
                return case
        raise UnknownNameError("case", name, [case.name for case in op.cases])
    if not op.cases:
        raise TargetError(f"{op.name} declares no cases, so there are no inputs to compile for.")
    small = {"tiny", "huge"}
    timed = [case for case in op.cases if "bench" in case.tags and not case.tags & small]
    # The middle one: neither a size that the launch decides, nor the largest.
    return timed[len(timed) // 2] if timed else op.cases[0]


def _arguments(op: FusedOp, case: Case, dtype: torch.dtype, gpu: PretendedGpu) -> tuple[Any, ...]:
    """Return a case's arguments as fake tensors; made without memory where the case allows it."""
    generator = torch.Generator().manual_seed(SEED)
    try:
        with gpu.fake:
            inputs = case.make(gpu.device, dtype, generator)
            return op.bind(inputs)
    except FuselabError:
        raise
    except Exception:  # it reads values, which fake tensors do not have
        inputs = case.make(torch.device("cpu"), dtype, torch.Generator().manual_seed(SEED))
        moved = Inputs(gpu.moved(tuple(inputs.args)), gpu.moved(dict(inputs.kwargs)))
        return op.bind(moved)


def _backward_arguments(
    op: FusedOp, args: tuple[Any, ...], output: Any, gpu: PretendedGpu
) -> tuple[Any, ...]:
    assert op.gradient is not None
    with gpu.fake:
        saved = op.gradient.save(output, *args)
        upstream = tuple(map(torch.empty_like, op.outputs_of(op.without_residuals(output))))
    grad_output = upstream[0] if len(upstream) == 1 else upstream
    tensors = [
        value
        for parameter, value in zip(op.signature.parameters, args, strict=True)
        if parameter in op.tensor_parameters
    ]
    flat = [
        item
        for value in tensors
        for item in (value if isinstance(value, list | tuple) else (value,))
    ]
    needs = tuple(isinstance(item, Tensor) and item.is_floating_point() for item in flat)
    return (needs, *op.arranged([grad_output, *saved]))


def _called(function: Callable[..., Any], args: Sequence[Any], what: str) -> Any:
    try:
        return function(*args)
    except FuselabError:
        raise
    except Exception as error:
        first = str(error).strip().splitlines()
        raise TargetError(
            f"{what} cannot run without a GPU: {type(error).__name__}: "
            f"{(first[0] if first else '').rstrip('.')}."
        ) from error


def of_function(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    architecture: Architecture,
    kernel: str | None,
    settings: Mapping[str, Any],
) -> Recording:
    """Return what a plain function launches when it is called with these arguments."""
    found = Recording()
    name = getattr(function, "__name__", "the function")
    with _recorded(architecture, kernel, settings, lambda: name, found) as gpu:
        moved, named = gpu.moved(tuple(args)), gpu.moved(dict(kwargs))
        with gpu.fake, _Calls(found.calls):
            _called(lambda: function(*moved, **named), (), name)
    return found
