"""Records of Dynamo's and Inductor's work; only this file reads their private parts.

Written for torch 2.11 to 2.13. If another torch has moved a part, ``capture`` raises
UnsupportedError that names it, instead of an AttributeError somewhere inside.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch

from fuselab.errors import UnsupportedError
from fuselab.inspect.user_code import SourceLine, is_user_file, plain

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')
_LAUNCH = re.compile(
    r"^\s*(?:(?P<result>\w+) = )?(?P<callee>"
    r"extern_kernels\.\w+|torch\.ops\.[\w.]+|aten\.[\w.]+|(?:cpp|triton)_\w+(?:\.run)?"
    r")\((?P<arguments>.*)\)"
)
_REUSE = re.compile(r"^\s*(?P<new>\w+) = (?:reinterpret_tensor\()?(?P<old>\w+)\b.*# reuse")
_AOT_ID = re.compile(r"# AOT ID: \['(\d+)_(\w+)'\]")


@dataclass(frozen=True)
class Node:
    """One node of Inductor's schedule after fusion: a loop nest or a library call."""

    buffers: tuple[str, ...]  # names of the buffers it writes
    operators: tuple[str, ...]  # the ATen operators it came from
    lines: tuple[SourceLine, ...]
    bytes_read: int | None
    bytes_written: int | None
    reads: tuple[str, ...] = ()  # names of the buffers that it reads
    changes: tuple[str, ...] = ()  # names of the buffers that it changes in place


@dataclass(frozen=True)
class Buffer:
    """The layout of a buffer or of a graph's input; ``node`` is the FX node whose value it holds,
    None where it holds no whole value."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: str
    node: str | None


@dataclass(frozen=True)
class Launch:
    """One kernel or library call, in launch order.

    ``callee`` and ``arguments`` are the call's text. ``reads`` and ``writes`` are names of buffers;
    ``earlier`` has the buffers whose memory another one has taken over.
    """

    name: str
    kind: str  # fused, or extern for a library call
    operators: tuple[str, ...]
    lines: tuple[SourceLine, ...]
    bytes_read: int | None
    bytes_written: int | None
    callee: str = field(default="", compare=False)
    arguments: str = field(default="", compare=False)
    reads: tuple[str, ...] = field(default=(), compare=False)
    writes: tuple[str, ...] = field(default=(), compare=False)
    earlier: dict[str, set[str]] = field(default_factory=dict, compare=False)


@dataclass
class CompiledGraph:
    """One graph that Inductor compiled."""

    index: int
    phase: str  # forward, backward, inference
    code: str  # the wrapper with the source of every kernel
    fx_graph: str
    launches: list[Launch]
    module: Any = None  # the FX graph that Inductor lowered
    buffers: dict[str, Buffer] = field(default_factory=dict)
    ir_before_fusion: str = ""
    ir_after_fusion: str = ""


@dataclass
class Capture:
    """Everything compiled while ``capture`` was open."""

    graphs: list[CompiledGraph] = field(default_factory=list)


@dataclass(frozen=True)
class GraphBreak:
    """The place where Dynamo cut the graph, and the reason."""

    reason: str
    line: SourceLine | None


@dataclass(frozen=True)
class ConstantSize:
    """A symbolic size that tracing fixed to ``value``, and the line of the user's that needs it."""

    size: str
    value: int
    line: SourceLine | None


@dataclass(frozen=True)
class Compilation:
    """One frame that Dynamo compiled."""

    guards: int | None
    seconds: float | None
    backend_seconds: float | None
    recompile_reason: str | None
    failure: str | None


