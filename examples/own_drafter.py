"""Draft with a drafter of your own: here, from phrases that the answers are known to use.

A drafter is any object with a method propose(tokens, k). What it proposes is verified by the model, so it can change
the speed of an answer and never its text.

python examples/own_drafter.py "class Shape:" --phrase "self.name = name" --phrase "return self.name"
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import strata

BUNDLED = Path(__file__).parent / "models" / "tiny-flash-next" / "tiny-flash-next-IQ3_XXS-00001-of-00002.gguf"
PHRASES = ["def __init__(self, name, value):", "        self.name = name\n        self.value = value\n"]


class PhraseDrafter:
    """Continues a phrase once the text has begun it with at least `begun` tokens.

    phrases  texts, as token ids
    """

    def __init__(self, phrases: Sequence[Sequence[int]], begun: int = 2):
        self.begun = begun
        self.phrases = [list(map(int, phrase)) for phrase in phrases]

    def propose(self, tokens: np.ndarray, k: int) -> list[int]:
        """At most k tokens that may follow `tokens`; none if no phrase has begun."""
        for phrase in self.phrases:
            for n in range(len(phrase) - 1, self.begun - 1, -1):
                if tokens[-n:].tolist() == phrase[:n]:
                    return phrase[n : n + k]
        return []


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Draft with phrases of your own.")
    parser.add_argument("prompt", nargs="?", default="class Shape:\n    def __init__(self, name, value):\n")
    parser.add_argument("--model", type=Path, default=BUNDLED, help="a GGUF file, any shard of it")
    parser.add_argument("--phrase", action="append", help="text that answers use; may be given several times")
    parser.add_argument("--max-tokens", type=int, default=96)
    options = parser.parse_args(arguments)

    # The drafter is given at load and needs the model's tokens: fill it in before the first answer.
    drafter = PhraseDrafter([])
    with strata.load(options.model, context=1024, draft=drafter) as model:
        drafter.phrases = [model.tokenize(phrase).tolist() for phrase in options.phrase or PHRASES]
        drafted = model.generate(options.prompt, max_tokens=options.max_tokens)
        plain = model.generate(options.prompt, max_tokens=options.max_tokens, drafts=False)

    print(options.prompt + drafted.text)
    print(f"\nthe same without drafts: {drafted.tokens == plain.tokens}")
    print(f"{len(drafted.tokens)} tokens in {drafted.drafts['windows']} windows")
    for source, counts in drafted.drafts["by_source"].items():
        print(f"{source}: {sum(counts['accepted'])} of {sum(counts['offered'])} drafts accepted")


if __name__ == "__main__":
    main()
