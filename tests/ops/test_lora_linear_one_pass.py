"""The one pass of lora_linear's backward in CUDA C++: what it takes, and on a GPU its gradients."""

from __future__ import annotations

from functools import partial
from itertools import product

import pytest
import torch
from lora_cases import ALL, check, operands, upstream_of

from fuselab.ops import lora_linear
from fuselab.ops._shared.activations import ACTIVATIONS
from fuselab.ops._shared.saved import save_layer as save
from fuselab.ops.lora_linear import cuda_launch, triton_launch, wgmma_launch
from fuselab.ops.lora_linear.reference import gradient, reference
from fuselab.runtime.fallback import strict
from fuselab.runtime.tuning import forced

KERNELS = (reference, cuda_launch.backward)  # eager compiles nothing
on_gpu = partial(operands, device="cuda", dtype=torch.bfloat16)


# Without a GPU.


@pytest.mark.parametrize(
    ("sizes", "blocks"),
    [((8, 8), 1), ((512, 512), 1), ((520, 8), 2), ((8, 1024), 2), ((1032, 8), 4), ((4096, 8), 8)],
)
def test_a_cluster_owns_whole_rows(sizes, blocks):
    assert cuda_launch._cluster(*sizes) == blocks


def test_every_block_fits_hopper():
    for case in product((1, 2, 4, 8), (1, 2), ("relu", "identity")):
        assert cuda_launch._block_bytes(*case) <= 227 * 1024


def test_wgmma_multiplies_from_one_round_of_its_tiles_on(monkeypatch):
    monkeypatch.setattr(cuda_launch, "multiprocessors", lambda device: 132)
    for module in (wgmma_launch, wgmma_launch.wgmma):
        monkeypatch.setattr(module, "is_hopper", lambda device: True)

    def kernels(rows, inner, columns, rank=16, needs=ALL):
        shapes = ((rows, columns), (rows, inner), (columns, inner), (rank, inner))
        grad, x, weight, a = (torch.empty(shape).bfloat16() for shape in shapes)
        return [*map(str, cuda_launch.configs(needs, grad, None, x, weight, None, a))]

    triton, wgmma = "product=triton", "product=wgmma"
    assert kernels(4096, 1024, 64) == [triton, wgmma]  # 128 tiles
    assert kernels(33 * 128, 1024, 64) == kernels(4097, 1024, 64) == [wgmma, triton]
    assert kernels(33 * 128, 1024, 64, 12) == [triton]
    assert kernels(33 * 128, 1024, 64, needs=(False, *ALL[1:])) == [triton]


def test_what_it_does_not_take():
    half = partial(operands, dtype=torch.bfloat16)
    for args, reason in (
        (operands(8, 8, 8, 4), "float16 and bfloat16"),
        (half(8, 8, 8, 17), "ranks up to 16"),
        (half(8, 20, 8, 4), "multiples of 8"),
        (half(8, 8, 12, 4), "multiples of 8"),
        (half(8, 8, 4104, 4), "up to 4096"),
    ):
        assert reason in cuda_launch.supports(*args)
    args = half(8, 8, 8, 4)
    saved = save(reference(*args), *args)
    for needs in ((True, False, False, False, True), (True, False, False, True, False)):
        assert "together" in cuda_launch.supports_backward(needs, torch.empty(8, 8), *saved)


# On a GPU.


@pytest.fixture
def no_fallback():
    with strict():
        yield


gpu = (pytest.mark.gpu, pytest.mark.usefixtures("no_fallback"))


def on_a_gpu(test):
    for mark in gpu:
        test = mark(test)
    return test


def check_all(args, upstream=None):
    """Both kernels of the input's gradient."""
    saved = save(upstream_of(args[0].new_empty(args[0].shape[0], args[1].shape[0])), *args)
    for config in cuda_launch.configs(ALL, args[0], *saved):
        with forced(wgmma_launch.OP_NAME, "cuda_backward", config) as asked:
            check(*KERNELS, args, upstream)
            assert asked.keys


@on_a_gpu
@pytest.mark.parametrize(
    "sizes",
    [
        *((1, 8, 8), (15, 64, 72), (16, 512, 512), (17, 504, 8), (2113, 72, 512)),
        *((33, 520, 1024), (33, 1024, 520), (2113, 1016, 8), (130, 2048, 1032), (130, 8, 2040)),
        *((650, 4096, 4096), (257, 2056, 136), (257, 136, 4088), (40001, 128, 136)),
    ],
    ids=str,
)
def test_sizes(sizes):
    """Clusters of 1, 2, 4 and 8; less than a tile of rows, a whole one, many; strips cut short and
    empty ones; K and N of which one needs the larger cluster."""
    for rank in (8, 16):
        check_all(on_gpu(*sizes, rank))


@on_a_gpu
@pytest.mark.parametrize("rank", [8, 16])
def test_the_inputs_gradient_alone(rank):
    """One box, one step and its update; then every edge, more steps than slots, many tiles."""
    for rows, columns, inner in ((64, 64, 64), (1, 8, 8), (300, 1000, 264), (20_001, 328, 1000)):
        args = on_gpu(rows, inner, columns, rank, "identity")
        grad, grad_projection = upstream_of(args[0].new_empty(rows, columns)), args[0] @ args[3].t()
        operands = (grad, args[1], grad_projection, args[3])
        exact = grad.double() @ args[1].double() + grad_projection.double() @ args[3].double()
        ours = wgmma_launch.pull_through(*operands)
        assert ((ours.double() - exact).abs() <= 2.0**-8 * exact.abs() + 2.0**-12).all()


