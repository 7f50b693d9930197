"""hash_indices: Python's modulus, whatever the sign and size of the id."""

from __future__ import annotations

import pytest
import torch

from fuselab.errors import ArgumentError, DtypeError, ShapeError, UnknownNameError
from fuselab.ops import hash_indices
from fuselab.ops.hash_indices.cases import CASES
from fuselab.ops.hash_indices.op import KERNELS, OP
from fuselab.runtime import interpreter
from fuselab.runtime.fallback import strict

ENDS = (0, 1, -1, 9, 10, 11, 2**31 - 1, 2**31, 2**32 - 1, 2**32, -(2**31), 2**63 - 1, -(2**63))
CARDINALITIES = (1, 2, 3, 10, 2**31 - 1, 2**31, 2**32 + 1, 2**63 - 1)


@pytest.fixture(autouse=True)
def no_fallback():
    with strict():
        yield


def forward_interpreted(*args):
    return interpreter.run("fuselab.ops.hash_indices.op:forward_triton", *args)


def reference(*args):
    return hash_indices(*args, implementation="reference")


on_cpu = pytest.mark.parametrize("forward", [reference, KERNELS.forward_cpp, forward_interpreted])
on_gpu = pytest.mark.parametrize("forward", [KERNELS.forward_cuda, KERNELS.forward_triton])


def assert_python_modulus(forward, device="cpu"):
    for dtype in (torch.int64, torch.int32):
        limits = torch.iinfo(dtype)
        ends = [id for id in ENDS if limits.min <= id <= limits.max]
        ids = torch.tensor(ends, dtype=dtype)[:, None].expand(-1, len(CARDINALITIES))
        expected = [[id % bound for bound in CARDINALITIES] for id in ends]
        output = forward(ids.to(device), torch.tensor(CARDINALITIES, device=device), "modulus")
        assert output.dtype == torch.int64 and output.is_contiguous()
        assert output.tolist() == expected


def assert_layouts(forward, device="cpu"):
    bounds = torch.tensor([7, 0, 105, 0, 3], dtype=torch.int32)[::2]
    storage = torch.arange(-40, 3000).to(device)
    for ids in (
        storage[1:10].view(3, 3),
        storage[:30].view(3, 10).t(),
        storage[:3000].view(-1, 30)[::7, 5:14:4],
        storage[:1].expand(5, 3),
        storage[:1025].unsqueeze(1).expand(-1, 3),
        storage[:0].view(0, 3),
    ):
        ids = ids if ids.shape[1] == 3 else ids[:, :3]
        output = forward(ids, bounds.to(device), "modulus").cpu()
        assert output.tolist() == [
            [id % bound for id, bound in zip(row, bounds.tolist(), strict=True)]
            for row in ids.tolist()
        ]


def assert_cases(forward, device="cpu"):
    for case in CASES:
        inputs = case.make(torch.device(device), torch.float32, torch.Generator().manual_seed(1))
        ids, bounds = inputs.args
        if ids.numel() < 2**18:
            assert torch.equal(forward(ids, bounds, "modulus"), torch.remainder(ids, bounds))


@on_cpu
def test_python_modulus(forward):
    assert_python_modulus(forward)


@on_cpu
def test_layouts(forward):
    assert_layouts(forward)


@pytest.mark.parametrize("forward", [reference, KERNELS.forward_cpp])
def test_cases(forward):
    assert_cases(forward)


@pytest.mark.gpu
@on_gpu
def test_on_gpu(forward):
    assert_python_modulus(forward, "cuda")
    assert_layouts(forward, "cuda")
    assert_cases(forward, "cuda")


@pytest.mark.parametrize("implementation", ["auto", "cpp", "reference"])
@pytest.mark.parametrize("cardinality", [0, -3])
def test_a_cardinality_below_one_is_refused(implementation, cardinality):
    ids = torch.ones(2, 3, dtype=torch.int64)
    bounds = torch.tensor([5, cardinality, 2])
    for _ in range(2):  # with and without a launch plan
        with pytest.raises(ArgumentError, match=f"'cardinalities' has {cardinality} for column 1"):
            hash_indices(ids, bounds, implementation=implementation)


def test_refusals():
    ids, bounds = torch.ones(2, 3, dtype=torch.int64), torch.ones(3, dtype=torch.int64)
    with pytest.raises(DtypeError, match=r"'ids' is torch\.float32"):
        hash_indices(ids.float(), bounds)
    with pytest.raises(DtypeError, match="'cardinalities'"):
        hash_indices(ids, bounds.double())
    with pytest.raises(ShapeError, match="'ids' has shape"):
        hash_indices(ids[0], bounds)
    with pytest.raises(ShapeError, match="'cardinalities' has 2 entries"):
        hash_indices(ids, bounds[:2])
    with pytest.raises(UnknownNameError) as refused:
        hash_indices(ids, bounds, "modulo")
    assert refused.value.name == "modulo" and "modulus" in refused.value.known


def test_compiles():
    ids, bounds = torch.randint(-99, 99, (5, 3)), torch.tensor([7, 2, 9])
    compiled = torch.compile(hash_indices, backend="eager", fullgraph=True)
    assert torch.equal(compiled(ids, bounds), ids % bounds)
    assert OP.fake is not None
