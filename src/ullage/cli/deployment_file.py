"""`--deployment FILE` and `--server NAME`: which command a deployment file starts, and its model.

Holds the flags and the choices only; reading is `ullage.launch`'s.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ullage.costs.deployment import Deployment
from ullage.errors import BadUsage
from ullage.findings.place import Place

if TYPE_CHECKING:  # reading deployment files is imported where one is given
    from ullage.launch.launch import Launch


@dataclass(frozen=True, slots=True)
class Chosen:
    """The command of the deployment file, and the deployment that it and the flags describe."""

    launch: Launch
    deployment: Deployment

    def flag_places(self) -> dict[str, Place]:
        """Where the file gives each flag, by its own name and as it is spelled there."""
        places: dict[str, Place] = {}
        for flag in self.launch.flags:
            for name in (flag.name, flag.spelling):
                places[name] = Place(self.launch.file, flag.line)
        return places

    def start(self) -> Place:
        """Where the command starts."""
        return Place(self.launch.file, self.launch.line)

    def document(self) -> dict[str, object]:
        """What was read, for the JSON document; values of flags are not repeated."""
        launch = self.launch
        return {
            "file": launch.file,
            "server": launch.name,
            "line": launch.line,
            "kind": launch.kind,
            "engine": launch.engine,
            "engine_version": launch.version,
            "model": launch.model,
            "flags": [flag.name or flag.spelling for flag in launch.flags],
        }


def add_deployment_file_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that name a deployment file and one of its servers."""
    parser.add_argument(
        "--deployment",
        metavar="FILE",
        help="judge the command in a shell script, Dockerfile, compose file, Kubernetes manifest "
        "or Helm values too; flags given here win over the file's",
    )
    parser.add_argument("--server", metavar="NAME", help="which of the file's servers")


def chosen_launch(args: argparse.Namespace, deployment: Deployment) -> Chosen | None:
    """The file's command with the deployment that it makes of `deployment`; None without a file.

    Raises BadInput for a file that starts no server, or several without --server.
    """
    if args.deployment is None:
        if args.server is not None:
            raise BadUsage("--server without --deployment FILE")
        return None
    from ullage.launch.documents import choose_launch, read_launches  # only files cost this
    from ullage.launch.settings import deployment_of

    launch = choose_launch(read_launches(args.deployment), args.server, args.deployment)
    return Chosen(launch, deployment_of(launch, deployment))


def model_path(args: argparse.Namespace, chosen: Chosen | None) -> str:
    """MODEL, or the model that the file's command names: a path, or a hub id that can be located.

    A hub id is taken when the cache holds it or when a hub is set to ask (HF_ENDPOINT); fetching
    headers, and what may fail there, is `anatomy.hub.locate`'s. Raises BadUsage otherwise.
    """
    if args.model is not None:
        return str(args.model)
    if chosen is None:
        raise BadUsage("no MODEL", expected="a model, or --deployment FILE that names one")
    launch = chosen.launch
    expected = "ullage audit --deployment FILE MODEL, with the model's directory or config.json"
    if launch.model is None or launch.model_open:
        hidden = f" (it says {launch.model_open})" if launch.model_open else ""
        raise BadUsage(f"names no model that is known{hidden}", file=launch.file, expected=expected)
    if not os.path.exists(launch.model) and not _on_a_hub(launch.model):  # noqa: PTH110
        raise BadUsage(
            f"serves {launch.model[:120]!r}, which is not on this machine",
            file=launch.file,
            expected=expected,
        )
    return launch.model


def _on_a_hub(model: str) -> bool:
    """Whether `model` is a hub id that the cache holds or that there is a hub to ask for."""
    from ullage.anatomy.hub.locate import within_reach  # only a model that is no path costs this

    return within_reach(model)
