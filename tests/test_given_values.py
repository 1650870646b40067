"""Values that callers give for options: those of other libraries are taken where they mean one thing, and what means
nothing is refused with found and needed."""

from __future__ import annotations

import shlex
from dataclasses import fields
from decimal import Decimal
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import strata
import strata.synth
from strata.base import numbers
from strata.base.errors import BadArgument, FileError, StrataError
from strata.cli import app
from strata.cpu.cores import MOST_THREADS
from strata.loading import LoadOptions
from strata.options import generate_options
from strata.planner import memory, of_load
from strata.planner.machine import Machine
from strata.planner.options import MOST_OF_ANY, PlanOptions, make_options


class Odd:
    """Raises for whatever it is asked."""

    __hash__ = None

    def refuse(self, *_: object) -> None:
        raise RuntimeError("not this")

    __eq__ = __index__ = __float__ = __bool__ = __repr__ = refuse


ODD = [
    np.array(["auto", "f16"]), np.array([1, 2]), np.array([]), np.array("auto"), np.array([3]), np.zeros((3, 3)),
    np.array([None]), [], [1, 2], ["auto"], list(range(9999)), {}, {"a": 1}, set(), range(3), (), ("auto",),
    float("nan"), np.float64("nan"), np.float32("inf"), True, False, np.True_, np.False_, np.int64(3), np.float64(0.5),
    np.str_("auto"), np.datetime64("2020-01-01"), np.complex128(1), b"auto", 10**400, -1, 0, 0.5, 1 + 2j, Odd(),
    object(), len, Decimal("NaN"), Fraction(1, 2), "", " ", "auto\0", "\ud800", "cuda:" + 5000 * "9",
]  # fmt: skip
FULL = "x" * 5000
"""Longer than a file name may be."""

OF_LOAD = [f.name for f in fields(LoadOptions)]
OF_PLAN = [f.name for f in fields(PlanOptions)]


def refused(error: StrataError, name: str) -> None:
    """The error says what was found and needed, and is no page."""
    assert error.found is not None and error.needed is not None, (name, str(error))
    assert len(str(error)) < 500 and "\n" not in str(error), (name, str(error))


def own(value: object) -> bool:
    """Whether a value is Python's or strata's own."""
    return type(value).__module__.split(".")[0] != "numpy"


@pytest.mark.parametrize("name", OF_LOAD)
def test_any_value_of_a_load_is_taken_or_refused(name):
    for value in ODD:
        try:
            options = LoadOptions(**{name: value})
            options.validate()
        except BadArgument as error:
            refused(error, name)
        else:
            assert own(getattr(options, name)), (name, value)


@pytest.mark.parametrize("name", OF_PLAN)
def test_any_value_of_a_plan_is_taken_or_refused(name):
    for value in ODD:
        try:
            options = make_options(**{name: value})
        except BadArgument as error:
            refused(error, name)
        else:
            assert own(getattr(options, name)), (name, value)


@pytest.mark.parametrize("name", ["draft", "profile", "slots", "threads", "kv", "device"])
def test_any_value_is_refused_in_front_of_the_file(tiny_path, monkeypatch, name):
    """`strata.plan` takes more for these than the record of its options does."""
    monkeypatch.setattr(of_load, "plan_of_load", lambda *_, **__: None)
    for value in (*ODD, FULL):
        try:
            strata.plan(tiny_path, machine=Machine.describe(ram_gib=8), **{name: value})
        except (BadArgument, FileError) as error:
            assert error.found is not None and error.needed is not None, str(error)[:500]


@pytest.mark.parametrize("name", ["gpu", "vram_gib", "ram_available_gib", "cores", "cpu_tier", "rotational", "wsl",
                                  "name"])  # fmt: skip
def test_any_value_of_a_machine_is_taken_or_refused(name):
    for value in ODD:
        try:
            Machine.describe(**{name: value})
        except BadArgument as error:
            refused(error, name)


@pytest.mark.parametrize("name", ["max_tokens", "stop", "ignore_eos", "wait", "drafts", "draft_acceptance",
                                  "temperature", "top_logprobs"])  # fmt: skip
def test_any_value_of_an_answer_is_taken_or_refused(name):
    for value in ODD:
        try:
            options = generate_options({name: value}, 1000)
        except BadArgument as error:
            refused(error, name)
        else:
            assert own(getattr(options, name, None)) and own(getattr(options.params, name, None)), (name, value)


