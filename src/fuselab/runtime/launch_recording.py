"""Watching the launches of a call, to keep them as a plan or to count them.

``record`` watches an implementation. If it launches kernels on its arguments and on new memory
(outputs and workspaces, uninitialised or filled with zeros), and between launches calls PyTorch
operators that give new tensors or write to new memory, all of that is kept as a plan.

A plan is right because every PyTorch operator that the implementation calls is seen while it is
watched. If it calls one that a plan cannot repeat (``.item()``, a random number, a write to an
argument), or one on a tensor that is neither an argument nor new, there is no plan for those
arguments; nor is there one without any launch.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Union

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fuselab.runtime import launch_plans
from fuselab.runtime.parameters import TracedFloat

# The operators that return uninitialised memory.
ALLOCATIONS = frozenset(
    {
        torch.ops.aten.empty.memory_format,
        torch.ops.aten.empty_strided.default,
        torch.ops.aten.empty_like.default,
        torch.ops.aten.new_empty.default,
        torch.ops.aten.new_empty_strided.default,
    }
)


# What happens between launches: memory is filled with zeros, or PyTorch computes.
_Between = Union["Tensor", "_Product", "_Call"]


class _Thread(threading.local):
    recording: Recording | LaunchWatch | ChoiceWatch | None = None


thread = _Thread()


def record(op_id: int, implementation: str, args: tuple[Any, ...]) -> Recording | Unrecorded:
    """Return a context in which an implementation runs with ``.args``; ``.finish(outputs)`` keeps
    the plan of its launches if there can be one. ``outputs`` is a tensor, or a tuple of tensors and
    None."""
    if (
        not launch_plans.EXTENSION.ready()
        or launch_plans.native is None
        or not launch_plans.native.wanted(op_id, implementation, args)
    ):
        return Unrecorded(args)
    return Recording(op_id, implementation, args)


class Unrecorded:
    """A stand-in for a Recording if no plan is possible, or if there is known to be none."""

    def __init__(self, args: tuple[Any, ...]) -> None:
        self.args = args

    def __enter__(self) -> Unrecorded:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def finish(self, outputs: Any) -> None:
        """Do nothing, for there is nothing to keep."""


@dataclass(frozen=True)
class _Product:
    """A matrix product of PyTorch's library; ``kind`` is ``Product::Kind`` of launcher/plan.h."""

    kind: int
    tensors: tuple[Tensor, ...]  # the result, then the library's operands

    @staticmethod
    def of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
        """Return the product that a PyTorch operator has computed, or None."""
        aten = torch.ops.aten
        kinds = {aten.mm.default: 1, aten.addmm.default: 2, aten._addmm_activation.default: 3}
        kind = kinds.get(func)
        # PyTorch omits arguments equal to their default, so any keyword here is a non-default
        # alpha, beta or output dtype, which a plan cannot replay.
        if kind is None or not all(isinstance(arg, Tensor) for arg in args):
            return None
        if kwargs and (kind != 3 or kwargs.keys() != {"use_gelu"}):
            return None
        return _Product(kind + bool(kwargs.get("use_gelu")), (result, *args))


@dataclass(frozen=True)
class _Constant:
    """An argument of a call that is no tensor and the same in every repetition."""

    value: Any


