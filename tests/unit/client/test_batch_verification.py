"""The rule on a torch device says what the rule in numpy says, for the same noise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from draft_engine_client.verification import Verdict, verify_sampled
from draft_engine_client.vllm_proposer.batch_verification import verify_batch

VOCAB = 6


class Replay(np.random.Generator):
    """Gives the numbers it was made with."""

    def __init__(self, uniforms: Sequence[float]) -> None:
        super().__init__(np.random.PCG64(0))
        self._uniforms = iter(uniforms)

    def random(self, *args: Any, **more: Any) -> Any:
        return next(self._uniforms)


def by_numpy(ids: Tensor, nums: Tensor, target: Tensor, draft: Tensor | None, uniforms: Tensor) -> list[Verdict]:
    verdicts = []
    for row, num in enumerate(nums.tolist()):
        told = {}
        if draft is not None:
            told = {
                "draft_probs_ids": np.tile(np.arange(VOCAB), (num, 1)),
                "draft_probs": draft[row, :num].numpy(),
            }
        noise = Replay(uniforms[row].tolist())
        verdicts.append(verify_sampled(ids[row, :num].tolist(), target[row, : num + 1].numpy(), noise, **told))
    return verdicts


def by_torch(*parts: Any) -> list[Verdict]:
    accepted, token_ids = verify_batch(*parts)
    return [Verdict(*pair) for pair in zip(accepted.tolist(), token_ids.tolist(), strict=True)]


def distributions(noise: torch.Generator, *shape: int) -> Tensor:
    """Rows of which some rule tokens out, as -inf logits do."""
    logits = 2.0 * torch.randn(*shape, VOCAB, generator=noise, dtype=torch.float64)
    is_out = torch.rand(*shape, VOCAB, generator=noise) < 0.4
    is_out[..., 0] = False
    return logits.masked_fill(is_out, float("-inf")).softmax(-1)


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    batch=st.integers(1, 5),
    count=st.integers(0, 4),
    form=st.sampled_from(["certain", "own", "equal"]),
)
def test_both_say_the_same(seed: int, batch: int, count: int, form: str) -> None:
    noise = torch.Generator().manual_seed(seed)
    target = distributions(noise, batch, count + 1)
    draft = {"certain": None, "own": distributions(noise, batch, count), "equal": target[:, :count].clone()}[form]
    ids = torch.randint(VOCAB, (batch, count), generator=noise)
    nums = torch.randint(count + 1, (batch,), generator=noise)
    uniforms = torch.rand(batch, count + 1, generator=noise, dtype=torch.float64)
    parts = (ids, nums, target, draft, uniforms)
    assert by_torch(*parts) == by_numpy(*parts)


def test_a_token_of_no_weight_is_never_drawn() -> None:
    target = torch.tensor([[[0.0, 0.5, 0.5, 0.0, 0.0, 0.0]]])
    none = torch.zeros(1, 0, dtype=torch.long)
    for uniform, expected in ((0.0, 1), (0.5, 2), (1.0 - 2**-53, 2)):
        parts = (none, torch.zeros(1, dtype=torch.long), target, None, torch.tensor([[uniform]], dtype=torch.float64))
        assert by_torch(*parts) == [Verdict(0, expected)]


def test_a_certain_draft_of_the_whole_mass_stays_and_one_of_none_goes() -> None:
    target = torch.eye(VOCAB)[[2, 3]][None]
    uniforms = torch.full((1, 2), 1.0 - 2**-53, dtype=torch.float64)
    for drafted, expected in ((2, Verdict(1, 3)), (4, Verdict(0, 2))):
        assert by_torch(torch.tensor([[drafted]]), torch.ones(1, dtype=torch.long), target, None, uniforms) == [expected]


def test_shapes_that_do_not_fit_are_refused() -> None:
    ids, nums, target = torch.zeros(1, 2, dtype=torch.long), torch.ones(1, dtype=torch.long), torch.full((1, 3, VOCAB), 1 / 6)
    with pytest.raises(ValueError, match="need target_probs"):
        verify_batch(ids, nums, target[:, :2], None, torch.zeros(1, 3))
    with pytest.raises(ValueError, match="draft_probs must be"):
        verify_batch(ids, nums, target, torch.zeros(1, 1, VOCAB), torch.zeros(1, 3))
