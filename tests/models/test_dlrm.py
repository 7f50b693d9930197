"""The small DLRM: layers against arithmetic by hand, order of pairs, batch 1, as a TARGET."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fuselab.data import synthesize
from fuselab.errors import ArgumentError, UnknownNameError
from fuselab.inspect.targets import load
from fuselab.models import BUILT_IN
from fuselab.models.dlrm import MAIN, SMALL, Dlrm, DlrmConfig, get_inputs

TINY = DlrmConfig(largest_table=50)


def _tiny(interaction: str) -> Dlrm:
    torch.manual_seed(0)
    return Dlrm(replace(TINY, interaction=interaction))


def _vectors(model: Dlrm, dense: Tensor, sparse: Tensor) -> list[list[Tensor]]:
    """Per sample, the 27 vectors by hand."""
    found = []
    for row, ids in zip(dense, sparse, strict=True):
        for layer in model.dense_mlp:
            row = layer(row)
        tables = [table.weight for table in model.embeddings]
        embedded = [t[(int(i) + 1) % len(t)] for i, t in zip(ids.tolist(), tables, strict=True)]
        found.append([row, *embedded])
    return found


@pytest.mark.parametrize("batch", [1, 2, 5])
@pytest.mark.parametrize("interaction", ["outer", "dot", "cat"])
def test_layer_by_layer(interaction: str, batch: int) -> None:
    model = _tiny(interaction)
    dense, sparse = get_inputs(batch=batch)
    rows = []
    for vectors in _vectors(model, dense, sparse):
        row = torch.cat(vectors)
        if interaction == "outer":
            row = torch.cat([value * row for value in row])
        if interaction == "dot":
            pairs = [vectors[i] @ vectors[j] for i in range(27) for j in range(i)]
            row = torch.cat([vectors[0], torch.stack(pairs)])
        rows.append(row)
    interacted = model.interact([model.dense_mlp(dense), *model.embed(sparse)])
    assert interacted.shape == (batch, {"outer": 186_624, "dot": 367, "cat": 432}[interaction])
    torch.testing.assert_close(interacted, torch.stack(rows))
    first, relu, second = model.prediction_mlp
    logit = second(relu(first(interacted)))
    assert logit.shape == (batch, 1)
    assert torch.equal(model.logits(dense, sparse), logit)
    assert torch.equal(model(dense, sparse), torch.sigmoid(logit))


def test_ids_wrap_into_their_table_and_missing_is_row_0() -> None:
    model = _tiny("cat")
    ids = torch.tensor([[-1], [0], [48], [49], [2**32 - 1]]).expand(5, 26)
    sizes = torch.tensor([table.num_embeddings for table in model.embeddings])
    assert sizes.min() == 3
    assert sizes.max() == 50
    for column, vectors in enumerate(model.embed(ids)):
        size = int(sizes[column])
        wanted = [0, 1 % size, 49 % size, 50 % size, 2**32 % size]
        assert torch.equal(vectors, model.embeddings[column].weight[wanted])


def test_configurations() -> None:
    assert (SMALL.dense_hidden, SMALL.prediction_hidden) == ((32,), (32,))
    assert (SMALL.embedding_dim, SMALL.interaction) == (16, "outer")
    assert SMALL.table_sizes[:4] == (1460, 583, 10_000, 10_000)
    assert (MAIN.dense_hidden, MAIN.prediction_hidden) == ((512, 256, 64), (512, 256))
    assert MAIN.table_sizes[2] == 1_000_000
    with pytest.raises(UnknownNameError) as refused:
        DlrmConfig(interaction="dott")
    assert (refused.value.kind, refused.value.name) == ("interaction", "dott")
    assert "dot" in refused.value.known
    with pytest.raises(ArgumentError, match="has 2 entries"):
        DlrmConfig(cardinalities=(1, 2))
    with pytest.raises(ArgumentError, match=">= 1"):
        DlrmConfig(dense_hidden=(0,))


def test_every_parameter_gets_a_gradient() -> None:
    model = _tiny("dot")
    dense, sparse = get_inputs(batch=4)
    model.logits(dense, sparse).sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []
    assert model.dense_mlp[0].weight.grad.abs().max() > 0


@pytest.mark.parametrize(("name", "interaction"), [("dlrm", "outer"), ("dlrm-dot", "dot")])
def test_built_in_targets_load_and_run(name: str, interaction: str, tmp_path: Path) -> None:
    assert name in BUILT_IN
    target = load(name)
    assert target.callable.config.interaction == interaction
    assert target.run().shape == (64, 1)
    path = tmp_path / "rows.tsv"
    synthesize(path, 3)
    from_file = load(name, data=str(path))
    assert [len(argument) for argument in from_file.args] == [3, 3]
    assert torch.equal(from_file.args[1], target.args[1][:3])  # both are the rows of seed 0
