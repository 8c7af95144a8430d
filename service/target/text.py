"""Text in and out of the target: tokenizer, chat template, and text that appears token by token."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from service.errors import RequestError, StartupError

_REPLACEMENT = "\ufffd"


class TargetTokenizer:
    """The tokenizer and chat template of an HF folder.

    Attributes:
        end_token_ids: tokens that end an answer
        hash: sha256 of tokenizer.json
    """

    def __init__(self, folder: Path) -> None:
        """Read `folder`.

        Raises:
            StartupError: a file is missing or unreadable.
        """
        file = folder / "tokenizer.json"
        try:
            raw = file.read_bytes()
            self._tokenizer = Tokenizer.from_buffer(raw)
        except OSError as error:
            raise StartupError(f"{file} cannot be read: {error.strerror}") from None
        except Exception as error:  # noqa: BLE001 (the tokenizers package raises bare Exception)
            raise StartupError(f"{file} is not a tokenizer: {error}") from None
        self.hash = hashlib.sha256(raw).hexdigest()
        self.end_token_ids = _end_token_ids(folder)
        template = folder / "chat_template.jinja"
        self._template = template.read_text(encoding="utf-8") if template.is_file() else None
        self._environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)

    def encode(self, text: str) -> list[int]:
        """Tokenize text; special tokens in it are recognised."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Turn token ids into text, without special tokens."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text

    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Render messages with the model's chat template, up to where the answer starts.

        Raises:
            RequestError: the model has no template, or the template refuses the messages.
        """
        if self._template is None:
            raise RequestError("bad_request", "this model has no chat template; use /v1/completions", param="messages")
        try:
            return self._environment.from_string(self._template).render(messages=list(messages), add_generation_prompt=True)
        except TemplateError as error:
            raise RequestError("bad_request", f"the chat template refused the messages: {error}", param="messages") from None


def _end_token_ids(folder: Path) -> frozenset[int]:
    found: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        try:
            value: Any = json.loads((folder / name).read_text(encoding="utf-8")).get("eos_token_id")
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            raise StartupError(f"{folder / name} cannot be read: {error}") from None
        found.update(value if isinstance(value, list) else [] if value is None else [value])
    return frozenset(found)


class TextStream:
    """The text of a growing list of tokens, given out as soon as it can no longer change.

    A character may be spread over several tokens, and a token's text may depend on the one before it. So a window of tokens
    is decoded with and without the newest, and the difference is given out once it ends in a whole character.
    """

    def __init__(self, tokenizer: TargetTokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._window_start = 0
        self._shown_end = 0

    def push(self, token_id: int) -> str:
        """Take one token and return the text that is now settled."""
        self._tokens.append(token_id)
        text, shown = self._texts()
        if text.endswith(_REPLACEMENT) or len(text) <= len(shown):
            return ""
        self._window_start, self._shown_end = self._shown_end, len(self._tokens)
        return text[len(shown) :]

    def finish(self) -> str:
        """Return what was held back, replacement characters included."""
        text, shown = self._texts()
        self._window_start = self._shown_end = len(self._tokens)
        return text[len(shown) :]

    def _texts(self) -> tuple[str, str]:
        window = self._tokens[self._window_start :]
        return self._tokenizer.decode(window), self._tokenizer.decode(window[: self._shown_end - self._window_start])
