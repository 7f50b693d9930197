"""Emitted CUDA C++: compiled by NVRTC for GPUs, and run on the CPU against autograd in float64."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cuda_on_cpu import Emulator
from torch import Tensor

from fuselab.ejection.eject import eject
from fuselab.op import FusedOp
from fuselab.prove.load import load_op
from fuselab.prove.outputs import as_declared, floating, outputs_in, pulled_back
from fuselab.runtime.cuda_sweep import CudaSweeps
from fuselab.runtime.sweep import Sweep

SEED = 20261123
HALVES = (torch.float16, torch.bfloat16)


def shifted_mish(x, bias):
    return F.mish(x + bias)


def chosen(ids, mask, x):
    return torch.where(mask & (ids != 3), x * ids, torch.relu(x) - mask.sum(-1, keepdim=True))


def layer_norm_gelu(x, residual, weight, bias):
    hidden = x + residual
    return F.gelu(F.layer_norm(hidden, hidden.shape[-1:], weight, bias, 1e-5)) * 2


def masked_softmax(x, mask):
    return torch.softmax(x / 8 + mask, -1)


def channel_norm(x, weight):
    deviation = x - x.mean(1, keepdim=True)
    rstd = torch.rsqrt(deviation.square().mean(1, keepdim=True) + 1e-6)
    return deviation * rstd * weight[:, None, None]


def huber_mean(x, target):
    return F.smooth_l1_loss(x, target, beta=0.5)


def extremes(x):
    return torch.amax(x, 0) - torch.amin(x, 0) * torch.tanh(torch.exp(x).sum(0))


def weighted_by_position(x):
    return torch.arange(x.shape[1]) * x - (torch.arange(x.shape[0])[:, None] * x).sum(
        1, keepdim=True
    )


def without_mean_of_one(x):
    return x - x.mean(1, keepdim=True) + x.exp()


def group_silu(x, weight, bias):
    return F.silu(F.group_norm(x, 4, weight, bias))


def normed_residual(x, residual, weight):
    hidden = x + residual
    scale = torch.rsqrt(hidden.square().mean(-1, keepdim=True) + 1e-6)
    return hidden, hidden * scale * weight, hidden > 0.5, (hidden > 0).sum(-1)


def tensor(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(SEED), dtype=torch.float64)


EXAMPLES: dict[Callable[..., Any], Sequence[Tensor]] = {
    shifted_mish: (tensor(4, 8, 16), tensor(16)),
    chosen: (torch.arange(60).view(6, 10), tensor(6, 10) > 0, tensor(6, 10)),
    layer_norm_gelu: (tensor(4, 8, 16), tensor(4, 8, 16), tensor(16), tensor(16)),
    masked_softmax: (tensor(2, 4, 6, 12), tensor(6, 12)),
    channel_norm: (tensor(2, 8, 5, 6), tensor(8)),
    huber_mean: (tensor(6, 10), tensor(6, 10)),
    extremes: (tensor(6, 10),),
    weighted_by_position: (tensor(6, 10),),
    without_mean_of_one: (tensor(6, 1),),
    group_silu: (tensor(2, 8, 5, 6), tensor(8), tensor(8)),
    normed_residual: (tensor(6, 10), tensor(6, 10), tensor(10)),
}


def cases(name: str) -> Iterator[tuple[torch.dtype, Sequence[Tensor]]]:
    """Yield dtype and arguments of the calls of a function."""
    float32, float64 = torch.float32, torch.float64
    if name == "shifted_mish":
        yield float32, (tensor(3, 40, 128), tensor(128))
        yield torch.bfloat16, (tensor(3, 5, 24), tensor(24))
        yield torch.float16, (tensor(3, 5, 7), tensor(7))
        yield float32, (tensor(64, 2, 40).transpose(0, 2), tensor(64))  # a transposed tile
        yield float64, (tensor(4, 9, 26)[1:, ::2, 1::2], tensor(1).expand(13))
        yield float32, (tensor(1, 1, 1), tensor(1))
        yield float32, (tensor(0, 3, 4), tensor(4))
        yield float32, (tensor(1, 1, 1003), tensor(1003))  # a pack that is not full
    elif name == "chosen":
        for rows, columns, dtype in ((7, 64, float32), (3, 1001, torch.float16), (0, 4, float64)):
            ids = torch.arange(rows * columns).view(rows, columns) % 7
            yield dtype, (ids, tensor(rows, columns) > 0, tensor(rows, columns))
    elif name == "layer_norm_gelu":
        for width in (1, 12, 100, 600, 2056):
            shape = 2, 3, width
            yield float32, (tensor(*shape), tensor(*shape), tensor(width), tensor(width))
        yield torch.bfloat16, (tensor(2, 3, 64), tensor(2, 3, 64), tensor(64), tensor(64))
        padded = tensor(2, 5, 72)[:, 1:4, 3:68]
        yield float64, (padded, tensor(1, 3, 1).expand(2, 3, 65), tensor(65), tensor(130)[::2])
        yield float32, (tensor(1, 2, 21000),) * 2 + (tensor(21000), tensor(21000))
    elif name == "masked_softmax":
        for shape in ((2, 1, 3, 31), (1, 2, 2, 1030)):
            yield float32, (tensor(*shape), tensor(*shape[2:]))
            yield torch.float16, (tensor(*shape), tensor(1).expand(shape[2:]))
        blind = tensor(2, 2, 3, 40)
        blind[0, 0, 0, 1:] = -torch.inf
        blind[1, 0, 2, 7] = torch.nan
        yield float32, (blind, tensor(3, 40))
        yield float64, (tensor(40, 2, 3, 2).transpose(0, 3), tensor(40, 3).t())
    elif name == "channel_norm":
        yield float32, (tensor(2, 12, 6, 20), tensor(12))
        yield float32, (tensor(1, 70, 4, 32), tensor(70))
        yield float32, (tensor(2, 700, 3, 1), tensor(700))
        yield torch.bfloat16, (tensor(2, 6, 4, 4).to(memory_format=torch.channels_last), tensor(6))
        yield torch.float16, (tensor(1, 300, 8, 16), tensor(300))
    elif name == "huber_mean":
        yield float32, (tensor(100, 200), tensor(100, 200))  # split over blocks
        yield torch.bfloat16, (tensor(5, 7), tensor(7, 5).t())
        yield float64, (tensor(130, 70).t(), tensor(70, 1).expand(70, 130))
    elif name == "extremes":
        yield float32, (tensor(3000, 12),)  # split over blocks
        yield torch.float16, (tensor(40, 96),)
        broken = tensor(9, 5)
        broken[3, 2] = torch.nan
        yield float64, (broken,)
        yield float32, (tensor(33, 50).t(),)
    elif name == "weighted_by_position":
        yield float32, (tensor(5, 33),)
        yield torch.bfloat16, (tensor(16, 9).t(),)
    elif name == "normed_residual":
        for rows, width, dtype in ((5, 33, float32), (3, 600, torch.bfloat16), (2, 8, float64)):
            yield dtype, (tensor(rows, width), tensor(rows, width), tensor(width))
        yield float32, (tensor(40, 6).t(), tensor(6, 1).expand(6, 40), tensor(80)[::2])
        yield float32, (tensor(0, 4), tensor(0, 4), tensor(4))
    elif name == "without_mean_of_one":
        yield float32, (tensor(7, 1),)
        yield float64, (tensor(2, 300)[:1].t(),)
    else:
        yield float32, (tensor(2, 8, 4, 6), tensor(8), tensor(8))
        yield torch.float16, (tensor(3, 12, 5, 1), tensor(12), tensor(12))


def as_inputs(dtype: torch.dtype, args: Sequence[Tensor]) -> list[Tensor]:
    """Return the arguments in ``dtype``, with their strides."""
    return [like(arg, dtype) if arg.is_floating_point() else arg for arg in args]


def like(arg: Tensor, dtype: torch.dtype) -> Tensor:
    storage = torch.empty(arg.untyped_storage().nbytes() // 8, dtype=torch.float64)
    storage = storage.set_(arg.untyped_storage()).flatten().to(dtype)
    return storage.as_strided(arg.shape, arg.stride(), arg.storage_offset())


def run(op: FusedOp, args: Sequence[Tensor], grads: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the outputs and the gradients of the CUDA kernels."""
    cuda = op.implementations["cuda"]
    output = cuda.forward(*args)
    assert op.gradient is not None
    saved = op.gradient.save(output, *args)
    needs = [arg.is_floating_point() for arg in args]
    outputs = outputs_in(output)
    return *outputs, *cuda.backward(needs, as_declared(op, outputs, grads), *saved)


