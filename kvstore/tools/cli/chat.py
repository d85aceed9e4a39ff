"""Messages of a chat request as token ids: through the chat template of the model, as an engine does it.

    [{"role": "user", "content": "…"}]                  messages alone, or
    {"messages": […], "cache_salt": "…"}                the body of a request to /v1/chat/completions
        │
        ╰─▶ template of the tokenizer (or --chat-template) ─▶ token ids

Text only, and no tools: how those are written differs between versions of an engine, and vLLM's own /tokenize tells their ids.
Of a body, what changes the prompt is read: messages, add_generation_prompt, continue_final_message, chat_template_kwargs
and cache_salt.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from kvstore.tools.cli import NOT_FOUND, USAGE, CliError
from tiers.reading import Unreadable, read_text

# Templates that go through the parts of a message; to others an engine gives one text.
OF_PARTS = re.compile(r"for\s+\w+\s+in\s+\w+(\.content\b|\[\s*['\"]content['\"]\s*\])")
SHOWN_CHARS_MAX = 200
TEMPLATE_BYTES_MAX = 4 << 20


class Chat(NamedTuple):
    """tokens: ids of the prompt. salt: cache_salt of the body, "" without one."""

    tokens: list[int]
    salt: str


def chat_tokens(word: str, read: Callable[[str], str], tokenizer: Path | None, template: Path | None) -> Chat:
    """What an engine computes of a chat request. word: JSON, a file, or - for stdin; read: takes "@FILE" and "-". Raises
    CliError."""
    body = _body(word if word.lstrip()[:1] in ("[", "{") else read(word if word[:1] in "@-" else f"@{word}"))
    if tokenizer is None:
        raise _wrong("--chat needs --tokenizer, the model's directory")
    given = _read_template(template) if template is not None else None
    loaded = _loaded(tokenizer)
    text = given or loaded.chat_template
    if not text:
        raise _wrong(f"--tokenizer {tokenizer}: has no chat template: give one as --chat-template FILE")
    messages = [_message(message, bool(OF_PARTS.search(str(text)))) for message in body["messages"]]
    words: dict[str, Any] = {
        "add_generation_prompt": body.get("add_generation_prompt", True),
        "continue_final_message": body.get("continue_final_message", False),
        **(body.get("chat_template_kwargs") or {}),
    }
    try:
        ids = loaded.apply_chat_template(
            messages, chat_template=given, tokenize=True, return_dict=False, **words
        )
    except Exception as error:  # whatever a template raises
        told = " ".join(str(error).split()) or type(error).__name__
        raise _wrong(f"--chat: the template refuses it: {told[:SHOWN_CHARS_MAX]}") from error
    return Chat([int(token) for token in ids], str(body.get("cache_salt") or ""))


def _wrong(text: str, code: int = USAGE) -> CliError:
    return CliError(f"explain: {text}", exit_code=code)


def _body(text: str) -> dict[str, Any]:
    """A body with messages, whichever of both was given."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _wrong(f"--chat: not valid JSON: {str(error)[:SHOWN_CHARS_MAX]}") from error
    body = {"messages": found} if isinstance(found, list) else found
    messages = body.get("messages") if isinstance(body, dict) else None
    if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
        raise _wrong(
            '--chat: allowed are messages, [{"role": "user", "content": "…"}], or a request with such "messages"'
        )
    if body.get("chat_template_kwargs") is not None and not isinstance(body["chat_template_kwargs"], dict):
        raise _wrong("--chat: chat_template_kwargs: not an object")
    if body.get("tools") or body.get("documents") or body.get("reasoning_effort"):
        raise _wrong(
            "--chat: requests with tools, documents or reasoning_effort are not covered: ask the engine's /tokenize for the "
            "ids, and give them as --tokens"
        )
    return dict(body)


def _is_message(message: object) -> bool:
    return isinstance(message, dict) and isinstance(message.get("role"), str)


def _message(message: dict[str, Any], of_parts: bool) -> dict[str, Any]:
    """As an engine hands it to the template: parts where that goes through them, else one text."""
    content = message.get("content")
    given = (
        content if isinstance(content, list) else [content] if isinstance(content, str) and of_parts else None
    )
    if given is None:
        return message
    parts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in given]
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise _wrong("--chat: prompts with images, audio or files are not covered: text parts only")
    return {**message, "content": parts if of_parts else "\n".join(part["text"] for part in parts)}


def _read_template(path: Path) -> str:
    try:
        return read_text(path, TEMPLATE_BYTES_MAX)
    except Unreadable as error:
        raise _wrong(f"--chat-template {error}", NOT_FOUND if error.is_missing else USAGE) from error


def place_of_model(path: Path) -> Path:
    """The directory of a model that is named as `vllm serve` takes it, where the cache of Hugging Face has it; else the path itself."""
    if path.exists() or path.is_absolute() or len(path.parts) > 2:
        return path
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    cached = Path(os.environ.get("HF_HUB_CACHE") or home / "hub") / f"models--{'--'.join(path.parts)}"
    try:
        revision = (cached / "refs" / "main").read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return path
    found = cached / "snapshots" / Path(revision).name
    return found if found.is_dir() else path


def _loaded(path: Path) -> Any:
    """The tokenizer of a directory, with its template. Nothing is downloaded, and no code of a model is run."""
    path = place_of_model(path)
    directory = path.parent if path.is_file() else path
    if not directory.is_dir():
        raise _wrong(
            f"--tokenizer {path}: no such directory, and no model of that name in the cache of Hugging Face",
            NOT_FOUND,
        )
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise CliError(
            "explain: --chat needs the package transformers (pip install transformers); or give the text after the "
            "template, with --no-special-tokens"
        ) from error
    try:
        return AutoTokenizer.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # whatever is wrong with its files
        told = " ".join(str(error).split()) or type(error).__name__
        raise _wrong(f"--tokenizer {directory}: {told[:SHOWN_CHARS_MAX]}") from error
