"""DLRM from the first profile to the captured step.

A first profile, five stages of the look-up, what the modulus costs in AUC against a vocabulary, how
many launches a training step has, and how to get rid of most of them.

    python examples/dlrm_profile.py
    fuselab profile dlrm --backward
    fuselab train dlrm --mode eager|compile|fused --profile
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import record_function
from torch.utils._python_dispatch import TorchDispatchMode

import fuselab
from fuselab.data import Batch, Modulus, Vocabulary, log_counts, pieces
from fuselab.models.dlrm import MAIN, SMALL
from fuselab.ops.vocabulary_indices.reference import vocabulary
from fuselab.train.dlrm import model_of
from fuselab.train.dlrm_modes import MODES, step_of
from fuselab.train.metrics import metrics

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BUDGET_S = 0.3  # per timing
ROWS = 70_000  # synthetic rows, in Criteo's layout; the last seventh is held out
BATCH = 256

# ## The rows


@dataclass(frozen=True)
class Clicks:
    """The rows: ``dense`` float32 [n, 13], ``labels`` float32 [n], raw ``ids`` int64 [n, 26]."""

    dense: Tensor
    labels: Tensor
    ids: numpy.ndarray

    @property
    def trained(self) -> int:
        return len(self.ids) * 6 // 7


@functools.cache
def clicks() -> Clicks:
    parts = list(pieces(ROWS))
    counts, ids, labels = (
        numpy.concatenate([getattr(part, name) for part in parts])
        for name in ("counts", "ids", "labels")
    )
    return Clicks(torch.from_numpy(log_counts(counts)), torch.from_numpy(labels).float(), ids)


def frequent_ids(at_least: int) -> list[numpy.ndarray]:
    """Return, per column, the ids that occur at least that often in the training rows,
    ascending."""
    rows = clicks()
    columns = []
    for column in rows.ids[: rows.trained].T:
        values, count = numpy.unique(column, return_counts=True)
        columns.append(values[count >= at_least])
    return columns


# ## The first profile
#
# Forward and backward of the small configuration, with the dot interaction and the look-up as it
# was first written, which is stage 1 below. `record_function` names the parts; `fuselab profile --
# python script.py` shows the same for an unchanged script.


def measure_the_first_profile() -> None:
    ids, lists = some_ids(), [column.tolist() for column in frequent_ids(2)]
    rows = clicks()
    dense, labels = rows.dense[-BATCH:].to(DEVICE), rows.labels[-BATCH:, None].to(DEVICE)
    config = replace(SMALL, interaction="dot")
    model = model_of(config, Modulus(tuple(len(values) for values in lists))).to(DEVICE)
    with fuselab.profile(schedule=(1, 1, 3, 1)) as recording:
        for _ in range(5):
            with record_function("look-up"):
                slots = stage_1(ids, lists)
            with record_function("forward"):
                logits = model.logits_of_rows(dense, slots)
            with record_function("loss"):
                loss = F.binary_cross_entropy_with_logits(logits, labels)
            with record_function("backward"):
                loss.backward()
            recording.step()
    found = recording.result.describe()
    shares = {part["name"]: 100 * part["share"] for part in found["ranges"]}
    for name in ("look-up", "forward", "loss", "backward"):
        print(f"{name:8} {shares[name]:6.1f} % of the step")
    # On a GPU the comparison may be too cheap for a finding; then the costliest finding is shown.
    mend = min(found["findings"], key=lambda each: each["kind"] != "quadratic look-up")
    print(f"{mend['title']} ({mend['source']})")


# ## The look-up in five stages
#
# An id is a 32-bit hash, and a table has some thousand rows, so every forward must turn one into
# the other. Published code does it in these ways, slowest first.
#
# 1. The vocabulary is a Python list, made into a tensor in every forward, and every id is compared
#    with every entry.


def stage_1(ids: Tensor, lists: Sequence[list[int]]) -> Tensor:
    columns = []
    for column, values in enumerate(lists):
        known = torch.tensor(values, device=ids.device)
        equal = ids[:, column].reshape(-1, 1) == known.reshape(1, -1)
        columns.append(equal.int().argmax(1))
    return torch.stack(columns, 1)


# 2. The list becomes a tensor once, on the device.


def stage_2(ids: Tensor, tensors: Sequence[Tensor]) -> Tensor:
    columns = []
    for column, known in enumerate(tensors):
        equal = ids[:, column].reshape(-1, 1) == known.reshape(1, -1)
        columns.append(equal.int().argmax(1))
    return torch.stack(columns, 1)


# 3. `reshape` becomes `view`. It was a view already, so nothing changes, as a profile shows.


def stage_3(ids: Tensor, tensors: Sequence[Tensor]) -> Tensor:
    columns = []
    for column, known in enumerate(tensors):
        equal = ids.select(1, column).unsqueeze(1) == known.view(1, -1)
        columns.append(equal.int().argmax(1))
    return torch.stack(columns, 1)


# 4. The modulus replaces the vocabulary, which is another model; see below.


def stage_4(ids: Tensor, sizes: Sequence[int]) -> Tensor:
    return torch.stack([(ids[:, column] + 1) % size for column, size in enumerate(sizes)], 1)


# 5. torch.compile makes one kernel of the 26 remainders.
#
# There is a better third stage: a binary search instead of B x V comparisons, with a separate slot
# for unknown ids. The first three stages give unknown ids slot 0, because `argmax` finds nothing,
# and so the embedding of whichever id comes first.


def the_stages_agree() -> None:
    ids, columns = some_ids(), frequent_ids(10)
    tensors = [torch.from_numpy(column).to(DEVICE) for column in columns]
    first = stage_1(ids, [column.tolist() for column in columns])
    assert torch.equal(first, stage_2(ids, tensors)) and torch.equal(first, stage_3(ids, tensors))
    searched = searched_in(columns)(ids)
    unknown = searched == torch.tensor([len(column) for column in columns], device=DEVICE)
    assert torch.equal(first[~unknown], searched[~unknown])
    assert unknown.any()
    print(f"unknown ids: the first three stages send them to slots {set(first[unknown].tolist())},")
    print("the search to the slot behind the last known one")
    sizes = SMALL.table_sizes
    hashed = fuselab.ops.hash_indices(ids + 1, torch.tensor(sizes, device=DEVICE))
    assert torch.equal(stage_4(ids, sizes), hashed)


def some_ids() -> Tensor:
    return torch.from_numpy(clicks().ids[-BATCH:]).to(DEVICE)


def searched_in(columns: Sequence[numpy.ndarray]) -> Callable[[Tensor], Tensor]:
    made = vocabulary([torch.from_numpy(column) for column in columns])
    tables = [tensor.to(DEVICE) for tensor in made]
    return lambda ids: fuselab.ops.vocabulary_indices(ids, *tables)


def time_the_stages() -> None:
    ids, columns, sizes = some_ids(), frequent_ids(10), SMALL.table_sizes
    lists = [column.tolist() for column in columns]
    tensors = [torch.from_numpy(column).to(DEVICE) for column in columns]
    of_columns = torch.tensor(sizes, device=DEVICE)
    compiled = torch.compile(stage_4, dynamic=False)
    ways: dict[str, Callable[[], Tensor]] = {
        "1. a list in every forward": lambda: stage_1(ids, lists),
        "2. a tensor on the device": lambda: stage_2(ids, tensors),
        "3. view, not reshape": lambda: stage_3(ids, tensors),
        "   fuselab.ops.vocabulary_indices": functools.partial(searched_in(columns), ids),
        "4. modulus": lambda: stage_4(ids, sizes),
        "5. modulus, compiled": lambda: compiled(ids, sizes),
        "   fuselab.ops.hash_indices": lambda: fuselab.ops.hash_indices(ids, of_columns),
    }
    for name, call in ways.items():
        timing = fuselab.time(call, device=DEVICE, budget_s=BUDGET_S)
        print(f"{name:36} {timing.median_us:9.1f} us")


# ## What the modulus costs
#
# The modulus is fast because it needs no vocabulary. But frequent ids share rows with rare ones,
# and a rare id's few clicks change a frequent id's embedding. A vocabulary of the ids that were
# seen often enough, with one row for all others, is smaller and better. Both models are trained
# alike on the same rows (dot interaction, row-wise Adagrad); this is their AUC on held-out rows:


def measure_modulus_against_vocabulary() -> None:
    found: dict[str, list[tuple[int, float]]] = {"modulus": [], "vocabulary": []}
    for largest in (30, 300, 3_000, 30_000):
        found["modulus"].append(trained_with(Modulus.capped(largest)))
    for at_least in (100, 20, 5, 2):
        found["vocabulary"].append(trained_with(Vocabulary(frequent_ids(at_least))))
    for name, points in found.items():
        for rows, auc in points:
            print(f"{name:10} {rows:7,} rows of embeddings: AUC {auc:.4f}")
    plot(found)


def trained_with(ids: Modulus | Vocabulary) -> tuple[int, float]:
    """Train with these ids; return the number of embedding rows, and the AUC after one pass."""
    rows = clicks()
    torch.manual_seed(0)
    model = model_of(replace(SMALL, interaction="dot"), ids).to(DEVICE)
    step = step_of("fused", model, "adagrad", BATCH)
    indices = torch.from_numpy(ids.indices(rows.ids)).int()
    for begin in range(0, rows.trained - BATCH + 1, BATCH):
        part = slice(begin, begin + BATCH)
        batch = (rows.labels[part], rows.dense[part], indices[part])
        step(Batch(*(tensor.to(DEVICE) for tensor in batch)), 0.02)
    rest = slice(rows.trained, None)
    with torch.no_grad():
        logits = model.logits_of_rows(rows.dense[rest].to(DEVICE), indices[rest].to(DEVICE))
    return sum(ids.cardinalities), metrics(logits[:, 0], rows.labels[rest]).auc


def plot(found: dict[str, list[tuple[int, float]]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(7, 3.2), layout="constrained")
    for name, points in found.items():
        axis.plot(*zip(*points, strict=True), "o-", label=name)
    axis.set(xscale="log", xlabel="rows of embeddings, all tables", ylabel="AUC, held out")
    axis.legend()
    figure.savefig("dlrm_auc.png", dpi=90)
    print("wrote dlrm_auc.png")


# ## How many launches is a step?
#
# At batch 128 every operation of a step is small, and on a GPU each costs a launch, about five
# microseconds of the host's time. This counts them for the main configuration with small tables:


class Launches(TorchDispatchMode):
    """Counts operations that compute, by name; views and allocations launch nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.__name__.split(".")[0]
        if not function.is_view and not name.startswith(("empty", "new_empty", "detach")):
            self.names[name] += 1
        return function(*args, **(kwargs or {}))


