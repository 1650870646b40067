"""Options that do nothing beside others are refused, not lost."""

import pytest
from typer.testing import CliRunner

from strata.cli import USAGE, app

CASES = [
    (["run", "Hi", "--check", "--draft", "off"], "--draft does nothing with --check"),
    (["run", "Hi", "--check", "-n", "5"], "--max-tokens does nothing with --check"),
    (["run", "Hi", "--check", "--ignore-eos"], "--ignore-eos does nothing with --check"),
    (["run", "Hi", "--check", "--slots", "4"], "--slots does nothing with --check"),
    (["run", "Hi", "--top-logprobs", "3"], "--top-logprobs does nothing without --json"),
    (["run", "Hi", "--logprobs"], "--logprobs does nothing without --json"),
    (["plan", "--draft-vocabulary", "500"], "--draft-vocabulary does nothing with --draft off"),
    (["bench", "prefill", "--made", "Q4_K/IQ4_NL", "--device", "cuda:1"], "--device does nothing with --made"),
    (["bench", "prefill", "--made", "Q4_K/IQ4_NL", "-m", "x.gguf"], "--model does nothing with --made"),
    (["bench", "prefill", "--position", "0"], "--position does nothing without --made"),
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
def test_an_option_that_does_nothing_is_named(words, told):
    done = CliRunner().invoke(app, words)
    assert (done.exit_code, told in done.stderr) == (USAGE, True), done.stderr


def test_statistics_are_told_to_a_pipe_too():
    """What was asked for is no remark that only somebody who watches gets."""
    done = CliRunner().invoke(app, ["run", "Hi", "-n", "1", "--stats", "--device", "cpu"])
    assert done.exit_code == 0, done.stderr
    assert "experts are not shared: one device holds them all" in done.stderr
