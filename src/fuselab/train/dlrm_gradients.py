"""The gradients of a mode on one batch, compared with the plain model's in float64."""

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

_TIMES_EAGER = 4  # a gradient is right up to this many times eager's own error, plus 2 ulp


def compare(run: Run) -> list[dict[str, Any]]:
    """Compare every dense parameter's gradient, and the embedding ``vectors``', on the first batch.

    ``error`` and ``eager_error`` are the largest differences from float64's; ``right`` is True if
    the first is at most 4 times the second plus 2 ulp of the largest gradient. Nothing is changed,
    not even the loader's position.
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
    """Return the float64 gradients of the dense parameters by name, and of the embeddings as
    ``vectors``."""
    # the embeddings are gigabytes and do not change
    shared = {id(model.embeddings): model.embeddings}
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
