"""What leaves the machine in a bundle: enough to help with, and not one secret."""

from __future__ import annotations

import base64
import json
import os
import re
import stat
import tarfile
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.client import Client
from kvstore.tools.doctor import vocabulary as vocabulary_module
from kvstore.tools.doctor.scrub import GONE, Scrubber, names_in_log, secrets_in, secrets_of
from kvstore.tools.doctor.vocabulary import is_figure, vocabulary
from tests.region.regions import init, regions_file
from tests.running import Daemon, Place, kvstore
from tests.test_tidy import ROOMS

Serve = Callable[..., Daemon]

# Each is planted somewhere; the words around them say where.
PLANTED = {
    "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMIK7MDENGbPxRfiCYSECRETKEY001",
    "AWS_ACCESS_KEY_ID": "AKIAIOSFODNN7PLANTED",
    "AWS_SESSION_TOKEN": "FwoGZXIvYXdzPLANTEDSESSION",
    "HF_TOKEN": "hf_plantedplantedplanted",
    "MY_DB_PASSWORD": "correct-horse-battery",
    "SOME_API_KEY": "planted-api-key-77",
    "MYSQL_PWD": "planted-mysql-1",
    "OTEL_EXPORTER_OTLP_HEADERS": "x-team=planted%20header,x-b=plantedheader2",
    "HTTPS_PROXY": "http://proxyuser:proxysecret9@proxy.example:3128",
}
_LOG = """\
2026-11-23T10:00:00 node kvstore[1]: joined s3 with AWS4-HMAC-SHA256 Credential=PLANTED1/20261123
2026-11-23T10:00:01 node kvstore[1]: GET https://u:plantedpw2@bucket.example/x?X-Amz-Signature=planted3 failed
2026-11-23T10:00:02 node kvstore[1]: {"api_key": "planted4", "password" : "planted five", "event": "it serves"}
2026-11-23T10:00:03 node kvstore[1]: Authorization: Bearer planted6.planted6
2026-11-23T10:00:04 node kvstore[1]: client_secret=planted7; access_token: planted8
2026-11-23T10:00:05 node kvstore[1]: an engine is here: model secret-model-x, tenant acme-bank
2026-11-23T10:00:05 node kvstore[1]: sent planted header and plantedheader2 as x-api-key: planted-by-form
2026-11-23T10:00:05 node kvstore[1]: {"event": "an engine is here", "engine": "gone-engine rank 0", "model": "gone-model"}
2026-11-23T10:00:06 node kvstore[1]: gone-model is gone, and gone-engine rank 0
2026-11-23T10:00:06 node kvstore[1]: it said correct-horse-battery and ASIAIOSFODNN7PLANTED
-----BEGIN PRIVATE KEY-----
planted9planted9
-----END PRIVATE KEY-----
"""
GONE_FROM_ALL = [
    *(value for name, value in PLANTED.items() if name != "HTTPS_PROXY"),
    "proxyuser", "proxysecret9", "PLANTED1", "plantedpw2", "planted3", "planted4", "planted five", "planted6", "planted7",
    "planted8", "planted9", "planted header", "plantedheader2", "planted-by-form", "ASIAIOSFODNN7PLANTED", "tomlsecret10", "tomlsecret11", "urlsecret12",
]  # fmt: skip


def members(path: Path) -> dict[str, str]:
    with tarfile.open(path) as archive:
        found = {}
        for entry in archive:
            assert entry.isfile() and entry.name.startswith("kvstore-doctor/") and entry.mode == 0o600
            file = archive.extractfile(entry)
            assert file is not None
            found[entry.name.removeprefix("kvstore-doctor/")] = file.read().decode()
        return found


def journal(path: Path) -> str:
    """A PATH whose journalctl has our log lines."""
    path.mkdir()
    (path / "log").write_text(_LOG)
    (path / "journalctl").write_text(f'#!/bin/sh\ncat "{path}/log"\n')
    (path / "journalctl").chmod(0o755)
    return f"{path}:/usr/bin:/bin"


