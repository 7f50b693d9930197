"""``fuselab build``: a kernel package as a wheel, as a folder for Hugging Face's ``kernels``, or as
C++."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fuselab
from fuselab.composition import Composition
from fuselab.errors import (
    ArgumentError,
    BuildError,
    MissingDependencyError,
    OutputError,
    TargetError,
)
from fuselab.op import FusedOp
from fuselab.packaging import native
from fuselab.packaging.new import check_name
from fuselab.prove import load as loading
from fuselab.report.files import folder_for_results

# The files of a package that are read when it runs, or say what it is.
_SUFFIXES = (".py", ".cu", ".cuh", ".cpp", ".h", ".json", ".md")
_NOT_NEEDED = ("__pycache__", "tuned.lock")
_FUSELAB = re.compile(r"^\s*(?:from fuselab[. ]|import fuselab\b)", re.MULTILINE)
_TRITON = re.compile(r"^\s*(?:from triton[. ]|import triton\b)", re.MULTILINE)
CONTRACT = "op.py"
_EARLIER = ("build", "torch-ext")


@dataclass(frozen=True)
class Package:
    """The files of a package by name, as bytes, and what it needs.

    ``operators`` are the names of its operators, and ``declared`` their declarations. ``needs`` are
    the distributions that it imports. ``is_standalone`` says that it runs without fuselab, which
    only its contract imports.
    """

    name: str
    files: Mapping[str, bytes]
    operators: Sequence[str]
    needs: Sequence[str]
    is_standalone: bool
    declared: Sequence[FusedOp] = ()


def read(spec: str, name: str | None = None) -> Package:
    """Return the package that ``spec`` names: a folder, or a file that declares an operator.

    ``name`` is the one that users import; the folder's or the operator's by default. Raises
    TargetError, ArgumentError.
    """
    place, _, chosen = spec.partition(":")
    path = Path(place).expanduser()
    if loading.is_library_name(spec) and not path.is_dir():
        raise ArgumentError(
            f"{spec} comes with fuselab: install fuselab itself, whose wheel holds its kernels."
        )
    found = loading.load(spec)
    held = found.operators if isinstance(found, Composition) else [found]
    operators = [op.name for op in held]
    if path.is_dir():
        files = _folder(path)
        named = name or path.resolve().name
        if "__init__.py" not in files:
            raise TargetError(f"{path} has no __init__.py; write one that offers its function.")
    else:
        assert not isinstance(found, Composition)
        files = _file(path, chosen or _name_in(path, found), found.short_name)
        named = name or found.short_name
    check_name(named)
    sources = {key: text.decode(errors="replace") for key, text in files.items()}
    python = {key: text for key, text in sources.items() if key.endswith(".py")}
    own = {key: text for key, text in python.items() if not _is_for_fuselab(key)}
    is_standalone = "runtime/__init__.py" in files and not any(map(_FUSELAB.search, own.values()))
    needs = ["torch"]
    needs += ["triton"] if any(map(_TRITON.search, python.values())) else []
    needs += [] if is_standalone else [f"fuselab=={fuselab.__version__}"]
    return Package(named, files, operators, needs, is_standalone, held)


def _is_for_fuselab(name: str) -> bool:
    """Return whether a file of a standalone package is for ``check`` and ``bench`` alone."""
    folder, _, file = name.rpartition("/")
    if folder.partition("/")[0] == "runtime":
        return False
    return file in (CONTRACT, "composed.py") or file.startswith("test_")


def _folder(folder: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(folder)): file.read_bytes()
        for file in sorted(folder.rglob("*"))
        if file.is_file()
        and file.suffix in _SUFFIXES
        and not any(part in _NOT_NEEDED or part.startswith(".") for part in file.parts)
    }


def _name_in(path: Path, op: object) -> str:
    """Return the name of an operator in the file that declares it."""
    module = loading.import_file(path)
    return next(name for name, value in vars(module).items() if value is op)


def _file(path: Path, declared: str, operator: str) -> dict[str, bytes]:
    """Return the files of a package made of one file: that file, and those beside it that it names
    or imports."""
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    files = {CONTRACT: text.encode()}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            named = node.value
            beside = path.with_name(named) if re.fullmatch(r"[\w.-]+\.\w+", named) else None
            if beside is not None and beside.suffix in _SUFFIXES and beside.is_file():
                files[named] = beside.read_bytes()
        if isinstance(node, ast.Import | ast.ImportFrom):
            _refuse_imports_beside(path, node)
    files["__init__.py"] = (
        f'"""{operator}, a fused operator."""\n\nimport fuselab\n\n'
        f"from .op import {declared} as OP\n\n{operator} = fuselab.operator(OP)\n\n"
        f'__all__ = ["OP", "{operator}"]\n'
    ).encode()
    return files


def _refuse_imports_beside(path: Path, node: ast.Import | ast.ImportFrom) -> None:
    """Raise TargetError if a file imports a module that lies beside it."""
    modules = [one.name for one in node.names]
    if isinstance(node, ast.ImportFrom):
        modules = [node.module] if node.module and not node.level else []
    for module in modules:
        if path.with_name(f"{module.partition('.')[0]}.py").is_file():
            raise TargetError(
                f"{path}, line {node.lineno}: it imports '{module}' from beside it; make a folder "
                "of both, with relative imports and an __init__.py."
            )


def build_wheel(package: Package, output: Path, version: str) -> dict[str, Any]:
    """Write the package's wheel to the folder ``output``; return facts about it.

    The wheel is pure Python and carries the kernels' sources, which are compiled where it runs.
    Raises BuildError, MissingDependencyError, OutputError.
    """
    if re.fullmatch(r"\d+(\.\d+)*([a-z]+\d*)?(\.(post|dev)\d+)?", version) is None:
        raise ArgumentError(f"--version {version}: write it as 0.1.0.")
    with folder_for_results(output) as made, tempfile.TemporaryDirectory() as scratch:
        project = Path(scratch)
        _write(project / "src" / package.name, package.files)
        (project / "pyproject.toml").write_text(_pyproject(package, version), encoding="utf-8")
        _call_setuptools(project, project / "dist")
        (wheel,) = (project / "dist").glob("*.whl")
        tried = project / "tried"
        shutil.unpack_archive(wheel, tried, "zip")
        _try_import(tried, package.name)
        target = made / wheel.name
        shutil.copyfile(wheel, target)
    return _facts(package, [str(output / wheel.name)], f"pip install {output / wheel.name}")


def _pyproject(package: Package, version: str) -> str:
    suffixes = sorted({Path(name).suffix for name in package.files} - {".py"})
    data = ", ".join(f'"**/*{suffix}"' for suffix in suffixes)
    told = f"Fused kernels: {', '.join(package.operators)}"
    return f"""\
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "{package.name.replace("_", "-")}"
version = "{version}"
description = "{told}"
requires-python = ">=3.11"
dependencies = {json.dumps(list(package.needs))}

