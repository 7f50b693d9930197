"""What is said to have been done about a finding."""

from __future__ import annotations

from typing import Any

import pytest
from sample_study import REPLACED

from fuselab.study.facts import Kernel
from fuselab.study.leads import leads_of

FUSED = Kernel(
    "cpp_fused_0", "generated", "inference", "add, relu", "m.py:3, m.py:4", 8, 1.0, 1.0, None
)
LIBRARY = Kernel("addmm", "library call", "inference", "addmm", "m.py:3", 8, 1.0, None, None)


def finding(kind: str, line: str | None) -> dict[str, Any]:
    return {
        "kind": kind,
        "title": "a title",
        "advice": "some advice",
        "line": line,
        "source": "x",
        "saved_us": 1.0,
        "share": 0.1,
    }


@pytest.mark.parametrize(
    ("kind", "line", "kernels", "state"),
    [
        ("chain", "m.py:3", (FUSED,), "compiled"),
        ("chain", "m.py:4", (LIBRARY, FUSED), "compiled"),
        ("chain", "m.py:3", (LIBRARY,), "open"),
        ("chain", "m.py:33", (FUSED,), "open"),
        ("blown-up operand", "m.py:3", (FUSED,), "open"),
        ("chain", None, (FUSED,), "open"),
        ("torch.compile", None, (LIBRARY, FUSED), "compiled"),
        ("torch.compile", None, (LIBRARY,), "open"),
        ("chain", "dlrm.py:21", (), "replaced"),
    ],
)
def test_states(kind: str, line: str | None, kernels: tuple[Kernel, ...], state: str) -> None:
    (lead,) = leads_of([finding(kind, line)], REPLACED, kernels)
    assert lead.state == state


def test_tried_and_not_kept_gives_the_reason() -> None:
    (lead,) = leads_of([finding("chain", "dlrm.py:21")], REPLACED[1:], ())
    assert lead.state == "tried"
    assert lead.done == (
        "bias_activation was tried here and not kept: measured SAME 1.003x (0.991 to 1.012)."
    )


def test_paths_of_replacements_are_shortened() -> None:
    (row,) = REPLACED[:1]
    long = type(row)(**{**vars(row), "line": "/somewhere/models/dlrm.py:21"})
    (lead,) = leads_of([finding("chain", "dlrm.py:21")], (long,), ())
    assert lead.done == "Replaced by bias_activation: 1.31× as fast there."


def test_every_line_of_a_chain_is_replaced() -> None:
    (row,) = REPLACED[:1]
    whole = type(row)(**{**vars(row), "line": "m.py:9", "lines": ("m.py:4", "m.py:9")})
    (lead,) = leads_of([finding("blown-up operand", "m.py:4")], (whole,), ())
    assert lead.state == "replaced"


def test_a_chain_of_the_same_function_is_what_was_tried_for_a_finding(tmp_path) -> None:
    file = tmp_path / "m.py"
    file.write_text(
        "def one(x):\n"
        "    blown = x * x\n"
        "    return linear(blown)\n"
        "def two(x):\n"
        "    return linear(x * x)\n"
    )
    (row,) = REPLACED[1:2]
    row = type(row)(**{**vars(row), "line": f"{file}:3", "chain": "mul, flatten, linear"})
    at = {"file": str(file), "operators": ("aten::mul",)}
    (same,) = leads_of(
        [finding("blown-up operand", "m.py:2") | at | {"line_number": 2}], (row,), ()
    )
    assert same.state == "tried" and same.done.startswith(row.operator)
    (other,) = leads_of([finding("chain", "m.py:5") | at | {"line_number": 5}], (row,), ())
    assert other.state == "open"  # another function
    at["operators"] = ("aten::eq",)
    (foreign,) = leads_of([finding("chain", "m.py:2") | at | {"line_number": 2}], (row,), ())
    assert foreign.state == "open"  # other operations


def test_a_chain_belongs_to_what_was_tried_on_any_of_its_lines(tmp_path) -> None:
    """A residual and the norm behind it are one chain, whose first line lies in another function
    than the norm's; a chain that only shares a product with it is not what replaced it."""
    file = tmp_path / "m.py"
    file.write_text(
        "def norm(x):\n"
        "    return x * torch.rsqrt(x.pow(2).mean(-1))\n"
        "def block(x):\n"
        "    x = x + mix(x)\n"
        "    return silu(norm(x)) * x\n"
    )
    (row,) = REPLACED[:1]
    gate = type(row)(
        **vars(row) | {"operator": "gate", "line": f"{file}:5", "chain": "silu → mul", "lines": ()}
    )
    norm = type(row)(
        **vars(row)
        | {
            "operator": "norm",
            "line": f"{file}:2",
            "chain": "pow → mean → rsqrt → mul",
            "lines": (),
        }
    )
    operators = ("aten::add", "aten::pow", "aten::mean", "aten::rsqrt", "aten::mul")
    chain = finding("chain", "m.py:4") | {
        "file": str(file),
        "line_number": 4,
        "operators": operators,
        "lines": ("m.py:4", "m.py:2"),
    }
    (lead,) = leads_of([chain], (gate, norm), ())
    assert lead.done.startswith("Replaced by norm:")
    (lead,) = leads_of([chain], (gate,), ())
    assert lead.state == "open"
    on_both = type(gate)(**vars(gate) | {"lines": ("m.py:4",)})
    (lead,) = leads_of([chain], (on_both, norm), ())
    assert lead.done.startswith("Replaced by norm:")