@pytest.fixture
def with_secrets(place: Place, serve: Serve, tmp_path: Path) -> tuple[list[str], dict[str, str]]:
    """Arguments and variables of a daemon beside which secrets stand wherever one could; a bank uses it."""
    file = regions_file(tmp_path, "na")
    init(file, "na")
    file.write_text(
        file.read_text() + '[[rules]]\ntenants = ["acme-bank"]\n# planted in a comment: tomlsecret10\n'
    )
    config = tmp_path / "kvstore.toml"
    config.write_text(
        f'region = "na"\nregions_file = "{file}"\n[events]\ntopic = "t"\n# password = "tomlsecret11"\n'
    )
    daemon_arguments = [f"--config={config}", *place.arguments]
    serve(place, *daemon_arguments, KVSTORE_EVENTS__TOPIC="", **PLANTED)
    with Client(place.socket, timeout_s=10, label="acme-bank rank 0") as client:
        fields = {
            "model": "secret-model-x",
            "tenant": "acme-bank",
            "revision": "https://me:urlsecret12@hub.example/r",
        }
        space = client.namespace(b"b" * 16, 4096, 32, 16, fields)
        assert client.put(space, [b"h" * 32], b"", [b"x" * 4096]) == 1
        client.lookup([space], [b"h" * 32], ticket=1, tokens=16)
    with Client(place.socket, timeout_s=10, attach=False) as client:
        client.change_setting("log.level", "warning")
    ours = {"KVSTORE_LOG__LEVEL": "info", "KVSTORE_EVENTS__TOPIC": "ours"}
    variables = {**PLANTED, "PATH": journal(tmp_path / "bin"), **ours}
    return daemon_arguments, variables


def test_no_secret_is_in_it(with_secrets: tuple[list[str], dict[str, str]], tmp_path: Path) -> None:
    """Secrets in variables, settings, files, URLs and log lines are in no member; what helps is. Mode 0600."""
    arguments, variables = with_secrets
    out = tmp_path / "bundle.tar.gz"
    done = kvstore("doctor", *arguments, f"--bundle={out}", "-o", "json", **variables)
    assert done.returncode == 0, (done.stdout, done.stderr)
    assert stat.S_IMODE(out.stat().st_mode) == 0o600
    found = members(out)
    assert json.loads(found["settings.json"])["log.level"] == "warning", "the daemon's"
    assert json.loads(found["environment.json"])["KVSTORE_EVENTS__TOPIC"] == "", "the daemon's"
    for secret in GONE_FROM_ALL:
        assert not [name for name, text in found.items() if secret in text], secret
    assert {"doctor.json", "status.json", "report.json", "retention.json", "settings.json", "regions.json", "environment.json",
            "versions.json", "log.txt", "meminfo.txt", "mounts.txt", "limits.txt", "cgroup.txt"} == set(found)  # fmt: skip
    assert "it serves" in found["log.txt"] and "MemAvailable" in found["meminfo.txt"]
    assert json.loads(found["environment.json"])["HF_TOKEN"] == GONE
    assert json.loads(found["environment.json"])["KVSTORE_LOG__LEVEL"] == "info"
    assert json.loads(found["status.json"])["tiers"][0]["records"] == 1
    for name, text in found.items():
        assert f"kvstore-doctor/{name} ({len(text.encode()):,} bytes)" in done.stderr


def test_names_are_replaced_and_can_be_kept(
    with_secrets: tuple[list[str], dict[str, str]], tmp_path: Path
) -> None:
    """Models and tenants have one other name in all members, another one in the next bundle, their own with --names."""
    arguments, variables = with_secrets
    bundles = []
    for number in range(2):
        out = tmp_path / f"bundle{number}.tar.gz"
        assert kvstore("doctor", *arguments, f"--bundle={out}", **variables).returncode == 0
        bundles.append(members(out))
    for name in ("secret-model-x", "acme-bank", "gone-model", "gone-engine"):
        assert not [file for file, text in bundles[0].items() if name in text], name
    told = [json.loads(bundle["status.json"])["namespaces"][0]["fields"]["tenant"] for bundle in bundles]
    assert told[0].startswith("tenant-") and told[0] != told[1]
    for file in ("log.txt", "regions.json", "report.json"):
        assert told[0] in bundles[0][file], file
    kept = tmp_path / "kept.tar.gz"
    assert kvstore("doctor", *arguments, f"--bundle={kept}", "--names", **variables).returncode == 0
    found = members(kept)
    assert "acme-bank" in found["log.txt"] and "secret-model-x" in found["status.json"]
    assert not [file for file, text in found.items() if PLANTED["MY_DB_PASSWORD"] in text]


