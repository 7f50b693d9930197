"""What the tests of the pointwise operators share: inputs, layouts, and the bar."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mpmath
import torch
from torch import Tensor

from fuselab.ops.add_mul_activation import layout
from fuselab.ops.add_mul_activation.op import save
from fuselab.ops.add_mul_activation.reference import reference

Forward = Callable[..., Tensor]
Backward = Callable[..., layout.Gradients]


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


# How a tensor to be written over may lie in memory; the last two are not dense.
DENSE_IN_MEMORY = ("contiguous", "transposed", "offset", "padded_rows", "every_other")


def writable(layout: str, values: Tensor) -> tuple[Tensor, Tensor]:
    """A copy of ``values`` in that layout, and all of the memory that it lies in."""
    rows, columns = values.shape
    memory = values.new_full((2 * rows * columns + 8 * rows,), 77.0)
    tensor = {
        "contiguous": lambda: memory[: values.numel()].view(rows, columns),
        "transposed": lambda: memory[: values.numel()].view(columns, rows).t(),
        "offset": lambda: memory[1 : values.numel() + 1].view(rows, columns),
        "padded_rows": lambda: memory.view(rows, -1)[:, 3 : columns + 3],
        "every_other": lambda: memory.view(rows, -1)[:, : 2 * columns : 2],
    }[layout]()
    return tensor.copy_(values), memory


def assert_within_bar(
    ours: Tensor, eager: Tensor, exact: Tensor, what: str = "", eager_exact: Tensor | None = None
) -> None:
    """At most 4 times eager's largest error plus 2 ulp, both of the tensor's largest value; NaN and
    infinities where eager or the truth has them (eager's vectorised gelu makes NaN of +inf on the
    CPU).

    In float64 the truth is eager itself, which errs: its 1 - tanh^2 of gelu_tanh by 27 ulp on a GPU
    where ours errs by 2. ``eager`` is then float32 and ``eager_exact`` float64 on the same inputs;
    64 times its error counts, at float64's rounding (x at which tanh becomes 1 is larger there),
    and 8 ulp. ``assert_float64`` is the sharp test."""
    assert ours.shape == exact.shape
    if ours.numel() == 0:
        return
    eager_exact = exact if eager_exact is None else eager_exact
    factor, slack = (64 * 2.0**-29, 8) if ours.dtype == torch.float64 else (4, 2)
    finite = exact.isfinite() & eager.isfinite()
    same = (ours == eager) | (ours.isnan() & eager.isnan()) | (ours.double() == exact)
    assert bool((finite | same).all()), f"{what}: NaN or infinity differs from eager"
    if not finite.any():
        return
    truth = exact[finite].double()
    error = (ours[finite].double() - truth).abs().max()
    allowed = factor * (eager[finite].double() - eager_exact[finite]).abs().max()
    ulp = torch.finfo(ours.dtype).eps * truth.abs().max()
    assert error <= allowed + slack * ulp, f"{what}: off by {error}, {allowed} allowed and {ulp=}"


_SLOPE = 2 * mpmath.sqrt(2 / mpmath.pi)
_CUBIC = mpmath.mpf("0.044715")


def _sigmoid(x: mpmath.mpf) -> mpmath.mpf:
    return 1 / (1 + mpmath.exp(-x))


def _gelu_tanh(x: mpmath.mpf) -> tuple[mpmath.mpf, mpmath.mpf]:
    gate = _sigmoid(_SLOPE * (x + _CUBIC * x**3))
    return x * gate, gate + x * gate * (1 - gate) * _SLOPE * (1 + 3 * _CUBIC * x**2)


# The activation and its derivative.
EXACT: dict[str, Callable[[mpmath.mpf], tuple[mpmath.mpf, mpmath.mpf]]] = {
    "gelu": lambda x: (x * mpmath.ncdf(x), mpmath.ncdf(x) + x * mpmath.npdf(x)),
    "gelu_tanh": _gelu_tanh,
    "silu": lambda x: (x * _sigmoid(x), _sigmoid(x) * (1 + x * _sigmoid(-x))),
    "sigmoid": lambda x: (_sigmoid(x), _sigmoid(x) * _sigmoid(-x)),
    "tanh": lambda x: (mpmath.tanh(x), mpmath.sech(x) ** 2),
}


def assert_float64(
    forward: Forward, backward: Backward, activation: str, device: str = "cpu"
) -> None:
    """float64 against 60 digits: 4 ulp of the value, or of 1 where that is larger. Eager's gradient
    of gelu_tanh and silu misses this by a factor of 5."""
    near = torch.linspace(-9, 9, 181, dtype=torch.float64)
    points = torch.cat([near + 1e-3, near * 4.1, torch.tensor([-745.0, -1e-9, 0.0, 1e-300, 800])])
    input = points.to(device).view(1, -1)
    update = torch.zeros_like(input)
    output = forward(input, update, None, 1.0, activation)
    saved = saved_by(output, input, update, None, 1.0, activation)
    gradient = backward((True, False, False), torch.ones_like(input), saved)[0]
    assert gradient is not None
    with mpmath.workdps(60):
        exact = [EXACT[activation](mpmath.mpf(x)) for x in points.tolist()]
        for ours, place in ((output, 0), (gradient, 1)):
            for x, value, pair in zip(points.tolist(), ours[0].tolist(), exact, strict=True):
                truth = pair[place]
                ulps = abs(mpmath.mpf(value) - truth) / max(1, abs(truth)) * 2**52
                assert ulps <= 4, f"{activation} {('output', 'gradient')[place]} at {x}: {ulps} ulp"


def saved_by(
    output: Tensor,
    input: Tensor,
    update: Tensor,
    bias: Tensor | None,
    scale: float,
    activation: str,
) -> layout.Saved:
    """What the forward leaves for the backward."""
    tensors = save(output, input, update, bias, scale, activation)[:4]
    return layout.Saved(
        activation=activation,
        scale=scale,
        **dict(zip(("output", "input", "update", "bias"), tensors, strict=True)),
        input_dtype=input.dtype,
        update_dtype=update.dtype,
        bias_dtype=None if bias is None else bias.dtype,
    )


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
    operands = (input, update, bias)
    double = output.dtype == torch.float64

    def leaves(dtype: torch.dtype | None, of: Sequence[Tensor | None]) -> list[Tensor | None]:
        return [
            None if t is None else t.detach().to(dtype or t.dtype, copy=True).requires_grad_()
            for t in of
        ]

    # Inputs and results: eager's, those of float64, and where these differ, float64's of eager's.
    inputs = [leaves(torch.float32 if double else None, operands), leaves(torch.float64, operands)]
    if double:
        inputs.append(leaves(torch.float64, inputs[0]))
    results = [reference(*tensors, scale, activation) for tensors in inputs]
    eager, exact, eager_exact = (result.detach() for result in (*results[:2], results[-1]))
    assert output.dtype == (torch.float64 if double else eager.dtype)
    assert_within_bar(output, eager, exact, f"{activation} forward", eager_exact)
    assert output.stride() == torch.empty_like(input).stride()
    saved = saved_by(output, input, update, bias, scale, activation)
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
            upstream_of_eager = upstream.to(eager.dtype)
            gradients = [
                torch.autograd.grad(
                    result, [tensors[place] for place in places], grad, retain_graph=True
                )
                for tensors, result, grad in zip(
                    inputs,
                    results,
                    (upstream_of_eager, upstream.double(), upstream_of_eager.double()),
                    strict=False,
                )
            ]
            for place, one, other, third in zip(
                places, gradients[0], gradients[1], gradients[-1], strict=True
            ):
                assert double or grads[place].dtype == one.dtype
                what = f"{activation} gradient {place} of needs {needs}"
                assert_within_bar(grads[place], one, other, what, third)
