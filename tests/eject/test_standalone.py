"""Packages that run on torch and Triton alone, with parts of fuselab's runtime beside them."""

from __future__ import annotations

import ast
import copy
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ejected_functions import EXAMPLES
from torch import Tensor, nn

import fuselab
from fuselab.cli.main import run
from fuselab.ejection.copied import copied, needs
from fuselab.errors import BuildError
from fuselab.prove.load import load, load_op
from fuselab.runtime import launch_plans

PROGRAM = Path(__file__).with_name("standalone_program.py")
SOURCE = Path(fuselab.__file__).parent
MAY_IMPORT = {"filelock", "torch", "triton", *sys.stdlib_module_names}


@pytest.fixture(scope="module")
def packages(ejected: Callable[[str], Path]) -> Path:
    """Return a folder with three standalone packages, named like the functions."""
    names = ("residual_norm", "row_statistics", "two_losses")
    (root,) = {ejected(f"standalone_{name}").parent for name in names}
    return root


def run_without_fuselab(what: str, folder: Path, *names: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, str(PROGRAM), what, str(folder), *names]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]


def test_values_and_gradients_are_those_of_autograd(packages: Path) -> None:
    run_without_fuselab("compare", packages, "residual_norm", "row_statistics", "two_losses")


@pytest.mark.gpu
def test_values_and_gradients_on_a_gpu(packages: Path) -> None:
    names = ("residual_norm", "row_statistics", "two_losses")
    run_without_fuselab("compare_on_gpu", packages, *names)


def test_triton_kernels_are_launched_by_the_packages_own_runtime(packages: Path) -> None:
    program = (
        "import sys; sys.path[:0] = [sys.argv[1], sys.argv[2]]\n"
        "from standalone_program import Refuse\n"
        "sys.meta_path.insert(0, Refuse())\n"
        "import torch\n"
        "from two_losses.launchers import backward_triton, forward_triton, reference\n"
        "args = [torch.randn(5, 19, dtype=torch.float64, requires_grad=True) for _ in range(2)]\n"
        "expected = reference(*args)\n"
        "torch.testing.assert_close(forward_triton(*args), expected)\n"
        "ones = tuple(torch.ones_like(one) for one in expected)\n"
        "grads = torch.autograd.grad(expected, args, ones)\n"
        "found = backward_triton((True, True), ones, *(one.detach() for one in args))\n"
        "torch.testing.assert_close(found, grads)\n"
    )
    command = [sys.executable, "-c", program, str(PROGRAM.parent), str(packages)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]


def test_every_name_that_is_used_of_a_runtime_module_is_there(packages: Path) -> None:
    """Kernels name functions of a module, as in ``math.rsqrt``, which no import fails for."""
    seen = set()
    for file in sorted(packages.rglob("*.py")):
        parts = list(ast.walk(ast.parse(file.read_text("utf-8"))))
        aliases = {
            alias.asname or alias.name: file.parent / "runtime" / f"{alias.name}.py"
            for node in parts
            if isinstance(node, ast.ImportFrom) and node.level and node.module == "runtime"
            for alias in node.names
        }
        for part in parts:
            if not (isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name)):
                continue
            module = aliases.get(part.value.id)
            if module is None or not module.is_file():
                continue
            defined = {
                getattr(one, "name", "") for one in ast.parse(module.read_text("utf-8")).body
            }
            assert part.attr in defined, f"{file.parent.name}/{file.name}: {part.attr}"
            seen.add((module.stem, part.attr))
    assert ("triton_math", "rsqrt") in seen


def test_pytorch_can_look_inside(packages: Path) -> None:
    run_without_fuselab("inside_pytorch", packages, "residual_norm")


def test_without_a_compiler_the_reference_computes_with_one_warning(packages: Path) -> None:
    run_without_fuselab("no_compiler", packages, "residual_norm")


