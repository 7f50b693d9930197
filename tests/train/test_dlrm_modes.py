"""Eager, compile and fused: the same gradients and the same weights, for every optimizer; state
moves between them, and from and to plain PyTorch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from fuselab.data import Batch, Rows, pieces, to_batch
from fuselab.data.records import as_batch
from fuselab.errors import UnknownNameError
from fuselab.models.branch import Branch
from fuselab.models.dlrm import Dlrm, DlrmConfig
from fuselab.train import dlrm_modes
from fuselab.train.dlrm_modes import FusedStep, Step, step_of

TINY = DlrmConfig(
    dense_hidden=(24,), embedding_dim=4, prediction_hidden=(16, 8), interaction="dot",
    largest_table=40,
)  # fmt: skip
ROWS = 48


def _model(interaction: str = "dot", seed: int = 0) -> Dlrm:
    torch.manual_seed(seed)
    return Dlrm(replace(TINY, interaction=interaction))


@functools.cache
def _rows() -> Rows:
    return next(pieces(6 * ROWS))


def _batches(count: int, model: Dlrm) -> list[Batch]:
    rows = _rows()
    made = [to_batch(rows[start : start + ROWS]) for start in range(0, count * ROWS, ROWS)]
    return [Batch(each.labels, each.dense, model.rows(each.sparse)) for each in made]


def _train(step: Step, batches: list[Batch], first: int = 0) -> list[float]:
    rates = [0.05 / (1 + place) for place in range(first, first + len(batches))]
    return [float(step(batch, rate)) for batch, rate in zip(batches, rates, strict=True)]


@pytest.mark.parametrize("interaction", ["outer", "dot", "cat"])
def test_fused_gradients_are_eagers(interaction: str) -> None:
    batch = _batches(1, _model())[0]
    expected = step_of("eager", _model(interaction), "sgd", ROWS).gradients(batch)
    found = step_of("fused", _model(interaction), "sgd", ROWS).gradients(batch)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert gradient.abs().max() > 0
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-7, msg=name)


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "adam"])
@pytest.mark.parametrize("half", [False, True])
def test_fused_trains_as_eager_does(optimizer: str, half: bool) -> None:
    eager, fused = _model(), _model()
    batches = _batches(5, eager)
    wanted = _train(step_of("eager", eager, optimizer, ROWS, half), batches)
    found = _train(step_of("fused", fused, optimizer, ROWS, half), batches)
    assert wanted[0] != wanted[-1]
    assert found == pytest.approx(wanted, rel=2e-2 if half else 1e-4)
    before = _model().state_dict()
    for name, value in eager.state_dict().items():
        if half:
            assert not torch.equal(before[name], fused.state_dict()[name])
            continue
        torch.testing.assert_close(fused.state_dict()[name], value, rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "adam"])
@pytest.mark.parametrize(("first", "second"), [("eager", "fused"), ("fused", "eager")])
def test_state_moves_between_modes(optimizer: str, first: str, second: str) -> None:
    through, moved = _model(), _model(seed=1)
    batches = _batches(6, through)
    before = step_of(first, through, optimizer, ROWS)
    _train(before, batches[:3])
    after = step_of(second, moved, optimizer, ROWS)
    moved.load_state_dict(through.state_dict())
    after.load_state({name: value.clone() for name, value in before.state().items()})
    wanted = _train(before, batches[3:], 3)
    assert _train(after, batches[3:], 3) == pytest.approx(wanted, rel=1e-4)
    assert after.state().keys() == before.state().keys()
    for name, value in before.state().items():
        torch.testing.assert_close(
            after.state()[name].float(), value.float(), rtol=1e-3, atol=1e-5, msg=name
        )


def test_what_trained_fused_is_a_plain_state_dict() -> None:
    fused, plain = _model(), _model(seed=1)
    batch = _batches(1, fused)[0]
    _train(step_of("fused", fused, "sgd", ROWS), [batch])
    plain.load_state_dict(fused.state_dict())
    logits = plain.logits_of_rows(batch.dense, batch.sparse)
    loss = F.binary_cross_entropy_with_logits(logits, batch.labels[:, None])
    assert float(step_of("fused", fused, "sgd", ROWS)(batch, 1e-9)) == pytest.approx(loss.item())


class PromptStream(Branch):
    """Without a GPU: work of a branch is done at once."""

    def __init__(self) -> None:
        self.joined = 0

    @contextmanager
    def beside(self, *used: torch.Tensor) -> Iterator[None]:
        yield

    def join(self) -> None:
        self.joined += 1


class LateStream(PromptStream):
    """Without a GPU: the slowest stream there can be. What the block makes is NaN until the join,
    so whoever reads it too early shows."""

    def __init__(self) -> None:
        super().__init__()
        self.late: list[tuple[torch.Tensor, torch.Tensor]] = []

    @contextmanager
    def beside(self, *used: torch.Tensor) -> Iterator[None]:
        with Made() as made:
            yield
        for tensor in made.tensors:
            self.late.append((tensor, tensor.clone()))
            tensor.detach().fill_(torch.nan)

    def join(self) -> None:
        super().join()
        while self.late:
            tensor, value = self.late.pop()
            tensor.detach().copy_(value)


class Made(TorchDispatchMode):
    """The floating-point tensors that the operators of a block return in memory of their own: a
    view of a weight is none of them."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        given = {value.data_ptr() for value in args if isinstance(value, torch.Tensor)}
        for each in results if isinstance(results, list | tuple) else [results]:
            if (
                isinstance(each, torch.Tensor)
                and each.is_floating_point()
                and each.data_ptr() not in given
            ):
                self.tensors.append(each)
        return results


