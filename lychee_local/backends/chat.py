"""Messages to tokens: the model's own chat template, and what keeps remembered text from speaking as the template.

Owns the prompt as the model gets it, so that counting it and evaluating it can never differ.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from datetime import datetime
from types import ModuleType
from typing import Any

from lychee_local.errors import BadInput
from lychee_local.types import ChatMessage

# Formats that a card may name for a file without a template of its own, and llama-cpp-python's functions for them.
_NAMED_FORMATS = {
    "chatml": "format_chatml",
    "gemma": "format_gemma",
    "llama-2": "format_llama2",
    "llama-3": "format_llama3",
    "mistral-instruct": "format_mistral_instruct",
}


class ChatTemplate:
    """The template of one loaded model: the one inside its file, or the format of that name.

    Raises:
        BadInput: there is no format of that name, or none was named and the file has no template.
    """

    def __init__(self, api: ModuleType, llama: Any, chat_format: str | None) -> None:
        self._llama = llama
        self._format = _formatter(api, llama, chat_format)
        self._control = _control_pattern(api, api.llama_model_get_vocab(llama.model))
        self._system_allowed = self._takes_system()

    def tokens(self, messages: Sequence[ChatMessage]) -> list[int]:
        """The whole prompt, up to where the assistant's answer begins.

        Text that looks like a control token of the model is broken by a space; a lone surrogate becomes "?".

        Raises:
            BadInput: there are no messages.
        """
        if not messages:
            raise BadInput("a prompt needs at least one message")
        clean = [ChatMessage(m.role, self._control.sub(_break_control, m.content)) for m in messages]
        rendered = self._render(clean if self._system_allowed else _system_into_user(clean))
        # A named format leaves the mark at the start to the tokenizer, a template writes its own.
        text = rendered.prompt.encode("utf-8", "replace")
        tokens: list[int] = self._llama.tokenize(text, add_bos=not rendered.added_special, special=True)
        return tokens

    def _render(self, messages: Sequence[ChatMessage]) -> Any:
        # Models that can think aloud are asked not to: it would spend the output's tokens before the output.
        listed = [{"role": m.role, "content": m.content} for m in messages]
        return self._format(messages=listed, enable_thinking=False)

    def _takes_system(self) -> bool:
        """Some templates refuse a system message (by an exception), others drop it."""
        from jinja2 import TemplateError

        try:
            rendered = self._render([ChatMessage("system", "a rule"), ChatMessage("user", "a question")])
        except (TemplateError, ValueError):
            return False
        return "a rule" in rendered.prompt


def _formatter(api: ModuleType, llama: Any, chat_format: str | None) -> Callable[..., Any]:
    from llama_cpp import llama_chat_format

    known = ", ".join(sorted(_NAMED_FORMATS))
    if chat_format is not None:
        if chat_format not in _NAMED_FORMATS:
            raise BadInput(f"no chat format is called {chat_format!r}", hint=f"there are: {known}")
        named: Callable[..., Any] = getattr(llama_chat_format, _NAMED_FORMATS[chat_format])
        return named
    template = llama.metadata.get("tokenizer.chat_template")
    if template is None:
        raise BadInput(f"{llama.model_path} has no chat template", hint=f"name one in the model's card: {known}")
    vocab = api.llama_model_get_vocab(llama.model)
    formatter = llama_chat_format.Jinja2ChatFormatter(
        template=template,
        bos_token=_token_text(api, vocab, llama.token_bos()),
        eos_token=_token_text(api, vocab, llama.token_eos()),
    )
    # Some templates print today's date; the same prompt must be the same tomorrow, and ours state the date themselves.
    formatter.strftime_now = datetime(2024, 7, 26).strftime  # type: ignore  # a method, replaced
    return formatter


def _token_text(api: ModuleType, vocab: Any, token: int) -> str:
    text: bytes = api.llama_vocab_get_text(vocab, token) if token >= 0 else b""
    return text.decode("utf-8", "replace")


def _control_pattern(api: ModuleType, vocab: Any) -> re.Pattern[str]:
    size = api.llama_vocab_n_tokens(vocab)
    texts = [_token_text(api, vocab, token) for token in range(size) if api.llama_vocab_is_control(vocab, token)]
    longest_first = sorted((re.escape(text) for text in texts if len(text) > 1), key=len, reverse=True)
    return re.compile("|".join(longest_first) or r"(?!)")


def _break_control(match: re.Match[str]) -> str:
    return f"{match[0][0]} {match[0][1:]}"


def _system_into_user(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """For a template without a system role: what the system says goes before what the user says next."""
    folded: list[ChatMessage] = []
    waiting = ""
    for message in messages:
        if message.role == "system":
            waiting += message.content + "\n\n"
        elif message.role == "user" and waiting:
            folded.append(ChatMessage("user", waiting + message.content))
            waiting = ""
        else:
            folded.append(message)
    return [*folded, ChatMessage("user", waiting.rstrip())] if waiting else folded
