"""Reductions with arithmetic before and after them, over any dimensions."""

import torch
import torch.nn.functional as F
from suite import Many, floats, mask, member

ROWS = Many(16384)
WIDTH = 4096
IMAGES = Many(64)


@member(floats(ROWS, WIDTH))
def sum_of_squares(x):
    return (x * x).sum()


@member(floats(ROWS, WIDTH))
def mean_of_rows(x):
    return torch.exp(x.mean(-1))


@member(floats(ROWS, WIDTH))
def sum_of_columns(x):
    return torch.tanh(x.sum(0))


@member(floats(IMAGES, 256, 56, 56))
def global_average_pool(x):
    return x.mean((2, 3))


@member(floats(IMAGES, 256, 56, 56))
def channel_statistics(x):
    return x.std((0, 2, 3), correction=0) / (x.mean((0, 2, 3)).abs() + 1e-3)


@member(floats(ROWS, WIDTH))
def variance_of_rows(x):
    return torch.log1p(x.var(-1))


@member(floats(ROWS, WIDTH))
def standardized_rows(x):
    return (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-6)


@member(floats(ROWS, WIDTH))
def amax_of_rows(x):
    return x.amax(-1)


@member(floats(IMAGES, 256, 56, 56))
def amax_of_positions(x):
    return F.relu(x).amax((2, 3))


@member(floats(ROWS, WIDTH))
def range_normalized(x):
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    return (x - low) / (high - low + 1e-6)


@member(floats(ROWS, WIDTH))
def scaled_by_absmax(x):
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-5) / 127
    return torch.round(x / scale).clamp(-127, 127) * scale


@member(floats(ROWS, WIDTH))
def argmax_of_rows(x):
    return x.argmax(-1)


@member(floats(ROWS, WIDTH))
def logsumexp_of_rows(x):
    return torch.logsumexp(x * 0.125, -1)


@member(floats(ROWS, WIDTH))
def norm_of_rows(x):
    return torch.linalg.vector_norm(x, dim=-1)


@member(floats(ROWS, WIDTH))
def normalized_rows(x):
    return F.normalize(x, dim=-1)


@member(floats(Many(64), 1024, 32, 32))
def normalized_channels(x):
    return F.normalize(x, dim=1)


@member(floats(ROWS, WIDTH), floats(ROWS, WIDTH))
def cosine_similarity(x, y):
    return F.cosine_similarity(x, y, dim=-1)


@member(floats(ROWS, WIDTH), floats(ROWS, WIDTH))
def squared_distance(x, y):
    return (x - y).square().sum(-1)


@member(floats(ROWS, WIDTH), floats(ROWS, WIDTH))
def dot_product_of_rows(x, y):
    return torch.sigmoid((x * y).sum(-1))


@member(floats(Many(64), 512, 1024), mask(Many(64), 512, 1))
def masked_mean_of_tokens(x, keep):
    kept = x * keep
    return kept.sum(1) / keep.sum(1).clamp(min=1)


@member(floats(ROWS, WIDTH))
def count_of_positive(x):
    return (x > 0).sum(-1)


@member(floats(ROWS, WIDTH))
def any_above(x):
    return (x > 4).any(-1)


@member(floats(ROWS, WIDTH), floats(WIDTH))
def weighted_entropy(logits, weight):
    probabilities = torch.softmax(logits, -1)
    return -(weight * probabilities * torch.log(probabilities + 1e-9)).sum(-1)
