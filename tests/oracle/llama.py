"""llama.cpp through the package xllamacpp: greedy tokens, log-probabilities and tokenisation of the same GGUF file.

The package runs llama.cpp's server inside this process. It listens on a unix socket in a private folder, so no network
port is opened. llama.cpp quantises activations in its own way: its logits are near the reference, not equal to it.
"""

from __future__ import annotations

import http.client
import json
import socket
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from strata.llama_server import LlamaServer

EVERY_TOKEN = 1 << 30
"""More candidates than any vocabulary has: the server then reports all of them."""


@dataclass(frozen=True)
class Generation:
    """n greedy tokens.

    tokens    their ids, an end token included
    logprobs  (n,) float64, log-softmax of the unmodified logits at each of them
    top       per token {id: log-probability} of the most likely ones
    text      the decoded text, end token left out
    """

    tokens: list[int]
    logprobs: np.ndarray
    top: list[dict[int, float]]
    text: str


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str):
        super().__init__("localhost", timeout=60)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class LlamaOracle(LlamaServer):
    """A GGUF model (first shard) in llama.cpp on the CPU. Use as a context manager, or call close()."""

    def __init__(self, path: str | Path, context: int = 1024, threads: int = 2):
        super().__init__(path, context, threads)

    def _complete(self, prompt: str | list[int], n: int, n_top: int) -> tuple[list[dict], str]:
        request = {"n_predict": n, "temperature": 0, "n_probs": max(n_top, 1), "cache_prompt": False}
        request["prompt"] = prompt if isinstance(prompt, str) else [int(t) for t in prompt]
        choice = self.complete(request)["choices"][0]
        return choice["logprobs"]["content"], choice["text"]

    def greedy(self, prompt: str | list[int], n: int, n_top: int = 1) -> Generation:
        """Up to n most likely tokens after the prompt (text or ids); an end token is the last one."""
        content, text = self._complete(prompt, n, n_top)
        return Generation(
            [entry["id"] for entry in content],
            np.array([entry["logprob"] for entry in content], np.float64),
            [{e["id"]: e["logprob"] for e in entry["top_logprobs"]} for entry in content],
            text,
        )

    def logprobs(self, prompt: str | list[int]) -> np.ndarray:
        """Log-softmax (V,) float64 of the logits after the last token of the prompt."""
        content, _ = self._complete(prompt, 1, EVERY_TOKEN)
        entries = content[0]["top_logprobs"]
        values = np.full(len(entries), np.nan)
        values[[e["id"] for e in entries]] = [e["logprob"] for e in entries]
        return values

    def _post(self, route: str, body: dict) -> dict:
        connection = _UnixConnection(str(self.socket))
        try:
            connection.request("POST", route, json.dumps(body), {"Content-Type": "application/json"})
            reply = json.loads(connection.getresponse().read())
        finally:
            connection.close()
        if "error" in reply:
            raise RuntimeError(f"llama.cpp: {reply['error']['message']}")
        return reply

    def tokenize(self, text: str, special: bool = True) -> list[int]:
        """Token ids of a text; with `special`, control tokens in it are recognised."""
        return self._post("/tokenize", {"content": text, "add_special": False, "parse_special": special})["tokens"]

    def detokenize(self, tokens: list[int]) -> str:
        return self._post("/detokenize", {"tokens": [int(t) for t in tokens]})["content"]

    def apply_template(self, messages: list[dict], **options: object) -> str:
        """The prompt that the file's chat template makes of the messages, opened for the assistant."""
        return self._post("/apply-template", {"messages": messages, **options})["prompt"]
