"""outer_interaction_linear on Hopper's warpgroup matrix instructions."""

from __future__ import annotations

import re
import subprocess
from functools import partial
from pathlib import Path

import pytest
import torch
from interaction_cases import (
    check,
    check_alone,
    check_output,
    layer,
    layouts,
    moved,
    normal,
    special_vectors,
)

from fuselab.errors import UnsupportedError
from fuselab.ops import outer_interaction_linear
from fuselab.ops._shared.activations import ACTIVATIONS
from fuselab.ops.outer_interaction_linear import folding, triton_launch, wgmma_launch
from fuselab.ops.outer_interaction_linear.op import OP
from fuselab.runtime.fallback import strict

HALF = (torch.bfloat16, torch.float16)
halves = pytest.mark.parametrize("dtype", HALF, ids=lambda dtype: str(dtype)[6:])
run = partial(check, OP, wgmma_launch.forward, wgmma_launch.backward)


@pytest.fixture
def hopper():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("wgmma is for compute capability 9.0")
    with strict():
        yield


def on_gpu(*values):
    return tuple(value.cuda() if isinstance(value, torch.Tensor) else value for value in values)


# Without a GPU.


def test_every_kernel_fits_a_block_of_hopper():
    for needed in (
        wgmma_launch._FORWARD_BYTES,
        wgmma_launch._WEIGHT_BYTES,
        wgmma_launch._INPUT_BYTES,
    ):
        assert needed <= 227 * 1024


def test_no_product_waits_for_the_one_before(tmp_path):
    """ptxas gives up overlapping products, and says nothing, where it finds too few registers."""
    triton = pytest.importorskip("triton")
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    cubin = tmp_path / "kernels.cubin"
    cubin.write_bytes(wgmma_launch.WGMMA.compile_many(wgmma_launch.CUDA_EXPRESSIONS, "sm_90a"))
    sass = subprocess.run([tool, "-sass", cubin], capture_output=True, text=True, check=True).stdout
    _, *kernels = sass.split("Function : ")
    assert len(kernels) == len(wgmma_launch.CUDA_EXPRESSIONS)
    for kernel in kernels:
        name = kernel.split()[0]
        assert "HGMMA" in kernel, name
        assert not re.search(r"\b(LDL|STL)\b", kernel), f"{name} spills"
        assert kernel.count("WARPGROUP.DEPBAR.LE gsb0, 0x0") == 1, f"{name} waits"


# On a GPU, what is simplest first: a fault there is the reason of all that follow.


@pytest.mark.gpu
def test_forward_takes_each_pair_from_its_place(hopper):
    """Small whole numbers: exact, whatever the order of the sums."""
    generator = torch.Generator().manual_seed(0)

    def whole(*shape):
        return torch.randint(-3, 4, shape, generator=generator).bfloat16().cuda()

    for tables in (0, 1, 5):
        elements = 16 * (tables + 1)
        dense, embeddings = whole(9, 16), whole(9, tables, 16)
        for pair in (0, 1, 16, 17, elements - 1, elements**2 - 1, elements * 15 + 4):
            weight = torch.zeros(8, elements**2, dtype=torch.bfloat16, device="cuda")
            weight[5, pair] = 1
            ours = wgmma_launch.forward(dense, embeddings, weight, None, "identity")
            expected = OP.reference(dense, embeddings, weight)
            torch.testing.assert_close(ours, expected, rtol=0, atol=0, msg=f"{tables} {pair}")


@pytest.mark.gpu
def test_gradients_go_to_each_element_and_pair(hopper):
    generator = torch.Generator().manual_seed(1)

    def whole(*shape):
        return torch.randint(-2, 3, shape, generator=generator).bfloat16().cuda()

    for tables in (0, 2):
        elements = 16 * (tables + 1)
        inputs = whole(7, 16), whole(7, tables, 16), whole(8, elements**2), None, "identity"
        for sample, column in ((0, 0), (3, 5), (6, 7)):
            upstream = torch.zeros(7, 8, dtype=torch.bfloat16, device="cuda")
            upstream[sample, column] = 1
            needs = (True, True, True, False)
            saved = OP.gradient.save(None, *inputs)
            ours = wgmma_launch.backward(needs, upstream, *saved)
            expected = OP.gradient.reference(needs, upstream.double(), *double(saved))
            for mine, true in zip(ours[:3], expected[:3], strict=True):
                torch.testing.assert_close(mine, true.bfloat16(), rtol=0, atol=0)


def double(values):
    return [value.double() if isinstance(value, torch.Tensor) else value for value in values]


@pytest.mark.gpu
@halves
@pytest.mark.parametrize(
    "shape",
    [
        *((1, 0, 16, 8), (3, 1, 16, 8), (8, 2, 16, 64), (65, 3, 16, 72), (127, 2, 16, 264)),
        *((128, 4, 16, 256), (129, 4, 16, 136), (257, 1, 32, 520), (300, 8, 16, 200)),
        *((64, 26, 16, 32), (1000, 2, 48, 128)),
    ],
    ids=str,
)
def test_shapes(hopper, shape, dtype):
    run(*on_gpu(*layer(*shape, dtype)), "identity")


@pytest.mark.gpu
@halves
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(hopper, activation, dtype):
    dense, embeddings, weight, bias = on_gpu(*layer(140, 3, 16, 136, dtype))
    run(dense, embeddings, weight, bias, activation)
    run(dense, embeddings, weight, None, activation)


