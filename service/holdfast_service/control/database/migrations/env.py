"""What Alembic runs first: migrate over the connection that `migrate` hands over, in its transaction."""

from __future__ import annotations

from alembic import context

from holdfast_service.control.database.columns import CatalogTable

context.configure(connection=context.config.attributes["connection"], target_metadata=CatalogTable.metadata)
with context.begin_transaction():
    context.run_migrations()
