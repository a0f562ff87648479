"""Charts and custom resources are recognised by their shape; what they hide stays unknown."""

from __future__ import annotations

from pathlib import Path

import pytest

from ullage.anatomy import load
from ullage.audit import find_rule, judge, prepare
from ullage.costs.deployment import Deployment
from ullage.errors import BadInput
from ullage.launch.documents import choose_launch, read_launches
from ullage.launch.open_values import OpenValue
from ullage.launch.settings import deployment_of

LLAMA = Path(__file__).parents[1] / "audit" / "models" / "llama.json"

LLM_D = """\
multinode: false
modelArtifacts:
  uri: "hf://org/m"
  name: served
accelerator: {type: nvidia}
decode:
  create: true
  parallelism: {tensor: 2, data: 1}
  containers:
    - name: vllm
      image: vllm/vllm-openai:v0.32.0
      modelCommand: vllmServe
      args:
        - "--max-model-len=8000"
        - "--kv-cache-dtype"
        - "fp8"
      volumeMounts: [{name: shm, mountPath: /dev/shm}]
      extraConfig:
        startupProbe: {periodSeconds: 30, failureThreshold: 60}
  volumes: [{name: shm, emptyDir: {medium: Memory, sizeLimit: 2Gi}}]
prefill:
  create: false
"""
RAY = """\
applications:
- name: llms
  import_path: ray.serve.llm:build_openai_app
  route_prefix: "/"
  args:
    llm_configs:
      - model_loading_config: {model_id: served, model_source: org/m}
        accelerator_type: A10G
        runtime_env: {env_vars: {VLLM_USE_V1: "1"}}
        engine_kwargs:
          tensor_parallel_size: 2
          max_model_len: 8000
          kv_cache_dtype: fp8
          enable_prefix_caching: false
          trust_remote_code: false
          enforce_eager: true
          hf_overrides: {max_position_embeddings: 16384}
"""
RAY_SERVICE = "apiVersion: ray.io/v1\nkind: RayService\nspec:\n  serveConfigV2: |\n" + "".join(
    f"    {line}\n" for line in RAY.splitlines()
)
RUNTIME = """\
apiVersion: serving.kserve.io/v1alpha1
kind: ServingRuntime
metadata: {name: rt}
spec:
  volumes: [{name: shm, emptyDir: {medium: Memory, sizeLimit: 2Gi}}]
  containers:
    - name: kserve-container
      image: vllm/vllm-openai:v0.32.0
      command: [python, -m, vllm.entrypoints.openai.api_server]
      args: ["--port=8080", "--model=/mnt/models", "--served-model-name={{.Name}}"]
      volumeMounts: [{name: shm, mountPath: /dev/shm}]
"""
SERVICE = """\
apiVersion: serving.kserve.io/v1beta1
kind: InferenceService
metadata: {name: svc}
spec:
  predictor:
    model:
      modelFormat: {name: vLLM}
      runtime: rt
      storageUri: hf://org/m
      args: [--tensor-parallel-size=2, --max-model-len, "8000", --kv-cache-dtype=fp8]
      resources: {limits: {nvidia.com/gpu: "2"}}
"""
LLM_SERVICE = """\
apiVersion: serving.kserve.io/v1alpha1
kind: LLMInferenceService
metadata: {name: svc}
spec:
  model: {uri: "hf://org/m", name: served}
  template:
    containers:
      - name: main
        image: vllm/vllm-openai:v0.32.0
        env:
          - {name: VLLM_ADDITIONAL_ARGS,
             value: "--tensor-parallel-size 2 --max-model-len 8000 --kv-cache-dtype fp8"}
"""
GROUP = """\
apiVersion: leaderworkerset.x-k8s.io/v1
kind: LeaderWorkerSet
metadata: {name: g}
spec:
  leaderWorkerTemplate:
    size: 2
    leaderTemplate:
      spec:
        containers:
          - name: leader
            image: vllm/vllm-openai:v0.32.0
            command: [sh, -c, "ray start --head; vllm serve org/m --tensor-parallel-size 2
              --pipeline-parallel-size 4 --max-model-len 8000 --kv-cache-dtype fp8"]
            resources: {limits: {nvidia.com/gpu: 4}}
    workerTemplate:
      spec:
        containers:
          - {name: worker, image: x, command: [sh, -c, "ray start --block"]}
"""
SHAPES = {
    "llm-d.yaml": LLM_D,
    "serve.yaml": RAY,
    "ray-service.yaml": RAY_SERVICE,
    "kserve.yaml": f"{RUNTIME}---\n{SERVICE}",
    "kserve-alone.yaml": SERVICE,
    "llm-service.yaml": LLM_SERVICE,
    "group.yaml": GROUP,
}


def read(place: Path, name: str, text: str):
    path = place / name
    path.write_text(text)
    return choose_launch(read_launches(str(path)), None, str(path))


