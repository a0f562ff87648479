"""A hub id is a path first, then a snapshot of the cache, then headers of a hub: in that order.

Of a hub nothing but small files and headers is asked for, and every refusal is one sentence.
"""

from __future__ import annotations

import json
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoint_files import header_of, llama_gguf, safetensors_bytes
from fake_hub import COMMIT, ID, Hub, running

from ullage.anatomy import load
from ullage.anatomy.hub import client as hub_client
from ullage.anatomy.hub.ids import HubId, parse_hub_id
from ullage.anatomy.hub.locate import locate
from ullage.anatomy.tensors.expected import expected_tensors
from ullage.cli.main import main
from ullage.errors import BadUsage, MalformedCheckpoint, Unreachable

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 50,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VARIABLES = (
    *("HF_ENDPOINT", "HF_TOKEN", "HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"),
    *("HF_HUB_OFFLINE", "XDG_CACHE_HOME", "http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"),
)


def write_model(folder: Path, shards: int = 1) -> Path:
    """A whole tiny model with side files, in one file or in shards with an index."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "generation_config.json").write_text('{"eos_token_id": 2}')
    (folder / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    (folder / "tokenizer.json").write_text("{" + " " * 5000 + "}")
    (folder / "README.md").write_text("x" * 3000)
    tensors = {t.name: ("BF16", t.shape) for t in expected_tensors(load(folder).anatomy.spec)}
    names = list(tensors)
    places = {name: f"model-{i % shards + 1:05d}.safetensors" for i, name in enumerate(names)}
    if shards == 1:
        places = dict.fromkeys(names, "model.safetensors")
    else:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    for file in set(places.values()):
        mine = {n: tensors[n] for n in names if places[n] == file}
        (folder / file).write_bytes(safetensors_bytes(*header_of(mine)))
    return folder


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setitem(sys.modules, "huggingface_hub.constants", None)
    monkeypatch.setattr(hub_client, "SILENCE_S", 0.5)
    monkeypatch.setattr(hub_client, "REQUEST_S", 1.0)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with running(Hub(write_model(tmp_path / "served", shards=3))) as made:
        monkeypatch.setenv("HF_ENDPOINT", made.address)
        yield made


def entries(path: Path) -> list[tuple[object, ...]]:
    index = load(path).checkpoint
    assert index is not None and index.is_complete
    return [(t.name, t.dtype, t.shape, Path(t.file).name, t.start, t.end) for t in index.tensors]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("org/name", HubId("org", "name")),
        ("org/na.me-7B_x@v1.0", HubId("org", "na.me-7B_x", "v1.0")),
        ("org/name@refs/pr/7", HubId("org", "name", "refs/pr/7")),
        ("org/name/some-Q4_K.gguf", HubId("org", "name", "main", "some-Q4_K.gguf")),
        ("name", None),
        ("./org/name", None),
        ("../name", None),
        ("/org/name", None),
        ("org/name/", None),
        ("org/name/config.json", None),
        ("org/na me", None),
        ("org/name@", None),
        ("org/name@../x", None),
        ("org/..", None),
        ("a/b/c/d.gguf", None),
        ("org/" + "n" * 97, None),
    ],
)
def test_what_can_be_a_hub_id(text: str, expected: HubId | None) -> None:
    assert parse_hub_id(text) == expected


def test_a_path_is_a_path(tmp_path: Path, monkeypatch, hub: Hub) -> None:
    (tmp_path / "some-org" / "tiny-model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert locate(ID).path == Path(ID) and hub.seen == []


def cached(home: Path, commit: str = COMMIT) -> Path:
    folder = home / "hub" / "models--some-org--tiny-model"
    (folder / "refs").mkdir(parents=True, exist_ok=True)
    (folder / "refs" / "main").write_text(commit)
    return write_model(folder / "snapshots" / commit)


def test_the_cache_comes_before_the_hub(tmp_path: Path, hub: Hub) -> None:
    snapshot = cached(tmp_path / "home")
    for text in (ID, f"{ID}@main", f"{ID}@{COMMIT}"):
        found = locate(text)
        assert found.path == snapshot and not found.headers_only
    assert hub.seen == []
    assert locate(f"{ID}@{COMMIT}").path == snapshot


@pytest.mark.parametrize("variable", ["HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME"])
def test_the_cache_is_where_the_hub_s_tools_put_it(tmp_path: Path, monkeypatch, variable) -> None:
    monkeypatch.delenv("HF_HOME")
    root = tmp_path / "elsewhere"
    monkeypatch.setenv(variable, str(root if variable.startswith("XDG") else root / "hub"))
    snapshot = cached(root / "huggingface" if variable.startswith("XDG") else root)
    assert locate(ID).path == snapshot


@pytest.mark.parametrize("reference", ["../../../etc", "", "x" * 500, "\xff"])
def test_a_reference_that_lies_leaves_the_cache_unused(tmp_path: Path, reference: str) -> None:
    snapshot = cached(tmp_path / "home")
    (snapshot.parents[1] / "refs" / "main").write_text(reference)
    with pytest.raises(BadUsage, match="neither a path nor in the cache"):
        locate(ID)


def test_headers_say_what_the_files_would(hub: Hub, capsys) -> None:
    found = locate(ID)
    assert found.headers_only
    assert entries(found.path) == entries(hub.files)
    local, fetched = load(hub.files), load(found.path)
    assert fetched.anatomy.spec == local.anatomy.spec
    assert fetched.files.tokenizer_json_bytes == local.files.tokenizer_json_bytes
    assert fetched.files.chat_template == local.files.chat_template


def test_nothing_but_headers_is_asked_for(hub: Hub) -> None:
    locate(ID)
    for file in hub.files.glob("*.safetensors"):
        header = int.from_bytes(file.read_bytes()[:8], "little")
        asked = hub.asked(file.name)
        assert [s.range for s in asked] == ["bytes=0-7", f"bytes=8-{7 + header}"]
        assert sum(s.num_bytes for s in asked) == 8 + header < file.stat().st_size
    assert [s.range for s in hub.asked("/tokenizer.json")] == ["bytes=0-0"]
    assert not hub.asked("README.md")
    # After the listing the commit is asked for, so that all files are of one revision.
    assert all(f"/{COMMIT}/" in s.path for s in hub.seen if "/resolve/" in s.path)


def test_a_gguf_s_header_is_read_in_growing_parts(hub: Hub, monkeypatch) -> None:
    shutil.rmtree(hub.files)
    hub.files.mkdir()
    words = ("[string]", [f"word {i}" for i in range(30_000)])
    raw = llama_gguf(extra={"a.long.list": words}) + bytes(1 << 20)
    (hub.files / "m-Q4_1.gguf").write_bytes(raw)
    (hub.files / "m-Q8_0.gguf").write_bytes(llama_gguf())
    with pytest.raises(MalformedCheckpoint, match="2 GGUF models"):
        locate(ID)
    found = locate(f"{ID}/m-Q4_1.gguf")
    assert entries(found.path) == entries(hub.files / "m-Q4_1.gguf")
    sizes = [s.num_bytes for s in hub.asked("m-Q4_1.gguf")]
    assert sizes == sorted(sizes) and sizes[0] == 1 << 16 and len(sizes) > 2
    assert sum(sizes) < len(raw) / 1.5
    with pytest.raises(BadUsage, match="no file other"):
        locate(f"{ID}/other.gguf")


def test_the_token_goes_to_the_hub_and_to_nobody_else(hub: Hub, tmp_path, monkeypatch) -> None:
    hub.token = "hf_secret"
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    with running(Hub(hub.files)) as cdn:
        hub.cdn = cdn.address
        found = locate(ID)
        assert entries(found.path) == entries(hub.files)
        assert cdn.seen and all(s.authorization is None for s in cdn.seen)
    assert all(s.authorization == "Bearer hf_secret" for s in hub.seen)


def test_a_token_stays_through_a_redirect_on_the_same_hub(hub: Hub, monkeypatch) -> None:
    hub.token, hub.cdn = "hf_secret", hub.address
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert entries(locate(ID).path) == entries(hub.files)


@pytest.mark.parametrize(
    ("misbehave", "kind", "fragment"),
    [
        ("gated", BadUsage, "gated and HF_TOKEN is not set"),
        ("401", BadUsage, "no such model, or it is private"),
        ("403", BadUsage, "forbids access"),
        ("429", Unreachable, "come back later"),
        ("503", Unreachable, "status 503"),
        ("silent", Unreachable, "no answer within"),
        ("drips", Unreachable, "takes more than"),
        ("loop", Unreachable, "status 302"),
        ("to a file", Unreachable, "status 302"),
        ("garbage", Unreachable, "cannot be asked"),
        ("no list", Unreachable, "no list of files"),
        ("escape", BadUsage, "without config.json"),
        ("no ranges", Unreachable, "sends all of"),
        ("other range", Unreachable, "answers bytes 1-"),
        ("no total", Unreachable, "answers with the range"),
        ("short", Unreachable, "cannot be asked|breaks off"),
    ],
)
def test_each_refusal_is_one_sentence(hub: Hub, misbehave, kind, fragment, capsys) -> None:
    hub.misbehave = misbehave
    with pytest.raises(kind, match=fragment):
        load(locate(ID).path)
    began = time.monotonic()
    code = main(["audit", ID])
    said = capsys.readouterr()
    assert code == kind("x").exit_code
    assert said.out == "" and len(said.err.splitlines()) == 1
    assert time.monotonic() - began < 10


def test_what_is_not_there_is_said(hub: Hub) -> None:
    with pytest.raises(BadUsage, match="no revision 'v9'"):
        locate(f"{ID}@v9")
    with pytest.raises(BadUsage, match="no such model"):
        locate("some-org/nothing")


def test_a_dead_hub_is_unreachable(monkeypatch, capsys) -> None:
    with socket.socket() as held:  # bound, never listening: connections are refused
        held.bind(("127.0.0.1", 0))
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{held.getsockname()[1]}")
        assert main(["size", ID]) == 3
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_offline_says_so_at_once(hub: Hub, monkeypatch, capsys) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert main(["audit", ID]) == 3
    assert "HF_HUB_OFFLINE" in capsys.readouterr().err and hub.seen == []


def test_without_any_hub_it_is_one_sentence(capsys) -> None:
    assert main(["audit", ID]) == 2
    said = capsys.readouterr().err
    assert "HF_ENDPOINT is not set" in said and len(said.splitlines()) == 1


def test_an_installed_hub_library_names_the_hub(hub: Hub, monkeypatch) -> None:
    monkeypatch.delenv("HF_ENDPOINT")
    library = type(sys)("huggingface_hub.constants")
    library.ENDPOINT = hub.address
    monkeypatch.setitem(sys.modules, "huggingface_hub", type(sys)("huggingface_hub"))
    monkeypatch.setitem(sys.modules, "huggingface_hub.constants", library)
    assert locate(ID).headers_only


@pytest.mark.parametrize("endpoint", ["ftp://127.0.0.1", "nonsense", "file:///etc"])
def test_an_endpoint_that_is_no_web_address_is_refused(monkeypatch, endpoint: str) -> None:
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    with pytest.raises(BadUsage, match="HF_ENDPOINT"):
        locate(ID)


def test_a_header_that_lies_is_told_by_the_reader(hub: Hub) -> None:
    shard = hub.files / "model-00002.safetensors"
    shard.write_bytes((2**40).to_bytes(8, "little") + shard.read_bytes()[8:])
    with pytest.raises(MalformedCheckpoint, match="header length"):
        load(locate(ID).path)


def test_audit_and_size_take_an_id(hub: Hub, capsys) -> None:
    assert main(["audit", ID, "--output", "json", "--fail-on", "never"]) == 0
    made = json.loads(capsys.readouterr().out)
    states = {f["id"]: f["state"] for f in made["findings"]}
    assert made["model"] == ID
    assert states["A121"] == states["A131"] == states["A133"] == "clear"
    assert states["A151"] == "not_evaluable"
    assert main(["size", ID, "--gpu", "H100", "--output", "json"]) == 0
    fetched = json.loads(capsys.readouterr().out)
    assert main(["size", str(hub.files), "--gpu", "H100", "--output", "json"]) == 0
    local = json.loads(capsys.readouterr().out)
    assert fetched["weights_bytes"] == local["weights_bytes"] > 0


def test_deep_of_a_hub_s_model_is_refused(hub: Hub, capsys) -> None:
    assert main(["audit", ID, "--deep"]) == 2
    said = capsys.readouterr()
    assert "only the headers are fetched" in said.err and said.out == ""


def test_a_deployment_file_may_name_a_hub_id(hub: Hub, tmp_path, monkeypatch, capsys) -> None:
    script = tmp_path / "start.sh"
    script.write_text(f"vllm serve {ID}\n")
    arguments = ["audit", "--deployment", str(script), "--output", "json", "--fail-on", "never"]
    assert main(arguments) == 0  # a hub is set
    assert json.loads(capsys.readouterr().out)["model"] == ID
    monkeypatch.delenv("HF_ENDPOINT")
    assert main(arguments) == 2  # neither hub nor cache
    assert "not on this machine" in capsys.readouterr().err
    cached(tmp_path / "home")
    assert main(arguments) == 0  # the cache
