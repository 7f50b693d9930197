"""``fuselab train boxes``: a detector's step by ranges, with the GIoU loss in every spelling, or
the user's own loss, model and data."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite
from statistics import mean, stdev
from time import perf_counter

import torch
from torch import Tensor, nn

from fuselab.device.select import why_no_cuda
from fuselab.errors import ArgumentError, DeviceError, DivergenceError, UnknownNameError
from fuselab.ops import padded_generalized_box_iou_loss
from fuselab.ops.padded_generalized_box_iou_loss.op import OP
from fuselab.runtime import fallback
from fuselab.train.boxes_task import Detector, images_and_boxes
from fuselab.train.interruption import interruptible
from fuselab.train.optimizers import dense_optimizer
from fuselab.train.own import (
    NOTHING_OWN,
    Own,
    check_step,
    fused_loss,
    load_loss,
    load_model,
    own_batches,
)
from fuselab.train.seed import check_seed

LOSSES = ("eager", "compile", "cuda", "triton", "compile(triton)", "cpp")
OWN_LOSSES = ("eager", "compile", "fuse")  # ways to run the user's own loss
MODELS = ("eager", "compile")
RANGES = ("copy", "forward", "loss", "backward", "optimizer")
TOLERANCE = 0.03  # difference of the held-out loss allowed between spellings of the same loss
_RATE, _HELD_OUT, _WARM_UP = 3e-3, 64, 3

Loss = Callable[[Tensor, Tensor], Tensor]
Batch = tuple[Tensor, Tensor]  # images and boxes


@dataclass(frozen=True)
class Settings:
    """The settings of a run: ``runs`` times ``steps`` steps of every variant. ``losses`` None means
    all that run on the device. ``own`` are the user's loss, model and data."""

    losses: Sequence[str] | None = None
    models: Sequence[str] = MODELS
    batch_size: int = 16
    steps: int = 20
    runs: int = 3
    seed: int = 0
    own: Own = NOTHING_OWN


@dataclass(frozen=True)
class Variant:
    """A way to train: how the loss and the model run, and whether boxes are cast to float32."""

    loss: str
    model: str
    casts: bool


@dataclass(frozen=True)
class VariantResult:
    """The result of one variant.

    ``ranges_us`` are microseconds per step by range, means over the steps of all runs; ``step_us``
    is their sum, ``spread_us`` its standard deviation over runs (None for one run), ``held_out``
    the loss after training, by the reference in float32.
    """

    variant: Variant
    ranges_us: dict[str, float]
    step_us: float
    spread_us: float | None
    held_out: float

    @property
    def loss_share(self) -> float:
        """The share of the step that the loss takes, without its part of the backward."""
        return self.ranges_us["loss"] / self.step_us


@dataclass(frozen=True)
class BoxesResult:
    """The result of ``train``. ``before`` is the held-out loss of the untrained model; ``left_out``
    gives, for each loss left out, the reason."""

    settings: Settings
    before: float
    variants: Sequence[VariantResult]
    left_out: dict[str, str]

    @property
    def agree(self) -> bool:
        """Whether all spellings of the loss trained equally well with the same model and casts."""
        allowed = TOLERANCE * max(1.0, abs(self.before))
        found: dict[tuple[str, bool], list[float]] = {}
        for one in self.variants:
            found.setdefault((one.variant.model, one.variant.casts), []).append(one.held_out)
        return all(max(losses) - min(losses) <= allowed for losses in found.values())

    def speedup(self, variant: VariantResult) -> float:
        """Return how many times as fast a step is as that of the first variant."""
        return self.variants[0].step_us / variant.step_us


