"""Embeddings, indexing, pooling, padding and running sums, with arithmetic around them."""

import torch
import torch.nn.functional as F
from suite import Many, floats, indices, member

ROWS = Many(16384)
WIDTH = 4096
IMAGES = Many(64)
TOKENS = 32000


@member(floats(TOKENS, 2048), indices(TOKENS, Many(32), 1024), floats(1024, 2048), floats(2048))
def embedding_norm(table, tokens, places, weight):
    hidden = F.embedding(tokens, table) * 2048**0.5 + places
    return F.rms_norm(hidden, hidden.shape[-1:], weight)


@member(floats(ROWS, WIDTH), indices(1024, ROWS))
def scaled_rows_by_index(x, order):
    return torch.index_select(x, 0, order) * 0.5


@member(floats(IMAGES, 64, 112, 112), floats(64))
def relu_max_pool(x, bias):
    return F.max_pool2d(F.relu(x + bias[:, None, None]), 3, 2, 1)


@member(floats(IMAGES, 64, 112, 112))
def local_contrast(x):
    return x - F.avg_pool2d(x, 3, 1, 1)


@member(floats(IMAGES, 256, 56, 56))
def squeezed_grid(x):
    return F.adaptive_avg_pool2d(F.silu(x), (7, 7))


@member(floats(IMAGES, 64, 112, 112))
def reflected_border(x):
    return F.pad(F.leaky_relu(x, 0.1), (1, 1, 1, 1), mode="reflect")


@member(floats(IMAGES, 256, 56, 56))
def shuffled_pixels(x):
    return F.pixel_shuffle(F.relu(x), 2)


@member(floats(ROWS, WIDTH))
def running_share(x):
    return torch.cumsum(torch.softmax(x, -1), -1)


@member(floats(ROWS, WIDTH))
def flipped_sum(x):
    return x + x.flip(-1)
