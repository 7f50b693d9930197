"""The arguments and options that several verbs share, and the command that guards their files."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click
import typer
from click.core import ParameterSource

from fuselab.errors import OutputError, UnknownNameError
from fuselab.report import files, standard_output

if TYPE_CHECKING:
    import torch


class Written(click.ParamType[Any]):
    """The path of a result; ``check`` refuses, before the work, one that cannot be written."""

    name = "path"

    def __init__(self, check: Callable[[str], None] = lambda path: None) -> None:
        self.check = check

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if standard_output.is_meant(value):
            name = param.opts[-1] if param is not None else "a result"
            raise OutputError(f"{name} -: give a name; of results only --json goes to stdout.")
        self.check(value)
        return value


class WrittenJson(Written):
    """The path of ``--json``; ``-`` is standard output."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if standard_output.is_meant(value):
            return value
        named = super().convert(value, param, ctx)
        # A path drops the folder of "./-", and that is a file.
        is_odd = os.path.normpath(named) == standard_output.NAME
        return os.path.abspath(named) if is_odd else named


def option(help: str, metavar: str | None = None, *names: str, **settings: Any) -> Any:
    """Return an option of a verb; without ``names`` it is called as its parameter is."""
    return typer.Option(*names, help=help, metavar=metavar, **settings)


def flag(name: str, help: str) -> Any:
    """Return an option without a value, and without an opposite."""
    return typer.Option(name, help=help)


def output_option(help: str, metavar: str, kind: Written | None = None) -> Any:
    """Return ``--output``; without ``kind`` the verb itself checks where it goes."""
    return option(help, metavar, "--output", "-o", click_type=kind or Written())


FILE = Written(files.check_destination)
FOLDER = Written(files.check_folder)

Json = Annotated[
    Path | None,
    option(
        "Write the result as JSON too; - is stdout, and the text then goes to stderr.",
        "FILE",
        "--json",
        click_type=WrittenJson(files.check_destination),
    ),
]
Device = Annotated[str, option("auto, cpu, cuda or cuda:N.")]
Target = Annotated[
    str,
    typer.Argument(
        metavar="TARGET", help="file.py, file.py:name, package.module:name or a built-in model."
    ),
]
TargetData = Annotated[str | None, option("What the file's get_inputs(data=...) reads.", "PATH")]
Operator = Annotated[
    str, typer.Argument(metavar="OP|FILE|DIR", help="An operator, or a file or folder with one.")
]
Checkpoint = Annotated[
    Path, typer.Argument(metavar="CHECKPOINT", help="A file, or a folder of --checkpoint.")
]


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype named ``name``, such as ``float32``. Raises UnknownNameError."""
    import torch

    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        known = ["float32", "float16", "bfloat16", "float64", "int64", "int32"]
        raise UnknownNameError("dtype", name, known)
    return dtype


def run_with_pinned_allocation(context: click.Context, device: torch.device) -> None:
    """Repeat a call that times on the CPU in a fresh process, unless this is that process.

    Raises Exit with the status of that process.
    """
    from fuselab.measure.fresh import allocation_is_pinned, run_pinned

    if device.type == "cpu" and not allocation_is_pinned():
        with standard_output.given_back():
            status = run_pinned("fuselab", call_of(context))
        raise typer.Exit(status)


class Verb(typer.core.TyperCommand):
    """A command that refuses to write a result over a file which the call reads."""

    def invoke(self, ctx: click.Context) -> Any:
        written: list[tuple[str, str]] = []
        read: list[str] = [*ctx.args]
        for parameter in self.params:
            name = parameter.name or ""
            given = ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE
            words = _words(ctx.params[name]) if given else []
            if words == [standard_output.NAME]:
                continue
            if isinstance(parameter.type, Written):
                written += [(parameter.opts[-1], word) for word in words]
            else:
                read += words
        for written_by, value in written:
            held = _meant(read) if os.path.isfile(value) else ()
            if any(os.path.samefile(value, each) for each in held):
                raise OutputError(
                    f"{written_by} {value} would take the place of what this call reads; give "
                    "another name."
                )
        if not standard_output.is_meant(ctx.params.get("json")):
            return super().invoke(ctx)
        with standard_output.kept_for_json():
            return super().invoke(ctx)


class Verbs(typer.Typer):
    """A group of verbs; without a verb it prints its help."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(no_args_is_help=True, rich_markup_mode=None, **settings)

    def command(self, name: str | None = None, **settings: Any) -> Callable[[Any], Any]:
        return super().command(name, cls=Verb, **settings)


def call_of(context: click.Context, without: Collection[str] = ()) -> list[str]:
    """Return the call as words behind ``fuselab``, to repeat it or to record it.

    The options named in ``without`` are left out.
    """
    call = context.command_path.split()[1:]
    for parameter in context.command.params:
        value = context.params[parameter.name or ""]
        option = parameter.opts[:1] if parameter.param_type_name == "option" else []
        if parameter.name in without:
            continue
        if value is True:
            call += option
        for word in _words(value):
            call += [*option, word]
    return call


def _words(value: Any) -> list[str]:
    """Return the words of an option's value; a flag has none."""
    if value is None or isinstance(value, bool):
        return []
    return [str(each) for each in value] if isinstance(value, list | tuple) else [str(value)]


def _meant(words: Collection[str]) -> Iterator[str]:
    """Yield the files that words may mean: by name, as a glob, or as ``file.py:name``."""
    for word in words:
        for name in (word, word.rpartition(":")[0], *glob.glob(word)):
            if os.path.isfile(name):
                yield name
