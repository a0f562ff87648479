"""What `ullage adapter fix` writes of an adapter that does not work, to be asked of the server."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from ullage.adapters.check import check
from ullage.adapters.rewriting.fix import fix
from ullage.anatomy import load
from ullage.anatomy.adapters.read import read_adapter
from ullage.errors import UllageError

from .outcomes import Made
from .verdicts import serve_options


def fixed(made: Iterable[Made], folder: Path) -> tuple[list[Made], dict[str, str]]:
    """The rewritten adapters, with what training meant; and why the others were refused."""
    written, refused = [], {}
    for one in made:
        recipe = one.recipe
        options = serve_options({"flags": recipe.flags, "request": recipe.request})
        spec = load(str(one.base)).anatomy.spec
        saved = folder / recipe.name
        try:
            adapter = read_adapter(one.adapter)
            if check(adapter, spec, options).verdict == "works":
                continue
            fix(adapter, spec, options, saved)
        except UllageError as error:
            refused[recipe.name] = str(error)
            continue
        written.append(
            replace(one, recipe=replace(recipe, name=f"{recipe.name}@fixed"), adapter=saved)
        )
    return written, refused
