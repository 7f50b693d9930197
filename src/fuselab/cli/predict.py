"""``fuselab predict``: the probabilities of a file's rows."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fuselab.cli.options import FILE, Checkpoint, Device, Json, flag, output_option


def add(app: typer.Typer) -> None:
    """Register the verb."""
    app.command()(predict)


def predict(
    checkpoint: Checkpoint,
    file: Annotated[
        str | None,
        typer.Argument(
            metavar="FILE", help="Rows to score, raw (also without labels) or prepared."
        ),
    ] = None,
    output: Annotated[
        Path | None, output_option("A probability a line; .npy: an array.", "OUT", FILE)
    ] = None,
    latency: Annotated[
        bool, flag("--latency", "Measure a forward at several batch sizes.")
    ] = False,
    device: Device = "auto",
    json: Json = None,
) -> None:
    """Score rows with a trained DLRM.

    Where rows have a label, their loss, accuracy and AUC are told too.
    """
    from dataclasses import asdict

    from fuselab.device.select import select
    from fuselab.errors import ArgumentError, OutputError
    from fuselab.report.result import write_result
    from fuselab.report.train_text import latency_text, metrics_text
    from fuselab.train import dlrm_predict
    from fuselab.train.dlrm import load_model, source_files

    if (file is None) != (output is None):
        raise ArgumentError("to score rows give both FILE and -o OUT.")
    if file is None and not latency:
        raise ArgumentError("nothing to do: give FILE and -o OUT, --latency, or both.")
    where = select(device)
    model, found = load_model(checkpoint)
    model.to(where)
    facts: dict[str, Any] = {"checkpoint": checkpoint, "step": found.step}
    if file is not None and output is not None:
        data = dlrm_predict.dataset(file, model, found)
        if output.resolve() in source_files(file):
            raise OutputError(f"-o {output} is one of the files of {file}; give another name.")
        rows, metrics = dlrm_predict.score(output, model, data)
        measured = None if metrics is None else asdict(metrics)
        trained_on = dlrm_predict.was_trained_on(found, file)
        facts |= {"file": file, "output": output, "rows": rows, "metrics": measured}
        facts["trained_on"] = trained_on
        print(f"{output}: {rows:,} probabilities")
        print("no labels" if measured is None else f"rows with a label  {metrics_text(measured)}")
        if trained_on and measured is not None:
            print("the model was trained on rows of this data: on new ones it does less well")
    if latency:
        facts["latency"] = dlrm_predict.latencies(model)
        print(latency_text(facts["latency"]))
    write_result(json, "predict", facts, where)
