"""Read a ``.cu`` file: its kernels with their parameters, the code that they need, and the host
code that launches them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fuselab.packaging.arguments import ADDED, INPUT, NUMBER, OUTPUT, UPDATED, KernelParameter

_CODES = {
    **dict.fromkeys(("int", "int32_t", "unsigned", "unsigned int", "uint32_t", "bool"), "i32"),
    **dict.fromkeys(
        ("int64_t", "long", "long long", "size_t", "uint64_t", "unsigned long",
         "unsigned long long", "ptrdiff_t", "std::size_t", "std::int64_t"), "i64",
    ),
    "float": "f32",
    "double": "f64",
}  # fmt: skip
# Headers of the host and of PyTorch: NVRTC has none of them, and a kernel needs none.
_HOST_HEADER = re.compile(
    r"#\s*include\s*[<\"](?!cuda_fp16|cuda_bf16|cuda_fp8|mma\.h|cuda/|cooperative_groups|cstdint|"
    r"stdint\.h|cub/|curand_kernel)[^>\"]*[>\"]"
)
_HOST_CODE = re.compile(
    r"<<<|\btorch::|\bat::|\bc10::|\bstd::(?:vector|string|cout|cerr|optional|tuple)\b|"
    r"\bPYBIND11_MODULE|\bTORCH_LIBRARY|\bcudaMalloc|\bprintf_host|\bint\s+main\s*\("
)
_SCOPE = re.compile(r"\s*(?:inline\s+)?(?:namespace\b[\w\s:]*|extern\s*\"C\"\s*)\{")
# What the headers of the host would have defined.
_MACROS = {
    "FLT_MAX": "3.402823466e+38f",
    "FLT_MIN": "1.175494351e-38f",
    "FLT_EPSILON": "1.192092896e-07f",
    "DBL_MAX": "1.7976931348623158e+308",
    "INFINITY": "__int_as_float(0x7f800000)",
    "NAN": "__int_as_float(0x7fffffff)",
    "M_PI": "3.14159265358979323846",
    "INT_MAX": "2147483647",
}


@dataclass(frozen=True)
class Kernel:
    """A ``__global__`` function; ``qualified`` is its name with its namespaces.

    ``template`` are its template parameters, as (kind, name, default or None). ``pointed`` is, by
    pointer, the type that it points to. ``bound`` is the first number of its ``__launch_bounds__``
    as it stands there. ``unknown`` are parameters that no launch passes.
    """

    name: str
    qualified: str
    template: tuple[tuple[str, str, str | None], ...]
    parameters: tuple[KernelParameter, ...]
    pointed: Mapping[str, str]
    body: str
    bound: str | None
    unknown: tuple[str, ...] = ()


@dataclass(frozen=True)
class HostLaunch:
    """A launch in the host code, in Python words; what cannot be said in them is None.

    ``given`` is, by place of the kernel's parameter, the text of a size or the name of a tensor of
    the host code. ``written`` is the launch as it stands there, and ``block_text`` its block.
    """

    written: str
    template: tuple[str, ...] = ()
    grid: tuple[str, ...] | None = None
    block: tuple[str, ...] | None = None
    block_text: str = ""
    shared: str = "0"
    given: tuple[str | None, ...] = ()
    tensors: frozenset[str] = field(default_factory=frozenset)


def without_comments(text: str) -> str:
    """Return C++ text with every comment as spaces, its lines and places unchanged."""

    def blank(match: re.Match[str]) -> str:
        found = match[0]
        return found if found.startswith('"') else re.sub(r"[^\n]", " ", found)

    return re.sub(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/\*.*?\*/', blank, text, flags=re.DOTALL)


def device_code(text: str) -> str:
    """Return the file without the host's headers and functions: what NVRTC compiles."""
    plain = without_comments(text)
    kept = _device_parts(plain, 0, len(plain))
    code = "".join(text[start:end] for start, end in kept).strip() + "\n"
    if re.search(r"\bu?int\d+_t\b", code) and not re.search(r"<(cstdint|stdint\.h)>", code):
        code = f"#include <cstdint>\n\n{code}"
    needed = [
        f"#ifndef {name}\n#define {name} {value}\n#endif"
        for name, value in _MACROS.items()
        if re.search(rf"\b{name}\b", without_comments(code)) and f"#define {name}" not in code
    ]
    if needed:
        code = "\n".join(needed) + "\n\n" + code
    return re.sub(r"\n{4,}", "\n\n\n", code)


