"""Taking secrets, and names, out of what leaves this machine: what is known to be harmless stays, nothing else.

    values known to be secret (variables, keys of TOML files, passwords of URLs)  ─▶ taken out wherever they stand
    what looks like a secret (URLs with userinfo or query, `token=…`, cloud keys, PEM) ─▶ taken out by its form
    names of models and tenants                                                   ─▶ model-3f2a…, the same in all files
    of what is left: words of our own messages (kvstore/tools/doctor/vocabulary.py), numbers, times  ─▶ stay
                     every other word, whatever it is                             ─▶ word-91c0…, the same in all files

So a secret leaves in no spelling: escaped, percent-encoded, in base64 or behind an option that nobody thought of, it is a word
that we never wrote. The first three are there for secrets made of such words, and for the reader. What stands for a word is a
digest with a key that is thrown away: a reader can see that two words are the same, and not what they were.

Rather too much than too little: a reader asks back for what is missing; nobody can take back what was sent.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from kvstore.tools.doctor.vocabulary import WORD, is_figure, vocabulary, words_in

GONE = "(removed)"
_KEYS = r"(?:api|access|private|session|account|shared|storage|secret)[-_]?key"
_WORDS = rf"secret|token(?!s_per|iz)|passw|passphrase|pwd|credential|{_KEYS}|auth|bearer|signature|sas|salt|_headers$"
_WORDS_OF_FORMS = (
    r"secret|token(?!iz|s[\w.-]*[\"']?\s*[=:]\s*\d)|passw|passphrase|pwd|credential|"
    rf"{_KEYS}|auth|signature|salt|(?<![a-z])(?:sig|sas|pass)(?![a-z])"
)
_SECRET = re.compile(_WORDS + "|(^|[^a-z])key($|[^a-z])", re.IGNORECASE)
_NOT_SECRET = frozenset({"tokens", "hash seed", "PWD", "OLDPWD"})
_OPEN_VARIABLES = re.compile(
    r"KVSTORE_[A-Z0-9_]+|PYTHONHASHSEED|PYTHONPATH|CUDA_VISIBLE_DEVICES|LANG|LC_[A-Z]+"
)
_CLOUDS = ("AWS_", "AZURE_", "GOOGLE_", "GCP_")  # everything of these, but for:
_OPEN_ENDS = ("_REGION", "_CA_BUNDLE", "_PROFILE", "_ENABLED", "_DISABLED")
_NAMES_IN = frozenset({"model", "models", "tenant", "tenants", "engine", "label", "revision", "draft"})
_NAMED = re.compile(r"""\b(model|tenant|engine|label)=('[^'\n]+'|"[^"\n]+"|[^\s'"]+)""")  # of a console
_LITERAL_CHARS_MIN = 5  # a shorter secret would take words out of everything; its form still counts
_PLAIN = re.compile(  # so would these, which are the values of some variables
    r"(?i)\d{1,7}|true|false|table|standard|adaptive|legacy|default|disabled|enabled|required|virtual|regional"
)

_FORMS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"-----BEGIN [A-Z ]+-----.*?(-----END [A-Z ]+-----|\Z)", re.DOTALL), GONE),
    (re.compile(r"([A-Za-z][A-Za-z0-9+.-]*://)[^\s\"'<>]*@"), r"\1" + GONE + "@"),
    (re.compile(r"([A-Za-z][A-Za-z0-9+.-]*://[^\s?#\"'<>]*)[?#][^\s\"'<>]*"), r"\1?" + GONE),
    (re.compile(r"\b(Bearer|Basic|Negotiate|AWS4-HMAC-SHA256)\s+[^\s\"',;]+", re.IGNORECASE), r"\1 " + GONE),
    (re.compile(r"(?im)\b((?:set-)?cookie|(?:proxy-)?authorization)\s*:[^\n]*"), r"\1: " + GONE),
    (re.compile(rf"(?i)(--?(?:[\w-]*(?:{_WORDS_OF_FORMS}))[\w-]*[ \t]+)(?!-)(\"[^\"\n]*\"|'[^'\n]*'|[^\s\"']+)"), r"\1" + GONE),
    (re.compile(r"\b(?:AKIA|ASIA|AROA|AIDA)[A-Z0-9]{12,}\b"), GONE),
    (re.compile(r"\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]*)?"), GONE),
    (re.compile(r"\b(?:gh[pousr]_|github_pat_|hf_|sk-|xox[abp]-|glpat-|ya29\.)[A-Za-z0-9_.-]{8,}"), GONE),
    (
        re.compile(
            rf"""(?ix)( ["']? [\w.-]* (?:{_WORDS_OF_FORMS})
            [\w.-]* ["']? \s* [=:] \s* ) ( "[^"\n]*" | '[^'\n]*' | [^\s,;}}\]"']+ )"""
        ),
        r"\1" + GONE,
    ),
)  # fmt: skip


