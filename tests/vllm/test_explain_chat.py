"""`kvstore explain --chat`: the token ids of a chat request are those that vLLM computes of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from examples.demo.model import make_model
from kvstore.tools.cli.chat import chat_tokens

pytestmark = pytest.mark.vllm

# Two kinds of templates: one that takes texts, and one that goes through the parts of a message.
OF_TEXTS = (
    "{%- for message in messages %}{{ '<' + message['role'] + '>' + message['content'] + '<|end|>' }}\n{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<assistant>' }}{%- endif %}"
    "{%- if thinking %}{{ '<think>' }}{%- endif %}"
)
OF_PARTS = (
    "{%- for message in messages %}{{ '<' + message.role + '>' }}{%- for part in message.content %}"
    "{{ '[' + part.text + ']' }}{%- endfor %}{%- endfor %}{%- if add_generation_prompt %}{{ '<assistant>' }}{%- endif %}"
)
PARTS = [{"type": "text", "text": "which tier"}, {"type": "text", "text": "held the most?"}]
BODIES: dict[str, dict[str, Any]] = {
    "texts": {
        "messages": [
            {"role": "system", "content": "You are a careful assistant."},
            {"role": "user", "content": "Which tier held the most blocks? ü 模型"},
        ]
    },
    "parts": {"messages": [{"role": "user", "content": PARTS}]},
    "a conversation": {
        "messages": [
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": "hi"},
            {"role": "user", "content": PARTS},
        ]
    },
    "no generation prompt": {"messages": [{"role": "user", "content": "a"}], "add_generation_prompt": False},
    "words of the template": {
        "messages": [{"role": "user", "content": "a"}],
        "chat_template_kwargs": {"thinking": True},
    },
    "to be continued": {
        "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b c"}],
        "add_generation_prompt": False,
        "continue_final_message": True,
    },
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("chat"))


@pytest.fixture(scope="module")
def vllms(directory: Path) -> Callable[[dict[str, Any], str], list[int]]:
    """What vLLM's server makes of the body of a request."""
    pytest.importorskip("vllm")
    from vllm.config import ModelConfig, VllmConfig
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.renderers.registry import renderer_from_config

    config = ModelConfig(model=str(directory), tokenizer=str(directory), dtype="float32")
    renderer = renderer_from_config(VllmConfig(model_config=config))

    def rendered(body: dict[str, Any], template: str) -> list[int]:
        request = ChatCompletionRequest.model_validate({"model": "m", **body})
        (_, (prompt,)) = renderer.render_chat(
            [request.messages], request.build_chat_params(template, "auto"), request.build_tok_params(config)
        )
        return list(prompt["prompt_token_ids"])

    return rendered


@pytest.mark.parametrize("template", [OF_TEXTS, OF_PARTS], ids=["of texts", "of parts"])
@pytest.mark.parametrize("name", BODIES)
def test_ids_are_those_of_vllm(
    vllms: Callable[[dict[str, Any], str], list[int]],
    directory: Path,
    tmp_path: Path,
    name: str,
    template: str,
) -> None:
    """Roles, parts, words of the template and what is to be continued: the same ids as the server of the installed vLLM."""
    file = tmp_path / "template.jinja"
    file.write_text(template)
    chat = chat_tokens(json.dumps(BODIES[name]), lambda word: word, directory, file)
    assert chat.tokens == vllms(BODIES[name], template) and chat.tokens
