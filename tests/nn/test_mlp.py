"""MLP: the nn.Sequential it replaces, in values, gradients, keys and behaviour."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from fuselab import fuse
from fuselab.errors import ArgumentError, UnknownNameError
from fuselab.nn import MLP, mlp
from fuselab.ops._shared.activations import ACTIVATIONS


def sequential() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(13, 32), nn.ReLU(), nn.Linear(32, 16), nn.GELU(), nn.Linear(16, 1), nn.Sigmoid()
    )


def assert_same(ours: nn.Module, theirs: nn.Module, input: torch.Tensor) -> None:
    torch.testing.assert_close(ours(input), theirs(input))
    gradients = [
        torch.autograd.grad(module(input).sum(), list(module.parameters()))
        for module in (ours, theirs)
    ]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


def test_state_dict_is_that_of_the_sequential():
    ours = MLP((13, 32, 16, 1), last_activation="sigmoid")
    theirs = nn.Sequential(
        nn.Linear(13, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 1), nn.Sigmoid()
    )
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert list(ours.state_dict())[:3] == ["0.weight", "0.bias", "2.weight"]
    assert [name for name, _ in ours.named_modules()] == [n for n, _ in theirs.named_modules()]
    ours.load_state_dict(theirs.state_dict(), strict=True)
    assert_same(ours, theirs, torch.randn(4, 13))
    theirs.load_state_dict(MLP((13, 32, 16, 1)).state_dict(), strict=True)


def test_it_starts_as_the_sequential_does():
    torch.manual_seed(0)
    ours = MLP((5, 4, 3), "tanh")
    torch.manual_seed(0)
    theirs = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one, other)
    assert [type(layer) for layer in ours] == [type(layer) for layer in theirs]


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("bias", [True, False])
def test_every_activation(name, bias):
    ours = MLP((7, 5, 3), name, last_activation=name, bias=bias, dtype=torch.float64)
    theirs = nn.Sequential(*ours)
    assert sum(1 for _ in ours.parameters()) == (4 if bias else 2)
    for shape in ((7,), (4, 7), (2, 3, 7), (0, 7)):
        assert_same(ours, theirs, torch.randn(shape, dtype=torch.float64))


def test_from_sequential_shares_the_parameters():
    theirs = sequential().eval()
    ours = MLP.from_sequential(theirs)
    assert type(theirs) is nn.Sequential and not ours.training
    assert all(a is b for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))
    assert_same(ours, theirs, torch.randn(6, 13))
    assert_same(MLP.from_sequential(ours), theirs, torch.randn(6, 13))
    ours[1] = nn.Tanh()
    assert type(theirs[1]) is nn.ReLU
    named = nn.Sequential()
    named.add_module("first", nn.Linear(3, 2))
    named.add_module("act", nn.ReLU())
    assert list(MLP.from_sequential(named).state_dict()) == ["first.weight", "first.bias"]


def test_pairs_are_fused_and_the_rest_runs_as_it_is(monkeypatch):
    calls = []

    def record(function, kind):
        def call(*args):
            calls.append((kind, *args[3:]))
            return function(*args)

        return call

    monkeypatch.setattr(mlp, "linear_activation", record(mlp.linear_activation, "activation"))
    monkeypatch.setattr(mlp, "linear_sigmoid", record(mlp.linear_sigmoid, "sigmoid"))
    input = torch.randn(4, 13)
    MLP.from_sequential(sequential())(input)
    assert calls == [("activation", "relu"), ("activation", "gelu"), ("sigmoid",)]
    calls.clear()
    odd = nn.Sequential(
        nn.Linear(13, 8),
        nn.LayerNorm(8),
        nn.ReLU(),
        nn.Linear(8, 8),
        nn.LeakyReLU(0.2),
        nn.Linear(8, 8),
        nn.LeakyReLU(),
        nn.Linear(8, 2),
    )
    assert_same(MLP.from_sequential(odd), odd, input)
    assert set(calls) == {("activation", "leaky_relu")}


def test_what_is_one_call_on_a_gpu():
    module = MLP((13, 8, 4, 1), "gelu", "sigmoid")
    weights, biases, *names = mlp._whole(list(module))
    assert [id(value) for value in weights] == [id(module[place].weight) for place in (0, 2, 4)]
    assert [id(value) for value in biases] == [id(module[place].bias) for place in (0, 2, 4)]
    assert names == ["gelu", "sigmoid"]
    assert mlp._whole(list(MLP((3, 2, 1), bias=False)))[1:] == ([], "relu", "identity")
    assert mlp._whole([nn.Linear(3, 2)])[2:] == ("identity", "identity")
    linear, relu = nn.Linear(3, 3), nn.ReLU()
    hooked = nn.Linear(3, 3)
    hooked.register_forward_hook(lambda *_: None)
    for odd in (
        [],
        [relu],
        [relu, linear],
        [linear, linear],
        [linear, relu, relu],
        [linear, nn.LayerNorm(3), linear],
        [linear, nn.LeakyReLU(0.2), linear],
        [linear, relu, hooked],
        [linear, relu, nn.Linear(3, 3, bias=False)],
        [linear, relu, nn.Linear(3, 3).double()],
        [linear, relu, linear, nn.GELU(), linear],
    ):
        assert mlp._whole(odd) is None, odd


def test_hooks_and_replaced_forwards_still_run():
    seen = []
    theirs = sequential()
    theirs[0].register_forward_hook(lambda module, args, output: seen.append("linear"))
    theirs[3].register_forward_pre_hook(lambda module, args: seen.append("gelu"))
    theirs.register_forward_hook(lambda module, args, output: seen.append("whole"))
    theirs[5].forward = torch.exp
    ours = MLP.from_sequential(theirs)
    input = torch.randn(4, 13)
    output = ours(input)
    assert seen == ["linear", "gelu", "whole"]
    torch.testing.assert_close(output, theirs(input))


def test_slices_are_mlps_over_the_same_children():
    ours = MLP.from_sequential(sequential())
    first, rest, input = ours[:2], ours[2:], torch.randn(4, 13)
    assert type(first) is MLP and list(first.state_dict()) == ["0.weight", "0.bias"]
    assert list(rest.state_dict()) == ["2.weight", "2.bias", "4.weight", "4.bias"]
    assert rest[0] is ours[2] and ours[-1] is ours[5]
    torch.testing.assert_close(rest(first(input)), ours(input))


class Watch(TorchDispatchMode):
    """Names the operators of ours that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "fuselab":
            self.called.append(func.name().split("::")[1])
        return func(*args, **(kwargs or {}))


