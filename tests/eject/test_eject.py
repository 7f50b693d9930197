"""What eject writes: the same files every time, no edit lost, and one sentence where it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ejected_functions import EXAMPLES
from torch import Tensor

import fuselab
from fuselab.cli.main import run
from fuselab.ejection.eject import eject
from fuselab.ejection.folder import edited, write_folder
from fuselab.ejection.loops import walk
from fuselab.ejection.package import planned_package
from fuselab.ejection.write import package_files
from fuselab.errors import DifferentiationError, EjectError
from fuselab.inspect.targets import load_callable
from fuselab.prove.load import load_op
from fuselab.prove.result import CheckReport, Group, Result, Verdict

GOLDEN = Path(__file__).parent / "golden"
FILES = sorted(str(path.relative_to(GOLDEN)) for path in GOLDEN.glob("*/*"))


@pytest.mark.parametrize("file", FILES)
def test_the_golden_files(file: str, ejected: Callable[[str], Path]) -> None:
    if torch.__version__.partition("+")[0] != "2.13.0":
        pytest.skip("the golden files are of torch 2.13.0; other versions may order graphs anew")
    name, _, written = file.partition("/")
    assert (ejected(name) / written).read_text("utf-8") == (GOLDEN / file).read_text("utf-8"), (
        f"{file} has changed; if that is intended, run tools/eject_golden.py"
    )


def test_every_file_is_the_same_in_another_process(ejected: Callable[[str], Path]) -> None:
    program = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from ejected_functions import EXAMPLES\n"
        "from fuselab.ejection.package import planned_package\n"
        "from fuselab.ejection.write import package_files\n"
        "function, args = EXAMPLES['residual_norm']\n"
        "package = planned_package(function, args, {}, 'residual_norm')\n"
        "print(sorted((name, text) for name, text in package_files(package).items()))\n"
    )
    command = [sys.executable, "-c", program, str(Path(__file__).parent)]
    environment = {**os.environ, "PYTHONHASHSEED": "12345"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    folder = ejected("residual_norm")
    here = sorted(
        (file.name, file.read_text("utf-8"))
        for file in folder.iterdir()
        if file.suffix in (".py", ".md", ".cpp", ".cu")
    )
    assert done.stdout == f"{here}\n"


def test_a_normalisation_with_its_neighbours_is_one_kernel_forward_and_two_backward() -> None:
    function, args = EXAMPLES["residual_norm"]
    package = planned_package(function, args, {}, "residual_norm")
    assert [plan.name for plan in package.forward] == ["residual_norm"]
    assert [plan.name for plan in package.backward] == [
        "residual_norm_backward",
        "residual_norm_backward_grad_weight",
    ]
    (forward,) = package.forward
    assert [one.name for one in forward.loads] == ["x", "residual", "weight", "bias"]
    assert [one.pattern for one in forward.stored] == ["batch length width"]


def test_a_group_is_an_axis() -> None:
    function, args = EXAMPLES["group_norm_silu"]
    (forward,) = planned_package(function, args, {}, "normed").forward
    assert [one.pattern for one in forward.operands] == [
        "batch (group channels_part) height width",
        "(group channels_part)",
        "(group channels_part)",
        "batch (group channels_part) height width",
    ]


def test_the_users_names_are_in_the_kernel(ejected: Callable[[str], Path]) -> None:
    text = (ejected("residual_norm") / "triton_kernels.py").read_text("utf-8")
    assert "    hidden = x + residual\n" in text


def test_the_reference_is_the_users_code(ejected: Callable[[str], Path]) -> None:
    text = (ejected("clamped") / "reference.py").read_text("utf-8")
    assert "LIMIT = 2.5" in text
    assert "def _leaky(y, slope):\n    return torch.where(y > 0, y, y * slope)\n" in text
    assert "    y = torch.clamp(x + bias, -LIMIT, LIMIT)\n" in text


def test_a_modules_parameters_are_arguments_after_its_inputs(
    ejected: Callable[[str], Path],
) -> None:
    text = (ejected("gated_norm") / "op.py").read_text("utf-8")
    assert "norm_weight: Tensor, norm_bias: Tensor, scale: Tensor" in text
    assert text.index("x: Tensor, residual: Tensor, norm_weight") > 0


def test_inference_writes_no_backward(tmp_path: Path) -> None:
    function, args = EXAMPLES["rms_norm"]
    folder = eject(function, *args, out=tmp_path / "rms", inference=True)
    assert not (folder / "gradient.py").exists()
    assert "_backward" not in (folder / "triton_kernels.py").read_text("utf-8")


def test_packages_of_one_name_keep_their_own_functions(tmp_path: Path) -> None:
    """Models have functions of one name (``block``, ``forward``), which one process may load."""
    x, weight = torch.randn(4, 5), torch.randn(5)
    functions = []
    for line in ("torch.relu(x) * weight", "torch.sigmoid(x) + weight"):
        source = tmp_path / f"model{len(functions)}.py"
        source.write_text(f"import torch\ndef block(x, weight):\n    return {line}\n", "utf-8")
        block = load_callable(f"{source}:block", torch.device("cpu"))
        folder = eject(block, x, weight, out=tmp_path / str(len(functions)) / "block")
        functions.append(fuselab.operator(load_op(str(folder))))
    torch.testing.assert_close(functions[0](x, weight), torch.relu(x) * weight)
    torch.testing.assert_close(functions[1](x, weight), torch.sigmoid(x) + weight)


def test_the_public_function_trains_on_a_cpu(
    ejected: Callable[[str], Path], declared: Callable[[str], Any]
) -> None:
    function = fuselab.operator(declared("rms_norm").OP)
    x, weight = torch.randn(4, 5, 8, requires_grad=True), torch.ones(8, requires_grad=True)
    found = torch.autograd.grad(function(x, weight).square().sum(), (x, weight))
    expected = torch.autograd.grad(EXAMPLES["rms_norm"][0](x, weight).square().sum(), (x, weight))
    torch.testing.assert_close(found, expected)


# --- what is refused ------------------------------------------------------------------------------


STILL = torch.ones(2)


def branching(x: Tensor) -> Tensor:
    return x if x.sum() > 0 else -x


def product(x: Tensor) -> Tensor:
    return torch.relu(x @ x.t())


def itself(x: Tensor) -> Tensor:
    return x.t()


def parts_of_it(x: Tensor) -> dict[str, Any]:
    return {"x": x, "rows": x.shape[0], "first": x[0]}


class Held:
    def __init__(self, value: Tensor) -> None:
        self.value = value


def an_object(x: Tensor) -> Held:
    return Held(x * 2)


def a_quotient(x: Tensor) -> tuple[Tensor, float]:
    return x * 2, x.shape[0] / 2


def written_over(x: Tensor) -> Tensor:
    x = x.detach()
    x += 1
    return x * 2


def untouched(x: Tensor, other: Tensor = STILL) -> tuple[Tensor, Tensor]:
    return x * 2, other


def number(x: Tensor) -> int:
    return 3


def spectrum(x: Tensor) -> Tensor:
    return torch.fft.fft(x).real


def likelihood(x: Tensor) -> Tensor:
    return F.gaussian_nll_loss(x, x * 2, x.square() + 1)  # PyTorch looks for a negative variance


def drawn(x: Tensor) -> Tensor:
    return torch.bernoulli(x)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (branching, r"cannot be one graph: Data-dependent branching \(line \d+ of .*test_eject"),
        (product, r"matmul has no generated kernel \(.*return torch.relu\(x @ x.t\(\)\)"),
        (product, r"of what remains \(relu\) no two calls could share a kernel; a kernel of one"),
        (itself, "returns an argument or a view of it"),
        (parts_of_it, "returns an argument or a view of it"),
        (an_object, "returns an object of Held; return tensors, numbers, strings and None"),
        (a_quotient, "a number that is computed from sizes by a division"),
        (written_over, "writes over an argument; let it return the new value"),
        (untouched, "returns a tensor that it computes nothing with"),
        (number, "computes nothing from its tensors"),
        (spectrum, "aten._fft_r2c.default has no generated kernel"),
        (likelihood, r"a condition in it depends on the values of a tensor \(line \d+ of"),
        (drawn, "aten.bernoulli.default has no generated kernel"),
    ],
)
def test_a_refusal_names_the_operation_and_leaves_nothing(
    function: Callable[..., Any], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(EjectError, match=reason):
        eject(function, torch.ones(4, 8), out=tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


# --- the folder -----------------------------------------------------------------------------------


def scale_(x: Tensor, factor: Tensor) -> Tensor:
    return torch.relu(x) * factor


def test_an_operators_name_does_not_say_that_it_writes_over_its_arguments(tmp_path: Path) -> None:
    eject(scale_, torch.ones(2), torch.ones(2), out=tmp_path / "scale")
    assert load_op(str(tmp_path / "scale")).name == "ejected::scale"
    for name in ("scale_", "a b", "def", "Block"):
        with pytest.raises(EjectError, match=f"'{name}' cannot name an operator"):
            eject(scale_, torch.ones(2), torch.ones(2), out=tmp_path / "refused", name=name)
    assert not (tmp_path / "refused").exists()


def test_an_existing_folder_is_refused(tmp_path: Path) -> None:
    function, args = EXAMPLES["rms_norm"]
    with pytest.raises(EjectError, match="exists; name a folder that does not, or give --force"):
        eject(function, *args, out=tmp_path)
    with pytest.raises(EjectError, match=r"is no ejected package \(it has no manifest.json\)"):
        eject(function, *args, out=tmp_path, force=True)


MODEL = """\
import torch

