"""The render mismatch of episodes in each family's format: none, and one where a context was changed."""

from __future__ import annotations

from typing import Any

import pytest
from family_episodes import ENDINGS, play
from family_templates import TEMPLATES, tokenizer_with
from saved import episode, sample_of

from strands_rollout.retokenisation.render_mismatch import RenderCheck
from strands_rollout.retokenisation.turn_reading import TurnReading


@pytest.mark.parametrize("known", TEMPLATES)
async def test_contexts_are_what_the_template_renders_and_a_changed_one_is_found(
    known: str, shipped_tokenizer: Any
) -> None:
    tokenizer = tokenizer_with(TEMPLATES[known][1] + f"{{#{ENDINGS[known].sampled}#}}", shipped_tokenizer)
    played = await play(known, tokenizer, ENDINGS[known])
    check = RenderCheck(TurnReading(tokenizer, {}))
    parts = [ids for pair in zip(played.contexts, played.turns, strict=True) for ids in pair]
    assert list(check.mismatches(episode(sample_of(parts, prompt="Question 0?")))) == []
    parts[2] = [*parts[2][:-1], played.model.template.end_of_turn_id, *parts[2][-1:]]
    assert len(list(check.mismatches(episode(sample_of(parts, prompt="Question 0?"))))) == 1
