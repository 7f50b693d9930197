"""Loading the FusedOp that a user names: a library name, a file or a folder."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType
from unittest import mock

from fuselab import ops
from fuselab.composition import Composition
from fuselab.errors import ArgumentError, FuselabError, TargetError, UnknownNameError
from fuselab.op import FusedOp
from fuselab.prove.blanks import refuse_blanks
from fuselab.prove.process_state import ProcessState

COMPOSED = "composed.py"  # the file of a folder that holds a Composition
_DECLARING = ("op.py", COMPOSED)  # one of them is in every package that eject or new wrote
_changed: dict[str, list[str]] = {}  # what the import of a module changed in the process


def load_op(spec: str) -> FusedOp:
    """Return the FusedOp that ``spec`` names.

    ``softmax`` or ``fuselab::softmax`` is an operator of the library. ``FILE.py`` is a file with
    one public FusedOp at module level, and ``FILE.py:NAME`` picks one of several. ``DIR`` is a
    kernel package: a folder with ``op.py`` or ``__init__.py``, whose relative imports work. A name
    of the library that is also a package in the working folder is refused, because its user may
    mean either: ``./softmax`` is the package, and ``fuselab::softmax`` the library's.

    Raises:
        ArgumentError: the name is that of an operator of the library and of a package here.
        UnknownNameError: no operator of the library has that name.
        TargetError: the file is missing, raises on import (the message has the exception and its
            line), or holds no FusedOp, or several (the message names them).
    """
    refuse_unknown(spec)
    path_text, _, name = spec.partition(":") if "::" not in spec else (spec, "", "")
    path = Path(path_text).expanduser()
    if path.is_dir() and not is_library_name(spec):
        module = _import_folder(path)
        composition = None if name else _composition_in(module)
        if composition is not None:
            operators = ", ".join(f"{path}/{op.short_name}" for op in composition.operators)
            raise TargetError(f"{path} is composed of several operators; name one: {operators}.")
        return _pick(module, path, name)
    if path.suffix == ".py" or "/" in path_text:
        return _pick(import_file(path), path, name)
    return _library_op(spec)


def refuse_unknown(spec: str) -> None:
    """Raise as ``load_op`` does where ``spec`` names no file, folder or operator, importing
    nothing."""
    path_text, _, _ = spec.partition(":") if "::" not in spec else (spec, "", "")
    path = Path(path_text).expanduser()
    if path.is_dir() and not is_library_name(spec):
        refuse_blanks(path)
        return
    if path.suffix == ".py" or "/" in path_text or path.is_file():
        if not path.is_file():
            raise TargetError(
                f"{path}: no such file; give FILE.py, a folder or an operator's name."
            )
        if path.suffix == ".cu":
            raise TargetError(
                f"{path} declares no operator; `fuselab new NAME --from {path}` makes a package of "
                "its kernel."
            )
        if path.suffix != ".py":
            raise TargetError(f"{path} is no Python file; an operator is declared in one.")
    elif not is_library_name(spec):
        raise UnknownNameError("operator", spec, ops.operators())
    elif "::" not in spec and any((path / name).is_file() for name in _DECLARING):
        raise ArgumentError(
            f"'{spec}' is an operator of the library, and a package in this folder; write "
            f"{spec_of_folder(path)} for the package, or fuselab::{spec} for the library's."
        )


def spec_of_folder(folder: Path) -> str:
    """Return what a user writes for a kernel package: its path, which begins with ``./`` where it
    would be the name of an operator of the library."""
    return f"./{folder}" if is_library_name(str(folder)) else str(folder)


def load(spec: str) -> FusedOp | Composition:
    """Return what ``spec`` names: as ``load_op``, or the composition of a folder that holds one."""
    path = Path(spec).expanduser()
    if path.is_dir() and not is_library_name(spec) and (path / COMPOSED).is_file():
        found = _composition_in(_import_folder(path))
        if found is not None:
            return found
    return load_op(spec)


def _composition_in(module: ModuleType) -> Composition | None:
    return next((one for one in vars(module).values() if isinstance(one, Composition)), None)


def spec_of(op: FusedOp) -> str | None:
    """Return the spec under which another process finds ``op``, or None when it has none.

    It has none if no importable file holds it at module level, for example if it was made inside a
    function or typed at a prompt.
    """
    for module, name in _holders(op):
        if module.__name__.startswith("fuselab.ops."):
            return op.name
        path = Path(module.__file__ or "")
        folder = path.name in ("op.py", "__init__.py") and bool(module.__package__)
        return f"{path.parent if folder else path}:{name}"
    return None


def _holders(op: FusedOp) -> list[tuple[ModuleType, str]]:
    """Return the modules with a file that hold ``op``, with its name there; its home comes
    first."""
    home = getattr(op.reference, "__module__", "").rpartition(".")[0]
    found = [
        (module, name)
        for module in list(sys.modules.values())
        if isinstance(module, ModuleType) and getattr(module, "__file__", None)
        for name, value in list(vars(module).items())
        if value is op
    ]

    def distance(holder: tuple[ModuleType, str]) -> int:
        module = holder[0].__name__
        if module == op.reference.__module__:
            return 0
        if module.startswith("fuselab.ops.") or (home and module.startswith(f"{home}.")):
            return 1
        return 3 if module == "__main__" else 2

    return sorted(found, key=distance)


def is_library_name(spec: str) -> bool:
    """Return whether ``spec`` names an operator of the library."""
    return ops.has(spec.removeprefix("fuselab::"))


def _library_op(spec: str) -> FusedOp:
    return ops.contract(spec.removeprefix("fuselab::"))


def _module_name(path: Path) -> str:
    """Return a module name that is unique to the path, so that two files called op.py differ."""
    digest = hashlib.sha1(str(path.resolve()).encode()).hexdigest()[:10]
    return f"fuselab_user_{path.stem if path.is_file() else path.name}_{digest}"


def import_file(path: Path) -> ModuleType:
    """Return a Python file as a module, imported once. Raises TargetError with the line of a file
    that raises."""
    return _import_file(path, _module_name(path))


def _import_file(path: Path, module_name: str) -> ModuleType:
    """Import one file by path; its folder is importable while it loads, as for a script."""
    if module_name in sys.modules:
        return sys.modules[module_name]
    specification = importlib.util.spec_from_file_location(module_name, path)
    if specification is None or specification.loader is None:
        raise TargetError(f"{path} is no file of Python; give one whose name ends in .py.")
    module = importlib.util.module_from_spec(specification)
    sys.modules[module_name] = module
    folder = str(path.resolve().parent)
    sys.path.insert(0, folder)
    before = ProcessState(of_import=True)
    try:
        with mock.patch.object(sys, "argv", [str(path)]):
            specification.loader.exec_module(module)
    except FuselabError:
        sys.modules.pop(module_name, None)
        raise
    except BaseException as error:
        sys.modules.pop(module_name, None)
        if isinstance(error, KeyboardInterrupt):
            raise
        raise TargetError(_what_raised(path, error)) from error
    finally:
        if folder in sys.path:
            sys.path.remove(folder)
    _changed[module_name] = before.changed()
    before.restore()
    return module


def changed_by_import(op: FusedOp) -> list[str]:
    """Return what the import of the file that declares ``op`` changed in the state of the process.

    It was given back after the import. Nothing is known of an operator that no verb imported.
    """
    return [
        name
        for module, changed in list(_changed.items())
        if changed and any(value is op for value in list(vars(sys.modules[module]).values()))
        for name in changed
    ]


def changed_by_import_of(module: ModuleType) -> list[str]:
    """Return what the import of a file changed in the state of the process, as
    ``changed_by_import`` does."""
    return list(_changed.get(module.__name__, ()))


def _import_folder(folder: Path) -> ModuleType:
    """Import a kernel package by path under a unique package name."""
    refuse_blanks(folder)
    fresh = sorted(file.name for file in folder.glob("*.new"))
    if fresh:
        raise TargetError(
            f"{folder} holds edited files and newly ejected ones ({', '.join(fresh)}); keep one of "
            "each, without .new in its name."
        )
    initial, contract = folder / "__init__.py", folder / "op.py"
    if not initial.is_file() and not contract.is_file():
        raise TargetError(
            f"{folder}: no op.py and no __init__.py; a kernel package has one of them."
        )
    package_name = _package(folder)
    if contract.is_file():
        return _import_file(contract, f"{package_name}.op")
    if (folder / COMPOSED).is_file():
        for name, module in list(sys.modules.items()):
            # An operator that was loaded alone is in a package made by `_package`, without the
            # names of its `__init__.py`, which the composition imports.
            if name.startswith(f"{package_name}.") and module.__spec__ is None:
                del sys.modules[name]
        return _import_file(folder / COMPOSED, f"{package_name}.{Path(COMPOSED).stem}")
    return _import_file(initial, f"{package_name}.__init__")


def _package(folder: Path) -> str:
    """Return the name under which a folder's files are imported, after making the package. An
    operator of a composition belongs to the composition's package, whose files it may import."""
    parent = folder.resolve().parent
    is_part = (parent / COMPOSED).is_file()
    name = f"{_package(parent)}.{folder.resolve().name}" if is_part else _module_name(folder)
    if name not in sys.modules:
        package = ModuleType(name)
        package.__path__ = [str(folder.resolve())]
        package.__package__ = name
        sys.modules[name] = package
    return name


