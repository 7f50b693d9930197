"""Programs drawn by a seed: chains of pointwise operations, reductions, normalisations, broadcasts,
casts and views, to eject and to judge by the bar of ``fuselab check``.

Run as a script it judges many and prints those that are wrong, or refused without a line:

    PYTHONPATH=src python tests/eject/random_programs.py FIRST_SEED COUNT [triton|cpp] [OUT]
"""

from __future__ import annotations

import random
import re
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from fuselab.ejection.eject import eject
from fuselab.errors import EjectError
from fuselab.inspect import targets
from fuselab.prove import check_gradients, check_values
from fuselab.prove.draw import LAYOUTS
from fuselab.prove.load import load_op
from fuselab.prove.result import Verdict
from fuselab.prove.subject import Subject
from fuselab.prove.trials import has_gradient, run_check
from fuselab.runtime import interpreter

SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 12, 13, 17, 32)
LARGEST = 4096  # elements of a value
UNARY = (
    "torch.relu({0})", "torch.tanh({0})", "torch.sigmoid({0})", "{0}.clamp(-3, 3).exp()",
    "torch.log1p({0}.abs())", "({0}.abs() + 0.5).sqrt()", "({0}.square() + 1).rsqrt()", "-{0}",
    "{0}.abs()", "F.gelu({0})", "F.gelu({0}, approximate='tanh')", "F.silu({0})", "F.mish({0})",
    "{0}.sin()", "{0}.cos()", "torch.erf({0})", "F.softplus({0})", "F.elu({0})", "F.hardswish({0})",
    "F.leaky_relu({0}, 0.2)", "{0} * 0.5", "{0} + 1.5", "2 - {0}", "1 / ({0}.abs() + 1)",
    "{0} ** 2", "{0} ** 3", "{0}.clamp(-1, 1)", "{0}.clamp(min=0.1)",
    "torch.where({0} > 0, {0}, 0)",
    "{0}.masked_fill({0} < -1, 0.5)", "F.logsigmoid({0})", "{0}.atan()", "{0}.expm1().tanh()",
    "{0}.sign() * {0}", "{0}.nan_to_num()", "{0} / 3", "torch.exp2({0}.clamp(-3, 3))",
)  # fmt: skip
BINARY = (
    "{0} + {1}", "{0} - {1}", "{0} * {1}", "{0} / ({1}.abs() + 1)", "torch.maximum({0}, {1})",
    "torch.minimum({0}, {1})", "torch.where({1} > 0, {0}, {1})", "torch.lerp({0}, {1}, 0.3)",
    "torch.addcmul({0}, {0}, {1}, value=0.5)", "({0} > {1}).to({0}.dtype) * {0}",
    "torch.hypot({0}, {1}.abs() + 0.5)", "torch.logaddexp({0}, {1})", "{0} + ({1} >= 0)",
)  # fmt: skip
REDUCTIONS = (
    "{0}.sum({1})", "{0}.mean({1})", "{0}.amax({1})", "{0}.amin({1})", "torch.logsumexp({0}, {1})",
    "{0}.var({1}, correction=0)", "{0}.square().sum({1})", "({0} > 0).sum({1}).to({0}.dtype)",
    "torch.linalg.vector_norm({0}.abs() + 0.5, dim={1})", "{0}.abs().mean({1})",
)  # fmt: skip
ALONG = (
    "torch.softmax({0}, {1})", "F.log_softmax({0}, dim={1})", "{0} - {0}.mean({1}, keepdim=True)",
    "F.normalize({0}.abs() + 0.5, dim={1})", "{0} / ({0}.amax({1}, keepdim=True).abs() + 1)",
    "{0} * torch.rsqrt({0}.square().mean({1}, keepdim=True) + 1e-5)",
    "({0} - {0}.mean({1}, keepdim=True)) / ({0}.std({1}, keepdim=True, correction=0) + 0.1)",
    "torch.softmax({0} * 0.3, {1}) * {0}",
)  # fmt: skip
# Each ends in the first argument's dtype, because many functions refuse mixed ones.
CASTS = (
    "({0}.double() * 2).to(x0.dtype)", "({0}.float() + 1).to(x0.dtype)", "{0}.to(x0.dtype)",
    "({0} > 0).float().to(x0.dtype)", "({0}.clamp(-9, 9) * 4).to(torch.int32).to(x0.dtype)",
    "{0}.to(torch.float16).to(x0.dtype)", "(({0} > 0) & ({0} < 1)).to(x0.dtype) + {0}",
)  # fmt: skip


