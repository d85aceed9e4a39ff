"""The web process beside the daemon: its life follows the daemon's, and never the other way round."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import pytest

from kvstore.client import Client
from kvstore.daemon.listening import Listen, parse_listen
from tests.running import TIMEOUT_S, Place, kvstore
from tests.web.asked import Serve, Watching, child_of, get, is_alive, until, url_of, with_web


def test_a_killed_web_process_comes_back(place: Place, serve: Serve) -> None:
    """kill -9 costs the web a second and the daemon nothing; the log says so once."""
    daemon = serve(place, *with_web(place))
    url_of(daemon)
    first = child_of(daemon)
    os.kill(first, signal.SIGKILL)
    until(lambda: not is_alive(first), "it is gone")
    until(lambda: daemon.log().count("the live page at http://") == 2, "another one serves")
    assert child_of(daemon) != first
    assert daemon.log().count("kvstore web ended (signal 9)") == 1
    with Client(place.socket, 10, label="test", attach=False) as client:
        client.ping()


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_it_ends_with_the_daemon(place: Place, serve: Serve, how: signal.Signals) -> None:
    """However the daemon ends, its web process is gone within seconds, and so is its port."""
    daemon = serve(place, *with_web(place))
    url = url_of(daemon)
    child = child_of(daemon)
    daemon.stop(how)
    until(lambda: not is_alive(child), "the web process has ended", 5)
    with pytest.raises(ConnectionRefusedError):
        get(url, "/healthz")


def test_ctrl_c_in_a_terminal_ends_both_in_order(place: Place, serve: Serve) -> None:
    """SIGINT and SIGHUP reach the whole process group: the web process leaves the decision to the daemon."""
    daemon = serve(place, *with_web(place))
    url = url_of(daemon)
    child = child_of(daemon)
    for number in (signal.SIGINT, signal.SIGHUP):
        os.kill(child, number)
    assert get(url, "/healthz").status == 200
    daemon.stop(signal.SIGINT)
    until(lambda: not is_alive(child), "the web process has ended", 5)
    assert "it is started again" not in daemon.log()


def test_it_holds_nothing_of_the_daemon(place: Place, serve: Serve) -> None:
    """No descriptor of the arena, the data dir or a door is inherited; a child that hangs keeps no lock: the next daemon starts."""
    daemon = serve(place, *with_web(place))
    url_of(daemon)
    child = child_of(daemon)
    held = [os.readlink(path) for path in Path(f"/proc/{child}/fd").iterdir()]
    assert not [
        path for path in held if path.startswith("/") and path not in ("/dev/null", str(daemon.errors))
    ]
    assert str(place.path / "shm") not in Path(f"/proc/{child}/maps").read_text()
    os.kill(child, signal.SIGSTOP)
    try:
        daemon.stop(signal.SIGKILL)
        assert is_alive(child)
        second = serve(place)
        assert second.process.poll() is None
    finally:
        os.kill(child, signal.SIGKILL)


def test_engines_come_first(place: Place, serve: Serve) -> None:
    """It runs at a lower priority than the daemon, and of the two the kernel kills it where memory is short."""
    daemon = serve(place, *with_web(place))
    url_of(daemon)
    child = child_of(daemon)
    assert os.getpriority(os.PRIO_PROCESS, child) == min(
        19, os.getpriority(os.PRIO_PROCESS, daemon.process.pid) + 10
    )
    scores = [int(Path(f"/proc/{pid}/oom_score_adj").read_text()) for pid in (child, daemon.process.pid)]
    assert scores[0] == 500 >= scores[1]


def test_a_web_process_that_hangs_delays_no_stop(place: Place, serve: Serve) -> None:
    """It is killed soon: it has nothing to lose."""
    daemon = serve(place, *with_web(place))
    url_of(daemon)
    child = child_of(daemon)
    os.kill(child, signal.SIGSTOP)
    assert daemon.stop() == 0
    assert not is_alive(child)


def test_a_taken_port_costs_a_warning(place: Place, serve: Serve) -> None:
    """The daemon serves; the log has one warning; when the port is given back soon, it is used without a word."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        daemon = serve(place, *with_web(place, listen=f"127.0.0.1:{port}"))
        with Client(place.socket, 10, label="test", attach=False) as client:
            client.ping()
        until(lambda: "address already in use" in daemon.log(), "the warning")
        assert daemon.log().count("nobody is served there until it is free") == 1
        assert "it is started again" not in daemon.log()
    assert daemon.stop() == 0


