"""strata chat: a conversation, one line a message."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from strata.base.errors import StrataError
from strata.cli import INTERRUPTED, flags
from strata.cli.output import Bar, first_interrupt, is_terminal, note, write
from strata.cli.run import summary
from strata.cli.texts import STDIN, check_typed, take_any_bytes, typed_lines

if TYPE_CHECKING:
    from strata.model import Model
    from strata.records import ChatResult

HELP = "/exit, /quit or Ctrl-D leaves, /reset forgets the conversation, /think switches thinking, /help says this."
LEAVE = ("/exit", "/quit")


@flags.takes(answer=flags.ANSWER, load=flags.LOAD_AND_DRAFT)
def command(
    ctx: typer.Context,
    model: flags.Model = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    think: Annotated[bool | None, typer.Option("--think/--no-think", help="Default: the template's own.")] = None,
    *,
    answer: flags.Options,
    load: flags.Options,
) -> None:
    """Talk with a model. Each line is a message; /exit, /reset, /think and /help are commands.

    On a terminal, reasoning is shown dim; in a pipe only answers are written, one after another. Ctrl-C ends an answer,
    and between answers the program (exit status 130).
    """
    options = flags.answer_options(**answer)
    flags.refuse_idle_answers(ctx, answer, load["draft"])
    with flags.loaded(model, **load) as loaded:
        Conversation(loaded, system, think, options).talk()


class Conversation:
    """Messages so far and whether the model shall think (None: as its template does)."""

    def __init__(self, model: Model, system: str | None, thinking: bool | None, options: dict[str, Any]):
        self.model, self.system, self.thinking, self.options = model, system, thinking, options
        self.watched = is_terminal(sys.stdin) and is_terminal(sys.stdout)
        self.reset()

    def reset(self) -> None:
        self.messages: list[dict[str, Any]] = [{"role": "system", "content": self.system}] if self.system else []

    def talk(self) -> None:
        """Answer lines of stdin until it ends or /exit. In a pipe the first error ends the talk: lines behind it expect
        an answer."""
        note(HELP)
        for number, line in enumerate(_lines(self.watched), 1):
            if line.startswith("/"):
                if line.strip() in LEAVE:
                    return
                self._obey(line.strip())
            elif line.strip():
                try:
                    check_typed(line, "the line" if self.watched else f"line {number} of {STDIN}")
                    interrupted = self._answer(line)
                except StrataError as error:
                    if not self.watched:
                        raise
                    typer.echo(f"strata chat: {error}", err=True)
                    continue
                if interrupted and not self.watched:
                    raise typer.Exit(INTERRUPTED)

    def _obey(self, line: str) -> None:
        if line == "/reset":
            self.reset()
            self._tell("the conversation is forgotten")
        elif line == "/think":
            # Templates of this form think unless they are told not to.
            self.thinking = self.thinking is False
            self._tell(f"thinking is {'on' if self.thinking else 'off'}")
        else:
            self._tell(HELP if line == "/help" else f"no command {line}. {HELP}")

    def _tell(self, text: str) -> None:
        typer.echo(text, err=True)

    def _answer(self, line: str) -> bool:
        """Stream the answer to a message; both become history, also where Ctrl-C ended the answer (then True)."""
        from strata.runtime.generate import Cancelled

        messages = [*self.messages, {"role": "user", "content": line}]
        with Bar("reading the conversation", "tokens") as bar:
            stream = self.model.chat(
                messages, thinking=self.thinking, stream=True, on_progress=self._long(bar), **self.options
            )
            with first_interrupt(stream.close) as interrupt, stream, contextlib.suppress(Cancelled):
                kind = ""
                for chunk in stream:
                    if chunk.text and (chunk.kind != "reasoning" or self.watched):
                        if kind == "reasoning" and chunk.kind != kind:
                            write("\n\n")
                        kind = chunk.kind
                        write(chunk.text, dimmed=kind == "reasoning")
        write("\n")
        result: ChatResult = stream.result
        self.messages = [*messages, result.message]
        if not result.text.strip() and result.reasoning and result.finish_reason == "length":
            self._tell("no answer: reasoning took all tokens; --max-tokens allows more, and /think switches it off")
        note(summary(result))
        return interrupt.hit

    def _long(self, bar: Bar) -> Any:
        """Progress for what takes more than a moment to read."""
        from strata.cli.run import BAR_TOKENS

        return lambda done, total: bar.update(done, total) if total >= BAR_TOKENS else None


def _lines(watched: bool) -> Iterator[str]:
    """Messages: typed with editing and history on a terminal, else the lines of stdin."""
    if not watched:
        yield from typed_lines()
        return
    take_any_bytes()
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # gives input() editing and history
    while True:
        try:
            yield input("> ")
        except EOFError:
            typer.echo()
            return
