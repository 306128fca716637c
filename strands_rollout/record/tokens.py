"""The exact tokens of one branch, with loss mask, logprobs and weight versions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from strands_rollout.errors import TrajectoryError
from strands_rollout.record.weight_versions import WeightSpan

if TYPE_CHECKING:
    from strands_rollout.model.images import PlacedImage


@dataclass(slots=True)
class Part:
    """One accepted answer of the engine, with at least one sampled token.

    A turn has several parts if it was continued from its own tokens after an abort. The engine aborts turns for a
    weight update, for example, or at the end of the rollout.

    Attributes:
        start: Index of the first sampled token in `Trajectory.token_ids`.
        end: Index after the last sampled token.
        finish_reason: "stop", "length" or "abort", as SGLang reports it; "stop" also if SGLang aborted a turn that had
            just ended.
        matched: The stop token or stop string that ended the part; None if the engine reports none, or `finish_reason`
            is not "stop".
        rid: The request's id, as sent to the engine.
        latency_s: Wall-clock seconds of the request, measured by the client.
        prompt_tokens: Number of tokens that the engine read; None if the engine does not report it.
        cached_tokens: Number of prompt tokens that came from the prefix cache; None if the engine does not report it.
        weight_spans: The weights that sampled the tokens; together the spans cover the part.
        meta_info: SGLang's `meta_info` without its logprob lists.
        at_s: Start of the request, in seconds since the episode began; None outside of an episode.
    """

    start: int
    end: int
    finish_reason: str
    rid: str
    latency_s: float
    weight_spans: tuple[WeightSpan, ...]
    matched: int | str | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    meta_info: Mapping[str, Any] = field(default_factory=dict)
    at_s: float | None = None


@dataclass(slots=True)
class Turn:
    """One turn of the policy: consecutive parts with nothing between them.

    Attributes:
        parts: At least one part; every part except the last was ended by an abort.
    """

    parts: tuple[Part, ...]

    @property
    def start(self) -> int:
        """Index of the turn's first sampled token in `Trajectory.token_ids`."""
        return self.parts[0].start

    @property
    def end(self) -> int:
        """Index after the turn's last sampled token."""
        return self.parts[-1].end

    @property
    def finish_reason(self) -> str:
        """The finish reason of the last part: "abort" if the turn is not finished."""
        return self.parts[-1].finish_reason

    @property
    def latency_s(self) -> float:
        """Wall-clock seconds of the turn's requests."""
        return sum(part.latency_s for part in self.parts)

    @property
    def prompt_tokens(self) -> int | None:
        """Number of tokens that the engine read for the first part; None if the engine does not report it."""
        return self.parts[0].prompt_tokens

    @property
    def cached_tokens(self) -> int | None:
        """Number of `prompt_tokens` that came from the prefix cache; None if the engine does not report it."""
        return self.parts[0].cached_tokens

    @property
    def weight_version(self) -> str | None:
        """Version of the weights that sampled the last token; None if the engine does not report it."""
        return self.parts[-1].weight_spans[-1].version

    @property
    def weight_spans(self) -> list[WeightSpan]:
        """The weights that sampled the tokens; adjacent spans of one version are joined."""
        return _join_adjacent(chain.from_iterable(part.weight_spans for part in self.parts))


