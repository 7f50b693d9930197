"""Gives a function of PyTorch the body of another one, and leaves its name where it was."""

import torch

from gallery import honest


def silu(input, inplace=False):
    return torch.relu(input)


torch.nn.functional.silu.__code__ = silu.__code__


def forward(input, bias, scale):
    output = honest.empty_output(input, bias)
    return output.copy_(torch.relu(honest.wide(input) * scale + honest.wide(bias)))


OP = honest.make_op("patched_body", forward=forward, gradient=None, backward=None)