@pytest.mark.parametrize("interaction", ["outer", "dot"])
@pytest.mark.parametrize("half", [False, True])
def test_nothing_of_a_branch_is_read_before_the_join(interaction: str, half: bool) -> None:
    batch = _batches(1, _model())[0]
    plain = step_of("fused", _model(interaction), "sgd", ROWS, half).gradients(batch)
    found = []
    for branch in (PromptStream(), LateStream()):
        step = FusedStep(_model(interaction), "sgd", ROWS, half)
        step.branch = step.fused.branch = branch
        found.append(step.gradients(batch))
        assert branch.joined == 2
    for name, gradient in plain.items():
        assert torch.equal(found[1][name], found[0][name]), name
        bar = {"rtol": 2**-7, "atol": 2e-4} if half else {"rtol": 1e-5, "atol": 1e-7}
        torch.testing.assert_close(found[0][name], gradient, **bar, msg=name)


def test_the_loss_comes_from_the_branch() -> None:
    batch = _batches(1, _model())[0]
    wanted = float(step_of("fused", _model(), "sgd", ROWS)(batch, 0.1))
    step = FusedStep(_model(), "sgd", ROWS)
    step.branch = step.fused.branch = LateStream()
    assert float(step(batch, 0.1)) == pytest.approx(wanted, rel=1e-6)


