"""Scoring rows with a trained DLRM, and how long it takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from fuselab.data import Batch, Dataset, Dense, Loader, Modulus, Vocabulary, open_dataset
from fuselab.data.layout import DENSE_COLUMNS
from fuselab.data.prepared import Prepared, is_prepared
from fuselab.errors import ArgumentError
from fuselab.measure.timing import time
from fuselab.models.branch import branch_of
from fuselab.models.dlrm import Dlrm
from fuselab.models.dlrm_fused import FusedDlrm
from fuselab.report.files import replacing
from fuselab.train.captured import Captured
from fuselab.train.checkpoint import Checkpoint, whole
from fuselab.train.dlrm import identity_of, raw_identity_of
from fuselab.train.metrics import Metrics, metrics

_ROWS = 16_384  # rows at once
LATENCY_BATCHES = (1, 16, 128, 2048)


def dataset(path: str, model: Dlrm, found: Checkpoint) -> Dataset:
    """Open the rows at ``path``, raw (with labels or without) or prepared, for the model of
    ``found``.

    Raises ArgumentError for rows that were prepared in another way than those the model was trained
    on, DataError, and CheckpointError if ``found`` does not say how they were transformed.
    """
    with whole("the checkpoint"):
        dense = Dense.of(found.facts["dense"])
    if not is_prepared(path):
        return open_dataset(path, ids=ids(model), dense=dense, labels_required=False)
    prepared = Prepared(path)
    if prepared.cardinalities != model.config.table_sizes or prepared.dense() != dense:
        raise ArgumentError(
            f"{path} is prepared with other tables or another dense transform than this model was "
            "trained on; prepare it as the training rows were, or give the raw rows."
        )
    return open_dataset(path)


def was_trained_on(found: Checkpoint, path: str) -> bool:
    """Return whether the model of ``found`` was trained on the rows at ``path``: prepared rows are
    known by their manifest, raw files by names and sizes, also those that were prepared."""
    with whole("the checkpoint"):
        if found.facts["identity"]["data"] == identity_of(path):
            return True
        trained = found.facts.get("raw data")  # older checkpoints do not say it
        return trained is not None and trained == raw_identity_of(path)


def ids(model: Dlrm) -> Modulus | Vocabulary:
    """Return the mapping of raw ids to rows of the model's tables."""
    if model.config.ids == "modulus":
        return Modulus(model.config.table_sizes)
    ends = model.offsets.tolist()
    values = [
        model.sorted_keys[begin:end].cpu().numpy().astype(numpy.int64)
        for begin, end in pairwise(ends)
    ]
    return Vocabulary(values)


def predict(model: Dlrm, data: Dataset) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield probabilities by the fused forward, and labels (NaN if there is none).

    They are in the rows' order, both [n] on the CPU, piece by piece.
    """
    device = next(model.parameters()).device
    fused = FusedDlrm(model)
    with torch.no_grad():
        for batch in Loader(data, _ROWS, device=device):
            yield fused.probabilities(batch.dense, batch.sparse)[:, 0].cpu(), batch.labels.cpu()


def score(path: Path, model: Dlrm, data: Dataset) -> tuple[int, Metrics | None]:
    """Write the probability of every row, one a line; a float32 array if the name ends in .npy.

    Returns how many, and the metrics of the rows that have a label, None if none has. Raises
    OutputError.
    """
    known: list[tuple[Tensor, Tensor]] = []

    def probabilities() -> Iterator[Tensor]:
        for piece, labels in predict(model, data):
            labelled = ~labels.isnan()
            known.append((piece[labelled], labels[labelled]))
            yield piece

    rows = _write(path, probabilities())
    found, labels = (torch.cat(each) for each in zip(*known, strict=True))
    # A float32 probability may be 1, whose logit is not finite; the next smaller is 1 - 2^-24.
    return rows, metrics(torch.logit(found.double(), 2**-25), labels) if len(labels) else None


def latencies(model: Dlrm, batches: Sequence[int] = LATENCY_BATCHES) -> list[dict[str, Any]]:
    """Return the microseconds of a forward from rows to probabilities, on the model's device.

    There are rows for the plain model and for the fused one, on a GPU also in a CUDA graph.
    """
    device = next(model.parameters()).device
    fused = FusedDlrm(model, branch=branch_of(device, max(batches)))
    measured = []
    for size in batches:
        batch = _batch(model, size, device)

        def plain(batch: Batch = batch) -> Tensor:
            with torch.no_grad():
                return torch.sigmoid(model.logits_of_rows(batch.dense, batch.sparse))

        def ours(batch: Batch = batch) -> None:
            with torch.no_grad():
                fused.probabilities(batch.dense, batch.sparse)

        calls: dict[str, Callable[[], object]] = {"eager": plain, "fused": ours}
        if device.type == "cuda":
            calls["fused, CUDA graph"] = Captured(ours, device)
        for name, call in calls.items():
            taken = time(call, device=device).median_us
            measured.append(
                {"batch": size, "way": name, "us": taken, "rows_per_s": size / taken * 1e6}
            )
    return measured


def _batch(model: Dlrm, size: int, device: torch.device) -> Batch:
    generator = torch.Generator().manual_seed(0)
    sizes = torch.tensor(model.config.table_sizes, dtype=torch.float64)
    uniform = torch.rand((size, len(sizes)), generator=generator, dtype=torch.float64)
    dense = torch.rand((size, DENSE_COLUMNS), generator=generator) * 5
    return Batch(
        torch.zeros(size, device=device), dense.to(device), (uniform * sizes).int().to(device)
    )


def _write(path: Path, probabilities: Iterator[Tensor]) -> int:
    """Write the probabilities; return how many."""
    count = 0
    with replacing(path) as temporary:
        if path.suffix == ".npy":
            every = torch.cat(list(probabilities)).numpy()
            with temporary.open("wb") as file:
                numpy.save(file, every)
            return len(every)
        with temporary.open("w") as text:
            for piece in probabilities:
                text.writelines(f"{value:.7g}\n" for value in piece.tolist())
                count += len(piece)
    return count
