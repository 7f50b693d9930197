"""dot_interaction and cat_interaction on the CPU: values by hand, the C++ kernels, refusals."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from interaction_cases import SHAPES, check, check_alone, layouts, normal, special_vectors, vectors

from fuselab.errors import ArgumentError, DtypeError, ShapeError
from fuselab.models.dlrm import MAIN, Dlrm
from fuselab.ops import cat_interaction, dot_interaction
from fuselab.ops.cat_interaction import triton_launch as cat_triton
from fuselab.ops.cat_interaction.op import OP as CAT
from fuselab.ops.dot_interaction import cpu_launch, cuda_launch, triton_launch
from fuselab.ops.dot_interaction.op import OP
from fuselab.runtime.fallback import strict

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
implementations = pytest.mark.parametrize("implementation", ["cpp", "reference"])
cpp = partial(check, OP, cpu_launch.forward, cpu_launch.backward)


@pytest.fixture(autouse=True)
def no_fallback():
    with strict():
        yield


@implementations
def test_by_hand(implementation):
    dense = torch.tensor([[1.0, 2.0]])
    embeddings = torch.tensor([[[3.0, 4.0], [5.0, 6.0], [7.0, 8.0]]])
    output = dot_interaction(dense, embeddings, 2, implementation=implementation)
    # (1,0) (2,0) (2,1) (3,0) (3,1) (3,2)
    assert output.tolist() == [[1, 2, 11, 17, 39, 23, 53, 83, 0, 0]]


@implementations
def test_the_models_own_interaction(implementation):
    """The order of pairs is that of fuselab.models.dlrm."""
    dense, embeddings = vectors(3, 26, 16)
    with torch.device("meta"):
        model = Dlrm(MAIN)
    expected = model.interact([dense, *embeddings.unbind(1)])
    ours = dot_interaction(dense, embeddings, implementation=implementation)
    assert ours.shape == (3, 367)
    torch.testing.assert_close(ours, expected)
    padded = dot_interaction(dense, embeddings, 1, implementation=implementation)
    assert padded.shape == (3, 368) and torch.equal(padded[:, :367], ours)
    assert not padded[:, 367].any()


@dtypes
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_cpp_shapes(shape, dtype):
    cpp(*vectors(*shape, dtype), shape[0] % 3)


@dtypes
def test_cpp_special_values(dtype):
    cpp(*special_vectors(dtype))


@pytest.mark.parametrize("layout", layouts(6, 5, 7))
def test_cpp_layouts(layout):
    cpp(*layouts(6, 5, 7)[layout])


def test_cpp_each_gradient_alone():
    check_alone(*cpp.args, *vectors(5, 3, 4), 1)


def test_cpp_upstream_gradients_of_any_stride():
    inputs = vectors(4, 3, 5)
    for upstream in (
        torch.ones(()).expand(4, 11),
        normal(4, 1).expand(4, 11),
        normal(11, 4).t(),
        normal(4, 22)[:, 1::2],
    ):
        cpp(*inputs, upstream=upstream)


@implementations
@pytest.mark.parametrize("shape", [(0, 3, 4), (3, 2, 0), (3, 0, 0), (0, 0, 0)])
def test_empty(shape, implementation):
    dense, embeddings = (tensor.requires_grad_() for tensor in vectors(*shape))
    output = dot_interaction(dense, embeddings, 1, implementation=implementation)
    count = shape[1] + 1
    assert output.shape == (shape[0], shape[2] + count * (count - 1) // 2 + 1)
    assert not output[:, shape[2] :].any()
    output.sum().backward()
    assert embeddings.grad is not None and embeddings.grad.shape == embeddings.shape


def test_first_and_second_derivatives():
    dense, embeddings = (tensor.double().requires_grad_() for tensor in vectors(2, 3, 2))
    assert torch.autograd.gradcheck(dot_interaction, (dense, embeddings, 1))
    assert torch.autograd.gradgradcheck(dot_interaction, (dense, embeddings, 1))


def test_compiles_without_a_break_and_under_autocast():
    dense, embeddings = vectors(3, 4, 5)
    compiled = torch.compile(dot_interaction, fullgraph=True, backend="eager")
    expected = OP.reference(dense, embeddings)
    torch.testing.assert_close(compiled(dense, embeddings), expected)
    with torch.autocast("cpu", torch.bfloat16):
        # As behind a linear layer: its output is bfloat16, the embeddings are not.
        ours = dot_interaction(dense.bfloat16(), embeddings)
    assert ours.dtype == torch.bfloat16
    torch.testing.assert_close(ours.float(), expected, rtol=0.02, atol=0.05)


@pytest.mark.parametrize("function", [dot_interaction, cat_interaction])
def test_refusals_name_the_argument(function):
    dense, embeddings = vectors(3, 4, 5)
    with pytest.raises(ShapeError, match=r"'dense'.*\(5,\).*\(batch, width\)"):
        function(dense[0], embeddings)
    for wrong in (embeddings[:2], embeddings[0], embeddings[..., :4]):
        with pytest.raises(
            ShapeError, match=r"'embeddings' has shape .* expected \(3, tables, 5\)"
        ):
            function(dense, wrong)
    with pytest.raises(
        DtypeError, match=r"'embeddings' is torch.float16 and 'dense' torch.float32"
    ):
        function(dense, embeddings.half())
    with pytest.raises(DtypeError, match=r"'dense' is torch\.int64"):
        function(dense.long(), embeddings.long())
    with pytest.raises(ArgumentError, match=r"'padding' is -1.*0 or more"):
        dot_interaction(dense, embeddings, -1)


def test_costs():
    args = (torch.empty(8, 16), torch.empty(8, 26, 16), 1)
    cost = OP.cost(*args)
    assert (cost.bytes_read, cost.bytes_written) == (8 * 27 * 64, 8 * 368 * 4)
    assert cost.flops == 8 * 351 * 32
    assert OP.cost_backward is not None
    cost = OP.cost_backward(*args)
    assert (cost.bytes_read, cost.bytes_written) == (8 * (27 * 64 + 367 * 4), 8 * 27 * 64)
    cost = CAT.cost(*args[:2])
    assert cost.bytes_read == cost.bytes_written == 8 * 27 * 64


def test_the_experts_spelling_is_the_same():
    inputs = vectors(5, 26, 16)
    for padding in (0, 2):
        expected = OP.reference(*inputs, padding)
        torch.testing.assert_close(OP.peers["index_select"](*inputs, padding), expected)


def test_a_row_that_is_wider_than_a_grid_is_refused():
    for columns, fits in ((65535 * 512, True), (65535 * 512 + 2, False)):
        half = columns // 2
        args = torch.empty(1, half, device="meta"), torch.empty(1, 1, half, device="meta")
        assert (cat_triton.supports(*args) is None) == fits
    assert "33553922 columns" in str(cat_triton.supports(*args))


def test_which_samples_a_warp_takes():
    """float32 vectors of 16, 16-bit ones of 16, 32, ... 128, at most 32 of them on whole chunks;
    by default those of 16."""

    def kernels(tables, width, dtype, offset=0):
        storage = torch.empty(3 * (tables + 1) * width + 8, dtype=dtype)
        embeddings = storage[offset:][: 3 * tables * width].view(3, tables, width)
        dense = torch.empty(3, width, dtype=dtype)
        grad = OP.fake(dense, embeddings, 1)
        forward = cuda_launch.configs(dense, embeddings, 1)
        backward = cuda_launch.configs_backward((True, True), grad, dense, embeddings)
        assert {config.kernel for config in backward} == {config.kernel for config in forward}
        assert backward[0].kernel == forward[0].kernel
        return {config.kernel for config in forward}, forward[0].kernel

    half, both = torch.bfloat16, {"block", "warp"}
    for args in [(26, 16, torch.float32), (31, 16, half)]:
        assert kernels(*args) == (both, "warp")
    for args in [(26, 128, half), (0, 48, torch.float16)]:
        assert kernels(*args) == (both, "block")
    left = [(32, 16, torch.float32), (26, 32, torch.float32), (26, 8, half), (26, 144, half)]
    left += [(26, 16, torch.float64), (26, 16, torch.float32, 1), (26, 16, half, 2)]
    for args in left:
        assert kernels(*args) == ({"block"}, "block")


def test_how_many_samples_a_warp_takes_first():
    for batch, samples in ((2048, 2), (65536, 8)):
        dense, embeddings = torch.empty(1, 16), torch.empty(1, 26, 16)
        halves = dense.bfloat16().expand(batch, 16), embeddings.bfloat16().expand(batch, 26, 16)
        assert cuda_launch.configs(*halves, 0)[0].samples == samples


def test_what_the_gpu_kernels_hold():
    """DLRM's sample is a warp's of 8 in a block; what fits nowhere is refused in words."""
    assert cuda_launch.sample_bytes("forward", 27, 16, 367, 4) == 28 * 64 + 367 * 4
    assert (
        cuda_launch.samples_per_block(cuda_launch.sample_bytes("forward", 27, 16, 367, 4))[0] == 8
    )
    assert cuda_launch.samples_per_block(100_000) == (1,)
    wide = torch.empty(1, 4096, device="meta"), torch.empty(1, 26, 4096, device="meta"), 0
    assert "shared memory" in str(cuda_launch.supports(*wide))
    assert "at most 256 elements" in str(triton_launch.supports(*wide))
    args = torch.empty(1, 16, device="meta"), torch.empty(1, 26, 16, device="meta"), 0
    assert cuda_launch.supports(*args) is triton_launch.supports(*args) is None
    for dtype, fits in ((torch.bfloat16, True), (torch.float32, False)):
        large = torch.empty(1, 128, 256, device="meta", dtype=dtype)
        # Compiled for sm_90, float32 asks for 262,144 bytes, bfloat16 for 131,072.
        assert (triton_launch.supports(large[:, 0], large[:, 1:], 0) is None) == fits


def test_cat_copies_and_its_gradients_are_views():
    for shape in ((0, 3, 4), (3, 0, 5), (3, 2, 0), (7, 26, 16)):
        dense, embeddings = (tensor.requires_grad_() for tensor in vectors(*shape))
        output = cat_interaction(dense, embeddings)
        assert torch.equal(output, torch.cat([dense, embeddings.flatten(1)], 1))
        for upstream in (
            normal(*output.shape, seed=5),
            normal(*output.shape[::-1], seed=5).t(),
            torch.ones(()).expand(output.shape),
        ):
            grads = torch.autograd.grad(output, (dense, embeddings), upstream, retain_graph=True)
            assert [grad.shape for grad in grads] == [dense.shape, embeddings.shape]
            assert torch.equal(grads[0], upstream[:, : shape[2]])
            assert torch.equal(grads[1].flatten(1), upstream[:, shape[2] :])
            memory = upstream.untyped_storage().data_ptr()
            assert all(grad.untyped_storage().data_ptr() == memory for grad in grads)


def test_gradients_of_cat_are_copies_in_a_graph():
    for grad_output in (normal(7, 16, seed=5), normal(16, 7, seed=5).t()):
        grads = torch.ops.fuselab.cat_interaction_backward((True, True), grad_output, 3, 4, "auto")
        memory = grad_output.untyped_storage().data_ptr()
        assert all(grad.untyped_storage().data_ptr() != memory for grad in grads)
        assert torch.equal(torch.cat([grads[0], grads[1].flatten(1)], 1), grad_output)