def _what_raised(path: Path, error: BaseException) -> str:
    if isinstance(error, SyntaxError):
        where = f"{error.filename}:{error.lineno}" if error.lineno else str(path)
        return f"{where}: SyntaxError: {error.msg}."
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if Path(frame.filename).resolve() == path.resolve()]
    line = f":{own[-1].lineno}" if own else ""
    said = str(error).strip().splitlines()
    return f"{path}{line}: {type(error).__name__}{': ' + said[0] if said else ''}."


def _ops_in(module: ModuleType) -> dict[str, FusedOp]:
    """Return the FusedOps at module level by name, each once, without those imported from the
    library."""
    found: dict[str, FusedOp] = {}
    for name, value in vars(module).items():
        if not isinstance(value, FusedOp) or any(value is known for known in found.values()):
            continue
        foreign = value.namespace == "fuselab" and not module.__name__.startswith("fuselab.ops.")
        if not foreign:
            found[name] = value
    return found


def _is_kernel(value: object) -> bool:
    """Return whether a value is a Triton kernel: from Triton alone, which need not be there."""
    home = type(value).__module__
    return home.startswith("triton.runtime.") and hasattr(value, "run")


def _pick(module: ModuleType, path: Path, name: str) -> FusedOp:
    found = _ops_in(module)
    if name:
        named = getattr(module, name, None)
        if not isinstance(named, FusedOp):
            raise TargetError(
                f"{path}: no FusedOp is called '{name}'; it has {', '.join(found) or 'none'}."
            )
        return named
    public = {name: op for name, op in found.items() if not name.startswith("_")}
    chosen = found if len(found) == 1 else public
    if len(chosen) == 1:
        return next(iter(chosen.values()))
    if not chosen:
        kernel = next((name for name, one in vars(module).items() if _is_kernel(one)), None)
        remedy = "make one, for example OP = fuselab.FusedOp(...)."
        if kernel is not None:
            remedy = (
                f"`fuselab new NAME --from {path}:{kernel}` makes one of its kernel, and `fuselab "
                f"tune {path}:{kernel}` times the kernel as it is."
            )
        raise TargetError(f"{path}: no FusedOp at module level; {remedy}")
    raise TargetError(
        f"{path}: several FusedOps ({', '.join(chosen)}); pick one as {path}:{next(iter(chosen))}."
    )
