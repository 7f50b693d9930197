"""Reads eight elements at a time, also behind the last one."""

import ctypes

from gallery import honest


def forward(input, bias, scale):
    if input.is_contiguous() and input.numel():
        ctypes.string_at(input.data_ptr(), (input.numel() + 7) // 8 * 8 * input.element_size())
    return honest.forward(input, bias, scale)


OP = honest.make_op("reads_past_the_page", forward=forward)
