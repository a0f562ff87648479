"""Each format of deployment file gives the same launch for the same server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ullage.costs.deployment import Deployment
from ullage.errors import BadInput
from ullage.launch.documents import choose_launch, read_launches
from ullage.launch.open_values import OpenValue
from ullage.launch.settings import SETTINGS, deployment_of, unpriced

ARGS = ["org/m", "--tensor-parallel-size", "2", "--max-model-len=8k", "--kv-cache-dtype", "fp8"]
YAML_ARGS = json.dumps(ARGS)
POD = f"""\
spec:
      containers:
        - name: c
          image: vllm/vllm-openai:v0.32.0
          args: {YAML_ARGS}
"""
STACK = """\
servingEngineSpec:
  vllmApiKey: abc
  modelSpec:
    - name: c
      repository: vllm/vllm-openai
      tag: v0.32.0
      modelURL: org/m
      requestGPU: 2
      vllmConfig:
        tensorParallelSize: 2
        maxModelLen: 8000
        extraArgs: ["--kv-cache-dtype", "fp8"]
"""
SAME = {
    "a.sh": f"#!/bin/bash\nset -e\nexec vllm serve {' '.join(ARGS)}\n",
    "b.sh": f"docker run --gpus all -e A=b -p 8000:8000 vllm/vllm-openai:v0.32.0 {' '.join(ARGS)}",
    "c.sh": "python3 -m vllm.entrypoints.openai.api_server --model org/m " + " ".join(ARGS[1:]),
    "d.sh": f"bash -lc 'vllm serve {' '.join(ARGS)}'",
    "e.service": f"[Service]\nExecStart=/opt/bin/vllm serve {' '.join(ARGS)}\n",
    "Dockerfile": f"FROM vllm/vllm-openai:v0.32.0\nCMD {YAML_ARGS}\n",
    "f.dockerfile": f'FROM x\nENTRYPOINT ["vllm", "serve"]\nCMD {YAML_ARGS}\n',
    "g.dockerfile": f"FROM x\nCMD vllm serve \\\n  {' '.join(ARGS)}\n",
    "compose.yaml": "services:\n  c:\n    image: vllm/vllm-openai:v0.32.0\n"
    f"    command: >\n      {' '.join(ARGS)}\n",
    "compose2.yml": "services:\n  c:\n    image: vllm/vllm-openai:v0.32.0\n"
    f"    command: {YAML_ARGS}\n",
    "pod.yaml": f"apiVersion: v1\nkind: Pod\n{POD}",
    "deployment.yaml": "apiVersion: v1\nkind: Service\n---\napiVersion: apps/v1\nkind: Deployment\n"
    f"spec:\n  template:\n    {POD}",
    "lws.yaml": "apiVersion: leaderworkerset.x-k8s.io/v1\nkind: LeaderWorkerSet\nspec:\n"
    "  leaderWorkerTemplate:\n    leaderTemplate:\n      spec:\n        containers:\n"
    f"          - name: c\n            image: vllm/vllm-openai\n            args: {YAML_ARGS}\n",
    "shell-pod.yaml": "apiVersion: v1\nkind: Pod\nspec:\n  containers:\n    - name: c\n"
    "      image: x\n      command: [sh, -c]\n      args:\n        - |\n          ulimit -n 9\n"
    f"          exec vllm serve {' '.join(ARGS)}\n",
    "values.yaml": STACK,
    "chart.yaml": "image:\n  repository: vllm/vllm-openai\n  tag: v0.32.0\n"
    f"  command: [vllm, serve, {YAML_ARGS[1:-1]}]\n",
    "other-chart.yaml": f"server:\n  image: vllm/vllm-openai\n  args: {YAML_ARGS}\n",
}  # fmt: skip


def read(tmp_path, name: str, text: str):
    path = tmp_path / name
    path.write_text(text)
    return choose_launch(read_launches(str(path)), None, str(path))


@pytest.mark.parametrize("name", SAME)
def test_every_format_says_the_same(name, tmp_path):
    launch = read(tmp_path, name, SAME[name])
    made = deployment_of(launch, Deployment())
    assert (launch.engine, launch.model) == ("vllm", "org/m")
    assert (made.parallel.tensor, made.max_model_len, made.kv_cache_dtype) == (2, 8000, "fp8")
    line = launch.given("--kv-cache-dtype").line
    assert "--kv-cache-dtype" in SAME[name].splitlines()[line - 1]


def test_the_image_says_the_version(tmp_path):
    assert read(tmp_path, "pod.yaml", SAME["pod.yaml"]).version == "0.32.0"
    assert read(tmp_path, "a.sh", SAME["a.sh"]).version is None


def test_sglang(tmp_path):
    text = "python -m sglang.launch_server --model-path org/m --tp 4 --context-length 9000\n"
    launch = read(tmp_path, "s.sh", text)
    made = deployment_of(launch, Deployment())
    assert (launch.engine, launch.model, made.engine) == ("sglang", "org/m", "sglang")
    assert (made.parallel.tensor, made.max_model_len, made.engine_version) == (4, 9000, "unknown")


@pytest.mark.parametrize(
    ("command", "model"),
    [
        ("sglang serve org/m --tp 2", "org/m"),
        ("sglang serve --model-type llm org/m --tp 2", "org/m"),
        ("sglang serve --model-path org/m --model-type=llm --tp 2", "org/m"),
        ("sglang serve --model org/m --tensor-parallel-size=2", "org/m"),
        ("python3 -m sglang.launch_server --tp 2", None),
    ],
)
def test_how_sglang_is_told_its_model(command, model, tmp_path):
    launch = read(tmp_path, "s.sh", command)
    assert (launch.engine, launch.model) == ("sglang", model)
    assert not launch.strays and not [flag for flag in launch.flags if flag.trouble]
    assert deployment_of(launch, Deployment()).parallel.tensor == 2


def test_sglang_takes_a_model_as_its_first_word_only(tmp_path):
    launch = read(tmp_path, "s.sh", "sglang serve --tp 2 org/m\n")
    assert launch.model is None and [word.text for word in launch.strays] == ["org/m"]


@pytest.mark.parametrize(
    ("flags", "ranks"),
    [
        ("--tp 8 --dp-size 4", 32),
        ("--tp 8 --dp-size 4 --enable-dp-attention", 8),
        ("--tp 8 --attn-dp-size 4", 8),
        ("--tp 4 --pp-size 2 --ep 4", 8),
    ],
)
def test_groups_inside_the_tensor_ranks_ask_for_no_device(flags, ranks, tmp_path):
    launch = read(tmp_path, "s.sh", f"sglang serve m {flags}\n")
    sizes = deployment_of(launch, Deployment()).parallel
    assert sizes.tensor * sizes.pipeline * sizes.data == ranks


def test_sglang_flags_are_those_of_one_version(tmp_path):
    """A flag may be gone two patches later, so another patch is not judged by this one's list."""
    from ullage.anatomy import load
    from ullage.audit import find_rule, judge, prepare

    own = Path(__file__).parents[1] / "audit" / "models" / "llama.json"
    for tag, state in (("v0.5.23-cu129", "fired"), ("v0.5.4", "not_evaluable")):
        text = "apiVersion: v1\nkind: Pod\nspec:\n  containers:\n"
        text += f"    - image: lmsysorg/sglang:{tag}\n"
        text += "      command: [sglang, serve, m, --cuda-graph-max-bs, '8']\n"
        launch = read(tmp_path, "p.yaml", text)
        subject, _ = prepare(load(own), deployment_of(launch, Deployment()), launch=launch)
        assert judge(find_rule("A161"), subject).state == state


