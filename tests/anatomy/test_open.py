"""What lies at a path: directories, lone files, side files; what is refused, and how."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from ullage.anatomy import load, open_model
from ullage.errors import BadInput, BadUsage, MalformedConfig

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 100,
    "torch_dtype": "bfloat16",
}


def write(path: Path, value: object = CONFIG) -> Path:
    path.write_text(json.dumps(value), encoding="utf-8")
    return path


class TestDirectories:
    def test_a_directory_is_its_config_and_what_lies_beside(self, tmp_path: Path) -> None:
        write(tmp_path / "config.json")
        write(tmp_path / "generation_config.json", {"eos_token_id": 2})
        write(tmp_path / "tokenizer_config.json", {"chat_template": "{{ messages }}"})
        write(tmp_path / "special_tokens_map.json", {"eos_token": "</s>"})
        write(tmp_path / "tokenizer.json", {"model": {}})
        (tmp_path / "modeling_x.py").write_text("print()")
        files = open_model(tmp_path)
        assert files.kind == "directory"
        assert files.generation_config == {"eos_token_id": 2}
        assert files.special_tokens_map == {"eos_token": "</s>"}
        assert files.tokenizer_json_bytes == len('{"model": {}}')
        assert (files.chat_template, files.chat_template_file) == (
            "{{ messages }}",
            "tokenizer_config.json",
        )
        assert files.other_files == ("modeling_x.py",)
        model = load(tmp_path)
        assert model.anatomy.spec.num_layers == 2
        assert model.checkpoint is None

    def test_the_jinja_file_is_the_newer_template(self, tmp_path: Path) -> None:
        write(tmp_path / "config.json")
        write(tmp_path / "tokenizer_config.json", {"chat_template": "old"})
        (tmp_path / "chat_template.jinja").write_text("new")
        assert open_model(tmp_path).chat_template == "new"

    def test_of_several_named_templates_the_default_is_taken(self, tmp_path: Path) -> None:
        write(tmp_path / "config.json")
        named = [{"name": "tool_use", "template": "a"}, {"name": "default", "template": "b"}]
        write(tmp_path / "tokenizer_config.json", {"chat_template": named})
        assert open_model(tmp_path).chat_template == "b"

    def test_links_of_a_download_cache_are_followed(self, tmp_path: Path) -> None:
        blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
        blobs.mkdir()
        snapshot.mkdir()
        write(blobs / "abc")
        (snapshot / "config.json").symlink_to("../blobs/abc")
        assert load(snapshot).anatomy.spec.hidden_size == 64

    def test_a_directory_without_a_model_says_what_it_lacks(self, tmp_path: Path) -> None:
        with pytest.raises(BadUsage, match=r"config\.json"):
            open_model(tmp_path)

    def test_a_pipe_named_config_json_does_not_hang(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "config.json")
        with pytest.raises(BadInput):
            load(tmp_path)


class TestLoneFiles:
    def test_any_name_will_do(self, tmp_path: Path) -> None:
        model = load(write(tmp_path / "anything.json"))
        assert model.files.kind == "config" and model.anatomy.spec.hidden_size == 64

    @pytest.mark.parametrize("prefix", ["", "org--Model_"])
    def test_the_quantisation_side_file_has_the_same_prefix(
        self, tmp_path: Path, prefix: str
    ) -> None:
        side = {"quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
        write(tmp_path / f"{prefix}hf_quant_config.json", side)
        model = load(write(tmp_path / f"{prefix}config.json"))
        assert model.files.quant_side == side
        assert model.anatomy.spec.quantization is not None

    def test_a_configuration_inside_another_object_is_found(self, tmp_path: Path) -> None:
        path = write(tmp_path / "run.json", {"job": {"model": {"config": CONFIG}}, "seed": 1})
        assert load(path).anatomy.spec.hidden_size == 64

    def test_a_byte_order_mark_is_no_matter(self, tmp_path: Path) -> None:
        path = tmp_path / "config.json"
        path.write_bytes(b"\xef\xbb\xbf" + json.dumps(CONFIG).encode())
        assert load(path).anatomy.spec.hidden_size == 64

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (b"\xff\xfe{}", "not UTF-8"),
            (b"", "not JSON"),
            (b"[1]", "expected a JSON object"),
            (b"{}", "holds no model configuration"),
            (b'{"weight_map": {"a": "b"}}', "an index of weight files"),
            (b'{"hidden_size": NaN}', "NaN"),
            (b'{"a":' * 100_000, "nested too deeply"),
            (b'{"hidden_size": 1, "hidden_size": 2}', "appears twice"),
            (b" " * (9 << 20), "larger than"),
        ],
    )
    def test_what_is_refused_is_named(self, tmp_path: Path, content: bytes, message: str) -> None:
        path = tmp_path / "config.json"
        path.write_bytes(content)
        with pytest.raises(MalformedConfig, match=message) as caught:
            load(path)
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize("name", ["missing.json", "a\0b"])
    def test_nothing_there(self, tmp_path: Path, name: str) -> None:
        with pytest.raises(BadUsage, match="cannot be opened"):
            open_model(tmp_path / name)


def test_a_config_that_is_no_file_is_called_so(tmp_path: Path) -> None:
    """A pipe, a socket, a directory or a link to nowhere: there is a config.json, but no file."""
    place = tmp_path / "config.json"
    for make in (os.mkfifo, Path.mkdir, lambda path: path.symlink_to("nowhere")):
        make(place)
        with pytest.raises(BadUsage, match=r"config\.json: not a regular file"):
            open_model(tmp_path)
        place.rmdir() if place.is_dir() else place.unlink()