def expected(
    function: Callable[..., Any], args: Sequence[Tensor], grads: Sequence[Tensor]
) -> list[Any]:
    wide = [arg.double().requires_grad_() if arg.is_floating_point() else arg for arg in args]
    outputs = outputs_in(function(*wide))
    leaves = [arg for arg in wide if arg.is_floating_point()]
    gradients = iter(pulled_back(outputs, leaves, [grad.double() for grad in grads]))
    return [*outputs, *(next(gradients) if arg.is_floating_point() else None for arg in wide)]


def upstream(function: Callable[..., Any], args: Sequence[Tensor], place: int) -> list[Tensor]:
    """Return upstream gradients; every third call's are expanded from one element."""
    return [
        like(
            tensor(*output.shape) if place % 3 else tensor(1)[0].expand(output.shape), output.dtype
        )
        for output in floating(outputs_in(function(*args)))
    ]


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, FusedOp]:
    folder = tmp_path_factory.mktemp("ejected")
    return {
        function.__name__: load_op(str(eject(function, *args, out=folder / function.__name__)))
        for function, args in EXAMPLES.items()
    }


def sweeps_of(op: FusedOp) -> Any:
    return sys.modules[op.implementations["cuda"].forward.func.__module__]


@pytest.fixture(scope="module")
def emulator(
    packages: dict[str, FusedOp], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Emulator]:
    """Yield an emulator that has compiled what all calls below launch."""
    emulator = Emulator(tmp_path_factory.mktemp("emulated"))
    with pytest.MonkeyPatch.context() as patch:
        emulator.install(patch)
        with emulator.collecting():
            for function in EXAMPLES:
                for place, (dtype, args) in enumerate(cases(function.__name__)):
                    inputs = as_inputs(dtype, args)
                    run(packages[function.__name__], inputs, upstream(function, inputs, place))
            function, inputs, grads = wide_call()
            with pytest.MonkeyPatch.context() as wide:
                wide.setattr(Sweep, "is_wide", True)
                run(packages[function.__name__], inputs, grads)
        yield emulator


