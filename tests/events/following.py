"""A subscriber that runs in a thread of its own, as a router's does, and can be held up."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from examples.kv_events.mirror import Held
from examples.kv_events.subscriber import Subscriber

DEADLINE_S = 60.0


def wait_until(truth: Callable[[], bool], what: Callable[[], str] = lambda: "") -> None:
    give_up_s = time.monotonic() + DEADLINE_S
    while not truth():
        assert time.monotonic() < give_up_s, what()
        time.sleep(0.02)


class Following:
    """`pause` stops it from reading until `go_on`."""

    def __init__(self, endpoint: str, replay_endpoint: str) -> None:
        self.subscriber = Subscriber(endpoint, replay_endpoint)
        self.failure: Exception | None = None
        self._guard = threading.Lock()
        self._reading = threading.Event()
        self._reading.set()
        self._closing = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def pause(self) -> None:
        self._reading.clear()

    def go_on(self) -> None:
        self._reading.set()

    def look(self) -> tuple[bool, int, Held]:
        """Whether it is whole, the number of the next batch, and what is held."""
        with self._guard:
            mirror = self.subscriber.mirror
            held = {key: set(blocks) for key, blocks in mirror.held.items()}
            return self.subscriber.is_whole, mirror.next or 0, held

    def close(self) -> None:
        self._closing = True
        self._reading.set()
        self._thread.join(DEADLINE_S)
        self.subscriber.close()
        assert self.failure is None, self.failure

    def _run(self) -> None:
        try:
            while not self._closing:
                self._reading.wait()
                with self._guard:
                    self.subscriber.step(0.02)
                time.sleep(0.001)  # whoever wants to look gets the lock
        except Exception as error:  # noqa: BLE001 - `close` raises it in the test's own thread
            self.failure = error
