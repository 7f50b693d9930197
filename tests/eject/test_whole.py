"""Functions with small matrix products as one kernel: ``eject --whole``.

Each function runs interpreted against float64 at the sizes of its example and at others, and some
are compiled for a GPU that is not there.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuselab.cli.main import run
from fuselab.composition import Composition
from fuselab.ejection.eject import eject
from fuselab.ejection.emit_whole import WholeKernel
from fuselab.ejection.whole import planned_whole
from fuselab.errors import EjectError
from fuselab.inspect.assembly import launches
from fuselab.inspect.assembly.architectures import architecture
from fuselab.inspect.assembly.summary import summarised
from fuselab.prove.load import load
from fuselab.runtime import chain, interpreter
from fuselab.runtime.forms import may_be_whole


def mlp(x: Tensor, up: Tensor, bias: Tensor, down: Tensor) -> Tensor:
    return F.linear(F.relu(F.linear(x, up, bias)), down)


def three_layers(x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
    return torch.sigmoid(F.elu(F.elu(x @ w1) @ w2) @ w3)


def swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return (F.silu(x @ gate) * (x @ up)) @ down


def split_gate(x: Tensor, up: Tensor, bias: Tensor, down: Tensor) -> Tensor:
    value, gate = F.linear(x, up, bias).chunk(2, -1)
    return F.linear(value * F.gelu(gate), down) + x


def pre_norm(x: Tensor, weight: Tensor, bias: Tensor, up: Tensor, down: Tensor) -> Tensor:
    hidden = F.layer_norm(x, x.shape[-1:], weight, bias)
    return x + F.linear(F.gelu(F.linear(hidden, up)), down)


def low_rank(x: Tensor, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return F.linear(x, weight) + 0.5 * F.linear(F.linear(x, a), b)


def two_results(x: Tensor, weight: Tensor, head: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    hidden = torch.tanh(x @ weight)
    return hidden, F.log_softmax(hidden @ head, -1), hidden.sum(-1)


def shared_weight(x: Tensor, weight: Tensor) -> Tensor:
    return F.relu(x @ weight.t()) @ weight


def residuals(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    x = x + F.relu(x @ first)
    return x + F.relu(x @ second)


def one_column(x: Tensor, weight: Tensor, back: Tensor) -> Tensor:
    return torch.relu(x @ weight) @ back


def of_rows(x: Tensor, scale: Tensor, weight: Tensor) -> Tensor:
    hidden = (x * scale[..., None]) @ weight
    return hidden / hidden.norm(dim=-1, keepdim=True) + hidden.argmax(-1, keepdim=True)


def masked(x: Tensor, mask: Tensor, weight: Tensor) -> Tensor:
    kept = torch.where(torch.arange(x.shape[-1], device=x.device) < 5, x, 0.0)
    return (kept @ weight).masked_fill(mask, 0.0).mean(-1)


def narrowed(x: Tensor, weight: Tensor, head: Tensor) -> Tensor:
    a, b, c = (x[..., :8] @ weight).split(8, -1)
    return (a * b.sigmoid() + c) @ head


def named_like_the_kernel(
    row: Tensor, first: Tensor, is_part: Tensor, load: Tensor, is_is_part_width: Tensor
) -> tuple[Tensor, Tensor]:
    offset = F.relu(row @ first + load)
    exists = offset @ is_part
    is_row = exists * is_is_part_width
    return is_row, offset.sum(-1)


def by_sizes(x: Tensor, weight: Tensor) -> Tensor:
    return (x @ weight) * x.shape[0] / weight.shape[1] + x.shape[1]


def read_whole_and_in_parts(x: Tensor, bias: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """The products read parts of ``x`` in their loops, and the softmax and the sum all of it."""
    weights = (x + bias).softmax(-1)
    return (x * bias) @ first + weights + (x - bias) @ second + x * bias


# Each function with its arguments' shapes, and others that the same kernel takes.
FUNCTIONS: dict[Callable[..., Any], tuple[list[tuple[int, ...]], list[tuple[int, ...]]]] = {
    mlp: ([(37, 20), (50, 20), (50,), (9, 50)], [(3, 7), (133, 7), (133,), (65, 133)]),
    three_layers: (
        [(2, 9, 13), (13, 40), (40, 33), (33, 2)],
        [(1, 2, 5), (5, 3), (3, 70), (70, 4)],
    ),
    swiglu: ([(2, 19, 24), (24, 70), (24, 70), (70, 24)], [(3, 5, 17), (17, 8), (17, 8), (8, 3)]),
    split_gate: ([(33, 24), (100, 24), (100,), (24, 50)], [(5, 6), (4, 6), (4,), (6, 2)]),
    pre_norm: (
        [(4, 5, 24), (24,), (24,), (96, 24), (24, 96)],
        [(2, 3, 7), (7,), (7,), (9, 7), (7, 9)],
    ),
    low_rank: ([(40, 24), (30, 24), (4, 24), (30, 4)], [(7, 70), (5, 70), (2, 70), (5, 2)]),
    two_results: ([(40, 24), (24, 10), (10, 6)], [(3, 5), (5, 70), (70, 2)]),
    shared_weight: ([(40, 24), (33, 24)], [(3, 70), (5, 70)]),
    residuals: ([(40, 24), (24, 24), (24, 24)], [(3, 65), (65, 65), (65, 65)]),
    one_column: ([(40, 24), (24, 1), (1, 9)], [(3, 65), (65, 1), (1, 70)]),
    of_rows: ([(4, 9, 24), (4, 9), (24, 10)], [(2, 3, 5), (2, 3), (5, 70)]),
    masked: ([(40, 24), (40, 9), (24, 9)], [(5, 7), (5, 33), (7, 33)]),
    narrowed: ([(2, 10, 24), (8, 24), (8, 5)], [(1, 3, 9), (8, 24), (8, 33)]),
    named_like_the_kernel: (
        [(9, 20), (20, 40), (40, 30), (40,), (30,)],
        [(5, 3), (3, 70), (70, 66), (70,), (66,)],
    ),
    by_sizes: ([(9, 20), (20, 33)], [(4, 3), (3, 5)]),
    read_whole_and_in_parts: (
        [(9, 40), (40,), (40, 40), (40, 40)],
        [(3, 200), (200,), (200, 200), (200, 200)],
    ),
}  # fmt: skip


def tensors(
    function: Callable[..., Any], shapes: list[tuple[int, ...]], dtype: torch.dtype
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(11)
    made = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    if function is masked:
        made[1] = torch.rand(shapes[1], generator=generator) < 0.5
    return made


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Any], Path]:
    root = tmp_path_factory.mktemp("whole")

    def folder(function: Callable[..., Any]) -> Path:
        path = root / function.__name__
        if not path.exists():
            args = tensors(function, FUNCTIONS[function][0], torch.float32)
            eject(function, *args, out=path, whole=True)
        return path

    return folder


def module(folder: Path, name: str) -> ModuleType:
    if str(folder.parent) not in sys.path:
        sys.path.insert(0, str(folder.parent))
    return importlib.import_module(f"{folder.name}.{name}")


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda one: one.__name__)
def test_the_kernel_computes_what_the_reference_does(
    function: Callable[..., Any], written: Callable[[Any], Path]
) -> None:
    folder = written(function) / f"{function.__name__}_whole"
    supports = module(folder.parent, f"{folder.name}.op").supports
    for shapes in FUNCTIONS[function]:
        for dtype, near in ((torch.float32, 2e-6), (torch.float16, 3e-3)):
            args = tensors(function, shapes, dtype)
            assert supports(*args) is None
            found = interpreter.run(f"{folder}/op.py:forward_triton", *args)
            wide = [one.double() if one.is_floating_point() else one for one in args]
            exact = function(*wide)
            several = isinstance(exact, tuple)
            pairs = zip(found, exact, strict=True) if several else [(found, exact)]
            for one, right in pairs:
                assert one.dtype == dtype
                scale = float(right.abs().max())
                torch.testing.assert_close(one.double(), right, rtol=0, atol=near * scale)


def test_layouts(written: Callable[[Any], Path]) -> None:
    folder = written(pre_norm) / "pre_norm_whole"
    x, weight, bias, up, down = tensors(pre_norm, FUNCTIONS[pre_norm][0], torch.float32)
    args = (
        x.transpose(0, 1).contiguous().transpose(0, 1),
        weight[:1].expand(24),
        torch.stack([bias, bias], 1)[:, 1],
        up.t().contiguous().t(),
        torch.cat([down, down], 1)[:, 96:],
    )
    exact = pre_norm(*(one.double() for one in args))
    found = interpreter.run(f"{folder}/op.py:forward_triton", *args)
    near = 2e-6 * float(exact.abs().max())
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=near)
    none = interpreter.run(f"{folder}/op.py:forward_triton", x[:0], weight, bias, up, down)
    assert none.shape == (0, 5, 24)


def test_an_empty_result_beside_others(written: Callable[[Any], Path]) -> None:
    folder = written(two_results) / "two_results_whole"
    args = tensors(two_results, [(7, 5), (5, 33), (33, 0)], torch.float32)
    hidden, nothing, total = interpreter.run(f"{folder}/op.py:forward_triton", *args)
    exact = torch.tanh(args[0].double() @ args[1].double())
    torch.testing.assert_close(hidden.double(), exact, rtol=0, atol=1e-5)
    torch.testing.assert_close(total.double(), exact.sum(-1), rtol=0, atol=1e-4)
    assert nothing.shape == (7, 0)
    no_depth = tensors(two_results, [(7, 0), (0, 3), (3, 2)], torch.float32)
    hidden, *_ = interpreter.run(f"{folder}/op.py:forward_triton", *no_depth)
    assert hidden.shape == (7, 3)
    assert not hidden.any()


def test_the_composition_takes_operators_where_the_kernel_has_no_place(
    written: Callable[[Any], Path],
) -> None:
    composed = module(written(pre_norm), "composed")
    args = tensors(pre_norm, FUNCTIONS[pre_norm][0], torch.float32)
    torch.testing.assert_close(composed.pre_norm(*args), pre_norm(*args), rtol=1e-5, atol=1e-4)
    found = load(str(written(pre_norm)))
    assert isinstance(found, Composition)
    assert [op.name for op in found.operators][-1] == "ejected::pre_norm_whole"
    assert found.as_operator().peers["operators"] is not None
    assert not may_be_whole(*args)  # on a CPU


def of_any_arguments(
    output: Tensor, kind: str, rows: Sequence[Tensor], options: dict[str, Any]
) -> Tensor:
    return F.relu(output @ rows[0] + options["reason"]) @ rows[1] + options["columns"]


def test_arguments_of_any_kind_and_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names that the launchers use, and tensors in lists, were refused in a sentence on lists; an
    argument named rows reached a launcher in the place of its sizes."""
    x, up, down, bias, columns = tensors(
        of_any_arguments, [(4, 8), (8, 6), (6, 8), (6,), (8,)], torch.float32
    )
    given = (x, "relu", [up, down], {"reason": bias, "columns": columns})
    eject(of_any_arguments, *given, out=tmp_path / "of_any_arguments", whole=True)
    monkeypatch.syspath_prepend(str(tmp_path))
    package = importlib.import_module("of_any_arguments")
    composed = importlib.import_module("of_any_arguments.composed")
    expected = of_any_arguments(*given)
    found = interpreter.run(
        f"{tmp_path}/of_any_arguments/of_any_arguments_whole/op.py:forward_triton",
        *(x, up, down, bias, columns),
    )
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    monkeypatch.setattr("fuselab.runtime.forms.may_be_whole", lambda *_: True)
    monkeypatch.setattr(composed._FORMS, "_is_chosen", lambda _: True)
    monkeypatch.setattr(composed._FORMS, "_operators", None)
    torch.testing.assert_close(package.of_any_arguments(*given), expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="ejected with kind = 'relu', and kind is 'gelu' here"):
        package.of_any_arguments(x, "gelu", *given[2:])


