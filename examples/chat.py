"""Talk to a model, one line a turn. An empty line or Ctrl-D ends the conversation.

Each turn sends the whole conversation. What the session still holds of it is not read again: see "reused".

python examples/chat.py --system "Answer in one sentence."
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import strata

BUNDLED = Path(__file__).parent / "models" / "tiny-flash-next" / "tiny-flash-next-IQ3_XXS-00001-of-00002.gguf"


def questions() -> Iterator[str]:
    """Lines from the terminal or a pipe."""
    while True:
        print("you> ", end="", flush=True)
        line = sys.stdin.readline().strip()
        if not line:
            return
        yield line


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Chat, one line a turn.")
    parser.add_argument("--model", type=Path, default=BUNDLED, help="a GGUF file, any shard of it")
    parser.add_argument("--system", help="what the model is told first")
    parser.add_argument("--thinking", action="store_true", help="let the model reason before it answers")
    parser.add_argument("--max-tokens", type=int, default=64)
    options = parser.parse_args(arguments)
    messages = [{"role": "system", "content": options.system}] if options.system else []

    with strata.load(options.model, context=4096) as model:
        for question in questions():
            messages.append({"role": "user", "content": question})
            stream = model.chat(messages, stream=True, thinking=options.thinking, max_tokens=options.max_tokens)
            with stream:
                for chunk in stream:
                    print(chunk.text, end="", flush=True)  # chunk.kind tells reasoning from content
            answer = stream.result
            messages.append(answer.message)
            usage = answer.usage
            print(f"\n[{usage.prompt_tokens} prompt tokens, {usage.reused_tokens} reused, {answer.finish_reason}]")


if __name__ == "__main__":
    main()
