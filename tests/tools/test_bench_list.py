"""tools/bench_list.py, and the list kept beside the results: it names what exists."""

import importlib.util
from pathlib import Path

import pytest

from fuselab import ops
from fuselab.prove.bench_providers import providers

CLONE = Path(__file__).resolve().parents[2]


def tool():
    spec = importlib.util.spec_from_file_location("bench_list", CLONE / "tools" / "bench_list.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


KEPT = tool().lines(CLONE / "benchmarks" / "nvidia-h200" / "commands.txt")


def values(words, option):
    return [words[at + 1] for at, word in enumerate(words) if word == option]


@pytest.mark.parametrize(("name", "words"), KEPT, ids=[name for name, _ in KEPT])
def test_the_kept_list_names_what_exists(name, words):
    op = ops.contract(words[0])
    assert name.partition(".")[0] == words[0]
    assert set(values(words, "--case")) <= {case.name for case in op.cases}
    assert set(values(words, "--dtype")) <= {
        str(dtype).removeprefix("torch.") for dtype in op.dtypes
    }
    (asked,) = values(words, "--provider")
    assert set(asked.split(",")) <= set(providers(op))


def test_every_operator_is_surveyed_with_its_backward():
    kept = dict(tool().lines(CLONE / "benchmarks" / "surveys.txt"))
    assert set(kept) == set(ops.operators())
    for name, words in kept.items():
        assert words[:2] == [name, "--survey"] and "--worst" in words
        assert ("--backward" in words) == (ops.contract(name).gradient is not None)


def test_a_survey_is_kept_where_the_list_finds_it_again(tmp_path, monkeypatch):
    path, out = tmp_path / "list", tmp_path / "out"
    path.write_text("softmax: softmax --survey\nsoftmax.wide: softmax --case 8x8\n")
    bench_list, calls = tool(), []
    monkeypatch.setattr(bench_list, "run", lambda words: calls.append(words) or 0)
    monkeypatch.setattr("sys.argv", ["bench_list.py", str(path), str(out), "--seed", "8"])
    assert bench_list.main() == 0
    survey, bench = calls
    json_file, folder = str(out / "softmax.json"), str(out / "softmax")
    assert survey[:5] == ["bench", "softmax", "--survey", "--seed", "8"]
    assert survey[5:] == ["--json", json_file, "--output", folder]
    assert bench[2:6] == ["--case", "8x8", "--seed", "8"]
    assert bench[6:] == ["--json", str(out / "softmax.wide.json")]


def test_comments_and_empty_lines_are_left_out(tmp_path):
    path = tmp_path / "list"
    path.write_text('# a comment\n\nsoftmax.wide: softmax --case "8x8 a"\n')
    assert tool().lines(path) == [("softmax.wide", ["softmax", "--case", "8x8 a"])]
