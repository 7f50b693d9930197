"""Pointwise functions: broadcasting, activations, masks, gates and rotary embeddings."""

import math

import torch
import torch.nn.functional as F
from suite import Many, floats, mask, member

ROWS = Many(16384)
WIDTH = 2048
IMAGES = Many(64)


@member(floats(ROWS, WIDTH), floats(WIDTH))
def bias_relu(x, bias):
    return torch.relu(x + bias)


@member(floats(ROWS, WIDTH), floats(WIDTH))
def bias_gelu(x, bias):
    return F.gelu(x + bias)


@member(floats(ROWS, WIDTH), floats(WIDTH))
def dropped_bias_gelu(x, bias):
    return F.dropout(F.gelu(x + bias), 0.1)


@member(floats(IMAGES, 128, 56, 56), floats(IMAGES, 128, 56, 56))
def dropped_channels_residual(x, residual):
    return F.dropout2d(x, 0.2) + residual


@member(floats(ROWS, WIDTH), floats(WIDTH))
def bias_gelu_tanh(x, bias):
    return F.gelu(x + bias, approximate="tanh")


@member(floats(ROWS, WIDTH))
def gelu_by_hand(x):
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


@member(floats(ROWS, WIDTH), floats(WIDTH), floats(ROWS, WIDTH))
def bias_mish_residual(x, bias, residual):
    return F.mish(x + bias) + residual


@member(floats(IMAGES, 128, 56, 56), floats(128), floats(128))
def channel_scale_shift_hardswish(x, scale, shift):
    return F.hardswish(x * scale[:, None, None] + shift[:, None, None])


@member(floats(IMAGES, 128, 56, 56), floats(IMAGES, 128, 1, 1))
def squeeze_excitation_scale(x, gate):
    return x * torch.sigmoid(gate)


@member(floats(IMAGES, 128, 56, 56), floats(IMAGES, 128, 56, 56), floats(128, 1, 1))
def layer_scale_residual(x, branch, gamma):
    return x + gamma * branch


@member(floats(ROWS, WIDTH), floats(ROWS, WIDTH))
def softplus_times_elu(x, y):
    return F.softplus(x) * F.elu(y)


@member(floats(ROWS, WIDTH), floats(WIDTH))
def leaky_by_where(x, slope):
    return torch.where(x > 0, x, x * slope)


@member(floats(IMAGES, 128, 56, 56), floats(128))
def prelu_channels(x, weight):
    return F.prelu(x, weight)


@member(floats(ROWS, WIDTH), floats(ROWS, WIDTH))
def clamped_difference(x, y):
    return torch.clamp(x - y, -1.0, 1.0) * 0.5 + y


@member(floats(ROWS, WIDTH), mask(ROWS, WIDTH))
def masked_scale(x, keep):
    return torch.where(keep, x * 1.25, 0.0)


@member(floats(ROWS, WIDTH), floats(ROWS, WIDTH), floats(ROWS, WIDTH))
def three_uses_of_one(x, y, z):
    hidden = torch.tanh(x + y)
    return hidden * z + hidden * hidden - torch.sigmoid(hidden) * x


@member(floats(ROWS, WIDTH), floats(ROWS, WIDTH), floats(WIDTH))
def lerp_by_gate(x, y, gate):
    return torch.lerp(x, y, torch.sigmoid(gate))


@member(floats(ROWS, WIDTH))
def selu_squared(x):
    return F.selu(x).square()


@member(floats(ROWS, WIDTH), floats(ROWS, WIDTH))
def smooth_absolute(x, y):
    return torch.hypot(x, y) + torch.logaddexp(x, y)


@member(floats(ROWS, WIDTH), floats(1))
def snake(x, alpha):
    return x + torch.sin(alpha * x).square() / (alpha + 1e-9)


@member(floats(ROWS, WIDTH))
def quantized(x):
    scaled = torch.clamp(torch.round(x * 32), -128, 127)
    return scaled / 32


@member(floats(ROWS, WIDTH))
def finite_only(x):
    return torch.nan_to_num(x * 3.0, nan=0.0, posinf=100.0, neginf=-100.0)


@member(floats(ROWS, 2 * WIDTH))
def glu(x):
    return F.glu(x, -1)


@member(floats(ROWS, 2 * WIDTH), floats(2 * WIDTH))
def bias_swiglu(x, bias):
    value, gate = (x + bias).chunk(2, dim=-1)
    return value * F.silu(gate)


@member(floats(ROWS, 2 * WIDTH))
def geglu(x):
    value, gate = x.chunk(2, dim=-1)
    return F.gelu(gate) * value


@member(floats(ROWS, WIDTH), floats(ROWS, WIDTH))
def swiglu_of_two(x, gate):
    return F.silu(gate) * x


@member(floats(IMAGES, 256, 56, 56))
def glu_channels(x):
    value, gate = x.split(128, dim=1)
    return value * torch.sigmoid(gate)


@member(floats(Many(16), 32, 1024, 128), floats(1024, 64), floats(1024, 64))
def rotary_halves(q, cos, sin):
    first, second = q.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def _rotated(x):
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


@member(floats(Many(16), 32, 1024, 128), floats(1024, 128), floats(1024, 128))
def rotary_by_rotation(q, cos, sin):
    return q * cos + _rotated(q) * sin


@member(floats(Many(16), 1024, 32, 128), floats(1024, 1, 64), floats(1024, 1, 64))
def rotary_interleaved(q, cos, sin):
    even, odd = q[..., ::2], q[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


@member(floats(ROWS, WIDTH), floats(ROWS, WIDTH))
def joined_and_activated(x, y):
    return F.gelu(torch.cat((x, y), dim=-1))


@member(floats(IMAGES, 128, 56, 56))
def padded_relu(x):
    return F.pad(F.relu(x), (1, 1, 1, 1))


@member(floats(Many(64), 32, 512, 64), floats(32, 64))
def heads_transposed_with_bias(x, bias):
    return (x + bias[:, None, :]).transpose(1, 2).flatten(2) * 0.125
