"""Runs inside vLLM: the proposer, which also writes down the rows that it hands over, for the test to compare."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from draft_engine_client.vllm_proposer.proposer import DraftEngineProposer


class RecordingProposer(DraftEngineProposer):
    """Writes one file for each session and step into $RECORD_TO: start, token_ids [n], features [n, F]."""

    _count = 0

    def _step(self, *arguments: Any, **named: Any) -> Any:
        step = super()._step(*arguments, **named)
        self._count += 1
        path = Path(os.environ["RECORD_TO"]) / f"{self._count:06}.npz"
        np.savez(
            path,
            session_id=step.session_id,
            start=step.start,
            token_ids=np.array(step.token_ids, dtype=np.int64),
            features=step.features,
            prefix=np.array(step.prefix_token_ids, dtype=np.int64),
        )
        return step
