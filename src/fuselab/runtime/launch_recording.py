"""Watching the launches of a call, to keep them as a plan or to count them.

``record`` watches an implementation. When all that it did was to launch kernels on its arguments
and on fresh memory (outputs and workspaces, uninitialised or filled with zeros), and to multiply
matrices by PyTorch's library between them, all that is kept as a plan.

What makes a plan right: while an implementation is watched, every PyTorch operator it calls is
seen. Anything but an allocation, a view, a product into fresh memory or the zeroing of such (a
copy, a fill, ``.item()``) means that this is not all that happens, and there is no plan for those
arguments.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fuselab.runtime import launch_plans
from fuselab.runtime.parameters import TracedFloat


class _Thread(threading.local):
    recording: Recording | LaunchWatch | ChoiceWatch | None = None


thread = _Thread()


def record(op_id: int, implementation: str, args: tuple[Any, ...]) -> Recording | Unrecorded:
    """A context in which an implementation runs with ``.args``; ``.finish(outputs)`` keeps the plan
    of its launches, if one can be. ``outputs`` is a tensor, or a tuple of tensors and None."""
    if (
        not launch_plans.EXTENSION.ready()
        or launch_plans.native is None
        or not launch_plans.native.wanted(op_id, implementation, args)
    ):
        return Unrecorded(args)
    return Recording(op_id, implementation, args)


class Unrecorded:
    """Stands in for a Recording where no plan is possible, or it is known that there is none."""

    def __init__(self, args: tuple[Any, ...]) -> None:
        self.args = args

    def __enter__(self) -> Unrecorded:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def finish(self, outputs: Any) -> None:
        """Nothing to keep."""


@dataclass(frozen=True)
class _Product:
    """A matrix product of PyTorch's library; ``kind`` is ``Product::Kind`` of launcher.cpp."""

    kind: int
    tensors: tuple[Tensor, ...]  # the result, then what the library took

    @staticmethod
    def of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
        """The product that a PyTorch operator has made, or None."""
        aten = torch.ops.aten
        kinds = {aten.mm.default: 1, aten.addmm.default: 2, aten._addmm_activation.default: 3}
        kind = kinds.get(func)
        # The schema's defaults are left out: what is here is a factor, or another dtype.
        if kind is None or not all(isinstance(arg, Tensor) for arg in args):
            return None
        if kwargs and (kind != 3 or kwargs.keys() != {"use_gelu"}):
            return None
        return _Product(kind + bool(kwargs.get("use_gelu")), (result, *args))


class _HostReads(TorchFunctionMode):
    """Notes the first read of a CPU tensor's memory that is no PyTorch operator."""

    READS = frozenset({Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__})

    def __init__(self) -> None:
        super().__init__()
        self.read: str | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self.READS:
            self.read = self.read or f"Tensor.{func.__name__}"
        return func(*args, **(kwargs or {}))


