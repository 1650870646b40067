"""A model inside an application: a small HTTP service with a pool of sessions.

POST /complete with {"prompt": "...", "max_tokens": 32} streams plain text. When every session is in use the service
answers 503 with Retry-After instead of queueing without limit. A client that goes away ends its generation, and
stopping the service ends the answers in progress between two tokens.

python examples/embed_in_app.py              # starts, asks itself two questions, stops
python examples/embed_in_app.py --port 8000  # serves on localhost until Ctrl-C
"""

from __future__ import annotations

import argparse
import contextlib
import json
import queue
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.request import urlopen

import strata

BUNDLED = Path(__file__).parent / "models" / "tiny-flash-next" / "tiny-flash-next-IQ3_XXS-00001-of-00002.gguf"


class Writer:
    """The part of an application that owns the model. Safe to use from many threads."""

    def __init__(self, path: Path, sessions: int = 2, context: int = 2048):
        self.model = strata.load(path, sessions=sessions, context=context)
        self._free: queue.SimpleQueue[strata.Session] = queue.SimpleQueue()
        for _ in range(sessions):
            self._free.put(self.model.session())

    @contextlib.contextmanager
    def session(self) -> Iterator[strata.Session]:
        """Borrow a session; raises strata.Busy when all are in use."""
        try:
            session = self._free.get_nowait()
        except queue.Empty:
            raise strata.Busy("every session is answering", advice="Try again in a second.") from None
        try:
            yield session
        finally:
            self._free.put(session)

    def close(self) -> None:
        """Running streams raise strata.Closed at their next token."""
        self.model.close()


class Handler(BaseHTTPRequestHandler):
    writer: Writer

    def do_POST(self) -> None:
        try:
            asked = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))))
            prompt, max_tokens = asked["prompt"], asked.get("max_tokens", 32)
            good = isinstance(prompt, str)
        except (ValueError, KeyError, TypeError, AttributeError):
            good = False
        if not good:
            self._refuse(400, 'the body must be {"prompt": "...", "max_tokens": 32}')
            return
        try:
            with self.writer.session() as session, session.stream(prompt, max_tokens=max_tokens) as stream:
                chunk = next(stream)  # before the headers, so that the status can still tell of an error
                self._begin(200)
                self.wfile.write(chunk.text.encode())
                for chunk in stream:
                    self.wfile.write(chunk.text.encode())
        except strata.Busy as error:
            self._refuse(503, str(error), ("Retry-After", "1"))
        except (strata.BadArgument, strata.ContextFull) as error:
            self._refuse(400, str(error))
        except (ConnectionError, strata.Closed):
            self.close_connection = True  # the client or the service is going; the with block closed the stream

    def _begin(self, status: int, *headers: tuple[str, str]) -> None:
        self.send_response(status)
        for name, value in (("Content-Type", "text/plain; charset=utf-8"), *headers):
            self.send_header(name, value)
        self.end_headers()

    def _refuse(self, status: int, reason: str, *headers: tuple[str, str]) -> None:
        self._begin(status, *headers)
        self.wfile.write(f"{reason}\n".encode())

    def log_message(self, *_: object) -> None:
        """Quiet: the application logs what it wants."""


@contextlib.contextmanager
def service(path: Path, port: int = 0, sessions: int = 2, context: int = 2048) -> Iterator[tuple[Writer, str]]:
    """The running service and its address. Leaving the block stops it and closes the model."""
    writer = Writer(path, sessions, context)
    try:
        handler = type("BoundHandler", (Handler,), {"writer": writer})
        with ThreadingHTTPServer(("127.0.0.1", port), handler) as server:
            thread = threading.Thread(target=server.serve_forever, name="http")
            thread.start()
            try:
                yield writer, f"http://127.0.0.1:{server.server_port}"
            finally:
                server.shutdown()
                thread.join()
    finally:
        writer.close()


def ask(address: str, prompt: str, max_tokens: int = 32) -> str:
    """What a client does."""
    body = json.dumps({"prompt": prompt, "max_tokens": max_tokens}).encode()
    with urlopen(f"{address}/complete", body) as answer:
        return answer.read().decode()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="A model inside an HTTP service.")
    parser.add_argument("--model", type=Path, default=BUNDLED, help="a GGUF file, any shard of it")
    parser.add_argument("--port", type=int, help="serve here until Ctrl-C")
    options = parser.parse_args(arguments)
    with service(options.model, options.port or 0) as (_, address):
        if options.port:
            print(f"serving on {address}, Ctrl-C ends it")
            with contextlib.suppress(KeyboardInterrupt):
                threading.Event().wait()
            return
        answers: dict[str, str] = {}
        prompts = ("def area(width, height):", "SELECT statements are used to")
        clients = [threading.Thread(target=lambda p=p: answers.update({p: ask(address, p)})) for p in prompts]
        for client in clients:
            client.start()
        for client in clients:
            client.join()
        for prompt in prompts:
            print(f"{prompt}{answers[prompt]}\n{'-' * 40}")


if __name__ == "__main__":
    main()