def test_a_port_that_is_given_back_is_taken(place: Place, serve: Serve) -> None:
    """A daemon that follows another one finds its port when that one's web process is gone, without a warning."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        daemon = serve(place, *with_web(place, listen=f"127.0.0.1:{port}"))
        child_of(daemon)
    assert url_of(daemon) == f"http://127.0.0.1:{port}/"
    assert "address already in use" not in daemon.log()


def test_two_daemons_of_one_machine(tmp_path: Path, serve: Serve) -> None:
    """Each tells of itself."""
    told = set()
    for name in ("a", "b"):
        place = Place(tmp_path / name)
        place.path.mkdir()
        url = url_of(serve(place, *with_web(place)))
        told.add(get(url, "/live.json").json()["live"]["instance"])
    assert len(told) == 2


def test_ipv6(place: Place, serve: Serve) -> None:
    """An address in brackets."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6 loopback")
    url = url_of(serve(place, *with_web(place, listen="[::1]:0")))
    assert url.startswith("http://[::1]:")
    assert get(url, "/healthz").status == 200


def test_an_ipv4_address_in_ipv6_is_loopback_too(place: Place) -> None:
    """However a browser writes it; a page of elsewhere is refused there as well."""
    with Watching(place.path / "s", listen="[::ffff:127.0.0.1]:0") as web:
        url = web.url.replace("[::ffff:127.0.0.1]", "127.0.0.1")
        for host in ("[::ffff:7f00:1]:9471", "[::ffff:127.0.0.1]", "127.0.0.1"):
            assert get(url, "/live.json", Host=host).status == 200
        assert get(url, "/live.json", Host="evil.example").status == 403


def test_off_is_no_process(place: Place, serve: Serve) -> None:
    """web.listen = "" starts nothing."""
    daemon = serve(place)  # its arguments turn it off
    children = Path(f"/proc/{daemon.process.pid}/task/{daemon.process.pid}/children").read_text()
    assert children.split() == []


def test_elsewhere_than_loopback_is_warned_of(place: Place) -> None:
    """One line says who can read names then, where they are for all; any Host header is right there."""
    for names, lines in (("user", 0), ("all", 1)):
        with Watching(
            place.path / "s", "--set=security.plain=web", "--names", names, listen="0.0.0.0:0"
        ) as web:
            url = web.url.replace("0.0.0.0", "127.0.0.1")
            assert get(url, "/live.json", Host="node7.example:9471").status == 200
        assert web.errors.count("whoever reaches it can read the names of models and tenants") == lines


@pytest.mark.parametrize(
    "text",
    [
        "",
        "9471",
        ":9471",
        "*:9471",
        "127.0.0.1",
        "127.0.0.1:",
        "127.0.0.1:x",
        "127.0.0.1:65536",
        "::1:9471",
        "[::1]",
        "[127.0.0.1]:1",
        "1.2.3:1",
        "example.com:80",
        "127.0.0.1:٣",
        "[::1%lo]:1",
        " 127.0.0.1:1",
        "127.0.0.1:1\n",
    ],
)
def test_a_wrong_address_says_what_is_allowed(text: str) -> None:
    """On the command line and as a setting."""
    with pytest.raises(ValueError, match=r"allowed are ADDRESS:PORT, \[ADDRESS\]:PORT and localhost:PORT"):
        parse_listen(text)


def test_addresses() -> None:
    """What is said is what is listened on, and loopback is known as such."""
    for text, is_loopback in (
        ("127.0.0.1:1", True),
        ("[::1]:2", True),
        ("[::ffff:127.0.0.1]:2", True),
        ("[::ffff:10.0.0.1]:2", False),
        ("localhost:3", True),
        ("0.0.0.0:4", False),
        ("[::]:5", False),
        ("10.0.0.1:0", False),
    ):
        listen = parse_listen(text)
        assert (str(listen), listen.is_loopback) == (text, is_loopback)
    assert parse_listen("[::1]:2") == Listen("::1", 2)


def test_wrong_usage_is_one_line(place: Place) -> None:
    """Exit code 2 for what is no address or turned off, 1 for a port that is taken, each with one line."""
    for arguments, said in (
        (["--listen=nowhere"], 'kvstore: --listen: web.listen = "nowhere": allowed are ADDRESS:PORT'),
        (["--listen="], "kvstore: web: argument --listen: is empty"),
        (["--set=web.listen=x:1"], "allowed are ADDRESS:PORT, [ADDRESS]:PORT and localhost:PORT"),
    ):
        done = kvstore("web", *arguments)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        assert said in done.stderr
    with socket.create_server(("127.0.0.1", 0)) as other:
        done = kvstore("web", f"--listen=127.0.0.1:{other.getsockname()[1]}", f"--socket={place.socket}")
    assert done.returncode == 1
    assert (
        done.stderr.count("\n") == 1
        and "address already in use; choose another one with --listen" in done.stderr
    )
    checked = kvstore("config", "check", "--set=web.listen=[::1]:9471")
    assert checked.returncode == 0, checked.stderr


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_by_hand_it_ends_when_asked(place: Place, how: signal.Signals) -> None:
    """Exit code 0, nothing more on stdout."""
    with Watching(place.socket) as web:
        web.process.send_signal(how)
        assert web.process.wait(TIMEOUT_S) == 0
        assert web.process.stdout is not None
        assert web.process.stdout.read() == ""
