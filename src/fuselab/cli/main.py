"""The entry point: it collects the verbs; a foreseen error becomes one sentence and status 2."""

from __future__ import annotations

import contextlib
import importlib
import os
import pkgutil
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import TextIO

import click
import typer

import fuselab.cli
from fuselab.cli.options import Verbs
from fuselab.errors import ArgumentError, FuselabError

# Functions that a user looks for among the commands.
_ONLY_IN_PYTHON = {
    "fuse": "'fuse' is no command, for it changes a model that runs: call "
    "fuselab.fuse(model, example_inputs) in Python. 'fuselab study' shows what it would do.",
}


class _Verbs(typer.core.TyperGroup):
    """A command group that turns Ctrl-C into click's Abort; typer would exit with 130 silently."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in _ONLY_IN_PYTHON:
            raise ArgumentError(_ONLY_IN_PYTHON[cmd_name])
        return super().get_command(ctx, cmd_name)

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            raise click.Abort from error


def build_app() -> typer.Typer:
    """Build the command line with every verb found in ``fuselab.cli``."""
    app = Verbs(
        name="fuselab",
        cls=_Verbs,
        help="Find slow PyTorch operators, see what the compiler does, own, prove and use kernels.",
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    for module in sorted(pkgutil.iter_modules(fuselab.cli.__path__), key=lambda found: found.name):
        if module.name not in ("main", "options"):
            importlib.import_module(f"fuselab.cli.{module.name}").add(app)
    return app


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command line; returns its status: 0 done, 1 the answer is no, 2 wrong input."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        command = typer.main.get_command(build_app())
        with _warnings_as_sentences():
            status = command.main(args=given, prog_name="fuselab", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as help_text:
        print(help_text.format_message())
        return 2
    except click.ClickException as error:
        return _refuse(_sentence(error))
    except FuselabError as error:
        return _refuse(str(error))
    # KeyboardInterrupt comes while the verbs are being collected
    except (KeyboardInterrupt, click.Abort):
        print("fuselab: interrupted; nothing half-written is left.", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader (head, less) has gone; point stdout elsewhere so that exit does not complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return status if isinstance(status, int) else 0


@contextlib.contextmanager
def _warnings_as_sentences() -> Iterator[None]:
    """Print fuselab's own warnings without the line of code that they come from."""
    told = warnings.showwarning

    def tell(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if category.__module__.startswith("fuselab."):
            print(f"fuselab: warning: {message}", file=sys.stderr)
        else:
            told(message, category, filename, lineno, file, line)

    warnings.showwarning = tell
    try:
        yield
    finally:
        warnings.showwarning = told


def _sentence(error: click.ClickException) -> str:
    """Return click's complaint about the call, and where the right call is shown."""
    # Typer's message says "Did you mean" already; click would add it once more.
    said = error.message if "Did you mean" in error.message else error.format_message()
    context = error.ctx if isinstance(error, click.UsageError) else None
    if context is None or "Did you mean" in said:
        return said
    return f"{said} '{context.command_path} --help' shows the call."


def _refuse(sentence: str) -> int:
    print(f"fuselab: {sentence}", file=sys.stderr)
    return 2


def main() -> None:
    """Run the console script ``fuselab``."""
    sys.exit(run())
