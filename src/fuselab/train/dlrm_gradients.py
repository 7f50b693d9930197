"""The gradients of a mode on one batch, held against the plain model's in float64."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fuselab.data import Batch
from fuselab.models.dlrm import Dlrm
from fuselab.models.dlrm_fused import dense_parameters
from fuselab.train.dlrm import Run
from fuselab.train.dlrm_modes import PlainStep

_TIMES_EAGER = 4  # a gradient is right up to this many times eager's own error, and 2 ulp


def compare(run: Run) -> list[dict[str, Any]]:
    """Of every dense parameter, and of the embedding ``vectors``, on the run's first batch.

    ``error`` and ``eager_error`` are the largest differences from float64's; ``right`` where the
    first is at most 4 times the second and 2 ulp of the largest gradient. Nothing is changed, the
    loader's position neither.
    """
    batch = next(iter(run.first_batches()))
    exact = exact_gradients(run.model, batch)
    found = run.step.gradients(batch)
    eager = PlainStep(run.model, run.plan.optimizer, run.plan.half).gradients(batch)
    compared = []
    for name, wanted in exact.items():
        error, own = (_largest(each[name].double() - wanted) for each in (found, eager))
        largest = _largest(wanted)
        ulp = largest * torch.finfo(torch.bfloat16 if run.plan.half else torch.float32).eps
        compared.append(
            {
                "name": name,
                "largest": largest,
                "error": error,
                "eager_error": own,
                "right": error <= _TIMES_EAGER * own + 2 * ulp,
            }
        )
    return compared


def exact_gradients(model: Dlrm, batch: Batch) -> dict[str, Tensor]:
    """By name those of the dense parameters, and as ``vectors`` those of the embeddings."""
    shared = {id(model.embeddings): model.embeddings}  # gigabytes that stay as they are
    twin = copy.deepcopy(model, shared)
    twin.dense_mlp.double()
    twin.prediction_mlp.double()
    with torch.no_grad():
        vectors = [vector.double() for vector in model.embed_rows(batch.sparse)]
    for vector in vectors:
        vector.requires_grad_()
    logits = twin.logits_of_vectors(batch.dense.double(), vectors)
    loss = F.binary_cross_entropy_with_logits(logits, batch.labels.double()[:, None])
    names, dense = zip(*dense_parameters(twin), strict=True)
    found = torch.autograd.grad(loss, [*dense, *vectors])
    return {
        **dict(zip(names, found, strict=False)),
        "vectors": torch.stack(found[len(names) :], 1),
    }


def _largest(tensor: Tensor) -> float:
    return tensor.abs().max().item()
