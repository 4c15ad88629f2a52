"""The catalog's part in puts to a bucket that honours no conditions: a unique row for each object that is being put."""

from __future__ import annotations

from sqlalchemy import Connection, delete, func, select
from sqlalchemy.dialects.postgresql import insert

from holdfast_service.control.database.cluster_schema import PutIntentRow
from holdfast_service.control.database.database import Database
from holdfast_service.storage.objects.put_intents import PutIntent, StandingIntent
from holdfast_service.wings.cluster.membership import now


class CatalogPutIntents:
    """Satisfies `PutIntents`. Thread-safe."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def begin(self, key: str, intent: PutIntent) -> StandingIntent | None:
        mine = insert(PutIntentRow).values({"key": key, **intent._asdict(), "since": now()})
        put = mine.on_conflict_do_nothing().returning(PutIntentRow.key)
        with self._database.plain() as connection:
            while connection.scalar(put) is None:
                standing = _standing(connection, key)
                if standing is not None:  # else it was removed at this moment
                    return standing
        return None

    def standing(self, key: str) -> StandingIntent | None:
        with self._database.plain() as connection:
            return _standing(connection, key)

    def end(self, key: str, writer: str) -> None:
        row = PutIntentRow
        with self._database.plain() as connection:
            connection.execute(delete(row).where(row.key == key, row.writer == writer))


def _standing(connection: Connection, key: str) -> StandingIntent | None:
    row = PutIntentRow
    wanted = select(row.data, row.etag, row.writer, func.extract("epoch", now() - row.since)).where(row.key == key)
    found = connection.execute(wanted).one_or_none()
    if found is None:
        return None
    data, etag, writer, age_s = found
    return StandingIntent(PutIntent(data, etag, writer), float(age_s))
