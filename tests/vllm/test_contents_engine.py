"""Real engines: a name that a user gives is not believed, whatever stands behind it."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm")

from tests.running import Daemon
from tests.vllm import models, pairs
from tests.vllm.conftest import prompt
from tests.vllm.engines import EngineHost

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1800)]

TEXT = [*prompt(75, 40), models.IMAGE_TOKEN, *prompt(76, 60)]
OTHER = "has other weights than before"  # in the log, of an adapter
BEFORE, WHOLE = 32, (40 + models.IMAGE_TOKENS + 60) // 32 * 32


def test_one_identifier_for_two_pictures(
    host: EngineHost, daemon: Daemon, model: Path, tmp_path: Path
) -> None:
    """Two users call their pictures alike: each engine answers for its own, and finds what another one stored of the same
    picture."""
    options = {"model": str(models.vision_model(model, tmp_path))}
    host.start(None, **options)
    said = [host.generate([TEXT], images=[picture]).tokens for picture in (1, 2)]
    assert said[0] != said[1]
    found = []
    for picture in (1, 2, 1, 2):
        host.start(daemon.socket, **options)
        got = host.generate([TEXT], images=[picture], identifiers=["cat"])
        assert got.tokens == said[picture - 1]
        found.append(got.cached[0])
        host.finish_saves()
    assert found == [0, BEFORE, WHOLE, WHOLE]


def test_an_adapter_that_is_loaded_in_place(
    host: EngineHost, daemon: Daemon, model: Path, tmp_path: Path
) -> None:
    """Under the same name, path and number: what vLLM finds in its own cache then is of the old one, and none of it comes
    into a store that engines with the new one read."""
    path = models.lora_adapter(model, tmp_path, "adapter", 1)
    known, again = ("adapter", 1, str(path)), ("adapter", 1, str(path), None, True)
    text, lines = [prompt(77, 330)], host.log().count(OTHER)
    host.start(daemon.socket, **pairs.LORA)
    host.generate(text, adapter=known)
    pairs.other_adapter(path)
    host.generate(text, adapter=again)
    host.generate(text, adapter=known)
    host.finish_saves()
    assert host.log().count(OTHER) == lines + 1
    host.start(None, **pairs.LORA)
    said = host.generate(text, adapter=known).tokens
    for cached in ([0], [320]):
        host.start(daemon.socket, **pairs.LORA)
        got = host.generate(text, adapter=known)
        assert (got.tokens, got.cached) == (said, cached)
        host.finish_saves()
