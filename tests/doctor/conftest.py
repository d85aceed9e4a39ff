"""A machine of one's own and cgroups, as the tests of starts have them."""

from tests.start.conftest import group, machine

__all__ = ["group", "machine"]
