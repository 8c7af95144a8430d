"""The OpenAI-compatible messages of the target server, and what it adds to them.

Fields of the OpenAI API that the server does not implement are refused by name, never ignored. Its own additions: `top_k`,
`stop_token_ids`, `ignore_eos` and `num_draft_tokens` in requests, `draft` in replies.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

Stop = Annotated[str, StringConstraints(min_length=1, max_length=256)]
TokenId = Annotated[int, Field(ge=0)]


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class StreamOptions(_Request):
    """include_usage: end the stream with a chunk that has the usage."""

    include_usage: bool = False


class SamplingFields(_Request):
    """What both kinds of request say about generation."""

    model: str | None = Field(None, description="name of the served model")
    temperature: float = Field(1.0, ge=0.0, le=2.0, description="0 is greedy")
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    top_k: int = Field(0, ge=0, description="0 keeps all")
    seed: int | None = Field(None, ge=0, lt=2**63)
    n: Literal[1] = 1
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=64)] = []
    ignore_eos: bool = Field(False, description="go on after the end-of-text token")
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, description="taken for compatibility; appears nowhere")
    num_draft_tokens: int | None = Field(None, ge=0, le=32, description="drafts to verify in a step; 0 decodes plainly")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Stop texts as a tuple."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


class CompletionRequest(SamplingFields):
    """`POST /v1/completions`."""

    prompt: str | Annotated[list[TokenId], Field(min_length=1)]
    max_tokens: int = Field(16, ge=1)


class ChatMessage(_Request):
    """One turn of a chat."""

    role: Literal["system", "user", "assistant"]
    content: str


class ChatRequest(SamplingFields):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_tokens: int | None = Field(None, ge=1, description="the older name of max_completion_tokens")
    max_completion_tokens: int | None = Field(None, ge=1, description="default: what the context has room for")


class Usage(BaseModel):
    """Token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class DraftReport(BaseModel):
    """What drafting did for a request: rounds of verification, drafts proposed and accepted, and where decoding time went."""

    rounds: int
    rounds_with_drafts: int
    proposed: int
    accepted: int
    accepted_by_position: list[int]
    acceptance_length: float
    milliseconds: dict[str, float]


class CompletionChoice(BaseModel):
    """An answer, or a piece of one."""

    index: int = 0
    text: str
    finish_reason: str | None
    stop_reason: str | int | None = None
    token_ids: list[int]
    logprobs: None = None


class Completion(BaseModel):
    """Reply of `/v1/completions`, whole or a piece."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    draft: DraftReport | None = None


class ChatAnswer(BaseModel):
    """The message of an answer."""

    role: Literal["assistant"] = "assistant"
    content: str


class ChatChoice(BaseModel):
    """A whole answer."""

    index: int = 0
    message: ChatAnswer
    finish_reason: str
    stop_reason: str | int | None = None
    token_ids: list[int]
    logprobs: None = None


class ChatCompletion(BaseModel):
    """Reply of `/v1/chat/completions`."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    draft: DraftReport


class ChatDelta(BaseModel):
    """What a piece adds to the message."""

    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChunkChoice(BaseModel):
    """A piece of an answer."""

    index: int = 0
    delta: ChatDelta
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] = []
    logprobs: None = None


class ChatChunk(BaseModel):
    """One event of a chat stream."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    draft: DraftReport | None = None
