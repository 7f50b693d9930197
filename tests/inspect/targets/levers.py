"""One function per lever that a profile should find, and a twin with nothing to find."""

import torch
import torch.nn.functional as F
from torch import nn


def attends(x):
    """Attention written out."""
    query = x[:32].reshape(8, 64, 64)
    scores = query @ query.transpose(1, 2) / 8.0
    weights = torch.softmax(scores.masked_fill(scores > 9.0, -9.0), dim=-1)
    return weights @ query


def attends_twice(x):
    """Two layers share the lines of their attention."""
    return attends(x), attends(2.0 * x)


def attends_in_one(x):
    """The same in one call."""
    query = x[:32].reshape(1, 8, 64, 64)
    return F.scaled_dot_product_attention(query, query, query)


def classifies(x):
    """A softmax that no product follows."""
    return torch.softmax(x @ x.t(), dim=-1)


def reorders(x):
    """A copy of a whole matrix into the order of its columns."""
    return x.t().contiguous() * 2.0


def keeps_order(x):
    """The same numbers without the copy."""
    return x.t() * 2.0


def casts(x):
    """A cast to float64 and straight back."""
    return x.double().float() + 1.0


def casts_once(x):
    """A sum in float64 of float32 numbers."""
    return x.double().sum(dim=0).float()


def many_chains(x):
    """Three chains of pointwise operators between products."""
    for _ in range(3):
        x = torch.sigmoid(torch.tanh(x * 2.0) + 1.0)
        x = x @ x.t()
    return x


class Trained(nn.Module):
    """Twenty layers, whose optimizer has as many parameters to walk."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(1024, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(20))

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x


def get_optimizer(module):
    return torch.optim.Adam(module.parameters(), fused=getattr(module, "fused", False))


class TrainedFused(Trained):
    """The same with a fused optimizer."""

    fused = True


def get_inputs():
    torch.manual_seed(0)
    return [torch.randn(256, 1024)]
