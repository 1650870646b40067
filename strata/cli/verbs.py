"""The verbs of the command `strata`, and how their errors end."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import sys
from collections.abc import Iterator
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from strata import __version__
from strata.base.errors import BadArgument, StrataError
from strata.cli import FAILED, INTERRUPTED, PIPE_CLOSED, USAGE
from strata.cli.output import quiet_interrupt

VERBS = {
    "run": "Continue a prompt; the answer streams to stdout.",
    "chat": "Talk with a model through its own chat template.",
    "plan": "Price a load before it happens: memory, fit, speed and what bounds it.",
    "inspect": "Show geometry, types and bytes of a GGUF file.",
    "score": "Measure how well a model predicts a text: nats per token and perplexity.",
    "bench": "Measure speed on this machine.",
    "profile": "Rank a model's experts by what texts ask for, and simulate a cache of them.",
    "calibrate": "Find faster settings for a model on this machine, and remember them.",
    "convert-mtp": "Convert a draft layer from safetensors to the files it is loaded from.",
    "doctor": "Say which parts of this machine will be slow.",
}
"""Verb and its line in the overview. Module strata.cli.<verb>, with _ for -, has the function `command` or the group
`app`."""

_SETTINGS = {"help_option_names": ["-h", "--help"]}


def _verb(name: str) -> Any:
    """The click command of a verb, from its module."""
    with quiet_interrupt():
        module = importlib.import_module(f"strata.cli.{name.replace('-', '_')}")
    if hasattr(module, "app"):
        return typer.main.get_command(module.app)
    single = typer.Typer(rich_markup_mode=None, add_completion=False)
    single.command(name, context_settings=_SETTINGS)(module.command)
    return typer.main.get_command(single)


class _Verbs(TyperGroup):
    """Knows every verb's name and help line, and imports a verb's module when it is called."""

    def __init__(self, **settings: Any):
        super().__init__(**settings)
        for name, line in VERBS.items():
            self.add_command(TyperCommand(name, help=line, short_help=line))

    def make_context(self, *given: Any, **settings: Any) -> Any:
        try:
            return super().make_context(*given, **settings)
        except BrokenPipeError:  # whoever asked for help has left
            raise typer.Exit(PIPE_CLOSED) from None

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, known, rest = super().resolve_command(ctx, args)
        return name, None if known is None else _verb(known.name), rest

    def invoke(self, ctx: Any) -> Any:
        verb = _named([*ctx._protected_args, *ctx.args])
        try:
            with _reports():
                return super().invoke(ctx)
        except StrataError as error:
            _say(verb, str(error))
            raise typer.Exit(USAGE if isinstance(error, BadArgument) else FAILED) from None
        except MemoryError as error:
            _say(verb, f"out of memory: {error}" if str(error) else "out of memory")
            raise typer.Exit(FAILED) from None
        except BrokenPipeError:
            raise typer.Exit(PIPE_CLOSED) from None
        except OSError as error:
            _say(verb, _reason(error))
            raise typer.Exit(FAILED) from None
        except KeyboardInterrupt:
            if sys.stderr.isatty():
                typer.echo(err=True)
            raise typer.Exit(INTERRUPTED) from None


def _named(words: list[str]) -> str:
    """The verb that words of a command line call, as "bench decode"."""
    return " ".join(words[:2] if words[:1] == ["bench"] else words[:1])


def _say(verb: str, text: str) -> None:
    with contextlib.suppress(OSError):  # nobody can be told then
        typer.echo(f"strata {verb}: {text}", err=True)


def _reason(error: OSError) -> str:
    from strata.base.numbers import shown  # here, because numpy takes a moment, which help does not need

    place = f": {shown(str(error.filename))}" if error.filename is not None else ""
    return f"{error.strerror or error}{place}"


app = typer.Typer(
    cls=_Verbs, context_settings=_SETTINGS, rich_markup_mode=None, pretty_exceptions_enable=False, no_args_is_help=True
)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"strata {__version__}")
        raise typer.Exit


class _Messages(logging.Handler):
    """What the library reports, on whatever stderr is at the time."""

    def emit(self, record: logging.LogRecord) -> None:
        typer.echo(f"strata: {self.format(record)}", err=True)


@contextlib.contextmanager
def _reports() -> Iterator[None]:
    """Tells what the library reports: warnings, if no more is asked for; also while a verb's module is imported."""
    log = logging.getLogger("strata")
    handler, level = _Messages(), log.level
    log.addHandler(handler)
    log.setLevel(logging.WARNING)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


@app.callback()
def _every_verb(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Print the version.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Print what the library reports.")] = False,
) -> None:
    """Run Mixture-of-Experts language models larger than the GPU, from their GGUF files."""
    if verbose:
        logging.getLogger("strata").setLevel(logging.INFO)


def run() -> int:
    """Do what the command line says, and return the exit status."""
    if sys.stdout is None:
        if sys.stderr is not None:
            print("strata: the standard output is closed", file=sys.stderr)
        return FAILED
    # Closed ones are missing; what is opened next would take their number.
    sys.stdin = sys.stdin or open(os.devnull, encoding="utf-8")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        # An answer may hold any character; a terminal of another encoding shows a question mark for it.
        stream.reconfigure(errors="replace")
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        status = INTERRUPTED
    except BrokenPipeError:
        status = PIPE_CLOSED
    except OSError as error:
        status = FAILED
        with contextlib.suppress(OSError):
            print(f"strata: {_reason(error)}", file=sys.stderr)
    except SystemExit as end:
        status = end.code
    _leave_streams()
    return status


def _leave_streams() -> None:
    """Let streams that cannot be written go without a word: Python writes what they still hold at its end."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
