"""What the tests of the pointwise operators share: inputs, layouts, and the bar."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fuselab.ops.add_mul_activation import launch
from fuselab.ops.add_mul_activation.op import save
from fuselab.ops.add_mul_activation.reference import reference

Forward = Callable[..., Tensor]
Backward = Callable[..., launch.Gradients]


def normal(*shape: int, dtype: torch.dtype, seed: int = 0, device: str = "cpu") -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(shape, generator=generator)).to(device, dtype)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda tensor: tensor,
    "transposed": lambda tensor: tensor.t().contiguous().t(),
    "padded_rows": lambda tensor: torch.nn.functional.pad(tensor, (1, 2))[:, 1:-2],
    "every_other": lambda tensor: tensor.repeat_interleave(2, 1)[:, ::2],
    "one_row": lambda tensor: tensor[:1].expand_as(tensor),
    "one_column": lambda tensor: tensor[:, :1].expand_as(tensor),
}


def assert_within_bar(ours: Tensor, eager: Tensor, exact: Tensor, what: str = "") -> None:
    """At most 4 times eager's largest error plus 2 ulp (8 in float64, whose truth is no better),
    both of the tensor's largest value; NaN and infinities where eager or the truth has them
    (eager's vectorised gelu makes NaN of +inf on the CPU)."""
    assert ours.shape == exact.shape and ours.dtype == eager.dtype
    if ours.numel() == 0:
        return
    finite = exact.isfinite() & eager.isfinite()
    same = (ours == eager) | (ours.isnan() & eager.isnan()) | (ours.double() == exact)
    assert bool((finite | same).all()), f"{what}: NaN or infinity differs from eager"
    if not finite.any():
        return
    truth = exact[finite].double()
    error = (ours[finite].double() - truth).abs().max()
    allowed = (eager[finite].double() - truth).abs().max()
    ulp = torch.finfo(ours.dtype).eps * truth.abs().max()
    slack = 8 if ours.dtype == torch.float64 else 2
    assert error <= 4 * allowed + slack * ulp, f"{what}: off by {error}, eager by {allowed}"


def check(
    forward: Forward,
    backward: Backward,
    input: Tensor,
    update: Tensor,
    bias: Tensor | None,
    activation: str = "relu",
    scale: float = 0.7,
    upstreams: Sequence[Tensor] | None = None,
) -> None:
    """Output and every gradient, each alone and all together, against float64 and eager."""
    output = forward(input, update, bias, scale, activation)
    leaves = [
        None if t is None else t.detach().clone().requires_grad_() for t in (input, update, bias)
    ]
    exact_leaves = [
        None if t is None else t.detach().double().requires_grad_() for t in (input, update, bias)
    ]
    eager = reference(*leaves, scale, activation)
    exact = reference(*exact_leaves, scale, activation)
    assert_within_bar(output, eager.detach(), exact.detach(), f"{activation} forward")
    assert output.stride() == torch.empty_like(input).stride()
    saved = launch.Saved(
        activation=activation,
        scale=scale,
        **dict(
            zip(
                ("output", "input", "update", "bias"),
                save(output, input, update, bias, scale, activation)[:4],
                strict=True,
            )
        ),
        input_dtype=input.dtype,
        update_dtype=update.dtype,
        bias_dtype=None if bias is None else bias.dtype,
    )
    if upstreams is None:
        generator = torch.Generator().manual_seed(1)
        random = torch.randn(output.shape, generator=generator).to(output)
        upstreams = (random, torch.full((), 0.3).to(output).expand(output.shape))
    for upstream in upstreams:
        for needs in (
            (True, True, bias is not None),
            (True, False, False),
            (False, True, False),
            (False, False, bias is not None),
        ):
            grads = backward(needs, upstream, saved)
            assert [grad is not None for grad in grads] == list(needs)
            if not any(needs):
                continue
            places = [place for place in range(3) if needs[place]]
            wanted = [leaves[place] for place in places]
            wanted_exact = [exact_leaves[place] for place in places]
            eager_grads = torch.autograd.grad(eager, wanted, upstream, retain_graph=True)
            exact_grads = torch.autograd.grad(
                exact, wanted_exact, upstream.double(), retain_graph=True
            )
            for place, one, other in zip(places, eager_grads, exact_grads, strict=True):
                what = f"{activation} gradient {place} of needs {needs}"
                assert_within_bar(grads[place], one, other, what)