@pytest.mark.gpu
@halves
def test_in_pieces(hopper, dtype, monkeypatch):
    """Three rows of tiles, a piece each: later ones add to the first one's shares. With gelu in the
    memory of the pre-activation's, too."""
    inputs = on_gpu(*layer(200, 9, 16, 264, dtype))
    whole = wgmma_launch.forward(*inputs, "identity")
    monkeypatch.setattr(folding, "PIECE_BYTES", 1)
    run(*inputs, "identity")
    run(*inputs, "gelu")
    ours = wgmma_launch.forward(*inputs, "identity")
    torch.testing.assert_close(ours, whole, rtol=0.01, atol=0.01)


@pytest.mark.gpu
@halves
@pytest.mark.parametrize("tables", [0, 1, 3])
def test_special_values(hopper, dtype, tables):
    dense, embeddings = special_vectors(dtype, max(tables, 2), 16)
    _, _, weight, bias = layer(1, tables, 16, 8, dtype)
    run(*on_gpu(dense, embeddings[:, :tables], weight, bias), "identity")
    dense, embeddings, weight, bias = layer(6, tables, 16, 8, dtype)
    for place in (0, 1):
        dense[place, place] = torch.finfo(dtype).max
    inputs = on_gpu(dense, embeddings, weight * 4, bias)
    check_output(OP, wgmma_launch.forward, *inputs, "identity")


@pytest.mark.gpu
def test_upstream_gradients_and_weights_of_any_stride(hopper):
    dense, embeddings, weight, bias = on_gpu(*layer(70, 2, 16, 40, torch.bfloat16))
    storage = normal(70 * 40 + 1, dtype=torch.bfloat16, seed=5).cuda()
    for upstream in (
        torch.ones((), dtype=torch.bfloat16, device="cuda").expand(70, 40),
        normal(40, 70, dtype=torch.bfloat16).cuda().t(),
        storage[1:].view(70, 40),
    ):
        run(dense, embeddings, weight, bias, "identity", upstream=upstream)
    room = normal(40, 48 * 48 + 3, dtype=torch.bfloat16).cuda() / 48
    run(dense, embeddings, room[:, 1 : 48 * 48 + 1], bias, "identity")
    run(dense, embeddings, weight.t().contiguous().t(), bias[:1].expand(40), "identity")


@pytest.mark.gpu
@pytest.mark.parametrize("layout", layouts(70, 2, 16))
def test_vectors_of_any_stride(hopper, layout):
    vectors = (moved(tensor, torch.bfloat16) for tensor in layouts(70, 2, 16)[layout])
    _, _, weight, bias = layer(1, 2, 16, 40, torch.bfloat16)
    run(*vectors, *on_gpu(weight, bias), "identity")


@pytest.mark.gpu
def test_each_gradient_alone(hopper):
    inputs = on_gpu(*layer(70, 3, 16, 40, torch.bfloat16))
    check_alone(OP, wgmma_launch.forward, wgmma_launch.backward, *inputs, "relu")


@pytest.mark.gpu
def test_repeats_to_the_bit(hopper):
    """A race of loads, multiplications or stores would show in one of many launches."""
    inputs = on_gpu(*layer(700, 26, 16, 264, torch.bfloat16))
    first = wgmma_launch.forward(*inputs, "relu")
    upstream = normal(700, 264, dtype=torch.bfloat16, seed=7).cuda()
    saved = OP.gradient.save(first, *inputs, "relu")
    grads = wgmma_launch.backward((True,) * 4, upstream, *saved)
    for _ in range(20):
        assert torch.equal(wgmma_launch.forward(*inputs, "relu"), first)
        again = wgmma_launch.backward((True,) * 4, upstream, *saved)
        assert all(map(torch.equal, again, grads))


@pytest.mark.gpu
def test_the_published_size_agrees_with_triton(hopper):
    inputs = on_gpu(*layer(2048, 26, 16, 512, torch.bfloat16))
    upstream = normal(2048, 512, dtype=torch.bfloat16, seed=7).cuda()
    results = []
    for kernels in (wgmma_launch, triton_launch):
        output = kernels.forward(*inputs, "identity")
        saved = OP.gradient.save(output, *inputs, "identity")
        results.append((output, *kernels.backward((True,) * 4, upstream, *saved)))
    for ours, theirs in zip(*results, strict=True):
        error = (ours.float() - theirs.float()).norm() / theirs.float().norm()
        assert error < 5e-3, f"{tuple(ours.shape)} {error}"


@pytest.mark.gpu
def test_runs_in_a_graph_and_under_autograd(hopper):
    inputs = on_gpu(*layer(64, 2, 16, 40, torch.bfloat16))
    function = partial(outer_interaction_linear, implementation="wgmma")
    leaves = [tensor.requires_grad_() for tensor in inputs]

    def step():
        output = function(*leaves, "relu")
        return output, *torch.autograd.grad(output, leaves, torch.ones_like(output))

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        leaves[0].copy_(normal(64, 16, dtype=torch.bfloat16, seed=6))
    graph.replay()
    for ours, theirs in zip(captured, step(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.gpu
def test_refuses_what_it_cannot_run(hopper):
    for args, reason in (
        (layer(4, 2, 5, 8, torch.bfloat16), "15 elements; it takes multiples of 16"),
        (layer(4, 2, 16, 9, torch.bfloat16), "9 outputs; it takes multiples of 8"),
        (layer(4, 2, 16, 8), "float16 and bfloat16"),
    ):
        with pytest.raises(UnsupportedError, match=reason):
            outer_interaction_linear(*on_gpu(*args), implementation="wgmma")
