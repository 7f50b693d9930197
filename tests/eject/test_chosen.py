"""Functions that read elements at computed positions: embeddings, indexing, pooling, padding.

Each is ejected, and its Triton kernels run interpreted against autograd in float64; some run in C++
and in CUDA C++ too.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from comparing import compare, imported
from cuda_on_cpu import Emulator
from torch import Tensor

from fuselab.ejection.eject import eject
from fuselab.ejection.package import planned_package
from fuselab.errors import EjectError
from fuselab.prove.load import load_op
from fuselab.runtime import interpreter


def embedded(table, tokens, places, weight):
    hidden = F.embedding(tokens, table, padding_idx=1) * 2 + places
    return F.rms_norm(hidden, hidden.shape[-1:], weight)


def indexed(x, rows, columns):
    return x[rows].exp() + x[rows, columns][:, None]


def columns_of_all(x, columns):
    return (x * 2)[:, columns].sigmoid() + torch.index_select(x, 1, columns)


def several_of_a_row(x, chosen):
    return (x * 2).gather(1, chosen).exp() + torch.take_along_dim(x.square(), chosen, 1)


def scattered(x, chosen, y):
    return (x * 2).scatter_add(1, chosen, y.exp()).sigmoid()


def rows_added(x, rows, y):
    return (x * 2).index_add(0, rows, y).exp()


def masked_in_place(x):
    y = x * 1
    y[y < -0.5] = 0.25
    return y.flip(0, 1) * x


def rolled(x):
    return x.roll(5).exp() + x.roll(-9, 1)


def reflected(x):
    return F.pad(x * 2, (2, 1, 1, 1), mode="reflect").exp()


def replicated(x):
    return F.pad(x * 2, (2, 1), mode="replicate").exp()


def bordered(x):
    return F.pad(x * 2, (1, 2, 0, 1), value=0.5).exp()


def cropped_and_bordered(x):
    return F.pad(x.relu(), (-2, 3, 1, -1)) + 1


def bordered_integers(tokens, table):
    return table[F.pad(tokens + 1, (2, 0), value=3)] * 2


def bordered_softmax(x):
    return F.pad(torch.softmax(x, -1), (1, 1))


def average_pool(x):
    return F.avg_pool2d(x.relu(), 3, 2, 1, ceil_mode=True, count_include_pad=False) + 1


def smoothed(x):
    return x - F.avg_pool1d(x, 3, 1, 1)


def max_pool(x):
    return F.max_pool2d(x * 2, 3, 2, 1).exp()


def pooled_halves(x, bias):
    return F.max_pool2d(F.relu(x + bias[:, None, None]), 2)


def adaptive(x):
    return F.adaptive_avg_pool2d(x.relu(), (4, 2)) * 2


def largest_of_regions(x):
    return F.adaptive_max_pool2d(x * 2, (3, 4)).exp()


def regions(x):
    x = x.relu()
    return F.adaptive_max_pool2d(x, (3, 2)) - F.adaptive_avg_pool2d(x, (3, 2))


def of_columns(x):
    return F.adaptive_max_pool2d(x * 2, (None, 3)) + F.adaptive_avg_pool2d(x, (None, 3))


def more_regions_than_elements(x):
    return F.adaptive_max_pool1d(x, 7).exp() * F.adaptive_avg_pool1d(x, 7)


def largest_of_channels(x):
    return F.adaptive_max_pool2d(x * 2, 1).flatten(1).tanh()


def unfolded(x):
    return x.unfold(1, 4, 2).square().mean(-1)


def diagonal(x):
    return (x * 2).diagonal(1).exp().sum() + torch.diag_embed(x[0]).square().sum()


def larger_image(x):
    return F.interpolate(x * 2, scale_factor=2, mode="bilinear").exp()


def shuffled(x):
    return F.pixel_shuffle(x * 2, 2).exp()


FUNCTIONS: dict[Callable[..., Any], tuple[Any, ...]] = {
    embedded: ((9, 5), ("index", 9, (4, 6)), (6, 5), (5,)),
    indexed: ((9, 5), ("index", 9, (6,)), ("index", 5, (6,))),
    columns_of_all: ((4, 7), ("index", 7, (9,))),
    several_of_a_row: ((4, 7), ("index", 7, (4, 3))),
    scattered: ((4, 7), ("index", 7, (4, 3)), (4, 3)),
    rows_added: ((6, 7), ("index", 6, (5,)), (5, 7)),
    masked_in_place: ((5, 7),),
    rolled: ((4, 7),),
    reflected: ((2, 5, 7),),
    replicated: ((2, 3, 7),),
    bordered: ((2, 3, 5, 7),),
    cropped_and_bordered: ((3, 5, 7),),
    bordered_integers: (("index", 6, (3, 4)), (7, 5)),
    bordered_softmax: ((4, 9),),
    average_pool: ((2, 3, 9, 8),),
    smoothed: ((2, 3, 9),),
    max_pool: ((2, 3, 9, 7),),
    pooled_halves: ((2, 3, 9, 8), (3,)),
    adaptive: ((2, 3, 8, 6),),
    largest_of_regions: ((2, 3, 9, 8),),
    regions: ((2, 3, 8, 8),),
    of_columns: ((2, 3, 4, 7),),
    more_regions_than_elements: ((2, 3, 4),),
    largest_of_channels: ((2, 3, 5, 4),),
    unfolded: ((3, 10),),
    diagonal: ((5, 7),),
    larger_image: ((1, 2, 4, 5),),
    shuffled: ((2, 4, 3, 5),),
}


def arguments(function: Callable[..., Any]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randint(0, one[1], one[2], generator=generator)
        if one[0] == "index"
        else torch.randn(one, generator=generator)
        for one in FUNCTIONS[function]
    ]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Any], Path]:
    root = tmp_path_factory.mktemp("chosen")

    def folder(function: Callable[..., Any]) -> Path:
        path = root / function.__name__
        return path if path.exists() else eject(function, *arguments(function), out=path)

    return folder


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_interpreted_triton(function: Callable[..., Any], folders: Callable[[Any], Path]) -> None:
    folder = folders(function)
    op = load_op(str(folder))
    args = arguments(function)
    assert op.implementations["triton"].supports(*args) is None
    compare(
        op,
        lambda *args: interpreter.run(f"{folder}/op.py:forward_triton", *args),
        lambda *args: interpreter.run(f"{folder}/op.py:backward_triton", *args),
        args,
    )


COMPILED = (embedded, max_pool, average_pool, cropped_and_bordered, regions)


def test_emulated_cuda(
    folders: Callable[[Any], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CUDA C++ of all functions is compiled for the CPU together, then run."""
    emulator = Emulator(tmp_path)
    emulator.install(monkeypatch)
    declared = {function: load_op(str(folders(function))) for function in COMPILED}
    with emulator.collecting():
        for function, op in declared.items():
            cuda, args = op.implementations["cuda"], arguments(function)
            output = cuda.forward(*args)
            needs = [one.is_floating_point() for one in args]
            upstream = torch.ones_like(op.without_residuals(output))
            cuda.backward(needs, upstream, *op.gradient.save(output, *args))
    for function, op in declared.items():
        cuda = op.implementations["cuda"]
        compare(op, cuda.forward, cuda.backward, arguments(function))


