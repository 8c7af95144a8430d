"""The client of a draft server: the part of the draft engine that runs in a target server's process.

    client = DraftClient(ClientSettings("http://127.0.0.1:8100"), TargetFingerprint(...))
    client.start()
    drafts = client.propose([SessionStep(...)])[0]
    verdict = verify_greedy(drafts.token_ids, target_token_ids)

It needs numpy, pydantic and httpcore, and nothing of the engine.
"""

from draft_engine_client.client import DraftClient
from draft_engine_client.replies import Drafts
from draft_engine_client.sessions import SessionStep
from draft_engine_client.settings import ClientSettings
from draft_engine_client.state import ClientStats
from draft_engine_client.verification import Verdict, verify_greedy, verify_sampled
from draft_engine_client.wire import PROTOCOL_VERSION, Sampling, TargetFingerprint

__all__ = [
    "PROTOCOL_VERSION",
    "ClientSettings",
    "ClientStats",
    "DraftClient",
    "Drafts",
    "Sampling",
    "SessionStep",
    "TargetFingerprint",
    "Verdict",
    "verify_greedy",
    "verify_sampled",
]