def _device_parts(text: str, first: int, last: int) -> list[tuple[int, int]]:
    """Return the places of what the device needs between two places; inside of namespaces too."""
    kept = []
    for start, end in _chunks(text, first, last):
        chunk = text[start:end]
        opened = _SCOPE.match(chunk)
        if chunk.lstrip().startswith("#"):
            if _HOST_HEADER.match(chunk.strip()) is None:
                kept.append((start, end))
        elif opened is not None:
            inner = start + opened.end()
            closed = _closing(text, inner - 1)
            kept.append((start, inner))
            kept += _device_parts(text, inner, closed)
            kept.append((closed, end))
        elif not _is_host_function(chunk) and (
            "__global__" in chunk or "__device__" in chunk or _HOST_CODE.search(chunk) is None
        ):
            kept.append((start, end))
    return kept


def _is_host_function(chunk: str) -> bool:
    """Return whether a piece of a file is a function that runs on the host alone."""
    if "__global__" in chunk:
        return "<<<" in re.sub(r"__global__.*", "", chunk, flags=re.DOTALL)
    has_body = re.search(r"\)\s*(?:const\s*)?(?:noexcept\s*)?\{", chunk) is not None
    of_device = re.search(r"__device__|constexpr|\bstruct\b|\bclass\b|\bnamespace\b|#", chunk)
    return has_body and of_device is None


def _chunks(text: str, first: int, last: int) -> Iterator[tuple[int, int]]:
    """Yield the places of the pieces at the top of a file: preprocessor lines, declarations and
    definitions. ``text`` has no comments; the space before a piece belongs to it."""
    start, place, depth = first, first, 0
    while place < last:
        letter = text[place]
        if depth == 0 and letter == "#" and not text[start:place].strip():
            end = place
            while True:
                newline = text.find("\n", end)
                end = last if newline < 0 else newline + 1
                if newline < 0 or text[newline - 1] != "\\":
                    break
            yield start, end
            start = place = end
            continue
        if letter == '"':
            place = max(text.find('"', place + 1), place)
        depth += (letter in "{([") - (letter in "})]")
        if depth == 0 and letter in ";}":
            end = place + 1
            rest = re.match(r"[^\S\n]*;", text[end:])
            end += rest.end() if letter == "}" and rest else 0
            following = re.match(r"\s*(\w+)?\s*;", text[end:]) if letter == "}" else None
            if following and re.search(r"\b(struct|class|enum|union|typedef)\b", text[start:end]):
                end += following.end()
            yield start, end
            start = place = end
            continue
        place += 1
    if text[start:last].strip():
        yield start, last


# --- kernels --------------------------------------------------------------------------------------


def kernels_in(text: str) -> list[Kernel]:
    """Return the ``__global__`` functions of a file that have a body, in order."""
    plain = without_comments(text)
    found = []
    for match in re.finditer(r"__global__", plain):
        opened = _after_attributes(plain, match.end())
        name = re.search(r"(\w+)\s*$", plain[match.end() : opened])
        closed = _closing(plain, opened)
        brace = re.match(r"\s*\{", plain[closed + 1 :])
        if name is None or brace is None:
            continue
        start = closed + brace.end()
        body = plain[start : _closing(plain, start) + 1]
        head = plain[match.end() : opened]
        before = re.search(r"template\s*<([^{};]*)>\s*[^{};>]*$", plain[: match.start()])
        bound = re.search(r"__launch_bounds__\s*\(\s*([^,)]+)", head)
        around, template = _namespaces(plain, match.start()), before[1] if before else ""
        given, threads = plain[opened + 1 : closed], bound[1].strip() if bound else None
        found.append(_kernel(name[1], around, template, given, body, threads))
    return found


def _after_attributes(text: str, place: int) -> int:
    """Return where the parameters open, past ``__launch_bounds__(256)`` and the like."""
    while True:
        opened = text.index("(", place)
        if re.search(r"__\w+__\s*$", text[place:opened]) is None:
            return opened
        place = _closing(text, opened) + 1


def _closing(text: str, opened: int) -> int:
    """Return the place of the bracket that closes the one at ``opened``."""
    depth = 0
    for place in range(opened, len(text)):
        depth += (text[place] in "([{") - (text[place] in ")]}")
        if depth == 0:
            return place
    return len(text) - 1


def split(text: str) -> list[str]:
    """Return what commas separate outside of all brackets, angle brackets among them."""
    parts, depth, part = [], 0, ""
    for letter in text:
        depth += (letter in "<([{") - (letter in ">)]}")
        if letter == "," and depth == 0:
            parts.append(part.strip())
            part = ""
        else:
            part += letter
    return [*parts, part.strip()] if part.strip() else parts


def _namespaces(text: str, place: int) -> str:
    """Return the names of the namespaces around a place, as a prefix: ``mine::``."""
    around = ""
    for match in re.finditer(r"\bnamespace\s+([\w:]+)\s*\{", text[:place]):
        if _closing(text, match.end() - 1) > place:
            around += f"{match[1]}::"
    return around


