"""One function per thing that a profile should find, and one with nothing to find."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import record_function


def reads_back(x):
    total = x.sum()
    if total.item() > 0:
        return x + 1
    return x


def masks(x):
    return x[x > 0]


def builds_a_tensor(x):
    weights = torch.tensor([float(i) for i in range(512)])
    return x[:, :512] @ weights


class Built(nn.Module):
    def forward(self, x):
        return builds_a_tensor(x)


def looks_up(x):
    ids = x[0, :256].long()
    vocabulary = torch.arange(4096)
    return (ids.unsqueeze(1) == vocabulary.unsqueeze(0)).int().argmax(dim=1)


def naive_softmax(x):
    shifted = x - x.amax(dim=1, keepdim=True)
    powers = shifted.exp()
    return powers / powers.sum(dim=1, keepdim=True)


def many_small(x):
    rows = [x[i, :8].cos() for i in range(64)]
    return torch.stack(rows)


def many_small_in_a_row(x):
    row = x[0, :8]
    for _ in range(64):
        row = row.clone().cos().mul_(2)
    return row


def four_rows_of_small(x):
    rows = [x[i, :8] for i in range(16)]
    for _ in range(4):
        rows = [row.cos() for row in rows]
    return rows


def outer_product(x):
    row = x[:16, :256]
    blown_up = (row.unsqueeze(2) * row.unsqueeze(1)).flatten(1)
    return blown_up @ blown_up.t()


def clean(x):
    return x @ x.t()


def hostile(x):
    with record_function("[red]<script>alert(1)</script>[/red]"):
        return x + 1


def raises(x):
    if x.shape[0] > 1:
        raise ValueError("[bold]no\nsuch thing")
    return x


class Breaks(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x):
        hidden = torch.relu(self.linear(x[:, :32]) + 1.0)
        print(end="")
        return torch.sigmoid(hidden * 2.0)


def counts_rows(x):
    groups = x[:, 0].long().abs() % 8
    counted = torch.zeros(8).scatter_add_(0, groups, torch.ones_like(groups, dtype=x.dtype))
    return counted / len(x)


def state_of_a_batch(x):
    state = torch.zeros(x.shape[0], 32)
    return state + x[:, :32]


def drops_nothing(x):
    rows = [F.dropout(x[i], 0.1, training=False).contiguous() for i in range(32)]
    return F.dropout(torch.stack(rows).cos(), 0.1, training=False).sin()


def drops(x):
    return F.dropout(x.cos(), 0.1).sin()


class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(20_000, 16)

    def forward(self, x):
        return self.table(x[:, 0].long() % 20_000)


def chooses_a_branch(x):
    hidden = x.cos()
    if hidden.sum() > 0:
        return hidden.sin()
    return hidden


def picks_in_a_loop(x):
    total = x.sum(0)
    for limit in range(2):
        total = total + x[(x[:, 0] > limit).nonzero()[:, 0]].sum(0)
    return total


def get_inputs():
    return [torch.randn(256, 1024)]


class Bag(nn.Module):
    """A table whose whole gradient is written for a batch of few rows."""

    def __init__(self):
        super().__init__()
        self.table = nn.EmbeddingBag(20_000, 16, mode="sum")

    def forward(self, x):
        return self.table(x[:, :4].long() % 20_000)


class Rows(nn.Module):
    """The same by an index, which autograd cannot make sparse."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.ones(20_000, 16))

    def forward(self, x):
        return self.table[x[:, 0].long() % 20_000]


class Selected(nn.Module):
    """The same by index_select."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.ones(20_000, 16))

    def forward(self, x):
        return self.table.index_select(0, x[:, 0].long() % 20_000)


class Picked(nn.Module):
    """One number of each row of a result, whose gradient is no table's."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1024))

    def forward(self, x):
        return (x * self.scale)[torch.arange(len(x)), x[:, 0].long() % 1024]


class SlicedInALoop(nn.Module):
    """Each slice's gradient is as large as the whole."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1024))

    def forward(self, x):
        y, total = x * self.scale, 0
        for i in range(32):
            total = total + y[:, i]
        return total


class SlicedAtOnce(SlicedInALoop):
    def forward(self, x):
        return sum((x * self.scale)[:, :32].unbind(1))


def attends_causally(x):
    """Attention that builds its own mask."""
    query = x[:32].reshape(8, 64, 64)
    return F.scaled_dot_product_attention(query, query, query, is_causal=True)


def marks(x):
    """A call that builds a tensor inside, from a tensor that it is given."""
    return F.one_hot(x[:, 0].long() % 8, 8)