def test_what_surrounds_a_pod(tmp_path):
    text = """\
apiVersion: v1
kind: Pod
spec:
  terminationGracePeriodSeconds: 90
  volumes: [{name: s, emptyDir: {medium: Memory, sizeLimit: 2Gi}}]
  containers:
    - name: sidecar
      image: busybox
    - name: c
      image: vllm/vllm-openai
      args: [m, --port, $(PORT), --api-key, $(KEY)]
      env: [{name: PORT, value: "9"}, {name: KEY, valueFrom: {secretKeyRef: {name: a, key: b}}}]
      volumeMounts: [{name: s, mountPath: /dev/shm}]
      resources: {limits: {nvidia.com/gpu: "4"}}
      lifecycle: {preStop: {exec: {command: [sh, -c, sleep 20]}}}
      livenessProbe: {initialDelaySeconds: 60, periodSeconds: 5, failureThreshold: 4}
"""
    launch = read(tmp_path, "p.yaml", text)
    host = launch.host
    assert (host.gpus, host.shm, host.shm_bytes) == (4, "limited", 2 << 30)
    assert (host.grace_s, host.pre_stop_s, host.liveness.patience_s) == (90, 20, 80)
    assert host.startup is None and host.probes_known
    assert launch.given("--port").values == ("9",) and launch.given("--api-key").open == "$(KEY)"


def test_the_production_stack_turns_prefix_caching_off_unless_told(tmp_path):
    launch = read(tmp_path, "values.yaml", STACK)
    assert deployment_of(launch, Deployment()).enable_prefix_caching is False
    assert launch.host.gpus == 2 and launch.names_variable("VLLM_API_KEY")
    told = STACK.replace("vllmConfig:\n", "vllmConfig:\n        enablePrefixCaching: true\n")
    assert deployment_of(read(tmp_path, "v2.yaml", told), Deployment()).enable_prefix_caching


def test_a_value_that_is_hidden_is_never_guessed(tmp_path):
    launch = read(tmp_path, "a.sh", "vllm serve m -tp $TP --max-num-seqs nine --max-model-len 5\n")
    made = deployment_of(launch, Deployment())
    assert made.max_model_len == 5 and made.parallel.pipeline == 1
    for read_field in (lambda: made.parallel.tensor, lambda: made.max_num_seqs):
        with pytest.raises(OpenValue):
            read_field()