def _kernel(
    name: str, around: str, template: str, given: str, body: str, bound: str | None
) -> Kernel:
    parameters, pointed, unknown = [], {}, []
    for one in split(given):
        text = re.sub(r"\b__restrict__\b|\b__restrict\b|\brestrict\b|__grid_constant__", " ", one)
        text = text.partition("=")[0].strip()
        match = re.search(r"(\w+)\s*(\[\s*\w*\s*\])?$", text)
        if match is None:
            unknown.append(one)
            continue
        kind = " ".join(text[: match.start()].replace("*", " * ").split())
        words = kind.replace("const", "").replace("*", "").split()
        if "*" in kind or match[2]:
            parameters.append(KernelParameter(match[1], _access(match[1], kind, body)))
            pointed[match[1]] = " ".join(words)
        else:
            code = _CODES.get(" ".join(words), "")
            parameters.append(KernelParameter(match[1], NUMBER, code))
            if not code:
                unknown.append(one)
    return Kernel(
        name,
        f"{around}{name}",
        tuple(_template_of(template)),
        tuple(parameters),
        pointed,
        body,
        bound,
        tuple(unknown),
    )


def _template_of(text: str) -> Iterator[tuple[str, str, str | None]]:
    """Yield the parameters of a template: (kind, name, default or None)."""
    for one in split(text):
        left, _, default = one.partition("=")
        words = left.split()
        kind = "type" if words[0] in ("typename", "class") else " ".join(words[:-1])
        yield kind, words[-1], default.strip() or None


def _access(name: str, kind: str, body: str) -> str:
    """Return what a kernel does with the memory behind a pointer."""
    if re.match(r"(?:const\b.*\*|\w[\w:]*\s+const\s*\*)", kind):
        return INPUT
    if re.search(rf"\batomic\w+\s*\(\s*&?\s*\(?{name}\b", body):
        return ADDED
    stored = re.search(rf"\b{name}\s*\[[^;=]*?\]\s*=(?!=)", body) is not None
    compound = re.search(rf"\b{name}\s*\[[^;=]*?\]\s*[-+*/]=", body) is not None
    uses = len(re.findall(rf"\b{name}\s*\[", body))
    stores = len(re.findall(rf"\b{name}\s*\[[^;=]*?\]\s*=(?!=)", body))
    if compound or (stored and uses > stores):
        return UPDATED
    return INPUT if uses and not stored else OUTPUT


# --- host code ------------------------------------------------------------------------------------


def host_launch(text: str, kernel: Kernel) -> HostLaunch | None:
    """Return the first launch of a kernel in the file's host code; None if there is none."""
    plain = without_comments(text)
    pattern = rf"\b{kernel.name}\s*(<[^;]*?>)?\s*<<<(.*?)>>>\s*\("
    match = re.search(pattern, plain, re.DOTALL)
    if match is None:
        return None
    end = _closing(plain, match.end() - 1)
    before = plain[: match.start()]
    start = max(before.rfind("\n}"), 0)
    words = _Host(plain, before[start:])
    words.variables |= _wrapper_constants(plain, match.start())
    config = split(match[2])
    template = tuple(
        str(words.number(one)) if words.number(one) is not None else one
        for one in split((match[1] or "")[1:-1])
    )
    # A program's own sizes, as those of a main(), are no rule: only tensors' are.
    is_general = bool(words.tensors)
    grid = words.dimensions(config[0]) if is_general else None
    block = words.dimensions(config[1]) if len(config) > 1 else None
    numbers = [words.number(one) for one in block or ()]
    if block and None not in numbers:
        block = tuple(map(str, numbers))
    elif not is_general:
        block = None
    shared = words.python(config[2]) if len(config) > 2 and is_general else "0"
    given = []
    for one in split(plain[match.end() : end]):
        pointer = re.fullmatch(r"(\w+)\.(?:const_|mutable_)?data(?:_ptr)?(?:<[^>]*>)?\(\)", one)
        given.append(pointer[1] if pointer else words.python(one) if is_general else None)
    return HostLaunch(
        " ".join(plain[match.start() : end + 1].split()),
        template,
        grid,
        block,
        " ".join(config[1].split()) if len(config) > 1 else "",
        shared or "0",
        tuple(given),
        frozenset(words.tensors),
    )


def _wrapper_constants(text: str, place: int) -> dict[str, str]:
    """Return the template's constants of the host function around a place, as the first call of it
    in the file names them: ``launch<float, 128>(...)``."""
    heads = r"template\s*<([^{};]*)>\s*[^{};()]*?\b(\w+)\s*\([^{};]*\)\s*\{"
    for head in re.finditer(heads, text[:place]):
        called = re.search(rf"\b{head[2]}\s*<([^;<>(){{}}]*)>\s*\(", text)
        if called is not None and _closing(text, head.end() - 1) > place:
            given = zip(_template_of(head[1]), split(called[1]), strict=False)
            return {name: said for (kind, name, _), said in given if kind != "type"}
    return {}


