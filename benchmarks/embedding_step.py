"""Look-up, backward and update of Criteo's 26 tables: ours against nn.Embedding and one table.

    python benchmarks/embedding_step.py [--device cuda] [--largest ROWS] [--batch B ...]
                                        [--only NAME ...]

Ids are uniform, the upstream gradient is given. On a GPU each step is replayed from a CUDA graph if
it can be captured (sparse gradients cannot), with cold caches. Rows that name a configuration are
the candidates of tuning, the default first: the look-up, the operator's update, and both in turn.
``--only`` keeps the rows that contain one of its names. Rows in a fixed order set PyTorch's
deterministic mode, which fills new memory with NaN, so the look-up's output is written twice.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fuselab.measure.timing import time
from fuselab.op import FusedOp
from fuselab.ops import embedding_lookup
from fuselab.ops._shared.criteo import KAGGLE_CARDINALITIES
from fuselab.ops.embedding_lookup import updating_embedding_lookup
from fuselab.ops.embedding_lookup.op import OP as LOOK_UP
from fuselab.ops.embedding_update.op import ADAGRAD, SGD
from fuselab.runtime import autograd_node, tuning

WIDTH, RATE = 16, 0.01
BUDGET_S = 0.2  # seconds for one figure
Step = Callable[[], object]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--largest", type=int, default=2**31, help="rows of the largest table")
    parser.add_argument("--batch", type=int, nargs="+", default=[128, 2048, 65536])
    parser.add_argument("--only", nargs="+", default=[""], metavar="NAME")
    options = parser.parse_args()
    autograd_node.start()
    sizes = [min(size, options.largest) for size in KAGGLE_CARDINALITIES]
    for batch in options.batch:
        print(f"{batch} ids of {len(sizes)} tables x {WIDTH}, {sum(sizes)} rows, us:")
        for name, (step, captured) in steps(sizes, batch, options.device).items():
            if not any(word in name for word in options.only):
                continue
            graph = captured and options.device != "cpu"
            timing = time(step, device=options.device, graph=graph, budget_s=BUDGET_S)
            print(f"  {name:75} {timing.median_us:10.1f}{'  (CUDA graph)' if graph else ''}")


def steps(sizes: list[int], batch: int, device: str) -> dict[str, tuple[Step, bool]]:
    """Return every step by name, and whether a CUDA graph can contain it."""
    bounds = torch.tensor(sizes, device=device)
    ids = (torch.rand(batch, len(sizes), device=device, dtype=torch.float64) * bounds).long()
    grad = torch.randn(batch, len(sizes), WIDTH, device=device)
    flat = torch.randn(sum(sizes), WIDTH, device=device)
    tables = [table.detach().requires_grad_() for table in flat.clone().split(sizes)]
    states = [torch.zeros(size, device=device) for size in sizes]
    kinds = ["cuda", "triton"] if device != "cpu" else ["cpp"]

    def updating(optimizer: str, kind: str, fixed_order: bool = False) -> Step:
        def step() -> None:
            torch.use_deterministic_algorithms(fixed_order)
            updating_embedding_lookup(
                tables, ids, optimizer, RATE, states, implementation=kind
            ).backward(grad)
            torch.use_deterministic_algorithms(False)

        return step

    def look_up(kind: str) -> Step:
        return lambda: embedding_lookup(held, ids, implementation=kind)

    held = [table.detach() for table in tables]
    found: dict[str, tuple[Step, bool]] = {}
    found["look-up: one table, index_select"] = one_table(flat, sizes, ids, None), True
    for kind in kinds:
        found[f"look-up: {kind}"] = look_up(kind), True
    keys = (ids + torch.tensor([0, *sizes[:-1]], device=device).cumsum(0)).flatten().int()
    found["of a fixed order: torch.sort"] = lambda: torch.sort(keys, stable=True), True
    found["step: nn.Embedding(sparse=True), SGD"] = embeddings(sizes, ids, grad), False
    found["step: one table, index_add_"] = one_table(flat, sizes, ids, grad), True
    for kind in kinds:
        found[f"step: SGD, {kind}"] = updating("sgd", kind), True
        found[f"step: SGD in a fixed order, {kind}"] = updating("sgd", kind, True), True
        found[f"step: row-wise Adagrad, {kind}"] = updating("rowwise_adagrad", kind), True
    half = grad.bfloat16()
    look_ups = list(candidates(LOOK_UP, (held, ids, "error", None, None)))
    for config, step in look_ups:
        found[f"look-up: {config}"] = step, True
    for kind in kinds:
        found[f"look-up: {kind}, bfloat16"] = in_half(held, ids, kind), True
    for name, op, args in (
        ("SGD", SGD, (held, ids, grad, RATE, "error", None)),
        ("SGD of bfloat16", SGD, (held, ids, half, RATE, "error", None)),
        ("row-wise Adagrad", ADAGRAD, (held, states, ids, grad, RATE, 1e-10, "error", None)),
    ):
        for config, update in candidates(op, args):
            found[f"update: {name}, {config}"] = update, True
            firsts = [("bfloat16", in_half(held, ids, "cuda"))] if args[2] is half else look_ups
            for first, step in firsts[: 2 if op is SGD else 1]:
                found[f"step: look-up {first}; {name}, {config}"] = both(step, update), True
    return found


def candidates(op: FusedOp, args: tuple[Any, ...]) -> Iterator[tuple[str, Step]]:
    """Yield a call of ``cuda`` with each of its configurations."""
    if not args[0][0].is_cuda:
        return

    def step(config: Any) -> None:
        with tuning.forced(op.name, "cuda", config):
            op.implementations["cuda"].forward(*args)

    for config in op.configs["cuda"](*args):
        yield str(config), partial(step, config)


def in_half(tables: list[Tensor], ids: Tensor, kind: str) -> Step:
    return lambda: embedding_lookup(tables, ids, dtype=torch.bfloat16, implementation=kind)


def both(first: Step, second: Step) -> Step:
    def step() -> None:
        first()
        second()

    return step


def embeddings(sizes: list[int], ids: Tensor, grad: Tensor) -> Step:
    modules = [torch.nn.Embedding(size, WIDTH, sparse=True, device=ids.device) for size in sizes]
    optimizer = torch.optim.SGD([module.weight for module in modules], lr=RATE)

    def step() -> None:
        optimizer.zero_grad()
        vectors = [module(ids[:, column]) for column, module in enumerate(modules)]
        torch.stack(vectors, 1).backward(grad)
        optimizer.step()

    return step


def one_table(flat: Tensor, sizes: list[int], ids: Tensor, grad: Tensor | None) -> Step:
    starts = torch.tensor([0, *sizes[:-1]], device=ids.device).cumsum(0)

    def step() -> Tensor:
        rows = (ids + starts).flatten()
        vectors = flat.index_select(0, rows)
        if grad is not None:
            flat.index_add_(0, rows, grad.view(-1, WIDTH), alpha=-RATE)
        return vectors

    return step


if __name__ == "__main__":
    main()
