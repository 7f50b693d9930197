"""One file per kernel of Inductor's that runs alone, and the FX graphs as programs.

A kernel's file has its source, random inputs of the sizes that it had in the model, its launch, and
the part of the FX graph that it computes as the eager comparison.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fuselab.inspect.inductor_capture import Buffer, CompiledGraph, Launch
from fuselab.inspect.user_code import plain
from fuselab.report.numbers import byte_count, duration

_DEFINITION = re.compile(r"^(?P<name>\w+) = async_compile\.\w+\(", re.MULTILINE)
_WORD = re.compile(r"[A-Za-z_]\w*")
# Words of a launch that are no buffers.
_KNOWN = frozenset(("stream", "stream0", "grid", "None", "True", "False", "float", "inf", "nan"))
_MOST_LITERALS = 4096  # elements of a constant that are written out

_IMPORTS = """\
import math
from math import inf, nan

import torch
from torch import device
"""

_MAKE = '''\
def tensor(shape, stride, dtype, device):
    """Return random numbers in a layout; integers are 0 or 1, which are valid places."""
    size = 1 + sum((extent - 1) * step for extent, step in zip(shape, stride)) if all(shape) else 0
    if dtype.is_floating_point or dtype.is_complex:
        held = torch.randn(size, dtype=dtype, device=device)
    elif dtype == torch.bool:
        held = torch.rand(size, device=device) < 0.5
    else:
        held = torch.randint(0, 2, (size,), dtype=dtype, device=device)
    return held.as_strided(shape, stride)
'''


def kernel_files(
    graphs: Sequence[CompiledGraph], kernel_us: Mapping[tuple[int, int], float]
) -> dict[str, str]:
    """Return a program for each fused kernel, by file name, in launch order."""
    files: dict[str, str] = {}
    number = 0
    for position, graph in enumerate(graphs):
        for order, launch in enumerate(graph.launches):
            number += 1
            if launch.kind != "fused":
                continue
            text = _program(graph, launch, number, kernel_us.get((position, order)))
            if text is not None:
                files[f"kernel_{number:02}_{launch.name[:60]}.py"] = text
    return files


def graph_program(graph: CompiledGraph) -> str:
    """Return an FX graph as a program: the function, random inputs, and a call of it."""
    assert graph.module is not None
    inputs = [node for node in graph.module.graph.nodes if node.op == "placeholder"]
    values = [node.meta.get("val") for node in inputs]
    made = "".join(f"        {_input(value)},\n" for value in values)
    called = f"graph {graph.index}, {graph.phase}"
    return f'''\
"""The graph that Inductor compiled ({called}), as a program.

`fuselab explain --save` wrote it.
"""

{_IMPORTS}

{_MAKE}

def get_inputs():
    """Return random inputs of the sizes that the model had."""
    return [
{made}    ]


{_function("graph", graph.module.graph, graph.module)}


if __name__ == "__main__":
    torch.manual_seed(0)
    for place, result in enumerate(graph(*get_inputs())):
        if isinstance(result, torch.Tensor):
            print(f"result {{place}}: {{tuple(result.shape)}} {{result.dtype}}")
'''


def _input(value: Any) -> str:
    """Return the call that makes a graph's input."""
    if isinstance(value, torch.Tensor):
        sizes = [_hint(size) for size in value.shape]
        steps = [_hint(step) for step in value.stride()]
        return f"tensor({tuple(sizes)}, {tuple(steps)}, {value.dtype}, {str(value.device)!r})"
    return str(_hint(value))


def _hint(size: Any) -> int:
    """Return a size, or the one that a symbol had when it was traced."""
    return int(size) if isinstance(size, int) else int(size.node.hint)


def _function(name: str, graph: fx.Graph, module: Any) -> str:
    """Return the text of a graph as a function, its constants written out."""
    code = graph.python_code("self").src
    body = code.partition("def forward(self")[2]
    given, _, body = body.partition("):")
    given = given.removeprefix(", ")
    constants = []
    for node in graph.nodes:
        if node.op == "get_attr":
            value = getattr(module, node.target)
            constants.append(f"    _{node.target} = {_literal(value)}")
            body = body.replace(f"self.{node.target}", f"_{node.target}")
    lines = [re.sub(r";  .* = None$", "", line) for line in body.splitlines()]
    kept = "\n".join(line for line in [*constants, *lines] if line.strip())
    return f"def {name}({given}):\n{kept}"