def _outside_functions(text: str, first: int, last: int) -> str:
    """Return the declarations of a file and of its namespaces, without functions and classes."""
    kept = []
    for start, end in _chunks(text, first, last):
        opened = _SCOPE.match(text[start:end])
        if opened is not None:
            inner = start + opened.end()
            kept.append(_outside_functions(text, inner, _closing(text, inner - 1)))
        elif "{" not in text[start:end]:
            kept.append(text[start:end])
    return "".join(kept)


def constant(text: str, expression: str, known: Mapping[str, str]) -> int | None:
    """Return the value of a whole-number expression of a file's constants and macros, and of the
    ``known`` constants of a template; None if it has none."""
    words = _Host(without_comments(text), "")
    words.variables |= known
    return words.number(expression) if expression else None


class _Host:
    """The words of a host function: its constants, variables and tensors, to say in Python."""

    def __init__(self, text: str, function: str) -> None:
        declared = r"(?:const\s+|constexpr\s+|static\s+)*(?:auto|int|int32_t|int64_t|long|size_t|"
        declared += r"unsigned|unsigned int|uint32_t|float|double|dim3)\s+(?:const\s+)?"
        shared = _outside_functions(text, 0, len(text))  # other functions' variables are theirs
        self.variables = dict(re.findall(rf"{declared}(\w+)\s*=\s*([^;]+);", shared))
        self.variables |= dict(re.findall(rf"{declared}(\w+)\s*=\s*([^;]+);", function))
        self.variables |= dict(re.findall(r"\bdim3\s+(\w+)\s*\(([^;]*)\);", function))
        self.variables |= dict(re.findall(r"#\s*define\s+(\w+)\s+(\d+)\s*$", text, re.MULTILINE))
        self.tensors = set(re.findall(r"(?:torch|at)::Tensor\s*&?\s*(\w+)", function))
        self.tensors |= set(re.findall(r"auto\s+(\w+)\s*=\s*(?:torch|at)::", function))

    def number(self, text: str) -> int | None:
        said = self.python(text)
        try:
            value = None if said is None else eval(said, {"__builtins__": {}})
        except (NameError, SyntaxError, TypeError, AttributeError, ZeroDivisionError):
            return None
        return value if isinstance(value, int) else None

    def dimensions(self, text: str) -> tuple[str, ...] | None:
        text = self._unfolded(text.strip())
        match = re.fullmatch(r"dim3\s*[({](.*)[)}]", text, re.DOTALL)
        found = [self.python(one) for one in split(match[1] if match else text)]
        return None if None in found or not found else tuple(map(str, found))

    def _unfolded(self, text: str) -> str:
        value = self.variables.get(text)
        return self._unfolded(value.strip()) if value is not None and value != text else text

    def python(self, text: str, depth: int = 0) -> str | None:
        """Return a whole-number expression of sizes in Python; None if it is something else."""
        if depth > 8:
            return None
        text = re.sub(
            r"static_cast<[^>]*>|\(\s*(?:int|int64_t|size_t|unsigned|long)\s*\)", "", text
        )
        text = re.sub(r"\.size\(([^)]*)\)", r".shape[\1]", text)
        text = re.sub(r"\bstd::(min|max)(?:<[^>]*>)?\(", r"\1(", text)
        text = re.sub(r"sizeof\s*\(\s*(float|int)\s*\)", "4", text)
        text = re.sub(r"sizeof\s*\(\s*double\s*\)", "8", text)
        text = re.sub(r"(?<![/])/(?![/])", "//", text)
        text = re.sub(r"\b(\d+)[uUlL]+\b", r"\1", text)

        def known(match: re.Match[str]) -> str:
            value = self.variables.get(match[0])
            if value is None or match[0] in self.tensors:
                return match[0]
            said = self.python(value, depth + 1)
            return match[0] if said is None else said if said.isalnum() else f"({said})"

        text = re.sub(r"(?<![.\w])[A-Za-z_]\w*\b(?!\s*[.(])", known, text)
        try:
            tree = ast.parse(text.strip(), mode="eval")
        except SyntaxError:
            return None
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        return ast.unparse(tree) if names <= self.tensors | {"min", "max"} else None


def names_of(kernels: Sequence[Kernel]) -> str:
    """Return the names of kernels for a sentence."""
    return ", ".join(one.name for one in kernels) or "none"


def value_of(text: str) -> Any:
    """Return a C++ constant as a Python value; None if it is none."""
    words = {"true": True, "false": False}
    return words.get(text, int(text) if re.fullmatch(r"-?\d+", text) else None)
