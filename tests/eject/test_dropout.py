"""Dropout in ejected functions: masks from a seed, in every language and in the backward."""

from __future__ import annotations

import contextlib
import importlib
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
import triton_on_cpu
from comparing import compare
from cuda_on_cpu import Emulator
from ejected_functions import DROPPED
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fuselab.ejection.eject import eject
from fuselab.ejection.regions import Region, cut
from fuselab.prove.bench_providers import providers
from fuselab.prove.load import load_op
from fuselab.runtime import interpreter, triton_dropout
from fuselab.runtime.cpp_source import CppSource, i64
from fuselab.runtime.dropout import SeededDropout, dropout_mask, philox, seed_tensor

MASKS = CppSource(Path(__file__).with_name("dropout_masks.cpp"))
SEED = -(2**63) + 123456789012345678  # with bits in both words of the key


def words(*numbers: int) -> list[Tensor]:
    return [torch.tensor(number) for number in numbers]


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        (
            (0, 0, 0, 0),
            (0, 0),
            (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
        ),
        (
            (0xFFFFFFFF,) * 4,
            (0xFFFFFFFF,) * 2,
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_known_answers(
    counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    """The vectors are those of the Random123 library of the paper's authors."""
    assert tuple(map(int, philox(words(*counter), words(*key)))) == expected


# --- one mask in every language -------------------------------------------------------------------

NUMBER, LAST = 3, 0x4CCCCCCC  # those of dropout_masks.cpp
# In a row from within a group of four on, and around where the groups need more than 32 bits.
POSITIONS = torch.tensor([*range(5, 70), *range(2**34 - 9, 2**34 + 9), 2**40 + 1, 2**62 + 3])


def masks_at(positions: Tensor) -> Tensor:
    """Return the masks at some positions, from the words of ``philox``."""
    group = positions >> 2
    counter = (group & 0xFFFFFFFF, group >> 32, *words(NUMBER, 0))
    found = philox(counter, words(SEED & 0xFFFFFFFF, (SEED >> 32) & 0xFFFFFFFF))
    return torch.stack(found).gather(0, (positions & 3)[None])[0] > LAST


def test_the_mask_of_a_reference() -> None:
    mask = dropout_mask(torch.tensor(SEED), NUMBER, (5, 14), (LAST + 1) / 2**32)
    assert torch.equal(mask.flatten(), masks_at(torch.arange(70)))


@pytest.mark.parametrize("real", ["float", "double"])
@pytest.mark.parametrize("function", ["at_positions", "one_by_one"])
def test_the_masks_of_cpp_and_of_cuda(function: str, real: str) -> None:
    masks = torch.full(POSITIONS.shape, -1, dtype=torch.int32)
    given = POSITIONS, masks, i64(SEED), i64(len(POSITIONS))
    MASKS.launch(f"{function}<{real}>", given)
    assert torch.equal(masks == 1, masks_at(POSITIONS))


@pytest.mark.parametrize("real", ["float", "double"])
def test_the_masks_of_vectors_from_any_position_on(real: str) -> None:
    masks = torch.full((len(POSITIONS), 2), -1, dtype=torch.int32)
    given = POSITIONS, masks, i64(SEED), i64(len(POSITIONS)), i64(2)
    MASKS.launch(f"in_rows<{real}>", given)
    assert torch.equal(masks == 1, masks_at(POSITIONS[:, None] + torch.arange(2)))


@triton.jit
def _masks(positions_pointer, masks_pointer, seed, COUNT: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.arange(0, BLOCK)
    position = tl.load(positions_pointer + place, place < COUNT, 0)
    masks = triton_dropout.kept(seed, position, 3, 0x4CCCCCCC)
    tl.store(masks_pointer + place, masks, place < COUNT)


def masks_of_triton(positions: Tensor) -> Tensor:
    """Return the masks that Triton computes; runs interpreted."""
    masks = torch.empty(positions.shape, dtype=torch.bool)
    _masks[(1,)](positions, masks, SEED, len(positions), 128)
    return masks


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_the_masks_of_triton(dtype: torch.dtype) -> None:
    positions = POSITIONS if dtype == torch.int64 else POSITIONS[:65].int()
    found = interpreter.run(f"{__file__}:masks_of_triton", positions)
    assert torch.equal(found, masks_at(positions.long()))


# --- what is dropped ------------------------------------------------------------------------------


def test_as_many_as_asked_and_independent() -> None:
    numel, p = 1 << 15, 0.3
    seeds = [torch.tensor(seed) for seed in (0, 1, SEED)]
    masks = [dropout_mask(seed, number, (numel,), p) for seed in seeds for number in (0, 1)]
    sigma = (p * (1 - p) / numel) ** 0.5
    for place, one in enumerate(masks):
        assert abs(float(one.double().mean()) - (1 - p)) < 5 * sigma
        following = [*masks[place + 1 :], one.roll(1)]  # neighbours are independent too
        for other in following:
            both = float((one & other).double().mean())
            assert abs(both - (1 - p) ** 2) < 5 * ((1 - p) ** 2 * (1 - (1 - p) ** 2) / numel) ** 0.5


@pytest.mark.parametrize(
    ("function", "shape", "shared"),
    [
        (F.dropout, (6, 5, 4), ()),
        (F.dropout1d, (6, 5, 4), (2,)),
        (F.dropout1d, (30, 4), (1,)),
        (F.dropout2d, (6, 5, 4, 3), (2, 3)),
        (F.dropout2d, (6, 5, 4), (2,)),
        (F.dropout3d, (6, 5, 4, 3, 2), (2, 3, 4)),
        (F.dropout3d, (30, 4, 3, 2), (1, 2, 3)),
        (torch.feature_dropout, (6, 5, 4), (2,)),
        (torch.dropout, (6, 5), ()),
    ],
)
@pytest.mark.filterwarnings("ignore:dropout2d. Received a 3D input")
def test_what_shares_an_element_of_the_mask(
    function: Callable[..., Tensor], shape: tuple[int, ...], shared: tuple[int, ...]
) -> None:
    """What is kept is as in eager: twice the value, in whole channels."""
    for replayed in (False, True):
        torch.manual_seed(0)
        with SeededDropout(torch.tensor(1)) if replayed else contextlib.nullcontext():
            found = function(torch.ones(shape), 0.5, True)
        assert set(found.flatten().tolist()) == {0.0, 2.0}
        largest = found.amax(shared, keepdim=True) if shared else found
        assert torch.equal(found, largest.expand(shape))


@pytest.mark.parametrize("function", [F.alpha_dropout, F.feature_alpha_dropout])
def test_alpha_dropout_has_the_two_values_of_eager(function: Callable[..., Tensor]) -> None:
    x = torch.full((64, 32), 0.75, dtype=torch.float64)
    torch.manual_seed(0)
    with SeededDropout(torch.tensor(0)):
        found = function(x, 0.25, True)
    expected = function(x, 0.25, True).unique()
    torch.testing.assert_close(found.unique(), expected, rtol=1e-12, atol=0)
    assert abs(float((found == found.max()).double().mean()) - 0.75) < 0.05


def test_the_ends_of_the_probability_and_evaluation() -> None:
    x = torch.tensor([1.0, -2.0, float("nan"), float("inf")])
    with SeededDropout(torch.tensor(0)):
        assert F.dropout(x, 0.0) is x and F.dropout(x, 0.5, False) is x
        for found in (F.dropout(x, 1.0), F.alpha_dropout(x, 1.0, True)):
            assert found[:2].tolist() == [0.0, 0.0] and found[2:].isnan().all()
        written = x.clone()
        assert F.dropout(written, 0.5, True, True) is written and not torch.equal(written, x)
    refused = pytest.raises(ValueError, match="probability has to be between 0 and 1")
    with SeededDropout(torch.tensor(0)), refused:
        F.dropout(x, 1.5)


# --- ejected functions ----------------------------------------------------------------------------


def dropped_softmax(scores, mask):
    weights = F.dropout(torch.softmax(scores * 0.5 + mask, -1), 0.25)
    return F.dropout(weights, 0.5) + scores


def dropped_channels(x, seed):
    hidden = x + seed[:, None, None]
    F.dropout2d(hidden, 0.5, True, True)
    return F.relu(hidden) * 2


def alpha_dropped(x):
    none, all_of_it = F.dropout(x, 0.0), F.dropout(x, 1.0)
    return F.selu(F.alpha_dropout(x.t(), 0.1, True)) + (none + all_of_it).t()


def dropped_total(x):
    return F.dropout(x.sum(), 0.25) * 2


SHAPES: dict[Callable[..., Any], tuple[tuple[int, ...], ...]] = {
    DROPPED[0]: ((3, 5, 70), (3, 5, 70), (70,), (70,)),
    dropped_softmax: ((2, 3, 37), (3, 37)),
    dropped_channels: ((2, 3, 5, 7), (3,)),
    alpha_dropped: ((5, 9),),
    dropped_total: ((3, 4),),
}


def arguments(function: Callable[..., Any]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(shape, generator=generator) for shape in SHAPES[function]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Any], Path]:
    root = tmp_path_factory.mktemp("dropped")

    def folder(function: Callable[..., Any]) -> Path:
        path = root / function.__name__
        return path if path.exists() else eject(function, *arguments(function), out=path)

    return folder


@pytest.mark.parametrize("language", ["triton", "cpp"])
@pytest.mark.parametrize("function", SHAPES, ids=lambda one: one.__name__)
def test_values_and_gradients(function: Any, language: str, folders: Any) -> None:
    folder = folders(function)
    op = load_op(str(folder))
    mine = op.implementations[language]
    forward, backward = mine.forward, mine.backward
    if language == "triton":
        forward = partial(interpreter.run, f"{folder}/op.py:forward_triton")
        backward = partial(interpreter.run, f"{folder}/op.py:backward_triton")
    args = arguments(function)
    for one in (args, [arg.transpose(0, -1).contiguous().transpose(0, -1) for arg in args]):
        compare(op, forward, backward, [*one, torch.tensor(SEED)])


def test_values_and_gradients_of_cuda(
    folders: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CUDA C++ kernels are compiled by g++ and run on the CPU."""
    op = load_op(str(folders(DROPPED[0])))
    mine = op.implementations["cuda"]
    args = [*arguments(DROPPED[0]), torch.tensor(SEED)]
    emulator = Emulator(tmp_path)
    emulator.install(monkeypatch)
    assert mine.backward is not None and op.gradient is not None
    with emulator.collecting():
        returned = mine.forward(*args)
        needs = [arg.is_floating_point() for arg in args]
        mine.backward(needs, torch.zeros_like(args[0]), *op.gradient.save(returned, *args))
    compare(op, mine.forward, mine.backward, args)
    assert len(emulator.launched) == 3


def test_a_standalone_package_draws_the_same_masks(ejected: Callable[[str], Path]) -> None:
    folder = ejected("standalone_dropped_residual")
    program = (
        "import sys; sys.path[:0] = sys.argv[1:]\n"
        "from standalone_program import Refuse\n"
        "sys.meta_path.insert(0, Refuse())\n"
        "import torch\n"
        "from dropped_residual import dropped_residual\n"
        "from dropped_residual.reference import reference\n"
        "args = [torch.randn(size) for size in ((6, 5, 9), (6, 5, 9), 9, 9)]\n"
        "found = dropped_residual(*args, seed=-5)\n"
        "torch.testing.assert_close(found, reference(*args, torch.tensor(-5)))\n"
        "first, second = dropped_residual(*args), dropped_residual(*args)\n"
        "assert not torch.equal(first, second)\n"
    )
    command = [sys.executable, "-c", program, str(Path(__file__).parent), str(folder.parent)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def test_the_reference_is_the_users_function(folders: Any) -> None:
    function = DROPPED[0]
    op = load_op(str(folders(function)))
    args, seed = arguments(function), torch.tensor(5)
    with SeededDropout(seed):
        expected = function(*args)
    assert torch.equal(op.reference(*args, seed), expected)
    assert not torch.equal(op.reference(*args, seed + 1), expected)


def test_bench_times_pytorchs_own_dropout_and_compares_it_with_nothing(folders: Any) -> None:
    op = load_op(str(folders(DROPPED[0])))
    offered = providers(op)
    drawn = {name for name, one in offered.items() if not one.is_compared}
    assert drawn == {"eager", "torchscript", "compile", "compile-max-autotune"}
    args = (*arguments(DROPPED[0]), torch.tensor(5))
    function, given = offered["eager"].prepare(args)
    torch.manual_seed(0)
    expected = DROPPED[0](*args[:-1])
    torch.manual_seed(0)
    assert torch.equal(function(*given), expected)
    assert all(one.is_compared for one in providers(load_op("square")).values())


@pytest.fixture(scope="module")
def dropped(folders: Any) -> Callable[..., Tensor]:
    """Return the public function of ``DROPPED``."""
    folder = folders(DROPPED[0])
    sys.path.insert(0, str(folder.parent))
    public: Callable[..., Tensor] = getattr(importlib.import_module(folder.name), folder.name)
    return public


def test_seeds_come_from_pytorchs_generator(dropped: Callable[..., Tensor]) -> None:
    args = arguments(DROPPED[0])
    torch.manual_seed(3)
    first, second = dropped(*args), dropped(*args)
    torch.manual_seed(3)
    assert torch.equal(dropped(*args), first) and not torch.equal(first, second)
    assert torch.equal(dropped(*args, seed=9), dropped(*args, seed=torch.tensor(9)))
    torch.manual_seed(3)
    assert torch.equal(dropped(*args, seed=seed_tensor(None, args[0].device)), first)


def test_a_checkpoint_drops_the_same_again(dropped: Callable[..., Tensor]) -> None:
    gradients = []
    for run in (dropped, partial(checkpoint, dropped, use_reentrant=False)):
        args = [arg.requires_grad_() for arg in arguments(DROPPED[0])]
        torch.manual_seed(11)
        run(*args).square().sum().backward()
        gradients.append([arg.grad for arg in args])
    assert all(map(torch.equal, *gradients))


def test_first_and_second_derivatives(dropped: Callable[..., Tensor]) -> None:
    shapes = ((2, 5), (2, 5), (5,), (5,))
    args = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    function = partial(dropped, seed=4)
    assert torch.autograd.gradcheck(function, args)
    assert torch.autograd.gradgradcheck(function, args)


def test_inside_torch_compile_every_call_has_its_own_seed(dropped: Callable[..., Tensor]) -> None:
    args = arguments(DROPPED[0])
    compiled = torch.compile(lambda *args: dropped(*args), fullgraph=True, backend="aot_eager")
    torch.manual_seed(3)
    first, second = compiled(*args), compiled(*args)
    torch.manual_seed(3)
    assert torch.equal(compiled(*args), first) and not torch.equal(first, second)


def test_autocast_and_vmap(dropped: Callable[..., Tensor]) -> None:
    args = arguments(DROPPED[0])
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(dropped(*args, seed=2), dropped(*args, seed=2))
    batches = torch.stack([args[0], args[0] + 1])
    over = torch.vmap(partial(dropped, seed=2), (0, None, None, None))(batches, *args[1:])
    one_by_one = torch.stack([dropped(one, *args[1:], seed=2) for one in batches])
    torch.testing.assert_close(over, one_by_one)
    with pytest.raises(RuntimeError, match="random operation"):
        torch.vmap(dropped, (0, None, None, None))(batches, *args[1:])


def test_launches_compile_for_an_h100(
    monkeypatch: pytest.MonkeyPatch, declared: Callable[[str], ModuleType]
) -> None:
    args = [torch.empty(shape, dtype=torch.bfloat16) for shape in ((64, 16, 4096),) * 2]
    args += [torch.empty(4096, dtype=torch.bfloat16)] * 2
    given = [*args, torch.empty((), dtype=torch.int64)]
    for backward in (False, True):
        for launch in triton_on_cpu.launches(
            monkeypatch, declared("dropped_residual"), given, backward
        ):
            ptx = launch.compiled().asm["ptx"]
            products = ptx.count("mul.hi.u32")  # two in each of Philox's ten rounds
            of_a_thread = launch.keywords["BLOCK_COLUMNS"] // (32 * launch.keywords["num_warps"])
            # The forward draws it once, the backward reads it.
            drawn = 0 if backward else 20 * of_a_thread
            assert 0.9 * drawn <= products <= drawn


# --- functions that are cut -----------------------------------------------------------------------


class Feedforward(nn.Module):
    """A transformer's feed-forward layer with three dropouts, one of which stands alone."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.dropout = nn.Dropout(0.25)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.dropout(F.gelu(self.up(x)))
        hidden = x + self.dropout(self.down(hidden))
        return self.up(self.dropout(hidden @ self.up.weight.t() @ self.up.weight))


@pytest.fixture(scope="module")
def feedforward(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    return eject(
        Feedforward(), torch.randn(4, 8), out=tmp_path_factory.mktemp("cut") / "feedforward"
    )


def test_no_two_regions_share_a_mask() -> None:
    made = cut(Feedforward(), [torch.randn(4, 8)], {}, "feedforward")
    numbers = [one.package.captured.numbers for one in made.steps if isinstance(one, Region)]
    assert numbers == [(0,), (1,), (2,)]


def test_a_composition_computes_what_its_reference_replays(feedforward: Path) -> None:
    sys.path.insert(0, str(feedforward.parent))
    package = importlib.import_module(feedforward.name)
    reference = importlib.import_module(f"{feedforward.name}.reference").reference
    module = Feedforward()
    tensors = [torch.randn(4, 8), *module.parameters()]
    seed = torch.tensor(SEED)
    results = []
    for function in (package.feedforward, reference):
        leaves = [one.detach().requires_grad_() for one in tensors]
        output = function(*leaves, seed)
        results.append([output, *torch.autograd.grad(output.square().sum(), leaves)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)
    with SeededDropout(seed):
        torch.testing.assert_close(results[0][0], module(tensors[0]))


def test_the_module_of_a_package_draws_seeds(feedforward: Path) -> None:
    sys.path.insert(0, str(feedforward.parent))
    ejected = importlib.import_module(f"{feedforward.name}.module").Feedforward(Feedforward())
    x = torch.randn(4, 8)
    torch.manual_seed(1)
    first, second = ejected(x), ejected(x)
    torch.manual_seed(1)
    assert torch.equal(ejected(x), first) and not torch.equal(first, second)
