"""The catalog's versions. Alembic runs them; it is imported only when there is something to run."""

from __future__ import annotations

import re
import threading
from pathlib import Path

from sqlalchemy import Connection, Engine, inspect, text

from holdfast_formats.errors import StateMismatch

HEAD = "unreleased_6"  # the newest of versions/; until the first release, every change of `schema` takes the next number
_UNRELEASED = re.compile(r"\d{4}|unreleased_\d+", re.ASCII)
_alembic_is_global = threading.Lock()
_LOCK = 0x686F6C64  # of PostgreSQL's advisory locks; nodes that start at once migrate one after the other
_LOCK_TIMEOUT_S = 60


def migrate(engine: Engine) -> None:
    """Bring the catalog to `HEAD`; cheap when it is there already. `StateMismatch` for a catalog that another version of
    holdfast made and this one does not know.
    """
    with engine.connect() as connection:
        version = _version(connection)
    if version == HEAD:
        return
    if is_unreleased(version):
        raise StateMismatch(
            f"the catalog was made by an unreleased version of holdfast (revision {version})", hint=_remedy(engine)
        )
    from alembic import command
    from alembic.config import Config
    from alembic.util import CommandError

    with _alembic_is_global, engine.begin() as connection:
        if engine.dialect.name == "postgresql":
            connection.execute(text(f"SET LOCAL lock_timeout = '{_LOCK_TIMEOUT_S}s'"))
            connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _LOCK})
        config = Config()
        config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
        config.attributes["connection"] = connection
        try:
            command.upgrade(config, "head")
        except CommandError as error:
            raise StateMismatch(
                f"the catalog has version {_version(connection)}, which this version of holdfast does not support",
                hint="use the newer version of holdfast, or move the catalog away: it is then rebuilt from the directories",
            ) from error


def is_unreleased(version: str | None) -> bool:
    """Whether a version of holdfast that was never released made such a catalog, other than this one: it is not migrated."""
    return version not in (None, HEAD) and _UNRELEASED.fullmatch(str(version)) is not None


def _remedy(engine: Engine) -> str:
    """What to do about a catalog that is not migrated.

    A file is moved away by the daemon that has the root to itself. Tables of a server may be in use by daemons of other
    nodes, which would go on with empty ones: only an operator can stop those first.
    """
    if engine.dialect.name != "postgresql":
        return (
            "start the daemon, or run `holdfast catalog rebuild`: the catalog is moved away and rebuilt from the directories"
        )
    name = str(engine.url.database).replace('"', '""')
    return (
        "stop the daemons of all nodes, then run in psql, connected to another database: ALTER DATABASE "
        f'"{name}" RENAME TO "{name}_unreleased"; CREATE DATABASE "{name}" ENCODING \'UTF8\' TEMPLATE '
        "template0; (as the owner of the old one). The next start rebuilds the catalog from the directories; "
        "tokens, audit log, events and the history of jobs and saves stay only in the old database"
    )


def _version(connection: Connection) -> str | None:
    if not inspect(connection).has_table("alembic_version"):
        return None
    return connection.execute(text("SELECT version_num FROM alembic_version")).scalar()
