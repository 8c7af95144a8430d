"""The wire schema, version 1: every message between a target server and a draft server.

This is the one place where a field of the protocol is written down. A body is a JSON document, or a safetensors container
that carries the same document in its metadata and the tensors after it (see `codec.py`). An unknown field is an error.

Shape symbols: N context rows of a call, all its sessions one after the other; F width of a context row; D drafts of a reply,
all its sessions one after the other; K probabilities per draft.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

PROTOCOL_VERSION = 1
FeatureDtype = Literal["float16", "bfloat16", "float32"]

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Position = Annotated[int, Field(ge=0, lt=2**31)]
Count = Annotated[int, Field(ge=0, lt=2**31)]
Name = Annotated[str, Field(min_length=1, max_length=256)]


class Message(BaseModel):
    """Base of all messages: frozen, unknown fields refused, numbers finite."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class TargetFingerprint(Message):
    """Which target a drafter belongs to. A drafter fed by another one drafts garbage that only a low acceptance shows."""

    vocab_size: int = Field(gt=0, description="tokens in the target's vocabulary")
    hidden_size: int = Field(gt=0, description="width of the residual stream")
    num_layers: int = Field(gt=0, description="decoder layers")
    target_layer_ids: tuple[int, ...] | None = Field(
        None, description="layers whose output is sent, 0-based, in order; -1 is the embedding's output; null asks to be told"
    )
    dtype: FeatureDtype = Field("float16", description="type of the features that will be sent")
    tokenizer_hash: str | None = Field(
        None, max_length=128, description="sha256 of the tokenizer, compared where both have one"
    )
    model_id: str | None = Field(None, max_length=256, description="name of the model, for people")


class StepTimeCurve(Message):
    """How long a step of the target takes by the tokens that it verifies, anchors included, as measured at its start."""

    num_tokens: tuple[Annotated[int, Field(ge=1, lt=2**31)], ...] = Field(
        min_length=1, max_length=1024, description="widths measured, rising"
    )
    seconds: tuple[Annotated[float, Field(gt=0.0)], ...] = Field(
        min_length=1, max_length=1024, description="how long a step of each took"
    )

    @model_validator(mode="after")
    def _pair_up(self) -> Self:
        if len(self.num_tokens) != len(self.seconds):
            raise ValueError(f"{len(self.num_tokens)} widths cannot go with {len(self.seconds)} times")
        if any(after <= before for before, after in pairwise(self.num_tokens)):
            raise ValueError("num_tokens must rise")
        return self


class VerifySchedule(Message):
    """How many drafts of a propose call the server sends back; a call is one step of the target.

    fixed: all; threshold: those whose survival reaches a bound; hardware: as many as `step_times` say are worth it. A length
    depends on what precedes the drafts that it cuts off, never on them, so it loses nothing.
    """

    kind: Literal["fixed", "threshold", "hardware"] = Field("fixed", description="see above")
    threshold: float = Field(0.3, ge=0.0, le=1.0, description="bound on survival, for threshold")
    step_times: StepTimeCurve | None = Field(None, description="of the target; needed for hardware")
    is_padded: bool = Field(False, description="the target pads the blocks of a step to the longest, so one width is chosen")
    is_asynchronous: bool = Field(
        False, description="the target plans its steps ahead, so the budget comes from the drafts of two steps earlier"
    )
    recalibrate: bool = Field(True, description="have confidence follow what this target accepts")

    @model_validator(mode="after")
    def _need_step_times(self) -> Self:
        if self.kind == "hardware" and self.step_times is None:
            raise ValueError("a schedule by hardware needs step_times")
        return self


class ClientHello(Message):
    """`POST /v1/clients`: the handshake."""

    protocol_version: int = Field(PROTOCOL_VERSION, description="version of this schema")
    client_name: Name = Field(description="name of the target server, for people")
    target: TargetFingerprint
    schedule: VerifySchedule | None = Field(None, description="null sends back every draft, its confidence as calibrated")


class ModelFacts(Message):
    """What a client must know of the draft model."""

    model_id: str
    fingerprint: str = Field(description="hash of the draft checkpoint's config and weights")
    source_format: str
    draft_block_size: int = Field(description="slots of one draft forward")
    max_draft_tokens: int = Field(description="drafts that one block yields at most")
    vocab_size: int
    draft_vocab_size: int
    target_hidden_size: int
    target_num_layers: int | None
    target_layer_ids: tuple[int, ...]
    feature_width: int = Field(description="F of raw rows: layers * target_hidden_size")
    projected_width: int = Field(description="F of projected rows")
    feature_dtypes: tuple[FeatureDtype, ...]
    has_confidence: bool
    device: str
    dtype: str
    attention_backends: tuple[str, ...] = Field(description="backend of each draft layer")
    decode_paths: tuple[str, ...] = Field(description="fused or flattened, of each draft layer")


class Limits(Message):
    """The limits of a server. A call beyond one is refused by name."""

    max_sessions: int
    max_sessions_per_call: int
    max_rows_per_call: int
    max_body_bytes: int
    max_context: int
    lease_seconds: float


class ClientWelcome(Message):
    """The answer to a handshake. `server_id` changes when the server restarts; all sessions are gone then."""

    protocol_version: int
    client_id: str
    server_id: str
    server_version: str
    model: ModelFacts
    limits: Limits


class Sampling(Message):
    """How the target samples, so that drafts are drawn alike. Draft noise never depends on the verifier's."""

    temperature: float = Field(0.0, ge=0.0, le=100.0, description="0 is greedy")
    top_k: Count = Field(0, description="0 keeps all")
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    seed: int | None = Field(None, ge=0, lt=2**63, description="of the draft noise; null draws a fresh one")


