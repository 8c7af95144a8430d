"""Drafting for vLLM by a draft server: vLLM loads the proposer by its name, and nothing else has to be installed there.

    vllm serve MODEL
      --speculative-config '{"method": "custom_class", "num_speculative_tokens": 7,
                             "model": "draft_engine_client.vllm_proposer.DraftEngineProposer"}'
      --additional-config '{"draft_engine": {"url": "http://127.0.0.1:8100"}}'

    settings           what stands under `draft_engine`
    rows               which rows of a step belong to which request, and which of them stay
    features           from the target's hidden states to what the wire carries
    probabilities      from top-k draft probabilities to the tensor that vLLM's rejection sampler reads
    batch_verification the rule of verification for a batch of dense rows, on the device
    tensor_parallel    one rank calls, all ranks get the same drafts
    connecting         what the draft server wants, asked before the target is loaded
    proposer           the above, once per step
    runner_patch       the only file that touches vLLM's insides, checked against the signatures that it was written for

Only `proposer` and `runner_patch` import vLLM, so that the rest can be used and tested without it.
"""

from typing import Any

__all__ = ["DraftEngineProposer"]


def __getattr__(name: str) -> Any:
    if name == "DraftEngineProposer":
        from draft_engine_client.vllm_proposer.proposer import DraftEngineProposer

        return DraftEngineProposer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
