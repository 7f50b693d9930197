"""Write the files of a new package: ``op.py``, ``__init__.py``, its test and its page."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fuselab.ejection.fold import formatted
from fuselab.ejection.write import drawn_text, package_files
from fuselab.ejection.write_launchers import mismatch_lines
from fuselab.ejection.write_reference import outputs_type
from fuselab.packaging.definition import MISSING, Definition, Parameter, example_texts
from fuselab.packaging.triton_package import Written

BACKWARD = "backward"  # the folder of the kernels that eject writes for the gradient
_OF_BACKWARD = ("op.py", "gradient.py", "triton_kernels.py", "cuda_kernels.cu", "cpu_kernels.cpp")


@dataclass(frozen=True)
class New:
    """All that a new package is made of. ``language`` is the implementation's name, ``source`` the
    file or function that it came from."""

    name: str
    language: str
    source: str
    definition: Definition
    written: Written
    backward: bool

    @property
    def blanks(self) -> list[str]:
        """The sentences that say what only the user can fill in."""
        found = list(self.written.blanks)
        if self.definition.blanks:
            found.insert(0, f"what {self.name} computes")
        if not self.definition.has_examples:
            found.append("example inputs")
        return found


def files_of(new: New) -> dict[str, str]:
    """Return the text of every file of the package by its name."""
    files = {
        "__init__.py": _init(new.name),
        "op.py": formatted(_op(new)),
        "reference.py": formatted(new.definition.text),
        **new.definition.files,
        **new.written.files,
        f"test_{new.name}.py": _test(new),
        "README.md": _page(new),
    }
    if new.backward:
        assert new.definition.package is not None
        ejected = package_files(new.definition.package)
        for name in _OF_BACKWARD:
            text = ejected[name].replace("from .reference import", "from ..reference import")
            files[f"{BACKWARD}/{name}"] = text
        files[f"{BACKWARD}/__init__.py"] = (
            f'"""The gradient of {new.name}, ejected from its reference."""\n'
        )
    return files


def _init(name: str) -> str:
    return f'''\
"""{name}, a fused operator."""

import fuselab

from .op import OP

{name} = fuselab.operator(OP)

__all__ = ["OP", "{name}"]
'''


def _op(new: New) -> str:
    definition, written = new.definition, new.written
    drawn = _draw(definition)
    supports = _supports(new)
    parts = [
        f'"""The contract of ``mine::{new.name}``, and its launcher."""',
        _imports(new, drawn, supports),
        "\n".join(
            one for one in (f'NAME = "mine::{new.name}"', written.configs, written.head) if one
        ),
        _forward(definition, written),
        *([f'backward = _EJECTED.implementations["{new.language}"].backward'] * new.backward),
        *([supports] if supports else []),
        *([drawn] if drawn else []),
        _cases(definition),
        _declaration(new, bool(drawn), bool(supports)),
    ]
    head, *rest = (part.strip("\n") for part in parts)
    return f"{head}\n\n" + "\n\n\n".join(rest) + "\n"


def _imports(new: New, drawn: str, supports: str) -> str:
    definition, written = new.definition, new.written
    contract = ["Case", *(["Draw"] if drawn else []), "FusedOp", "Implementation", "Inputs"]
    signature = [
        *(["accepted"] if drawn else []),
        *(["mismatch"] if "mismatch(" in supports else []),
    ]
    likes = "from fuselab.runtime.signature import "
    signature += [line.removeprefix(likes) for line in written.imports if line.startswith(likes)]
    fused = [f"from fuselab.op import {', '.join(contract)}"]
    if written.wrapped:
        fused.append("from fuselab.runtime.launch_recording import unplanned")
    if signature:
        fused.append(f"{likes}{', '.join(sorted(signature))}")
    fused += [
        line for line in written.imports if line.startswith("from fuselab") and likes not in line
    ]
    own = [line for line in written.imports if line.startswith("from .")]
    own += ["from .reference import reference"]
    if new.backward:
        own.append(f"from .{BACKWARD}.op import OP as _EJECTED")
    standard = [line for line in written.imports if line.startswith("from pathlib")]
    if any("Sequence" in one.annotation for one in definition.parameters):
        standard.insert(0, "from collections.abc import Sequence")
    others = [line for line in written.imports if line == "import triton"]
    groups = [
        ["from __future__ import annotations"],
        standard,
        ["import torch", *others, "from torch import Tensor"],
        sorted(fused),
        sorted(own, key=lambda line: (line.split()[1] != ".", line.split()[1])),
    ]
    return "\n\n".join("\n".join(group) for group in groups if group)


def _forward(definition: Definition, written: Written) -> str:
    """Return the text of the launcher. Its parameters have no defaults: it is given all."""
    given = ", ".join(f"{one.name}: {one.annotation}" for one in definition.parameters)
    result = outputs_type(definition.outputs)
    return f"def forward({given}) -> {result}:\n{written.launcher}"


def _supports(new: New) -> str:
    """Return the text of ``supports``: the shapes and dtypes that the kernels take."""
    definition = new.definition
    lines = [] if definition.package is None else mismatch_lines(definition.package)
    floating = [one.name for one in definition.parameters if _is_floating(one)]
    floating = list(new.written.typed) or floating
    if not new.backward:  # eject's own kernels do not round to the dtypes of the function
        lines = [line for line in lines if not line.strip().startswith("widest")]
    if not lines and new.written.dtypes is None and len(floating) < 2:
        return ""
    given = ", ".join(f"{one.name}: {one.annotation}" for one in definition.parameters)
    body = []
    if new.written.dtypes is not None:
        first = new.written.typed[0]
        body = [
            f"    if {first}.dtype not in DTYPES:",
            f'        return f"the kernel does not take {{{first}.dtype}}"',
        ]
    if len(floating) > 1:
        body += [
            f"    if len({{{', '.join(f'{one}.dtype' for one in floating)}}}) > 1:",
            '        return "the kernel takes tensors of one dtype"',
        ]
    body += ["    return mismatch(", *lines, "    )"] if lines else ["    return None"]
    return (
        f"def supports({given}) -> str | None:\n"
        '    """Return None if the kernels take these arguments, else the reason."""\n'
        + "\n".join(body)
    )


def _is_floating(parameter: Parameter) -> bool:
    """Return whether a parameter is a tensor of floating numbers, as far as is known."""
    value = parameter.value
    if parameter.annotation != "Tensor":
        return False
    return not isinstance(value, Tensor) or value.is_floating_point()


def _draw(definition: Definition) -> str:
    """Return the text of ``draw``; empty where it is not known which shapes go together."""
    if definition.package is None:
        return ""
    drawn = drawn_text(definition.package)
    if not drawn:
        return ""
    others = [one for one in definition.parameters if not one.is_tensor]
    inside = "accepted(reference, lambda: _drawn(source))"
    lines = [f"    return Inputs({inside})"]
    if others:
        tensors = ", ".join(definition.tensors)
        given = ", ".join(
            one.name if one.is_tensor else text
            for one, text in zip(definition.parameters, example_texts(definition), strict=True)
        )
        comma = "," if len(definition.tensors) == 1 else ""
        lines = [
            f"    def called({tensors}):",
            f"        return reference({given})",
            "",
            f"    {tensors}{comma} = accepted(called, lambda: _drawn(source))",
            f"    return Inputs(({given}{',' if len(definition.parameters) == 1 else ''}))",
        ]
    return (
        f"{drawn}\n\ndef draw(source: Draw) -> Inputs:\n"
        '    """Draw tensors of any sizes and layouts that the reference accepts."""\n'
        + "\n".join(lines)
    )


def _cases(definition: Definition) -> str:
    if not definition.has_examples:
        missing = [
            one.name
            for one in definition.parameters
            if one.default is None and one.value is MISSING
        ]
        return (
            f"# FILL IN: example inputs: sizes worth trying of {', '.join(missing)}\n"
            "CASES: tuple[Case, ...] = ()"
        )
    values = [one.value for one in definition.parameters]
    if all(isinstance(one, Tensor) and one.is_floating_point() for one in values):
        shapes = [tuple(one.shape) for one in values]
        return f'CASES = (Case.normal({shapes!r}, "bench", "boundary", "dtypes"),)'
    texts = "".join(f"            {text},\n" for text in example_texts(definition))
    return (
        "def example(\n"
        "    device: torch.device, dtype: torch.dtype, generator: torch.Generator\n"
        ") -> Inputs:\n"
        '    """Return random arguments like those of the example."""\n'
        f"    return Inputs(\n        (\n{texts}        )\n    )\n\n\n"
        'CASES = (Case("example", example, frozenset({"bench", "boundary", "dtypes"})),)'
    )


def _declaration(new: New, has_draw: bool, has_supports: bool) -> str:
    forward = "unplanned(forward)" if new.written.wrapped else "forward"
    given = [f'"{"cpu" if new.language == "cpp" else "cuda"}"', forward]
    if new.backward:
        given.append("backward")
    if has_supports:
        given.append("supports=supports")
    lines = [
        "OP = FusedOp(",
        "    name=NAME,",
        "    reference=reference,",
        "    implementations={",
        f'        "{new.language}": Implementation(',
        *(f"            {one}," for one in given),
        "        )",
        "    },",
        "    cases=CASES,",
        "    contiguous=True,  # the launcher gets contiguous tensors, whatever the caller has",
    ]
    if new.written.dtypes is not None:
        lines.append("    dtypes=DTYPES,")
    if new.backward:
        lines.append("    gradient=_EJECTED.gradient,")
    tuned = {}
    if new.written.configs:
        tuned[new.language] = "lambda *args: CONFIGS"
    if new.backward and new.language == "triton":
        tuned["triton_backward"] = '_EJECTED.configs["triton_backward"]'
    if tuned:
        entries = ", ".join(f'"{name}": {text}' for name, text in tuned.items())
        lines.append(f"    configs={{{entries}}},")
    if has_draw:
        lines.append("    draw=draw,")
    return "\n".join([*lines, ")"])


def _test(new: New) -> str:
    """Return the text of a test that checks the package."""
    return f'''\
"""Check {new.name} against its reference; on a CPU Triton kernels run interpreted."""

from pathlib import Path

import fuselab


def test_{new.name}() -> None:
    report = fuselab.check(str(Path(__file__).parent), quick=True, seed=0)
    assert report.passed, str(report)
'''


def _page(new: New) -> str:
    """Return the text of ``README.md``: what was derived, what was guessed, what is left."""
    kernels = {"triton": "triton_kernels.py", "cuda": "cuda_kernels.cu"}[new.language]
    given = ", ".join(f"{one.name}: {one.annotation}" for one in new.definition.parameters)
    rows = {
        "reference.py": "the definition of what is right, in plain PyTorch",
        kernels: "the kernels, as they came",
        **(
            {"launch.py": "the function that launches them"}
            if "launch.py" in new.written.files
            else {}
        ),
        "op.py": "the contract: the launcher, example inputs, the declaration",
        "__init__.py": f"the public function: `from {new.name} import {new.name}`",
        f"test_{new.name}.py": "a test that checks the package",
        **(
            {f"{BACKWARD}/": "the gradient's kernels, ejected from the reference"}
            if new.backward
            else {}
        ),
    }
    lines = [
        f"# {new.name}",
        "",
        f"`{new.name}({given})`, made of `{new.source}` by `fuselab new`.",
        "",
        "| file | holds |",
        "|---|---|",
        *(f"| `{name}` | {told} |" for name, told in rows.items()),
    ]
    if new.blanks:
        lines += ["", "## To fill in", "", *(f"- {one}" for one in new.blanks)]
        lines += ["", "Each is marked `FILL IN` where it belongs; remove the mark with it."]
    guesses = [*new.written.guesses, *new.definition.notes]
    if guesses:
        lines += ["", "## Look at these", "", *(f"- {one}" for one in guesses)]
    lines += [
        "",
        "## Next",
        "",
        "    fuselab check . --quick    # right, against the reference in float64",
        "    fuselab bench .            # how fast, beside PyTorch and torch.compile",
        "    fuselab build . --as wheel -o dist",
    ]
    return "\n".join(lines) + "\n"
