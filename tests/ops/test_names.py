"""``fuselab.ops.NAME`` is the operator's function, whatever was imported before and how."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import fuselab
from fuselab import ops
from fuselab.errors import ContractError


@pytest.fixture
def doubled(tmp_path: Path) -> Iterator[None]:
    """A kernel package ``doubled`` in the library, not yet imported."""
    package = tmp_path / "doubled"
    package.mkdir()
    (package / "__init__.py").write_text("from fuselab.ops.doubled.op import doubled\n")
    (package / "op.py").write_text(
        "OP = 'no contract'\ndef doubled(input):\n    return 2 * input\n"
    )
    (tmp_path / "shared_source").mkdir()
    (tmp_path / "shared_source" / "__init__.py").write_text("")
    ops.__path__.append(str(tmp_path))
    yield
    ops.__path__.remove(str(tmp_path))
    for name in ("doubled", "shared_source"):
        vars(ops).pop(name, None)
        for module in [name_ for name_ in sys.modules if name_.startswith(f"fuselab.ops.{name}")]:
            del sys.modules[module]


@pytest.mark.usefixtures("doubled")
@pytest.mark.parametrize(
    "imports",
    [
        "import fuselab; call = fuselab.ops.doubled",
        "from fuselab import ops; call = ops.doubled",
        "from fuselab.ops import doubled as call",
        "import fuselab.ops.doubled; call = fuselab.ops.doubled",
        "import fuselab.ops.doubled.op; call = fuselab.ops.doubled",
        "from fuselab.ops.doubled.op import OP; from fuselab.ops import doubled as call",
        "from fuselab.ops.doubled import op; import fuselab; call = fuselab.ops.doubled",
        "from fuselab.ops.doubled import doubled as call",
        "import importlib, fuselab; importlib.import_module('fuselab.ops.doubled.op');"
        "call = fuselab.ops.doubled",
    ],
)
def test_the_function_under_every_import(imports: str) -> None:
    names: dict = {}
    exec(imports, names)
    assert names["call"](21) == 42
    assert fuselab.ops.doubled(21) == 42


@pytest.mark.usefixtures("doubled")
def test_dynamo_sees_through_the_lazy_name() -> None:
    compiled = torch.compile(
        lambda input: fuselab.ops.doubled(input) + 1, backend="eager", fullgraph=True
    )
    assert compiled(torch.tensor([1.0, -3.0])).tolist() == [3.0, -5.0]


@pytest.mark.usefixtures("doubled")
def test_packages_are_the_folders_with_a_contract() -> None:
    assert "doubled" in ops.packages()
    assert "shared_source" not in ops.packages()
    assert "doubled" in dir(ops)
    with pytest.raises(ContractError, match=r"doubled/op\.py has no operator 'doubled'"):
        ops.contract("doubled")


def test_an_unknown_operator_says_which_there_are() -> None:
    with pytest.raises(AttributeError, match=r"'sofmax'.*softmax"):
        _ = ops.sofmax


def test_every_package_of_the_library_meets_the_contract() -> None:
    assert {"add_mul_activation", "bias_activation", "softmax"} <= set(ops.packages())
    for name in ops.operators():
        assert ops.contract(name).name == f"fuselab::{name}"
        assert getattr(ops, name) is ops.function(name)
        assert callable(getattr(ops, name))
        # Type checkers see the function too, not the subpackage's module.
        assert f" {name} as {name}" in Path(ops.__file__ or "").read_text()


def test_an_in_place_form_is_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    found = ops.softmax_
    monkeypatch.setattr(ops, "packages", lambda: pytest.fail("looked for again"))
    assert ops.softmax_ is found
