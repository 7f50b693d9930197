"""DotInteraction and OuterInteraction: drop-in, with the state_dict of what they replace."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fuselab.errors import ArgumentError, UnknownNameError
from fuselab.nn import DotInteraction, OuterInteraction
from fuselab.ops import dot_interaction


def inputs(batch: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(batch, 4, generator=generator), torch.randn(batch, 2, 4, generator=generator)


def outer(dense: torch.Tensor, embeddings: torch.Tensor) -> torch.Tensor:
    row = torch.cat([dense, embeddings.flatten(1)], 1)
    return (row.unsqueeze(2) * row.unsqueeze(1)).flatten(1)


def test_dot_interaction_is_the_operator():
    module = DotInteraction(padding=1)
    assert torch.equal(module(*inputs()), dot_interaction(*inputs(), 1))
    assert module.state_dict() == {} and repr(module) == "DotInteraction(padding=1)"


@pytest.mark.parametrize("bias", [True, False])
def test_state_dict_goes_both_ways(bias):
    linear = nn.Linear(144, 5, bias=bias)
    module = OuterInteraction(3, 4, 5, bias=bias, activation="relu")
    module.load_state_dict(linear.state_dict())
    torch.testing.assert_close(module(*inputs()), torch.relu(linear(outer(*inputs()))))
    linear.load_state_dict(OuterInteraction(3, 4, 5, bias=bias).state_dict())


def test_of_takes_the_layers_own_parameters_and_trains_them():
    linear = nn.Linear(144, 5).eval()
    expected = nn.Linear(144, 5)
    expected.load_state_dict(linear.state_dict())
    module = OuterInteraction.of(linear, 3, 4)
    assert module.weight is linear.weight and module.bias is linear.bias and not module.training
    module(*inputs()).sum().backward()
    expected(outer(*inputs())).sum().backward()
    torch.testing.assert_close(linear.weight.grad, expected.weight.grad)
    torch.testing.assert_close(linear.bias.grad, expected.bias.grad)


def test_starts_as_a_linear_layer_does():
    torch.manual_seed(3)
    linear = nn.Linear(144, 5)
    torch.manual_seed(3)
    module = OuterInteraction(3, 4, 5)
    assert torch.equal(module.weight, linear.weight) and torch.equal(module.bias, linear.bias)


def test_dtype_and_device_are_linears():
    module = OuterInteraction(3, 4, 5, device="meta", dtype=torch.bfloat16)
    assert module.weight.is_meta and module.bias.dtype == torch.bfloat16


def test_refusals():
    for vectors, width in ((0, 4), (4, 0), (-1, 4)):
        with pytest.raises(ArgumentError, match=r"'vectors' is .* expected 1 or more"):
            OuterInteraction(vectors, width, 2)
    with pytest.raises(ArgumentError, match=r"'linear' has 143 inputs.*144, the square"):
        OuterInteraction.of(nn.Linear(143, 5), 3, 4)
    computed = nn.utils.parametrizations.weight_norm(nn.Linear(144, 5))
    for module, what in ((computed, "has a weight that is"), (nn.Embedding(144, 5), "is a Embed")):
        with pytest.raises(ArgumentError, match=f"'linear' {what}"):
            OuterInteraction.of(module, 3, 4)
    with pytest.raises(UnknownNameError) as refused:
        OuterInteraction(3, 4, 5, activation="rleu")
    assert (refused.value.kind, refused.value.name) == ("activation", "rleu")