def test_clear_values_of_numpy_become_pythons_own():
    options = LoadOptions(pin=np.True_, kv=np.str_("int8"), threads=np.int64(2), vram_gib=np.float64(4),
                          slots=np.str_("all"), context=np.array(512))  # fmt: skip
    options.validate()
    found = (options.pin, options.kv, options.threads, options.vram_gib, options.slots, options.context)
    assert found == (True, "int8", 2, 4.0, "all", 512)
    assert [type(v) for v in found] == [bool, str, int, float, str, int]
    made = PlanOptions(kv=np.str_("f16"), device=np.str_("cpu"), prefill=np.int64(512))
    assert [type(v) for v in (made.kv, made.device, made.prefill)] == [str, str, int]
    answer = generate_options({"ignore_eos": np.True_, "max_tokens": np.int8(3), "wait": np.False_,
                               "logprobs": np.True_}, 1000)  # fmt: skip
    assert (answer.ignore_eos, answer.max_tokens, answer.wait) == (True, 3, False)
    assert [type(v) for v in (answer.ignore_eos, answer.max_tokens, answer.wait)] == [bool, int, bool]
    assert answer.params.logprobs is True


def test_a_drafter_is_not_asked_whether_it_equals_a_text():
    class Drafter(Odd):
        def propose(self, tokens, k):
            return []

    options = LoadOptions(draft=Drafter())
    options.validate()
    assert options.drafting
    assert memory.draft_source(SimpleNamespace(), options.draft) is None


@pytest.mark.parametrize(("name", "value", "needed"), [
    ("threads", 10**9, f"an integer in 1..{MOST_THREADS:,}"), ("threads", 0, f"an integer in 1..{MOST_THREADS:,}"),
    ("context", 10**400, f"an integer in 10..{MOST_OF_ANY:,}"), ("sessions", 0, "an integer >= 1"),
])  # fmt: skip
def test_a_number_out_of_range_is_refused_before_anything_is_planned(tiny_path, monkeypatch, name, value, needed):
    monkeypatch.setattr(of_load, "read_facts", lambda *_: pytest.fail("the file was read"))
    for call in (strata.load, strata.plan):
        with pytest.raises(BadArgument, match=f"{name} is out of range") as error:
            call(tiny_path, **{name: value})
        assert error.value.needed == needed and "disk" not in str(error.value)
    if name == "threads":
        assert "per usable core" in error.value.advice


def test_as_many_threads_as_a_pool_takes_are_planned(tiny_path):
    assert strata.plan(tiny_path, threads=MOST_THREADS, context=512, device="cpu").threads == MOST_THREADS


@pytest.mark.parametrize("words", [("--slots", 5000 * "9"), ("--prefill", "\u00b2"), ("--device", "cuda:" + 40 * "9"),
                                   ("--threads", "1000000000")])  # fmt: skip
def test_numbers_of_the_command_line(tiny_path, words):
    done = CliRunner().invoke(app, ["plan", str(tiny_path), *words])
    assert done.exit_code == 2 and "; found " in done.stderr and "; needed " in done.stderr, done.output


@pytest.fixture(scope="module")
def model(tiny_path):
    with strata.load(tiny_path, context=512, device="cpu", threads=1) as made:
        yield made


@pytest.mark.parametrize("what", [None, 1, "no", np.arange(2), [True]], ids=repr)
def test_what_is_no_truth_value(model, what):
    calls = {
        "special": lambda: model.tokenize("a", special=what),
        "skip_special": lambda: model.detokenize([1], skip_special=what),
    }
    if what is not None:
        calls["stream"] = lambda: model.chat([{"role": "user", "content": "hi"}], stream=what, max_tokens=1)
    for name, call in calls.items():
        with pytest.raises(BadArgument, match=f"{name} is no truth value") as caught:
            call()
        assert caught.value.found is not None and caught.value.needed == "True or False"


def test_a_stream_of_none_is_no_stream(model):
    """As clients in OpenAI form send it."""
    found = model.chat([{"role": "user", "content": "hi"}], stream=None, reasoning_effort=None, max_tokens=1)
    assert isinstance(found, strata.ChatResult)