def _literal(value: Any) -> str:
    if isinstance(value, torch.Tensor) and value.numel() <= _MOST_LITERALS:
        return (
            f"torch.tensor({value.tolist()!r}, dtype={value.dtype}, device={str(value.device)!r})"
        )
    if isinstance(value, torch.Tensor):
        return _input(value) + "  # random, for the model's own is large"
    return repr(value)


# --- one kernel -----------------------------------------------------------------------------------


def _program(
    graph: CompiledGraph, launch: Launch, number: int, time_us: float | None
) -> str | None:
    """Return the program of a launch, or None if its arguments are not known by name."""
    definition = _definition(graph.code, launch.name)
    words = dict.fromkeys(_WORD.findall(re.sub(r"'[^']*'", "", launch.arguments)))
    buffers = {word: graph.buffers[word] for word in words if word in graph.buffers}
    strangers = [
        word for word in words if word not in buffers and word not in _KNOWN and word != launch.name
    ]
    if definition is None or strangers or not buffers:
        return None
    header = graph.code[: _DEFINITION.search(graph.code).start()]  # type: ignore[union-attr]
    header = re.sub(r"^#.*\n", "", header, flags=re.MULTILINE).strip("\n")
    written = [name for name in buffers if name in launch.writes]
    eager, why = _eager(graph, launch, buffers)
    names = ", ".join(buffers)
    made = "".join(
        f"        tensor({buffer.shape}, {buffer.stride}, {buffer.dtype}, '{buffer.device}'),"
        f"  # {name}{', written' if name in written else ''}\n"
        for name, buffer in buffers.items()
    )
    stream = "    stream0 = get_raw_stream(0)\n" if "stream0" in words else ""
    return f'''\
"""{_provenance(graph, launch, number, time_us)}
"""

{header}

{definition}

async_compile.wait(globals())
del async_compile

WRITTEN = {written!r}


{_MAKE}

def get_inputs():
    """Return random tensors of the sizes that the model had, those that are written too."""
    return [
{made}    ]


def launch({names}):
    """Launch the kernel once."""
{stream}    {launch.callee}({launch.arguments})


{eager}

NOT_COMPARED = {why!r}


{_MAIN.replace("@NAMES@", repr(list(buffers)))}'''


_MAIN = '''\
def main():
    """Run the kernel, compare what it writes with eager PyTorch, and print its time."""
    from torch.utils.benchmark import Timer

    torch.manual_seed(0)
    names = @NAMES@
    tensors = get_inputs()
    before = {name: tensor.clone() for name, tensor in zip(names, tensors)}
    launch(*tensors)
    after = dict(zip(names, tensors))
    right = True
    if NOT_COMPARED:
        print(f"not compared with eager: {NOT_COMPARED}")
    else:
        for name, expected in eager(**before).items():
            found = after[name].reshape(expected.shape)
            if not expected.is_floating_point():
                same = torch.equal(found, expected.to(found.dtype))
                print(f"{name}: {'equal' if same else 'DIFFERENT'}")
                right = right and same
                continue
            whole = expected.isfinite()
            right = right and torch.equal(found.isfinite(), whole)
            gap = (found - expected).double()[whole].abs().amax().item() if whole.any() else 0.0
            largest = expected.double()[whole].abs().amax().item() if whole.any() else 0.0
            bar = 64 * torch.finfo(found.dtype).eps * max(largest, 1.0)
            print(f"{name}: differs from eager by at most {gap:.3g}, of values up to {largest:.3g}")
            right = right and gap <= bar
    timer = Timer("launch(*tensors)", globals={"launch": launch, "tensors": tensors})
    print(f"a launch takes {timer.blocked_autorange().median * 1e6:.3g} us")
    return 0 if right else 1


if __name__ == "__main__":
    raise SystemExit(main())
'''


