"""Pieces of public families of models: gates, routers, windows, contrastive and sequence losses."""

import torch
import torch.nn.functional as F
from suite import Many, floats, indices, mask, member

ROWS = Many(16384)
WIDTH = 2048
IMAGES = Many(64)
SEQUENCES = Many(32)
TOKENS = 1024
CLASSES = 21


@member(floats(ROWS, 4 * WIDTH), floats(ROWS, WIDTH))
def lstm_gates(gates, cell):
    taken, kept, new, shown = gates.chunk(4, dim=-1)
    cell = torch.sigmoid(kept) * cell + torch.sigmoid(taken) * torch.tanh(new)
    return torch.sigmoid(shown) * torch.tanh(cell)


@member(floats(ROWS, 3 * WIDTH), floats(ROWS, 3 * WIDTH), floats(ROWS, WIDTH))
def gru_gates(of_input, of_hidden, hidden):
    reset_x, update_x, new_x = of_input.chunk(3, dim=-1)
    reset_h, update_h, new_h = of_hidden.chunk(3, dim=-1)
    update = torch.sigmoid(update_x + update_h)
    new = torch.tanh(new_x + torch.sigmoid(reset_x + reset_h) * new_h)
    return (1 - update) * new + update * hidden


@member(floats(ROWS, 2 * WIDTH))
def clamped_interleaved_glu(x):
    gate, linear = x[..., ::2].clamp(max=7), x[..., 1::2].clamp(-7, 7)
    return (linear + 1) * gate * torch.sigmoid(1.702 * gate)


@member(floats(ROWS, WIDTH), floats(ROWS, WIDTH), floats(ROWS, WIDTH), floats(WIDTH), floats(WIDTH))
def gated_state_norm(y, x, z, skip, weight):
    return F.rms_norm((y + skip * x) * F.silu(z), (WIDTH,), weight)


@member(floats(SEQUENCES, TOKENS, WIDTH), floats(WIDTH))
def token_shift(x, mix):
    before = F.pad(x, (0, 0, 1, -1))
    return x * mix + before * (1 - mix)


@member(floats(SEQUENCES, TOKENS, WIDTH), floats(SEQUENCES, TOKENS, WIDTH), mask(SEQUENCES))
def stochastic_depth(x, branch, keep):
    return x + branch * keep[:, None, None] / 0.9


