"""A trained DLRM as ONNX: raw ids and counts to probabilities, any batch size, checked."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fuselab.data import Batch, batches, pieces, to_batch
from fuselab.errors import ArgumentError, ExportError, MissingDependencyError
from fuselab.models.dlrm import Dlrm
from fuselab.report.files import replacing

INPUTS, OUTPUT = ("dense", "sparse"), "probability"
_ROWS = 256  # rows that are compared, also the first 1 and 3 of them alone
_CLOSE = 1e-5  # allowed difference of a probability, since float32 is summed in another order


def export_onnx(model: Dlrm, path: Path, data: str | None = None) -> float:
    """Write ``path`` and compare it with the model at three batch sizes.

    The rows are those of ``data``, or synthetic ones without it. Returns the largest difference of
    a probability. ``dense`` float32 [B, 13] are transformed counts, ``sparse`` int64 [B, 26] raw
    ids.

    Raises:
        ArgumentError: ``path`` does not end in .onnx.
        MissingDependencyError: onnx, onnxscript or onnxruntime is missing.
        ExportError: onnxruntime computes something else; nothing is written.
        OutputError: ``path`` cannot be written.
    """
    if path.suffix != ".onnx":
        raise ArgumentError(f"{path}: the model is written as ONNX; name the file .onnx.")
    runtime = _runtime()
    rows = next(batches(data, _ROWS)) if data is not None else to_batch(next(pieces(_ROWS)))
    example = tuple(each[:2].contiguous() for each in (rows.dense, rows.sparse))
    batch = torch.export.Dim("batch", min=1)
    model = model.cpu().eval()
    with replacing(path) as temporary:
        # it logs which optional packages are not installed
        logging.getLogger("torch.onnx").setLevel(logging.ERROR)
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")  # the exporter's own warnings
            torch.onnx.export(
                model,
                example,
                temporary,
                input_names=list(INPUTS),
                output_names=[OUTPUT],
                dynamic_shapes=({0: batch}, {0: batch}),
                dynamo=True,
                external_data=False,
                verbose=False,
            )
        session = runtime.InferenceSession(temporary, providers=["CPUExecutionProvider"])
        return max(_difference(model, session, rows, size) for size in (1, 3, len(rows.labels)))


def _difference(model: Dlrm, session: Any, rows: Batch, size: int) -> float:
    dense, sparse = rows.dense[:size], rows.sparse[:size]
    with torch.no_grad():
        wanted: Tensor = model(dense, sparse)
    (found,) = session.run(None, dict(zip(INPUTS, (dense.numpy(), sparse.numpy()), strict=True)))
    difference = (torch.from_numpy(found) - wanted).abs().max().item()
    if found.shape != wanted.shape or not difference <= _CLOSE:
        raise ExportError(
            f"at batch {size} onnxruntime's probabilities differ by {difference:.3g} from the "
            "model's; report this, and use another version of onnxscript or onnxruntime."
        )
    return difference


def _runtime() -> Any:
    try:
        import onnx  # noqa: F401
        import onnxruntime
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError.of_extra(
            "fuselab export needs", str(error.name), "onnx"
        ) from error
    return onnxruntime
