"""Print text while it is made. Ctrl-C ends the answer between two tokens.

python examples/stream.py "import os" --stop "\\n\\n"     (\\n and \\t stand for a line end and a tab)
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import strata

BUNDLED = Path(__file__).parent / "models" / "tiny-flash-next" / "tiny-flash-next-IQ3_XXS-00001-of-00002.gguf"


def show_progress(read: int, total: int) -> None:
    """Called while the prompt is read, piece by piece."""
    print(f"read {read} of {total} prompt tokens", file=sys.stderr)


def unescaped(text: str) -> str:
    """Line ends and tabs as they are typed in a shell."""
    return text.replace(r"\n", "\n").replace(r"\t", "\t")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Stream an answer.")
    parser.add_argument("prompt", nargs="?", default="def read_lines(path):")
    parser.add_argument("--model", type=Path, default=BUNDLED, help="a GGUF file, any shard of it")
    parser.add_argument("--max-tokens", type=int, default=64)
    stop_help = r"end before this text (\n and \t are a line end and a tab); may be given several times"
    parser.add_argument("--stop", action="append", type=unescaped, help=stop_help)
    options = parser.parse_args(arguments)

    with strata.load(options.model, context=4096) as model:
        asked = {"max_tokens": options.max_tokens, "stop": options.stop, "on_progress": show_progress}
        with model.stream(options.prompt, **asked) as stream:
            try:
                for i, chunk in enumerate(stream):
                    print(chunk.text if i else options.prompt + chunk.text, end="", flush=True)
            except KeyboardInterrupt:
                pass  # leaving the with block ends the generation
        result = stream.result

    first_ms = result.timings.first_token_ms
    print(f"\n\n{len(result.tokens)} tokens, the first after {first_ms:.0f} ms, ended by {result.finish_reason}")


if __name__ == "__main__":
    main()