def test_a_bundle_without_a_daemon(place: Place, tmp_path: Path) -> None:
    """With nobody to ask, and settings that are wrong, there is a bundle all the same: for that it is."""
    out = tmp_path / "bundle.tar.gz"
    done = kvstore("doctor", "--set=dram.slab_bytes=3", f"--socket={place.socket}", f"--bundle={out}")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    found = members(out)
    assert "status.json" not in found and "settings.json" not in found
    assert "dram.slab_bytes" in found["doctor.json"]


def test_names_are_replaced_without_a_daemon(place: Place, serve: Serve, tmp_path: Path) -> None:
    """What only the data directory still tells is replaced in the log, too."""
    daemon = serve(place)
    with Client(place.socket, timeout_s=10) as client:
        fields = {"model": "secret-model-x", "tenant": "acme-bank"}
        space = client.namespace(b"b" * 16, 4096, 32, 16, fields)
        assert client.put(space, [b"h" * 32], b"", [b"x" * 4096]) == 1
    assert daemon.stop() == 0
    out = tmp_path / "bundle.tar.gz"
    kvstore("doctor", *place.arguments, f"--bundle={out}", PATH=journal(tmp_path / "bin"))
    log = members(out)["log.txt"]
    assert "an engine is here: model model-" in log and "acme-bank" not in log


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("tokens: 512, hash seed", "tokens: 512, hash seed"),
        ("hit_tokens=512 lookups", "hit_tokens=512 lookups"),
        ("tokens=abc", f"tokens={GONE}"),
        ("x-api-key: abc", f"x-api-key: {GONE}"),
        ("api-key=abc pwd=def", f"api-key={GONE} pwd={GONE}"),
        ("PREFILL_TOKENS_PER_S=20000 PYTHONHASHSEED=off", "PREFILL_TOKENS_PER_S=20000 PYTHONHASHSEED=off"),
        ("https://u:p/w@h/x", f"https://{GONE}@h/x"),
        ("https://node7.corp/a/b", "https://WORD/a/b"),
        ("s3://bucket/prefix?versionId=abc", f"s3://bucket/prefix?{GONE}"),
        ("postgres://u:p@h/db", f"postgres://{GONE}@h/db"),
        ("redis://:p@ss@h:1/0", f"redis://{GONE}@h:1/0"),
    ],
)
def test_forms(text: str, left: str) -> None:
    """What has the form of a secret goes, words of ours stay, any other word has another name."""
    assert re.sub(r"\bword-[0-9a-f]{10}\b", "WORD", Scrubber(()).text(text)) == left


def spellings(secret: str) -> set[str]:
    """As a log, a URL, a header or a dump may have it."""
    raw = secret.encode()
    return {
        secret, json.dumps(secret)[1:-1], repr(secret)[1:-1], quote(secret, safe=""), quote_plus(secret), quote(quote(secret, safe="")),
        base64.b64encode(raw).decode(), base64.urlsafe_b64encode(raw).decode().rstrip("="), base64.b32encode(raw).decode(), raw.hex(),
        secret[::-1], secret.encode("unicode_escape").decode(), "".join(f"\\u{ord(char):04x}" for char in secret), f"%{raw.hex('%')}",
    }  # fmt: skip


FORMS = [
    "Cookie: session={}", "Set-Cookie: id={}; Secure", "GET /x?sig={}&se=1", "AccountKey={};EndpointSuffix=core", "--password {}",
    "--token={}", "mysql -p{}", "user:{}@host", "SharedAccessKey={}", "X-Vault-Token: {}", "{{'auth': ('me', '{}')}}", "key {} was refused",
    "Authorization: Digest username=me, response={}", "connect to https://h/{}/x", "login me {}", "pw={}", "[{}]", "<Password>{}</Password>",
    "b'{}'", "password was '{}', is not any more", "tok_{}", "--header 'X-Auth: {}'", "p12 passphrase {}",
]  # fmt: skip


