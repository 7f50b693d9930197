"""Export and predict: probabilities, not logits; any batch; a file's rows in order."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch

from fuselab.cli.main import run
from fuselab.data import synthesize
from fuselab.data.batches import batches
from fuselab.data.metadata import Metadata
from fuselab.errors import ExportError
from fuselab.models.dlrm import MAIN
from fuselab.report.model_graph import columns
from fuselab.train import checkpoint, dlrm_export
from fuselab.train.dlrm import identity_of, load_model

ROWS = 700


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint, and rows.tsv."""
    folder = tmp_path_factory.mktemp("trained")
    config = folder / "tiny.json"
    shape = {"dense_mlp": "13-8-4", "prediction_mlp": "8-1", "interaction": "dot"}
    config.write_text(json.dumps({**shape, "largest_table": 50, "train": {"batch_size": 64}}))
    words = ["train", "dlrm", "--config", str(config), "--device", "cpu", "--rows", "3000"]
    assert run([*words, "--checkpoint", str(folder)]) == 0
    synthesize(folder / "rows.tsv", ROWS, seed=5)
    return folder


def _expected(folder: Path) -> torch.Tensor:
    model, _ = load_model(folder)
    rows = next(batches(folder / "rows.tsv", ROWS))
    with torch.no_grad():
        return model(rows.dense, rows.sparse)[:, 0]


@pytest.mark.parametrize("name", ["out.txt", "out.npy"])
def test_predict_scores_raw_rows_in_order(trained: Path, tmp_path: Path, name: str) -> None:
    out = tmp_path / name
    words = ["predict", str(trained), str(trained / "rows.tsv"), "-o", str(out), "--device", "cpu"]
    assert run(words) == 0
    found = numpy.load(out) if name.endswith("npy") else numpy.loadtxt(out)
    expected = _expected(trained)
    assert 0 < expected.min() < expected.max() < 1
    numpy.testing.assert_allclose(found, expected.numpy(), rtol=1e-5, atol=1e-6)