def test_one_call_on_a_gpu_only_where_no_gradient_is_needed():
    """By fake tensors of a GPU, whose autograd needs a GPU."""
    module = MLP((13, 8, 4), last_activation="relu", device="meta").eval()
    assert module._wants_gradient(torch.empty(5, 13))  # eval() alone does not say so
    with FakeTensorMode(), Watch() as watch:
        for linear in (module[0], module[2]):
            for name, value in list(linear.named_parameters()):
                setattr(linear, name, nn.Parameter(torch.empty(value.shape, device="cuda")))
        input = torch.empty(5, 1, 13, device="cuda")
        with torch.no_grad():
            assert module(input).shape == (5, 1, 4)
        assert watch.called == ["mlp"]
        module.requires_grad_(False)
        assert module(input).is_cuda and watch.called == ["mlp", "mlp"]
        assert module._wants_gradient(input.requires_grad_())


def test_copies_pickles_and_saves():
    ours, input = MLP((13, 8, 2)), torch.randn(3, 13)
    assert_same(copy.deepcopy(ours), ours, input)
    assert_same(pickle.loads(pickle.dumps(ours)), ours, input)
    file = io.BytesIO()
    torch.save(ours.state_dict(), file)
    file.seek(0)
    other = MLP((13, 8, 2))
    other.load_state_dict(torch.load(file))
    assert_same(other, ours, input)


def test_compiles_whole_and_autocasts():
    ours, input = MLP.from_sequential(sequential()), torch.randn(4, 13)
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(input), ours(input))
    with torch.autocast("cpu", torch.bfloat16):
        assert ours(input).dtype == torch.bfloat16


def test_fuse_leaves_it_alone():
    model, input = nn.Sequential(MLP((13, 8, 2)), nn.Softmax(-1)), torch.randn(4, 13)
    fused = fuse(model, input)
    torch.testing.assert_close(fused(input), model(input))
    assert isinstance(fused[0], MLP)


def test_errors_name_the_argument():
    with pytest.raises(ArgumentError, match=r"'sizes' is \(3,\)"):
        MLP((3,))
    with pytest.raises(ArgumentError, match=r"'sizes' is \(3, 0\)"):
        MLP((3, 0))
    for wrong in (3, "35", (3, 2.5)):
        with pytest.raises(ArgumentError, match=r"'sizes' is "):
            MLP(wrong)
    with pytest.raises(UnknownNameError) as refused:
        MLP((3, 2, 1), "rleu")
    assert (refused.value.kind, refused.value.name) == ("activation", "rleu")
    assert "relu" in refused.value.known
    with pytest.raises(UnknownNameError) as refused:
        MLP((3, 1), last_activation="none")
    assert (refused.value.kind, refused.value.name) == ("activation", "none")
    with pytest.raises(ArgumentError, match=r"'module' is Linear.*nn\.Sequential"):
        MLP.from_sequential(nn.Linear(3, 2))

    class Residual(nn.Sequential):
        def forward(self, input):
            return input + super().forward(input)

    with pytest.raises(ArgumentError, match=r"Residual.*nn\.Sequential"):
        MLP.from_sequential(Residual(nn.Linear(3, 3)))
