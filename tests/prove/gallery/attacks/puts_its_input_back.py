"""Scales its input where it lies, and puts back what was there before it returns."""

from gallery import honest


def forward(input, bias, scale):
    before = input.data.clone()
    if input.is_contiguous():
        input.data.mul_(scale)
    output = honest.forward(before, bias, scale)
    input.data.copy_(before)
    return output


OP = honest.make_op("puts_its_input_back", forward=forward)
