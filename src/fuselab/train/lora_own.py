"""``fuselab train lora`` on the user's own model, data and loss: adapters on every linear layer."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuselab.errors import TargetError
from fuselab.nn import LoRALinear
from fuselab.train.lora import Settings, run_mode, times_and_memory, validate
from fuselab.train.lora_modes import Batch, PlainStep, trained
from fuselab.train.own import Loss, Own, check_step, load_loss, load_model, own_batches
from fuselab.train.schedule import Schedule

TOLERANCE = 0.03  # allowed difference of the held-out losses between modes, relative above 1
_BATCHES = 64  # at most so many different batches are made


@dataclass(frozen=True)
class OwnModeResult:
    """The result of one mode. Times are microseconds per step; ``differentiate_us`` is the part of
    forward, loss and backward, ``peak_bytes`` what they need beside model and optimizer."""

    mode: str
    loss: float
    held_out: float
    step_us: float
    low_us: float
    high_us: float
    differentiate_us: float | None
    peak_bytes: int


@dataclass(frozen=True)
class OwnLoraResult:
    """The result of ``train_own``; ``layers`` are the linear layers that got an adapter, ``before``
    the held-out loss of the untrained adapters, which is the base's."""

    settings: Settings
    own: Own
    parameters: int
    trained: int
    layers: int
    before: float
    modes: Sequence[OwnModeResult]

    @property
    def agree(self) -> bool:
        """Whether all modes reached the same held-out loss."""
        found = [mode.held_out for mode in self.modes]
        return max(found) - min(found) <= TOLERANCE * max(1.0, abs(self.before))


class _PlainLoRA(nn.Module):
    """An adapted layer in the usual spelling: four operations."""

    def __init__(self, layer: LoRALinear) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden: Tensor) -> Tensor:
        layer = self.layer
        update = F.linear(F.linear(hidden, layer.lora_a), layer.lora_b)
        result: Tensor = F.linear(hidden, layer.weight, layer.bias) + layer.scale * update
        return result


class _OwnStep(PlainStep):
    """A step of the user's model with the user's loss."""

    def __init__(self, model: nn.Module, loss: Loss, amp: bool, compiled: bool) -> None:
        self.loss_of = loss
        super().__init__(model, amp, compiled)

    def _loss(self, inputs: Tensor, target: Tensor) -> Tensor:
        with torch.autocast(inputs.device.type, torch.bfloat16, enabled=self.amp):
            output = self.model(inputs)
        return self.loss_of(output, target)


@dataclass(frozen=True)
class _Batches:
    """The user's batches, again and again."""

    held: Sequence[Batch]

    def batches(self, size: int, seed: int) -> Iterator[Batch]:
        while True:
            yield from self.held


def default_loss(output: Tensor, target: Tensor) -> Tensor:
    """Return the cross entropy for whole-number targets, else the mean squared error."""
    if target.is_floating_point():
        return F.mse_loss(output.float(), target.float())
    return F.cross_entropy(output.float(), target)


def train_own(
    settings: Settings,
    own: Own,
    device: torch.device,
    say: Callable[[str], None] = lambda sentence: None,
) -> OwnLoraResult:
    """Train adapters on every ``nn.Linear`` of the user's model in every mode, from the same start
    on the same batches, then time the steps in turn.

    Raises TargetError for a model without such a layer, or where model, data and loss do not fit.
    """
    if own.model is None or own.data is None:
        raise TargetError("adapters of your own need both --model FILE:NAME and --data FILE:NAME.")
    validate(settings, None)
    loss = default_loss if own.loss is None else load_loss(own.loss, device)
    torch.manual_seed(settings.seed)
    start = load_model(own.model, device)
    layers = _adapt(start, settings.rank, settings.alpha)
    if layers == 0:
        raise TargetError(f"--model {own.model} has no nn.Linear that an adapter could go on.")
    made = own_batches(own.data, min(settings.steps, _BATCHES) + 1, settings.seed)
    *batches, held_out = [(one.to(device), other.to(device)) for one, other in made]
    check_step(start, loss, held_out)
    schedule = Schedule(settings.lr, settings.steps, decay=1)
    rows = _Batches(batches)
    steps, curves = {}, {}
    for mode in settings.modes:
        say(f"adapters, {mode}")
        model = copy.deepcopy(start)
        if mode != "fused":
            _replace(model, LoRALinear, _PlainLoRA)
        steps[mode] = _OwnStep(model, loss, settings.amp, compiled=mode == "compile")
        curves[mode] = run_mode(steps[mode], rows, settings, schedule, device)
    ends = {mode: _value(step.model, loss, held_out) for mode, step in steps.items()}
    say("timing the steps")
    times, memory = times_and_memory(steps, rows, settings, device)
    results = [
        OwnModeResult(mode, curves[mode][-1][1], ends[mode], *times[mode], memory[mode])
        for mode in settings.modes
    ]
    return OwnLoraResult(
        settings,
        own,
        sum(one.numel() for one in start.parameters()),
        sum(one.numel() for one in trained(start)),
        layers,
        _value(start, loss, held_out),
        results,
    )


def _adapt(model: nn.Module, rank: int, alpha: float) -> int:
    """Freeze a model and put an adapter on each of its linear layers; return their number."""
    model.requires_grad_(False)
    return _replace(model, nn.Linear, lambda layer: LoRALinear(layer, rank, alpha))


def _replace(
    model: nn.Module, kind: type[nn.Module], make: Callable[[nn.Module], nn.Module]
) -> int:
    count = 0
    for name, child in list(model.named_children()):
        if type(child) is kind:
            setattr(model, name, make(child))
            count += 1
        else:
            count += _replace(child, kind, make)
    return count


@torch.no_grad()
def _value(model: nn.Module, loss: Loss, batch: Batch) -> float:
    return float(loss(model(batch[0]), batch[1]).item())
