"""Triggers that list each run whose rows change, in the transaction that changes them, whichever thread or node does.

`run_changes` only ever gets rows, so that transactions of several nodes never wait for each other because of it.
"""

from __future__ import annotations

from collections.abc import Iterator

from sqlalchemy import Connection, text

# The tables that figures of runs are taken from, with the column that names the run.
SOURCES = {"runs": "name", "checkpoints": "run", "rounds": "run", "attempts": "run", "replicas": "run", "events": "run"}


def create(connection: Connection) -> None:
    """Create the triggers; the tables are there."""
    made = _on_postgresql() if connection.dialect.name == "postgresql" else _on_sqlite()
    for statement in made:
        connection.execute(text(statement))


def _on_sqlite() -> Iterator[str]:
    for table, run in SOURCES.items():
        for event, row in (("INSERT", "NEW"), ("UPDATE", "NEW"), ("DELETE", "OLD")):
            yield (
                f"CREATE TRIGGER {table}_{event.lower()}_changes AFTER {event} ON {table} WHEN {row}.{run} IS NOT NULL "
                f"BEGIN INSERT INTO run_changes (run) VALUES ({row}.{run}); END"
            )
        yield (
            f"CREATE TRIGGER {table}_rename_changes AFTER UPDATE OF {run} ON {table} WHEN OLD.{run} IS NOT NULL "
            f"BEGIN INSERT INTO run_changes (run) VALUES (OLD.{run}); END"
        )


def _on_postgresql() -> Iterator[str]:
    for run in sorted(set(SOURCES.values())):
        yield (
            f"CREATE FUNCTION list_change_by_{run}() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
            f"IF TG_OP <> 'DELETE' AND NEW.{run} IS NOT NULL THEN INSERT INTO run_changes (run) VALUES (NEW.{run}); END IF; "
            f"IF TG_OP = 'DELETE' OR (TG_OP = 'UPDATE' AND OLD.{run} IS DISTINCT FROM NEW.{run}) THEN "
            f"IF OLD.{run} IS NOT NULL THEN INSERT INTO run_changes (run) VALUES (OLD.{run}); END IF; END IF; "
            "RETURN NULL; END $$"
        )
    for table, run in SOURCES.items():
        yield (
            f"CREATE TRIGGER {table}_changes AFTER INSERT OR UPDATE OR DELETE ON {table} "
            f"FOR EACH ROW EXECUTE FUNCTION list_change_by_{run}()"
        )
