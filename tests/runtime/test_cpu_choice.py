"""The choice of ``auto`` on a CPU, by tables of measured times."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fuselab import ops
from fuselab.prove import cpu_times
from fuselab.prove.load import load_op
from fuselab.runtime import cpu_choice, dispatch

SOFTMAX = ops.contract("softmax")
Install = Callable[..., None]


def softmax_table(*points: tuple[int, float, float], use: str = "inference") -> dict[str, Any]:
    """A table of one regime: bytes moved, the reference's microseconds and the kernel's."""
    measured = [[moved, {"reference": theirs, "cpp": ours}] for moved, theirs, ours in points]
    return {use: {"float32": {"rows up to 127": measured}}}


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Put tables of softmax into force: the shipped one, and the machine's own."""

    def put(shipped: dict[str, Any] | None, own: dict[str, Any] | None = None) -> None:
        for name, table in (("shipped_file", shipped), ("own_file", own)):
            file = tmp_path / f"{name}.json"
            file.unlink(missing_ok=True)
            if table is not None:
                payload = {"schema": cpu_choice.SCHEMA, "operators": {"softmax": table}}
                file.write_text(json.dumps(payload))
            monkeypatch.setattr(cpu_choice, name, lambda file=file: file)
        cpu_choice.forget()

    yield put
    monkeypatch.undo()
    cpu_choice.forget()


def rows(count: int, requires_grad: bool = False) -> tuple[Any, ...]:
    """Arguments of softmax that move 512 bytes a row."""
    return torch.randn(count, 64, requires_grad=requires_grad), -1, None


def test_the_faster_one_is_taken_between_sizes_that_agree(install: Install) -> None:
    install(softmax_table((512, 10, 5), (51_200, 100, 50), (512_000, 900, 1000)))
    assert dispatch.choose(SOFTMAX, rows(1)) == "cpp"
    assert dispatch.choose(SOFTMAX, rows(10)) == "cpp"
    assert dispatch.choose(SOFTMAX, rows(100)) == "cpp"
    assert dispatch.choose(SOFTMAX, rows(200)) == "reference"
    assert dispatch.choose(SOFTMAX, rows(1000)) == "reference"


def test_past_the_ends_the_last_size_counts(install: Install) -> None:
    install(softmax_table((5_120, 10, 20), (51_200, 100, 50)))
    assert dispatch.choose(SOFTMAX, rows(1)) == "reference"
    assert dispatch.choose(SOFTMAX, rows(5000)) == "cpp"


def test_a_difference_within_the_margin_is_none(install: Install) -> None:
    install(softmax_table((512, 100, 98)))
    assert dispatch.choose(SOFTMAX, rows(1)) == "reference"


def test_where_nothing_was_measured_it_is_the_reference(install: Install) -> None:
    install(softmax_table((512, 10, 1)))
    assert dispatch.choose(SOFTMAX, rows(1)) == "cpp"
    assert dispatch.choose(SOFTMAX, (torch.randn(1, 64).double(), -1, None)) == "reference"
    assert dispatch.choose(SOFTMAX, (torch.randn(1, 300), -1, None)) == "reference"
    install(None)
    assert dispatch.choose(SOFTMAX, rows(1)) == "reference"


def test_a_call_that_needs_a_gradient_must_win_both_ways(install: Install) -> None:
    training = softmax_table((512, 10, 1), use="training")
    inference = softmax_table((512, 10, 1))
    install(training | inference)
    assert dispatch.choose(SOFTMAX, rows(1, requires_grad=True)) == "cpp"
    install(inference)
    assert dispatch.choose(SOFTMAX, rows(1, requires_grad=True)) == "reference"
    with torch.no_grad():
        assert dispatch.choose(SOFTMAX, rows(1, requires_grad=True)) == "cpp"
    install(training)
    assert dispatch.choose(SOFTMAX, rows(1, requires_grad=True)) == "reference"


def test_the_machines_own_table_goes_first(install: Install) -> None:
    install(softmax_table((512, 10, 1)), own=softmax_table((512, 10, 20)))
    assert dispatch.choose(SOFTMAX, rows(1)) == "reference"


def test_a_file_that_cannot_be_read_is_passed_over(install: Install) -> None:
    install(softmax_table((512, 10, 1)))
    cpu_choice.own_file().write_text("{")
    cpu_choice.forget()
    with pytest.warns(UserWarning, match="passed over"):
        assert dispatch.choose(SOFTMAX, rows(1)) == "cpp"
    cpu_choice.own_file().write_text('{"schema": 0}')
    cpu_choice.forget()
    with pytest.warns(UserWarning, match="doctor --measure writes it anew"):
        assert dispatch.choose(SOFTMAX, rows(1)) == "cpp"


def test_forced_holds_for_its_block(install: Install) -> None:
    install(None)
    with cpu_choice.forced("cpp"):
        assert dispatch.choose(SOFTMAX, rows(1)) == "cpp"
    assert dispatch.choose(SOFTMAX, rows(1)) == "reference"


def test_summary_counts_what_is_won(install: Install) -> None:
    install(softmax_table((512, 10, 5), (51_200, 100, 100), (512_000, 900, 100)))
    assert cpu_choice.summary(cpu_choice.shipped_file()) == {"softmax": (2, 3)}