@contextmanager
def capture() -> Iterator[Capture]:
    """Record every graph that Inductor compiles inside the block.

    The compiled code is unchanged, so Inductor's caches stay valid. A graph loaded from a cache is
    not recorded, so start with an empty one.
    """
    try:
        from torch._inductor.graph import GraphLowering
        from torch._inductor.scheduler import Scheduler
        from torch._inductor.virtualized import V

        codegen: Any = Scheduler.codegen
        fuse: Any = Scheduler.fuse_nodes
        save: Any = GraphLowering.save_output_code
    except (ImportError, AttributeError) as error:
        raise UnsupportedError(
            f"torch {torch.__version__} keeps Inductor's scheduler elsewhere ({plain(error)}); "
            "explain works with torch 2.11 to 2.13."
        ) from error
    found = Capture()
    pending: list[tuple[list[Node], CompiledGraph]] = []
    unfused: list[str] = []

    def recorded_fuse(scheduler: Any, nodes: Any) -> Any:
        unfused[:] = [_debug_text(nodes)]
        return fuse(scheduler, nodes)

    def recorded_codegen(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        nodes = [_read_node(node) for node in scheduler.nodes]
        module: Any = V.graph.module
        text = module.print_readable(print_output=False)
        before, after = "".join(unfused), _debug_text(scheduler.nodes)
        pending.append(
            (nodes, CompiledGraph(0, "", "", text, [], module, _buffers(V.graph), before, after))
        )
        return codegen(scheduler, *args, **kwargs)

    def recorded_save(code: str) -> None:
        nodes, graph = pending.pop() if pending else ([], CompiledGraph(0, "", "", "", []))
        graph.index, graph.phase = _identify(code, len(found.graphs))
        graph.code, graph.launches = code, launches(code, nodes)
        found.graphs.append(graph)
        if save is not None:
            save(code)

    with (
        mock.patch.object(Scheduler, "fuse_nodes", recorded_fuse),
        mock.patch.object(Scheduler, "codegen", recorded_codegen),
        mock.patch.object(GraphLowering, "save_output_code", staticmethod(recorded_save)),
    ):
        yield found


def _identify(code: str, default: int) -> tuple[int, str]:
    match = _AOT_ID.search(code)
    return (int(match[1]), match[2]) if match else (default, "graph")


def _read_node(node: Any) -> Node:
    origins = [
        origin for part in node.get_nodes() if part.node is not None for origin in part.node.origins
    ]
    origins.sort(key=lambda origin: getattr(origin, "_sort_key", ()) or ())
    return Node(
        buffers=tuple(node.get_buffer_names()),
        operators=tuple(dict.fromkeys(filter(None, map(_aten_name, origins)))),
        lines=tuple(dict.fromkeys(line for origin in origins for line in _user_lines(origin))),
        bytes_read=_size(node, "get_read_buffer_sizes"),
        bytes_written=_size(node, "get_write_buffer_sizes"),
        reads=tuple(dict.fromkeys(read.name for read in node.read_writes.reads)),
        changes=tuple(name for out in node.get_outputs() for name in out.get_mutations()),
    )


def _debug_text(nodes: Sequence[Any]) -> str:
    """Return Inductor's own text of schedule nodes: buffers read and written, loop bodies."""
    return "\n\n\n".join(node.debug_str() for node in nodes) + "\n"


def _buffers(graph: Any) -> dict[str, Buffer]:
    """Return the layout of every input and buffer of a graph, at the sizes of this call."""
    found: dict[str, Buffer] = {}
    sizes = graph.sizevars  # torch 2.13 calls `size_hint` of 2.11 otherwise
    hint = sizes.optimization_hint if hasattr(sizes, "optimization_hint") else sizes.size_hint
    for name, held in {**graph.graph_inputs, **graph.name_to_buffer}.items():
        try:
            layout = held.get_layout()
            found[name] = Buffer(
                tuple(int(hint(size)) for size in layout.size),
                tuple(int(hint(step)) for step in layout.stride),
                layout.dtype,
                str(layout.device),
                name if name in graph.graph_inputs else _name(held.get_origin_node()),
            )
        except (AttributeError, NotImplementedError, TypeError, ValueError):
            continue  # a size, or an output of several tensors, which no kernel is given
    return found


def _name(node: Any) -> str | None:
    return None if node is None else str(node.name)


def _size(node: Any, method: str) -> int | None:
    """Return Inductor's count of the bytes a node must move, or None if it has none (fallbacks)."""
    try:
        return int(getattr(node, method)())
    except Exception:  # symbolic sizes and opaque layouts may raise anything
        return None


def _aten_name(origin: Any) -> str | None:
    original = origin.meta.get("original_aten")
    target = original if original is not None else origin.target
    name = getattr(target, "_overloadpacket", None)
    return str(name) if name is not None else None


def _user_lines(origin: Any) -> list[SourceLine]:
    """Return the innermost line of the user's code in a node's stack trace, as a list of at most
    one."""
    lines = [
        SourceLine(match["file"], int(match["line"]))
        for match in _FRAME.finditer(origin.meta.get("stack_trace") or "")
    ]
    return [line for line in lines if is_user_file(line.file)][-1:]


def launches(code: str, nodes: Sequence[Node]) -> list[Launch]:
    """Return the calls of a wrapper in order, each with the nodes of the schedule that it runs.

    A call runs the nodes that write a buffer it is given; a C++ kernel may run several nodes. Where
    none does, it runs the next that changes such a buffer in place, as a scatter does.
    """
    found = []
    left = list(nodes)
    for callee, arguments, words, earlier in _calls(code):
        mine = [node for node in left if words.intersection(node.buffers)]
        if not mine:
            mine = [node for node in left if words.intersection(node.changes)][:1]
        left = [node for node in left if node not in mine]
        extern = callee.startswith(("extern_kernels.", "torch.ops.", "aten."))
        name = callee.removeprefix("extern_kernels.").removesuffix(".run")
        found.append(
            Launch(
                name=name.removeprefix("torch.ops."),
                kind="extern" if extern else "fused",
                operators=_merged(node.operators for node in mine),
                lines=_merged(node.lines for node in mine),
                bytes_read=_total(node.bytes_read for node in mine),
                bytes_written=_total(node.bytes_written for node in mine),
                callee=callee,
                arguments=arguments,
                reads=_merged(node.reads for node in mine),
                writes=_merged(node.buffers for node in mine),
                earlier=earlier,
            )
        )
    return found


def _calls(code: str) -> Iterator[tuple[str, str, set[str], dict[str, set[str]]]]:
    """Yield the callee, its arguments, the names on the line of every launch of a wrapper, and the
    buffers whose memory was taken over before it.

    Launches are in ``call`` and in the partitions before it that CUDA graphs cut it into. The code
    after them is Inductor's own benchmark and is ignored. A buffer that has taken over another
    one's memory brings that one's name along, because one kernel may have written both.
    """
    body = code.partition("async_compile.wait(globals())")[2]
    body = re.split(r"\ndef (?:get_args|benchmark_compiled_module)\(", body)[0]
    earlier: dict[str, set[str]] = {}
    for line in body.splitlines():
        if reuse := _REUSE.match(line):
            earlier[reuse["new"]] = {reuse["old"], *earlier.get(reuse["old"], ())}
        elif match := _LAUNCH.match(line):
            words = {match["result"] or "", *re.findall(r"\w+", match["arguments"])}
            words = words.union(*(earlier.get(word, ()) for word in words))
            yield match["callee"], match["arguments"], words, dict(earlier)


def _merged(parts: Any) -> tuple[Any, ...]:
    return tuple(dict.fromkeys(item for part in parts for item in part))


def _total(sizes: Any) -> int | None:
    known = [size for size in sizes if size is not None]
    return sum(known) if known else None


# --- Dynamo --------------------------------------------------------------------------------------


def graph_breaks(
    function: Callable[..., Any], *args: Any, **kwargs: Any
) -> tuple[int, list[GraphBreak], list[str]]:
    """Return how many graphs Dynamo makes of a call, its breaks, and the graphs as Python text."""
    found = torch._dynamo.explain(function)(*args, **kwargs)
    breaks = [
        GraphBreak(_first_sentence(reason.reason), _line_of(reason.user_stack))
        for reason in found.break_reasons
        if getattr(reason, "graph_break", True)
    ]
    graphs = [graph.print_readable(print_output=False) for graph in found.graphs]
    return found.graph_count, breaks, graphs


# What Dynamo says of the commonest breaks needs its own words to be understood.
_PLAIN_WORDS = (
    (
        r"generic_jump|Data-dependent branching",
        "Python chooses a branch (if, while, and, or) by a tensor's value, which is not known "
        "while the graph is made; torch.where computes both branches.",
    ),
    (
        r"Tensor\.item\(\)|_local_scalar_dense",
        "the host reads a number out of a tensor (.item(), float(), int()), which is known only "
        "when the graph has run.",
    ),
)


def _first_sentence(reason: str) -> str:
    """Return Dynamo's reason in plain words where they are known, else its first line with its
    explanation, without the hints."""
    for pattern, words in _PLAIN_WORDS:
        if re.search(pattern, str(reason).partition("Hint:")[0]):
            return words
    lines = [line.strip() for line in str(reason).splitlines() if line.strip()]
    head = lines[0] if lines else "no reason given"
    explanation = next((line for line in lines if line.startswith("Explanation:")), "")
    explanation = explanation.removeprefix("Explanation:").strip()
    return plain(f"{head}: {explanation}" if explanation else head)


def _line_of(stack: Sequence[Any]) -> SourceLine | None:
    own = [frame for frame in stack if is_user_file(frame.filename)]
    return SourceLine(own[-1].filename, own[-1].lineno) if own else None


@contextmanager
def sizes_made_constant() -> Iterator[list[ConstantSize]]:
    """Record the symbolic sizes that tracing fixes to a number, with the line that needs it."""
    try:
        from torch._guards import TracingContext
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        fix: Any = ShapeEnv._set_replacement
    except (ImportError, AttributeError) as error:
        raise UnsupportedError(
            f"torch {torch.__version__} keeps symbolic sizes elsewhere ({plain(error)}); "
            "explain works with torch 2.11 to 2.13."
        ) from error
    found: list[ConstantSize] = []

    def recorded(environment: Any, symbol: Any, value: Any, *args: Any) -> Any:
        known = environment.replacements.get(symbol)
        if getattr(value, "is_Integer", False) and known != value:
            sources = environment.var_to_sources.get(symbol, ())
            named = _readable_source(sources[0]) if sources else str(symbol)
            line = _line_of(TracingContext.extract_stack())
            one = ConstantSize(named, int(value), line)
            if one not in found:
                found.append(one)
        return fix(environment, symbol, value, *args)

    with mock.patch.object(ShapeEnv, "_set_replacement", recorded):
        yield found


def _readable_source(source: Any) -> str:
    """Return where a size comes from as a person writes it: ``x.shape[0]``."""
    name = source.name() if callable(source.name) else source.name
    name = re.sub(r"L\['(\w+)'\]", r"\1", str(name))
    return plain(name.replace(".size()", ".shape"))


def forget_compilations() -> None:
    """Empty Dynamo's caches and its record of compilations."""
    torch._dynamo.reset()
    forget_metrics()


def forget_metrics() -> None:
    """Empty Dynamo's record of compilations; its compiled code stays."""
    torch._dynamo.utils.clear_compilation_metrics()


def compilations() -> list[Compilation]:
    """Return what Dynamo compiled since ``forget_compilations``, without backward graphs."""
    return [
        Compilation(
            guards=metrics.guard_count,
            seconds=metrics.entire_frame_compile_time_s,
            backend_seconds=metrics.backend_compile_time_s,
            recompile_reason=plain(metrics.recompile_reason) if metrics.recompile_reason else None,
            failure=_failure(metrics) if metrics.fail_reason else None,
        )
        for metrics in torch._dynamo.utils.get_compilation_metrics()
        if metrics.co_name is not None and metrics.co_filename is not None
    ]


def _failure(metrics: Any) -> str:
    """Return why a function was not compiled, behind the user's line where that is known."""
    file, line = metrics.fail_user_frame_filename, metrics.fail_user_frame_lineno
    where = f"{SourceLine(file, line)}: " if file and line and is_user_file(file) else ""
    in_loop = "graph break in loop" in metrics.fail_reason
    return f"{where}{_first_sentence(metrics.fail_reason)}" + (
        " That is in a loop, where no graph can be cut, so that the whole function "
        f"'{metrics.co_name}' runs without torch.compile."
        if in_loop
        else ""
    )


@contextmanager
def named_kernels() -> Iterator[None]:
    """Make C++ kernels compiled inside report their names to the profiler, as Triton's do."""
    with torch._inductor.config.patch({"cpp.enable_kernel_profile": True}):
        yield
