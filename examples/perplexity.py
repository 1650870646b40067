"""How well a model predicts text files: perplexity over windows, each read from an empty state.

python examples/perplexity.py notes.txt more.txt --window 512
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import strata

BUNDLED = Path(__file__).parent / "models" / "tiny-flash-next" / "tiny-flash-next-IQ3_XXS-00001-of-00002.gguf"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Score the perplexity of text files.")
    parser.add_argument("files", nargs="*", type=Path, default=[Path(__file__)], help="text files; default: this one")
    parser.add_argument("--model", type=Path, default=BUNDLED, help="a GGUF file, any shard of it")
    parser.add_argument("--window", type=int, default=512, help="tokens read together")
    parser.add_argument("--max-tokens", type=int, default=4096, help="of each file")
    options = parser.parse_args(arguments)
    if options.window < 2:
        parser.error("a window needs 2 tokens: one to read and one to predict")

    with strata.load(options.model, context=options.window + 16) as model:
        for file in options.files:
            tokens = model.tokenize(file.read_text(encoding="utf-8"), special=False)[: options.max_tokens]
            nats, predicted = 0.0, 0
            for start in range(0, len(tokens) - 1, options.window):
                score = model.score(tokens[start : start + options.window])
                nats += score.nats * score.tokens
                predicted += score.tokens
            if predicted == 0:
                print(f"{file}: nothing to predict in {len(tokens)} tokens")
                continue
            print(f"{file}: perplexity {math.exp(nats / predicted):.3f} over {predicted} tokens")


if __name__ == "__main__":
    main()