@pytest.mark.parametrize("function", COMPILED, ids=lambda function: function.__name__)
def test_cpp(function: Callable[..., Any], folders: Callable[[Any], Path]) -> None:
    op = load_op(str(folders(function)))
    cpp = op.implementations["cpp"]
    compare(op, cpp.forward, cpp.backward, arguments(function))


def test_other_sizes_layouts_and_integers_of_an_embedding(
    folders: Callable[[Any], Path],
) -> None:
    op = load_op(str(folders(embedded)))
    cpp = op.implementations["cpp"]
    table, places, weight = (
        torch.randn(33, 70).t()[:, :31],
        torch.randn(31).expand(3, 31),
        torch.ones(31),
    )
    tokens = torch.randint(0, 70, (3, 5), dtype=torch.int32).t()
    compare(op, cpp.forward, cpp.backward, [table, tokens, places, weight])
    nothing = tokens[:0]
    compare(op, cpp.forward, cpp.backward, [table, nothing, places, weight])


def test_a_pool_reads_channels_last_and_images_without_elements(
    folders: Callable[[Any], Path],
) -> None:
    op = load_op(str(folders(max_pool)))
    cpp = op.implementations["cpp"]
    image = torch.randn(2, 3, 12, 11).to(memory_format=torch.channels_last)
    compare(op, cpp.forward, cpp.backward, [image])
    compare(op, cpp.forward, cpp.backward, [torch.randn(0, 3, 6, 6)])


