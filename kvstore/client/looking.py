"""What a client asks of the daemon itself: figures, who is connected, settings. No blocks, no leases."""

from __future__ import annotations

from kvstore.client.refusing import refusing

TYPE_CHECKING = False  # not from typing: importing that costs more than all of this
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from kvstore.protocol import answers, frames


@refusing
class Looking:
    """These calls of `kvstore.client.Client`; `_call` is its."""

    if TYPE_CHECKING:

        def _call(self, namespaces: Any, make: Any) -> Any: ...

    def report(self, since_s: float, until_s: float = 1e12) -> answers.Report:
        """Totals of a time (unix seconds): by the minute within the last six hours, else whole hours. docs/cli.md names the fields."""
        return self._pages("rows", lambda w, skip: w.Report(since_s, skip, until_s))  # type: ignore[no-any-return]

    def list_namespaces(self) -> list[answers.Namespace]:
        """Every namespace, as `status` has those with most blocks."""
        return self._pages("namespaces", lambda w, skip: w.Namespaces(skip))["namespaces"]  # type: ignore[no-any-return]

    def _pages(self, name: str, make: Callable[[Any, int], frames.Request]) -> Any:
        """A report with a list that comes in several answers; each says how many are left."""

        def page(skip: int) -> Any:
            return self._call((), lambda w, _: make(w, skip)).report

        report: dict[str, Any] = page(0)
        while report[f"{name}_left"] and (more := page(len(report[name])))[name]:
            report = {**more, name: report[name] + more[name]}
        return report

    def status(self) -> answers.Status:
        """What the daemon says of itself."""
        return self._call((), lambda w, _: w.Status()).report  # type: ignore[no-any-return]

    def live(self, minutes_since_s: float = 0.0) -> answers.Live:
        """What is going on, in one small answer that may be asked for every second; docs/cli.md names the fields.

        minutes_since_s: unix seconds; of the minutes that are remembered, those from this time on.
        """
        return self._call((), lambda w, _: w.Live(minutes_since_s)).report  # type: ignore[no-any-return]

    def clients(self) -> list[answers.Client]:
        """Who is connected to the daemon; docs/cli.md names the fields."""
        return self._pages("clients", lambda w, skip: w.Clients(skip))["clients"]  # type: ignore[no-any-return]

    def kill_client(self, number: int) -> answers.Client:
        """Have the daemon hang up on one of them: what it holds goes back. It may connect again. Raises Unavailable, Refused."""
        return self._call((), lambda w, _: w.KillClient(number)).report  # type: ignore[no-any-return]

    def slow_requests(self) -> answers.SlowRequests:
        """The last requests that took long, the latest first; docs/cli.md names the fields."""
        return self._call((), lambda w, _: w.SlowRequests()).report  # type: ignore[no-any-return]

    def settings(self, name: str = "") -> list[dict[str, Any]]:
        """The daemon's settings in force: of one key, of a section, or all; docs/cli.md names the fields."""
        return self._call((), lambda w, _: w.GetSettings(name)).report["settings"]  # type: ignore[no-any-return]

    def change_setting(self, key: str, text: str) -> dict[str, Any]:
        """Give a key another value, written as in `--set`, until a restart or a reload. Raises Unavailable, Refused."""
        return self._call((), lambda w, _: w.SetSetting(key, text)).report  # type: ignore[no-any-return]

    def change_disk(self, directory: str, accept: bool) -> dict[str, Any]:
        """Take what is at an NVMe directory now (accept), or remember nothing of it. Raises Unavailable, Refused."""
        return self._call((), lambda w, _: w.SetDisk(directory, accept)).report  # type: ignore[no-any-return]

    def record(self) -> frames.Recorded:
        """Requests of engines since the last call; the first one begins, the end of the connection ends it."""
        return self._call((), lambda w, _: w.Record())  # type: ignore[no-any-return]

    def check(self) -> list[str]:
        """Have the daemon check its own invariants; one line per problem.

        Only for a client with attach=False. A call while a check is under way gets its answer.
        """
        return self._call((), lambda w, _: w.Check()).lines  # type: ignore[no-any-return]

    def ping(self) -> None:
        """One round trip; connects if need be."""
        self._call((), lambda w, _: w.Ping())
