"""Two conversations on one loaded model. They share the weights; each has its own memory.

python examples/two_sessions.py
"""

from __future__ import annotations

import argparse
from pathlib import Path

import strata

BUNDLED = Path(__file__).parent / "models" / "tiny-flash-next" / "tiny-flash-next-IQ3_XXS-00001-of-00002.gguf"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Run two sessions, token by token in turn.")
    parser.add_argument("--model", type=Path, default=BUNDLED, help="a GGUF file, any shard of it")
    parser.add_argument("--max-tokens", type=int, default=24)
    options = parser.parse_args(arguments)
    prompts = ("def add(a, b):", "# Working with files\n\nTo read a file,")

    # Sessions are allocated when the model is loaded, so the memory they take is known before the first prompt.
    with strata.load(options.model, context=1024, sessions=2) as model, model.session() as one, model.session() as two:
        streams = [
            session.stream(prompt, max_tokens=options.max_tokens)
            for session, prompt in zip((one, two), prompts, strict=True)
        ]
        running = list(streams)
        while running:
            running = [stream for stream in running if next(stream, None) is not None]
        for prompt, stream in zip(prompts, streams, strict=True):
            print(f"{prompt}{stream.result.text}\n{'-' * 40}")

        # A prompt that begins with what a session holds is read only from where the two differ.
        longer = prompts[0] + streams[0].result.text + "\n\ndef subtract(a, b):"
        result = one.generate(longer, max_tokens=options.max_tokens)
        print(f"{longer}{result.text}\n{'-' * 40}")
        print(f"{result.usage.prompt_tokens} prompt tokens, {result.usage.reused_tokens} of them still held")


if __name__ == "__main__":
    main()
