"""Write the package of a whole function as one kernel, beside its operators (``whole.py``)."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Sequence

from torch import Tensor

from fuselab.ejection.capture import with_sources
from fuselab.ejection.emit_whole import Operand, WholeKernel
from fuselab.ejection.fold import formatted
from fuselab.ejection.package import Package
from fuselab.ejection.regions import Cut
from fuselab.ejection.whole import Whole
from fuselab.ejection.write import draw_text, example_case, reference_import, test_text
from fuselab.ejection.write_init import init_text
from fuselab.ejection.write_launchers import annotated, mismatch_lines
from fuselab.ejection.write_page import bytes_moved, bytes_of_calls, tensor_calls
from fuselab.ejection.write_reference import outputs_type, reference_text


def whole_files(whole: Whole, cut: Cut) -> dict[str, str]:
    """Return the text of every file of the package by its name."""
    kernel = WholeKernel(whole)
    package = whole.package
    return {
        "__init__.py": formatted(init_text(package, of_tensors=True)),
        "op.py": formatted(_op(whole, kernel)),
        "reference.py": formatted(reference_text(package.formulas, package.output_names)),
        "triton_kernels.py": kernel.source(),
        f"test_{whole.name}.py": test_text(whole.name),
        "page.md": _page(whole, kernel, cut),
    }


def _op(whole: Whole, kernel: WholeKernel) -> str:
    package = whole.package
    drawn, case = draw_text(package), example_case(package)
    contract = ["Case", *(["Draw"] if drawn else []), "FusedOp", "Implementation"]
    contract += ["Inputs"] if "Inputs" in drawn + case else []
    signature = [*(["accepted"] if drawn else []), "autocast_products", "mismatch"]
    allocated = "outputs_like" if len(package.output_names) > 1 else "output_like"
    signature.append(allocated)
    given, names = annotated(package.parameters), ", ".join(package.parameters)
    outputs = ", ".join(package.output_names)
    sizes = [f"    {line}" for line in package.sizes.statements(package.parameters)]
    read_sizes = "".join(
        f"{line}\n" for line in _used(sizes, " ".join(one.text for one in kernel.read))
    )
    rows = ", ".join(f'"{name}": {text}' for name, text in whole.rows.items())
    texts = {name: text for text, name in reversed(list(whole.columns.items()))}
    columns = ", ".join(f'"{name}": {texts[name]}' for name in kernel.columns)
    float32_of = ", ".join(
        f'"{kind}": ({", ".join(map(str, dtypes))},)'
        for kind, dtypes in whole.float32_of.items()
        if dtypes
    )
    products = [f"        {_extents(one)}," for one in dict.fromkeys(kernel.products)]
    padded = ", ".join(f'"{name}"' for name in kernel.padded)
    return f'''\
"""The contract of ``ejected::{whole.name}``, and its launcher."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fuselab.op import {", ".join(contract)}
from fuselab.runtime.chain import Chain
from fuselab.runtime.signature import {", ".join(signature)}
from fuselab.runtime.tuning import Config

{reference_import(package)}


def _kernel() -> Any:
    from .triton_kernels import {kernel.kernel_name}

    return {kernel.kernel_name}


_CHAIN = Chain(
    _kernel,
    "ejected::{whole.name}",
    padded=({padded},),
    products=(
{chr(10).join(products)}
    ),
)


def _sizes({given}) -> tuple[dict[str, int], dict[str, int]]:
    """Return the sizes of the loops over rows, and the numbers of columns."""
{chr(10).join(_used(sizes, rows + columns))}
    return {{{rows}}}, {{{columns}}}


def forward_triton({given}) -> {outputs_type(len(package.output_names))}:
    rows, columns = _sizes({names})
{read_sizes}    {outputs} = {allocated}(reference, {names})
    _CHAIN.run(
        rows,
        columns,
        read=[
{_operands(kernel.read)}
        ],
        written=[
{_operands(kernel.written, package.output_names)}
        ],
    )
    return {outputs}


{_supports(package)}
    return reason or _CHAIN.refuses(_sizes({names})[1], {names})


def configs({given}) -> Sequence[Config]:
    """Return the blocks that tuning may choose from."""
    return _CHAIN.configs(*_sizes({names}), {names})


