"""Which vLLM the plugin knows, and that it is silent unless it was asked for."""

from __future__ import annotations

import ast
import logging
import multiprocessing
import subprocess
import sys
from types import ModuleType

import pytest
from ullage_vllm import plugin, versions

from tests.plugins.conftest import SOURCE


@pytest.mark.parametrize(
    ("version", "minor"),
    [
        ("0.32.0", (0, 32)),
        ("0.33.1rc2", (0, 33)),
        ("0.30.0+cpu", (0, 30)),
        ("0.32.1.dev3+g1234567", (0, 32)),
        ("v0.31.2", (0, 31)),
        ("1.2", (1, 2)),
        ("0.32", (0, 32)),
        ("dev", None),
        ("", None),
        ("0.x", None),
    ],
)
def test_the_minor_version(version: str, minor: tuple[int, int] | None) -> None:
    assert versions.minor(version) == minor


@pytest.mark.parametrize("version", ["0.30.0", "0.31.4", "0.32.0rc1", "0.33.9"])
def test_it_knows_four_minor_versions(version: str) -> None:
    assert versions.objection(version) == ""


@pytest.mark.parametrize("version", ["0.29.3", "0.34.0", "0.3.2", "1.0.0", "dev", "0.330.0"])
def test_it_steps_aside_for_all_others_by_name(version: str) -> None:
    assert version in versions.objection(version)


@pytest.mark.parametrize(
    ("value", "asked"), [(None, False), ("", False), ("0", False), ("true", False), ("1", True)]
)
def test_only_1_asks_for_it(
    monkeypatch: pytest.MonkeyPatch, value: str | None, asked: bool
) -> None:
    monkeypatch.delenv("ULLAGE_VLLM", raising=False)
    if value is not None:
        monkeypatch.setenv("ULLAGE_VLLM", value)
    assert versions.asked_for() is asked


def vllm_of(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """A package `vllm` that has a version and nothing else."""
    package, module = ModuleType("vllm"), ModuleType("vllm.version")
    module.__version__ = version  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", package)
    monkeypatch.setitem(sys.modules, "vllm.version", module)
    monkeypatch.setattr(plugin, "_warned", set())


def test_an_unknown_version_is_told_once_and_nothing_is_added(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    vllm_of(monkeypatch, "0.41.0")
    monkeypatch.setenv("ULLAGE_VLLM", "1")
    caplog.set_level(logging.WARNING)
    plugin.general()
    plugin.general()
    added: list[object] = []
    plugin.endpoint().attach_router(type("App", (), {"add_middleware": added.append}))
    assert added == []
    assert [record.getMessage() for record in caplog.records] == [
        "ullage steps aside: vLLM 0.41.0 is not one that it knows (0.30 to 0.33)"
    ]


def test_a_child_of_the_server_leaves_the_warning_to_its_parent(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    vllm_of(monkeypatch, "0.41.0")
    monkeypatch.setenv("ULLAGE_VLLM", "1")
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: object())
    plugin.general()
    added: list[object] = []
    plugin.endpoint().attach_router(type("App", (), {"add_middleware": added.append}))
    assert (added, caplog.records) == ([], [])


@pytest.mark.parametrize(
    ("named", "parent", "warnings"),
    [(None, None, 1), (["ullage"], None, 0), (["lora", "ullage"], None, 0), (None, object(), 0)],
)
def test_asked_for_without_being_named_it_says_once_that_vllm_loads_no_routes(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    named: list[str] | None,
    parent: object,
    warnings: int,
) -> None:
    vllm_of(monkeypatch, "0.32.0")
    for name in ("vllm.envs", "vllm.v1", "vllm.v1.engine", "vllm.v1.engine.core"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    core = type("EngineCore", (), {})
    monkeypatch.setattr(sys.modules["vllm.v1.engine.core"], "EngineCore", core, raising=False)
    envs = sys.modules["vllm.envs"]
    monkeypatch.setattr(envs, "VLLM_PLUGINS", named, raising=False)
    monkeypatch.setattr(sys.modules["vllm"], "envs", envs, raising=False)
    monkeypatch.setenv("ULLAGE_VLLM", "1")
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: parent)
    plugin.general()
    plugin.general()
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == warnings
    assert all("VLLM_PLUGINS=ullage" in sentence for sentence in told)
    assert hasattr(core, "ullage_attach")


def test_insides_that_moved_are_told_once_and_stop_no_server(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    vllm_of(monkeypatch, "0.32.0")  # the version is known, but there is no vllm.v1.engine.core
    monkeypatch.setenv("ULLAGE_VLLM", "1")
    plugin.general()
    plugin.general()
    assert len(caplog.records) == 1
    assert "steps aside" in caplog.records[0].getMessage()


def test_loading_it_without_being_asked_imports_nothing() -> None:
    code = (
        "import sys; before = set(sys.modules); from ullage_vllm import plugin; plugin.general(); "
        "plugin.endpoint(); print([m for m in set(sys.modules) - before if 'vllm' in m])"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        env={"PYTHONPATH": str(SOURCE), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert sorted(ast.literal_eval(done.stdout)) == [
        "ullage_vllm",
        "ullage_vllm.plugin",
        "ullage_vllm.versions",
    ]
