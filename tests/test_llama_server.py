"""llama.cpp beside this library, against a package of the test's own: what fails leaves nothing behind."""

from types import SimpleNamespace

import pytest

from strata import llama_server
from strata.base.errors import StrataError
from strata.llama_server import LlamaServer


def package(server):
    return SimpleNamespace(Server=server, CommonParams=lambda: SimpleNamespace(
        model=SimpleNamespace(), cpuparams=SimpleNamespace(), cpuparams_batch=SimpleNamespace()))  # fmt: skip


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(llama_server.tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(("error", "told"), [(RuntimeError("bad magic"), StrataError), (TypeError("other"), TypeError)])
def test_a_server_that_does_not_start_leaves_no_folder(folder, monkeypatch, error, told):
    def refuse(params):
        assert params.hostnames == [str(next(folder.iterdir()) / "llama.sock")]
        raise error

    monkeypatch.setattr(llama_server, "xllamacpp", lambda: package(refuse))
    with pytest.raises(told) as caught:
        LlamaServer("x.gguf", 64, 1)
    assert list(folder.iterdir()) == [] and str(error) in str(caught.value)


def test_a_refused_request_is_told_and_closing_removes_the_folder(folder, monkeypatch):
    answers = SimpleNamespace(handle_completions=lambda request: {"error": {"message": f"no {request['what']}"}})
    monkeypatch.setattr(llama_server, "xllamacpp", lambda: package(lambda params: answers))
    with LlamaServer("x.gguf", 64, 1) as server:
        assert server.socket.parent.is_dir()
        with pytest.raises(StrataError, match="no prompt"):
            server.complete({"what": "prompt"})
    assert list(folder.iterdir()) == []