def test_autocast(written: Callable[[Any], Path]) -> None:
    """The result has the dtype that eager's has, which depends on the last operations."""
    for function in (pre_norm, swiglu):
        op = module(written(function), f"{function.__name__}_whole.op")
        for dtype in (torch.float32, torch.bfloat16):
            args = tensors(function, FUNCTIONS[function][0], dtype)
            with torch.autocast("cpu", torch.bfloat16):
                eager = function(*args).dtype
            assert {one.dtype for one in op.autocast(torch.bfloat16, *args)} == {eager}


def test_a_program_holds_what_fits(written: Callable[[Any], Path]) -> None:
    op = module(written(pre_norm), "pre_norm_whole.op")
    wide = tensors(pre_norm, [(2, 3, 1500), (1500,), (1500,), (9, 1500), (1500, 9)], torch.float32)
    assert op.supports(*wide) == "width is 1500, and a program holds 1024 columns"
    double = tensors(pre_norm, FUNCTIONS[pre_norm][0], torch.float64)
    assert op.supports(*double) == "it accumulates in float32"
    other = tensors(pre_norm, FUNCTIONS[pre_norm][0], torch.float32)
    assert op.supports(*other[:-1], other[-1][:, 1:]) is not None
    sizes = [(4, 5000, 256), (256,), (256,), (1024, 256), (256, 1024)]
    configs = op.configs(*tensors(pre_norm, sizes, torch.float16))
    assert dict(configs[0].items()) == {"rows": 64, "block": 32, "warps": 4}


