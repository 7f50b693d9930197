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


def test_comments_and_empty_lines_are_left_out(tmp_path):
    path = tmp_path / "list"
    path.write_text('# a comment\n\nsoftmax.wide: softmax --case "8x8 a"\n')
    assert tool().lines(path) == [("softmax.wide", ["softmax", "--case", "8x8 a"])]
