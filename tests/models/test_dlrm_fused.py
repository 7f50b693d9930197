"""The fused forward: probabilities are the plain model's, on either way through the MLPs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fuselab.models import dlrm_fused
from fuselab.models.branch import branch_of
from fuselab.models.dlrm import Dlrm, DlrmConfig, example_batch
from fuselab.models.dlrm_fused import FusedDlrm
from fuselab.train.captured import Captured

TINY = DlrmConfig(
    dense_hidden=(24,), embedding_dim=16, prediction_hidden=(16, 8), interaction="dot",
    largest_table=40,
)  # fmt: skip
ROWS = 37
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def _model(interaction: str, device: str) -> Dlrm:
    torch.manual_seed(0)
    model = Dlrm(replace(TINY, interaction=interaction)).to(device)
    for name, value in model.named_parameters():  # probabilities that differ from row to row
        value.data *= 4 if name.startswith("embeddings") else 2
    return model


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("one_launch_rows", [ROWS, ROWS - 1])
@pytest.mark.parametrize("interaction", ["outer", "dot", "cat"])
@pytest.mark.parametrize("half", [False, True])
def test_probabilities_are_the_plain_models(
    interaction: str,
    half: bool,
    one_launch_rows: int,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dlrm_fused, "MOST_ROWS", one_launch_rows)
    model = _model(interaction, device)
    batch = example_batch(batch=ROWS)
    dense, rows = batch.dense.to(device), model.rows(batch.sparse.to(device))
    wanted = torch.sigmoid(model.double().logits_of_rows(dense.double(), rows))
    assert wanted.std() > 0.02
    model.float()
    fused = FusedDlrm(model, half, branch_of(torch.device(device), ROWS))
    with torch.no_grad():
        found = fused.probabilities(dense, rows)
    assert found.shape == (ROWS, 1)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=5e-3 if half else 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("half", [False, True])
def test_a_captured_forward_reads_the_batch(half: bool) -> None:
    model = _model("dot", "cuda")
    batch = example_batch(batch=2 * ROWS)
    dense, rows = batch.dense.cuda(), model.rows(batch.sparse.cuda()).int()
    halves = slice(0, ROWS), slice(ROWS, 2 * ROWS)
    fused = FusedDlrm(model, half, branch_of(dense.device, ROWS))
    with torch.no_grad():
        first, second = (fused.probabilities(dense[at], rows[at]) for at in halves)
        mine = dense[halves[0]].clone(), rows[halves[0]].clone()
        results: list[torch.Tensor] = []

        def work() -> None:
            with torch.no_grad():
                results[:] = [fused.probabilities(*mine)]

        graph = Captured(work, dense.device)
        graph()
        assert torch.equal(results[0], first)
        mine[0].copy_(dense[halves[1]])
        mine[1].copy_(rows[halves[1]])
        graph()
        assert torch.equal(results[0], second)
    assert not torch.equal(first, second)
