"""The unit under a real systemd: everything that the daemon does works in its sandbox.

A systemd is started as the first process of namespaces of its own (boot.sh), with the unit as it is shipped. Only its log goes to a
file, and /opt/kvstore is this checkout.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.running import ROOT
from tests.test_tidy import ROOMS

BOOT = Path(__file__).parent / "boot.sh"
SYSTEMD = Path("/lib/systemd/systemd")
CAN_BOOT = os.geteuid() == 0 and SYSTEMD.exists() and shutil.which("unshare") is not None

CONFIGURATION = """
[dram]
capacity_bytes = "128MiB"
[nvme]
directories = ["/mnt/nvme0"]
capacity_bytes = "256MiB"
[events]
endpoint = "tcp://127.0.0.1:5599"
[web]
listen = "127.0.0.1:9481"
"""

ENGINE = """
from kvstore.client import Client
hashes = [bytes([n]) * 32 for n in range(1, 9)]
records = [bytes([n]) * 100_000 for n in range(8)]
with Client("/run/kvstore/kvstore.sock", timeout_s=30, label="engine") as client:
    space = client.namespace(b"n" * 16, 100_000, 32, 16, {"model": "test"})
    put = client.put(space, hashes, b"", records)
    into = [bytearray(100_000) for _ in hashes]
    got = client.get(space, hashes, into, wait_s=10)
    print(f"engine put={put} got={got} equal={into == records}")
"""

SCRIPT = """
engine() { setpriv --reuid kvstore --regid kvstore --clear-groups /opt/kvstore/bin/python /opt/engine.py; }
until_page() { for _ in $(seq 100); do curl -sf http://127.0.0.1:9481/healthz && break; sleep 0.1; done; }
systemctl start kvstore
echo "started $(systemctl show -p ActiveState --value kvstore)"
engine
echo "page $(until_page)"
pid=$(systemctl show -p MainPID --value kvstore)
echo "confined $(grep -E '^(CapBnd|NoNewPrivs|Seccomp):' /proc/$pid/status | tr -s '\\n\\t' '  ')"
systemctl reload kvstore && echo "reloaded"
systemctl kill --signal=KILL --kill-whom=main kvstore
for _ in $(seq 100); do
    new=$(systemctl show -p MainPID --value kvstore)
    [ "$new" != 0 ] && [ "$new" != "$pid" ] && [ "$(systemctl show -p ActiveState --value kvstore)" = active ] && break
    sleep 0.1
done
engine
/opt/kvstore/bin/kvstore status
systemctl stop kvstore
echo "stopped $(systemctl show -p Result --value kvstore) $(ls /run/kvstore/huge /dev/shm | grep -c arena)"
cat /opt/log
"""


@pytest.mark.skipif(not CAN_BOOT, reason="needs root, and systemd to be installed")
def test_the_daemon_does_everything_in_the_unit(tmp_path: Path) -> None:
    """Huge pages, an engine, NVMe, the page, events, a reload, kill -9 with a warm arena behind it, a stop that keeps it: all under
    a real systemd, without a capability and behind its filters."""
    units, opt = tmp_path / "units", tmp_path / "opt"
    for place in (units / "kvstore.service.d", opt / "kvstore/bin"):
        place.mkdir(parents=True)
    shutil.copy(ROOT / "deploy/kvstore.service", units)
    (units / "kvstore.service.d/log.conf").write_text(
        "[Service]\nStandardOutput=append:/opt/log\nStandardError=append:/opt/log\n"
    )
    python = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for name, words in (("python", ""), ("kvstore", "-m kvstore")):
        script = opt / "kvstore/bin" / name
        path = "LD_LIBRARY_PATH=/opt/python/lib PYTHONPATH=/opt/project:/opt/packages"
        script.write_text(f'#!/bin/sh\n{path} exec /opt/python/bin/{python} {words} "$@"\n')
        script.chmod(0o755)
    (opt / "project").mkdir()
    for room in ROOMS:
        shutil.copytree(ROOT / room, opt / "project" / room, ignore=shutil.ignore_patterns("__pycache__"))
    (opt / "engine.py").write_text(ENGINE)
    (tmp_path / "kvstore.toml").write_text(CONFIGURATION)
    (tmp_path / "script").write_text(SCRIPT)
    words = ["unshare", "--mount", "sh", str(BOOT), str(tmp_path), str(tmp_path / "script")]
    places = {"BASE": sys.base_prefix, "PACKAGES": sysconfig.get_path("purelib")}
    done = subprocess.run(words, env={**os.environ, **places}, capture_output=True, text=True, timeout=180)
    if done.returncode != 0:
        pytest.skip(f"no machine can be made here: {done.stderr[-300:]}")
    said = (tmp_path / "said").read_text()
    assert "started active" in said, said + (tmp_path / "systemd").read_text()
    assert "engine put=8 got=8 equal=True" in said, said
    assert "engine put=0 got=8 equal=True" in said, "after kill -9 all is there"
    assert "page ok" in said, said
    (confined,) = [line for line in said.splitlines() if line.startswith("confined ")]
    assert confined.split()[1:] == ["CapBnd:", "0" * 16, "NoNewPrivs:", "1", "Seccomp:", "2"]
    assert "reloaded" in said, said
    assert '"arena adopted"' in said and '"records": 8' in said, said
    assert "/run/kvstore/huge/kvstore-" in said, "the tmpfs with huge pages that the unit mounts"
    assert "stopped success 1" in said, said
    assert "Traceback" not in said and "PROBLEM" not in said, said
