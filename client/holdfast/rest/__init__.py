"""The typed client of the REST API."""
