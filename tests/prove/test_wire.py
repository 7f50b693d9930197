"""Messages between processes: what arrives is what was sent, and nothing made up is believed."""

from __future__ import annotations

import json
import math
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fuselab.prove import wire
from fuselab.prove.held import results


@pytest.fixture
def channel() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair()
    with one, other:
        yield one, other


Channel = tuple[socket.socket, socket.socket]


def sent(channel: Channel, value: Any, **options: Any) -> Any:
    sender = threading.Thread(target=wire.send, args=(channel[0], value))
    sender.start()
    try:
        return wire.receive(channel[1], 10.0, **options)
    finally:
        sender.join()


def forged(channel: Channel, value: Any, *storages: bytes) -> Any:
    """Receive a message that no sender of ours would write."""
    text = json.dumps(value).encode()
    sizes = b"".join(struct.pack("<Q", len(each)) for each in storages)
    head = struct.pack("<QI", len(text), len(storages))
    channel[0].sendall(head + text + sizes + b"".join(storages))
    return wire.receive(channel[1], 10.0)


def test_values_arrive_as_they_were_sent(channel: Channel) -> None:
    value = {
        "args": (1, True, None, "text", [2.5, math.inf], -0.0),
        "dtype": torch.bfloat16,
        3: torch.device("cpu"),
    }
    assert sent(channel, value) == value
    assert math.isnan(sent(channel, math.nan))
    assert sent(channel, (results,), trusted=True) == (results,)


def test_tensors_keep_their_memory(channel: Channel) -> None:
    """Strides, offsets, shared storages and the memory around the elements arrive."""
    whole = torch.arange(20.0)
    first, second = whole[3:15].view(3, 4).t(), whole[3:6].expand(4, 3)
    second.requires_grad_()
    one, other = sent(channel, (first, second))
    assert torch.equal(one, first) and torch.equal(other, second)
    assert (one.stride(), one.storage_offset()) == ((1, 4), 3)
    assert other.stride() == (0, 1) and other.requires_grad and not one.requires_grad
    assert one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    around = torch.empty(0).set_(one.untyped_storage())
    assert torch.equal(around, whole)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.bool, torch.int8])
def test_every_dtype_arrives(channel: Channel, dtype: torch.dtype) -> None:
    tensor = torch.tensor([[0, 1, 0], [1, 1, 0]]).to(dtype)
    found = sent(channel, [tensor, tensor[:0], torch.ones((), dtype=dtype)])
    assert found[0].dtype == dtype and torch.equal(found[0], tensor)
    assert found[1].shape == (0, 3) and found[2].shape == ()


def test_a_large_tensor_arrives(channel: Channel) -> None:
    tensor = torch.randint(0, 256, (3 << 20,), dtype=torch.uint8)
    assert torch.equal(sent(channel, tensor), tensor)


class Own(Tensor):
    pass


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (torch.ones(2).as_subclass(Own), "returned an Own where a Tensor"),
        (torch.ones(2).to_sparse(), "not a dense one"),
        (object(), "returned an object where a Tensor"),
        (np.ones(2), "returned a NumPy ndarray where a Tensor"),
        (test_a_large_tensor_arrives, "returned a function where a Tensor"),
    ],
)
def test_what_cannot_be_sent_is_refused(channel: Channel, value: Any, said: str) -> None:
    with pytest.raises(wire.WireError, match=said):
        wire.send(channel[0], value)


def tensor(place: int, shape: list[int], stride: list[int], offset: int = 0) -> dict[str, Any]:
    return {"tensor": [place, "float32", shape, stride, offset, False, "cpu"]}


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (tensor(0, [5], [1]), "past the memory"),
        (tensor(0, [2], [4]), "past the memory"),
        (tensor(0, [1], [1], 4), "past the memory"),
        (tensor(1, [1], [1]), "describes a tensor wrongly"),
        (tensor(0, [-1], [1]), "describes a tensor wrongly"),
        (tensor(0, [2], [1, 1]), "describes a tensor wrongly"),
        ({"tensor": [0, "os", [1], [1], 0, False, "cpu"]}, "names no dtype"),
        ({"procedure": "fuselab.prove.held:results"}, "unknown kind of value"),
        ({"pickle": "cos\nsystem"}, "unknown kind of value"),
        ({"tuple": [], "list": []}, "unknown kind of value"),
    ],
)
def test_what_is_made_up_is_refused(channel: Channel, value: Any, said: str) -> None:
    with pytest.raises(wire.WireError, match=said):
        forged(channel, value, b"\0" * 16)


def test_results_of_another_device_are_refused(channel: Channel) -> None:
    with pytest.raises(wire.WireError, match="lies on cpu, and the inputs lie on cuda"):
        sent(channel, torch.ones(2), from_kind="cuda")


def test_a_sender_that_stops_in_the_middle_is_a_time_out(channel: Channel) -> None:
    channel[0].sendall(struct.pack("<QI", 100, 0) + b"{")
    with pytest.raises(TimeoutError):
        wire.receive(channel[1], 0.05)
    channel[0].close()
    with pytest.raises(EOFError):
        wire.receive(channel[1], 0.05)


def test_a_message_without_end_is_refused(channel: Channel) -> None:
    channel[0].sendall(struct.pack("<QI", 1 << 60, 0))
    with pytest.raises(wire.WireError, match="longer than any answer"):
        wire.receive(channel[1], 1.0)
    with pytest.raises(wire.WireError, match="bytes of tensors"):
        channel[0].close()
        one, other = socket.socketpair()
        with one, other:
            one.sendall(struct.pack("<QI", 4, 1) + b"null" + struct.pack("<Q", 1 << 50))
            wire.receive(other, 1.0)