@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_says_the_same(name, tmp_path):
    launch = read(tmp_path, name, SHAPES[name])
    made = deployment_of(launch, Deployment())
    assert (launch.engine, launch.model, launch.model_open) == ("vllm", "org/m", "")
    assert (made.parallel.tensor, made.max_model_len, made.kv_cache_dtype) == (2, 8000, "fp8")
    line = SHAPES[name].splitlines()[launch.given("--kv-cache-dtype").line - 1]
    place = {"llm-service.yaml": "name: main", "group.yaml": "command:"}
    assert place.get(name, "kv") in line.replace("_", "-")
    assert not [flag for flag in launch.flags if flag.trouble]


def test_llm_d_gives_a_device_to_each_rank_and_writes_the_sizes(tmp_path):
    launch = read(tmp_path, "v.yaml", LLM_D)
    assert (launch.host.gpus, launch.host.shm_bytes, launch.version) == (2, 2 << 30, "0.32.0")
    assert launch.host.startup.patience_s == 1800
    assert launch.given("--served-model-name").values == ("served",)
    wide = LLM_D.replace("{tensor: 2, data: 1}", "{tensor: 1, data: 8, workers: 2}")
    wide = wide.replace("multinode: false", "multinode: true")
    launch = read(tmp_path, "w.yaml", wide)
    assert launch.given("--data-parallel-size").values == ("8",)
    assert launch.given("--data-parallel-size-local").values == ("4",)
    assert (launch.host.gpus, launch.host.pods) == (4, 2)


def test_llm_d_hides_what_it_cannot_say(tmp_path):
    text = LLM_D.replace("tensor: 2", 'tensor: "{{ x }}"').replace("hf://org/m", "oci://image")
    launch = read(tmp_path, "v.yaml", text)
    assert launch.model_open == "oci://image"
    with pytest.raises(OpenValue, match=r"parallelism\.tensor"):
        _ = deployment_of(launch, Deployment()).parallel.tensor


def test_ray_gives_false_where_there_is_a_flag_for_it(tmp_path):
    launch = read(tmp_path, "serve.yaml", RAY)
    assert launch.given("--enable-prefix-caching").values == ("false",)
    assert launch.given("--trust-remote-code").values == ("false",)
    assert launch.given("--hf-overrides").values == ('{"max_position_embeddings": 16384}',)
    assert launch.headless and launch.variable("VLLM_USE_V1") == "1"


def test_the_runtime_and_the_service_are_one_server(tmp_path):
    path = tmp_path / "k.yaml"
    path.write_text(f"{RUNTIME}---\n{SERVICE}")
    (launch,) = read_launches(str(path))
    assert (launch.name, launch.host.gpus, launch.host.shm_bytes) == ("svc", 2, 2 << 30)
    assert not launch.absent_unknown and launch.given("--port").values == ("8080",)
    path.write_text(RUNTIME)
    (launch,) = read_launches(str(path))
    assert launch.model == "/mnt/models"


HIDERS = [
    ("kserve-alone.yaml", "ServingRuntime rt"),
    ("llm-service.yaml", "LLMInferenceServiceConfig"),
]


@pytest.mark.parametrize(("name", "hider"), HIDERS)
def test_a_service_alone_hides_what_kserve_adds(name, hider, tmp_path):
    launch = read(tmp_path, name, SHAPES[name])
    with pytest.raises(OpenValue, match=hider):
        _ = deployment_of(launch, Deployment()).max_num_seqs
    assert launch.host.shm == "unknown" and not launch.host.probes_known


@pytest.mark.parametrize("name", ["group.yaml", "serve.yaml", "ray-service.yaml"])
def test_ranks_that_several_machines_share_are_not_counted_on_one(name, tmp_path):
    launch = read(tmp_path, name, SHAPES[name])
    subject, _ = prepare(load(LLAMA), deployment_of(launch, Deployment()), launch=launch)
    for rule in ("A173", "A174"):
        finding = judge(find_rule(rule), subject)
        assert finding.state == "not_evaluable" and finding.missing, rule


def test_an_unknown_chart_is_told_what_was_looked_for(tmp_path):
    path = tmp_path / "values.yaml"
    path.write_text("replicaCount: 1\nengine:\n  name: vllm\n")
    with pytest.raises(BadInput) as caught:
        read_launches(str(path))
    said = str(caught.value)
    for word in ("replicaCount, engine", "servingEngineSpec.modelSpec", "modelArtifacts",
                 "llm_configs", "helm template"):  # fmt: skip
        assert word in said


@pytest.mark.parametrize(
    ("old", "new"),
    [("parallelism: {tensor: 2, data: 1}", "parallelism: [1]"), ("uri: \"hf://org/m\"", "uri: [1]"),
     ("containers:", "containers: 3 #"), ("args:", "args: {a: b} #"),
     ("modelCommand: vllmServe", "modelCommand: [x]")],
)  # fmt: skip
def test_broken_values_give_launches_or_one_sentence(old, new, tmp_path):
    assert old in LLM_D
    path = tmp_path / "v.yaml"
    path.write_text(LLM_D.replace(old, new))
    try:
        for launch in read_launches(str(path)):
            deployment_of(launch, Deployment())
    except BadInput as error:
        assert len(str(error).splitlines()) == 1
