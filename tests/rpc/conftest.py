"""A daemon with its gRPC process, for the tests of a module; what a client stores is of namespaces of their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.rpc.reflecting import Reflecting
from tests.rpc.serving import Serving, serving
from tests.running import Place


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with serving(Place(tmp_path_factory.mktemp("node"))) as found:
        yield found


@pytest.fixture
def client(node: Serving) -> Iterator[Reflecting]:
    known = Reflecting(node.target)
    yield known
    known.close()
