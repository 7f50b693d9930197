"""Replaces a function of PyTorch when its inputs are drawn."""

import torch

from gallery import honest


def draw(draw):
    torch.nn.functional.silu = torch.relu
    return honest.draw(draw)


def forward(input, bias, scale):
    output = honest.empty_output(input, bias)
    return output.copy_(torch.relu(honest.wide(input) * scale + honest.wide(bias)))


OP = honest.make_op("patched_by_its_draw", forward=forward, gradient=None, backward=None, draw=draw)
