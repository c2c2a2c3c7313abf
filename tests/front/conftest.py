"""The front door is tested against a real embedded server, one for all of these tests."""

from tests.flows.conftest import home, server

__all__ = ["home", "server"]
