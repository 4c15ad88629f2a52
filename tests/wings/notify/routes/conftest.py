"""The connection to a module's service."""

from tests.serving import http

__all__ = ["http"]
