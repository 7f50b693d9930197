"""Losses: cross entropy in its variants, and pointwise losses with their mean."""

import torch
import torch.nn.functional as F
from suite import Many, floats, indices, member

ROWS = Many(8192)
CLASSES = 8192
PAIR = (floats(Many(16384), 2048), floats(Many(16384), 2048))
LABELLED = (floats(ROWS, CLASSES), indices(CLASSES, ROWS))


@member(*LABELLED)
def cross_entropy(logits, target):
    return F.cross_entropy(logits, target)


@member(*LABELLED)
def cross_entropy_of_rows(logits, target):
    return F.cross_entropy(logits, target, reduction="none")


@member(*LABELLED)
def cross_entropy_smoothed(logits, target):
    return F.cross_entropy(logits, target, label_smoothing=0.1)


@member(*LABELLED)
def cross_entropy_ignoring(logits, target):
    return F.cross_entropy(logits, target, ignore_index=0)


@member(*LABELLED, floats(CLASSES))
def cross_entropy_weighted(logits, target, weight):
    return F.cross_entropy(logits, target, weight.detach())


@member(*LABELLED)
def cross_entropy_with_z_loss(logits, target):
    total = torch.logsumexp(logits, -1)
    return F.cross_entropy(logits, target) + 1e-4 * total.square().mean()


@member(floats(ROWS, CLASSES), floats(ROWS, CLASSES))
def cross_entropy_of_probabilities(logits, other):
    return F.cross_entropy(logits, torch.softmax(other, -1))


@member(floats(Many(32), 32, 256, 256), indices(32, Many(32), 256, 256))
def cross_entropy_of_pixels(logits, target):
    return F.cross_entropy(logits, target)


@member(floats(ROWS, CLASSES), indices(CLASSES, ROWS, 1))
def picked_log_probability(logits, chosen):
    return torch.log_softmax(logits, -1).gather(-1, chosen).squeeze(-1)


@member(floats(ROWS, CLASSES), floats(ROWS, CLASSES))
def distillation(student, teacher):
    log_student = F.log_softmax(student / 2.0, -1)
    log_teacher = F.log_softmax(teacher / 2.0, -1)
    return F.kl_div(log_student, log_teacher, reduction="batchmean", log_target=True) * 4.0


@member(*PAIR)
def mean_squared_error(prediction, target):
    return F.mse_loss(prediction, target)


@member(*PAIR)
def mean_absolute_error(prediction, target):
    return F.l1_loss(prediction, target)


@member(*PAIR)
def huber(prediction, target):
    return F.huber_loss(prediction, target, delta=0.5)


@member(*PAIR)
def smooth_l1_of_rows(prediction, target):
    return F.smooth_l1_loss(prediction, target, reduction="none").sum(-1)


@member(*PAIR)
def log_cosh(prediction, target):
    difference = prediction - target
    return (difference + F.softplus(-2.0 * difference) - 0.6931471805599453).mean()


@member(*PAIR)
def binary_cross_entropy_with_logits(logits, labels):
    return F.binary_cross_entropy_with_logits(logits, torch.sigmoid(labels))


@member(*PAIR)
def focal(logits, labels):
    target = torch.sigmoid(labels)
    loss = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
    probability = torch.sigmoid(logits)
    right = probability * target + (1 - probability) * (1 - target)
    return ((1 - right) ** 2 * loss).mean()


@member(*PAIR)
def dice(logits, labels):
    probability, target = torch.sigmoid(logits), torch.sigmoid(labels)
    shared = 2 * (probability * target).sum(-1)
    return (1 - shared / (probability.sum(-1) + target.sum(-1) + 1e-6)).mean()


@member(*PAIR, floats(Many(16384), 2048))
def gaussian_negative_log_likelihood(mean, target, log_variance):
    log_variance = log_variance.clamp(min=-13.8)
    return 0.5 * (log_variance + (target - mean).square() * torch.exp(-log_variance)).mean()


@member(floats(Many(16384), 2048), floats(Many(16384), 2048), floats(Many(16384), 2048))
def triplet(anchor, positive, negative):
    return F.triplet_margin_loss(anchor, positive, negative)