def _definition(code: str, name: str) -> str | None:
    """Return the assignment in a wrapper that defines a kernel."""
    found = list(_DEFINITION.finditer(code))
    end = code.find("async_compile.wait(globals())")
    for match, later in zip(found, [*(m.start() for m in found[1:]), end], strict=True):
        if match["name"] == name:
            text = code[match.start() : later].rstrip()
            return re.sub(r"(\n+#.*)+$", "", text).rstrip()  # comments on the next kernel
    return None


def _provenance(graph: CompiledGraph, launch: Launch, number: int, time_us: float | None) -> str:
    """Return what is known of a kernel, as the text on top of its file."""
    operators = ", ".join(one.removeprefix("aten.") for one in launch.operators) or "nothing known"
    moved = None if launch.bytes_read is None else launch.bytes_read + (launch.bytes_written or 0)
    lines = [
        f"{launch.name}: kernel {number} of the model, in graph {graph.index}, {graph.phase}.",
        "",
        f"It computes {operators}.",
        *(f"    {plain(line)} | {line.text}".replace('"""', "'''") for line in launch.lines),
        "",
    ]
    if moved is not None:
        timed = "" if time_us is None else f", and took {duration(time_us)} in the model"
        lines.append(f"It must move {byte_count(moved)}{timed}.")
    lines.append(
        f"Inductor of torch {torch.__version__} wrote it, `fuselab explain --save` this file. "
        "Run it\nalone: it makes inputs, compares with eager PyTorch, and prints the time."
    )
    return "\n".join(lines).replace("\\", "\\\\")


def _eager(graph: CompiledGraph, launch: Launch, buffers: Mapping[str, Buffer]) -> tuple[str, str]:
    """Return the text of ``eager``, the part of the FX graph that a kernel computes, and why there
    is none, empty if there is one."""
    nothing = (
        'def eager(**tensors):\n    """Return nothing: there is no comparison."""\n    return {}'
    )
    if graph.module is None:
        return nothing, "the graph is not known"
    nodes = {node.name: node for node in graph.module.graph.nodes}
    # A buffer may hold one value before the launch and another one behind it.
    given = {
        graph.buffers[held].node or held: name
        for name in buffers
        for held in (name, *launch.earlier.get(name, ()))
        if held in launch.reads and held not in launch.writes and held in graph.buffers
    }
    wanted = {name: graph.buffers[name].node for name in buffers if name in launch.writes}
    known = {name: node for name, node in wanted.items() if node in nodes}
    if not known:
        return nothing, "no value of the graph is written as it is"
    part, values, missing = fx.Graph(), {}, []
    for name in dict.fromkeys(given.values()):
        values[name] = part.placeholder(name)
    for node in _ancestors([nodes[str(one)] for one in known.values()], set(given)):
        if node.name in given:
            values[node.name] = values[given[node.name]]
        elif node.op in ("placeholder", "get_attr"):
            missing.append(node.name)
        else:
            values[node.name] = part.node_copy(node, lambda one: values[one.name])
        if missing:
            return nothing, f"it depends on {missing[0]}, which the kernel does not read"
    if any("inductor_" in str(node.target) for node in part.nodes):
        return nothing, "it draws random numbers"
    part.output({name: values[str(node)] for name, node in known.items()})
    text = _function("eager", part, None)
    head, _, body = text.partition("\n")
    head = head.removesuffix("):") + (", **_):" if given else "**_):")
    told = f'    """Return what the kernel writes: {", ".join(known)}."""'
    return f"{head}\n{told}\n{body}", ""


def _ancestors(ends: Sequence[fx.Node], stops: set[str]) -> Iterator[fx.Node]:
    """Yield the nodes that some depend on, in the graph's order, back to those named ``stops``."""
    needed: set[fx.Node] = set()
    waiting = list(ends)
    while waiting:
        node = waiting.pop()
        if node in needed:
            continue
        needed.add(node)
        if node.name not in stops:
            waiting += node.all_input_nodes
    graph = ends[0].graph
    yield from (node for node in graph.nodes if node in needed)