def test_a_block_that_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain, "shared_bytes", lambda device: 48 * 1024)
    made = chain.Chain(lambda: None, "test::op", ("width",), [(("width", False), ("depth", True))])
    assert made.refuses({"width": 512, "depth": 64}, torch.empty(1)) is not None
    assert made.refuses({"width": 128, "depth": 64}, torch.empty(1)) is None


def heads(x: Tensor, weight: Tensor) -> Tensor:
    hidden = (x @ weight).view(x.shape[0], 4, -1)
    return F.layer_norm(hidden, hidden.shape[-1:])


REFUSED: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...], str]] = {
    "batched": (
        lambda x, y: x @ y, (torch.ones(2, 3, 4), torch.ones(2, 4, 5)), "no matrix for all",
    ),
    "rows": (
        lambda x, w: x @ w - (x @ w).mean(0),
        (torch.ones(4, 5), torch.ones(5, 6)),
        "a part of a row",
    ),
    "heads": (heads, (torch.ones(4, 5), torch.ones(5, 8)), "other rows than the products"),
    "computed": (
        lambda x, w: x @ w.softmax(0), (torch.ones(4, 5), torch.ones(5, 6)), "product is computed",
    ),
    "wide": (
        lambda x, w: (x @ w).softmax(-1), (torch.ones(4, 5), torch.ones(5, 2000)), "2,000 columns",
    ),
    "scan": (lambda x, w: (x @ w).cumsum(-1), (torch.ones(4, 5), torch.ones(5, 6)), "running sum"),
    "chosen": (
        lambda i, t, w: t[i] @ w,
        (torch.zeros(4, dtype=torch.int64), torch.ones(9, 5), torch.ones(5, 6)),
        "computed position",
    ),
    "dropout": (
        lambda x, w: F.dropout(x, 0.5) @ w, (torch.ones(4, 5), torch.ones(5, 6)), "by a seed",
    ),
    "no product": (lambda x: x.relu() * 2, (torch.ones(4, 5),), "no product of rows"),
    "written": (
        lambda x, w: x.add_(1) @ w, (torch.ones(4, 5), torch.ones(5, 6)), "over an argument",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_belongs_to_no_row_is_refused(name: str, tmp_path: Path) -> None:
    function, args, reason = REFUSED[name]
    with pytest.raises(EjectError, match=reason):
        eject(function, *args, out=tmp_path / "out", name="refused", whole=True)
    assert not (tmp_path / "out").exists()


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(13, 40), nn.ReLU(), nn.Linear(40, 1), nn.Sigmoid())

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def test_a_module(tmp_path: Path) -> None:
    torch.manual_seed(0)
    head, x = Head(), torch.randn(41, 13)
    folder = eject(head, x, out=tmp_path / "head", whole=True)
    args = [x, *(one.detach() for one in head.parameters())]
    found = interpreter.run(f"{folder}/head_whole/op.py:forward_triton", *args)
    torch.testing.assert_close(found, head(x).detach(), rtol=1e-5, atol=1e-6)
    own = module(folder, "module").Head(head)
    torch.testing.assert_close(own(x), head(x))


@pytest.mark.parametrize("function", [pre_norm, swiglu], ids=lambda one: one.__name__)
def test_the_kernel_compiles_for_gpus(
    function: Callable[..., Any], written: Callable[[Any], Path]
) -> None:
    op = module(written(function), f"{function.__name__}_whole.op").OP
    for name in ("sm_80", "sm_90"):
        found, _ = launches.of_operator(op, architecture(name), dtype=torch.bfloat16)
        (kernel,) = found.kernels
        assert found.calls == []  # PyTorch computes nothing
        assert sum(summarised(kernel).matrix.values()) > 0
        assert summarised(kernel).spills == (0, 0)


def test_the_verb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "model.py"
    file.write_text(
        "import torch\n\n\ndef small_block(x, up, down):\n"
        "    return torch.relu(x @ up) @ down + x\n\n\n"
        "def get_inputs():\n"
        "    return [torch.ones(64, 32), torch.ones(32, 48), torch.ones(48, 32)]\n"
    )
    assert run(["eject", str(file), "-o", str(tmp_path / "out"), "--whole"]) == 0
    assert "small_block_whole (one kernel of the whole; rows length)" in capsys.readouterr().out
    page = (tmp_path / "out" / "small_block_whole" / "page.md").read_text()
    assert "| PyTorch calls | 4 |" in page
    # x, the two weights and the result, of 4 bytes
    assert f"| one kernel | 1 | {4 * (2 * 64 * 32 + 2 * 32 * 48):,} |" in page
    (row,) = [line for line in page.splitlines() if line.startswith("| small_block_whole_kernel |")]
    assert row.split("|")[3].strip() == "0 B"
    assert run(["eject", str(file), "-o", str(tmp_path / "no"), "--whole", "--standalone"]) == 2
    assert "leave --standalone away" in capsys.readouterr().err
    assert not (tmp_path / "no").exists()


def test_functions_of_16_bits_give_the_same_kernel() -> None:
    """PyTorch defines a product with a bias in float32, which would convert the weight."""
    for function, (shapes, _) in FUNCTIONS.items():
        texts = set()
        for one in (torch.float32, torch.float16, torch.bfloat16):
            plan = planned_whole(function, tensors(function, shapes, one), {}, function.__name__)
            assert plan.products
            texts.add(WholeKernel(plan).source())
        assert len(texts) == 1


def explicit(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.addmm(bias, x, weight, beta=0.5, alpha=2) + torch.addmm(bias, x, weight, beta=0)


def test_addmm_with_factors(tmp_path: Path) -> None:
    args = tensors(explicit, [(20, 9), (9, 33), (33,)], torch.float32)
    folder = eject(explicit, *args, out=tmp_path / "explicit", whole=True)
    args[2][3] = torch.inf  # half of which is in the first, and nothing of it in the second
    found = interpreter.run(f"{folder}/explicit_whole/op.py:forward_triton", *args)
    torch.testing.assert_close(found, explicit(*args), rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda one: one.__name__)
def test_on_a_gpu(function: Callable[..., Any], written: Callable[[Any], Path]) -> None:
    """Within a few roundings of its dtype, of the largest result."""
    op = module(written(function), f"{function.__name__}_whole.op")
    for shapes in FUNCTIONS[function]:
        for dtype, near in ((torch.float32, 2e-6), (torch.float16, 3e-3), (torch.bfloat16, 2e-2)):
            args = [one.cuda() for one in tensors(function, shapes, dtype)]
            exact = function(*(one.double() if one.is_floating_point() else one for one in args))
            found = op.forward_triton(*args)
            several = isinstance(exact, tuple)
            for one, right in zip(found, exact, strict=True) if several else [(found, exact)]:
                assert one.dtype == dtype
                scale = float(right.abs().max())
                torch.testing.assert_close(one.double(), right, rtol=0, atol=near * scale)


@pytest.mark.gpu
def test_the_faster_form_is_taken_on_a_gpu(written: Callable[[Any], Path]) -> None:
    composed = module(written(pre_norm), "composed")
    sizes = [(64, 70, 24), (24,), (24,), (96, 24), (24, 96)]
    args = [one.cuda() for one in tensors(pre_norm, sizes, torch.float16)]
    exact = pre_norm(*(one.double() for one in args))
    near = 3e-3 * float(exact.abs().max())
    graph = torch.cuda.CUDAGraph()
    composed.pre_norm_of_operators(*args)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        held = composed.pre_norm(*args)
    assert composed._FORMS._is_faster == {}  # nothing is timed while a graph is captured
    graph.replay()
    for found in (held, composed.pre_norm(*args), composed.pre_norm(*args)):
        torch.testing.assert_close(found.double(), exact, rtol=0, atol=near)
    assert len(composed._FORMS._is_faster) == 1
    wanted = [one.requires_grad_() for one in args]
    composed.pre_norm(*wanted).sum().backward()
    assert all(one.grad is not None for one in wanted)


def test_the_same_text_each_time() -> None:
    args = tensors(swiglu, FUNCTIONS[swiglu][0], torch.float32)
    texts = {WholeKernel(planned_whole(swiglu, args, {}, "swiglu")).source() for _ in range(2)}
    assert len(texts) == 1
