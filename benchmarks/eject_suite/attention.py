"""Softmax and log_softmax with scales, masks and biases."""

import torch
import torch.nn.functional as F
from suite import Many, floats, mask, member

BATCH = Many(16)
SCORES = floats(BATCH, 16, 512, 512)
ROWS = Many(16384)


@member(floats(ROWS, 4096))
def softmax(x):
    return torch.softmax(x, -1)


@member(floats(ROWS, 4096))
def softmax_with_temperature(logits):
    return torch.softmax(logits / 0.7, -1)


@member(SCORES, floats(BATCH, 1, 1, 512))
def scaled_softmax_with_added_mask(scores, added):
    return torch.softmax(scores * 0.125 + added, -1)


@member(SCORES, floats(BATCH, 1, 1, 512))
def dropped_softmax_with_added_mask(scores, added):
    return F.dropout(torch.softmax(scores * 0.125 + added, -1), 0.1)


@member(SCORES, mask(BATCH, 1, 1, 512))
def scaled_softmax_with_filled_mask(scores, hidden):
    return torch.softmax((scores * 0.125).masked_fill(hidden, -1e4), -1)


@member(SCORES)
def causal_softmax(scores):
    length = scores.shape[-1]
    position = torch.arange(length, device=scores.device)
    hidden = position[None, :] > position[:, None]
    return torch.softmax((scores * 0.125).masked_fill(hidden, float("-inf")), -1)


@member(SCORES)
def causal_softmax_by_triu(scores):
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    return torch.softmax((scores * 0.125).masked_fill(hidden, float("-inf")), -1)


@member(SCORES, floats(16, 512, 512))
def softmax_with_position_bias(scores, bias):
    return torch.softmax(scores * 0.125 + bias, -1)


@member(SCORES)
def softmax_with_capped_scores(scores):
    return torch.softmax(50 * torch.tanh(scores / 50), -1)


@member(SCORES, floats(16))
def softmax_with_slopes(scores, slopes):
    length = scores.shape[-1]
    position = torch.arange(length, device=scores.device)
    distance = (position[None, :] - position[:, None]).abs()
    return torch.softmax(scores * 0.125 - slopes[:, None, None] * distance, -1)


@member(floats(Many(64), 64, 112, 112))
def softmax_over_channels(x):
    return torch.softmax(x, 1)


@member(floats(ROWS, 4096), floats(4096))
def log_softmax_with_bias(logits, bias):
    return F.log_softmax((logits + bias) * 0.5, dim=-1)


@member(floats(ROWS, 4096))
def softmin(x):
    return F.softmin(x, dim=-1)