def is_secret(name: str) -> bool:
    """Whether what has this name is nobody's business."""
    return name not in _NOT_SECRET and _SECRET.search(name) is not None


def secrets_of(environment: Mapping[str, str]) -> Iterator[str]:
    """Values of variables with such names, of every AWS_…, and what is secret in URLs."""
    for name, value in environment.items():
        if (name.startswith(_CLOUDS) and not name.endswith(_OPEN_ENDS)) or is_secret(name):
            yield value
        if name.endswith("_HEADERS"):
            yield from (pair.partition("=")[2] for pair in (value + "," + unquote(value)).split(","))
        yield from _of_urls(value)


def secrets_in(value: Any, name: str = "") -> Iterator[str]:
    """Of a parsed document: values under keys with such names, and what is secret in URLs."""
    if isinstance(value, Mapping):
        for inner, content in value.items():
            yield from secrets_in(content, name if is_secret(name) else str(inner))
    elif isinstance(value, (list, tuple)):
        for content in value:
            yield from secrets_in(content, name)
    elif isinstance(value, str):
        if is_secret(name):
            yield value
        yield from _of_urls(value)


def _of_urls(text: str) -> Iterator[str]:
    for userinfo in re.findall(r"://([^\s\"'<>]+)@", text):
        yield userinfo
        yield from userinfo.split(":")
    for query in re.findall(r"://[^\s?]*\?([^\s#]+)", text):
        yield from (pair.partition("=")[2] for pair in query.split("&"))


def names_in(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """(kind, name) of models, tenants and labels of a parsed document."""
    if isinstance(value, Mapping):
        for inner, content in value.items():
            yield from names_in(content, str(inner))
    elif isinstance(value, (list, tuple)):
        for content in value:
            yield from names_in(content, name)
    elif isinstance(value, str) and name in _NAMES_IN and value:
        yield name.rstrip("s"), value


def names_in_log(text: str) -> Iterator[tuple[str, str]]:
    """The same of its lines: JSON, behind what the journal puts before it, or model=… as on a terminal."""
    for line in text.splitlines():
        try:
            yield from names_in(json.loads(line[line.index("{") :]))
        except (ValueError, RecursionError):
            yield from ((kind, name.strip("'\"")) for kind, name in _NAMED.findall(line))


class Scrubber:
    """For one bundle: its names are replaced by digests that mean nothing in another one."""

    def __init__(
        self, secrets: Iterable[str], names: Iterable[tuple[str, str]] = (), kept: Iterable[str] = ()
    ) -> None:
        """kept: names that stay."""
        self._seed = os.urandom(16)
        self._made: set[str] = set()  # aliases
        self._kept = vocabulary() | {word for name in kept for word in words_in(name)}
        literal = {s for s in secrets if len(s) >= _LITERAL_CHARS_MIN and not _PLAIN.fullmatch(s)}
        self._secrets = _any_of(literal)
        self._aliases = {name: self._alias(kind, name) for kind, name in names}
        self._names = _any_of(self._aliases, whole=True)

    def text(self, text: str) -> str:
        if self._secrets is not None:
            text = self._secrets.sub(GONE, text)
        for form, instead in _FORMS:
            text = form.sub(instead, text)
        if self._names is not None:
            text = self._names.sub(lambda match: self._aliases[match[0]], text)
        return WORD.sub(self._word, text)

    def _word(self, match: re.Match[str]) -> str:
        word = match[0]
        if word in self._made or word.lower() in self._kept or is_figure(word):
            return word
        if all(part.lower() in self._kept or is_figure(part) for part in word.split(".")):  # dram.slab_bytes
            return word
        return self._alias("word", word)

    def document(self, value: Any, name: str = "") -> Any:
        """The same of a parsed document: no key and no string in it stays unlooked at."""
        if isinstance(value, Mapping):
            return {
                self.text(str(inner)): self.document(content, str(inner)) for inner, content in value.items()
            }
        if isinstance(value, (list, tuple)):
            return [self.document(content, name) for content in value]
        if isinstance(value, str):
            return GONE if value and is_secret(name) else self.text(value)
        return value

    def environment(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Which variables there are; values only of those that are ours or harmless."""
        return {
            name: self.text(value) if _OPEN_VARIABLES.fullmatch(name) and not is_secret(name) else GONE
            for name, value in sorted(environment.items())
        }

    def _alias(self, kind: str, name: str) -> str:
        digest = hashlib.blake2b(name.encode(errors="surrogatepass"), key=self._seed, digest_size=5)
        alias = f"{kind}-{digest.hexdigest()}"
        self._made.add(alias)
        return alias


def _any_of(words: Iterable[str], whole: bool = False) -> re.Pattern[str] | None:
    """The longest first; whole: not inside of longer words."""
    ordered = sorted(words, key=len, reverse=True)
    if not ordered:
        return None
    joined = "|".join(map(re.escape, ordered))
    return re.compile(rf"(?<!\w)(?:{joined})(?!\w)" if whole else joined)