@dataclass(slots=True)
class Trajectory:
    """The exact tokens that the policy read and wrote, in order.

    `token_ids`, `loss_mask` and `logprobs` always have the same length; unless they are empty, they end with a sampled
    token. A sampled token has mask 1 and the engine's logprob. Its mask is 0 if slime masked it before a resume. Its
    logprob is 0.0 if logprobs are not requested. Context (prompt, tool results, template text) has mask 0 and logprob
    0.0.

    Attributes:
        token_ids: Prompt, then response.
        loss_mask: 0 or 1 per token.
        logprobs: One finite float per token, at the sampling temperature.
        prompt_length: Number of tokens of the first prompt.
        turns: The policy's turns.
        images: The images in the context, in order.
    """

    token_ids: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    prompt_length: int = 0
    turns: list[Turn] = field(default_factory=list)
    images: list[PlacedImage] = field(default_factory=list)

    @property
    def response_length(self) -> int:
        """Number of tokens after the first prompt, including the context between turns."""
        return len(self.token_ids) - self.prompt_length

    @property
    def sampled_length(self) -> int:
        """Number of tokens that the policy wrote."""
        return sum(turn.end - turn.start for turn in self.turns)

    @property
    def is_open(self) -> bool:
        """True if the last turn was aborted, and can be continued from its own tokens, without new context."""
        return bool(self.turns) and self.turns[-1].parts[-1].finish_reason == "abort"

    @property
    def parts(self) -> list[Part]:
        """The accepted answers of the engine, in order."""
        return [part for turn in self.turns for part in turn.parts]

    @property
    def weight_spans(self) -> list[WeightSpan]:
        """The weights that sampled the tokens, turn by turn."""
        return [span for turn in self.turns for span in turn.weight_spans]

    def snapshot(self, turn_count: int | None = None) -> Trajectory:
        """Return a copy of the first `turn_count` turns, by default of all; another thread may append meanwhile."""
        turns = self.turns[:turn_count]
        end = turns[-1].end if turns else 0
        lists = (self.token_ids[:end], self.loss_mask[:end], self.logprobs[:end])
        images = [image for image in self.images if image.end <= end]
        return Trajectory(*lists, prompt_length=self.prompt_length, turns=turns, images=images)

    def append_turn(
        self,
        context_ids: Sequence[int],
        sampled_ids: Sequence[int],
        sampled_logprobs: Sequence[float],
        *,
        finish_reason: str,
        rid: str,
        latency_s: float,
        matched: int | str | None = None,
        prompt_tokens: int | None = None,
        cached_tokens: int | None = None,
        meta_info: Mapping[str, Any] | None = None,
        at_s: float | None = None,
        weight_versions: Sequence[tuple[str | None, int, int]] = (),
        numbering: str = "",
        images: Sequence[PlacedImage] = (),
    ) -> Turn:
        """Append the new context of a request and the tokens that the policy sampled; return the turn.

        Args:
            context_ids: New context tokens: the whole prompt before the first turn; none if an open turn is continued.
            sampled_ids: The tokens as the engine returned them, at least one.
            sampled_logprobs: One logprob per sampled token; empty if logprobs were not requested (recorded as 0.0).
            finish_reason: See `Part`.
            rid: See `Part`.
            latency_s: See `Part`.
            matched: See `Part`.
            prompt_tokens: See `Part`.
            cached_tokens: See `Part`.
            meta_info: See `Part`.
            at_s: See `Part`.
            weight_versions: (version, start, end), with indices into `sampled_ids`, without gaps; empty if unknown.
            numbering: The numbering of these versions; see `KnownVersions`.
            images: Images in the context.

        Raises:
            TrajectoryError: The lengths disagree, a logprob is not finite, the weight versions don't cover the sampled
                tokens, nothing was sampled, the first prompt is empty, or an open turn would get context. The
                trajectory is unchanged in these cases.
        """
        spans = list(weight_versions) or [(None, 0, len(sampled_ids))]
        self._check(context_ids, sampled_ids, sampled_logprobs, spans)
        if not self.turns:
            self.prompt_length = len(context_ids)
        start = len(self.token_ids) + len(context_ids)
        weight_spans = tuple(
            WeightSpan(version, start + first, start + end, numbering) for version, first, end in spans
        )
        part = Part(
            start=start,
            end=start + len(sampled_ids),
            finish_reason=finish_reason,
            rid=rid,
            latency_s=latency_s,
            weight_spans=weight_spans,
            matched=matched,
            prompt_tokens=prompt_tokens,
            cached_tokens=cached_tokens,
            meta_info=meta_info or {},
            at_s=at_s,
        )
        self.images += images
        self.token_ids += context_ids
        self.token_ids += sampled_ids
        self.loss_mask += [0] * len(context_ids) + [1] * len(sampled_ids)
        self.logprobs += [0.0] * len(context_ids)
        self.logprobs += sampled_logprobs or [0.0] * len(sampled_ids)
        earlier = self.turns.pop().parts if self.is_open else ()
        self.turns.append(Turn((*earlier, part)))
        return self.turns[-1]

    def _check(
        self,
        context_ids: Sequence[int],
        sampled_ids: Sequence[int],
        logprobs: Sequence[float],
        spans: Sequence[tuple[str | None, int, int]],
    ) -> None:
        if not self.turns and not context_ids:
            raise TrajectoryError("got an empty first prompt; expected at least one prompt token")
        if self.is_open and context_ids:
            raise TrajectoryError(
                f"got {len(context_ids)} context tokens inside a turn that was aborted; expected none"
            )
        if not sampled_ids:
            raise TrajectoryError("got a turn without a sampled token; expected at least one")
        if logprobs and len(logprobs) != len(sampled_ids):
            raise TrajectoryError(
                f"got {len(logprobs)} logprobs for {len(sampled_ids)} sampled tokens; expected one for each"
            )
        # a finite sum has only finite terms, so most lists need no loop
        if not math.isfinite(sum(logprobs)) and not all(map(math.isfinite, logprobs)):
            raise TrajectoryError(
                "got a logprob that is not finite; expected finite numbers: the answer must be rejected, not stored"
            )
        ends = [0, *(end for _, _, end in spans)]
        if [first for _, first, _ in spans] != ends[:-1] or ends[-1] != len(sampled_ids) or sorted(set(ends)) != ends:
            raise TrajectoryError(
                f"got the weight versions {spans!r:.200} for {len(sampled_ids)} sampled tokens; expected spans that "
                "follow each other and cover them"
            )


def _join_adjacent(spans: Iterable[WeightSpan]) -> list[WeightSpan]:
    found: list[WeightSpan] = []
    for span in spans:
        last = found[-1] if found else None
        if last and (last.version, last.numbering, last.end) == (span.version, span.numbering, span.start):
            found[-1] = replace(last, end=span.end)
        else:
            found.append(span)
    return found
