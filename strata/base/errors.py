"""Errors of strata: every one says what was found, what is needed and what to do."""

from __future__ import annotations


def _text(value: object) -> str:
    try:
        return str(value)
    except Exception:  # a value may not know how to say what it is, or be a number too long to be written
        return f"a value of type {type(value).__name__}"


class StrataError(Exception):
    """Base of all errors raised on purpose.

    message  what happened, one sentence
    found    what was there (any object, shown as text), or None
    needed   what must be there, or None
    advice   the next step for the user, or None
    """

    def __init__(self, message: str, *, found: object = None, needed: object = None, advice: str | None = None):
        self.message, self.found, self.needed, self.advice = message, found, needed, advice
        super().__init__(message)

    def __str__(self) -> str:
        parts = [self.message]
        if self.found is not None:
            parts.append(f"found {_text(self.found)}")
        if self.needed is not None:
            parts.append(f"needed {_text(self.needed)}")
        text = "; ".join(parts)
        return f"{text}. {self.advice}" if self.advice else text


class FileError(StrataError):
    """A file is missing, truncated, damaged or of another kind."""


class ModelError(StrataError):
    """A well-formed file whose model strata cannot run: a tensor, type or key differs from the contract."""


class DoesNotFit(StrataError):
    """An allocation is larger than what the machine or the plan has."""


class NoDevice(StrataError):
    """A GPU was asked for that is not there, or that this process cannot use."""


class ContextFull(StrataError):
    """Prompt, answer and the reserve of 8 cells exceed the context."""


class BadArgument(StrataError, ValueError):
    """An argument is unknown, out of range or of the wrong type."""


class Busy(StrataError):
    """Another call is using the model or session."""


class Closed(StrataError):
    """The model or session was closed."""


class NotFinite(StrataError):
    """A window met NaN, Inf or an overflow; it was not committed and the session is usable."""


class TemplateError(StrataError):
    """The chat template refused the messages."""


class SelfTestFailed(StrataError):
    """A compiled kernel does not reproduce the canonical arithmetic on this machine."""


def need(condition: bool, message: str, **details: object) -> None:
    """Raise BadArgument with `message` and details (found=, needed=, advice=) unless `condition` holds."""
    if not condition:
        raise BadArgument(message, **details)


class about:
    """Errors about a file that leave this block name it, and have `advice` if they had none of their own. A class,
    since what contextlib imports would come before a command can hear Ctrl-C."""

    def __init__(self, file_name: str, advice: str | None = None):
        self._name, self._advice = file_name, advice

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, FileError | ModelError):
            if self._name not in error.message:
                error.message = f"{self._name}: {error.message}"
                error.args = (error.message,)
            error.advice = error.advice or self._advice