@on_a_gpu
@pytest.mark.parametrize("rank", [1, 2, 3, 7, 8, 9, 15, 16])
def test_ranks(rank):
    dtype = torch.float16 if rank % 8 == 7 else torch.bfloat16
    check(*KERNELS, on_gpu(517, 136, 648, rank, "tanh", dtype=dtype))


@on_a_gpu
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation):
    check(*KERNELS, on_gpu(1031, 264, 520, 16, activation))
    check(*KERNELS, on_gpu(1031, 264, 520, 8, activation, dtype=torch.float16, scale=-1.7))


@on_a_gpu
def test_rows_apart_and_factors_of_any_layout():
    args = list(on_gpu(1031, 520, 264, 12))
    padded = torch.zeros(1031, 528, device="cuda", dtype=torch.bfloat16)
    padded[:, :520] = args[0]
    args[0] = padded[:, :520]
    args[3] = args[3].t().contiguous().t()
    args[4] = args[4].repeat_interleave(2, 1)[:, ::2]
    upstream = torch.randn(1031, 272, device="cuda").bfloat16()[:, :264]
    assert cuda_launch.supports_backward(ALL, upstream, *save(reference(*args), *args)) is None
    check(*KERNELS, args, upstream)
    expanded = upstream[:1].expand(1031, 264)
    assert "overlap" in cuda_launch.supports_backward(ALL, expanded, *save(reference(*args), *args))


@on_a_gpu
@pytest.mark.parametrize("rows", [17, 32])
def test_infinity_stays_where_eager_has_it(rows):
    """Rows and ranks past the last are zeros, which times infinity is NaN."""
    for place, at in ((0, (3, 7)), (3, (2, 5)), (4, (5, 2))):
        args = on_gpu(rows, 72, 64, 5, "identity")
        args[place][at] = torch.inf
        output = reference(*args)
        upstream = upstream_of(output.nan_to_num())
        saved = save(output, *args)
        ours = cuda_launch.backward(ALL, upstream, *saved)
        for place_of_grad in (0, 3, 4):
            expected = gradient(ALL, upstream, *saved)[place_of_grad]
            assert torch.equal(ours[place_of_grad].isfinite(), expected.isfinite())


@on_a_gpu
def test_without_the_inputs_gradient_and_with_a_scale_behind_a_pointer():
    for activation in ("relu", "identity"):
        args = on_gpu(2048, 512, 1024, 16, activation)
        output = triton_launch.forward(*args)
        upstream, saved = upstream_of(output), save(output, *args)
        everything = cuda_launch.backward(ALL, upstream, *saved)
        needs = (False, False, False, True, True)
        grads = cuda_launch.backward(needs, upstream, *saved)
        assert grads[0] is None
        pointed = (*saved[:6], torch.full((), 0.5, device="cuda"), activation)
        for ours in (grads, cuda_launch.backward(ALL, upstream, *pointed)):
            for place in (3, 4):
                assert torch.equal(ours[place], everything[place])


@on_a_gpu
@pytest.mark.parametrize("sizes", [(65536, 512, 512), (8192, 4096, 4096)], ids=str)
def test_results_repeat_to_the_bit(sizes):
    """Where a late message or an early one of the next tile would show."""
    args = on_gpu(*sizes, 16)
    output = triton_launch.forward(*args)
    upstream, saved = upstream_of(output), save(output, *args)
    needs = (False, False, False, True, True)
    first = cuda_launch.backward(needs, upstream, *saved)
    for _ in range(20):
        for place, grad in enumerate(cuda_launch.backward(needs, upstream, *saved)):
            assert grad is None or torch.equal(grad, first[place])


@on_a_gpu
def test_it_is_the_backward_of_the_implementation_cuda():
    args = [value.requires_grad_() if place in (0, 3, 4) else value
            for place, value in enumerate(on_gpu(4096, 1024, 1024, 16))]  # fmt: skip
    leaves = [args[place] for place in (0, 3, 4)]
    output = lora_linear(*args, implementation="cuda")
    upstream = upstream_of(output.detach())
    ours = torch.autograd.grad(output, leaves, upstream)
    direct = cuda_launch.backward(ALL, upstream, *save(output.detach(), *args))
    for mine, known in zip(ours, (direct[0], *direct[3:]), strict=True):
        assert torch.equal(mine, known)


@on_a_gpu
@pytest.mark.large_memory
def test_more_than_2_to_the_31_elements():
    rows, width = 2**21 + 3, 1032
    _, weight, bias, a, b, scale, _ = on_gpu(1, width, width, 8)
    x = torch.zeros(rows, width, dtype=torch.bfloat16, device="cuda")
    x[-1] = torch.randn(width, device="cuda")
    args = (x, weight, bias, a, b, scale, "relu")
    output = triton_launch.forward(*args)
    upstream = torch.zeros_like(output)
    upstream[-1] = 1
    grads = cuda_launch.backward(ALL, upstream, *save(output, *args))
    last = (x[-1:], *args[1:])
    expected = gradient(ALL, upstream[-1:], *save(output[-1:], *last))
    torch.testing.assert_close(grads[0][-1:], expected[0], rtol=2e-2, atol=2e-2)
    assert not grads[0][:-1].any()
    for place in (3, 4):
        torch.testing.assert_close(grads[place], expected[place], rtol=2e-2, atol=2e-2)