def test_auto_leaves_adaptive_windows_to_pytorch_on_a_cpu(
    folders: Callable[[Any], Path],
) -> None:
    """Its own kernels take several times as long there, forward and backward."""
    for function in (regions, largest_of_channels):
        op = load_op(str(folders(function)))
        assert op.gradient is not None
        found = [one.prefer for one in (op, op.gradient)]
        assert [one and tuple(one()) for one in found] == [("triton", "cuda")] * 2
    assert load_op(str(folders(adaptive))).prefer is None
    x = arguments(regions)[0].requires_grad_()
    regions(x).sum().backward()
    expected = x.grad
    x.grad = None
    imported(folders(regions)).regions(x).sum().backward()
    torch.testing.assert_close(x.grad, expected)


def test_a_standalone_package_pools_adaptively(tmp_path: Path) -> None:
    folder = eject(regions, *arguments(regions), out=tmp_path / "alone", standalone=True)
    op = load_op(str(folder))
    assert op.prefer is None  # its own function runs the C++
    compare(
        op,
        *(getattr(op.implementations["cpp"], one) for one in ("forward", "backward")),
        arguments(regions),
    )


def test_adaptive_windows_of_other_sizes(folders: Callable[[Any], Path]) -> None:
    """Windows whose lengths differ may be of any size not below their number; windows of one
    length, of each multiple of it."""
    op = load_op(str(folders(regions)))
    cpp = op.implementations["cpp"]
    for sizes in ((1, 2, 3, 2), (2, 1, 10, 6), (1, 3, 12, 4)):
        compare(op, cpp.forward, cpp.backward, [torch.randn(sizes)])
    last = torch.randn(2, 3, 7, 6).to(memory_format=torch.channels_last)
    compare(op, cpp.forward, cpp.backward, [last])
    assert "no multiple of 2" in (cpp.supports(torch.randn(1, 1, 8, 7)) or "")
    assert cpp.supports(torch.randn(1, 1, 2, 4)) is not None


def test_an_element_that_counts_anywhere_is_loaded_at_a_safe_place(
    folders: Callable[[Any], Path],
) -> None:
    """Only what a condition guards is loaded from where a window begins, which may be outside: not
    the place of the largest element, which is compared before it is known whether it counts."""
    text = (folders(max_pool) / "triton_kernels.py").read_text("utf-8")
    assert re.search(r"load_inside\(\s*x_line \+ ", text)
    assert not re.search(r" load\(\s*\w+_(row|line) \+ ", text)


def test_what_sizes_are_multiples_of_is_written_in_one_order(tmp_path: Path) -> None:
    """Python's hashes, which are others in every process, decide nothing that is written."""
    folder = eject(max_pool, torch.randn(2, 3, 8, 12, requires_grad=True), out=tmp_path / "p")
    text = (Path(folder) / "op.py").read_text("utf-8")
    assert 'multiples={"height": 2, "width": 2}' in text


def test_the_gradient_of_a_pool_goes_to_the_first_of_equal_elements(
    folders: Callable[[Any], Path],
) -> None:
    op = load_op(str(folders(max_pool)))
    cpp = op.implementations["cpp"]
    x = torch.zeros(1, 1, 3, 3)
    x[..., 2, 2] = float("-inf")
    (gradient,) = cpp.backward([True], torch.ones(1, 1, 2, 2), x)
    assert gradient[0, 0].tolist() == [[2.0, 2.0, 0.0], [2.0, 2.0, 0.0], [0.0, 0.0, 0.0]]


@pytest.mark.parametrize("share", [0.3, 1.0])
def test_the_gradient_of_a_pool_goes_to_the_last_nan(
    folders: Callable[[Any], Path], share: float
) -> None:
    """PyTorch goes on at each NaN."""
    folder = folders(max_pool)
    op = load_op(str(folder))
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(arguments(max_pool)[0].shape, generator=generator)
    x[torch.rand(x.shape, generator=generator) < share] = float("nan")
    x.requires_grad_()
    pooled = max_pool(x)
    upstream = torch.randn(pooled.shape, generator=generator)
    (expected,) = torch.autograd.grad(pooled, x, upstream)
    cpp = op.implementations["cpp"]
    kernels: list[tuple[Any, Any]] = [(cpp.forward, cpp.backward)]
    kernels.append(
        (
            lambda *args: interpreter.run(f"{folder}/op.py:forward_triton", *args),
            lambda *args: interpreter.run(f"{folder}/op.py:backward_triton", *args),
        )
    )
    for forward, backward in kernels:
        output = forward(x.detach())
        saved = op.gradient.save(output, x.detach())
        near = {"equal_nan": True, "rtol": 1e-5, "atol": 1e-5}
        torch.testing.assert_close(op.without_residuals(output), pooled.detach(), **near)
        torch.testing.assert_close(backward([True], upstream, *saved)[0], expected, **near)


