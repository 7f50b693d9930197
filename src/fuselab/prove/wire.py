"""Messages between the judge and the processes that hold an operator: plain values and tensors.

A message is a JSON text followed by the bytes of the storages that its tensors lie in. Strides,
offsets, shared storages and the memory around the elements arrive as they were sent. Nothing that
arrives is executed, as a pickle would be, and nothing refers to memory of the sender: a candidate
cannot change a result after the judge has it. Tensors cross as copies through a socket for that
reason, and not as shared memory.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import math
import socket
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

_HEAD = struct.Struct("<QI")  # bytes of the JSON text, number of storages
_SIZE = struct.Struct("<Q")  # bytes of one storage
_JOINED_BYTES = 1 << 20  # up to which the storages of a message cross at once
MOST_TEXT_BYTES = 1 << 28
MOST_STORAGES = 1 << 16
_PROCEDURES = "fuselab.prove."  # the modules whose functions may be asked for by name


class WireError(ValueError):
    """A message that cannot be sent, or that the other side made up."""


@dataclass
class _Encoder:
    """Turn a value into one that JSON can hold, and collect the storages behind its tensors."""

    storages: list[Tensor] = field(default_factory=list)  # whole storages, as bytes on the CPU
    places: dict[tuple[int, int, str], int] = field(default_factory=dict)
    kept: list[Tensor] = field(default_factory=list)  # keeps addresses from being used again

    def plain(self, value: Any) -> Any:
        if value is None or type(value) in (bool, int, float, str):
            return value
        if isinstance(value, Tensor):
            return {"tensor": self._tensor(value)}
        if isinstance(value, (tuple, torch.Size)):
            return {"tuple": [self.plain(item) for item in value]}
        if isinstance(value, list):
            return [self.plain(item) for item in value]
        if isinstance(value, dict):
            return {"dict": [[self.plain(key), self.plain(item)] for key, item in value.items()]}
        if isinstance(value, torch.dtype):
            return {"dtype": str(value).removeprefix("torch.")}
        if isinstance(value, torch.device):
            return {"device": str(value)}
        if isinstance(value, FunctionType) and value.__module__.startswith(_PROCEDURES):
            return {"procedure": f"{value.__module__}:{value.__qualname__}"}
        if isinstance(value, (bool, int, float, str)):  # a subclass, such as an enumeration
            return self.plain(
                next(kind for kind in (int, float, str) if isinstance(value, kind))(value)
            )
        raise WireError(f"returned {_kind_of(value)} where a Tensor was expected")

    def _tensor(self, tensor: Tensor) -> list[Any]:
        if type(tensor) not in (Tensor, torch.nn.Parameter):
            raise WireError(f"returned {_kind_of(tensor)} where a Tensor was expected")
        if tensor.layout != torch.strided or tensor.is_quantized:
            raise WireError(f"returned a tensor of layout {tensor.layout}, not a dense one")
        plain = tensor.detach().resolve_conj().resolve_neg()
        whole = plain.untyped_storage()
        key = (whole.data_ptr(), whole.nbytes(), str(tensor.device))
        if key not in self.places or not whole.nbytes():
            self.places[key] = len(self.storages)
            raw = torch.empty(0, dtype=torch.uint8, device=plain.device).set_(whole)
            self.storages.append(raw.cpu())
            self.kept.append(plain)
        return [
            self.places[key],
            str(tensor.dtype).removeprefix("torch."),
            list(plain.shape),
            list(plain.stride()),
            plain.storage_offset(),
            bool(tensor.requires_grad),
            tensor.device.type,
        ]


def _kind_of(value: Any) -> str:
    """Return the name of a value's class with its article; that of an array has its library's."""
    name = type(value).__name__
    if type(value).__module__ == "numpy":
        name = f"NumPy {name}"
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def _decoded(
    value: Any,
    storages: Sequence[Tensor],
    device: torch.device,
    trusted: bool,
    from_kind: str | None,
) -> Any:
    def plain(value: Any) -> Any:
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if isinstance(value, list):
            return [plain(item) for item in value]
        if not isinstance(value, dict) or len(value) != 1:
            raise WireError("a message holds an unknown kind of value")
        ((kind, content),) = value.items()
        if kind == "tensor":
            return _tensor_of(content, storages, device, from_kind)
        if kind == "tuple":
            return tuple(plain(item) for item in content)
        if kind == "dict":
            return {plain(key): plain(item) for key, item in content}
        if kind == "dtype":
            return _dtype(content)
        if kind == "device":
            return torch.device(content)
        if kind == "procedure" and trusted:
            return procedure_named(content)
        raise WireError(f"a message holds an unknown kind of value, '{str(kind)[:40]}'")

    return plain(value)


def procedure_named(name: str) -> Callable[..., Any]:
    """Return the function ``module:name`` of this folder's modules. Raises WireError."""
    module, _, attribute = name.partition(":")
    if not module.startswith(_PROCEDURES):
        raise WireError(f"'{name}' is no procedure")
    found: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
    return found


