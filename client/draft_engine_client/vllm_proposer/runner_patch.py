"""Everything that reaches into vLLM's model runner (V1; CPU and GPU share it), in one file.

vLLM hands a custom proposer tokens and nothing else. What is missing is put in here:

    capture     the hidden states of the drafter's layers come out of the target
    propose     the proposer sees the whole step, and its distributions reach the rejection sampler
    fits        vLLM skips the proposer for the whole batch when one request is near its longest; ours goes on, since a step
                that it does not see leaves a gap in every request
    finished    the proposer hears which requests are over, in steps without tokens too

vLLM imports the proposer inside the runner's constructor, so `install` comes in time. A runner whose proposer is another one
behaves as before.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from draft_engine_client.vllm_proposer import cpu_defects
from draft_engine_client.vllm_proposer.errors import PairingError

SUPPORTED_RELEASES = ("0.32", "0.33")

# Parameters after self, in vLLM 0.32 and 0.33.
RUNNER_SIGNATURES: Mapping[str, tuple[str, ...]] = {
    "_setup_eagle3_aux_hidden_state_outputs": (),
    "_get_eagle3_aux_layers_from_config": (),
    "_update_states": ("scheduler_output",),
    "_input_fits_in_drafter": ("common_attn_metadata",),
    "_get_spec_decode_draft_probs": ("spec_decode_metadata",),
    "propose_draft_token_ids": (
        "scheduler_output",
        "sampled_token_ids",
        "sampling_metadata",
        "hidden_states",
        "sample_hidden_states",
        "aux_hidden_states",
        "spec_decode_metadata",
        "common_attn_metadata",
        "slot_mappings",
    ),
}
_MARK = "_draft_engine_patch"


class StepProposer(Protocol):
    """What the patch calls."""

    is_draft_engine_proposer: bool
    vllm_layer_ids: tuple[int, ...]

    def propose_step(self, runner: Any, scheduler_output: Any, sampled: Any, states: Any, attention: Any) -> Any:
        """Return the drafts [R] and None or the draft distributions [R, K, V]."""

    def finish(self, request_ids: Any) -> None:
        """Requests that are over."""


def install() -> None:
    """Patch the installed vLLM, once.

    Raises:
        PairingError: the release is not supported, or a method is not what the patch was written for.
    """
    import vllm
    from vllm.platforms import current_platform
    from vllm.v1.sample import rejection_sampler
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    if getattr(GPUModelRunner, _MARK, False):
        return
    check_release(vllm.__version__)
    check_signatures(GPUModelRunner, RUNNER_SIGNATURES)
    if current_platform.is_cpu():
        mend_cpu_sampling(rejection_sampler)
    patch_runner(GPUModelRunner)
    setattr(GPUModelRunner, _MARK, True)


def mend_cpu_sampling(rejection_sampler: Any) -> None:
    """Replace what is defective in vLLM's module on CPUs; see `cpu_defects`.

    Raises:
        PairingError: a function is not what the replacement was written for.
    """
    expand, constrain = rejection_sampler.expand_batch_to_tokens, rejection_sampler.apply_sampling_constraints
    check_signature("expand_batch_to_tokens", expand, cpu_defects.EXPAND_SIGNATURE)
    check_signature("apply_sampling_constraints", constrain, cpu_defects.CONSTRAIN_SIGNATURE)
    rejection_sampler.expand_batch_to_tokens = cpu_defects.expand_batch_to_tokens
    rejection_sampler.apply_sampling_constraints = cpu_defects.constrain_drafted_rows(constrain)


def check_release(version: str) -> None:
    """Refuse a release whose insides are not known.

    Raises:
        PairingError: it is none of SUPPORTED_RELEASES.
    """
    if ".".join(version.split(".")[:2]) not in SUPPORTED_RELEASES:
        raise PairingError(
            f"vLLM {version} is not supported; the proposer is written for {' and '.join(SUPPORTED_RELEASES)}, V1 model runner"
        )


def check_signatures(runner: type, signatures: Mapping[str, tuple[str, ...]]) -> None:
    """Compare the methods of a runner class with what they should be.

    Raises:
        PairingError: one is missing or takes other parameters; the message names it.
    """
    for name, parameters in signatures.items():
        method = getattr(runner, name, None)
        if method is None:
            raise PairingError(f"this vLLM has no {runner.__name__}.{name}; it is not a release that the proposer supports")
        check_signature(f"{runner.__name__}.{name}", method, ("self", *parameters))


def check_signature(name: str, function: Callable[..., Any], parameters: tuple[str, ...]) -> None:
    """Compare a function's parameters with what they should be.

    Raises:
        PairingError: they are others.
    """
    found = tuple(inspect.signature(function).parameters)
    if found != parameters:
        raise PairingError(f"this vLLM's {name} takes ({', '.join(found)}); the proposer expects ({', '.join(parameters)})")


def patch_runner(runner_class: Any) -> None:
    """Put our methods in front of those of `runner_class`."""
    original_setup = runner_class._setup_eagle3_aux_hidden_state_outputs
    original_propose = runner_class.propose_draft_token_ids
    original_fits = runner_class._input_fits_in_drafter
    original_update = runner_class._update_states

    def capture(self: Any) -> Any:
        drafter = _ours(self)
        if drafter is not None:
            self.use_aux_hidden_state_outputs = True
            self._get_eagle3_aux_layers_from_config = lambda: drafter.vllm_layer_ids
        return original_setup(self)

    def propose(
        self: Any,
        scheduler_output: Any,
        sampled_token_ids: Any,
        sampling_metadata: Any,
        hidden_states: Any,
        sample_hidden_states: Any,
        aux_hidden_states: Any,
        spec_decode_metadata: Any,
        common_attn_metadata: Any,
        slot_mappings: Any,
    ) -> Any:
        drafter = _ours(self)
        if drafter is None:
            return original_propose(
                self,
                scheduler_output,
                sampled_token_ids,
                sampling_metadata,
                hidden_states,
                sample_hidden_states,
                aux_hidden_states,
                spec_decode_metadata,
                common_attn_metadata,
                slot_mappings,
            )
        drafts, probs = drafter.propose_step(self, scheduler_output, sampled_token_ids, aux_hidden_states, common_attn_metadata)
        self._draft_probs = probs
        self._draft_prob_req_ids = None if probs is None else list(self.input_batch.req_ids)
        return drafts

    def fits(self: Any, common_attn_metadata: Any) -> Any:
        if _ours(self) is not None:
            return common_attn_metadata is not None
        return original_fits(self, common_attn_metadata)

    def update(self: Any, scheduler_output: Any) -> Any:
        drafter = _ours(self)
        if drafter is not None and scheduler_output.finished_req_ids:
            drafter.finish(scheduler_output.finished_req_ids)
        return original_update(self, scheduler_output)

    runner_class._setup_eagle3_aux_hidden_state_outputs = capture
    runner_class.propose_draft_token_ids = propose
    runner_class._input_fits_in_drafter = fits
    runner_class._update_states = update


def _ours(runner: Any) -> StepProposer | None:
    drafter = getattr(runner, "drafter", None)
    return drafter if getattr(drafter, "is_draft_engine_proposer", False) else None