def train(
    settings: Settings, device: torch.device, say: Callable[[str], None] = lambda sentence: None
) -> BoxesResult:
    """Train every variant from the same start on the same batches, and time the ranges of its
    steps.

    Training is under autocast to bfloat16. The runs of the variants are shuffled, so that drift
    affects all alike. On a GPU a range is the time between two events on its stream, on a CPU wall
    time. The first steps, in which kernels are built, are not timed.

    Raises:
        ArgumentError, UnknownNameError: a setting is invalid.
        DeviceError: a loss asked for by name needs a device that is not there.
        DivergenceError: a loss is not a finite number.
    """
    _validate(settings)
    losses, left_out = losses_of(settings, device)
    generator = torch.Generator().manual_seed(settings.seed)
    if settings.own.data is None:
        batches = [_batch(settings.batch_size, generator, device) for _ in range(settings.steps)]
        images, boxes = images_and_boxes(_HELD_OUT, generator)
        held_out = images.to(device), boxes.to(device)
    else:
        *batches, last = own_batches(settings.own.data, settings.steps + 1, settings.seed)
        held_out = last[0].to(device), last[1].to(device)
    torch.manual_seed(settings.seed)
    start = _model(settings.own, True, device)
    if settings.own.is_any:
        check_step(start, losses["eager"], held_out)
        if "fuse" in losses:
            with torch.no_grad():
                losses["fuse"] = fused_loss(losses["eager"], start(held_out[0]), held_out[1])
    trainers = [
        Trainer(Variant(loss, model, casts), losses[loss], start, device, settings.own)
        for loss in losses
        for model in settings.models
        for casts in ((True, False) if settings.own.model is None else (True,))
    ]
    times: dict[Variant, list[list[float]]] = {trainer.variant: [] for trainer in trainers}
    reference = OP.reference if settings.own.loss is None else losses["eager"]
    shuffle = random.Random(settings.seed).shuffle
    with fallback.strict(), interruptible() as interruption:
        for trainer in trainers:
            say(f"warming {_spelt(trainer.variant)}")
            trainer.run((batches * _WARM_UP)[:_WARM_UP])
        for run in range(settings.runs):
            say(f"run {run + 1} of {settings.runs}")
            order = list(trainers)
            shuffle(order)
            for trainer in order:
                if interruption.asked:
                    raise KeyboardInterrupt
                trainer.reset(start)
                times[trainer.variant].append(trainer.run(batches))
    results = [
        _result(one.variant, times[one.variant], _held_out_loss(one.model, held_out, reference))
        for one in trainers
    ]
    return BoxesResult(settings, _held_out_loss(start, held_out, reference), results, left_out)


class Trainer:
    """One variant with its model, optimizer and loss."""

    def __init__(
        self, variant: Variant, loss: Loss, start: nn.Module, device: torch.device, own: Own
    ) -> None:
        self.variant, self.loss, self.device = variant, loss, device
        self.model = _model(own, variant.casts, device)
        self.call = self.model if variant.model == "eager" else torch.compile(self.model)
        self.reset(start)

    def reset(self, start: nn.Module) -> None:
        """Restore the weights of ``start``, with a fresh optimizer."""
        self.model.load_state_dict(start.state_dict())
        self.optimizer = dense_optimizer("adam", self.model.parameters(), _RATE)

    def run(self, batches: Sequence[Batch]) -> list[float]:
        """Train on the batches; return the mean microseconds per step of each range.

        Nothing waits for a GPU before the last step, so the ranges are those of a real loop.
        """
        clocks = [Clock(self.device) for _ in batches]
        losses = [self._step(*pair) for pair in zip(batches, clocks, strict=True)]
        for number, loss in enumerate(torch.stack(losses).tolist(), 1):
            if not isfinite(loss):
                raise DivergenceError(
                    f"{_spelt(self.variant)}: the loss of step {number} is {loss}; look at the "
                    "loss and the data.",
                    number,
                )
        return [mean(each) for each in zip(*(clock.read() for clock in clocks), strict=True)]

    def _step(self, batch: Batch, clock: Clock) -> Tensor:
        self.optimizer.zero_grad()
        clock.mark()
        images, boxes = (tensor.to(self.device, non_blocking=True) for tensor in batch)
        clock.mark()
        with torch.autocast(self.device.type, torch.bfloat16):
            predicted = self.call(images)
        clock.mark()
        loss = self.loss(predicted, boxes)
        clock.mark()
        loss.backward()
        clock.mark()
        self.optimizer.step()
        clock.mark()
        return loss.detach()