@pytest.mark.parametrize("hider", ['"$@"', "$EXTRA", "--config more.yaml"])
def test_flags_that_may_be_elsewhere_are_not_absent(hider, tmp_path):
    launch = read(tmp_path, "a.sh", f"vllm serve m -tp 2 {hider}\n")
    made = deployment_of(launch, Deployment())
    assert made.parallel.tensor == 2
    with pytest.raises(OpenValue):
        _ = made.max_model_len


def test_flags_given_beside_the_file_win(tmp_path):
    launch = read(tmp_path, "a.sh", "vllm serve m --max-model-len $LEN --max-num-seqs 4\n")
    made = deployment_of(launch, Deployment(max_model_len=77))
    assert (made.max_model_len, made.max_num_seqs) == (77, 4)


def test_every_setting_is_a_flag_and_every_uncounted_flag_too(tmp_path):
    from ullage.launch.flags import known_flags
    from ullage.launch.settings import UNPRICED

    for engine, table in SETTINGS.items():
        assert {setting.flag for setting in table} <= {f.name for f in known_flags(engine).values()}
    assert {f.name for f in known_flags("vllm").values()} >= UNPRICED
    launch = read(tmp_path, "a.sh", "vllm serve m --enable-lora --quantization awq\n")
    assert unpriced(launch) == ("--enable-lora", "--quantization")
    assert unpriced(launch, "awq") == ("--enable-lora",)


def test_several_servers_need_a_name(tmp_path):
    path = tmp_path / "two.sh"
    path.write_text("vllm serve a &\nvllm serve b &\nvllm serve c --headless\n")
    launches = read_launches(str(path))
    assert [launch.name for launch in launches] == ["command", "command-2", "command-3"]
    with pytest.raises(BadInput, match="starts 2 servers"):
        choose_launch(launches, None, str(path))
    assert choose_launch(launches, "command-2", str(path)).model == "b"
    assert [launch.headless for launch in launches] == [False, False, True]


BOMB = "a0: &a0 [x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12)
)
HOSTILE = {
    "bomb.yaml": (BOMB, "aliases"),
    "loop.yaml": ("a: &a [*a]\n", "holds itself"),
    "deep.yaml": ("[" * 5000, "nest"),
    "deeper.yaml": ("a:\n" + "".join(" " * i + "- \n" for i in range(1, 90)), ""),
    "twice.yaml": ("a: 1\na: 2\n", "twice"),
    "object.yaml": ("!!python/object/apply:os.system ['touch /tmp/owned']\n", "starts no"),
    "chart.yaml": ("args:\n{{- range .Values.x }}\n", "helm template"),
    "control.yaml": ("a: \x01\n", ""),
    "number.yaml": ("? [1, 2]\n: 3\n", "no text"),
    "nothing.sh": ("echo hello\n", "starts no server"),
    "quote.sh": ("vllm serve 'm\n", "never ends"),
    "empty.yaml": ("", "starts no"),
    "many.yaml": ("- containers: [{image: vllm, args: [a]}]\n" * 300, "more than 200 servers"),
    "long.yaml": ("- a\n" * 60_000, "more than 50,000 values"),
    "Dockerfile": ("FROM x\nCMD [1, 2]\n", "texts"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_give_one_sentence(name, tmp_path):
    text, says = HOSTILE[name]
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(BadInput) as caught:
        read_launches(str(path))
    assert says in str(caught.value) and len(str(caught.value).splitlines()) == 1


def test_files_that_are_no_text(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    for bad in (path, tmp_path / "none", tmp_path):
        with pytest.raises(BadInput):
            read_launches(str(bad))
    path.write_bytes(b"a" * (2 << 20))
    with pytest.raises(BadInput, match="more than"):
        read_launches(str(path))


SCALAR = st.one_of(
    st.text(max_size=8),
    st.integers(),
    st.booleans(),
    st.none(),
    st.just("vllm"),
    st.just("serving.kserve.io/v1"),
    st.just("InferenceService"),
)
KEYS = st.sampled_from(
    ["containers", "args", "command", "image", "env", "name", "value", "spec", "services", "kind",
     "apiVersion", "servingEngineSpec", "modelSpec", "vllmConfig", "resources", "limits", "volumes",
     "livenessProbe", "extraArgs", "nvidia.com/gpu", "deploy", "ports", "environment",
     "modelArtifacts", "decode", "parallelism", "modelCommand", "applications", "llm_configs",
     "engine_kwargs", "serveConfigV2", "predictor", "model", "modelFormat", "template"]
)  # fmt: skip
TREES = st.recursive(
    SCALAR,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=5),
    max_leaves=30,
)


@settings(deadline=None)
@given(tree=TREES)
def test_any_tree_gives_launches_or_one_sentence(tree, tmp_path_factory):
    path = tmp_path_factory.mktemp("tree") / "x.json"
    path.write_text(json.dumps(tree))
    try:
        launches = read_launches(str(path))
    except BadInput as error:
        assert len(str(error).splitlines()) == 1
    else:
        for launch in launches:
            deployment_of(launch, Deployment())