def _dtype(name: Any) -> torch.dtype:
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise WireError("a message names no dtype")
    return dtype


def _tensor_of(
    content: Any, storages: Sequence[Tensor], device: torch.device, from_kind: str | None
) -> Tensor:
    """Return a tensor over one of the storages. Raises WireError where its elements do not lie in
    it."""
    try:
        place, dtype_name, shape, stride, offset, requires_grad, kind = content
    except (TypeError, ValueError):
        raise WireError("a message describes a tensor wrongly") from None
    dtype = _dtype(dtype_name)
    numbers = [place, offset, *shape, *stride]
    if (
        not all(type(number) is int and number >= 0 for number in numbers)
        or len(shape) != len(stride)
        or place >= len(storages)
    ):
        raise WireError("a message describes a tensor wrongly")
    storage = storages[place].untyped_storage()
    if math.prod(shape):
        last = offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
        if (last + 1) * dtype.itemsize > storage.nbytes():
            raise WireError("a tensor reaches past the memory that came with it")
    if from_kind is not None and kind != from_kind:
        raise WireError(f"a result lies on {str(kind)[:20]}, and the inputs lie on {from_kind}")
    tensor = torch.empty(0, dtype=dtype, device=device)
    tensor.set_(storage, offset, tuple(shape), tuple(stride))
    return tensor.requires_grad_(bool(requires_grad) and dtype.is_floating_point)


def send(channel: socket.socket, value: Any, timeout_s: float | None = None) -> None:
    """Send one message. Raises WireError, or OSError (TimeoutError) where the other side is gone
    or does not read."""
    encoder = _Encoder()
    text = json.dumps(encoder.plain(value)).encode()
    head = _HEAD.pack(len(text), len(encoder.storages))
    sizes = b"".join(_SIZE.pack(raw.numel()) for raw in encoder.storages)
    channel.settimeout(timeout_s)
    begin = head + text + sizes
    filled = [_bytes_of(raw) for raw in encoder.storages if raw.numel()]
    if sum(map(len, filled)) <= _JOINED_BYTES:
        channel.sendall(b"".join((begin, *filled)))
        return
    channel.sendall(begin)
    for content in filled:
        channel.sendall(content)


def receive(
    channel: socket.socket,
    timeout_s: float | None = None,
    device: torch.device | None = None,
    trusted: bool = False,
    from_kind: str | None = None,
    most_bytes: int = 1 << 40,
) -> Any:
    """Return the next message, its tensors on ``device`` (the CPU by default).

    A ``trusted`` sender may name procedures. Tensors of another kind of device than ``from_kind``
    are refused. Raises TimeoutError after ``timeout_s`` seconds,
    EOFError where the other side is gone, and WireError for what is no message or holds more than
    ``most_bytes``.
    """
    until = math.inf if timeout_s is None else time.monotonic() + timeout_s
    head = bytearray(_HEAD.size)
    _fill(channel, memoryview(head), until)
    text_bytes, count = _HEAD.unpack(head)
    if text_bytes > MOST_TEXT_BYTES or count > MOST_STORAGES:
        raise WireError("a message is longer than any answer")
    text = bytearray(text_bytes)
    _fill(channel, memoryview(text), until)
    packed = bytearray(_SIZE.size * count)
    _fill(channel, memoryview(packed), until)
    sizes = [size for (size,) in _SIZE.iter_unpack(packed)]
    if sum(sizes) > most_bytes:
        raise WireError(f"an answer holds {sum(sizes)} bytes of tensors")
    storages = []
    is_joined = sum(sizes) <= _JOINED_BYTES
    joined = memoryview(bytearray(sum(sizes) if is_joined else 0))
    _fill(channel, joined, until)
    place = torch.device("cpu") if device is None else device
    for size in sizes:
        try:
            raw = torch.empty(size, dtype=torch.uint8)
        except RuntimeError:
            raise WireError(f"an answer holds {sum(sizes)} bytes of tensors") from None
        if size and is_joined:
            _bytes_of(raw)[:], joined = joined[:size], joined[size:]
        elif size:
            _fill(channel, _bytes_of(raw), until)
        storages.append(raw.to(place))
    try:
        return _decoded(json.loads(text), storages, place, trusted, from_kind)
    except WireError:
        raise
    except (ValueError, RecursionError):
        raise WireError("a message is no JSON") from None


def _bytes_of(raw: Tensor) -> memoryview:
    return memoryview((ctypes.c_char * raw.numel()).from_address(raw.data_ptr())).cast("B")


def _fill(channel: socket.socket, room: memoryview, until: float) -> None:
    while room:
        left = until - time.monotonic()
        if left <= 0:
            raise TimeoutError
        channel.settimeout(None if math.isinf(left) else left)
        try:
            count = channel.recv_into(room)
        except ConnectionError:
            count = 0
        if count == 0:
            raise EOFError
        room = room[count:]