def test_only_the_contract_imports_fuselab(packages: Path) -> None:
    for file in sorted((packages / "residual_norm").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            found: list[str] = []
            if isinstance(node, ast.Import):
                found = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                found = [node.module or ""]
            roots = {name.partition(".")[0] for name in found}
            allowed = MAY_IMPORT | ({"fuselab"} if file.name == "op.py" else set())
            assert roots <= allowed, (file.name, roots - allowed)


def test_every_definition_has_the_text_that_fuselab_has(packages: Path) -> None:
    texts = {path.stem: path.read_text("utf-8") for path in (SOURCE / "runtime").rglob("*.py")}
    texts |= {name: (SOURCE / f"{name}.py").read_text("utf-8") for name in ("op", "errors")}
    own = SOURCE / "runtime" / "standalone"
    texts |= {path.stem: path.read_text("utf-8") for path in own.glob("*.py")}
    written = sorted((packages / "residual_norm" / "runtime").glob("*.py"))
    assert {"sweep", "triton_sweep", "cpp_library", "operator"} <= {path.stem for path in written}
    for path in written:
        text = path.read_text("utf-8")
        for node in ast.parse(text).body[1:]:
            if not isinstance(node, (ast.Import, ast.ImportFrom)):
                segment = ast.get_source_segment(text, node)
                assert segment is not None and segment in texts[path.stem], (path.name, segment)
    for header in sorted((packages / "residual_norm" / "runtime" / "include").iterdir()):
        original = SOURCE / "runtime" / "include" / header.name
        assert header.read_text("utf-8") == original.read_text("utf-8")


def test_what_no_definition_needs_is_left_out() -> None:
    texts = copied([("fuselab.runtime.sweep", "arithmetic_dtype")])
    assert list(texts) == ["sweep.py"]
    assert "class Sweep" not in texts["sweep.py"]
    assert "import torch\nfrom torch import Tensor\n\n\ndef arithmetic_dtype(" in texts["sweep.py"]
    assert "import re" not in texts["sweep.py"]


def test_an_import_within_a_function_is_followed() -> None:
    assert needs("def f():\n    from fuselab.runtime.grid import ceil_div\n") == [
        ("fuselab.runtime.grid", "ceil_div")
    ]


def test_the_page_says_what_is_left_out(packages: Path) -> None:
    folder = packages / "residual_norm"
    assert not (folder / "cuda_kernels.cu").exists()
    assert "It has no CUDA C++\nkernels" in (folder / "page.md").read_text("utf-8")
    manifest = json.loads((folder / "manifest.json").read_text("utf-8"))
    assert "runtime/include/cpu_sweep.h" in manifest["files"]


def test_the_written_test_passes(packages: Path) -> None:
    module = imported(packages / "two_losses", "test_two_losses")
    module.test_two_losses()


def imported(folder: Path, name: str) -> Any:
    """Import a module of a package, although other tests may have imported one of its name."""
    held = sys.modules.get(folder.name)
    if held is not None and Path(str(held.__file__)).parent != folder:
        for module in [key for key in sys.modules if key.partition(".")[0] == folder.name]:
            del sys.modules[module]
    sys.path.insert(0, str(folder.parent))
    try:
        return importlib.import_module(f"{folder.name}.{name}")
    finally:
        sys.path.remove(str(folder.parent))


# --- with fuselab ---------------------------------------------------------------------------------


def test_fuselab_runs_the_packages_own_launchers(packages: Path) -> None:
    op = load_op(str(packages / "residual_norm"))
    assert list(op.implementations) == ["triton", "cpp"]
    function = fuselab.operator(op)
    args = [torch.randn(shape, dtype=torch.float64) for shape in ((2, 3, 5), (2, 3, 5), (5,), (5,))]
    for _ in range(3):  # a plan of a launch that fuselab does not see would leave the output empty
        found = function(*args, implementation="cpp")
        torch.testing.assert_close(found, op.reference(*args))
    assert launch_plans.is_started()


def test_check_of_a_standalone_package_passes(packages: Path) -> None:
    report = fuselab.check(
        str(packages / "two_losses"), "cpp", torch.float32, seed=0, quick=True, budget_s=8
    )
    assert report.passed, [group.failures for group in report.groups]
    assert report.groups[0].trials > 0


def test_tuning_chooses_for_the_packages_launchers(packages: Path) -> None:
    contract = imported(packages / "residual_norm", "op")
    tuning = imported(packages / "residual_norm", "runtime.tuning")
    candidates = contract.configs()
    with fuselab_forced("ejected::residual_norm", candidates[2]) as forced:
        found = tuning.chosen("ejected::residual_norm", "triton", ("a", 1), candidates)
    assert found == candidates[2]
    assert forced.keys == ["a 1"]


def fuselab_forced(name: str, config: Any) -> Any:
    from fuselab.runtime.tuning import forced

    return forced(name, "triton", config)


# --- several operators ----------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(torch.tanh(x) * 2)
        return nn.functional.gelu(self.norm(hidden))


@pytest.fixture(scope="module")
def block(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Path]:
    torch.manual_seed(0)
    module = Block()
    folder = tmp_path_factory.mktemp("packages") / "standalone_block"
    fuselab.eject(module, torch.ones(3, 6), out=folder, name="block", standalone=True)
    return module, folder


def test_a_module_of_several_operators_trains_without_fuselab(
    block: tuple[nn.Module, Path],
) -> None:
    original, folder = copy.deepcopy(block[0]).double(), block[1]
    program = (
        "import sys; sys.path[:0] = [sys.argv[1], sys.argv[2]]\n"
        "from standalone_program import Refuse\n"
        "sys.meta_path.insert(0, Refuse())\n"
        "import torch\n"
        "from torch import nn\n"
        "from standalone_block.module import Block\n"
        "class Plain(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.up, self.norm = nn.Linear(6, 6), nn.LayerNorm(6)\n"
        "state, x = torch.load(sys.argv[3])\n"
        "plain = Plain().double()\n"
        "plain.load_state_dict(state)\n"
        "fused = Block(plain)\n"
        "output = fused(x)\n"
        "output.square().sum().backward()\n"
        "torch.save([output, *(one.grad for one in fused.parameters())], sys.argv[4])\n"
    )
    x = torch.randn(5, 6, dtype=torch.float64)
    given, result = folder.parent / "given.pt", folder.parent / "result.pt"
    torch.save((original.state_dict(), x), given)
    command = [sys.executable, "-c", program, str(PROGRAM.parent), str(folder.parent)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [*command, str(given), str(result)], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    output = original(x)
    output.square().sum().backward()
    expected = [output, *(one.grad for one in original.parameters())]
    torch.testing.assert_close(torch.load(result), expected)


def test_check_knows_the_operators_of_a_standalone_composition(
    block: tuple[nn.Module, Path],
) -> None:
    composition = load(str(block[1]))
    assert isinstance(composition, fuselab.Composition)
    first = composition.operators[0]
    assert load_op(f"{block[1]}/{first.short_name}").name == first.name
    x = torch.randn(2, 6, dtype=torch.float64)
    found = fuselab.operator(first)(x, implementation="cpp")
    torch.testing.assert_close(found, first.reference(x))


# --- the command ----------------------------------------------------------------------------------


def test_the_command_writes_a_standalone_package(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model.py"
    model.write_text(
        "import torch\n\n\ndef shifted(x):\n    return torch.exp(x) + 1\n\n\n"
        "def get_inputs():\n    return (torch.ones(3, 4),)\n"
    )
    folder = tmp_path / "shifted"
    assert run(["eject", f"{model}:shifted", "-o", str(folder), "--standalone"]) == 0
    assert (folder / "runtime" / "operator.py").is_file()
    assert not (folder / "cuda_kernels.cu").exists()


def test_a_kernel_error_is_the_packages_own_class(packages: Path) -> None:
    errors = imported(packages / "residual_norm", "runtime.errors")
    assert not issubclass(errors.BuildError, BuildError)
    assert issubclass(errors.BuildError, RuntimeError)


def test_the_same_input_gives_the_same_files(packages: Path, tmp_path: Path) -> None:
    function, args = EXAMPLES["two_losses"]
    again = fuselab.eject(
        function, *args, out=tmp_path / "again", name="two_losses", standalone=True
    )
    for file in sorted(path for path in again.rglob("*") if path.is_file()):
        other = packages / "two_losses" / file.relative_to(again)
        assert file.read_bytes() == other.read_bytes(), file.name