TABLES = sorted((Path(cpu_choice.__file__).parent / "measured").glob("cpu-*.json"))


def test_the_table_of_most_machines_has_every_operator() -> None:
    (payload,) = (json.loads(file.read_text()) for file in TABLES if file.stem == "cpu-avx2")
    timed = {name for name in ops.operators() if ops.contract(name).cpu_cases}
    assert set(payload["operators"]) == timed


@pytest.mark.parametrize("file", TABLES, ids=lambda file: file.stem)
def test_a_shipped_table_names_what_exists(file: Path) -> None:
    payload = json.loads(file.read_text())
    assert payload["schema"] == cpu_choice.SCHEMA
    assert file.stem == f"cpu-{payload['instruction_set']}"
    for name, uses in payload["operators"].items():
        names = {"reference", *ops.contract(name).implementations}
        for dtypes in uses.values():
            for regimes in dtypes.values():
                for points in regimes.values():
                    sizes = [size for size, _ in points]
                    assert sizes == sorted(set(sizes))
                    assert all("reference" in times for _, times in points)
                    assert all(names >= times.keys() for _, times in points)


def test_every_operator_is_measured_at_twelve_sizes() -> None:
    """From 64 kB to 200 MB, and its regimes can be told without running it."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in ops.operators():
            op = ops.contract(name)
            listed = [case for case in op.cpu_cases if "row" in case.tags]
            has_kernel = any(known.device == "cpu" for known in op.implementations.values())
            assert len(listed) >= (12 if has_kernel else 0), name


OPERATOR = """
from __future__ import annotations
from pathlib import Path
import torch
from torch import Tensor
from fuselab.op import Case, FusedOp, Implementation

def reference(x: Tensor) -> Tensor:
    return x * 2

OP = FusedOp(
    name="mine::doubled",
    reference=reference,
    implementations={"cpp": Implementation("cpu", lambda x: x + x)},
    cases=(Case.normal([(64,)]),),
)
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    folder = tmp_path / "doubled"
    folder.mkdir()
    (folder / "op.py").write_text(OPERATOR)
    (folder / "cpu_kernels.cpp").write_text("// the first version")
    return folder


def test_a_package_is_chosen_by_its_own_times(install: Install, package: Path) -> None:
    op = load_op(str(package))
    install(None)
    assert dispatch.choose(op, (torch.ones(64),)) == "cpp"
    times = {"inference": {"float32": {"": [[512, {"reference": 1.0, "cpp": 2.0}]]}}}
    payload = {"schema": cpu_choice.SCHEMA, "operators": {cpu_choice.table_key(op): times}}
    cpu_choice.own_file().write_text(json.dumps(payload))
    cpu_choice.forget()
    assert dispatch.choose(op, (torch.ones(64),)) == "reference"
    assert dispatch.choose(op, (torch.ones(64, dtype=torch.float64),)) == "cpp"  # not measured


def test_times_of_other_kernels_do_not_count(package: Path) -> None:
    op = load_op(str(package))
    before = cpu_choice.table_key(op)
    assert before.startswith("mine::doubled ")
    cpu_choice._hash.cache_clear()
    assert cpu_choice.table_key(op) == before
    (package / "cpu_kernels.cpp").write_text("// the second version")
    cpu_choice._hash.cache_clear()
    assert cpu_choice.table_key(op) != before


def test_a_package_is_measured_in_its_cases_and_dtypes(package: Path) -> None:
    table = cpu_times.measure([str(package)], dtypes=["float32", "bfloat16"])
    (times,) = table["operators"].values()
    assert {use: set(dtypes) for use, dtypes in times.items()} == {
        "inference": {"float32", "bfloat16"}
    }
    ((moved, by_provider),) = times["inference"]["float32"][""]
    assert (moved, set(by_provider)) == (512, {"reference", "cpp"})


def test_measuring_the_library_again_keeps_the_times_of_packages(tmp_path: Path) -> None:
    file = tmp_path / "table.json"
    operators: dict[str, Any] = {"softmax": {}, "mine::doubled 0123": {"inference": {}}}
    cpu_times.write(file, {"schema": cpu_choice.SCHEMA, "operators": operators})
    cpu_times._drop_library(file)
    kept = json.loads(file.read_text())
    assert kept == {
        "schema": cpu_choice.SCHEMA,
        "operators": {"mine::doubled 0123": {"inference": {}}},
    }


def test_rows_of_other_operators_keep_their_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, machine = tmp_path / "rows.json", {"cpu": "one", "date": "2026-01-02T03:04"}
    monkeypatch.setattr(cpu_times, "describe", lambda device: dict(machine))
    cpu_times._add_rows(file, [{"operator": "add"}, {"operator": "square"}])
    machine["cpu"] = "two"
    cpu_times._add_rows(file, [{"operator": "square"}, {"operator": "softmax"}])
    found = json.loads(file.read_text())
    assert [place["cpu"] for place in found["environments"]] == ["one", "two"]
    assert [(row["operator"], row["environment"]) for row in found["rows"]] == [
        ("add", 0),
        ("square", 1),
        ("softmax", 1),
    ]
    cpu_times._add_rows(file, [{"operator": "add"}])
    found = json.loads(file.read_text())
    assert [place["cpu"] for place in found["environments"]] == ["two"]
    assert [row["environment"] for row in found["rows"]] == [0, 0, 0]