class Clock:
    """Microseconds between marks: events on a GPU's stream, or the wall clock."""

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self.events: list[torch.cuda.Event] = []
        self.seconds: list[float] = []

    def mark(self) -> None:
        if self.on_gpu:
            self.events.append(torch.cuda.Event(enable_timing=True))
            self.events[-1].record()
        else:
            self.seconds.append(perf_counter())

    def read(self) -> list[float]:
        if not self.on_gpu:
            return [1e6 * (end - begin) for begin, end in pairwise(self.seconds)]
        self.events[-1].synchronize()
        return [1e3 * begin.elapsed_time(end) for begin, end in pairwise(self.events)]


def own_loss(implementation: str) -> Loss:
    """Return the loss computed by one of fuselab's implementations."""

    def loss(predicted: Tensor, boxes: Tensor) -> Tensor:
        return padded_generalized_box_iou_loss(predicted, boxes, implementation=implementation)

    return loss


def losses_of(settings: Settings, device: torch.device) -> tuple[dict[str, Loss], dict[str, str]]:
    """Return the losses that run on the device, and for the others the reason why not.

    Raises DeviceError if one of the others was asked for by name.
    """
    if settings.own.loss is not None:
        theirs = load_loss(settings.own.loss, device)
        ways = {"eager": theirs, "compile": torch.compile(theirs), "fuse": theirs}
        return {name: ways[name] for name in settings.losses or ways}, {}
    found: dict[str, Loss] = {}
    left_out = {}
    for name in settings.losses or LOSSES:
        implementation = name.removeprefix("compile(").removesuffix(")")
        own = OP.implementations.get(implementation)
        if own is not None and own.device != device.type:
            left_out[name] = _why_not(own.device)
            continue
        loss = OP.reference if own is None else own_loss(implementation)
        found[name] = torch.compile(loss) if name.startswith("compile") else loss
    if settings.losses and left_out:
        name, reason = next(iter(left_out.items()))
        raise DeviceError(f"--loss {name} {reason}; leave it out.")
    return found, left_out


def _why_not(needed: str) -> str:
    if needed == "cpu":
        return "runs on a CPU"
    return "runs on a GPU" if torch.cuda.is_available() else f"needs a GPU: {why_no_cuda()}"


def _validate(settings: Settings) -> None:
    check_seed(settings.seed)
    for name in ("batch_size", "steps", "runs"):
        if getattr(settings, name) < 1:
            option = name.replace("_", "-")
            raise ArgumentError(f"--{option} is {getattr(settings, name)}; give 1 or more.")
    known = LOSSES if settings.own.loss is None else OWN_LOSSES
    for loss in settings.losses or ():
        if loss not in known:
            raise UnknownNameError("loss", loss, known)
    for model in settings.models:
        if model not in MODELS:
            raise UnknownNameError("mode", model, MODELS)


def _batch(count: int, generator: torch.Generator, device: torch.device) -> Batch:
    """Make a batch, in pinned memory for a GPU, so that it copies while it works."""
    images, boxes = images_and_boxes(count, generator)
    return (images.pin_memory(), boxes.pin_memory()) if device.type == "cuda" else (images, boxes)


@torch.no_grad()
def _held_out_loss(model: nn.Module, batch: Batch, reference: Loss) -> float:
    with torch.autocast(batch[0].device.type, torch.bfloat16):
        predicted = model(batch[0])
    return float(reference(predicted.float(), batch[1]).item())


def _model(own: Own, casts: bool, device: torch.device) -> nn.Module:
    return Detector(casts).to(device) if own.model is None else load_model(own.model, device)


def _result(variant: Variant, runs: Sequence[Sequence[float]], held_out: float) -> VariantResult:
    steps = [sum(run) for run in runs]
    means = [mean(run[place] for run in runs) for place in range(len(RANGES))]
    return VariantResult(
        variant,
        dict(zip(RANGES, means, strict=True)),
        mean(steps),
        stdev(steps) if len(steps) > 1 else None,
        held_out,
    )


def _spelt(variant: Variant) -> str:
    casts = "with" if variant.casts else "without"
    return f"loss {variant.loss}, model {variant.model}, {casts} casts"
