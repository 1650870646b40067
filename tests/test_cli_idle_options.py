"""Options that do nothing beside others are refused, not lost."""

import numpy as np
import pytest
from typer.testing import CliRunner

from strata.cli import USAGE, app
from strata.pack.profile import ExpertProfile, write_profile

CASES = [
    (["run", "Hi", "--check", "--draft", "off"], "--draft does nothing with --check"),
    (["run", "Hi", "--check", "-n", "5"], "--max-tokens does nothing with --check"),
    (["run", "Hi", "--check", "--ignore-eos"], "--ignore-eos does nothing with --check"),
    (["run", "Hi", "--check", "--slots", "4"], "--slots does nothing with --check"),
    (["run", "Hi", "--top-logprobs", "3"], "--top-logprobs does nothing without --json"),
    (["run", "Hi", "--logprobs"], "--logprobs does nothing without --json"),
    (["run", "Hi", "--seed", "1"], "--seed does nothing without a --temperature above 0"),
    (["run", "Hi", "--top-k", "4"], "--top-k does nothing without a --temperature above 0"),
    (["chat", "--min-p", "0.1"], "--min-p does nothing without a --temperature above 0"),
    (["run", "Hi", "--draft", "lookup", "--draft-acceptance", "rejection"],
     "--draft-acceptance does nothing without a --temperature above 0"),
    (["run", "Hi", "-t", "1", "--draft-acceptance", "exact"], "--draft-acceptance does nothing without --draft"),
    (["chat", "-t", "1", "--draft-acceptance", "rejection"], "--draft-acceptance does nothing without --draft"),
    (["run", "Hi", "--penalty-last-n", "9"], "--penalty-last-n does nothing without a penalty"),
    (["run", "Hi", "--device", "cpu", "--profile", "PROFILE"], "--profile does nothing with --device cpu"),
    (["score", "-", "--device", "cpu", "--profile", "PROFILE"], "--profile does nothing with --device cpu"),
    (["plan", "--draft-vocabulary", "500"], "--draft-vocabulary does nothing with --draft off"),
    (["plan", "--device", "cpu", "--hit-rate", "0"], "--hit-rate does nothing with --device cpu"),
    (["plan", "--device", "cpu", "--reserve-mib", "0"], "--reserve-mib does nothing with --device cpu"),
    (["plan", "--device", "cpu", "--profile", "PROFILE"], "--profile does nothing with --device cpu"),
    (["plan", "--device", "cpu", "--prefill", "512"],
     "prefill=512: a chunk of more than one cell of 256 rows needs a GPU"),
    (["plan", "--vram-gib", "8", "--prefill", "16384"], "needed auto, windows or a multiple of 256 rows up to 8,192"),
    (["bench", "prefill", "--made", "Q4_K/IQ4_NL", "--device", "cuda:1"], "--device does nothing with --made"),
    (["bench", "prefill", "--made", "Q4_K/IQ4_NL", "-m", "x.gguf"], "--model does nothing with --made"),
    (["bench", "prefill", "--position", "0"], "--position does nothing without --made"),
    (["bench", "prefill", "--ops", "--prefill", "windows"], "--ops does nothing with --prefill windows"),
    (["bench", "experts", "--busy-python"], "--busy-python does nothing without --fraction"),
    (["bench", "experts", "--fraction", "0.2", "--rows", "2"], "--rows does nothing with --fraction"),
    (["bench", "experts", "--fraction", "0.2", "--shares", "0", "--busy-python"], "--busy-python does nothing with"),
    (["bench", "experts", "-m", "x.gguf", "--layers", "2"], "--layers does nothing with --model"),
    (["bench", "gpu", "-m", "x.gguf", "--threads", "2"], "--threads does nothing with --model"),
    (["bench", "draft", "--vocabulary", "999"], "--vocabulary does nothing without --layers"),
    (["bench", "versus", "--layers", "3"], "--layers does nothing without --synth"),
    (["bench", "cpu-kernels", "--layer", "--columns", "64"], "--columns does nothing with --layer"),
    (["bench", "cpu-kernels", "--experts", "Q2_0/Q2_0"], "--experts does nothing without --layer"),
    (["bench", "synth", "--out", "x", "-n", "0", "--routing", "own"], "--routing does nothing with --tokens 0"),
]


@pytest.mark.parametrize(("words", "told"), CASES, ids=[" ".join(words) for words, _ in CASES])
def test_an_option_that_does_nothing_is_named(words, told, tmp_path):
    if "PROFILE" in words:  # one of the bundled model
        words = [str(tmp_path / "one.strp") if word == "PROFILE" else word for word in words]
        pairs = np.stack(np.divmod(np.arange(256, dtype=np.uint16), 32), axis=1)
        write_profile(words[-1], ExpertProfile(8, 32, 256, pairs))
    done = CliRunner().invoke(app, words)
    assert (done.exit_code, told in done.stderr) == (USAGE, True), done.stderr


ALL = ["--top-k=4", "--top-p=0.9", "--min-p=0.1", "--seed=1", "--penalty-last-n=9", "--repetition-penalty=1",
       "--draft=off", "--draft-acceptance=exact", "--max-tokens=1", "--device=cpu"]  # fmt: skip


@pytest.mark.parametrize("temperature", ["0", "0.8"])
def test_a_program_that_always_gives_every_option_may(temperature):
    """It goes through temperatures, the first of which is 0."""
    done = CliRunner().invoke(app, ["run", "Hi", "-t", temperature, *ALL])
    assert done.exit_code == 0 and done.stdout, done.stderr


def test_statistics_are_told_to_a_pipe_too():
    """What was asked for is no remark that only somebody who watches gets."""
    done = CliRunner().invoke(app, ["run", "Hi", "-n", "1", "--stats", "--device", "cpu"])
    assert done.exit_code == 0, done.stderr
    assert "experts are not shared: one device holds them all" in done.stderr
