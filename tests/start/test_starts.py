"""Starts as users make them: no options, as nobody, as root, after root, in a group of 400 MiB, after an OOM kill.

Each is a working daemon or one clear line; nobody else is harmed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.running import TIMEOUT_S
from tests.start.machine import NOBODY, Machine

MIB = 1 << 20
SMALL = ("--set=dram.capacity_bytes=16MiB", "--set=dram.slab_bytes=4MiB")
README = ("--set", "dram.capacity_bytes=64GiB", "--set", "nvme.directories=/mnt/nvme0/kvstore")
Group = Callable[[int], Path]
HOG = """
import sys, time
held = bytearray(int(sys.argv[1]))
held[::4096] = b"x" * len(held[::4096])
print("held", flush=True)
time.sleep(1000)
"""


def arenas(machine: Machine, uid: int = 0) -> list[dict[str, object]]:
    listed = machine.run("arena", "ls", "-o", "json", uid=uid)
    assert listed.code == 0, listed.err
    found: list[dict[str, object]] = json.loads(listed.out)["arenas"]
    return found


def hog(machine: Machine, group: Path, size_bytes: int) -> subprocess.Popen[str]:
    """A neighbour in the same group, with so much memory."""
    script = 'echo $$ > "$0" && exec "$@"'
    words = ["sh", "-c", script, f"{group}/cgroup.procs", sys.executable, "-c", HOG, str(size_bytes)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    machine.running.append(process)
    return process


def wait_held(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None and process.stdout.readline() == "held\n"


def test_nobody_needs_no_options(group: Group, machine: Machine) -> None:
    """A user without a home starts a daemon in a small group; command line and connector find it; what a stop leaves
    is said, adopted by the next start, and given back by a command."""
    small = group(400 * MIB)
    daemon = machine.serve(uid=NOBODY, group=small)
    assert daemon.ready["socket"] == f"/tmp/kvstore-{NOBODY}/kvstore.sock"
    status = machine.run("status", "-o", "json", uid=NOBODY)
    assert json.loads(status.out)["tiers"][0]["capacity_bytes"] == 64 * MIB
    asked = "from connectors.transfer.settings import read_settings as r; print(r({}).kvstore_socket)"
    words = machine.words([sys.executable, "-c", asked], NOBODY, None, {"PYTHONPATH": os.getcwd()})
    found = subprocess.run(words, capture_output=True, text=True, timeout=TIMEOUT_S, check=True).stdout
    assert found.strip() == daemon.ready["socket"]
    machine.fill(daemon, NOBODY)
    assert daemon.stop() == 0
    (arena,) = arenas(machine, NOBODY)
    (said,) = (line for line in map(json.loads, daemon.log().splitlines()) if "to_free_it" in line)
    assert said["to_free_it"] == f"kvstore arena rm {arena['instance']}" and said["in_memory"].startswith(
        "66"
    )
    again = machine.serve(uid=NOBODY, group=small)
    assert "arena adopted" in again.log()
    refused = machine.run("arena", "rm", str(arena["instance"]), uid=NOBODY)
    assert (refused.code, refused.line) == (
        1,
        f"arena {arena['path']}: a daemon is using it; stop that one first",
    )
    again.stop()
    removed = machine.run(*said["to_free_it"].split()[1:], uid=NOBODY)
    assert (removed.code, removed.out) == (0, f"removed {arena['instance']}: {said['in_memory']} free\n")
    assert arenas(machine, NOBODY) == []


def test_after_root_everybody_may_start(machine: Machine) -> None:
    """What root's daemon mounts and makes is passed over by a user's, which serves beside it, whatever its login left
    in the environment; each finds its own."""
    root = machine.serve(*SMALL)
    assert root.ready["socket"] == "/run/kvstore/kvstore.sock"
    machine.fill(root)
    root.stop()
    user = machine.serve(*SMALL, uid=NOBODY, XDG_RUNTIME_DIR="/run/user/0", HOME="/root")
    assert Path(user.ready["arena"]).parent == Path("/dev/shm")
    again = machine.serve(*SMALL)
    assert again.ready["arena"] == root.ready["arena"] and "arena adopted" in again.log()
    for uid, daemon in ((0, again), (NOBODY, user)):
        told = json.loads(machine.run("status", "-o", "json", uid=uid).out)["daemon"]
        assert told["socket_path"] == daemon.ready["socket"]
    states = {str(arena["path"]): arena["state"] for arena in arenas(machine)}
    assert states == {root.ready["arena"]: "in use", user.ready["arena"]: "in use"}
    machine.run("arena", "rm", "kvstore", uid=NOBODY)  # neither can take the other's
    assert len(arenas(machine)) == 2


def test_a_user_has_places_of_its_own(machine: Machine) -> None:
    """Home, runtime directory and state directory are used where they are there, and made where they are not."""
    machine.shell(f"mkdir -p /mnt/home /run/user/{NOBODY} && chown {NOBODY} /mnt/home /run/user/{NOBODY}")
    daemon = machine.serve(*SMALL, uid=NOBODY, HOME="/mnt/home")
    assert daemon.ready["socket"] == f"/run/user/{NOBODY}/kvstore/kvstore.sock"
    assert "kvstore-data.json" in machine.shell("ls /mnt/home/.local/state/kvstore")
    assert machine.run("status", uid=NOBODY, HOME="/mnt/home").code == 0


def test_a_place_in_tmp_that_others_made_is_not_used(machine: Machine) -> None:
    """Whoever was there first could read, or answer, for us: one line, and no second try."""
    machine.shell(f"mkdir /tmp/kvstore-{NOBODY} && chmod 777 /tmp/kvstore-{NOBODY}")
    done = machine.run("serve", *SMALL, uid=NOBODY)
    assert done.code == 2
    assert done.line == f"data_dir /tmp/kvstore-{NOBODY}/state: another user has made it"


def test_more_than_a_group_allows_is_refused_again_and_again(group: Group, machine: Machine) -> None:
    """One line that says what would fit, exit code 2, nobody is killed: neither we nor the neighbour."""
    small = group(400 * MIB)
    neighbour = hog(machine, small, 50 * MIB)
    wait_held(neighbour)
    for words in (["--set=dram.capacity_bytes=1GiB"], README, ["--set=dram.capacity_bytes=1GiB"]):
        done = machine.run("serve", *words, group=small)
        assert done.code == 2
        assert "of the 400 MiB of cgroup /" in done.line and "; at most 128MiB would fit;" in done.line
    assert neighbour.poll() is None and arenas(machine) == []


def test_an_arena_from_outside_does_not_kill_a_small_group(group: Group, machine: Machine) -> None:
    """A daemon is moved into a group that is smaller than its arena: refused, or with "shrink" a smaller one."""
    large = ("--set=dram.capacity_bytes=600MiB", "--set=dram.slab_bytes=4MiB")
    outside = machine.serve(*large)
    wait_for(lambda: int(str(arenas(machine)[0]["held_bytes"])) >= 600 * MIB)
    outside.stop(signal.SIGKILL)
    small = group(400 * MIB)
    done = machine.run("serve", *large, group=small)
    assert done.code == 2 and "; at most " in done.line
    daemon = machine.serve(*large, "--set=dram.when_short=shrink", group=small)
    (arena,) = arenas(machine)
    assert 150 * MIB < int(str(arena["capacity_bytes"])) < 272 * MIB
    assert daemon.stop() == 0


def test_a_start_after_an_oom_kill_does_not_repeat_it(group: Group, machine: Machine) -> None:
    """The kernel kills the daemon because a neighbour grows. The next one starts in what is left, with less."""
    small = group(400 * MIB)
    words = ("--set=dram.capacity_bytes=192MiB", "--set=dram.slab_bytes=4MiB")
    daemon = machine.serve(*words, group=small)
    wait_for(lambda: int(str(arenas(machine)[0]["held_bytes"])) >= 192 * MIB)
    Path(f"/proc/{daemon.process.pid}/oom_score_adj").write_text(
        "1000"
    )  # the first that the kernel would kill
    neighbour = hog(machine, small, 200 * MIB)
    assert daemon.process.wait(TIMEOUT_S) == -signal.SIGKILL
    neighbour.kill()
    neighbour.wait(TIMEOUT_S)
    other = hog(machine, small, 80 * MIB)
    wait_held(other)
    again = machine.serve(*words, group=small)
    log = again.log()
    assert "memory ran out while the last daemon served" in log
    assert "the arena of an earlier daemon (19" in log and "was given back" in log
    (arena,) = arenas(machine)
    assert 0 < int(str(arena["capacity_bytes"])) < 128 * MIB
    assert machine.run("status").code == 0 and other.poll() is None
    assert again.stop() == 0


def wait_for(is_so: Callable[[], bool]) -> None:
    give_up_s = time.monotonic() + TIMEOUT_S
    while not is_so():
        assert time.monotonic() < give_up_s
        time.sleep(0.05)
