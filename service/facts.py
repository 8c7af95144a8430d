"""What clients are told of a loaded drafter."""

from __future__ import annotations

from draft_engine_client.wire import ModelFacts
from draft_model.drafter import Drafter
from service.intake import FEATURE_DTYPES


def model_facts(drafter: Drafter, model_id: str) -> ModelFacts:
    """Describe `drafter` under the name `model_id`."""
    config = drafter.config
    return ModelFacts(
        model_id=model_id,
        fingerprint=drafter.fingerprint,
        source_format=config.source_format,
        draft_block_size=config.draft_block_size,
        max_draft_tokens=config.max_draft_tokens,
        vocab_size=config.vocab_size,
        draft_vocab_size=config.draft_vocab_size,
        target_hidden_size=config.target_hidden_size,
        target_num_layers=config.target_num_layers,
        target_layer_ids=config.target_layer_ids,
        feature_width=config.feature_width,
        projected_width=config.hidden_size,
        feature_dtypes=tuple(FEATURE_DTYPES),
        has_confidence=config.has_confidence,
        device=str(drafter.device),
        dtype=str(drafter.dtype).removeprefix("torch."),
        attention_backends=tuple(selection.backend for selection in drafter.selections),
        decode_paths=tuple(str(selection.path) for selection in drafter.selections),
    )
