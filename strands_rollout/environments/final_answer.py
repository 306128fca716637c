"""The answer of an episode for rewards that compare text: in `<answer>` tags, in a box, or after `Answer:`."""

import re
from typing import Any, Final

from strands_rollout.grading import extract_answer
from strands_rollout.slime_plugin.reward import answer_text, is_cut_answer

_TAGGED: Final = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)


def final_answer(sample: Any) -> str:  # noqa: ANN401 - slime's Sample or any object like it
    r"""Return the last answer in a sample's last assistant message; "" if the message has no answer.

    `<answer>...</answer>`, the convention of Search-R1 and reasoning-gym, takes precedence over `\boxed{...}` and
    `Answer: ...`. Reasoning and tool calls are not searched. Without `<answer>`, a message that was cut within a
    box, a tag or an `Answer:` line has no answer; see `extract_answer`.
    """
    text = answer_text(sample)
    tagged = _TAGGED.findall(text)
    return (tagged[-1] if tagged else extract_answer(text, is_cut=is_cut_answer(sample))).strip()