def wide_call() -> tuple[Callable[..., Any], list[Tensor], list[Tensor]]:
    inputs = as_inputs(torch.float32, (tensor(2, 3, 40), tensor(2, 3, 40), tensor(40), tensor(40)))
    return layer_norm_gelu, inputs, upstream(layer_norm_gelu, inputs, 1)


TOLERANCES = {  # relative, and absolute as a share of the largest element, or of 1 if all are 0
    torch.float64: (1e-11, 1e-12),
    torch.float32: (1e-5, 4e-6),
    torch.float16: (2e-3, 1e-3),
    torch.bfloat16: (1.6e-2, 8e-3),
}


def compare(
    function: Callable[..., Any], args: Sequence[Tensor], grads: Sequence[Tensor], results: Any
) -> None:
    for found, right in zip(results, expected(function, args, grads), strict=True):
        if right is None:
            assert found is None
            continue
        if not found.is_floating_point():
            # In 16 bits a comparison of rounded numbers is another one than of the numbers.
            assert found.dtype == right.dtype
            if args[0].dtype != torch.bfloat16:
                assert torch.equal(found, right)
            continue
        relative, share = TOLERANCES[found.dtype]
        largest = max([1e-9, *right[right.isfinite()].abs().flatten().tolist()])
        largest = 1.0 if largest == 1e-9 else largest
        torch.testing.assert_close(
            found, right.to(found.dtype), rtol=relative, atol=share * largest, equal_nan=True
        )


@pytest.mark.parametrize("function", EXAMPLES, ids=lambda function: function.__name__)
def test_kernels_compute_what_autograd_does(
    function: Callable[..., Any], packages: dict[str, FusedOp], emulator: Emulator
) -> None:
    for place, (dtype, args) in enumerate(cases(function.__name__)):
        inputs = as_inputs(dtype, args)
        grads = upstream(function, inputs, place)
        compare(function, inputs, grads, run(packages[function.__name__], inputs, grads))


def test_64_bit_offsets(
    packages: dict[str, FusedOp], emulator: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Sweep, "is_wide", True)
    function, inputs, grads = wide_call()
    emulator.launched.clear()
    results = run(packages[function.__name__], inputs, grads)
    assert all("Tile<int64_t" in expression for expression in emulator.launched)
    compare(function, inputs, grads, results)


def test_every_kind_of_tile_is_run(emulator: Emulator) -> None:
    tiles = {expression.partition("<")[2].partition("<")[0] for _, expression in emulator.wanted}
    assert tiles == {"ElementTile", "TransposedTile", "RowTile", "ColumnTile"}
    texts = [expression for _, expression in emulator.wanted]
    for tile in ("RowTile", "ColumnTile"):
        assert any(tile in text and "Share::part" in text for text in texts)
        assert any(tile in text and ", 0, Share::whole" in text for text in texts)
    assert any("Share::merge" in text for text in texts)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize(
    "name", ["shifted_mish", "chosen", "layer_norm_gelu", "extremes", "normed_residual"]
)
def test_compiles_for_gpus(name: str, arch: str, packages: dict[str, FusedOp]) -> None:
    module = sweeps_of(packages[name])
    assert isinstance(module._CUDA, CudaSweeps)
    assert module._CUDA.compile_many(module.CUDA_EXPRESSIONS, arch).startswith(b"\x7fELF")


def test_header_changes_the_cache_key(tmp_path: Path) -> None:
    """A package outside fuselab includes ``cuda_sweep.h`` by its name."""
    from fuselab.runtime import cache

    source = tmp_path / "cuda_kernels.cu"
    source.write_text('#include "cuda_sweep.h"\n')
    text = cache.source_text(source, cache.HEADERS)
    assert "struct LoopSizes" in text
    assert "struct alignas(16) Pack" in text
