"""The entry point: collects the verbs; a foreseen error becomes one sentence and status 2."""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys
from collections.abc import Sequence

import click
import typer

import fuselab.cli
from fuselab.errors import FuselabError
from fuselab.report import files


class _Verbs(typer.core.TyperGroup):
    """Ctrl-C is an Abort, as click has it; typer would end with 130 and not a word."""

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            raise click.Abort from error


def build_app() -> typer.Typer:
    """The command line with every verb found in ``fuselab.cli``."""
    app = typer.Typer(
        name="fuselab",
        cls=_Verbs,
        help="Find slow PyTorch operators, see what the compiler does, own, prove and use kernels.",
        add_completion=False,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    for module in sorted(pkgutil.iter_modules(fuselab.cli.__path__), key=lambda found: found.name):
        if module.name != "main":
            importlib.import_module(f"fuselab.cli.{module.name}").add(app)
    return app


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command line; returns its status: 0 done, 1 the answer is no, 2 wrong input."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        command = typer.main.get_command(build_app())
        _check_destinations(given)
        status = command.main(
            args=given,
            prog_name="fuselab",
            standalone_mode=False,
        )
    except click.exceptions.NoArgsIsHelpError as help_text:
        print(help_text.format_message())
        return 2
    except click.ClickException as error:
        return _refuse(_sentence(error))
    except FuselabError as error:
        return _refuse(str(error))
    except (KeyboardInterrupt, click.Abort):  # the first while the verbs are collected
        print("fuselab: interrupted; nothing half-written is left.", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader (head, less) has gone; point stdout elsewhere so that exit does not complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return status if isinstance(status, int) else 0


def _check_destinations(given: Sequence[str]) -> None:
    """Refuse a result that cannot be written before the work that fills it, not after."""
    checks = dict.fromkeys(("--json", "--plot", "--trace", "--graph"), files.check_destination)
    checks |= dict.fromkeys(("--save", "--tensorboard"), files.check_folder)
    for place, word in enumerate(given):
        if word == "--":
            return
        option, equals, value = word.partition("=")
        if option in checks:
            path = value if equals else given[place + 1] if place + 1 < len(given) else ""
            if path:
                checks[option](path)


def _sentence(error: click.ClickException) -> str:
    """What click has against the call, and where the right one stands."""
    # Typer says "Did you mean" in the message, click would add it once more.
    said = error.message if "Did you mean" in error.message else error.format_message()
    context = error.ctx if isinstance(error, click.UsageError) else None
    if context is None or "Did you mean" in said:
        return said
    return f"{said} '{context.command_path} --help' shows the call."


def _refuse(sentence: str) -> int:
    print(f"fuselab: {sentence}", file=sys.stderr)
    return 2


def main() -> None:
    """The console script ``fuselab``."""
    sys.exit(run())
