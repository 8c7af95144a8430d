"""Sampling with drafts and their distributions follows the target's distribution, worked out exactly with transformers."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch

from service.lossless import compare_with_exact
from service.vllm_process import SERVED_NAME, VllmProcess
from tests.vllm.pair import counts

pytestmark = pytest.mark.vllm

PROMPT = "The best thing about"
TOP_K = 4
# The first token comes from the prompt's step; the other two are judged as drafts.
DEPTH = 3
SAMPLES = 1_200
CHOICES = 8


def exact(folder: Path) -> dict[tuple[int, ...], float]:
    """Probability of each beginning of DEPTH tokens, at temperature 1 with top-k."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompt = AutoTokenizer.from_pretrained(folder)(PROMPT)["input_ids"]
    beginnings: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(DEPTH):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *beginning] for beginning in beginnings])).logits[:, -1]
        values, ids = logits.topk(TOP_K)
        probs = values.double().softmax(dim=-1)
        beginnings = {
            (*beginning, int(token)): share * float(probability)
            for (beginning, share), row, chances in zip(beginnings.items(), ids, probs, strict=True)
            for token, probability in zip(row, chances, strict=True)
        }
    return beginnings


def sample(url: str) -> Counter[tuple[int, ...]]:
    body = {
        "model": SERVED_NAME,
        "prompt": PROMPT,
        "temperature": 1.0,
        "top_k": TOP_K,
        "max_tokens": DEPTH + 2,
        "ignore_eos": True,
        "n": CHOICES,
        "return_token_ids": True,
    }

    def ask(_: int) -> list[tuple[int, ...]]:
        reply = httpx.post(f"{url}/v1/completions", json=body, timeout=600).raise_for_status().json()
        return [tuple(choice["token_ids"][:DEPTH]) for choice in reply["choices"]]

    with ThreadPoolExecutor(2) as pool:
        return Counter(tokens for choices in pool.map(ask, range(SAMPLES // CHOICES)) for tokens in choices)


def p_value(observed: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> float:
    cells = list(expected)
    return compare_with_exact(
        np.array([observed[cell] for cell in cells]), np.array([expected[cell] for cell in cells])
    ).p_value


def test_sampled_answers_follow_the_distribution_of_the_target(drafted: VllmProcess, target_folder: Path) -> None:
    expected = exact(target_folder)
    before = counts(drafted.url)
    observed = sample(drafted.url)
    blocks, _, accepted = (after - start for after, start in zip(counts(drafted.url), before, strict=True))
    assert set(observed) <= set(expected)
    assert accepted > 0.1 * blocks, "drafts are judged, and some stay"
    assert p_value(observed, expected) > 1e-4
    assert "Missing cached draft probabilities" not in drafted.log.read_text()


def test_the_test_notices_a_distribution_that_is_a_little_off(target_folder: Path) -> None:
    expected = exact(target_folder)
    generator = torch.Generator().manual_seed(0)
    cells = list(expected)
    weights = torch.tensor([expected[cell] for cell in cells], dtype=torch.float64)

    def draw(probs: torch.Tensor) -> Counter[tuple[int, ...]]:
        return Counter(cells[index] for index in torch.multinomial(probs, SAMPLES, replacement=True, generator=generator))

    assert p_value(draw(weights), expected) > 1e-4
    assert p_value(draw(weights**1.3), expected) < 1e-4