class SessionUpdate(Message):
    """One session's part of a propose call: rows to take in, then drafts to make after the anchor.

    The anchor is the last committed token; it stands at position start + num_rows and has no row yet.
    """

    session_id: Name
    incarnation: Count = Field(0, description="counts restarts of the session; a higher one opens it anew")
    seq: Count = Field(description="counts updates; a repeat is answered from memory, an older one is refused")
    start: Position = Field(description="position of the first row; before the committed end, it truncates")
    num_rows: Count = Field(0, description="rows of this session in the call")
    anchor_token_id: TokenId
    num_draft_tokens: Count = Field(0, description="drafts wanted; 0 only takes the rows in")
    sampling: Sampling = Sampling()
    draft_probs: Literal["none", "topk"] = Field("none", description="topk returns the distribution each draft was drawn from")
    draft_probs_topk: int = Field(64, ge=1, le=4096, description="its support, with draft_probs=topk")
    confidence_threshold: float | None = Field(None, ge=0.0, le=1.0, description="keep the drafts whose survival reaches it")
    num_verified: Count | None = Field(
        None, description="how many of the drafts last sent back were verified; null for all, 0 where they came too late"
    )
    prefix_token_ids: tuple[TokenId, ...] = Field(
        (), description="tokens of positions [0, start) of a session that opens at start > 0, to find them in the prefix cache"
    )
    cache_salt: Name | None = Field(
        None, description="clients that give the same salt share prefix pages; without one a client shares with itself alone"
    )
    context_id: Name | None = Field(
        None, description="what the rows depend on besides the tokens (adapter, images); two that differ share no prefix pages"
    )


class ProposeRequest(Message):
    """`POST /v1/propose`. Tensors beside it: `token_ids` int32 [N] and `features` [N, F] of one of the feature dtypes."""

    client_id: Name
    server_id: str | None = Field(None, description="the server the client believes it talks to")
    rows: Literal["raw", "projected"] = Field("raw", description="whether features are captured states or context rows")
    sessions: tuple[SessionUpdate, ...] = ()
    finished: tuple[Name, ...] = Field((), description="sessions to close first")
    deadline_ms: float | None = Field(None, gt=0.0, le=600_000.0, description="the caller stops waiting after this")


class JsonProposeRequest(ProposeRequest):
    """The same as plain JSON, for curl and debugging: the tensors as lists."""

    token_ids: tuple[int, ...] = Field((), description="[N] token of each row")
    features: tuple[tuple[float, ...], ...] = Field((), description="[N, F]")


class ErrorDetail(BaseModel):
    """The OpenAI error object. `code` is stable; further fields are the numbers of the case."""

    model_config = ConfigDict(extra="allow", frozen=True)

    message: str
    type: str
    code: str
    param: str | None = None


class ErrorReply(Message):
    """The body of every reply that is not a 2xx."""

    error: ErrorDetail


class SessionReply(Message):
    """What one session is told. With an `error` nothing was drafted, and the session stands at `committed_end`."""

    session_id: str
    incarnation: int
    seq: int
    committed_end: int = Field(description="position after the last row held; the next update starts here or before")
    rows_held: int = Field(description="rows held; fewer than committed_end when the drafter never saw some")
    coverage: float = Field(description="rows_held / committed_end; 1 for an empty session")
    draft_token_ids: tuple[int, ...] = ()
    confidence: tuple[float, ...] = Field((), description="chance that a draft is accepted, given that those before it were")
    survival: tuple[float, ...] = Field((), description="running product of confidence")
    error: ErrorDetail | None = None


class Timings(Message):
    """Where a call's time went inside the server, in milliseconds."""

    queue_ms: float
    context_ms: float
    forward_ms: float
    head_ms: float
    total_ms: float


class ProposeReply(Message):
    """The answer to a propose call. Tensors beside it, when a session asked for draft_probs: `draft_probs_ids` int32 [D, K]
    and `draft_probs` float32 [D, K]; columns past a session's own support have probability 0.
    """

    server_id: str
    draft_version: str = Field("", description="changes when the server is given another drafter; see ModelEntry")
    sessions: tuple[SessionReply, ...]
    timings: Timings


class JsonProposeReply(ProposeReply):
    """The same as plain JSON: the tensors as lists."""

    draft_probs_ids: tuple[tuple[int, ...], ...] = ()
    draft_probs: tuple[tuple[float, ...], ...] = ()


class SessionInfo(Message):
    """One row of `GET /v1/sessions`."""

    session_id: str
    client_id: str
    incarnation: int
    seq: int
    committed_end: int
    rows_held: int
    num_pages: int
    idle_seconds: float


class SessionList(Message):
    """`GET /v1/sessions`."""

    object: Literal["list"] = "list"
    data: tuple[SessionInfo, ...]


class ProjectionInfo(Message):
    """`GET /v1/projection`. Tensors beside it, of one float dtype: `weight` [E, F] and `norm` [E], with E `projected_width` and
    F `feature_width`. A projected row is `norm * x / sqrt(mean(x^2) + rms_norm_eps)` with `x = weight row`.
    """

    fingerprint: str = Field(description="of the drafter that it belongs to")
    rms_norm_eps: float = Field(gt=0.0)


class ModelEntry(Message):
    """One row of `GET /v1/models`."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "draft-engine"
    draft_version: str = Field("", description="which drafter of this process it is, and the start of its fingerprint")
    draft: ModelFacts
    limits: Limits


class ModelList(Message):
    """`GET /v1/models`."""

    object: Literal["list"] = "list"
    data: tuple[ModelEntry, ...]


class VersionInfo(Message):
    """`GET /version`."""

    version: str
    protocol_version: int
    server_id: str
