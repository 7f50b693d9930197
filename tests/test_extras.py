"""The operators need no optional package; what needs one says which extra brings it."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from fuselab.cli.main import run
from fuselab.errors import MissingDependencyError

CLONE = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((CLONE / "pyproject.toml").read_text())["project"]
OPTIONAL = (
    "typer", "click", "rich", "matplotlib", "jinja2", "pyarrow", "sklearn", "safetensors",
    "tensorboard", "onnx", "onnxruntime", "onnxscript", "pynvml",
)  # fmt: skip

# Python imports sitecustomize at its start, so that children of a child hide them too.
HIDE = """
import sys
from importlib.machinery import PathFinder

class Installed(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        hidden = name.partition(".")[0] in {names!r}
        return None if hidden else PathFinder.find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Installed
"""

USE = """
import torch, fuselab, fuselab.nn, fuselab.models.dlrm
from fuselab import ops

input = torch.tensor([[1.0, 2.0], [3.0, 3.0]], requires_grad=True)
squares = ops.square(input)
squares.sum().backward()
print(squares.tolist(), input.grad.tolist(), ops.softmax(input)[1].tolist())
op = ops.contract("hash_indices")
report = fuselab.check(op, implementation="cpp", dtype=torch.float32, quick=True, budget_s=0.1)
print(*sorted({str(group.verdict) for group in report.groups}))
bench = fuselab.bench(op, providers=["eager", "cpp"], quick=True, budget_s=0.1)
print(len(bench.groups) > 0, len(bench.failures))
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Softmax(dim=-1)).eval()
print(fuselab.fuse(model, torch.randn(4, 8))(torch.zeros(1, 8)).shape)
print(fuselab.time(ops.square, input.detach()).median_us > 0)
"""


@pytest.fixture
def hide(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Make packages impossible to import, here and in child processes."""

    def hide(*names: str) -> None:
        folder = tmp_path / "hidden"
        folder.mkdir()
        (folder / "sitecustomize.py").write_text(HIDE.format(names=names))
        path = os.pathsep.join([str(folder), os.environ["PYTHONPATH"]])
        monkeypatch.setenv("PYTHONPATH", path)
        for name in names:
            monkeypatch.setitem(sys.modules, name, None)
        # They import one at the top; `from fuselab.data import parquet` asks the package first.
        for package, module in (("fuselab.report", "html"), ("fuselab.data", "parquet")):
            monkeypatch.delitem(sys.modules, f"{package}.{module}", raising=False)
            if package in sys.modules:
                monkeypatch.delattr(sys.modules[package], module, raising=False)

    return hide


def test_operators_check_and_bench_need_no_optional_package(hide: Callable[..., None]) -> None:
    hide(*OPTIONAL)
    done = subprocess.run([sys.executable, "-c", USE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "[[1.0, 4.0], [9.0, 9.0]] [[2.0, 4.0], [6.0, 6.0]] [0.5, 0.5]",
        "PASS",
        "True 0",
        "torch.Size([1, 8])",
        "True",
    ]


# The modules that may import an optional package at their top, by their beginning.
NEED_EXTRAS = (
    "fuselab.cli.",
    "fuselab.data.parquet",
    "fuselab.distributed.torchrec_",
    "fuselab.report.check_text",
    "fuselab.report.html",
    "fuselab.report.judge_text",
    "fuselab.report.survey_text",
    "fuselab.report.tables",
)

IMPORT_ALL = """
import importlib, pkgutil, fuselab

for found in pkgutil.walk_packages(fuselab.__path__, "fuselab."):
    if not found.name.startswith({names!r}):
        importlib.import_module(found.name)
print("imported")
"""


def test_every_other_module_imports_without_optional_packages(hide: Callable[..., None]) -> None:
    hide(*OPTIONAL)
    program = IMPORT_ALL.format(names=NEED_EXTRAS)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stderr == ""
    assert done.stdout == "imported\n"


@pytest.mark.parametrize("missing", ["typer", "click", "rich"])
def test_the_command_without_its_packages(hide: Callable[..., None], missing: str) -> None:
    hide(missing)
    command = [sys.executable, "-m", "fuselab", "list"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"fuselab: the command line needs {missing}, which is not installed; "
        "pip install 'fuselab[cli]'.\n"
    )


VERBS = {
    "bench add --quick --device cpu --plot plot.svg": ("matplotlib", "report"),
    "data synthesize -o rows.parquet --rows 10": ("pyarrow", "data"),
    "data describe rows.parquet": ("pyarrow", "data"),
    "data describe rows.tsv --plot plot.svg": ("matplotlib", "report"),
    "study add --device cpu -o report": ("jinja2", "report"),
    "train dlrm --steps 1 --rows 256 --batch-size 32 --device cpu --tensorboard events": (
        "tensorboard",
        "tensorboard",
    ),
    "train lora --steps 1 --device cpu": ("sklearn", "digits"),
    "predict kept rows.tsv -o probabilities.txt": ("safetensors", "checkpoints"),
    "export dlrm kept -o dlrm.onnx": ("safetensors", "checkpoints"),
}


@pytest.mark.parametrize("line", VERBS)
def test_a_verb_without_its_extra(
    line: str,
    hide: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    module, extra = VERBS[line]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.parquet").touch()
    (tmp_path / "rows.tsv").touch()
    hide(module)
    assert run(line.split()) == 2
    said = capfd.readouterr().err.splitlines()[-1]
    assert said.startswith("fuselab: ")
    assert said.endswith(f"which is not installed; pip install 'fuselab[{extra}]'.")


def test_the_sentence_and_the_type() -> None:
    error = MissingDependencyError.of_extra("plots need", "matplotlib", "report")
    assert str(error) == (
        "plots need matplotlib, which is not installed; pip install 'fuselab[report]'."
    )
    assert isinstance(error, ImportError)


def test_all_is_every_extra_of_users() -> None:
    extras = PROJECT["optional-dependencies"]
    (everything,) = extras["all"]
    # torchrec is bound to one torch, and its kernels to a GPU; dask is for clusters
    names = set(everything.removeprefix("fuselab[").removesuffix("]").split(","))
    assert names == set(extras) - {"all", "dask", "dev", "oracle", "torchrec"}
    assert "fuselab[all,dask]" in extras["dev"]
    assert not any(
        line.startswith(("typer", "click", "rich", "matplotlib", "jinja2", "pyarrow"))
        for line in PROJECT["dependencies"]
    )
