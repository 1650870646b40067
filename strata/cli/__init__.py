"""The command `strata`: one module a verb, imported only when its verb is called.

Exit status: 0 done; 1 refused or failed, with one message on stderr, as for a file or a GPU that is not there; 2 wrong
usage; 130 interrupted by Ctrl-C; 141 nobody reads the output any more.
Answers and reports go to stdout, everything else to stderr. Progress is shown on terminals; elsewhere a load that
compiles kernels says so in a line of stderr now and then.

Importing this imports next to nothing, so that Ctrl-C ends a command quietly from its first moment.
"""

from __future__ import annotations

FAILED, USAGE, INTERRUPTED, PIPE_CLOSED = 1, 2, 130, 141


def main() -> None:
    """Entry point of the console script."""
    import os
    import signal
    import sys

    def leave(number: int, frame: object) -> None:
        # An exception could get lost on its way out of half imported modules, or be said.
        if os.isatty(2):
            os.write(2, b"\n")
        os._exit(INTERRUPTED)

    heard = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if heard:  # else it is ignored, as in the background of a script
        signal.signal(signal.SIGINT, leave)
    from strata.cli.verbs import run

    try:
        if heard:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        status = run()
    except KeyboardInterrupt:
        status = INTERRUPTED
    sys.exit(status)


def __getattr__(name: str) -> object:
    """`app` and `VERBS`, imported on first use."""
    if name not in ("app", "VERBS"):
        raise AttributeError(f"module 'strata.cli' has no attribute {name!r}")
    from strata.cli import verbs

    return getattr(verbs, name)
