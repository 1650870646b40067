"""Continue a prompt and show what it cost.

python examples/generate.py "class Stack:" --max-tokens 80 --temperature 0.7
"""

from __future__ import annotations

import argparse
from pathlib import Path

import strata

BUNDLED = Path(__file__).parent / "models" / "tiny-flash-next" / "tiny-flash-next-IQ3_XXS-00001-of-00002.gguf"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Continue a prompt.")
    parser.add_argument("prompt", nargs="?", default="def fibonacci(n):")
    parser.add_argument("--model", type=Path, default=BUNDLED, help="a GGUF file, any shard of it")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--temperature", type=float, help="leave out for greedy decoding")
    parser.add_argument("--seed", type=int, help="repeats a sampled answer")
    options = parser.parse_args(arguments)

    with strata.load(options.model, context=4096) as model:
        result = model.generate(
            options.prompt, max_tokens=options.max_tokens, temperature=options.temperature, seed=options.seed
        )

    print(options.prompt + result.text)
    print(
        f"\n{result.usage.prompt_tokens} prompt tokens, {result.usage.output_tokens} new, "
        f"{result.timings.decode_tokens_per_s:.1f} tokens/s, ended by {result.finish_reason}, seed {result.seed}"
    )


if __name__ == "__main__":
    main()
