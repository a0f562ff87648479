"""Every dialect, in the order in which documents list them."""

from __future__ import annotations

from ullage.telemetry.dialects.source import Dialect
from ullage.telemetry.dialects.ullage import ULLAGE
from ullage.telemetry.dialects.vllm import VLLM

DIALECTS: tuple[Dialect, ...] = (VLLM, ULLAGE)