[tool.setuptools.packages.find]
where = ["src"]

[tool.setuptools.package-data]
"*" = [{data}]
"""


def _call_setuptools(project: Path, output: Path) -> None:
    output.mkdir()
    program = f"from setuptools import build_meta; build_meta.build_wheel({str(output)!r})"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=project, capture_output=True, text=True, check=False
    )
    if "No module named 'setuptools'" in done.stderr:
        raise MissingDependencyError("a wheel needs setuptools; pip install setuptools.")
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it says nothing"])[-1]
        raise BuildError(f"setuptools built no wheel: {last.rstrip('.')}.", done.stderr)


def build_kernels_folder(package: Package, output: Path, version: str) -> dict[str, Any]:
    """Write the folder that Hugging Face's ``kernels`` loads, and its builder's project.

    ``build/torch-cuda`` and ``build/torch-cpu`` each hold the package and ``metadata.json``;
    ``torch-ext`` and ``build.toml`` are the project of ``kernel-builder``, which makes the same.
    Raises ArgumentError, BuildError, OutputError.
    """
    if not version.isdigit():
        raise ArgumentError(f"--version {version}: a kernel's version is a whole number, as 1.")
    hub_name = package.name.replace("_", "-")
    _refuse_other_folder(output, hub_name)
    files = {
        name: text
        for name, text in package.files.items()
        if not (package.is_standalone and _is_for_fuselab(name)) and not name.startswith("test_")
    }
    suffixes = sorted({Path(name).suffix.removeprefix(".") for name in files})
    digest = hashlib.sha256(b"".join(files[name] for name in sorted(files))).hexdigest()[:12]
    with folder_for_results(output) as made, tempfile.TemporaryDirectory() as scratch:
        draft = Path(scratch)
        _write(draft / "torch-ext" / package.name, files)
        _try_import(draft / "torch-ext", package.name)
        (draft / "build.toml").write_text(
            f'[general]\nname = "{hub_name}"\nversion = {version}\nedition = 5\n'
            f'license = "Apache-2.0"\nbackends = ["cuda", "cpu"]\n\n'
            f"[torch-noarch]\npyext = {json.dumps(suffixes)}\n",
            encoding="utf-8",
        )
        for backend in ("cuda", "cpu"):
            variant = draft / "build" / f"torch-{backend}"
            _write(variant, files)
            about = {
                "name": hub_name,
                "id": f"_{package.name}_{backend}_{digest}",
                "version": int(version),
                "license": "Apache-2.0",
                "python-depends": [],
                "backend": {"type": backend},
            }
            (variant / "metadata.json").write_text(json.dumps(about, indent=2) + "\n")
        for one in _EARLIER if (made / "build.toml").is_file() else ():
            shutil.rmtree(made / one, ignore_errors=True)  # no file of an earlier build stays
        shutil.copytree(draft, made, dirs_exist_ok=True)
    facts = _facts(
        package,
        [str(output)],
        f"kernels.get_local_kernel(Path({str(output.resolve())!r}))",
    )
    if not package.is_standalone:
        facts["notes"].append(
            "it imports fuselab, which must be installed where it is loaded; the Hub takes kernels "
            "that import torch and triton alone (fuselab eject --standalone writes such)"
        )
    return facts


def _refuse_other_folder(output: Path, hub_name: str) -> None:
    """Raise OutputError if a folder holds something other than an earlier build of the kernel."""
    if not output.is_dir() or not any(output.iterdir()):
        return
    project = output / "build.toml"
    if not project.is_file() or f'name = "{hub_name}"' not in project.read_text("utf-8"):
        raise OutputError(f"{output} holds other files; give a folder of its own for {hub_name}.")


def build_cmake(package: Package, output: Path, version: str) -> dict[str, Any]:
    """Write a CMake project of the package's operators against libtorch; return facts about it.

    Raises OutputError, UnsupportedError for an operator that has no form in C++.
    """
    _refuse_cpp_over_other(output, native.PROJECT, package.name)
    with folder_for_results(output) as made:
        project = native.cmake_project(package.name, package.declared)
        _write(made, project.files)
    torch_folder = "$(python -c 'import torch; print(torch.utils.cmake_prefix_path)')"
    facts = _facts(
        package,
        [str(output)],
        f"cmake -S {output} -B {output}/build -DCMAKE_PREFIX_PATH={torch_folder} && cmake --build "
        f"{output}/build",
    )
    return {**facts, "needs": ["libtorch", "a C++20 compiler"], "notes": list(project.notes)}


def build_load_inline(package: Package, output: Path, version: str) -> dict[str, Any]:
    """Write a Python package that compiles the operators as a C++ extension when it is imported.

    It is ``OUTPUT/NAME_native``, which is imported once here and therefore compiled. Raises
    BuildError, OutputError, UnsupportedError.
    """
    named = f"{package.name}_native"
    _refuse_cpp_over_other(output / named, "__init__.py", package.name)
    with folder_for_results(output) as made:
        project = native.inline_package(package.name, package.declared)
        _write(made / named, project.files)
        _try_import(made, named)
    facts = _facts(package, [str(output / named)], f"from {named} import {project.offered}")
    return {**facts, "needs": ["torch", "a C++20 compiler"], "notes": list(project.notes)}


def _refuse_cpp_over_other(output: Path, mark: str, name: str) -> None:
    """Raise OutputError if a folder holds something other than an earlier build of this package."""
    if not output.is_dir() or not any(output.iterdir()):
        return
    held = output / mark
    text = held.read_text("utf-8") if held.is_file() else ""
    if native.SIGNATURE not in text:
        raise OutputError(f"{output} holds other files; give a folder of its own.")
    if mark == native.PROJECT and f"project({name}_native " not in text:
        raise OutputError(
            f"{output} holds the project of another package; give {name} a folder of its own."
        )


FORMS: Mapping[str, Callable[[Package, Path, str], dict[str, Any]]] = {
    "wheel": build_wheel,
    "kernels": build_kernels_folder,
    "cmake": build_cmake,
    "load_inline": build_load_inline,
}
VERSIONS = {"wheel": "0.1.0", "kernels": "1"}


def _facts(package: Package, written: list[str], use: str) -> dict[str, Any]:
    return {
        "package": package.name,
        "operators": list(package.operators),
        "needs": list(package.needs),
        "standalone": package.is_standalone,
        "written": written,
        "use": use,
        "notes": [],
    }


def _write(folder: Path, files: Mapping[str, bytes]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(text)


def _try_import(folder: Path, name: str) -> None:
    """Import what was built in a fresh process that sees this copy of it. Raises BuildError."""
    program = f"import sys; sys.path.insert(0, {str(folder.resolve())!r}); import {name}"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=folder,
        env=_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it says nothing"])[-1]
        raise BuildError(f"{name} does not import by itself: {last.rstrip('.')}.", done.stderr)


def _environment() -> dict[str, str]:
    """Return this process's environment, in which fuselab is found as it is here."""
    root = str(Path(fuselab.__file__).resolve().parents[1])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