@pytest.mark.parametrize("what", [3, b"low", np.arange(2), ["low"]], ids=repr)
def test_names_that_are_none(model, what):
    with pytest.raises(BadArgument, match="prefill is unknown"):
        model.logits([1, 2], prefill=what)
    with pytest.raises(BadArgument, match="reasoning_effort is no text"):
        model.chat([{"role": "user", "content": "hi"}], reasoning_effort=what, max_tokens=1)


OF_A_BENCH = """
cpu-kernels --layer --experts ,
cpu-kernels --types ,
decode -n 99999999999999999999999
decode --prefill-tokens 99999999999
doorbell --cpu --threads 0
doorbell --cpu --types ,
draft --layers 1 --kv f8
draft --layers 1 --n-experts 12
draft --layers 1 --threads 0
draft --seed -1
experts --context 5
experts --fraction 0.2 --pcie-share nan
experts --fraction 0.2 --tokens 1
experts --fraction nan
experts --n-experts 12
experts --rows 9
experts --seed -1
experts --shares ''
experts --threads 2000
experts --windows 1
float-ops --threads 2000
gpu --context 0
gpu --n-experts 12
gpu --rows ''
gpu --seed -1
gpu --threads 2000
gpu-kernels nodes --blocks ''
gpu-kernels ops --groups ,
ngram --depths 1000
ngram --rows ²
prefill --made Q4_K/IQ4_NL --chunks ²
prefill --made Q4_K/IQ4_NL --position -256
prefill --made Q4_K/IQ4_NL --threads 0
prefill --tokens ²
synth -n 2 --n-experts 12
synth --seed -1
synth --threads 0
versus --synth ''
versus --tiers 0,x
""".strip().splitlines()


@pytest.mark.parametrize("line", OF_A_BENCH)
def test_odd_values_of_a_bench_are_refused_before_anything_is_made(monkeypatch, line):
    monkeypatch.setattr(strata.synth, "_make", lambda *_: pytest.fail("a model is made"))
    done = CliRunner().invoke(app, ["bench", *shlex.split(line)])
    assert (done.exit_code, done.stdout) == (2, ""), done.output
    assert "; found " in done.stderr and "; needed " in done.stderr


@pytest.mark.parametrize("words", ["gpu -m ''", "experts -m ''", "synth --out ''", "cpu-kernels --ggml ''"])
def test_an_empty_path_of_a_bench_is_not_the_current_folder(words):
    done = CliRunner().invoke(app, ["bench", *shlex.split(words)])
    assert (done.exit_code, done.stdout) == (2, "") and "the path is empty" in done.stderr


@settings(max_examples=50, deadline=None)
@given(st.one_of(st.text(), st.integers(), st.floats(), st.booleans(), st.lists(st.integers()), st.binary()))
def test_a_value_is_shown_in_one_short_line(value):
    text = numbers.shown(value)
    assert 0 < len(text) <= numbers.MOST_SHOWN and len(text.splitlines()) == 1
    assert numbers.truth_value(value) is (value if isinstance(value, bool) else None)
    assert numbers.one_of(value, ("a",)) == (isinstance(value, str) and value == "a")


def test_what_cannot_be_shown_is_named_by_its_type():
    assert numbers.shown(Odd()) == "a value of type Odd" and numbers.shown(10**5000) == "a value of type int"
    assert numbers.shown(np.zeros((2, 3))) == "an array of float64 (2, 3)"
    assert numbers.shown("plain") == "'plain'"


@pytest.mark.parametrize("name", ["vram_gib", "vram_free_gib", "ram_gib", "ram_available_gib", "ram_gbps", "disk_gbps"])
@pytest.mark.parametrize("value", [1e300, 5e-324, -1.0])
def test_sizes_of_a_described_machine_have_limits(name: str, value: float):
    given = {"vram_gib": 8.0} if name == "vram_free_gib" else {}
    with pytest.raises(BadArgument, match=f"{name} is out of range"):
        Machine.describe(**given, **{name: value})


@pytest.mark.parametrize("cores", [0, MOST_THREADS + 1, 10**30])
def test_a_described_machine_has_as_many_cores_as_a_load_takes_threads(cores: int):
    with pytest.raises(BadArgument, match="cores is out of range"):
        Machine.describe(cores=cores)


def test_the_class_of_a_drafter_is_no_drafter():
    class Own:
        def propose(self, tokens: np.ndarray, k: int) -> list[int]:
            return []

    LoadOptions(draft=Own()).validate()
    with pytest.raises(BadArgument, match="draft is unusable"):
        LoadOptions(draft=Own).validate()
