"""The GIoU losses on a GPU: the CUDA and Triton kernels over counts, dtypes, layouts and sizes."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from giou_cases import (
    COUNTS,
    REDUCTIONS,
    assert_right,
    by_hand,
    layouts,
    padded_batch,
    pairs,
    same,
    special_pairs,
    tying_pairs,
)

from fuselab.ops import generalized_box_iou_loss, padded_generalized_box_iou_loss
from fuselab.ops._shared.dtypes import FLOATING
from fuselab.ops.generalized_box_iou_loss import (
    configs,
    cpu_launch,
    cuda_launch,
    triton_launch,
)
from fuselab.ops.generalized_box_iou_loss.configs import SMALL_COUNT
from fuselab.runtime import tuning
from fuselab.runtime.fallback import strict

pytestmark = pytest.mark.gpu
dtypes = pytest.mark.parametrize("dtype", FLOATING, ids=lambda dtype: str(dtype)[6:])
reductions = pytest.mark.parametrize("reduction", REDUCTIONS)
launchers = pytest.mark.parametrize(
    "launcher", [cuda_launch, triton_launch], ids=lambda module: module.__name__.split(".")[-1]
)
implementations = pytest.mark.parametrize("implementation", ["cuda", "triton"])


@pytest.fixture(autouse=True)
def no_fallback():
    with strict():
        yield


def on_gpu(boxes: torch.Tensor) -> torch.Tensor:
    """On the GPU with the same strides and offset."""
    storage = torch.empty(0, dtype=boxes.dtype).set_(boxes.untyped_storage()).cuda()
    return storage.as_strided(boxes.shape, boxes.stride(), boxes.storage_offset())


@implementations
@dtypes
def test_values_worked_out_by_hand(dtype, implementation):
    first, second, expected = (tensor.cuda() for tensor in by_hand(dtype))
    ours = generalized_box_iou_loss(first, second, implementation=implementation)
    torch.testing.assert_close(ours.double(), expected, rtol=0, atol=4e-7)


@launchers
@reductions
def test_counts(launcher, reduction):
    """The last two lie on either side of what one CUDA block reduces, then more than one wave."""
    for count in (*COUNTS, 1023, 1025, SMALL_COUNT, SMALL_COUNT + 1, 1_500_001):
        first, second = (boxes.cuda() for boxes in pairs(count, seed=count))
        assert_right(launcher, first, second, reduction)


@launchers
@dtypes
@reductions
def test_mixed_dtypes_ties_and_special_values(launcher, dtype, reduction):
    found = [pairs(3, 21, dtypes=(dtype, dtype)), tying_pairs(300, dtype), special_pairs(dtype)]
    found += [padded_batch(5, 21, dtypes=(dtype, dtype)), padded_batch(9999, dtypes=(dtype, dtype))]
    for first, second in found:
        assert_right(launcher, first.cuda(), second.cuda(), reduction)
    # What is read is converted alike whatever becomes of it, and whichever gradients are wanted.
    for other in FLOATING if reduction == "none" else ():
        first, second = (boxes.cuda() for boxes in pairs(3, 21, dtypes=(dtype, other)))
        assert_right(launcher, first, second, alone=False)


@launchers
@reductions
@pytest.mark.parametrize("layout", layouts())
def test_layouts(launcher, layout, reduction):
    first, second = (on_gpu(boxes) for boxes in layouts()[layout])
    assert_right(launcher, first, second, reduction, alone=reduction == "none")


@launchers
def test_the_loss_is_that_of_the_cpu_to_the_bit(launcher):
    """All round as eager does: no FMA, IEEE division."""
    for first, second in (pairs(10_000), tying_pairs(10_000, torch.float32)):
        ours = launcher.forward(first.cuda(), second.cuda(), "none", 1e-7)
        assert torch.equal(ours.cpu(), cpu_launch.forward(first, second, "none", 1e-7))


@reductions
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_every_candidate_of_tuning_is_right(reduction, dtype):
    first, second = (boxes.cuda() for boxes in pairs(20_001, dtypes=(dtype, dtype)))
    name = f"fuselab::{'padded_' if reduction == 'padded' else ''}generalized_box_iou_loss"
    for launcher, implementation in ((cuda_launch, "cuda"), (triton_launch, "triton")):
        candidates = getattr(configs, implementation)(first, second, reduction)
        for config in candidates:
            with tuning.forced(name, implementation, config):
                assert_right(launcher, first, second, reduction)
        candidates = getattr(configs, f"{implementation}_backward")(
            (True, True), None, first, second, reduction
        )
        for config in candidates:
            with tuning.forced(name, f"{implementation}_backward", config):
                assert_right(launcher, first, second, reduction)


@launchers
def test_upstream_gradients_of_any_stride(launcher):
    first, second = (boxes.cuda() for boxes in pairs(9, 14))
    for grad in (
        torch.randn(14, 9).t(),
        torch.randn(9, 28)[:, ::2],
        torch.randn(9, 1).expand(9, 14),
        torch.randn(14).expand(9, 14),
    ):
        grad = on_gpu(grad)
        arguments = (first, second, "none", 1e-7)
        ours = launcher.backward((True, True), grad, *arguments)
        expected = launcher.backward((True, True), grad.contiguous(), *arguments)
        assert same(ours[0], expected[0]) and same(ours[1], expected[1])


@launchers
@reductions
def test_every_run_gives_the_same_bits(launcher, reduction):
    first, second = (boxes.cuda() for boxes in pairs(3_000_001))
    losses = [launcher.forward(first, second, reduction, 1e-7) for _ in range(5)]
    assert all(torch.equal(losses[0], loss) for loss in losses[1:])


@implementations
def test_values_and_gradients_of_torchvision(implementation):
    ops = pytest.importorskip("torchvision.ops")
    for dtype in FLOATING:
        for boxes in (pairs(2000, dtypes=(dtype, dtype)), tying_pairs(2000, dtype)):
            first, second = (tensor.cuda().requires_grad_() for tensor in boxes)
            for reduction in ("none", "mean", "sum"):
                ours, theirs = (
                    function(first, second, reduction=reduction, eps=1e-3)
                    for function in (
                        partial(generalized_box_iou_loss, implementation=implementation),
                        ops.generalized_box_iou_loss,
                    )
                )
                assert ours.dtype == theirs.dtype
                torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=2e-6)
                grad = torch.randn_like(ours)
                for one, other in zip(
                    torch.autograd.grad(ours, (first, second), grad),
                    torch.autograd.grad(theirs, (first, second), grad),
                    strict=True,
                ):
                    rounding = 4 * torch.finfo(dtype).eps * max(float(other.abs().max()), 1e-6)
                    torch.testing.assert_close(one, other, rtol=0, atol=max(rounding, 1e-12))


@implementations
def test_padding_does_not_synchronise(implementation):
    pred, target = (boxes.cuda().requires_grad_() for boxes in padded_batch(40, 300))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss = padded_generalized_box_iou_loss(pred, target, implementation=implementation)
        grads = torch.autograd.grad(loss, (pred, target))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.isfinite(grad).all() and grad.abs().max() > 0 for grad in grads)


@implementations
@pytest.mark.parametrize("batch", [32, 64])
def test_forward_and_backward_in_a_graph(implementation, batch):
    """Either side of SMALL_COUNT at 256 boxes: replays count the boxes of new targets."""
    pred, target = (boxes.cuda() for boxes in padded_batch(batch, 256))
    pred.requires_grad_()

    def step():
        loss = padded_generalized_box_iou_loss(pred, target, implementation=implementation)
        clean = (torch.where(target[..., 3:] > 0, boxes, 1.0) for boxes in (pred, target))
        plain = generalized_box_iou_loss(*clean, "mean", implementation=implementation)
        return loss.detach(), *torch.autograd.grad(loss + plain, pred)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for seed in (1, 2):
        with torch.no_grad():
            for static, fresh in zip(
                (pred, target), padded_batch(batch, 256, seed=seed), strict=True
            ):
                static.copy_(fresh)
            target[: batch // 2 * seed // 2] = 0
        graph.replay()
        for ours, expected in zip(captured, step(), strict=True):
            assert torch.equal(ours, expected)


@implementations
@pytest.mark.parametrize("reduction", ["none", "mean", "padded"])
@pytest.mark.large_memory
def test_more_than_2_to_the_31_elements(implementation, reduction):
    """Offsets past 32 bits: the first and the last boxes' losses and gradients are right."""
    count = 2**29 + 9
    needed_bytes = (3 * 4 * 2 + 2 * 4) * count + 2**31
    if torch.cuda.mem_get_info()[0] < needed_bytes:
        pytest.skip(f"needs {needed_bytes / 2**30:.0f} GiB of free GPU memory")
    ends = slice(0, 1000), slice(count - 1000, count)
    first, second = (torch.zeros(count, 4, dtype=torch.float16, device="cuda") for _ in range(2))
    for seed, end in enumerate(ends):
        for boxes, values in zip((first, second), pairs(1000, seed=seed), strict=True):
            boxes[end] = values.to(boxes)
    first.requires_grad_()
    if reduction == "padded":  # all but the ends is padding
        loss = padded_generalized_box_iou_loss(first, second, implementation=implementation)
        valid = 2000
    else:
        loss = generalized_box_iou_loss(first, second, reduction, implementation=implementation)
        valid = count if reduction == "mean" else 1
    loss.backward(torch.full_like(loss, valid))
    assert first.grad is not None
    total = 0.0
    for end in ends:
        leaf = first.detach()[end].requires_grad_()
        alone = generalized_box_iou_loss(leaf, second[end], implementation="reference")
        total += alone.double().sum().item()
        if reduction == "none":
            assert torch.equal(loss[end], alone)
        (expected,) = torch.autograd.grad(alone.sum(), leaf)
        torch.testing.assert_close(first.grad[end], expected, rtol=2e-3, atol=1e-6)
    # Empty boxes in one place have the loss 1.
    if reduction != "none":
        others = count - 2000 if reduction == "mean" else 0
        assert loss.item() == pytest.approx((total + others) / valid, rel=1e-6)
    del first, second, loss
    torch.cuda.empty_cache()


@implementations
def test_calls_that_hit_a_launch_plan_see_alignment_and_shape(implementation):
    """Same kernel arguments but for the tensors: a plan must not outlive what chose its loads."""
    storage = pairs(80)[0].cuda().flatten()
    other = pairs(64, seed=1)[0].cuda()
    call = partial(generalized_box_iou_loss, implementation=implementation)
    for offset in (0, 4, 1, 2, 0, 3):
        boxes = storage[offset : offset + 256].view(64, 4)
        expected = generalized_box_iou_loss(boxes, other, implementation="reference")
        assert torch.equal(call(boxes, other), expected)
    for count in (64, 60, 64, 33):
        boxes = storage[: 4 * count].view(count, 4)
        for eps in (1e-7, 0.5):
            expected = generalized_box_iou_loss(
                boxes, other[:count], eps=eps, implementation="reference"
            )
            assert torch.equal(call(boxes, other[:count], eps=eps), expected)
