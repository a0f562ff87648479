"""A source whose snapshots also tell the KV bytes that follow from a model.

Holds the wrapping; the derivation is `telemetry.kv_bytes`'s.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ullage.telemetry.kv_bytes import ModelBytes
from ullage.telemetry.scrape import Look
from ullage.watch.watcher import PartlyKnown

if TYPE_CHECKING:
    from ullage.anatomy.spec import Anatomy
    from ullage.watch.watcher import Source


class ModelledSource:
    """`source`, with bytes where an engine tells none: all its replicas serve that model."""

    def __init__(self, source: Source, anatomy: Anatomy) -> None:
        self._source = source
        self._bytes = ModelBytes(anatomy)

    async def look(self) -> tuple[Look, ...]:
        """The source's looks."""
        try:
            return self._told(await self._source.look())
        except PartlyKnown as raised:
            raise PartlyKnown(str(raised), self._told(raised.looks)) from raised

    def _told(self, looks: tuple[Look, ...]) -> tuple[Look, ...]:
        return tuple(
            look if look.snapshot is None else replace(look, snapshot=self._bytes.of(look.snapshot))
            for look in looks
        )
