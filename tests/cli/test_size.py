"""`ullage size` from the outside: its JSON, its table, exit codes, hostile flags."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ullage.anatomy import load
from ullage.anatomy.tensors.expected import expected_tensors
from ullage.cli.flags import parse_integer
from ullage.cli.main import main
from ullage.cli.size_table import human_bytes, table_lines

CONFIGS = Path(__file__).parents[3] / "shared" / "configs"
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
}
PLAIN = (
    "weights_bytes",
    "kv_bytes_per_token",
    "kv_cache_bytes",
    "block_size",
    "num_blocks",
    "kv_cache_tokens",
    "max_concurrency",
    "max_model_len_that_fits",
    "state_bytes_per_sequence",
    "parameters",
    "deficit_bytes",
)


@pytest.fixture
def llama(tmp_path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    return str(tmp_path)


@pytest.fixture
def size(capsys):
    """Runs `ullage size … --output json`; gives the one document that it prints."""

    def run(*arguments: str) -> dict:
        assert main(["size", *arguments, "--output", "json"]) == 0
        printed = capsys.readouterr()
        assert printed.err == ""
        return json.loads(printed.out)

    return run


def test_the_promised_figures_are_plain_numbers_with_a_source_each(size, llama):
    document = size(llama, "--gpu", "H100")
    for key in PLAIN:
        assert isinstance(document[key], int | float), key
        assert not isinstance(document[key], bool)
        assert document["provenance"][key]
    assert document["fits"] is True
    assert document["deficit_bytes"] == 0
    assert document["parameters"] == 1_235_814_400
    assert document["weights_bytes"] == 2 * 1_235_814_400
    assert document["kv_bytes_per_token"] == 16 * 8 * 2 * 64 * 2
    assert document["state_bytes_per_sequence"] == 0


def test_the_kv_cache_is_blocks_times_the_bytes_of_one_over_all_layers(size, llama):
    document = size(llama, "--platform", "cpu", "--kv-cache-memory-bytes", "1G")
    block = document["block_size"] * document["kv_bytes_per_token"]
    assert document["kv_cache_bytes"] == document["num_blocks"] * block <= 2**30
    assert document["num_blocks"] == 2**30 // block
    assert document["fits"] is False  # one request of 131,072 tokens takes 4 GiB
    assert document["deficit_bytes"] == 131072 * document["kv_bytes_per_token"] + block - 2**30


def test_the_ledger_sums_to_the_device_and_its_engine_is_a_range(size, llama):
    document = size(llama, "--gpu", "l40s")
    ledger = document["ledger"]
    assert [part["name"] for part in ledger["parts"]] == [
        "weights",
        "kv_and_state",
        "activations",
        "engine_and_graphs",
        "free",
    ]
    assert sum(part["bytes"] for part in ledger["parts"]) == ledger["device_bytes"]
    assert ledger["device_bytes"] == document["gpu"]["memory_bytes"]
    for part in ledger["parts"]:
        assert part["min"] <= part["bytes"] <= part["max"]
        assert part["provenance"]
    engine = ledger["parts"][3]
    assert engine["min"] < engine["max"]


def test_every_range_has_a_reason_and_holds_the_planned_figure(size, llama):
    document = size(llama, "--gpu", "RTX-4090")
    assert document["ranges"]
    for key, bounds in document["ranges"].items():
        assert bounds["min"] <= document[key] <= bounds["max"]
        assert bounds["reason"]
        assert bounds["wide"] == (bounds["max"] > 1.05 * bounds["min"])


def test_a_model_that_is_not_understood_gives_ranges_that_name_the_field(size, tmp_path):
    config = LLAMA | {"model_type": "never_seen", "architectures": ["NeverSeenForCausalLM"]}
    for key in ("hidden_act", "tie_word_embeddings"):
        del config[key]
    (tmp_path / "config.json").write_text(json.dumps(config))
    document = size(str(tmp_path), "--kv-cache-memory-bytes", "8G", "--gpu", "A100")
    weights = document["weights_bytes"]
    assert weights["min"] < weights["max"]
    assert document["unknowns"]
    reason = document["ranges"]["weights_bytes"]["reason"]
    assert any(unknown["field"] in reason for unknown in document["unknowns"])


def test_without_a_device_what_cannot_be_told_is_null_with_a_reason(size, llama):
    document = size(llama)
    assert document["weights_bytes"] > 0
    assert document["kv_bytes_per_token"] > 0
    for key in ("fits", "kv_cache_bytes", "num_blocks", "kv_cache_tokens", "max_concurrency"):
        assert document[key] is None
        assert "--gpu" in document["not_evaluable"][key]
    assert document["ledger"] is None
    assert document["deficit_bytes"] is None


def test_with_the_kv_bytes_alone_only_the_verdict_is_missing(size, llama):
    document = size(llama, "--platform", "cpu", "--kv-memory", "8G")
    assert document["fits"] is None
    assert document["num_blocks"] > 0
    assert set(document["not_evaluable"]) == {"fits", "ledger"}


def test_not_fitting_is_an_answer(size, llama):
    document = size(llama, "--gpu", "4090", "--gpu-memory-utilization", "0.1")
    assert document["fits"] is False
    assert document["deficit_bytes"] > 0
    assert document["refusals"]
    assert document["num_blocks"] == 0
    parts = document["ledger"]["parts"]
    assert sum(part["bytes"] for part in parts) == document["gpu"]["memory_bytes"]


def test_devices_without_sizes_become_ranks_and_that_is_said(size, llama):
    document = size(llama, "--gpu", "H100:4")
    assert document["parallel"]["tensor_parallel_size"] == 4
    decision = document["decisions"][0]
    assert decision["name"] == "parallel_sizes"
    assert "no sizes named" in decision["source"]
    named = size(llama, "--gpu", "H100:4", "--tp", "2")
    assert named["parallel"]["tensor_parallel_size"] == 2
    assert named["decisions"][0]["name"] != "parallel_sizes"


def test_what_has_no_effect_is_said(size, llama):
    document = size(
        llama, "--gpu", "H100:4", "--tp=1", "--kv-memory=8G", "--gpu-memory-utilization=0.5"
    )
    assert any("3 of 4 devices are not used" in text for text in document["warnings"])
    assert any("--gpu-memory-utilization has no effect" in text for text in document["warnings"])
    assert document["gpu"]["count"] == 4
    assert size(llama, "--gpu", "H100", "--tp", "8")["gpu"]["count"] == 8


def test_vllms_names_and_the_short_ones_mean_the_same(size, llama):
    long = size(
        llama,
        "--tensor-parallel-size=2",
        "--pipeline-parallel-size=2",
        "--data-parallel-size=2",
        "--kv-cache-dtype=fp8",
        "--kv-cache-memory-bytes=2147483648",
    )
    short = size(
        llama, "--tp", "2", "--pp", "2", "--dp", "2", "--kv-dtype", "fp8", "--kv-memory", "2G"
    )
    assert long == short


def write_checkpoint(place: Path, *, num_layers: int) -> None:
    """The headers of a safetensors file for LLAMA cut to two layers; its data is a hole."""
    config = LLAMA | {"num_hidden_layers": 2, "vocab_size": 512}
    (place / "config.json").write_text(json.dumps(config))
    spec = load(place).anatomy.spec
    header, end = {}, 0
    for tensor in expected_tensors(spec):
        if tensor.layer is not None and tensor.layer >= num_layers:
            continue
        start, end = end, end + 2 * tensor.num_elements
        header[tensor.name] = {
            "dtype": "BF16",
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    with (place / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def test_headers_that_agree_with_the_configuration_are_shown(size, tmp_path):
    write_checkpoint(tmp_path, num_layers=2)
    document = size(str(tmp_path))
    assert document["checkpoint"]["bytes"] == document["weights_bytes"]
    assert document["checkpoint"]["implied_bytes"] == document["weights_bytes"]
    assert not [w for w in document["warnings"] if "headers" in w]


def test_headers_that_disagree_are_warned_of(size, tmp_path):
    write_checkpoint(tmp_path, num_layers=1)
    document = size(str(tmp_path))
    assert [w for w in document["warnings"] if "headers hold" in w]


def test_a_workload_is_answered(size, llama):
    arguments = ("--platform", "cpu", "--kv-memory", "4G", "--context", "4096")
    workload = size(llama, *arguments, "--concurrency", "100")["workload"]
    assert workload["fits"] is False
    # 4 GiB less the null block, over 32 blocks of 128 tokens each.
    assert workload["holds"] == (4 * 2**30 // (128 * 32768) - 1) // 32
    assert workload["replicas"] == -(-100 // workload["holds"])
    assert workload["devices"] == workload["replicas"]
    assert size(llama, *arguments, "--concurrency", "31")["workload"]["fits"] is True


def test_the_table_shows_exact_bytes_beside_human_ones(capsys, llama):
    assert main(["size", llama, "--gpu", "H100", "--context", "1000", "--concurrency", "9"]) == 0
    table = capsys.readouterr().out
    assert "2,471,628,800" in table
    assert "2.30 GiB" in table
    assert "fits: yes" in table
    assert "9 requests of 1,000 tokens each" in table
    assert main(["size", llama]) == 0
    assert "cannot be told" in capsys.readouterr().out


def test_the_json_is_one_line_whatever_the_terminal(capsys, llama, monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    assert main(["size", llama, "--gpu", "H100", "--output", "json"]) == 0
    assert capsys.readouterr().out.count("\n") == 1


def test_names_from_files_cannot_steer_a_terminal(capsys, tmp_path):
    config = LLAMA | {"surprise_ssm_\x1b[2J": 3, "model_type": "x\x1b[31m"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    main(["size", str(tmp_path), "--gpu", "H100"])
    printed = capsys.readouterr()
    assert "\x1b" not in printed.out + printed.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--gpu", "H900"], "H900"),
        (["--gpu", "H100:0"], "number of devices"),
        (["--tp", "3"], "do not divide by 3"),
        (["--tp", "0"], "whole number"),
        (["--tp", "-1"], "whole number"),
        (["--tp", "2.5"], "whole number"),
        (["--tp", "9" * 5000], "whole number"),
        (["--gpu", "H100:2", "--tp", "4"], "4 ranks"),
        (["--gpu", "H100", "--platform", "cpu"], "not a cpu device"),
        (["--gpu-memory-utilization", "1.5"], "fraction"),
        (["--gpu-memory-utilization", "nan"], "fraction"),
        (["--kv-memory", "-5"], "whole number"),
        (["--kv-memory", "1.5G"], "whole number"),
        (["--kv-memory", "1e400g"], "whole number"),
        (["--block-size", "x"], "whole number"),
        (["--max-model-len", "zero"], "whole number"),
        (["--kv-cache-dtype", "fp8_e4m3fn", "--kv-memory", "1G"], "fp8_e4m3fn"),
        (["--engine", "sglang"], "sglang"),
        (["--engine-version", "0.33"], "0.33"),
        (["--engine-version", ""], "vllm"),
        (["--platform", "tpu"], "tpu"),
        (["--context", "100"], "--kv-cache-memory-bytes"),
        (["--context", "200000", "--kv-memory", "1G"], "131,072"),
        (["--tensor"], "--tensor"),
        (["--output", "xml"], "xml"),
        (["--enable-expert-parallel"], "no experts"),
    ],
)
def test_bad_flags_are_one_sentence_and_exit_code_2(capsys, llama, arguments, words):
    assert main(["size", llama, *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert words in printed.err
    assert printed.err.startswith("ullage size: ")
    assert len(printed.err) < 400


@pytest.mark.parametrize("missing", ["nowhere", "nowhere/config.json", "\x00"])
def test_a_model_that_is_not_there_is_one_sentence(capsys, tmp_path, missing):
    assert main(["size", f"{tmp_path}/{missing}"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1


texts = st.text(max_size=12) | st.integers().map(str) | st.floats().map(str)


@given(
    flag=st.sampled_from(
        [
            "--gpu",
            "--tp",
            "--pp",
            "--dp",
            "--kv-dtype",
            "--kv-memory",
            "--max-model-len",
            "--max-num-seqs",
            "--max-num-batched-tokens",
            "--block-size",
            "--gpu-memory-utilization",
            "--engine",
            "--engine-version",
            "--platform",
            "--dtype",
            "--context",
            "--concurrency",
        ]
    ),
    value=texts,
)
@settings(deadline=None, max_examples=200)
def test_whatever_a_flag_says_is_sized_or_refused_in_one_sentence(flag, value):
    import contextlib
    import io
    import tempfile

    with tempfile.TemporaryDirectory() as place:
        Path(place, "config.json").write_text(json.dumps(LLAMA))
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            arguments = ["size", place, "--kv-memory", "1G", "--output", "json"]
            code = main([*arguments, f"{flag}={value}"])
    if code == 0:
        json.loads(out.getvalue())
        assert err.getvalue() == ""
    else:
        assert code == 2
        assert out.getvalue() == ""
        assert len(err.getvalue().splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("8192", 8192),
        ("1k", 1000),
        ("1K", 1024),
        ("25.6k", 25600),
        ("2g", 2 * 10**9),
        ("2G", 2 * 2**30),
        (" 1t ", 10**12),
        ("1T", 2**40),
    ],
)
def test_numbers_are_read_as_vllm_reads_them(text, value):
    assert parse_integer(text) == value


@pytest.mark.parametrize("text", ["1.5G", "k", "G", "", "1kk", "0x10", "-.k", "1e3", "infk"])
def test_other_numbers_are_not_read(text):
    with pytest.raises(ValueError):
        parse_integer(text)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (-(2**31), "-2.00 GiB"), (16e9, "14.9 GiB")],
)
def test_human_bytes(count, text):
    assert human_bytes(count) == text


@pytest.mark.parametrize("width", [80, 96, 120])
@pytest.mark.parametrize("flags", [(), ("--context", "2000", "--concurrency", "50")])
def test_the_table_keeps_to_the_columns_of_a_terminal(size, llama, width, flags):
    made = size(llama, "--gpu", "H100-SXM:2", *flags)
    lines = table_lines(made, width)
    assert max(map(len, lines)) <= width
    words = " ".join(lines).split()
    assert f"{made['kv_cache_tokens']:,}" in words
    assert f"{made['num_blocks']:,}" in words


def test_a_workload_says_where_its_answer_is_from(size, llama):
    made = size(llama, "--platform", "cpu", "--kv-memory", "4G", "--context", "4096")
    source = made["provenance"]["workload"]
    assert (
        source == "engine: vllm 0.32 rule, verified on CPU; KV bytes from --kv-cache-memory-bytes"
    )
    assert any(source in line for line in table_lines(made))
    assert "workload" not in size(llama, "--gpu", "H100-SXM")["provenance"]


def test_without_a_terminal_every_row_is_one_line_and_exact(size, llama):
    made = size(llama, "--gpu", "H100-SXM")
    lines = table_lines(made)
    assert any(f"{made['weights_bytes']:,}" in line for line in lines)
    assert any(made["ranges"]["num_blocks"]["reason"] in line for line in lines)


@given(st.one_of(st.integers(min_value=0), st.floats(min_value=0, allow_nan=False)))
def test_human_bytes_has_a_word_for_every_number(count):
    text = human_bytes(count)
    assert text.endswith("B") and len(text) < 16
    number, unit = text.split(" ")
    power = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"].index(unit)
    if count < 2**70:
        assert abs(float(number) * 1024**power - count) <= 0.05 * 1024**power + 0.005 * count + 1


MAMBA = {
    "architectures": ["MambaForCausalLM"],
    "model_type": "mamba",
    "hidden_size": 64,
    "intermediate_size": 128,
    "state_size": 16,
    "conv_kernel": 4,
    "time_step_rank": 4,
    "num_hidden_layers": 2,
    "vocab_size": 512,
    "torch_dtype": "bfloat16",
}


def test_a_model_of_states_takes_whatever_length_is_asked_for(size, tmp_path):
    """vLLM limits nothing where no key names a length, and assumes 2,048 where no flag does."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(MAMBA))
    flags = (str(path), "--kv-memory", "1G", "--platform", "cpu")
    assert size(*flags, "--max-model-len", "8192")["refusals"] == []
    unsaid = {d["name"]: d for d in size(*flags)["decisions"]}["max_model_len"]
    assert unsaid["value"] == 2048 and unsaid["source"].startswith("vLLM")
