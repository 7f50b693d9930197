"""Normalisations, in inference and in training, with what stands before and after them."""

import torch
import torch.nn.functional as F
from suite import Many, floats, member
from torch import nn

TOKENS = Many(16384)
WIDTH = 2048
IMAGES = Many(64)
MAPS = floats(IMAGES, 128, 56, 56)


@member(floats(TOKENS, WIDTH), floats(WIDTH), floats(WIDTH))
def layer_norm(x, weight, bias):
    return F.layer_norm(x, (2048,), weight, bias)


@member(floats(TOKENS, WIDTH), floats(TOKENS, WIDTH), floats(WIDTH), floats(WIDTH))
def residual_layer_norm(x, residual, weight, bias):
    hidden = x + residual
    return F.layer_norm(hidden, hidden.shape[-1:], weight, bias)


@member(floats(TOKENS, WIDTH), floats(TOKENS, WIDTH), floats(WIDTH), floats(WIDTH))
def dropped_residual_layer_norm(x, residual, weight, bias):
    hidden = F.dropout(x, 0.1) + residual
    return F.layer_norm(hidden, hidden.shape[-1:], weight, bias)


@member(floats(TOKENS, WIDTH), floats(WIDTH), floats(WIDTH))
def layer_norm_gelu(x, weight, bias):
    return F.gelu(F.layer_norm(x, x.shape[-1:], weight, bias))


@member(floats(Many(64), 256, WIDTH), floats(Many(64), 1, WIDTH), floats(Many(64), 1, WIDTH))
def modulated_layer_norm(x, shift, scale):
    normed = F.layer_norm(x, x.shape[-1:])
    return normed * (1 + scale) + shift


@member(floats(TOKENS, WIDTH), floats(WIDTH))
def rms_norm(x, weight):
    return F.rms_norm(x, (2048,), weight, 1e-6)


@member(floats(TOKENS, WIDTH), floats(WIDTH))
def rms_norm_by_hand(x, weight):
    hidden = x.float()
    hidden = hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + 1e-6)
    return hidden.to(x.dtype) * weight


@member(floats(TOKENS, WIDTH), floats(TOKENS, WIDTH), floats(WIDTH))
def residual_rms_norm(x, residual, weight):
    hidden = x + residual
    return hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + 1e-6) * weight


@member(floats(TOKENS, WIDTH), floats(TOKENS, WIDTH), floats(WIDTH))
def gated_rms_norm(x, gate, weight):
    hidden = x * F.silu(gate)
    return hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + 1e-6) * weight


@member(floats(Many(16), 512, 32, 128), floats(128))
def rms_norm_of_heads(q, weight):
    return q * torch.rsqrt(q.square().mean(-1, keepdim=True) + 1e-6) * weight


@member(floats(Many(32), 384, 56, 56), floats(384), floats(384))
def layer_norm_channels_first(x, weight, bias):
    mean = x.mean(1, keepdim=True)
    variance = (x - mean).square().mean(1, keepdim=True)
    normed = (x - mean) / torch.sqrt(variance + 1e-6)
    return weight[:, None, None] * normed + bias[:, None, None]


@member(MAPS, floats(128), floats(128))
def group_norm(x, weight, bias):
    return F.group_norm(x, 32, weight, bias)


@member(MAPS, floats(128), floats(128))
def group_norm_silu(x, weight, bias):
    return F.silu(F.group_norm(x, 32, weight, bias))


@member(MAPS, floats(128), floats(128), floats(IMAGES, 128), floats(IMAGES, 128))
def group_norm_scale_shift_silu(x, weight, bias, scale, shift):
    normed = F.group_norm(x, 32, weight, bias)
    return F.silu(normed * (1 + scale[:, :, None, None]) + shift[:, :, None, None])


@member(floats(Many(16), 64, 16, 32, 32), floats(64), floats(64))
def group_norm_of_volumes(x, weight, bias):
    return F.relu(F.group_norm(x, 8, weight, bias))


@member(floats(Many(64), 256, 2048), floats(256), floats(256))
def group_norm_of_sequences(x, weight, bias):
    return F.gelu(F.group_norm(x, 16, weight, bias))


@member(MAPS)
def instance_norm_relu(x):
    return F.relu(F.instance_norm(x))


@member(floats(IMAGES, 128, 56, 56), floats(128), floats(128))
def instance_norm_leaky(x, weight, bias):
    return F.leaky_relu(F.instance_norm(x, weight=weight, bias=bias), 0.1)


@member(MAPS, floats(128), floats(128))
def batch_norm_relu_training(x, weight, bias):
    return F.relu(F.batch_norm(x, None, None, weight, bias, training=True))


@member(MAPS, MAPS, floats(128), floats(128))
def batch_norm_residual_training(x, residual, weight, bias):
    normed = F.batch_norm(x, None, None, weight, bias, training=True)
    return F.relu(normed + residual)


@member(floats(TOKENS, WIDTH), floats(WIDTH), floats(WIDTH))
def batch_norm_of_rows_training(x, weight, bias):
    return F.batch_norm(x, None, None, weight, bias, training=True)


@member(MAPS, *[floats(128)] * 4)
def batch_norm_inference(x, mean, variance, weight, bias):
    return F.relu(F.batch_norm(x, mean.detach(), variance.detach().abs(), weight, bias))


@member(MAPS)
class BatchNormHardswish(nn.Module):
    """Batch normalisation by its running statistics, and an activation."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(128).eval()

    def forward(self, x):
        return F.hardswish(self.norm(x))


@member(floats(TOKENS, WIDTH), floats(TOKENS, WIDTH))
class ScaledResidualLayerNorm(nn.Module):
    """The end of a block of a transformer: residual, layer norm and a scale."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(2048)
        self.scale = nn.Parameter(torch.ones(2048))

    def forward(self, x, residual):
        return self.norm(residual + x * self.scale)
