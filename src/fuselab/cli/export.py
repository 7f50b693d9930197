"""``fuselab export``: a trained model as ONNX, and a picture of it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fuselab.cli.options import FILE, Checkpoint, Json, Verbs, option, output_option


def add(app: typer.Typer) -> None:
    """Register the verb."""
    verbs = Verbs()
    # the callback keeps the model's name on the command line although there is only one
    verbs.callback()(lambda: None)
    verbs.command()(dlrm)
    app.add_typer(
        verbs, name="export", help="Write a trained model as ONNX, or a picture of its graph."
    )


def dlrm(
    checkpoint: Checkpoint,
    output: Annotated[Path | None, output_option("ONNX to write: .onnx.", "FILE")] = None,
    graph: Annotated[
        Path | None, option("Picture to write: .svg, .png, .pdf.", "FILE", click_type=FILE)
    ] = None,
    data: Annotated[
        str | None, option("Rows on which the ONNX file is compared; default: synthetic.", "P")
    ] = None,
    json: Json = None,
) -> None:
    """Write a DLRM as ONNX, checked against onnxruntime.

    The ONNX model computes probabilities from counts and raw ids, for any batch size.
    """
    from fuselab.errors import ArgumentError
    from fuselab.report.model_graph import model_graph
    from fuselab.report.plots import check_plot
    from fuselab.report.result import write_result
    from fuselab.train.dlrm import load_model
    from fuselab.train.dlrm_export import export_onnx

    if output is None and graph is None:
        raise ArgumentError("nothing to write: give -o FILE.onnx, --graph FILE.svg, or both.")
    if graph is not None:
        check_plot(graph)  # before seconds go into the ONNX file
    model, found = load_model(checkpoint)
    facts: dict[str, Any] = {"checkpoint": checkpoint, "step": found.step}
    if output is not None:
        difference = export_onnx(model, output, data)
        facts |= {"file": output, "largest_difference": difference}
        print(f"{output}: differs from the model by {difference:.2g} at most (onnxruntime)")
    if graph is not None:
        model_graph(model.config, graph)
        facts["graph"] = graph
        print(f"{graph}: the model's graph")
    write_result(json, "export dlrm", facts)
