"""The cell magic ``%%pipeline NAME`` of notebooks: the cell becomes a module, which worker processes can import.

``%load_ext exactlyonce`` makes it known. The module's name ends with a digest of the cell, so that no process that has
imported an older text of the cell takes that for the newer one.
"""

from __future__ import annotations

import hashlib
import tempfile
from functools import cache, partial
from pathlib import Path
from typing import Any

from exactlyonce.pipeline.errors import ConfigError
from exactlyonce.pipeline.loading import Reference, import_module

_PREFIX = "exactlyonce-notebook-"
_REMEDIES: dict[type[BaseException], str] = {
    NameError: "A cell of %%pipeline is a module of its own: it imports and defines all that it uses.",
    SyntaxError: "A cell of %%pipeline is plain Python: lines with % or ! go into another cell.",
}


def load(shell: Any) -> None:
    """Make ``%%pipeline`` known to *shell*, an `InteractiveShell` of IPython."""
    shell.register_magic_function(partial(_pipeline, shell), "cell", "pipeline")


def _pipeline(shell: Any, line: str, cell: str) -> None:
    """Write the cell to a module, import it, and put its public names into the notebook."""
    name = line.strip()
    if not name.isidentifier():
        raise ConfigError(f"%%pipeline {name}".rstrip() + ": name the cell by an identifier, as %%pipeline orders.")
    module = f"{name}_{hashlib.sha256(cell.encode()).hexdigest()[:8]}"
    file = Path(_folder().name, f"{module}.py")
    file.write_text(cell)
    try:
        names = vars(import_module(module, str(file.parent)))
    except ConfigError as error:
        for kind, remedy in _REMEDIES.items():
            if isinstance(error.__cause__, kind):
                raise ConfigError(f"{error}. {remedy}") from error
        raise
    shell.push({key: value for key, value in names.items() if not key.startswith("_")})


def cell_file(reference: Reference) -> Path | None:
    """The file of a pipeline's module that ``%%pipeline`` has written here; None for any other module."""
    folder = Path(str(reference["path"]))
    return folder / f"{reference['module']}.py" if folder.name.startswith(_PREFIX) else None


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """The folder of this process's modules; it goes with the process."""
    return tempfile.TemporaryDirectory(prefix=_PREFIX)