@member(floats(SEQUENCES, 16, TOKENS, 128), floats(TOKENS, 32), floats(TOKENS, 32))
def rotary_of_a_part(q, cos, sin):
    first, second, rest = q.split((32, 32, 64), dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


@member(
    floats(SEQUENCES, TOKENS, 16, 128), floats(128), floats(TOKENS, 1, 64), floats(TOKENS, 1, 64)
)
def normed_rotary_heads(q, weight, cos, sin):
    first, second = F.rms_norm(q, (128,), weight).chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.transpose(1, 2)


@member(floats(SEQUENCES, 4, TOKENS, TOKENS))
def sliding_window_softmax(scores):
    place = torch.arange(scores.shape[-1], device=scores.device)
    distance = place[:, None] - place
    return torch.softmax(scores.masked_fill((distance < 0) | (distance > 256), -torch.inf), -1)


@member(floats(SEQUENCES, TOKENS, WIDTH), floats(SEQUENCES, TOKENS))
def attention_pooling(x, scores):
    return (torch.softmax(scores, 1)[..., None] * x).sum(1)


@member(floats(Many(1 << 20), 64), indices(64, Many(1 << 20)))
def router_balance_loss(logits, chosen):
    share = torch.softmax(logits, -1).mean(0)
    load = F.one_hot(chosen, logits.shape[-1]).to(logits.dtype).mean(0)
    return (share * load).sum() * logits.shape[-1]


@member(floats(6144, 6144))
def contrastive(similarity):
    labels = torch.arange(similarity.shape[0], device=similarity.device)
    scaled = similarity * 20
    return (F.cross_entropy(scaled, labels) + F.cross_entropy(scaled.t(), labels)) / 2


@member(floats(Many(4096), 32000), indices(32000, Many(4096)))
def capped_cross_entropy(logits, target):
    return F.cross_entropy(30 * torch.tanh(logits / 30), target)


@member(floats(Many(8), 512, 32000), indices(32000, Many(8), 512), mask(Many(8), 512))
def sequence_log_probability(logits, labels, counted):
    picked = F.log_softmax(logits[:, :-1], -1).gather(-1, labels[:, 1:, None])[..., 0]
    return (picked * counted[:, 1:]).sum(-1)


@member(floats(ROWS, WIDTH), floats(ROWS, WIDTH), floats(ROWS, 1))
def clipped_policy_loss(log_probability, old, advantage):
    ratio = torch.exp(log_probability - old)
    return -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()


@member(floats(ROWS, WIDTH), floats(ROWS, WIDTH))
def gaussian_divergence(mean, log_variance):
    return -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(-1).mean()


@member(floats(ROWS, WIDTH), floats(ROWS, WIDTH), floats(ROWS, WIDTH))
def reparametrized(mean, log_variance, noise):
    return mean + noise * torch.exp(0.5 * log_variance.clamp(-30, 20))


@member(floats(SEQUENCES, TOKENS, WIDTH), floats(SEQUENCES, TOKENS, WIDTH), mask(SEQUENCES, TOKENS))
def masked_huber(prediction, target, counted):
    loss = F.huber_loss(prediction, target, reduction="none").mean(-1)
    return (loss * counted).sum() / counted.sum().clamp(min=1)


@member(floats(Many(32), CLASSES, 256, 256), indices(CLASSES, Many(32), 256, 256))
def soft_jaccard(logits, target):
    share = torch.softmax(logits, 1)
    wanted = F.one_hot(target, CLASSES).movedim(-1, 1).to(share.dtype)
    both = (share * wanted).sum((2, 3))
    return 1 - ((both + 1) / (share.sum((2, 3)) + wanted.sum((2, 3)) - both + 1)).mean()


@member(floats(IMAGES, 64, 112, 112))
def total_variation(x):
    across = (x[..., 1:] - x[..., :-1]).abs().mean()
    return across + (x[..., 1:, :] - x[..., :-1, :]).abs().mean()


@member(floats(IMAGES, 64, 112, 112))
def laplacian(x):
    beside = x.roll(1, -1) + x.roll(-1, -1) + x.roll(1, -2) + x.roll(-1, -2)
    return beside - 4 * x


@member(floats(IMAGES, 56, 56, 192), floats(192), floats(192))
def partitioned_windows(x, weight, bias):
    hidden = F.layer_norm(x, (192,), weight, bias)
    hidden = hidden.unflatten(1, (8, 7)).unflatten(3, (8, 7))
    return hidden.transpose(2, 3).flatten(0, 2)


@member(floats(IMAGES, 56, 56, 192), floats(768), floats(768))
def merged_patches(x, weight, bias):
    corners = (x[:, 0::2, 0::2], x[:, 1::2, 0::2], x[:, 0::2, 1::2], x[:, 1::2, 1::2])
    return F.layer_norm(torch.cat(corners, -1), (768,), weight, bias)


@member(floats(IMAGES, 56, 56, 192), floats(192), floats(192))
def global_response_norm(x, gamma, beta):
    strength = x.norm(dim=(1, 2), keepdim=True)
    return gamma * (x * strength / (strength.mean(-1, keepdim=True) + 1e-6)) + beta + x


@member(floats(IMAGES, 256, 56, 56))
def channel_pooling(x):
    return torch.cat((x.mean(1, keepdim=True), x.amax(1, keepdim=True)), 1)


@member(floats(IMAGES, 128, 56, 56), floats(IMAGES, 128), floats(IMAGES, 128))
def adaptive_instance_norm(x, mean, deviation):
    own = x.std((2, 3), keepdim=True) + 1e-5
    whitened = (x - x.mean((2, 3), keepdim=True)) / own
    return whitened * deviation[..., None, None] + mean[..., None, None]


@member(floats(IMAGES, 128, 56, 56), floats(IMAGES, 128, 28, 28))
def upsampled_and_added(x, coarse):
    return F.relu(x + F.interpolate(coarse, scale_factor=2.0))


@member(floats(IMAGES, 64, 112, 112))
def space_to_depth(x):
    return F.pixel_unshuffle(F.relu(x), 2)


@member(floats(ROWS, WIDTH), floats(ROWS, 1))
def fake_quantized(x, scale):
    rounded = (x / scale).round().clamp(-128, 127) * scale
    return x + (rounded - x).detach()


@member(
    floats(Many(65536), 256),
    floats(Many(262144), 256),
    indices(4096, Many(262144)),
    indices(4096, Many(262144)),
)
def edge_messages(nodes, edges, source, target):
    messages = F.relu(nodes[source] + edges)
    return torch.zeros_like(nodes).index_add(0, target, messages)


@member(floats(SEQUENCES, TOKENS, 1), floats(SEQUENCES, 1, TOKENS), floats(TOKENS))
def pairwise_gate(rows, columns, bias):
    return torch.sigmoid(rows + columns + bias)


@member(floats(SEQUENCES, TOKENS, 3), floats(SEQUENCES, TOKENS, 3))
def point_distances(x, y):
    return (x[:, :, None] - y[:, None]).square().sum(-1).sqrt()


@member(floats(Many(8192), 4), floats(8192, 4))
def box_overlaps(boxes, others):
    low = torch.maximum(boxes[:, None, :2], others[:, :2])
    size = (torch.minimum(boxes[:, None, 2:], others[:, 2:]) - low).clamp(min=0)
    both = size[..., 0] * size[..., 1]
    area = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    other_area = (others[:, 2] - others[:, 0]) * (others[:, 3] - others[:, 1])
    return both / (area[:, None] + other_area - both)


@member(floats(Many(128), 80, 3000))
def log_spectrogram(power):
    spectrogram = power.clamp(min=1e-10).log10()
    spectrogram = torch.maximum(spectrogram, spectrogram.amax((1, 2), keepdim=True) - 8)
    return (spectrogram + 4) / 4


@member(floats(ROWS, WIDTH))
def whitened_columns(x):
    return (x - x.mean(0)) / (x.std(0) + 1e-6)


@member(floats(Many(256), 2048, 64))
def slot_softmax(scores):
    return torch.softmax(scores * 0.125, 1)


@member(floats(SEQUENCES, 8, TOKENS, TOKENS))
def mean_of_heads(shares):
    return shares.mean(1)


@member(floats(ROWS, WIDTH), floats(ROWS, WIDTH))
def interleaved(x, y):
    return torch.stack((torch.tanh(x), y), -1).flatten(-2)


@member(floats(ROWS, 2000), floats(ROWS, 48))
def joined_features(x, y):
    return F.relu(torch.cat((x, y), -1))


@member(floats(SEQUENCES, 32, TOKENS, 64), floats(SEQUENCES, 8, TOKENS, 64))
def grouped_heads(q, k):
    return q * k.repeat_interleave(4, 1) * 0.125


@member(floats(SEQUENCES, 4, TOKENS, TOKENS))
def lower_triangle_mean(x):
    return torch.tril(x).sum(-1) / torch.arange(1, x.shape[-2] + 1, device=x.device)


@member(
    floats(Many(1 << 20), 16),
    floats(Many(1 << 20), 16),
    floats(Many(1 << 20), 16),
    floats(Many(1 << 20), 1),
)
def mixture_likelihood(logits, mean, log_scale, target):
    distance = (target - mean) * torch.exp(-log_scale)
    terms = F.log_softmax(logits, -1) - 0.5 * distance.square() - log_scale
    return -torch.logsumexp(terms, -1)


@member(floats(Many(1 << 20), 64), floats(Many(1 << 20), 1), floats(64))
def quantile_loss(prediction, target, quantile):
    error = target - prediction
    return torch.maximum(quantile * error, (quantile - 1) * error).mean()


@member(floats(ROWS, 4096))
def softmax_of_groups(x):
    return torch.softmax(x.unflatten(-1, (256, 16)), -1).flatten(-2)


@member(floats(SEQUENCES, TOKENS, WIDTH))
def running_mean_of_time(x):
    steps = torch.arange(1, x.shape[1] + 1, device=x.device)
    return x.cumsum(1) / steps[:, None]


@member(floats(ROWS, WIDTH))
def turned_halves(x):
    return F.silu(x.roll(1024, -1)) * x


@member(floats(IMAGES, 128, 112, 112))
def subsampled(x):
    return F.relu(x[..., ::2, ::2])


@member(floats(ROWS, 4096))
def maxout(x):
    return x.unflatten(-1, (1024, 4)).amax(-1)


@member(floats(IMAGES, 128, 56, 56), floats(128, 1, 1))
def channel_shuffle(x, bias):
    return F.relu(x + bias).unflatten(1, (4, 32)).transpose(1, 2).flatten(1, 2)


@member(floats(IMAGES, 128, 56, 56))
def pixel_norm(x):
    return x * torch.rsqrt(x.square().mean(1, keepdim=True) + 1e-8)


@member(floats(Many(32), CLASSES, 256, 256))
def entropy_of_pixels(logits):
    shares = torch.log_softmax(logits, 1)
    return -(shares.exp() * shares).sum(1).mean()


@member(floats(Many(1024), 256), floats(Many(1024), 256), floats(256))
def outer_product(x, y, bias):
    return torch.tanh(torch.einsum("bi,bj->bij", x, y) + bias)
