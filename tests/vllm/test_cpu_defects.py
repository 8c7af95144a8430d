"""The workarounds for vLLM on CPUs: whether they are right, and whether the installed vLLM still needs them.

When one of the tests named `..._is_still_there` fails, vLLM has been mended: drop that workaround for the release.
"""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

import pytest

from service.vllm_process import _CLIENT, _ENVIRONMENT
from tests.vllm.pair import VLLM_PYTHON

pytestmark = pytest.mark.vllm

_PROBE = """
import json, types, torch
from vllm.platforms import current_platform
current_platform.import_kernels()
from vllm.utils import cpu_triton_utils
from vllm.v1.sample import rejection_sampler
from draft_engine_client.vllm_proposer import cpu_defects

values, ends = torch.tensor([0.5, 0.7, 0.0]), torch.tensor([2, 2, 5], dtype=torch.int32)
wanted = [0.5, 0.5, 1.0, 1.0, 1.0]

theirs = torch.full((5,), -1.0)
cpu_triton_utils._expand_kernel_impl(theirs, values, ends, 0, 1)
ours = cpu_defects.expand_batch_to_tokens(values, ends, 5, replace_from=0, replace_to=1)

def constrain(function):
    sampling = types.SimpleNamespace(
        all_greedy=False, temperature=torch.ones(1), top_k=torch.ones(1, dtype=torch.int32), top_p=None
    )
    try:
        return list(function(torch.empty(0, 8), torch.zeros(1, dtype=torch.int32), sampling).shape) == [0, 8]
    except RuntimeError as error:
        return str(error)

rejection_sampler.expand_batch_to_tokens = cpu_defects.expand_batch_to_tokens
print(json.dumps({
    "expand": theirs.tolist() == wanted,
    "expand_mended": ours.tolist() == wanted,
    "constrain": constrain(rejection_sampler.apply_sampling_constraints),
    "constrain_mended": constrain(cpu_defects.constrain_drafted_rows(rejection_sampler.apply_sampling_constraints)),
}))
"""


@pytest.fixture(scope="module")
def probed() -> dict[str, Any]:
    environment = {**os.environ, **_ENVIRONMENT, "PYTHONPATH": str(_CLIENT)}
    command = [str(VLLM_PYTHON), "-P", "-c", _PROBE]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=True)
    return dict(json.loads(result.stdout.strip().splitlines()[-1]))


def test_the_defect_of_expanding_is_still_there(probed: dict[str, Any]) -> None:
    assert probed["expand"] is False


def test_the_defect_of_top_k_without_drafts_is_still_there(probed: dict[str, Any]) -> None:
    assert "numel() == 0" in str(probed["constrain"])


def test_the_workarounds_are_right(probed: dict[str, Any]) -> None:
    assert probed["expand_mended"] is True
    assert probed["constrain_mended"] is True