def test_places_have_32_bits_where_no_pytorch_call_reads_them(
    folders: Callable[[Any], Path], tmp_path: Path
) -> None:
    text = (folders(max_pool) / "op.py").read_text("utf-8")
    assert "torch.int32 if height * width < 2**31 else torch.int64," in text

    def likeliest(table, scores):
        return torch.tanh(table[scores.argmax(-1)])

    example = [torch.randn(7, 5, requires_grad=True), torch.randn(9, 7)]
    folder = tmp_path / "likeliest"
    eject(likeliest, *example, out=folder)
    assert "torch.int32" not in (folder / "op.py").read_text("utf-8")
    cpp = load_op(str(folder)).implementations["cpp"]
    compare(load_op(str(folder)), cpp.forward, cpp.backward, example)


def test_an_index_outside_gives_nan(folders: Callable[[Any], Path]) -> None:
    forward = load_op(str(folders(indexed))).implementations["cpp"].forward
    x, rows = torch.ones(9, 5), torch.tensor([0, -9, -10, 8, 9, 10**12])
    found = forward(x, rows, torch.zeros(6, dtype=torch.int64))
    assert found[:, 0].isnan().tolist() == [False, False, True, False, True, True]


def test_the_sum_of_an_embeddings_gradients_is_a_call_between_kernels(
    folders: Callable[[Any], Path],
) -> None:
    text = (folders(embedded) / "op.py").read_text("utf-8")
    assert '(table, "? width"),' in text
    (call,) = re.findall(r"grad_table = added_along\(.*?\n    \)", text, re.DOTALL)
    assert "tokens" in call


def test_the_contract_names_sums_without_an_order(folders: Callable[[Any], Path]) -> None:
    assert load_op(str(folders(masked_in_place))).nondeterministic is None
    for function in (embedded, several_of_a_row):
        assert "any order" in (load_op(str(folders(function))).nondeterministic or "")


def test_the_number_of_kernels() -> None:
    def counted(function: Callable[..., Any]) -> tuple[int, int]:
        package = planned_package(function, arguments(function), {}, function.__name__)
        return len(package.forward), len(package.backward)

    assert counted(embedded) == (1, 3)
    assert counted(pooled_halves) == (1, 3)  # where the largest element is, and two gradients


def test_a_mask_that_chooses_elements_is_refused() -> None:
    def chosen(x: Tensor, mask: Tensor) -> Tensor:
        return (x * 2)[mask].sum()

    with pytest.raises(EjectError, match="whose size depends on values"):
        planned_package(chosen, (torch.ones(3, 4), torch.ones(3, 4) > 0), {}, "chosen")


def relu_max_pool(x: Tensor, bias: Tensor) -> Tensor:
    return F.max_pool2d(F.relu(x + bias[:, None, None]), 3, 2, 1)


def messages(nodes: Tensor, edges: Tensor, source: Tensor) -> Tensor:
    return F.relu(nodes[source] + edges)


def test_a_gradient_that_others_are_summed_from_is_not_rounded(
    folders: Callable[[Any], Path],
) -> None:
    """The narrow argument's gradient is stored in the upstream gradient's dtype till then."""
    torch.manual_seed(0)
    x, bias = torch.randn(3, 2, 9, 9).half(), torch.randn(2)
    nodes, edges, source = torch.randn(5, 8), torch.randn(40, 8).half(), torch.arange(40) % 5
    eject(relu_max_pool, x.float(), bias, out=folders(embedded).parent / "relu_max_pool")
    eject(messages, nodes, edges.float(), source, out=folders(embedded).parent / "messages")
    for function, args in ((relu_max_pool, (x, bias)), (messages, (nodes, edges, source))):
        op = load_op(str(folders(function)))
        cpp = op.implementations["cpp"]
        output = cpp.forward(*args)
        upstream = torch.randn(output.shape)
        needs = [one.is_floating_point() for one in args]
        ours = cpp.backward(needs, upstream, *op.gradient.save(output, *args))
        exact = [one.double().requires_grad_() if one.is_floating_point() else one for one in args]
        floating = [place for place, need in enumerate(needs) if need]
        leaves = [exact[place] for place in floating]
        theirs = torch.autograd.grad(function(*exact), leaves, upstream.double())
        for place, right in zip(floating, theirs, strict=True):
            assert ours[place].dtype == args[place].dtype
            near = 1e-3 if args[place].dtype == torch.half else 1e-6
            torch.testing.assert_close(ours[place].double(), right, rtol=near, atol=near)
