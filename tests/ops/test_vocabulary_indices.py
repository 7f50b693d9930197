"""vocabulary_indices: known ids get their index, unknown ones a slot of their own."""

from __future__ import annotations

import pytest
import torch

from fuselab.errors import ArgumentError, DtypeError, ShapeError
from fuselab.ops import vocabulary_indices
from fuselab.ops.vocabulary_indices import vocabulary
from fuselab.ops.vocabulary_indices.cases import CASES
from fuselab.ops.vocabulary_indices.op import KERNELS
from fuselab.runtime import interpreter
from fuselab.runtime.fallback import strict


@pytest.fixture(autouse=True)
def no_fallback():
    with strict():
        yield


def forward_interpreted(*args):
    return interpreter.run("fuselab.ops.vocabulary_indices.op:forward_triton", *args)


def reference(*args):
    return vocabulary_indices(*args, implementation="reference")


on_cpu = pytest.mark.parametrize("forward", [reference, KERNELS.forward_cpp, forward_interpreted])
on_gpu = pytest.mark.parametrize("forward", [KERNELS.forward_cuda, KERNELS.forward_triton])


def assert_as_dictionaries(forward, columns, ids):
    """Against one Python dictionary per column, whose default is len(vocabulary)."""
    indices = [{id: index for index, id in enumerate(column)} for column in columns]
    expected = [
        [index.get(id, len(index)) for id, index in zip(row, indices, strict=True)]
        for row in ids.tolist()
    ]
    output = forward(ids, *(tensor.to(ids.device) for tensor in vocabulary(columns)))
    assert output.dtype == torch.int64 and output.is_contiguous()
    assert output.tolist() == expected


def check(forward, device="cpu"):
    generator = torch.Generator().manual_seed(0)
    ends = [2**63 - 1, -(2**63), 0, -1, 2**32, 2**31 - 1]
    for size in (1, 2, 3, 4, 7, 8, 9, 31, 32, 33):
        columns = [torch.randperm(64, generator=generator)[:size].tolist(), [], ends, [5]]
        ids = torch.randint(-2, 66, (70, 4), generator=generator)
        ids[:6, 2] = torch.tensor(ends)
        assert_as_dictionaries(forward, columns, ids.to(device))
    columns = columns[:2]
    for laid_out in (ids.int()[:, :2], ids[::3, 1:3], ids.t()[:, :2], ids[:1, :2].expand(9, 2)):
        assert_as_dictionaries(forward, columns, laid_out.to(device))
    assert_as_dictionaries(forward, [[], []], torch.zeros(3, 2, dtype=torch.int64, device=device))
    assert_as_dictionaries(forward, [[1]], torch.zeros(0, 1, dtype=torch.int64, device=device))
    assert_as_dictionaries(forward, [], torch.zeros(4, 0, dtype=torch.int64, device=device))


@on_cpu
def test_every_id_gets_its_index_and_unknown_ids_their_slot(forward):
    check(forward)


@pytest.mark.gpu
@on_gpu
def test_on_gpu(forward):
    check(forward, "cuda")
    for case in CASES:
        inputs = case.make(torch.device("cuda"), torch.float32, torch.Generator().manual_seed(1))
        assert torch.equal(forward(*inputs.args), reference(*inputs.args)), case.name


def test_an_unknown_id_never_takes_a_known_slot():
    known = vocabulary([[10, 20, 30]])
    output = vocabulary_indices(torch.tensor([[10], [5], [25], [35], [30]]), *known)
    assert output.flatten().tolist() == [0, 3, 3, 3, 2]


def test_cases():
    for case in CASES:
        if "bench" not in case.tags:
            inputs = case.make(torch.device("cpu"), torch.float32, torch.Generator().manual_seed(1))
            assert torch.equal(KERNELS.forward_cpp(*inputs.args), reference(*inputs.args)), (
                case.name
            )


def test_refusals():
    known = vocabulary([[1, 2], [3]])
    ids = torch.zeros(2, 2, dtype=torch.int64)
    with pytest.raises(ArgumentError, match="the id 7 twice in column 1"):
        vocabulary([[1], [7, 2, 7]])
    with pytest.raises(DtypeError, match="'ids'"):
        vocabulary_indices(ids.float(), *known)
    with pytest.raises(DtypeError, match=r"'slots' is torch\.int32"):
        vocabulary_indices(ids, known.sorted_keys, known.slots.int(), known.offsets)
    with pytest.raises(ShapeError, match="'offsets' has 3 entries"):
        vocabulary_indices(ids[:, :1], *known)
    with pytest.raises(ShapeError, match="'slots' has 2 entries"):
        vocabulary_indices(ids, known.sorted_keys, known.slots[:2], known.offsets)


@pytest.mark.parametrize("implementation", ["reference", "cpp"])
@pytest.mark.parametrize("offsets", [[0, 2, 5000], [-1, 2, 3], [0, 3, 2]])
def test_offsets_that_leave_the_keys(implementation, offsets):
    known, ids = vocabulary([[1, 2], [3]]), torch.zeros(2, 2, dtype=torch.int64)
    with pytest.raises(ArgumentError, match="expected places that rise from 0 to the 3 keys"):
        vocabulary_indices(ids, *known[:2], torch.tensor(offsets), implementation=implementation)


def test_compiles():
    known = vocabulary([[4, 1], [3]])
    ids = torch.tensor([[1, 3], [4, 4], [2, 3]])
    compiled = torch.compile(vocabulary_indices, backend="eager", fullgraph=True)
    assert compiled(ids, *known).tolist() == [[1, 0], [0, 1], [2, 0]]
