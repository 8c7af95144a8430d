"""A key-value cache too small for the batch: vLLM preempts requests and computes them again. And the rows that leave, against
transformers."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from service.vllm_process import vllm_process
from tests.vllm.conftest import LOGS
from tests.vllm.pair import BASE_FLAGS, MIXED, VLLM_PYTHON, Ask, DraftServer, answer_all, read_metrics

pytestmark = pytest.mark.vllm

# Growing answers to long prompts, more than the blocks below can hold at once.
GROWING = [
    Ask(f"growing {place}", {"prompt": f"{ask.body['prompt']}", "max_tokens": 120, "ignore_eos": True})
    for place, ask in enumerate(MIXED)
    if "long" in ask.name
]
NUM_BLOCKS = "24"
BLOCK_SIZE = "32"


def test_preempted_requests_go_on_and_their_rows_are_those_of_transformers(
    target_folder: Path, draft_server: DraftServer, tmp_path: Path
) -> None:
    base = [*BASE_FLAGS, "--block-size", BLOCK_SIZE]
    with vllm_process(VLLM_PYTHON, target_folder, base, LOGS / "vllm-roomy.log") as roomy:
        plain = answer_all(roomy.url, GROWING)
    flags = [*base, "--num-gpu-blocks-override", NUM_BLOCKS]
    flags += [
        flag.replace("draft_engine_client.vllm_proposer.DraftEngineProposer", "recording_proposer.RecordingProposer")
        for flag in draft_server.flags(rows="raw", row_dtype="float32")
    ]
    with vllm_process(
        VLLM_PYTHON,
        target_folder,
        flags,
        LOGS / "vllm-preempting.log",
        environment={"RECORD_TO": str(tmp_path)},
        import_path=[Path(__file__).parent],
    ) as vllm:
        drafted = answer_all(vllm.url, GROWING)
        preemptions = read_metrics(vllm.url, "vllm:num_preemptions")["vllm:num_preemptions_total"]
        accepted = read_metrics(vllm.url, "vllm:spec_decode")["vllm:spec_decode_num_accepted_tokens_total"]
    assert drafted == plain
    assert preemptions > 0
    assert accepted > 0
    steps = read_steps(tmp_path)
    assert any(is_rewound(session) for session in steps.values()), "a preempted request is computed again"
    compare_with_transformers(steps, target_folder, draft_server)


def read_steps(folder: Path) -> dict[str, list[dict[str, Any]]]:
    steps = defaultdict(list)
    for path in sorted(folder.glob("*.npz")):
        with np.load(path) as step:
            steps[str(step["session_id"])].append({name: step[name] for name in step.files})
    return steps


def is_rewound(session: list[dict[str, Any]]) -> bool:
    ends = [int(step["start"]) + len(step["token_ids"]) for step in session]
    return any(int(step["start"]) < end for step, end in zip(session[1:], ends, strict=False))


def compare_with_transformers(steps: dict[str, list[dict[str, Any]]], target_folder: Path, draft_server: DraftServer) -> None:
    import httpx
    from transformers import AutoModelForCausalLM

    layers = httpx.get(f"{draft_server.url}/v1/models", timeout=30).json()["data"][0]["draft"]["target_layer_ids"]
    model = AutoModelForCausalLM.from_pretrained(target_folder, dtype=torch.float32)
    compared = 0
    for session in steps.values():
        tokens: list[int] = []
        for step in session:
            start = int(step["start"])
            if len(tokens) < start:
                tokens = step["prefix"].tolist()
            assert len(tokens) >= start, "no row is missing"
            tokens = tokens[:start] + step["token_ids"].tolist()
        with torch.no_grad():
            states = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        expected = torch.cat([states[layer + 1][0] for layer in layers], dim=1).numpy()
        for step in session:
            start, rows = int(step["start"]), step["features"]
            wanted = expected[start : start + len(rows)]
            # Rows of a later rewind have the same tokens, as greedy decoding is determined.
            error = np.abs(rows - wanted).max(initial=0.0) / np.abs(wanted).max(initial=1.0)
            assert error < 1e-4
            compared += len(rows)
    assert compared > 500