STEPPED = replace(MAIN, largest_table=10_000)


def a_batch(size: int) -> Batch:
    generator = torch.Generator().manual_seed(0)
    dense = torch.rand(size, 13, generator=generator)
    labels = (torch.rand(size, generator=generator) < 0.25).float()
    sizes = torch.tensor(STEPPED.table_sizes)
    rows = (torch.rand(size, 26, generator=generator) * sizes).int()
    return Batch(labels.to(DEVICE), dense.to(DEVICE), rows.to(DEVICE))


def operations_of_a_step() -> None:
    torch.manual_seed(0)
    model = model_of(STEPPED, Modulus(STEPPED.table_sizes))
    step = step_of("eager", model, "sgd", 128)
    batch = Batch(*(tensor.cpu() for tensor in a_batch(128)))
    step(batch, 0.1)
    with Launches() as counted:
        step(batch, 0.1)
    print(f"eager: {counted.names.total()} operations, of which 26 times and more:")
    for name, count in sorted(counted.names.items()):
        if count >= 26:
            print(f"  {name}: {count}")


# The fused step has one look-up for all tables, an interaction, a kernel per layer, and two
# updates: one for all tables, one for all layers. On a GPU the whole step, loss and optimizers
# included, is then captured in one CUDA graph, which is one launch and never waits for the host.
# The learning rate and the batch are in memory that the graph reads.
#
# ## The same numbers
#
# Three modes from the same start on the same batches:


