"""The catalog's versions. Alembic runs them; it is imported only when there is something to run."""

from __future__ import annotations

import threading
from pathlib import Path

from sqlalchemy import Connection, Engine, inspect, text

from holdfast_formats.errors import StateMismatch

HEAD = "0023"  # the newest of versions/
_alembic_is_global = threading.Lock()
_LOCK = 0x686F6C64  # of PostgreSQL's advisory locks; nodes that start at once migrate one after the other
_LOCK_TIMEOUT_S = 60


def migrate(engine: Engine) -> None:
    """Bring the catalog to `HEAD`; cheap when it is there already. `StateMismatch` for a catalog of a newer holdfast."""
    with engine.connect() as connection:
        if _version(connection) == HEAD:
            return
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
                f"the catalog has version {_version(connection)}, which this version of holdfast does not know",
                hint="use the newer version of holdfast; or move the catalog away, and it is rebuilt from the directories",
            ) from error


def _version(connection: Connection) -> str | None:
    if not inspect(connection).has_table("alembic_version"):
        return None
    return connection.execute(text("SELECT version_num FROM alembic_version")).scalar()
