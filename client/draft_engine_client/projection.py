"""The drafter's context projection, for a target that projects its rows itself: they are as wide as the drafter then, and not
as all the captured layers side by side.

Rows that were projected for one drafter mean nothing to another. A client that projects therefore fetches the projection with
each handshake that tells of another drafter, and forgets the rows that it kept for the one before.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from pydantic import ValidationError

from draft_engine_client import codec
from draft_engine_client.codec import CodecError, TensorView
from draft_engine_client.errors import InvalidReplyError
from draft_engine_client.replies import require_ok
from draft_engine_client.transport import Channel
from draft_engine_client.wire import ModelFacts, ProjectionInfo

_PATH = "/v1/projection"
_BYTES_PER_SECOND = 20e6
_HEAD_BYTES = 1 << 16
_FLOATS = ("F16", "BF16", "F32")


@dataclass(frozen=True, eq=False)
class ContextProjection:
    """A row x [F] becomes `norm * y / sqrt(mean(y^2) + eps)` [E], with `y = weight x`.

    Args:
        fingerprint: of the drafter.
        weight: [E, F].
        norm: [E], of the same dtype.
        eps: positive.
    """

    fingerprint: str
    weight: TensorView
    norm: TensorView
    eps: float


def fetch_projection(channel: Channel, facts: ModelFacts, timeout_s: float) -> ContextProjection:
    """Fetch the projection of the drafter that `facts` are about. A large one gets more time, at 20 MB/s.

    Raises:
        ClientError: there is no usable reply, or another drafter is served by now.
    """
    width = facts.projected_width
    max_bytes = 4 * width * (facts.feature_width + 1) + _HEAD_BYTES
    http = channel.request(
        "GET",
        _PATH,
        body=b"",
        media_type=codec.MEDIA_TYPE,
        deadline_at=time.monotonic() + timeout_s + max_bytes / _BYTES_PER_SECOND,
        max_reply_bytes=max_bytes,
    )
    require_ok(http, codec.MEDIA_TYPE)
    try:
        container = codec.decode(http.body)
        info = ProjectionInfo.model_validate_json(container.message)
        weight, norm = container.tensors["weight"], container.tensors["norm"]
    except (CodecError, ValidationError, KeyError) as error:
        raise InvalidReplyError(f"the projection cannot be read: {error}") from error
    if info.fingerprint != facts.fingerprint:
        raise InvalidReplyError("the projection belongs to another drafter than the handshake told of")
    if (weight.shape, norm.shape) != ((width, facts.feature_width), (width,)):
        raise InvalidReplyError(f"the projection is {list(weight.shape)} and {list(norm.shape)}, not the drafter's")
    if weight.dtype not in _FLOATS or norm.dtype != weight.dtype or not math.isfinite(info.rms_norm_eps):
        raise InvalidReplyError(f"the projection is of {weight.dtype} and {norm.dtype}, not of one float dtype")
    return ContextProjection(info.fingerprint, weight, norm, info.rms_norm_eps)