@settings(deadline=None)
@given(
    st.sampled_from(FORMS),
    st.text("abcdefghijkmnpqrstuvwxyzABCDEFGH23456789+/=_-.~!$&@ü", min_size=10, max_size=40).filter(
        lambda text: len(re.findall(r"[A-Za-z0-9]{6,}", text)) > 0
    ),
    st.booleans(),
)
def test_a_secret_leaves_in_no_spelling(form: str, secret: str, is_known: bool) -> None:
    """Whatever stands before it, known or not, as it is, escaped, encoded or turned round: none of its words is left."""
    scrubber = Scrubber([secret] if is_known else [])
    for spelled in spellings(secret):
        left = scrubber.text(form.format(spelled))
        words = [word for word in re.findall(r"[A-Za-z0-9]{6,}", spelled) if word.lower() not in vocabulary()]
        assert not [word for word in words if word in left and not is_figure(word)], (form, spelled, left)


def test_words_of_every_room_may_leave() -> None:
    """A room that was forgotten would have its messages blacked out."""
    assert set(vocabulary_module.ROOMS) == set(ROOMS)


def test_our_own_lines_stay_readable() -> None:
    """Messages of our sources, errors of the system, figures and times are what they were."""
    line = (
        '2026-11-25T10:00:01.123456Z {"event": "a pack was not put", "reason": "s3://: put: the store answers 403 ExpiredToken", '
        '"level": "warning", "tries": 3, "took": "1.5 s", "bytes": 4294967296, "errno": "No space left on device"}'
    )
    assert Scrubber(()).text(line) == line


def test_the_same_word_has_the_same_name_in_one_bundle_only() -> None:
    """So a reader can follow a thing through the files, and nobody can find out what it was by trying."""
    scrubber = Scrubber(())
    assert scrubber.text("node-17x") == scrubber.text("node-17x") != Scrubber(()).text("node-17x")
    assert scrubber.text("word-0123456789") != "word-0123456789", "only what it made itself"


def test_what_is_no_secret_takes_nothing_else_along() -> None:
    """Names that only look like one, short numbers and common words are taken out nowhere else."""
    environment = {
        "TOKENIZERS_PARALLELISM": "maybe",
        "KVSTORE_ENGINE__PREFILL_TOKENS_PER_S": "20000",
        "PWD": "/var/lib",
        "AWS_DEFAULT_OUTPUT": "table",
        "AWS_EC2_METADATA": "false",
        "DB_PASSWORD": "12345",
    }
    scrubber = Scrubber([*secrets_of(environment), *secrets_in({"tokenizers": "0.22.1"})])
    text = "maybe 20000 /var/lib table false 12345 0.22.1"
    assert scrubber.text(text) == text
    assert "87654321" not in Scrubber(secrets_of({"DB_PASSWORD": "87654321"})).text("it said 87654321")


def test_names_of_a_log() -> None:
    """In JSON behind what the journal says first, and as a console has them; a cut line has none."""
    log = (
        'node kvstore[1]: {"event": "e", "engine": "rank 0", "tenant": "acme", "model": ""}\n'
        "2026 [info ] an engine is here [kvstore.door] engine='rank 1' model=llama tenant=''\n"
        'node kvstore[1]: {"engine": "cut'
    )
    assert list(names_in_log(log)) == [
        ("engine", "rank 0"), ("tenant", "acme"), ("engine", "rank 1"), ("model", "llama")
    ]  # fmt: skip


def test_a_short_name_takes_nothing_else_along() -> None:
    """A tenant called "a" is replaced as a word, not inside of other words; longer names go first."""
    scrubber = Scrubber((), [("tenant", "a"), ("tenant", "a-b")])
    said = scrubber.text("tenant a has data, a-b too")
    assert said.endswith(" too") and " has data, " in said and " a" not in said.replace(" has", "")


def test_hostile_settings_hang_nothing(place: Place, tmp_path: Path) -> None:
    """A configuration that is a FIFO, and names of regions with markup, end in a bundle."""
    os.mkfifo(tmp_path / "fifo")
    out = tmp_path / "bundle.tar.gz"
    done = kvstore("doctor", f"--config={tmp_path / 'fifo'}", f"--socket={place.socket}", f"--bundle={out}")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "not a file" in members(out)["doctor.json"]
