"""Notifications of changed rounds and new checks over a database connection of its own. They only save time: without them,
nodes poll.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from sqlalchemy import text
from sqlalchemy.exc import SQLAlchemyError

from holdfast_service.control.database.database import Database

log = logging.getLogger(__name__)

CHANNEL = "holdfast_rounds"
ROUNDS, CHECKS, AVERAGES, RANKS = "", "check", "average", "ranks"  # what it is about
LISTEN_S = 2.0  # how long it listens before it looks whether it is to end
AGAIN_S = 2.0  # after the connection was lost


class NotifyListener:
    """A thread that calls `rung` when some node has changed a round, `checking` when a check of several nodes has begun,
    `averaging` when the last node has voted for an update of an average, and `ranks` when a launch is to stop, or its last
    step was decided; all of them after a lost connection.
    """

    def __init__(
        self,
        database: Database,
        rung: Callable[[], None],
        checking: Callable[[], None] = lambda: None,
        averaging: Callable[[], None] = lambda: None,
        ranks: Callable[[], None] = lambda: None,
    ) -> None:
        self._database = database
        self._calls = {ROUNDS: rung, CHECKS: checking, AVERAGES: averaging, RANKS: ranks}
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="holdfast-bell", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                self._listen()
            except (SQLAlchemyError, OSError) as error:
                log.debug("cannot listen to the catalog: %s", error)
            except Exception as error:  # of the driver, which is not imported where there is no PostgreSQL
                log.info("stopped listening to the catalog: %s", error)
            self._closing.wait(AGAIN_S)

    def _listen(self) -> None:
        with self._database.engine.connect() as connection:
            connection = connection.execution_options(isolation_level="AUTOCOMMIT")
            connection.execute(text(f"LISTEN {CHANNEL}"))
            for call in self._calls.values():
                call()
            driver = connection.connection.driver_connection
            assert driver is not None
            try:
                while not self._closing.is_set():
                    for heard in driver.notifies(timeout=LISTEN_S, stop_after=1):
                        self._calls.get(heard.payload, self._calls[ROUNDS])()
            finally:
                connection.invalidate()  # it still listens and must not return to the pool
