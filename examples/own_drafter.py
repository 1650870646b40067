"""Draft with a drafter of your own: here, from answers that were given before.

A drafter is any object with a method propose(tokens, k). What it proposes is verified by the model, so it can change
the speed of an answer and never its text. It should answer often: one that rarely has a proposal is rarely asked.

python examples/own_drafter.py "class Shape:"
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

import strata

BUNDLED = Path(__file__).parent / "models" / "tiny-flash-next" / "tiny-flash-next-IQ3_XXS-00001-of-00002.gguf"


class EarlierAnswers:
    """Proposes what followed the last `match` tokens in an earlier text."""

    def __init__(self, match: int = 3):
        self.match = match
        self.following: dict[tuple[int, ...], tuple[list[int], int]] = {}

    def add(self, tokens: list[int]) -> None:
        """Remember a text: prompt and answer."""
        for end in range(self.match, len(tokens)):
            self.following[tuple(tokens[end - self.match : end])] = (tokens, end)

    def propose(self, tokens: np.ndarray, k: int) -> list[int]:
        """At most k tokens that may follow `tokens`; none if nothing like it was seen."""
        text, end = self.following.get(tuple(tokens[-self.match :].tolist()), ([], 0))
        return text[end : end + k]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Draft from earlier answers.")
    parser.add_argument("prompt", nargs="?", default="class Shape:\n    def __init__(self, name, value):\n")
    parser.add_argument("--model", type=Path, default=BUNDLED, help="a GGUF file, any shard of it")
    parser.add_argument("--max-tokens", type=int, default=96)
    options = parser.parse_args(arguments)

    drafter = EarlierAnswers()
    with strata.load(options.model, context=1024, draft=drafter) as model:
        earlier = model.generate(options.prompt, max_tokens=options.max_tokens, drafts=False)
        drafter.add([*model.tokenize(options.prompt).tolist(), *earlier.tokens])
        answer = model.generate(options.prompt, max_tokens=options.max_tokens)

    print(options.prompt + answer.text)
    print(f"\nthe same as without drafts: {answer.tokens == earlier.tokens}")
    print(f"{len(answer.tokens)} tokens in {answer.drafts['windows']} windows")
    for source, counts in answer.drafts["by_source"].items():
        print(f"{source}: {sum(counts['accepted'])} of {sum(counts['offered'])} drafts accepted")


if __name__ == "__main__":
    main()