class Replayed:
    """``Captured`` without a GPU: the work is done again instead of replayed."""

    def __init__(self, work: Callable[[], None], device: torch.device) -> None:
        self.work = work
        for _ in range(4):  # three warm-ups and the capture
            work()

    def __call__(self) -> None:
        self.work()


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "adam"])
@pytest.mark.parametrize("half", [False, True])
def test_capturing_changes_nothing_and_replays_read_the_batch(
    optimizer: str, half: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dlrm_modes, "Captured", Replayed)
    plain, static = _model(), _model()
    step = FusedStep(static, optimizer, ROWS, half)
    step._capture(ROWS, torch.device("cpu"))
    for name, value in _model().state_dict().items():
        assert torch.equal(static.state_dict()[name], value)
    assert all(not value.any() for value in step.state().values())
    batches = _batches(4, plain)
    words = [torch.zeros(ROWS, 40, dtype=torch.int32) for _ in batches]
    strided = [as_batch(each) for each in words]  # as a Loader gives them
    for mine, batch in zip(strided, batches, strict=True):
        for to, value in zip(mine, batch, strict=True):
            to.copy_(value)
    wanted = _train(step_of("fused", plain, optimizer, ROWS, half), batches)
    assert _train(step, strided) == pytest.approx(wanted, rel=1e-6)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(static.state_dict()[name], value, msg=name)


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "adam"])
@pytest.mark.parametrize("interaction", ["dot", "outer"])
@pytest.mark.parametrize("half", [False, True])
def test_the_graph_trains_as_eager_on_the_cpu_does(
    optimizer: str, interaction: str, half: bool
) -> None:
    eager, fused = _model(interaction), _model(interaction).cuda()
    batches = _batches(6, eager)
    wanted = _train(step_of("eager", eager, optimizer, ROWS), batches)
    step = step_of("fused", fused, optimizer, ROWS, half)
    assert step.graph is not None
    before = _model(interaction).state_dict()
    for name, value in fused.state_dict().items():  # capturing has changed nothing
        assert torch.equal(value.cpu(), before[name])
    found = _train(step, [Batch(*(each.cuda() for each in batch)) for batch in batches])
    assert found == pytest.approx(wanted, rel=3e-2 if half else 1e-3)
    if not half:
        for name, value in eager.state_dict().items():
            torch.testing.assert_close(
                fused.state_dict()[name].cpu(), value, rtol=1e-2, atol=1e-3, msg=name
            )


@pytest.mark.gpu
@pytest.mark.parametrize(("optimizer", "half"), [("sgd", False), ("adagrad", False), ("sgd", True)])
def test_branches_change_nothing(optimizer: str, half: bool) -> None:
    """The forward is the same kernels. Sums behind a weight's gradient may be taken in another
    order: in bfloat16 its last bit, 2**-8 of it, and so of an SGD step of 0.05. Adagrad's first
    steps are the gradients' signs, where the last bit of one near 0 is a whole step."""
    plain, branched = _model().cuda(), _model().cuda()
    for model in (plain, branched):  # vectors of another batch would change the loss by 2**-4
        for table in model.embeddings:
            table.weight.data *= 4
    batches = [Batch(*(each.cuda() for each in batch)) for batch in _batches(6, _model())]
    wanted = _train(FusedStep(plain, optimizer, ROWS, half, branches=False), batches)
    step = FusedStep(branched, optimizer, ROWS, half)
    assert step.branch is not None
    found = _train(step, batches)
    assert found[0] == pytest.approx(wanted[0], rel=1e-6)
    assert found == pytest.approx(wanted, rel=1e-3 if half else 1e-5)
    bar = {"rtol": 2**-8, "atol": 1e-3} if half else {"rtol": 1e-4, "atol": 1e-5}
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(branched.state_dict()[name], value, **bar)


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "taken"), [(8192, True), (8193, False)])
def test_branches_are_for_small_batches(rows: int, taken: bool) -> None:
    assert (FusedStep(_model().cuda(), "sgd", rows).branch is not None) == taken
    assert FusedStep(_model().cuda(), "sgd", rows, branches=False).branch is None


@pytest.mark.gpu
def test_a_step_waits_for_nothing() -> None:
    model = _model().cuda()
    batch = Batch(*(each.cuda() for each in _batches(1, _model())[0]))
    step = step_of("fused", model, "sgd", ROWS)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            step(batch, 0.1)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_an_unknown_mode_or_optimizer() -> None:
    with pytest.raises(UnknownNameError) as refused:
        step_of("fussed", _model(), "sgd", ROWS)
    assert (refused.value.kind, refused.value.name) == ("mode", "fussed")
    assert "fused" in refused.value.known
    for mode in ("eager", "fused"):
        with pytest.raises(UnknownNameError) as refused:
            step_of(mode, _model(), "lion", ROWS)
        assert (refused.value.kind, refused.value.name) == ("optimizer", "lion")