{drawn}

def autocast(autocast_dtype: torch.dtype, *args: Any) -> tuple[Any, ...]:
    """Cast such that the results have the dtype that torch.autocast gives them, if all of them
    have one."""
    return autocast_products(autocast_dtype, args, float32_of={{{float32_of}}})


{case}

OP = FusedOp(
    name="ejected::{whole.name}",
    reference=reference,
    implementations={{
        "triton": Implementation("cuda", forward_triton, supports=supports),
    }},
    cases=(_EXAMPLE,),
    configs={{"triton": configs}},
    dtypes=(torch.float32, torch.float16, torch.bfloat16),
{"    draw=draw," if drawn else ""}
    autocast=autocast,
)
'''


def _extents(one: tuple[tuple[str, bool], tuple[str, bool]]) -> str:
    return repr(one).replace("'", '"')


def _used(lines: Sequence[str], text: str) -> list[str]:
    """Return the statements of sizes whose names stand in a text."""
    words = re.findall(r"\w+", text)
    return [line for line in lines if line.split(" = ")[0].strip() in words]


def _operands(operands: Sequence[Operand], names: Sequence[str] = ()) -> str:
    texts = names or [one.text for one in operands]
    pairs = zip(operands, texts, strict=True)
    return "\n".join(f'            ({text}, "{one.pattern}"),' for one, text in pairs)


def _supports(package: Package) -> str:
    return "\n".join(
        [
            f"def supports({annotated(package.parameters)}) -> str | None:",
            '    """Return None if the kernel takes these tensors, else the reason."""',
            "    reason = mismatch(",
            *mismatch_lines(package),
            "    )",
        ]
    )


def _page(whole: Whole, kernel: WholeKernel, cut: Cut) -> str:
    """Return the page that compares the three forms of the function."""
    package = whole.package
    at = ", ".join(
        f"{name} = {package.captured.hints[symbol]}" for symbol, name in package.sizes.names.items()
    )
    calls = with_sources(package.formulas.outputs)
    between = tensor_calls(cut.calls)
    plans = [plan for region in cut.regions for plan in region.package.forward]
    arguments = [one.tensor for one in package.captured.arguments]
    results = [one.meta["val"] for one in package.captured.outputs]
    rows = (
        ("PyTorch calls", len(tensor_calls(calls)), bytes_of_calls(calls)),
        (
            "fused operators, and PyTorch calls between them",
            len(between) + len(plans),
            bytes_of_calls(between) + sum(map(bytes_moved, plans)),
        ),
        ("one kernel", 1, 4 * sum(map(_elements, (*arguments, *results)))),
    )
    table = [f"| {form} | {launches} | {moved:,} |" for form, launches, moved in rows]
    told = (
        f"A program owns rows ({', '.join(whole.rows)}) and computes everything for them: it reads "
        f"{', '.join(package.parameters)}, keeps what stands between two products in registers, "
        f"and writes {', '.join(package.output_names)}. Every program reads the weights again, "
        "from the cache that all multiprocessors share; in the table they count once.",
        f"`fuselab asm {whole.name} --arch sm_90` shows the kernel's assembly and what limits it, "
        f"without a GPU. Where there is one, `fuselab bench {cut.name} --provider "
        "eager,compile,operators,fused` times the forms.",
        "The kernel has no gradient, because a backward needs what the kernel never stores. "
        f"`{cut.name}` calls it where no gradient is wanted, and its fused operators elsewhere: in "
        "training, on a CPU, within torch.autocast and torch.compile, and for arguments that the "
        "kernel does not take. These operators serve other functions as well; the kernel serves "
        "this one alone.",
    )
    lines = [
        f"# {whole.name}",
        "",
        f"The forward of [{cut.name}](../page.md) as one kernel. At the sizes of the example in",
        f"float32 ({at}):",
        "",
        "| form | launches | bytes |",
        "|---|---|---|",
        *table,
    ]
    for paragraph in told:
        lines += ["", *textwrap.wrap(paragraph, 100, break_on_hyphens=False)]
    return "\n".join(lines) + "\n"


def _elements(tensor: Tensor) -> int:
    return math.prod(one if isinstance(one, int) else one.node.hint for one in tensor.shape)