class _Watch(TorchDispatchMode):
    """Sees every PyTorch operator: keeps what was allocated, tells ``note`` what was filled with
    zeros and what products were made, notes the first operator that computes (without ``note`` a
    product does)."""

    # Questions about dtypes and shapes, which a plan's key holds.
    QUESTIONS = frozenset(
        {"aten::promote_types", "aten::result_type", "aten::can_cast", "aten::is_same_size"}
        | {"aten::is_floating_point", "aten::is_complex", "aten::is_signed"}
    )
    ALLOCATIONS = frozenset(
        {
            torch.ops.aten.empty.memory_format,
            torch.ops.aten.empty_strided.default,
            torch.ops.aten.empty_like.default,
            torch.ops.aten.new_empty.default,
            torch.ops.aten.new_empty_strided.default,
        }
    )
    ZEROS = frozenset(
        {
            torch.ops.aten.zeros.default,
            torch.ops.aten.zeros_like.default,
            torch.ops.aten.new_zeros.default,
        }
    )

    def __init__(self, note: Callable[[Tensor | _Product], None] | None = None) -> None:
        super().__init__()
        self.allocated: list[Tensor] = []
        self._computes: str | None = None
        self._reads = _HostReads()
        # Weak: in a cycle with its method's object the outputs, and the autograd graph behind them,
        # would live until Python collects it. A CUDA graph captured meanwhile meets accumulators of
        # gradients that belong to another stream, and breaks.
        self._method = None if note is None else weakref.WeakMethod(note)

    def __enter__(self) -> _Watch:
        self._reads.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._reads.__exit__(*error)

    @property
    def computes(self) -> str | None:
        """The first thing done with values, or None."""
        return self._computes or self._reads.read

    def _note(self, step: Tensor | _Product) -> None:
        if self._method is not None:
            method = self._method()
            assert method is not None
            method(step)

    def allocation_of(self, tensor: Tensor) -> Tensor | None:
        """Return the recorded allocation that has the storage of ``tensor``, or None."""
        storage = tensor.untyped_storage()._cdata
        return next(
            (found for found in self.allocated if found.untyped_storage()._cdata == storage), None
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in self.ALLOCATIONS:
            self.allocated.append(result)
        elif func in self.ZEROS:
            self.allocated.append(result)
            self._note(result)
        elif func is torch.ops.aten.zero_.default and _fills_its_storage(result):
            self._note(result)
        elif self._method and (product := _Product.of(func, args, kwargs or {}, result)):
            self.allocated.append(result)
            self._note(product)
        elif not (func.is_view or func.name().split(".")[0] in self.QUESTIONS):
            self._computes = self._computes or str(func)
        return result


class ChoiceWatch:
    """A context in which an implementation is chosen; ``is_final`` tells whether the next call of
    the kind gets the same one, as far as its key says."""

    def __init__(self) -> None:
        self.is_final = True

    def __enter__(self) -> ChoiceWatch:
        self._outer, thread.recording = thread.recording, self
        return self

    def __exit__(self, *_: object) -> None:
        thread.recording = self._outer

    def validate(self, validate: Callable[..., None], args: Sequence[Any]) -> None:
        """``validate(*args)``. Where that computes, it looks at values: each call has its own."""
        with _Watch() as watch:
            validate(*args)
        if watch.computes is not None:
            self.note_opaque(f"the validation calls {watch.computes}")

    def note(self, described: tuple[Any, ...], codes: str, values: Sequence[Any]) -> None:
        """A launch, which no choice should make."""
        self.note_opaque("a launch")

    def note_opaque(self, what: str) -> None:
        """The choice looks at what no key holds."""
        self.is_final = False
        if self._outer is not None:
            self._outer.note_opaque(what)


class LaunchWatch:
    """A context that hears of every launch this thread makes, in ``made``: whether on CUDA, the
    function, the device's index, grid, block, dynamic shared bytes."""

    def __init__(self) -> None:
        self.made: list[tuple[Any, ...]] = []

    def __enter__(self) -> LaunchWatch:
        self._outer, thread.recording = thread.recording, self
        return self

    def __exit__(self, *_: object) -> None:
        thread.recording = self._outer

    def note(self, described: tuple[Any, ...], codes: str, values: Sequence[Any]) -> None:
        """One launch, as it is about to happen."""
        self.made.append(described)

    def note_opaque(self, what: str) -> None:
        """One that nothing is known of."""


class Recording:
    """A recording of what an implementation launches for one set of arguments."""

    def __init__(self, op_id: int, implementation: str, args: tuple[Any, ...]) -> None:
        self._of = op_id, implementation, args
        self._seen: set[int] = set()
        self.args = tuple(
            TracedFloat(arg, index, self._seen) if isinstance(arg, float) else arg
            for index, arg in enumerate(args)
        )
        # LaunchWatch, and between them products and tensors that were filled with zeros.
        self._steps: list[tuple[tuple[Any, ...], str, list[Any]] | _Product | Tensor] = []
        self._opaque: str | None = None
        self._watch = _Watch(self._note_step)
        self._outer = thread.recording
        # (argument, item of it, tensor); item -1 for an argument that is a tensor itself.
        self._tensors = [
            (index, item, value)
            for index, arg in enumerate(args)
            for item, value in (enumerate(arg) if isinstance(arg, tuple | list) else ((-1, arg),))
            if isinstance(value, Tensor)
        ]
        self._device = self._tensors[0][2].device
        self._device_index = self._device.index if self._device.type == "cuda" else None
        self._stream = raw_stream(self._device_index)

    def __enter__(self) -> Recording:
        thread.recording = self
        _watch_triton(True)
        self._watch.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._watch.__exit__(kind, error, traceback)
        _watch_triton(False)
        thread.recording = self._outer

    def note(self, described: tuple[Any, ...], codes: str, values: Sequence[Any]) -> None:
        """One launch, as it is about to happen."""
        self._steps.append((described, codes, list(values)))
        if described[0]:
            self._check_stream(described[2])

    def _note_step(self, step: Tensor | _Product) -> None:
        self._steps.append(step)
        written = step if isinstance(step, Tensor) else step.tensors[0]
        if written.is_cuda:
            self._check_stream(written.get_device())

    def _check_stream(self, device_index: int) -> None:
        if device_index != self._device_index or raw_stream(device_index) != self._stream:
            self.note_opaque("a launch on another device or stream")

    def note_opaque(self, what: str) -> None:
        """Something happened that a plan cannot repeat."""
        self._opaque = self._opaque or what

    def finish(self, outputs: Any) -> None:
        """The implementation returned ``outputs``: keep its launches as a plan, or remember that
        there is none for such arguments."""
        assert launch_plans.native is not None
        plan = self._plan(outputs)
        if plan is None or not launch_plans.native.keep(*self._of, *plan):
            launch_plans.native.reject(*self._of)

    def why_not(self) -> str | None:
        """Why the calls seen so far cannot be a plan, or None."""
        if self._opaque is not None:
            return self._opaque
        if self._watch.computes is not None:
            return f"the implementation calls {self._watch.computes}"
        if all(isinstance(step, Tensor) for step in self._steps):
            return "no launches"
        return None

    def _plan(self, outputs: Any) -> tuple[Any, ...] | None:
        """The arguments of ``keep`` in launcher.cpp."""
        is_tuple = isinstance(outputs, tuple | list)
        results = list(outputs) if is_tuple else [outputs]
        if self.why_not() is not None:
            return None
        memory = _Memory(self._watch, self._device)
        if not all(map(memory.add_output, results)):
            return None
        steps: list[Any] = []
        traced: set[int] = set()
        computed_float = False
        for step in self._steps:
            if isinstance(step, Tensor):
                place = memory.place(step)
                if place is None:
                    return None
                steps.append(place)
                continue
            if isinstance(step, _Product):
                operands = [self._operand(tensor, memory) for tensor in step.tensors]
                if any(operand is None for operand in operands):
                    return None
                steps.append((step.kind, operands))
                continue
            described, codes, values = step
            parameters: list[tuple[Any, ...]] = []
            for code, value in zip(codes, values, strict=True):
                if code in "tm":
                    tensor, *layout = value if code == "m" else (value,)
                    source = self._source(tensor, memory)
                    if source is None:
                        return None
                    parameters.append((code, *source, *layout))
                elif code == "s":
                    content, tensors = value
                    members = [(at, self._source(tensor, memory)) for at, tensor in tensors]
                    if any(source is None for _, source in members):
                        return None
                    parameters.append((code, 0, 0, content, members))
                elif isinstance(value, TracedFloat):
                    parameters.append((code, 1, value.index, -1))
                    traced.add(value.index)
                else:
                    parameters.append((code, 0, 0, value))
                    computed_float |= code in "fd"
            touched = sum(value.nbytes for value in values if isinstance(value, Tensor))
            steps.append((described, parameters, touched))
        if not memory.used_all_memory():
            return None
        floats = {index for index, arg in enumerate(self._of[2]) if isinstance(arg, float)}
        by_value = bool(floats) and (computed_float or bool(self._seen) or floats != traced)
        return steps, memory.tensors, len(results), is_tuple, by_value

    def _source(self, value: Tensor, memory: _Memory) -> tuple[int, int, int] | None:
        """Return the source of a tensor: (1, argument, item of it or -1) or (2, memory, byte offset
        in it)."""
        pointer = value.data_ptr()
        if pointer == 0:
            return None
        for index, item, tensor in self._tensors:
            # The first of several with this address: which of them share one is a part of the key.
            if tensor.data_ptr() == pointer:
                return 1, index, item
        place = memory.place(value)
        return None if place is None else (2, place, pointer - value.untyped_storage().data_ptr())

    def _operand(self, value: Tensor, memory: _Memory) -> tuple[Any, ...] | None:
        """A tensor of a product: where it comes from, its sizes, its strides."""
        source = self._source(value, memory)
        if source is None:
            return None
        where, index, item = source
        base: Any = memory.tensors[index] if where == 2 else self._of[2][index]
        if where == 1 and item >= 0:
            base = base[item]
        # A plan makes its views by strides alone.
        if base.dtype != value.dtype or value.is_conj() or value.is_neg():
            return None
        return source, tuple(value.shape), value.stride()


class _Memory:
    """The memory that a plan allocates: the outputs (None if not needed), then the workspaces."""

    def __init__(self, watch: _Watch, device: torch.device) -> None:
        self.tensors: list[Tensor | None] = []
        self._watch, self._device = watch, device
        self._places: dict[int, int] = {}  # by storage
        self._used: set[int] = set()

    def add_output(self, result: Any) -> bool:
        """Whether a result can be had again by allocating the like."""
        if result is not None and (type(result) is not Tensor or self._place_new(result) is None):
            return False
        if result is None:
            self.tensors.append(None)
        return True

    def place(self, value: Tensor) -> int | None:
        """Return the index in ``tensors`` of the memory of ``value``, appended if it is new; None
        if that memory was not allocated during the recording."""
        place = self._places.get(value.untyped_storage()._cdata)
        if place is None:
            allocated = self._watch.allocation_of(value)
            place = None if allocated is None else self._place_new(allocated)
        if place is not None:
            self._used.add(place)
        return place

    def used_all_memory(self) -> bool:
        """Whether every memory has been asked for."""
        return self._used == set(self._places.values())

    def _place_new(self, tensor: Tensor) -> int | None:
        """``tensor``'s place, if ``empty_strided`` gives the like: the whole of a storage that was
        allocated here, on the arguments' device, and that has no place yet."""
        storage = tensor.untyped_storage()
        if (
            tensor.device != self._device
            or tensor.requires_grad
            or storage._cdata in self._places
            or self._watch.allocation_of(tensor) is None
            or not _spans_its_storage(tensor)
        ):
            return None
        self._places[storage._cdata] = len(self.tensors)
        self.tensors.append(tensor)
        return len(self.tensors) - 1


def _spans_its_storage(tensor: Tensor) -> bool:
    if tensor.numel() == 0 or tensor.storage_offset() != 0:
        return False
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    span = 1 + sum((size - 1) * stride for size, stride in steps)
    return tensor.untyped_storage().nbytes() == span * tensor.element_size()


def _fills_its_storage(tensor: Tensor) -> bool:
    return _spans_its_storage(tensor) and tensor.nbytes == tensor.untyped_storage().nbytes()


def note_opaque_launch(what: str) -> None:
    """A launch that did not go through ``launch_cuda`` or ``launch_cpu`` is about to happen."""
    if thread.recording is not None:
        thread.recording.note_opaque(what)


_triton_lock = threading.Lock()
_triton_watchers = 0


def _watch_triton(begins: bool) -> None:
    """While anything is recorded, hear of kernels that an implementation launches by Triton's own
    ``kernel[grid](...)``."""
    global _triton_watchers
    knobs = sys.modules.get("triton.knobs")
    if knobs is None:
        return
    with _triton_lock:
        _triton_watchers += 1 if begins else -1
        if _triton_watchers > 0:
            knobs.runtime.launch_enter_hook.add(on_triton_launch)
        else:
            knobs.runtime.launch_enter_hook.remove(on_triton_launch)


def on_triton_launch(metadata: Any) -> None:
    """Triton is about to launch a kernel itself."""
    note_opaque_launch("a launch that Triton makes itself")


def raw_stream(device_index: int | None) -> int:
    return 0 if device_index is None else int(torch._C._cuda_getCurrentRawStream(device_index))
