"""The options of the reward, as they stand under `strands_rollout: {reward: ...}` in a custom config.

Knows only numbers and names; the settings of a rollout and the reward both import it.
"""

from __future__ import annotations

from typing import Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, model_validator

REWARD_KEY: Final = "score"
"""Where `reward_func` puts the number that is trained on; slime's `--reward-key`."""
TOOL_SHAPING_CEILING: Final = 0.4
"""The most that shaping can add to `wrong`: slime's strands example caps a failure at -0.6, with `wrong` at -1.0."""


class RewardSettings(BaseModel):
    """How a graded answer becomes a number."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    style: Literal["default", "slime_strands_example"] = Field(
        default="default",
        description='"default" grades with `strands_rollout.grading`; "slime_strands_example" gives the score of '
        "slime's examples/strands_sglang exactly, its faults included, for those who reproduce it.",
    )
    correct: FiniteFloat = Field(default=1.0, description="The score of a right answer.")
    wrong: FiniteFloat = Field(default=-1.0, description="The score of any other; below `correct`.")
    tool_shaping: bool = Field(
        default=False,
        description="Whether a wrong answer earns (tool iterations - 2) * 0.05 on top, at most 0.4, as in slime's "
        "example. A group whose answers are all wrong then has a spread that GRPO trains on.",
    )
    symbolic_timeout_s: float = Field(
        default=5.0,
        gt=0,
        le=60,
        description="Seconds that one symbolic comparison may take; the answer is wrong when they are over.",
    )

    @model_validator(mode="after")
    def _scores_must_rank(self) -> Self:
        highest_wrong = self.wrong + (TOOL_SHAPING_CEILING if self.tool_shaping else 0.0)
        if not highest_wrong < self.correct:
            raise ValueError(f"a wrong answer could score {highest_wrong}, expected less than correct={self.correct}")
        own = (self.correct, self.wrong, self.tool_shaping) != (1.0, -1.0, False)
        if self.style == "slime_strands_example" and own:
            raise ValueError("style 'slime_strands_example' fixes the scores: remove correct, wrong and tool_shaping")
        return self
