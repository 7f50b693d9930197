"""Messages of an exchange hold what plain PyTorch would put there, bit by bit."""

from __future__ import annotations

import pytest
import torch

from fuselab.distributed.exchange_layout import IdLayout, VectorLayout, pieces_of

CPU = torch.device("cpu")
ROWS, TABLES, WIDTH = 5, 4, 6
# tables of the blocks of each rank: table 1 is cut by rows over all three, rank 2 has no other
OWNERS = [[2, 1], [1, 0, 3], [1]]


def _layout(width: int = WIDTH) -> VectorLayout:
    pieces = pieces_of([[width] * len(tables) for tables in OWNERS])
    targets = [
        (
            table * WIDTH,
            [
                piece
                for tables, own in zip(OWNERS, pieces, strict=True)
                for each, piece in zip(tables, own, strict=True)
                if each == table
            ],
        )
        for table in range(TABLES)
    ]
    return VectorLayout(targets, width, TABLES * WIDTH, CPU)


# the values between which 16 bits round: ties, subnormals, the largest, infinity, NaN
HARD = torch.tensor(
    [0.0, -0.0, 1 + 2**-9, 1 + 3 * 2**-9, 1 + 2**-11, 1 + 3 * 2**-11, 2.0**-25, 3 * 2.0**-25,
     2.0**-14 - 2.0**-26, -(2.0**-24), 65519.0, 65520.0, -7e4, 3.4e38, torch.inf, -torch.inf,
     torch.nan, 1e-40],
)  # fmt: skip


def _same(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert found.dtype == wanted.dtype
    assert torch.equal(found.isnan(), wanted.isnan())
    bits = torch.int32 if wanted.dtype == torch.float32 else torch.int16
    numbers = ~wanted.isnan()
    assert torch.equal(found.view(bits)[numbers], wanted.view(bits)[numbers])


@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16, torch.float16])
def test_vectors_and_gradients(wire: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(ROWS, TABLES, WIDTH, generator=generator) * 3
    rows.view(-1)[: len(HARD)] = HARD
    layout = _layout()
    message = torch.full((ROWS * WIDTH * 6,), 9.0, dtype=wire)
    layout.scatter(rows, message)
    _same(message, torch.cat([rows[:, tables].to(wire).flatten() for tables in OWNERS]))
    sizes = [ROWS * len(tables) * WIDTH for tables in OWNERS]
    parts = [
        part.view(ROWS, -1, WIDTH).float()
        for part in message.split(sizes)
    ]  # fmt: skip
    gathered = torch.full((ROWS, TABLES, WIDTH), 9.0)
    layout.gather(message, gathered)
    cut = parts[0][:, 1] + parts[1][:, 0] + parts[2][:, 0]
    _same(gathered, torch.stack([parts[1][:, 1], cut, parts[0][:, 0], parts[1][:, 2]], 1))


def test_columns_that_are_not_met_stay() -> None:
    """A route of narrower blocks fills its own columns only."""
    layout = VectorLayout([(1, pieces_of([[2]])[0])], 2, TABLES * WIDTH, CPU)
    rows = torch.zeros(2, TABLES, WIDTH)
    layout.gather(torch.tensor([1.0, 2.0, 3.0, 4.0]), rows)
    assert rows[:, 0, 1:3].tolist() == [[1, 2], [3, 4]]
    assert rows.count_nonzero() == 4
    layout.gather(torch.empty(0), torch.empty(0, TABLES, WIDTH))  # a rank without rows


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids(dtype: torch.dtype) -> None:
    """Ids of 65,536 rows fit 16 bits, and one row more needs 32."""
    sizes = [65_536, 65_537, 3, 2**31 - 1]
    ids = torch.tensor([[65_535, 65_536, 2, 2**31 - 2], [0, 3, 1, 70_000]], dtype=dtype)
    asked = [[1, 0], [3], [0, 2, 1]]
    senders = [IdLayout(asked, 0, sizes, [0, 0], CPU) for _ in range(2)]
    assert senders[0].units == [3, 2, 4]
    messages = [sender.pack(each) for sender, each in zip(senders, (ids, ids[1:]), strict=True)]
    assert [len(message) for message in messages] == [2 * 2 * 9, 2 * 9]
    # rank 2 gets two rows of the one and one of the other
    begin = 2 * (3 + 2)
    to_last = torch.cat([messages[0][2 * begin :], messages[1][begin:]])
    last = IdLayout(asked, 2, sizes, [0, 1, 60_000], CPU)
    wanted = torch.cat([ids, ids[1:]])[:, asked[2]] - torch.tensor([0, 1, 60_000])
    assert torch.equal(last.unpack(to_last, 3), wanted.int())
