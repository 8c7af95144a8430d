"""How many drafts of a target's step are sent back, as its handshake asks: see `wire.VerifySchedule`.

A scheduler belongs to one client and, from the handshake on, to the engine's worker. It learns from what its target accepts,
so confidence follows a drift of the text; both the correction and the lengths depend on past steps, and on what precedes a
draft in this one.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

from draft_engine_client.wire import VerifySchedule
from draft_model.calibration import OnlineCalibration
from draft_model.drafter import DraftProposal
from draft_model.scheduler import DelayedScheduler, StepTimes, schedule_prefixes, schedule_width, survival_of


class VerifyScheduler:
    """Schedules the steps of one client.

    Args:
        schedule: what it asked for
        num_positions: drafts of a block
    """

    def __init__(self, schedule: VerifySchedule, num_positions: int) -> None:
        self._schedule = schedule
        self._calibration = OnlineCalibration(num_positions) if schedule.recalibrate else None
        self._step_times = self._delayed = None
        if schedule.kind == "hardware" and schedule.step_times is not None:
            self._step_times = StepTimes(schedule.step_times.num_tokens, schedule.step_times.seconds)
            if schedule.is_asynchronous:
                self._delayed = DelayedScheduler(self._step_times.steps_per_second)

    def calibrate(self, proposal: DraftProposal) -> DraftProposal:
        """Correct the confidence of a block by what was accepted before it."""
        if self._calibration is None or not proposal.confidence:
            return proposal
        confidence = self._calibration.apply(proposal.confidence)
        return replace(proposal, confidence=confidence, survival=survival_of(confidence))

    def learn(self, confidence: Sequence[float], num_accepted: int) -> None:
        """Take in a verified block: its confidence before `calibrate`, and how many of its drafts were accepted."""
        if self._calibration is not None:
            self._calibration.learn(confidence, num_accepted)

    def lengths(self, proposals: Sequence[DraftProposal], names: Sequence[Hashable], *, num_others: int = 0) -> Sequence[int]:
        """How many drafts of each block are worth verifying; blocks without confidence are taken to be sure.

        Args:
            proposals: of one step
            names: of its blocks, equal where the same block is drafted again
            num_others: requests in the step without drafts
        """
        survival = [one.survival or [1.0] * len(one.token_ids) for one in proposals]
        if self._schedule.kind == "threshold":
            return [sum(chance >= self._schedule.threshold for chance in row) for row in survival]
        if self._step_times is None:
            return [len(row) for row in survival]
        everybody = [*survival, *[()] * num_others]
        if self._delayed is not None:
            lengths = self._delayed.schedule(everybody, names)
        elif self._schedule.is_padded:
            lengths = schedule_width(everybody, self._step_times.steps_per_second).lengths
        else:
            lengths = schedule_prefixes(everybody, self._step_times.steps_per_second).lengths
        return lengths[: len(survival)]
