"""The next tokens of answers: drawn for all of them at once, held to their forms, and told as text.

Knows neither schedule nor model. What ends an answer is said to those who gave it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any

from nucleate.engine.beam.scheduling import RunningBeam
from nucleate.engine.request import RunningRequest, RunningSequence
from nucleate.engine.scheduler import SchedulerEntry
from nucleate.engine.verification import VerificationCallbacks
from nucleate.outputs import EngineOutput, StepLogprobs
from nucleate.sampling.sampler import Sampler
from nucleate.structured_output import Guide, why
from nucleate.structured_output.grammar_manager import GrammarManager


class TokenSampler:
    """The tokens of the answers of one engine.

    at_work: answers that have not ended. later: whether text is made of tokens only when it is asked for with ``tell``,
    not as soon as a draft is verified. begun: told of a request whose first answer has a row. ended: told of an answer
    that ends with its text. fail: ends an answer from whose logits no token can be drawn.
    """

    def __init__(
        self,
        sampler: Sampler,
        forms: GrammarManager,
        at_work: Mapping[SchedulerEntry, RunningSequence | RunningBeam],
        *,
        later: bool,
        begun: Callable[[RunningRequest], None],
        ended: Callable[[RunningSequence], None],
        fail: Callable[[RunningSequence, str], list[EngineOutput]],
    ) -> None:
        self._sampler, self._forms, self._at_work, self._later = sampler, forms, at_work, later
        self._begun, self._ended, self._fail = begun, ended, fail
        self._drawn: list[_Drawn] = []  # whose text is not made yet
        self.tokens = 0  # that were drawn
        self.forced = 0  # that were not, as nothing else could follow
        self.seconds = 0.0  # that the sampler took

    def sample(
        self, branches: list[RunningSequence], places: list[int], logits_LV: Any, events: list[EngineOutput]
    ) -> list[int]:
        """A token for each of some answers, from the logits at these places; -1 for those that end without."""
        if not branches:
            return []
        logits_RV = logits_LV if len(places) == len(logits_LV) else logits_LV[places]
        mask = self._forms.mask([branch.answer.guide for branch in branches])
        begin = perf_counter()
        out = self._sampler(logits_RV, list(map(self._row, branches)), mask=mask)
        self.seconds += perf_counter() - begin
        told = out.logprobs or (None,) * len(branches)
        tokens: list[int] = out.token_ids.tolist()
        for place, (branch, token) in enumerate(zip(branches, tokens, strict=True)):
            if token < 0:
                events += self._fail(branch, why(out.errors[place], branch.answer.guide))
            else:
                self.take(branch, token, told[place])
        self.tokens += len(branches) - len(out.errors)
        return tokens

    def take(self, branch: RunningSequence, token: int, told: StepLogprobs | None) -> None:
        """An answer has a new token."""
        branch.job.push(token)
        guide = branch.answer.guide
        if guide is None:
            self._drawn.append((branch, token, told, False))
        else:
            self._hold(branch, guide, token, told)

    def _hold(self, branch: RunningSequence, guide: Guide, token: int, told: StepLogprobs | None) -> None:
        """An answer of some form has a new token. Those that must follow it are neither drawn nor read one by one."""
        job = branch.job
        branch.over = guide.push(token)
        self._drawn.append((branch, token, told, branch.over))
        if branch.over or not branch.live.skips:
            return
        for forced in guide.forced():
            if job.idle:
                break
            job.push(forced)
            self._sampler.accept(branch.row, forced)
            branch.over = guide.push(forced)
            self._drawn.append((branch, forced, None, branch.over))
            self.forced += 1

    def _row(self, branch: RunningSequence) -> int:
        """The row of an answer in the sampler, from its first token on."""
        if branch.row < 0:
            live, answer = branch.live, branch.answer
            branch.row = self._sampler.add(live.stages, live.request.prompt_ids, seed=answer.seed)
            self._begun(live)
        return branch.row

    def tell(self, only: RunningSequence | RunningBeam | None = None) -> list[EngineOutput]:
        """The text of the tokens that were drawn, of all answers or of one."""
        drawn, self._drawn = self._drawn, []
        events = []
        for branch, token, told, done in drawn:
            if branch.job not in self._at_work:
                continue
            if only is not None and branch is not only:
                self._drawn.append((branch, token, told, done))
                continue
            piece = branch.answer.push(token, told, done=done)
            events.append(branch.live.event(piece))
            if piece.finish_reason is not None:
                self._ended(branch)
        return events

    def hands(self, logits_LV: Any, events: list[EngineOutput]) -> VerificationCallbacks:
        """For those who verify drafts. What ends an answer within a draft is found on the way."""

        def draw(branches: list[RunningSequence], places: list[int]) -> Sequence[int]:
            tokens = self.sample(branches, places, logits_LV, events)
            tell()
            return tokens

        def take(branch: RunningSequence, token: int, told: StepLogprobs | None) -> None:
            self.take(branch, token, told)
            self.tokens += 1
            tell()

        def tell() -> None:
            if not self._later:
                events.extend(self.tell())

        def fail(branch: RunningSequence, error: str) -> None:
            events.extend(self._fail(branch, why(error, branch.answer.guide)))

        return VerificationCallbacks(
            logits_LV, draw, take, fail, lambda branch: branch.over or branch.job not in self._at_work
        )


_Drawn = tuple[RunningSequence, int, StepLogprobs | None, bool]  # a token, its logprobs, whether nothing can follow it