def three_modes() -> None:
    batches = [a_batch(128)] * 5
    for mode in ("eager", "fused"):
        step = made(mode, 128)
        losses = [step(batch, 0.1).item() for batch in batches]
        print(f"{mode:6} {' '.join(f'{loss:.4f}' for loss in losses)}")


def made(mode: str, size: int) -> Callable[[Batch, float], Tensor]:
    torch.manual_seed(0)
    model = model_of(STEPPED, Modulus(STEPPED.table_sizes)).to(DEVICE)
    return step_of(mode, model, "sgd", size)


# The compiled mode as well, timed on the machine that printed this page:


def time_the_modes() -> None:
    batch = a_batch(512)
    for mode in MODES:
        step = made(mode, 512)
        timing = fuselab.time(step, batch, 0.001, device=DEVICE, cold=False, budget_s=BUDGET_S)
        print(f"{mode:8} {timing.median_us:9.1f} us per step of 512 rows")


# ## On an H200
#
# `benchmarks/dlrm_step.py`: the main configuration with Kaggle's tables. `strong` is plain PyTorch
# at its best: one table, `index_add_`, a compiled dense part, all of it in one CUDA graph.
#
# [steps: dlrm_step.json]
#
# [bars: steps dlrm_step.json]

STEPS = (
    measure_the_first_profile,
    the_stages_agree,
    time_the_stages,
    measure_modulus_against_vocabulary,
    operations_of_a_step,
    three_modes,
    time_the_modes,
)


def main() -> None:
    for step in STEPS:
        step()


if __name__ == "__main__":
    main()