def scaled(x, weight):
    return torch.tanh(x * weight)

def get_inputs():
    return [torch.ones(4, 8), torch.ones(8)]
"""


def test_the_verb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, folder, facts = tmp_path / "model.py", tmp_path / "scaled", tmp_path / "facts.json"
    model.write_text(MODEL)
    call = ["eject", f"{model}:scaled", "-o", str(folder)]
    assert run([*call, "--json", str(facts)]) == 0
    assert capsys.readouterr().out == (
        f"ejected::scaled: {folder}\n"
        "  scaled (rows length, width)\n"
        "    reads x, weight; writes output\n"
        "  scaled_backward (rows length, width)\n"
        "    reads grad_output, x, weight; writes grad_x\n"
        "  scaled_backward_grad_weight (rows width; columns length)\n"
        "    reads grad_output, x, weight; writes grad_weight\n"
        f"next: fuselab check {folder} --quick\n"
    )
    assert json.loads(facts.read_text())["operator"] == "ejected::scaled"
    assert edited(folder) == []
    assert run(call) == 2
    assert "exists; name a folder" in capsys.readouterr().err

    (folder / "op.py").write_text((folder / "op.py").read_text() + "# mine\n")
    assert run([*call, "--force"]) == 1
    assert "kept op.py, which was edited; the new one is op.py.new\n" in capsys.readouterr().out
    assert (folder / "op.py").read_text().endswith("# mine\n")
    assert not (folder / "op.py.new").read_text().endswith("# mine\n")
    assert run(["check", str(folder), "--quick"]) == 2
    assert "newly ejected ones (op.py.new); keep one of each" in capsys.readouterr().err


@pytest.mark.parametrize("verdict", [Verdict.PASS, Verdict.FAIL])
def test_prove_checks_and_times(
    verdict: Verdict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[str] = []
    timed: list[str] = []

    def check(spec: str, **settings: Any) -> CheckReport:
        checked.append(spec)
        group = Group("cpp", "float32", "cpu", (Result("values", verdict, trials=1),))
        return CheckReport("ejected::scaled", 0, True, "cpu", (group,))

    monkeypatch.setattr("fuselab.prove.check.check", check)
    monkeypatch.setattr("fuselab.prove.bench.bench", lambda op, **_: timed.append(op.name))
    monkeypatch.setattr("fuselab.report.tables.bench_table", str)
    model, folder = tmp_path / "model.py", tmp_path / "scaled"
    model.write_text(MODEL)
    status = run(["eject", f"{model}:scaled", "-o", str(folder), "--prove"])
    assert status == (verdict is Verdict.FAIL)
    assert checked == [str(folder)]
    assert timed == (["ejected::scaled"] if verdict is Verdict.PASS else [])


def test_the_verb_without_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["eject", str(tmp_path / "none.py"), "-o", str(tmp_path / "out")]) == 2
    assert "no file" in capsys.readouterr().err


def test_keywords_and_values_are_fixed(tmp_path: Path) -> None:
    def powers(x: Tensor, *, exponent: float = 2.0, bias: Tensor | None = None) -> Tensor:
        y = x**exponent
        return y if bias is None else y + bias

    package = planned_package(
        powers, (torch.ones(4, 8),), {"exponent": 3.0, "bias": torch.ones(8)}, "powers"
    )
    assert package.parameters == ("x", "bias")
    assert "3.0" in package_files(package)["reference.py"]


def masked(x: Tensor, keep: Tensor, shift: Tensor) -> Tensor:
    return torch.where(keep, x + shift, 0.0)


def test_integers_and_masks_are_drawn_as_in_the_example(tmp_path: Path) -> None:
    keep, shift = torch.ones(4, 8, dtype=torch.bool), torch.arange(3, 11)
    folder = eject(masked, torch.ones(4, 8), keep, shift, out=tmp_path / "masked")
    op = load_op(str(folder))
    (case,) = op.cases
    x, keep, shift = case.make(torch.device("cpu"), torch.float32, torch.Generator()).args
    assert (x.dtype, keep.dtype, shift.dtype) == (torch.float32, torch.bool, torch.int64)
    assert 3 <= shift.min() <= shift.max() <= 10
    found = op.implementations["cpp"].forward(x, keep, shift)
    torch.testing.assert_close(found, masked(x, keep, shift))


def long_chain(x: Tensor) -> Tensor:
    for _ in range(30):
        x = x * torch.sigmoid(x)
    return x


def test_a_value_used_twice_at_every_step_is_computed_once() -> None:
    """Without sharing, each step would double the expression, and this test would not end."""
    (forward,) = planned_package(long_chain, (torch.ones(4, 8),), {}, "long_chain").forward
    (value,) = forward.stores.values()
    assert len(list(walk([value]))) == 1 + 2 * 30


def detached(x: Tensor, weight: Tensor) -> Tensor:
    return torch.tanh(x * weight.detach())


def test_an_argument_without_a_gradient_gets_zeros(tmp_path: Path) -> None:
    function = fuselab.operator(load_op(str(_ejected(detached, tmp_path))))
    x, weight = torch.randn(4, 8, requires_grad=True), torch.ones(8, requires_grad=True)
    (grad_x,) = torch.autograd.grad(
        function(x, weight, implementation="reference").sum(), [x], create_graph=True
    )
    torch.testing.assert_close(grad_x, 1 - torch.tanh(x) ** 2)
    grads = torch.func.grad(lambda *args: function(*args).sum(), argnums=(0, 1))(x, weight)
    torch.testing.assert_close(grads[0], grad_x)
    torch.testing.assert_close(grads[1], torch.zeros(8))


def _ejected(function: Callable[..., Any], tmp_path: Path) -> Path:
    return eject(function, torch.ones(4, 8), torch.ones(8), out=tmp_path / function.__name__)


def test_a_frozen_argument_is_refused_a_gradient(tmp_path: Path) -> None:
    package = planned_package(
        masked_bias, (torch.ones(4, 8), torch.ones(8)), {}, "masked_bias", frozen=("bias",)
    )
    write_folder(tmp_path / "masked_bias", package_files(package), {})
    function = fuselab.operator(load_op(str(tmp_path / "masked_bias")))
    x, bias = torch.randn(4, 8, requires_grad=True), torch.ones(8)
    function(x, bias).sum().backward()
    torch.testing.assert_close(x.grad, (x + bias > 0).float())
    with pytest.raises(DifferentiationError, match="'bias' has no gradient; eject it with"):
        function(x, bias.requires_grad_())


def masked_bias(x: Tensor, bias: Tensor) -> Tensor:
    return torch.relu(x + bias)


def test_a_loss_is_float32_under_autocast(tmp_path: Path) -> None:
    """Eager's loss is float32 under autocast on a CPU too."""

    def of_classes(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(logits, target)

    logits, target = torch.randn(4, 8), torch.tensor([1, 0, 7, 3])
    folder = eject(of_classes, logits, target, out=tmp_path / "of_classes")
    operator = fuselab.operator(load_op(str(folder)))
    for implementation in ("cpp", "reference"):
        with torch.autocast("cpu", torch.bfloat16):
            loss = operator(logits.bfloat16(), target, implementation=implementation)
        assert loss.dtype == torch.float32


def test_a_function_without_tensors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EjectError, match="ones takes no tensors, so each call computes the same"):
        fuselab.eject(lambda: torch.ones(3).exp() + 1, out=tmp_path / "ones", name="ones")
    assert not (tmp_path / "ones").exists()
