"""DLRM layer by layer: two rows of Criteo on their way to two probabilities.

The deep learning recommendation model (Naumov et al., arXiv:1906.00091) in plain PyTorch, step by
step: its inputs, the output of every layer, where the parameters are, and which parts are worth a
kernel.

    python examples/dlrm_layers.py
    fuselab train dlrm
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor, nn

from fuselab.data import MISSING_ID, pieces, to_batch
from fuselab.data.layout import MISSING_COUNT
from fuselab.models.dlrm import MAIN, SMALL, Dlrm, DlrmConfig
from fuselab.nn import DotInteraction, OuterInteraction

# ## Two rows
#
# A row of Criteo's click logs is a label, 13 counts and 26 categories, whose values are hashed to
# 32 bits; any of the 39 may be missing. These two are synthetic, in the same layout.


def two_rows() -> None:
    rows = next(pieces(2))
    for place in range(2):
        counts = ["-" if count == MISSING_COUNT else str(count) for count in rows.counts[place]]
        ids = ["-" if each == MISSING_ID else f"{each:08x}" for each in rows.ids[place, :6]]
        print(f"label {rows.labels[place]}, counts {' '.join(counts)}")
        print(f"   categories {' '.join(ids)} ...")


# ## Counts
#
# Raw counts run to millions, and a model with a learning rate of 0.1 diverges on them. The model
# takes log(count + 1) instead, with negative and missing counts as 0. The logarithm of a missing
# count would be NaN, and one NaN makes all weights NaN.
#
# ## Categories
#
# An id becomes the row of a table, one table per category. The simplest way is the modulus, `(id +
# 1) % size`, where a missing id (-1) gets row 0. It needs no vocabulary, but ids may collide.


def what_the_model_gets() -> None:
    batch = to_batch(next(pieces(2)))
    print(
        "dense ", tuple(batch.dense.shape), [round(value, 2) for value in batch.dense[0].tolist()]
    )
    rows = Dlrm(SMALL).rows(batch.sparse)
    print(
        "sparse", tuple(batch.sparse.shape), "as rows of the tables:", rows[0, :8].tolist(), "..."
    )
    print("tables", SMALL.table_sizes[:8], "...")


# ## Through the layers
#
# This is the small published configuration. Hooks print the output shape of every module. Between
# the modules is the interaction, which has no parameters.


def through_the_layers() -> None:
    torch.manual_seed(0)
    model, batch = Dlrm(SMALL), to_batch(next(pieces(2)))
    probability = model(batch.dense, batch.sparse)

    def show(name: str, output: Tensor) -> None:
        print(f"{name:42} {list(output.shape)}")

    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            what = f"{name}: Linear({module.in_features}, {module.out_features})"
            module.register_forward_hook(lambda _, args, output, what=what: show(what, output))
    vectors = model.embed(batch.sparse)
    show(f"embeddings: {len(vectors)} tables, each", vectors[0])
    dense = model.dense_mlp(batch.dense)
    together = model.interact([dense, *vectors])
    show("interaction: outer", together)
    logit = model.prediction_mlp(together)
    show("probability: sigmoid", torch.sigmoid(logit))
    assert torch.equal(torch.sigmoid(logit), probability)


# ## Three interactions
#
# The interaction combines the 27 vectors (26 embeddings and the dense one): it puts them end to
# end, or takes every product of two of their elements, or the dot product of every pair. The choice
# decides how large the first prediction layer is.


def three_interactions() -> None:
    print(f"{'':6} {'width':>8}  {'weights of the first prediction layer (512 wide)':>48}")
    for name in ("cat", "dot", "outer"):
        width = replace(MAIN, interaction=name).interaction_width
        print(f"{name:6} {width:8,}  {512 * width:48,}")


# The matrix of all products is symmetric, so half of it is redundant, and it never has to be
# stored. Both modules replace the plain spelling, and give the same result:


def fused_interactions() -> None:
    torch.manual_seed(0)
    dense, vectors = torch.randn(2, 16), torch.randn(2, 26, 16)
    every = [dense, *vectors.unbind(1)]
    plain = Dlrm(tiny("dot")).interact(every)
    print("dot:  ", (DotInteraction()(dense, vectors) - plain).abs().max().item() < 1e-5)
    linear = nn.Linear(432 * 432, 8)
    plain = linear(Dlrm(tiny("outer")).interact(every))
    fused = OuterInteraction.of(linear, vectors=27, width=16)(dense, vectors)
    print("outer:", (fused - plain).abs().max().item() < 1e-4)


def tiny(interaction: str) -> DlrmConfig:
    return DlrmConfig(prediction_hidden=(1,), interaction=interaction, largest_table=2)


# ## Logit and probability
#
# `forward` returns a probability. Training takes the logit, because the loss on a sigmoid's output
# loses all gradient where the sigmoid is 1 in float32. Applying the sigmoid twice is a mistake that
# still trains: all outputs lie between 0.5 and 0.73, every row counts as a click, and the accuracy
# never changes.


def once_or_twice() -> None:
    logit = torch.tensor([-8.0, 0.0, 20.0], requires_grad=True)
    once, twice = torch.sigmoid(logit), torch.sigmoid(torch.sigmoid(logit))
    print("once ", [round(value, 3) for value in once.tolist()])
    print("twice", [round(value, 3) for value in twice.tolist()])
    label = torch.zeros(3)
    for name, loss in {
        "on the probability": nn.functional.binary_cross_entropy(once, label, reduction="sum"),
        "on the logit": nn.functional.binary_cross_entropy_with_logits(
            logit, label, reduction="sum"
        ),
    }.items():
        (slope,) = torch.autograd.grad(loss, logit, retain_graph=True)
        print(f"gradient {name:19} {[round(value, 4) for value in slope.tolist()]}")


# ## Where the parameters are
#
# Nearly all of them are in the tables, and a step touches a few rows of each. So a DLRM is bound by
# memory and launches, not by arithmetic: 26 look-ups, 26 sparse gradients and 26 updates of a few
# kilobytes each.


def where_the_parameters_are() -> None:
    whole = replace(MAIN, largest_table=max(MAIN.cardinalities))
    for name, config in {"small": SMALL, "main": MAIN, "main, whole tables": whole}.items():
        tables = sum(config.table_sizes) * config.embedding_dim
        dense = layers((13, *config.dense_hidden, config.embedding_dim))
        prediction = layers((config.interaction_width, *config.prediction_hidden, 1))
        print(
            f"{name:19} tables {tables:12,} ({4 * tables / 1e6:7.1f} MB)  dense {dense:8,}  "
            f"prediction {prediction:10,} ({config.interaction})"
        )


def layers(widths: tuple[int, ...]) -> int:
    return sum((inputs + 1) * outputs for inputs, outputs in pairwise(widths))


# ## On an H200
#
# The dot interaction with its gradients, and the outer product with the layer after it (forward):
#
# [figures: dot_interaction forward+backward bfloat16]
#
# [plot: dot_interaction forward+backward bfloat16]
#
# [figures: outer_interaction_linear forward bfloat16]
#
# The embeddings, look-up and step:
#
# [file: embedding_step.txt]

STEPS = (
    two_rows,
    what_the_model_gets,
    through_the_layers,
    three_interactions,
    fused_interactions,
    once_or_twice,
    where_the_parameters_are,
)


def main() -> None:
    for step in STEPS:
        step()


if __name__ == "__main__":
    main()