class RandomProgram:
    """The text of a function, and the shapes of its arguments."""

    def __init__(self, seed: int) -> None:
        self.source = random.Random(seed)
        self.lines: list[str] = []
        self.arguments: list[tuple[int, ...]] = []
        rank = self.source.randint(1, 4)
        self.name, self.shape = self.argument(self.sizes(rank)), self.arguments[0]
        self.values = {self.name: self.shape}
        for _ in range(self.source.randint(3, 9)):
            self.step()
        results = [self.name]
        if self.source.random() < 0.2:
            results.append(self.source.choice(list(self.values)))
        self.results = tuple(dict.fromkeys(results))
        if self.source.random() < 0.1:
            self.assign(f"{self.name}.double()", self.shape)
            self.results = (*self.results[1:], self.name)

    @property
    def text(self) -> str:
        names = ", ".join(f"x{place}" for place in range(len(self.arguments)))
        returned = ", ".join(self.results)
        lines = [*self.lines, f"return {returned}"]
        shapes = ", ".join(f"torch.ones({shape})" for shape in self.arguments)
        body = "\n".join(f"    {line}" for line in lines)
        return (
            "import torch\nimport torch.nn.functional as F\n\n\n"
            f"def program({names}):\n{body}\n\n\n"
            f"def get_inputs():\n    return [{shapes}]\n"
        )

    def sizes(self, rank: int) -> tuple[int, ...]:
        sizes = [self.source.choice(SIZES) for _ in range(rank)]
        while torch.Size(sizes).numel() > LARGEST:
            sizes[sizes.index(max(sizes))] = 3
        return tuple(sizes)

    def argument(self, shape: tuple[int, ...]) -> str:
        self.arguments.append(shape)
        return f"x{len(self.arguments) - 1}"

    def assign(self, text: str, shape: Sequence[int]) -> None:
        """Add a statement, whose value is what the next one starts from."""
        self.name, self.shape = f"v{len(self.lines)}", tuple(shape)
        self.lines.append(f"{self.name} = {text}")
        self.values[self.name] = self.shape

    def step(self) -> None:
        kinds = ["unary"] * 4 + ["binary"] * 3 + ["cast"]
        if self.shape:
            kinds += ["reduction", "along", "along", "norm", "view", "view", "view"]
        getattr(self, self.source.choice(kinds))()

    # --- the kinds of statements

    def unary(self) -> None:
        self.assign(self.source.choice(UNARY).format(self.name), self.shape)

    def cast(self) -> None:
        self.assign(self.source.choice(CASTS).format(self.name), self.shape)

    def binary(self) -> None:
        """Combine the value with a new argument that broadcasts, or with an earlier value."""
        fitting = [
            name for name, shape in self.values.items() if _broadcast(shape, self.shape) is not None
        ]
        if self.source.random() < 0.5 and fitting:
            other = self.source.choice(fitting)
            shape = _broadcast(self.values[other], self.shape)
        else:
            kept = self.source.randint(0, len(self.shape))
            own = [
                1 if self.source.random() < 0.3 else size
                for size in self.shape[len(self.shape) - kept :]
            ]
            shape = self.shape
            if own and own[0] == 1 and self.source.random() < 0.3:
                own[0] = self.source.choice(SIZES[:6])
                shape = _broadcast(tuple(own), self.shape) or self.shape
                own[0] = own[0] if _broadcast(tuple(own), self.shape) else 1
            other = self.argument(tuple(own))
        assert shape is not None
        if torch.Size(shape).numel() > LARGEST:
            return
        self.assign(self.source.choice(BINARY).format(self.name, other), shape)

    def dims(self, most: int) -> list[int]:
        count = self.source.randint(1, min(most, len(self.shape)))
        return sorted(self.source.sample(range(len(self.shape)), count))

    def written(self, dims: Sequence[int]) -> str:
        """Return dimensions as text, some of them counted from the end."""
        rank = len(self.shape)
        texts = [str(dim - rank if self.source.random() < 0.5 else dim) for dim in dims]
        return texts[0] if len(texts) == 1 else f"({', '.join(texts)})"

    def reduction(self) -> None:
        dims, keep = self.dims(len(self.shape)), self.source.random() < 0.5
        shape = [
            1 if dim in dims else size
            for dim, size in enumerate(self.shape)
            if keep or dim not in dims
        ]
        where = self.written(dims) + (", keepdim=True" if keep else "")
        self.assign(self.source.choice(REDUCTIONS).format(self.name, where), shape)

    def along(self) -> None:
        text = self.source.choice(ALONG).format(self.name, self.written(self.dims(1)))
        self.assign(text, self.shape)

    def norm(self) -> None:
        options = ["layer", "rms"]
        if len(self.shape) >= 2:
            options += ["group", "batch"]
        if len(self.shape) >= 3:
            options += ["instance"]
        kind, name = self.source.choice(options), self.name
        if kind in ("layer", "rms"):
            own = self.shape[-self.source.randint(1, min(2, len(self.shape))) :]
            weight = self.argument(own)
            text = f"F.{kind}_norm({name}, {weight}.shape, {weight}, eps=1e-5)"
            if kind == "layer" and self.source.random() < 0.5:
                text = f"F.layer_norm({name}, {weight}.shape, {weight}, {self.argument(own)})"
        elif kind == "instance":
            text = f"F.instance_norm({name})"
            if torch.Size(self.shape[2:]).numel() == 1:
                return
        elif torch.Size(self.shape[2:]).numel() == 1 and kind == "group":
            return
        else:
            channels = self.shape[1]
            area = torch.Size(self.shape).numel() // channels
            if area == 1:
                return
            weight, bias = self.argument((channels,)), self.argument((channels,))
            groups = self.source.choice([one for one in (1, 2, 3, 4) if channels % one == 0])
            if kind == "group":
                text = f"F.group_norm({name}, {groups}, {weight}, {bias})"
            else:
                text = f"F.batch_norm({name}, None, None, {weight}, {bias}, training=True)"
        self.assign(text, self.shape)

    def view(self) -> None:
        rank, name = len(self.shape), self.name
        dim = self.source.randrange(rank)
        size, rest = self.shape[dim], list(self.shape)
        options = ["unsqueeze"] if rank < 4 else []
        options += ["transpose", "permute", "join"] if rank > 1 else []
        options += ["split"] if size % 2 == 0 and rank < 4 else []
        options += ["slice", "every other", "cat", "chunk"] if size > 1 else []
        options += ["squeeze"] if size == 1 and rank > 1 else []
        kind = self.source.choice(options) if options else "unsqueeze"
        at = dim - rank if self.source.random() < 0.5 else dim
        if kind == "unsqueeze":
            self.assign(f"{name}.unsqueeze({dim})", [*rest[:dim], 1, *rest[dim:]])
        elif kind == "squeeze":
            self.assign(f"{name}.squeeze({at})", [*rest[:dim], *rest[dim + 1 :]])
        elif kind == "transpose":
            other = self.source.randrange(rank)
            rest[dim], rest[other] = rest[other], rest[dim]
            self.assign(f"{name}.transpose({at}, {other})", rest)
        elif kind == "permute":
            order = self.source.sample(range(rank), rank)
            self.assign(f"{name}.permute({order})", [rest[place] for place in order])
        elif kind == "join":
            first = self.source.randrange(rank - 1)
            joined = rest[first] * rest[first + 1]
            text = f"{name}.flatten({first}, {first + 1})"
            self.assign(text, [*rest[:first], joined, *rest[first + 2 :]])
        elif kind == "split":
            text = f"{name}.unflatten({at}, (2, {name}.shape[{dim}] // 2))"
            self.assign(text, [*rest[:dim], 2, size // 2, *rest[dim + 1 :]])
        elif kind == "slice":
            begin = self.source.randint(0, 1)
            colons = ":, " * dim
            self.assign(f"{name}[{colons}{begin}:]", [*rest[:dim], size - begin, *rest[dim + 1 :]])
        elif kind == "every other":
            colons = ":, " * dim
            self.assign(f"{name}[{colons}::2]", [*rest[:dim], (size + 1) // 2, *rest[dim + 1 :]])
        elif kind == "cat":
            text = f"torch.cat(({name}, {name} * 2), dim={at})"
            self.assign(text, [*rest[:dim], 2 * size, *rest[dim + 1 :]])
        elif size % 2 == 0:
            one, other = f"h{len(self.lines)}", f"g{len(self.lines)}"
            self.lines.append(f"{one}, {other} = {name}.chunk(2, dim={at})")
            self.assign(
                f"{one} * torch.sigmoid({other})", [*rest[:dim], size // 2, *rest[dim + 1 :]]
            )


def _broadcast(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...] | None:
    try:
        return tuple(torch.broadcast_shapes(one, other))
    except RuntimeError:
        return None


CHECKS = (
    *(
        replace(known, quick=4)
        for known in check_values.CHECKS
        if known.name in ("cases", "shapes")
    ),
    *(replace(known, quick=8) for known in check_values.CHECKS if known.name == "layouts"),
    *(
        replace(known, quick=6, layouts=LAYOUTS)
        for known in check_gradients.CHECKS
        if known.name == "gradients"
    ),
)
DTYPES = (torch.float32, torch.float16, torch.float64, torch.bfloat16)


def verdict(seed: int, language: str, folder: Path) -> str:
    """Eject a program to ``folder`` and judge it: ``ok``, ``refused: ...`` or ``WRONG: ...``.

    Triton runs in this process, which has to be the interpreter's; ``judged`` sees to it.
    """
    warnings.filterwarnings("ignore")
    program = RandomProgram(seed)
    folder.mkdir(parents=True)
    file = folder / f"program_{seed}.py"
    file.write_text(program.text, encoding="utf-8")
    function = targets.load(f"{file}:program").callable
    args = [torch.ones(shape) for shape in program.arguments]
    function(*args)
    try:
        eject(function, *args, out=folder / "package", name=f"program_{seed}")
    except EjectError as error:
        named = re.search(r"program_\d+\.py:\d+|line \d+", str(error))
        return f"refused: {error}" if named else f"WRONG: refused without a line: {error}"
    found = [folder / "package"]
    if (folder / "package" / "composed.py").is_file():
        found = sorted(one.parent for one in (folder / "package").glob("*/op.py"))
    for package in found:
        problem = problem_of(package, language, seed)
        if problem is not None:
            return f"WRONG: {package}: {problem}"
    return "ok" if len(found) == 1 and found[0].name == "package" else "ok, cut"


def judged(seed: int, language: str, folder: Path) -> str:
    """Return the verdict of a program, found in the interpreter's process where it needs that."""
    if language != "triton":
        return verdict(seed, language, folder)
    return str(interpreter.run(f"{__file__}:verdict", seed, language, folder, timeout_s=600.0))


def problem_of(package: Path, language: str, seed: int) -> str | None:
    """Return what is wrong with a package in a dtype that the seed chooses, or None."""
    op = load_op(str(package))
    on_cpu = {language: replace(op.implementations[language], device="cpu")}
    op = replace(op, implementations=on_cpu, configs={}, prefer=None)
    dtype = DTYPES[seed % (3 if language == "triton" else 4)]
    is_triton = language == "triton"
    subject = Subject.here(
        op, language, torch.device("cpu"), dtype, seed, quick=True, interpreted=is_triton
    )
    for known in CHECKS:
        if known.name == "gradients" and has_gradient(subject) is not None:
            continue
        result = run_check(subject, known)
        if result.verdict is Verdict.FAIL:
            shown = "; ".join(result.case) if isinstance(result.case, tuple) else result.case
            return f"{known.name} {dtype}: {result.reason} [{shown}]"
    return None


def main() -> int:
    first, count = int(sys.argv[1]), int(sys.argv[2])
    language = sys.argv[3] if len(sys.argv) > 3 else "triton"
    root = Path(sys.argv[4]) if len(sys.argv) > 4 else Path(tempfile.mkdtemp())
    counted: Counter[str] = Counter()
    for seed in range(first, first + count):
        try:
            found = judged(seed, language, root / f"{language}_{seed}")
        except Exception as error:
            found = f"WRONG: raised {type(error).__name__}: {str(error)[:300]}"
        counted[found.split(":")[0]] += 1
        if not found.startswith("ok"):
            print(seed, found, flush=True)
    print(dict(counted))
    return int(bool(counted["WRONG"]))


if __name__ == "__main__":
    sys.exit(main())
