"""Typed kernel parameters, and floats that notice when somebody looks at them."""

from __future__ import annotations

import ctypes
import math
import operator
import struct

import pytest
import torch

from fuselab.errors import ArgumentError
from fuselab.runtime import cuda_driver
from fuselab.runtime.parameters import Struct, TracedFloat, encode, f32, f64, i32, i64, plain


def traced(value: float = 2.5) -> TracedFloat:
    return TracedFloat(value, 3, set())


def test_encode_gives_one_code_per_parameter() -> None:
    tensor = torch.ones(2)
    codes, values = encode((tensor, None, i32(-1), i64(2**40), f32(0.5), f64(0.25)))
    assert codes == "tnilfd"
    assert values[0] is tensor
    assert values[1:] == [None, -1, 2**40, 0.5, 0.25]


def test_a_bare_number_is_refused() -> None:
    with pytest.raises(ArgumentError, match="i32, i64, f32 or f64"):
        encode((torch.ones(1), 3))  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [2**31, -(2**31) - 1])
def test_an_i32_that_does_not_fit_is_refused(value: int) -> None:
    with pytest.raises(ArgumentError, match="pass i64"):
        i32(value)
    assert i32(2**31 - 1).value == 2**31 - 1


@pytest.mark.parametrize(
    "look",
    [
        lambda x: x + 1,
        lambda x: 1 + x,
        lambda x: 2 * x,
        lambda x: x / 3,
        lambda x: 3 / x,
        lambda x: 2**x,
        lambda x: -x,
        abs,
        bool,
        float,
        int,
        round,
        str,
        repr,
        hash,
        lambda x: f"{x:.3}",
        lambda x: x == 1.0,
        lambda x: x != 1.0,
        lambda x: x < 1,
        lambda x: x > 1,
        lambda x: x >= 1,
        lambda x: x.is_integer(),
        math.floor,
    ],
)
def test_a_look_at_a_traced_float_is_noticed(look: object) -> None:
    value = traced()
    assert look(value) == look(2.5)  # type: ignore[operator]
    assert value.seen == {3}


def test_handing_a_traced_float_on_is_no_look() -> None:
    value = traced()
    assert f32(value).value is value
    assert f64(value).value is value
    assert encode((f32(value),))[1][0] is value
    assert isinstance(value, float)
    assert type(plain(value)) is float
    assert operator.eq(plain(value), 2.5)
    assert value.seen == set()


def test_a_struct_goes_as_its_bytes_and_addresses_through_ctypes_too() -> None:
    first, second = torch.ones(2), torch.ones(3)
    described = Struct.of_arrays(3, [[first, None], [-7, 2**40], [second]])
    codes, values = encode([i32(1), Struct(b"\x01\x02\x03"), described])
    held, pointers = cuda_driver.packed(codes, values)
    assert codes == "iss" and ctypes.string_at(pointers[1], 3) == b"\x01\x02\x03"
    assert held[0].value == 1
    words = struct.unpack("9q", ctypes.string_at(pointers[2], 72))
    assert words == (first.data_ptr(), 0, 0, -7, 2**40, 0, second.data_ptr(), 0, 0)
    assert repr(described) == "Struct(72 bytes)"