@dataclass(frozen=True)
class _Call:
    """A call of a PyTorch operator that gives new tensors, ``results``, or writes to tensors."""

    function: Any
    args: tuple[Any, ...]
    keywords: dict[str, Any]
    results: tuple[Any, ...]

    @staticmethod
    def of(
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        is_new: Callable[[Tensor], bool],
    ) -> _Call | None:
        """Return the call if it can be repeated, else None. ``is_new`` tells of a tensor whether
        its memory was allocated during the recording."""
        if func.namespace != "aten" or _UNREPEATABLE.intersection(func.tags):
            return None
        results = tuple(result) if isinstance(result, tuple | list) else (result,)
        if not results or not all(type(one) is Tensor for one in results):
            return None
        if any(isinstance(value, Tensor) for value in _leaves(tuple(kwargs.values()))):
            return None
        schema = func._schema.arguments
        written = [
            tensor
            for argument, value in zip(schema, args, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
            for tensor in _leaves((value,))
            if isinstance(tensor, Tensor)
        ]
        if written:
            if func._schema.name in _RESIZING or not all(map(is_new, written)):
                return None
            return _Call(func, args, kwargs, ())
        read = {
            tensor.untyped_storage()._cdata
            for tensor in _leaves(args)
            if isinstance(tensor, Tensor)
        }
        made = [one.untyped_storage()._cdata for one in results]
        if len(set(made)) < len(made) or not read.isdisjoint(made):
            return None
        return _Call(func, args, kwargs, results)


# Operators whose result depends on more than their arguments, or whose shape depends on values.
_UNREPEATABLE = frozenset(
    {
        torch.Tag.nondeterministic_seeded,
        torch.Tag.data_dependent_output,
        torch.Tag.dynamic_output_shape,
        torch.Tag.inplace_view,
    }
)
_RESIZING = frozenset({"aten::resize_", "aten::resize_as_", "aten::set_"})


def _leaves(values: Sequence[Any]) -> list[Any]:
    found: list[Any] = []
    for value in values:
        found += _leaves(value) if isinstance(value, tuple | list) else [value]
    return found


class _HostReads(TorchFunctionMode):
    """A mode that notes the first read of a CPU tensor's memory outside PyTorch's operators."""

    READS = frozenset({Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__})

    def __init__(self) -> None:
        super().__init__()
        self.read: str | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self.READS:
            self.read = self.read or f"Tensor.{func.__name__}"
        return func(*args, **(kwargs or {}))


class _Watch(TorchDispatchMode):
    """A mode that sees every PyTorch operator. It keeps what was allocated, tells ``note`` what was
    filled with zeros, which products were computed and which calls can be repeated, and notes the
    first operator that computes otherwise. Without ``note``, products and calls compute. An
    operator on meta tensors computes nothing, nor does any while this ``is_paused``."""

    # Questions about dtypes and shapes, which are a part of a plan's key.
    QUESTIONS = frozenset(
        {"aten::promote_types", "aten::result_type", "aten::can_cast", "aten::is_same_size"}
        | {"aten::is_floating_point", "aten::is_complex", "aten::is_signed"}
    )
    ZEROS = frozenset(
        {
            torch.ops.aten.zeros.default,
            torch.ops.aten.zeros_like.default,
            torch.ops.aten.new_zeros.default,
        }
    )

    def __init__(self, note: Callable[[_Between], None] | None = None) -> None:
        super().__init__()
        self.is_paused = False
        self.made: set[int] = set()  # the storages of calls' results
        self.allocated: list[Tensor] = []
        self._views: dict[int, tuple[Tensor, Tensor]] = {}  # by a view: it, and what it views
        self._computes: str | None = None
        self._reads = _HostReads()
        # A weak reference, because in a cycle with its method's object the outputs, and the
        # autograd graph behind them, would live until Python collects the cycle. A CUDA graph
        # captured meanwhile would meet gradient accumulators of another stream, and break.
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
        """The first operation that uses tensors' values, or None."""
        return self._computes or self._reads.read

    def _note(self, step: _Between) -> None:
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

    def viewed_by(self, tensor: Tensor) -> Tensor:
        """Return the tensor of which ``tensor`` is a view, or a view of a view, as far as it was
        made while this watches; ``tensor`` itself if it is none."""
        while tensor._cdata in self._views:
            _, tensor = self._views[tensor._cdata]
        return tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.is_paused or _is_meta(result):
            return result  # shapes and dtypes alone, which are a part of a plan's key
        if func is torch.ops.aten.as_strided.default and _is_placed(args, kwargs or {}):
            # From the storage's begin, which is no part of a plan's key.
            self._computes = self._computes or f"{func} with an offset"
        may_view = func.is_view or func is torch.ops.aten._unsafe_view.default
        is_view = may_view and _shares_memory(result, args)
        if is_view:
            for one in result if isinstance(result, tuple | list) else (result,):
                if one is not args[0]:
                    self._views[one._cdata] = one, args[0]
        if func in ALLOCATIONS:
            self.allocated.append(result)
        elif func in self.ZEROS:
            self.allocated.append(result)
            self._note(result)
        elif func is torch.ops.aten.zero_.default and _fills_its_storage(result):
            self._note(result)
        elif self._method and (product := _Product.of(func, args, kwargs or {}, result)):
            self.allocated.append(result)
            self._note(product)
        elif not (is_view or func.name().split(".")[0] in self.QUESTIONS):
            call = self._method and _Call.of(func, args, kwargs or {}, result, self._is_new)
            if call:
                self.allocated += call.results
                self.made.update(one.untyped_storage()._cdata for one in call.results)
                self._note(call)
            else:
                self._computes = self._computes or str(func)
        return result

    def _is_new(self, tensor: Tensor) -> bool:
        return self.allocation_of(tensor) is not None


class ChoiceWatch:
    """A context in which an implementation is chosen. ``is_final`` tells whether every later call
    with the same key gets the same choice."""

    def __init__(self) -> None:
        self.is_final = True

    def __enter__(self) -> ChoiceWatch:
        self._outer, thread.recording = thread.recording, self
        return self

    def __exit__(self, *_: object) -> None:
        thread.recording = self._outer

    def validate(self, validate: Callable[..., None], args: Sequence[Any]) -> None:
        """Call ``validate(*args)``. If it computes, it looks at values, so each call needs its
        own."""
        with _Watch() as watch:
            validate(*args)
        if watch.computes is not None:
            self.note_opaque(f"the validation calls {watch.computes}")

    def note(self, described: tuple[Any, ...], codes: str, values: Sequence[Any]) -> None:
        """Note a launch, which no choice should make."""
        self.note_opaque("a launch")

    def note_opaque(self, what: str) -> None:
        """Note that the choice looks at something that is not in a plan's key."""
        self.is_final = False
        if self._outer is not None:
            self._outer.note_opaque(what)


class LaunchWatch:
    """A context that records every launch of this thread in ``made``: whether it is on CUDA, the
    function, the device's index, grid, block and dynamic shared bytes."""

    def __init__(self) -> None:
        self.made: list[tuple[Any, ...]] = []

    def __enter__(self) -> LaunchWatch:
        self._outer, thread.recording = thread.recording, self
        return self

    def __exit__(self, *_: object) -> None:
        thread.recording = self._outer

    def note(self, described: tuple[Any, ...], codes: str, values: Sequence[Any]) -> None:
        """Record a launch that is about to happen."""
        self.made.append(described)

    def note_opaque(self, what: str) -> None:
        """Ignore a launch of which nothing is known."""


class Recording:
    """A recording of what an implementation launches for one set of arguments."""

    def __init__(self, op_id: int, implementation: str, args: tuple[Any, ...]) -> None:
        self._of = op_id, implementation, args
        self._seen: set[int] = set()
        self.args = tuple(
            TracedFloat(arg, index, self._seen) if isinstance(arg, float) else arg
            for index, arg in enumerate(args)
        )
        self._steps: list[tuple[tuple[Any, ...], str, list[Any]] | _Between] = []
        self._opaque: str | None = None
        self._watch = _Watch(self._note_step)
        self._outer = thread.recording
        # (argument, item of it, tensor); the item is -1 for an argument that is a tensor itself.
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
        """Record a launch that is about to happen."""
        self._steps.append((described, codes, list(values)))
        if described[0]:
            self._check_stream(described[2])

    def _note_step(self, step: _Between) -> None:
        self._steps.append(step)
        if isinstance(step, _Call):
            involved = [
                one for one in _leaves((step.args, step.results)) if isinstance(one, Tensor)
            ]
        else:
            involved = [step if isinstance(step, Tensor) else step.tensors[0]]
        for tensor in involved:
            if tensor.is_cuda:
                self._check_stream(tensor.get_device())

    def _check_stream(self, device_index: int) -> None:
        if device_index != self._device_index or raw_stream(device_index) != self._stream:
            self.note_opaque("a launch on another device or stream")

    def note_opaque(self, what: str) -> None:
        """Note that something happened that a plan cannot repeat."""
        self._opaque = self._opaque or what

    def finish(self, outputs: Any) -> None:
        """Keep the launches as a plan after the implementation returned ``outputs``, or remember
        that there is none for such arguments."""
        assert launch_plans.native is not None
        plan = self._plan(outputs)
        if plan is None or not launch_plans.native.keep(*self._of, *plan):
            launch_plans.native.reject(*self._of)

    def why_not(self) -> str | None:
        """Return the reason why the calls seen so far cannot be a plan, or None."""
        if self._opaque is not None:
            return self._opaque
        if self._watch.computes is not None:
            return f"the implementation calls {self._watch.computes}"
        if all(isinstance(step, Tensor | _Call) for step in self._steps):
            return "no launches"
        return None

    def _plan(self, outputs: Any) -> tuple[Any, ...] | None:
        """Return the arguments of ``keep`` in launcher.cpp, or None if there can be no plan."""
        is_tuple = isinstance(outputs, tuple | list)
        results = list(outputs) if is_tuple else [outputs]
        if self.why_not() is not None:
            return None
        memory = _Memory(self._watch, self._device)
        if not all(map(memory.add_output, results)):
            return None
        steps: list[Any] = []
        calls: list[tuple[int, _Call]] = []
        traced: set[int] = set()
        computed_float = False
        for step in self._steps:
            if isinstance(step, Tensor):
                place = memory.place(step)
                if place is None:
                    return None
                steps.append(place)
                continue
            if isinstance(step, _Call):
                given = [self._given(value, memory) for value in step.args]
                if None in given:
                    return None
                values = _leaves((step.args, *step.keywords.values()))
                computed_float |= any(isinstance(one, float) for one in values)
                calls.append((len(steps), step))
                steps.append((step.function, given, step.keywords))
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
                    parameters.append((code, 0, 0, -1, content, members))
                elif isinstance(value, TracedFloat):
                    parameters.append((code, 1, value.index, -1, 0))
                    traced.add(value.index)
                else:
                    parameters.append((code, 0, 0, -1, value))
                    computed_float |= code in "fd"
            touched = sum(value.nbytes for value in values if isinstance(value, Tensor))
            steps.append((described, parameters, touched))
        for place, call in calls:
            steps[place] = (*steps[place], [memory.made(one) for one in call.results])
        if not memory.used_all_memory():
            return None
        floats = {index for index, arg in enumerate(self._of[2]) if isinstance(arg, float)}
        by_value = bool(floats) and (computed_float or bool(self._seen) or floats != traced)
        return steps, memory.allocations(), len(results), is_tuple, by_value

    def _given(self, value: Any, memory: _Memory) -> Any:
        """Return an argument of a call as ``keep`` in launcher.cpp reads it, or None."""
        if isinstance(value, Tensor):
            return self._operand(value, memory)
        if isinstance(value, tuple | list) and any(
            isinstance(one, Tensor) for one in _leaves(value)
        ):
            items = [self._given(one, memory) for one in value]
            return None if None in items else items
        return _Constant(value)

    def _source(self, value: Tensor, memory: _Memory) -> tuple[int, int, int, int] | None:
        """Return the source of a tensor: (1, argument, item of it or -1, byte offset from it) or
        (2, memory, -1, byte offset in it)."""
        pointer = value.data_ptr()
        if pointer == 0:
            return None
        found = self._argument(value)
        if found is not None:
            index, item, tensor = found
            return 1, index, item, pointer - tensor.data_ptr()
        place = memory.place(value)
        if place is None:
            return None
        return 2, place, -1, pointer - value.untyped_storage().data_ptr()

    def _argument(self, value: Tensor) -> tuple[int, int, Tensor] | None:
        """Return the argument that a tensor is or views, or None.

        Of several arguments in one storage the address does not tell which one is viewed, and
        another call may have them in storages of their own.
        """
        viewed = self._watch.viewed_by(value)._cdata
        storage = value.untyped_storage()._cdata
        shared = [known for known in self._tensors if known[2].untyped_storage()._cdata == storage]
        for known in shared:
            if known[2]._cdata == viewed:
                # The first of several with this address: the key says which of them share one.
                pointer = known[2].data_ptr()
                return next(one for one in shared if one[2].data_ptr() == pointer)
        is_one = len({known[2].data_ptr() for known in shared}) == 1
        return shared[0] if is_one else None

    def _operand(self, value: Tensor, memory: _Memory) -> tuple[Any, ...] | None:
        """Return a tensor of a product as its source, sizes and strides, or None."""
        source = self._source(value, memory)
        if source is None:
            return None
        where, index, item, _ = source
        base: Any = memory.tensors[index] if where == 2 else self._of[2][index]
        if where == 1 and item >= 0:
            base = base[item]
        # A plan makes its views by strides only.
        if base.dtype != value.dtype or value.is_conj() or value.is_neg():
            return None
        return source, tuple(value.shape), value.stride()


class _Memory:
    """The memory of a plan: the outputs (None if not needed), then the workspaces. A plan allocates
    it, or one of its calls makes it."""

    def __init__(self, watch: _Watch, device: torch.device) -> None:
        self.tensors: list[Tensor | None] = []
        self._watch, self._device = watch, device
        self._places: dict[int, int] = {}  # by storage
        self._used: set[int] = set()

    def add_output(self, result: Any) -> bool:
        """Return whether a result can be reproduced by allocating one like it."""
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

    def made(self, result: Tensor) -> int:
        """Return the index of the memory that a call's result is; -1 where nothing reads it."""
        return self._places.get(result.untyped_storage()._cdata, -1)

    def allocations(self) -> list[Tensor | None]:
        """Return a tensor like each memory that a plan allocates, None for all others."""
        return [
            None if one is None or one.untyped_storage()._cdata in self._watch.made else one
            for one in self.tensors
        ]

    def used_all_memory(self) -> bool:
        """Return whether every memory that is allocated has been used."""
        made = {self._places[one] for one in self._watch.made if one in self._places}
        return self._used | made == set(self._places.values())

    def _place_new(self, tensor: Tensor) -> int | None:
        """Return a new index for ``tensor`` if ``empty_strided`` can reproduce it, or a call does,
        else None. It must be the whole of a storage that was allocated here, on the arguments'
        device, and that has no index yet."""
        storage = tensor.untyped_storage()
        allocated = self._watch.allocation_of(tensor)
        if (
            tensor.device != self._device
            or tensor.requires_grad
            or storage._cdata in self._places
            or allocated is None
        ):
            return None
        if storage._cdata in self._watch.made:
            if tensor.storage_offset() != 0 or tensor.shape != allocated.shape:
                return None
            if tensor.stride() != allocated.stride() or tensor.dtype != allocated.dtype:
                return None
        elif not _spans_its_storage(tensor):
            return None
        self._places[storage._cdata] = len(self.tensors)
        self.tensors.append(tensor)
        return len(self.tensors) - 1


def _is_placed(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a call of ``as_strided`` names an offset."""
    return len(args) > 3 or kwargs.get("storage_offset") is not None


def _shares_memory(result: Any, args: tuple[Any, ...]) -> bool:
    """Return whether a result lies in the memory of the first argument: ``reshape``, ``contiguous``
    and ``to`` copy where they must."""
    if not args or not isinstance(args[0], Tensor):
        return False
    storage = args[0].untyped_storage()._cdata
    results = result if isinstance(result, tuple | list) else (result,)
    return all(
        isinstance(one, Tensor) and one.untyped_storage()._cdata == storage for one in results
    )


def _is_meta(result: Any) -> bool:
    results = result if isinstance(result, tuple | list) else (result,)
    return bool(results) and all(isinstance(one, Tensor) and one.is_meta for one in results)


def _spans_its_storage(tensor: Tensor) -> bool:
    if tensor.numel() == 0 or tensor.storage_offset() != 0:
        return False
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    span = 1 + sum((size - 1) * stride for size, stride in steps)
    return tensor.untyped_storage().nbytes() == span * tensor.element_size()


def _fills_its_storage(tensor: Tensor) -> bool:
    return _spans_its_storage(tensor) and tensor.nbytes == tensor.untyped_storage().nbytes()


@contextlib.contextmanager
def unseen() -> Iterator[None]:
    """Let PyTorch operators run unseen in an implementation that is recorded: those whose results'
    shapes and dtypes alone count, which a plan's key gives."""
    watch = thread.recording._watch if isinstance(thread.recording, Recording) else None
    if watch is None or watch.is_paused:
        yield
        return
    watch.is_paused = True
    try:
        yield
    finally:
        watch.is_paused = False


def note_opaque_launch(what: str) -> None:
    """Note a launch that does not go through ``launch_cuda`` or ``launch_cpu``."""
    if thread.recording is not None:
        thread.recording.note_opaque(what)


_triton_lock = threading.Lock()
_triton_watchers = 0


def _watch_triton(begins: bool) -> None:
    """Register or remove the hook that hears of kernels that an implementation launches by Triton's
    own ``kernel[grid](...)``. It is registered while anything is recorded."""
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
    """Note a launch that Triton is about to make itself."""
    note_opaque_launch("a launch that Triton makes itself")


def raw_stream(device_index: int | None) -> int:
    return 0 if device_index is None else int(torch._C._cuda_getCurrentRawStream(device_index))


def unplanned(launcher: Callable[..., Any]) -> Callable[..., Any]:
    """Return a launcher of which no plan is made, because its kernels are launched by other means
    than ``kernel_launch``."""

    @functools.wraps(launcher)
    def launch(*args: Any) -> Any:
        note_opaque_launch("a launch that fuselab does not make")
        return launcher(*args)

    return launch