def test_predict_does_not_replace_its_rows(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    days = tmp_path / "days"
    days.mkdir()
    rows = (trained / "rows.tsv").read_text()
    (days / "day_0").write_text(rows)
    words = ["predict", str(trained), str(days), "-o", str(days / "day_0"), "--device", "cpu"]
    assert run(words) == 2
    assert "is one of the files of" in capsys.readouterr().err
    assert (days / "day_0").read_text() == rows


def test_predict_scores_rows_without_labels(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As Kaggle's test.txt: the same probabilities, and metrics of the labelled rows alone."""
    lines = (trained / "rows.tsv").read_text().splitlines(keepends=True)
    cut = [each.split("\t", 1)[1] for each in lines]
    (tmp_path / "test.txt").write_text("".join(cut))
    (tmp_path / "days").mkdir()
    (tmp_path / "days" / "day_0").write_text("".join(lines[:300]))
    (tmp_path / "days" / "day_1").write_text("".join(cut[300:]))
    expected = _expected(trained)
    labels = next(batches(trained / "rows.tsv", ROWS)).labels
    out, facts = tmp_path / "out.npy", tmp_path / "facts.json"
    for name, known in (("test.txt", 0), ("days", 300), (trained / "rows.tsv", ROWS)):
        words = ["predict", str(trained), str(tmp_path / name), "-o", str(out), "--device", "cpu"]
        assert run([*words, "--json", str(facts)]) == 0
        numpy.testing.assert_allclose(numpy.load(out), expected.numpy(), rtol=1e-5, atol=1e-6)
        said, told = capsys.readouterr().out, json.loads(facts.read_text())
        measured = told["metrics"]
        assert told["trained_on"] is False and "trained on" not in said
        assert "700 probabilities" in said
        if not known:
            assert measured is None and "no labels" in said
            continue
        wanted = torch.nn.functional.binary_cross_entropy(expected[:known], labels[:known])
        assert f"rows with a label  {known}: loss {wanted:.4f}, accuracy" in said
        assert measured["rows"] == known
        assert measured["loss"] == pytest.approx(wanted.item(), rel=1e-5)
        right = (expected[:known] > 0.5) == (labels[:known] > 0.5)
        assert measured["accuracy"] == pytest.approx(right.float().mean().item())
    words = ["train", "dlrm", "--config", str(trained / "tiny.json"), "--device", "cpu"]
    for options in (
        ["--data", str(tmp_path / "test.txt")],
        ["--data", str(trained / "rows.tsv"), "--validation", str(tmp_path / "test.txt")],
    ):
        assert run([*words, *options]) == 2
        streams = capsys.readouterr()
        assert streams.err.endswith("Rows without a label are for 'fuselab predict' alone.\n")
        assert streams.err.count("\n") == 1 and not streams.out


def test_the_exported_graph_takes_any_batch(trained: Path, tmp_path: Path) -> None:
    import onnxruntime

    out = tmp_path / "model.onnx"
    words = ["export", "dlrm", str(trained), "-o", str(out), "--data", str(trained / "rows.tsv")]
    graph = tmp_path / "graph.svg"
    assert run([*words, "--graph", str(graph), "--json", str(tmp_path / "r.json")]) == 0
    assert json.loads((tmp_path / "r.json").read_text())["largest_difference"] < 1e-5
    session = onnxruntime.InferenceSession(out, providers=["CPUExecutionProvider"])
    rows = next(batches(trained / "rows.tsv", ROWS))
    given = {"dense": rows.dense.numpy(), "sparse": rows.sparse.numpy()}
    (found,) = session.run(None, given)
    assert found.shape == (ROWS, 1)
    numpy.testing.assert_allclose(found[:, 0], _expected(trained).numpy(), atol=1e-5)
    assert b"dot interaction" in graph.read_bytes() or graph.stat().st_size > 5_000


class OfLogits:
    """An onnxruntime session of a graph without the sigmoid."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def run(self, names: None, given: dict[str, Any]) -> list[Any]:
        dense, sparse = (torch.from_numpy(given[name]) for name in ("dense", "sparse"))
        return [self.model.logits(dense, sparse).detach().numpy()]


def test_a_wrong_graph_is_refused(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is at the path stays as it was."""
    model, _ = load_model(trained)
    runtime = SimpleNamespace(InferenceSession=lambda path, providers: OfLogits(model))
    monkeypatch.setattr(dlrm_export, "_runtime", lambda: runtime)
    monkeypatch.setattr(torch.onnx, "export", lambda *args, **kwargs: None)
    path = tmp_path / "model.onnx"
    path.write_bytes(b"before")
    with pytest.raises(ExportError, match="at batch 1 onnxruntime's probabilities differ"):
        dlrm_export.export_onnx(model, path)
    assert [file.read_bytes() for file in tmp_path.iterdir()] == [b"before"]


def test_a_vocabulary_travels_with_the_model(trained: Path, tmp_path: Path) -> None:
    from fuselab.data import Vocabulary
    from fuselab.data.metadata import save_metadata
    from fuselab.train.dlrm_predict import ids

    rows = next(batches(trained / "rows.tsv", ROWS))
    values = [rows.sparse[: ROWS // 2, column].unique().numpy() for column in range(26)]
    save_metadata(tmp_path / "meta.json", Metadata(Vocabulary(values)))
    shape = {"dense_mlp": "13-8-4", "prediction_mlp": "8-1", "ids": "vocabulary"}
    (tmp_path / "c.json").write_text(json.dumps({**shape, "train": {"batch_size": 64}}))
    words = ["train", "dlrm", "--config", str(tmp_path / "c.json"), "--device", "cpu"]
    words += ["--checkpoint", str(tmp_path / "kept"), "--data", str(trained / "rows.tsv")]
    assert run(words) == 2  # no vocabulary given
    assert run([*words, "--metadata", str(tmp_path / "meta.json")]) == 0
    model, _ = load_model(tmp_path / "kept")
    assert model.config.table_sizes == tuple(len(each) + 1 for each in values)
    assert all(numpy.array_equal(*pair) for pair in zip(ids(model).values, values, strict=True))
    indices = model.rows(torch.tensor([[int(each[0]) for each in values], [-2] * 26]))
    assert indices.tolist() == [[0] * 26, [len(each) for each in values]]


def test_predict_says_where_the_rows_are_those_of_the_training(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = trained / "rows.tsv"
    _, found = load_model(trained)
    identity = {**found.facts["identity"], "data": identity_of(str(rows))}
    (tmp_path / "kept").mkdir()
    seen = replace(found, facts={**found.facts, "identity": identity})
    checkpoint.save(tmp_path / "kept", seen)
    words = ["predict", str(tmp_path / "kept"), str(rows), "-o", str(tmp_path / "out.txt")]
    assert run([*words, "--device", "cpu", "--json", str(tmp_path / "facts.json")]) == 0
    assert "the model was trained on rows of this data" in capsys.readouterr().out
    assert json.loads((tmp_path / "facts.json").read_text())["trained_on"] is True


def test_predict_knows_the_raw_rows_of_prepared_ones(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, prepared, kept = str(trained / "rows.tsv"), tmp_path / "prepared", tmp_path / "kept"
    assert run(["data", "prepare", rows, "-o", str(prepared), "--largest-table", "100"]) == 0
    words = ["train", "dlrm", "--data", str(prepared), "--checkpoint", str(kept), "--steps", "2"]
    assert run([*words, "--mode", "eager", "--device", "cpu"]) == 0
    for seen, expected in ((rows, True), (str(prepared), True), (str(tmp_path / "new.tsv"), False)):
        (tmp_path / "new.tsv").write_text("".join(Path(rows).read_text().splitlines(True)[:50]))
        words = ["predict", str(kept), seen, "-o", str(tmp_path / "out.txt"), "--device", "cpu"]
        capsys.readouterr()
        assert run([*words, "--json", str(tmp_path / "facts.json")]) == 0
        assert ("the model was trained on rows" in capsys.readouterr().out) is expected
        assert json.loads((tmp_path / "facts.json").read_text())["trained_on"] is expected


def test_latency_and_wrong_calls(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = str(trained / "rows.tsv")
    for words, expected in (
        (["predict", str(trained)], "nothing to do"),
        (["predict", str(trained), rows], "give both FILE and -o OUT"),
        (["predict", str(tmp_path / "none"), rows, "-o", "x"], "does not exist"),
        (["predict", rows, rows, "-o", "x"], "truncated or no checkpoint"),
        (["predict", str(trained), "nowhere", "-o", str(tmp_path / "x")], "nowhere"),
        (["export", "dlrm", str(trained)], "nothing to write"),
        (["export", "dlrm", str(trained), "--graph", "x.bmp"], "x.bmp: a plot is written as"),
        (["export", "dlrm", str(trained), "-o", "x.txt"], "x.txt: the model is written as ONNX"),
        (
            ["export", "dlrm", str(trained), "-o", str(tmp_path / "x.onnx"), "--graph", "x.bmp"],
            "x.bmp: a plot is written as",
        ),
    ):
        assert run(words) == 2, words
        said = capsys.readouterr().err.strip()
        assert expected in said
        assert "\n" not in said and "Traceback" not in said
    assert not list(tmp_path.iterdir())


def test_the_pictures_counts_are_the_models() -> None:
    dense, sparse, top = columns(MAIN)
    assert dense[1] == "linear + ReLU\n[B, 512]  7.2 k parameters"
    assert sparse[1].startswith(f"26 tables, {sum(MAIN.table_sizes):,} rows in all\n")
    assert top[0] == "dot interaction\n[B, 367]"
    assert top[-1] == "linear + sigmoid: the probability\n[B, 1]  257 parameters"
