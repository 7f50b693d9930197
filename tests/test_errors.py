"""Each mistake raises an error of ours that is also the built-in which eager PyTorch raises."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fuselab
from fuselab import errors
from fuselab.data.dataset import open_dataset
from fuselab.data.loader import Loader
from fuselab.data.metadata import load_metadata
from fuselab.data.source import Source
from fuselab.errors import FuselabError
from fuselab.inspect import targets
from fuselab.nn import FusedEmbeddingCollection, LoRALinear, OuterInteraction
from fuselab.nn.lora_linear import adapters_from_difference
from fuselab.ops import (
    add,
    add_mul_activation,
    bias_activation,
    bias_activation_,
    dot_interaction,
    embedding_lookup,
    generalized_box_iou_loss,
    hash_indices,
    linear_activation,
    linear_binary_cross_entropy,
    log_softmax,
    mlp,
    softmax,
)
from fuselab.train import checkpoint
from fuselab.train.schedule import Schedule

X = torch.ones(4, 4)
WHOLE = torch.ones(4, 4, dtype=torch.long)
IDS = torch.zeros(4, 1, dtype=torch.long)
LEAF = torch.ones(4, 4, requires_grad=True)
ON_META = torch.ones(4, 4, device="meta")

Call = Callable[[], Any]
# What goes wrong: (ours, the same mistake in eager PyTorch).
MISTAKES: dict[str, tuple[Call, Call]] = {
    # Types and numbers of arguments.
    "a list for a tensor": (lambda: softmax([1.0]), lambda: torch.softmax([1.0], -1)),
    "None for a tensor": (lambda: linear_activation(X, None), lambda: F.linear(X, None)),
    "a str for a dim": (lambda: softmax(X, "a"), lambda: torch.softmax(X, "a")),
    "a float for a dim": (lambda: softmax(X, 1.5), lambda: torch.softmax(X, 1.5)),
    "a str for a dtype": (
        lambda: softmax(X, dtype="float32"),
        lambda: torch.softmax(X, -1, dtype="float32"),
    ),
    "an unexpected keyword": (
        lambda: softmax(X, dims=0),
        lambda: torch.softmax(X, -1, dims=0),
    ),
    "too many arguments": (
        lambda: softmax(X, -1, None, 4),
        lambda: torch.softmax(X, -1, None, 4),
    ),
    "a missing argument": (lambda: softmax(), lambda: torch.softmax()),
    "a number in a list of tensors": (lambda: embedding_lookup([3], IDS), lambda: torch.cat([3])),
    "a str for a factor": (
        lambda: add_mul_activation(X, X, scale="a"),
        lambda: torch.add(X, X, alpha="a"),
    ),
    "a vector for a factor": (
        lambda: add_mul_activation(X, X, scale=torch.ones(2)),
        lambda: torch.add(X, X, alpha=torch.ones(2)),
    ),
    "a complex factor": (
        lambda: add_mul_activation(X, X, scale=torch.tensor(1j)),
        lambda: torch.add(X, X, alpha=torch.tensor(1j)),
    ),
    "a factor past every float": (
        lambda: add_mul_activation(X, X, scale=10**400),
        lambda: torch.add(X, X, alpha=10**400),
    ),
    "a call of what is none": (lambda: fuselab.time(X), lambda: X()),
    "a module of another type": (
        lambda: LoRALinear.wrap(3, 2),
        lambda: nn.Sequential(3),
    ),
    # Dimensions, shapes and indices.
    "a dim out of range": (lambda: softmax(X, 7), lambda: torch.softmax(X, 7)),
    "a negative dim out of range": (lambda: log_softmax(X, -3), lambda: torch.log_softmax(X, -3)),
    "an index out of range": (
        lambda: embedding_lookup([X], IDS + 9),
        lambda: F.embedding(IDS + 9, X),
    ),
    "a negative index": (lambda: embedding_lookup([X], IDS - 1), lambda: F.embedding(IDS - 1, X)),
    "shapes that do not broadcast": (lambda: add(X, X[:3]), lambda: X + X[:3]),
    "a weight of another depth": (
        lambda: linear_activation(X, torch.ones(3, 5)),
        lambda: F.linear(X, torch.ones(3, 5)),
    ),
    "a bias of another width": (
        lambda: bias_activation(X, torch.ones(3)),
        lambda: X + torch.ones(3),
    ),
    "a table of one dimension": (
        lambda: embedding_lookup([X[0]], IDS),
        lambda: F.embedding(IDS, X[0]),
    ),
    "a target of another shape": (
        lambda: linear_binary_cross_entropy(X, X[:1], None, X),
        lambda: F.binary_cross_entropy_with_logits(F.linear(X, X[:1]), X),
    ),
    "a scalar input of a layer": (
        lambda: linear_activation(X[0, 0], X),
        lambda: F.linear(X[0, 0], X),
    ),
    "samples of other batches": (
        lambda: dot_interaction(X, torch.ones(3, 2, 4)),
        lambda: torch.cat([X[:, None], torch.ones(3, 2, 4)], 1),
    ),
    "no tensors where some are needed": (
        lambda: embedding_lookup([], IDS),
        lambda: torch.stack([]),
    ),
    "no weights": (lambda: mlp(X, []), lambda: torch.cat([])),
    "fewer columns than none": (
        lambda: dot_interaction(X, torch.ones(4, 2, 4), -50),
        lambda: F.pad(X, (0, -50)),
    ),
    "a remainder by zero": (
        lambda: hash_indices(IDS, torch.zeros(1, dtype=torch.long)),
        lambda: IDS % 0,
    ),
    "a layer of fewer than no widths": (
        lambda: fuselab.nn.MLP([4, -1]),
        lambda: nn.Linear(4, -1),
    ),
    "an interaction of fewer than no vectors": (
        lambda: OuterInteraction(-1, 4, 2),
        lambda: nn.Linear(-16, 2),
    ),
    "a table of fewer than no rows": (
        lambda: FusedEmbeddingCollection([-1], 4),
        lambda: nn.Embedding(-1, 4),
    ),
    "a difference of one dimension": (
        lambda: adapters_from_difference(X[0], 1),
        lambda: torch.linalg.svd(X[0]),
    ),
    "a difference that is not finite": (
        lambda: adapters_from_difference(X * torch.nan, 1),
        lambda: torch.linalg.svd(X * torch.nan),
    ),
    # Dtypes, layouts and devices.
    "integers in softmax": (lambda: softmax(WHOLE), lambda: torch.softmax(WHOLE, -1)),
    "complex numbers in softmax": (
        lambda: softmax(X.cfloat()),
        lambda: torch.softmax(X.cfloat(), -1),
    ),
    "softmax to an integer dtype": (
        lambda: softmax(X, dtype=torch.int32),
        lambda: torch.softmax(X, -1, dtype=torch.int32),
    ),
    "integers in gelu": (lambda: bias_activation(WHOLE, X[0], "gelu"), lambda: F.gelu(WHOLE)),
    "two dtypes": (
        lambda: linear_activation(X, X.double()),
        lambda: F.linear(X, X.double()),
    ),
    "indices that are no integers": (
        lambda: embedding_lookup([X], X[:, :1]),
        lambda: F.embedding(X, X),
    ),
    "integers in a decomposition": (
        lambda: adapters_from_difference(WHOLE, 1),
        lambda: torch.linalg.svd(WHOLE),
    ),
    "a sparse tensor": (
        lambda: softmax(X.to_sparse()),
        lambda: torch.softmax(X.to_sparse(), -1),
    ),
    "two devices": (lambda: add(X, ON_META), lambda: X + ON_META),
    # Names of options.
    "an unknown reduction": (
        lambda: generalized_box_iou_loss(X, X, "nosuch"),
        lambda: F.mse_loss(X, X, reduction="nosuch"),
    ),
    "an unknown reduction of a cross entropy": (
        lambda: linear_binary_cross_entropy(X, X[:1], None, X[:, :1], "nosuch"),
        lambda: F.binary_cross_entropy_with_logits(X, X, reduction="nosuch"),
    ),
    "an unknown activation": (
        lambda: bias_activation(X, X[0], "nosuch"),
        lambda: nn.init.calculate_gain("nosuch"),
    ),
    "an unknown way to treat indices": (
        lambda: embedding_lookup([X], IDS, "nosuch"),
        lambda: nn.EmbeddingBag(3, 2, mode="nosuch")(IDS),
    ),
    "an unknown implementation": (
        lambda: softmax(X, implementation="nosuch"),
        lambda: nn.init.kaiming_uniform_(X.clone(), mode="nosuch"),
    ),
    "an unknown mode of a timer": (
        lambda: fuselab.time(torch.relu, X, mode="nosuch"),
        lambda: nn.EmbeddingBag(3, 2, mode="nosuch")(IDS),
    ),
    # Autograd.
    "in place on a leaf": (
        lambda: bias_activation_(torch.ones(4, requires_grad=True), X[0]),
        lambda: torch.ones(4, requires_grad=True).add_(X[0]),
    ),
    "in place on expanded memory": (
        lambda: bias_activation_(torch.ones(1, 1).expand(4, 4), X[0]),
        lambda: torch.ones(1, 1).expand(4, 4).add_(X[0]),
    ),
    "in place on memory that is read": (
        lambda: bias_activation_(_memory()[1:5], _memory()[:4]),
        lambda: _memory()[1:5].add_(_memory()[:4]),
    ),
    # Files.
    "data that is not there": (
        lambda: Source.at("/no/such/file.tsv"),
        lambda: torch.load("/no/such/file"),
    ),
    "metadata that are not there": (
        lambda: load_metadata("/no/such/file.json"),
        lambda: torch.load("/no/such/file"),
    ),
    "a checkpoint that is not there": (
        lambda: checkpoint.load(Path("/no/such/file"), "dlrm"),
        lambda: torch.load("/no/such/file"),
    ),
    "rows in batches of none": (
        lambda: Loader(open_dataset(rows=100), 0),
        lambda: torch.utils.data.DataLoader([1], batch_size=0),
    ),
    "a learning rate below 0": (
        lambda: Schedule(-1.0, 10),
        lambda: torch.optim.SGD([X], lr=-1),
    ),
    "a target that is not there": (
        lambda: targets.load("/no/such/file.py"),
        lambda: torch.load("/no/such/file"),
    ),
}
_MEMORY = torch.ones(8)


def _memory() -> Tensor:
    return _MEMORY


def builtin(error: BaseException) -> type[BaseException]:
    """The nearest class of an error that Python itself has."""
    return next(one for one in type(error).__mro__ if one.__module__ == "builtins")


@pytest.mark.parametrize("mistake", MISTAKES)
def test_ours_is_the_built_in_that_eager_raises(mistake: str) -> None:
    ours, eager = MISTAKES[mistake]
    with pytest.raises(Exception) as theirs:
        eager()
    with pytest.raises(builtin(theirs.value)) as found:
        ours()
    if isinstance(found.value, FuselabError):
        assert str(found.value) == found.value.args[0]
        assert "\n" not in str(found.value)


EXAMPLES: dict[type[FuselabError], tuple[Any, ...]] = {
    errors.UnknownNameError: ("activation", "reluu", ["relu", "gelu"]),
    errors.DivergenceError: ("a sentence.", 7),
}


KINDS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, FuselabError)
]


@pytest.mark.parametrize("kind", KINDS)
def test_errors_survive_the_pickling_of_dask(kind: type[FuselabError]) -> None:
    support = pytest.importorskip("tblib.pickling_support", reason="Dask is not installed")
    error = kind(*EXAMPLES.get(kind, ("a sentence.",)))
    make, args, *_ = support.pickle_exception(error)
    again = make(*args)
    assert type(again) is kind and str(again) == str(error)


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_is_its_sentence_and_survives_pickling(kind: type[FuselabError]) -> None:
    error = kind(*EXAMPLES.get(kind, ("a sentence.",)))
    expected = "unknown activation 'reluu'; known: gelu, relu. Did you mean 'relu'?"
    assert str(error) == (expected if kind is errors.UnknownNameError else "a sentence.")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind and str(again) == str(error)
    # More than Exception, so that code written for eager PyTorch catches it.
    assert kind is FuselabError or builtin(error) is not Exception
