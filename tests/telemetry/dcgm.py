"""Pages as DCGM's exporter writes them.

Holds the writing, by the template of dcgm-exporter's rendermetrics; no exporter ran here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

INT64_BLANK = 0x7FFFFFFFFFFFFFF0
NOT_SUPPORTED = INT64_BLANK + 2
# An H100 at work, by the names that its default counters have had until 4.8.
USUAL: Mapping[str, float] = {
    "DCGM_FI_DEV_SM_CLOCK": 1755,
    "DCGM_FI_DEV_MEM_CLOCK": 2619,
    "DCGM_FI_DEV_MEMORY_TEMP": 71,
    "DCGM_FI_DEV_GPU_TEMP": 62,
    "DCGM_FI_DEV_POWER_USAGE": 611.38,
    "DCGM_FI_DEV_GPU_UTIL": 97,
    "DCGM_FI_DEV_XID_ERRORS": 0,
    "DCGM_FI_DEV_FB_FREE": 5721,
    "DCGM_FI_DEV_FB_USED": 75226,
    "DCGM_FI_DEV_FB_RESERVED": 612,
    "DCGM_FI_PROF_GR_ENGINE_ACTIVE": 0.962,
}


def uuid_of(number: int) -> str:
    return f"GPU-604ac76c-d9cf-fef3-62e9-{number:012x}"


def labels_of(
    gpu: int | str = 0,
    *,
    uuid: str | None = None,
    name: str = "NVIDIA H100 80GB HBM3",
    host: str = "gpu-1",
    mig: tuple[str, str] | None = None,
    pod: str = "",
    **more: str,
) -> dict[str, str]:
    """One GPU's labels in the exporter's order; `mig` is (profile, instance), `pod`
    namespace/name."""
    number = int(gpu)
    labels = {
        "gpu": str(gpu),
        "UUID": uuid_of(number) if uuid is None else uuid,
        "pci_bus_id": f"00000000:{number:02X}:00.0",
        "device": f"nvidia{number}",
        "modelName": name,
    }
    if mig is not None:
        labels |= {"GPU_I_PROFILE": mig[0], "GPU_I_ID": mig[1]}
    labels |= {"Hostname": host} if host else {}
    namespace, _, pod_name = pod.partition("/")
    if pod:
        labels |= {"container": "vllm", "namespace": namespace, "pod": pod_name}
    return {name: text for name, text in (labels | more).items() if text}


def dcgm_page(
    *gpus: Mapping[str, str], values: Mapping[str, float] | None = None, **changed: float
) -> bytes:
    """A page that tells the same numbers of each; `changed` are other or further ones."""
    told = {**(USUAL if values is None else values), **changed}
    return page_of_each((labels, told) for labels in gpus)


def page_of_each(gpus: Iterable[tuple[Mapping[str, str], Mapping[str, float]]]) -> bytes:
    """A page with numbers of its own for each: metric by metric, as the exporter writes them."""
    each = list(gpus)
    lines: list[str] = []
    for metric in dict.fromkeys(name for _, values in each for name in values):
        lines += [f"# HELP {metric} Told by DCGM.", f"# TYPE {metric} gauge"]
        for labels, values in each:
            if metric in values:
                inner = ",".join(f'{name}="{text}"' for name, text in labels.items())
                lines.append(f"{metric}{{{inner}}} {values[metric]}")
    return "\n".join((*lines, "")).encode()
