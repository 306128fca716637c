"""One sample of an evaluation: played, graded, and written down as a line of the results.

Knows samples and their facts; nothing of files.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Container, Mapping
from dataclasses import dataclass
from typing import Any

from strands_rollout.dump.record import shown_values
from strands_rollout.evaluate import Outcome, Player
from strands_rollout.evaluation.plan import EvalSet, SampleKey
from strands_rollout.finished_sample import finished_samples
from strands_rollout.retokenisation.meter import DriftMeter, measure_some
from strands_rollout.sample_type import Sample
from strands_rollout.secret_mask import without_values


@dataclass(frozen=True, slots=True)
class Episodes:
    """Plays the samples of an evaluation.

    Attributes:
        player: On which engine.
        sets: By name.
        seed: Of the whole run; None for none.
        keeps_tokens: Whether lines hold the whole sample.
        meter: Measures the drift of some samples.
        measured: Which.
        secrets: Texts that are masked in the lines; tokens stay as they are.
    """

    player: Player
    sets: Mapping[str, EvalSet]
    seed: int | None
    keeps_tokens: bool
    meter: DriftMeter
    measured: Container[SampleKey]
    secrets: Collection[str]

    async def line(self, key: SampleKey) -> dict[str, Any]:
        """Play a sample; its line for the results."""
        chosen = self.sets[key.data_set]
        row = chosen.rows[key.problem]
        sample = Sample(
            prompt=copy.deepcopy(row.prompt),
            label=row.label,
            metadata=copy.deepcopy(dict(row.metadata)),
            index=key.problem * chosen.sampling.samples + key.number,
            apply_chat_template_kwargs=dict(chosen.template_kwargs),
        )
        params = chosen.sampling.params
        if self.seed is not None:
            params["sampling_seed"] = key.seed(self.seed)
        outcome = await self.player.play(sample, params)
        line = {**_line(key, outcome, params.get("sampling_seed")), "audited": self.player.audited}
        line["drift"] = self._drift(outcome.sample) if key in self.measured else None
        line = without_values(line, self.secrets)
        return {**line, "sample": shown_values(outcome.sample.to_dict(), self.secrets)} if self.keeps_tokens else line

    def _drift(self, sample: Sample) -> dict[str, int | None] | None:
        """Its counts; None where nothing was sampled, or it can't be measured."""
        found = measure_some(finished_samples(sample), self.meter)
        return found[0].counts if found else None


def _line(key: SampleKey, outcome: Outcome, seed: int | None) -> dict[str, Any]:
    sample, facts = outcome.sample, outcome.facts
    return {
        "data_set": key.data_set,
        "problem": key.problem,
        "number": key.number,
        "seed": seed,
        "status": str(sample.status.value),
        "stop_reason": str(facts.get("stop_reason")),
        "error": facts.get("error"),
        "label": sample.label,
        "reward": sample.reward,
        "response": sample.response,
        "prompt_tokens": len(sample.tokens) - sample.response_length,
        "response_tokens": sample.response_length,
        "sampled_tokens": facts.get("sampled_tokens", 0),
        "turns": facts.get("turns", 0),
        "tool_calls": facts.get("tool_calls", 0),
        "tool_errors": facts.get("tool_errors", 0),
        "parse_failures": facts.get("parse_failures", 0),
        "seconds": facts.get("duration_s", 0.0),
        "weight_versions": _weight_versions(outcome),
        "violations": [*outcome.contract_violations, *outcome.tito_violations],
    }


def _weight_versions(outcome: Outcome) -> list[str]:
    """Those that it was sampled with, each once: slime's one for each request, and those within a request."""
    named = [*outcome.sample.weight_versions, *(outcome.facts.get("weight_versions") or [])]
    return list(dict.fromkeys(str(version) for version in named if version is not None))
