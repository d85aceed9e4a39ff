"""Fixtures for every room: a place for one daemon, and daemons in processes of their own."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.browser import Browser
from tests.objects import S3Server
from tests.running import Daemon, Place, daemons

# Where a shell starts the tests in the background, they and all that they start would ignore Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Time limits of tests are pytest's: a slow machine proves nothing.
settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Daemon]]:
    """Start daemons; what still runs at the end of the test is killed."""
    with daemons(tmp_path) as start:
        yield start


@pytest.fixture(scope="module")
def s3_server() -> Iterator[S3Server]:
    """A real S3 server with a bucket "kvstore", of one module: it keeps in memory whatever it was given."""
    server = S3Server()
    try:
        server.make_bucket("kvstore")
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="module")
def one_browser() -> Iterator[Browser]:
    with Browser() as running:
        yield running


@pytest.fixture
def browser(one_browser: Browser) -> Iterator[Browser]:
    """Without pages of other tests, which would go on asking."""
    yield one_browser
    one_browser.close_pages()
