"""Every dialect, in the order in which documents list them."""

from __future__ import annotations

from ullage.telemetry.dialects.llamacpp import LLAMACPP
from ullage.telemetry.dialects.lmdeploy import LMDEPLOY
from ullage.telemetry.dialects.sglang import SGLANG
from ullage.telemetry.dialects.source import Dialect
from ullage.telemetry.dialects.tgi import TGI
from ullage.telemetry.dialects.triton import TRITON
from ullage.telemetry.dialects.trtllm import TRTLLM
from ullage.telemetry.dialects.ullage import ULLAGE
from ullage.telemetry.dialects.vllm import VLLM

DIALECTS: tuple[Dialect, ...] = (
    VLLM,
    SGLANG,
    TRTLLM,
    TRITON,
    TGI,
    LMDEPLOY,
    LLAMACPP,
    ULLAGE,
)
