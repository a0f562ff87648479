"""Where a download of the hub's tools lies on this machine: ORG/NAME@revision → a directory.

Holds the layout of that cache (huggingface_hub 2.4: models--ORG--NAME/refs, snapshots). Nothing is
written there, and nothing is fetched.
"""

from __future__ import annotations

import os
from pathlib import Path

MAX_REF_BYTES = 200


def cache_folder() -> Path:
    """HF_HUB_CACHE, else HF_HOME/hub, else the user's cache directory."""
    named = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    if named:
        return Path(named).expanduser()
    home = os.environ.get("HF_HOME")
    if not home:
        caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        home = str(Path(caches, "huggingface"))
    return Path(home).expanduser() / "hub"


def cached_snapshot(organisation: str, name: str, revision: str) -> Path | None:
    """The directory of that revision (a branch, a tag or a commit), None when it is not there."""
    folder = cache_folder() / f"models--{organisation}--{name}"
    commit = _commit(folder, revision)
    snapshot = folder / "snapshots" / commit
    return snapshot if snapshot.is_dir() and any(snapshot.iterdir()) else None


def _commit(folder: Path, revision: str) -> str:
    """The commit that a branch or tag stood for when it was downloaded, else the word itself."""
    try:
        with (folder / "refs" / revision).open("rb") as stream:
            text = stream.read(MAX_REF_BYTES).decode("ascii").strip()
    except (OSError, ValueError):
        return revision
    return text if text.isalnum() else revision
