"""What is known of the ends, calls and turns of each family's template, which episodes in its format depend on."""

from dataclasses import dataclass
from typing import Any

from family_templates import TEMPLATES

from strands_rollout.diagnostics.template_check import RandomEpisode


@dataclass(frozen=True, slots=True)
class Ending:
    """How a family ends turns."""

    answer: str  # token with which its template ends a turn without calls, before a user's
    calls: str  # token with which it ends a turn with calls
    sampled: str | None = None  # what the policy samples at the end of an answer, where that is another
    ids: tuple[str, ...] | None = None  # that the policy writes, of two calls of `add`; None where it writes none
    is_parallel: bool = True  # whether a turn may have several calls
    users: int = 2  # how many user turns an episode with tools may have
    arguments_as_text: bool = False  # whether its template wants them so
    opens_reasoning: bool = False  # whether its prompt does


_EOS = "<｜end▁of▁sentence｜>"  # noqa: RUF001 - DeepSeek's own characters
ENDINGS: dict[str, Ending] = {
    "hermes": Ending("<|im_end|>", "<|im_end|>"),
    "qwen3_coder": Ending("<|im_end|>", "<|im_end|>"),
    "glm4": Ending("<|user|>", "<|observation|>"),
    "glm4-7": Ending("<|user|>", "<|observation|>", opens_reasoning=True),
    "kimi_k2": Ending("<|im_end|>", "<|im_end|>", ids=("functions.add:0", "functions.add:1")),
    "deepseek_v3": Ending(_EOS, _EOS, arguments_as_text=True),
    "deepseek_v3-1": Ending(_EOS, _EOS),
    "deepseek_v3-2": Ending(_EOS, _EOS, opens_reasoning=True),
    "llama3_json": Ending("<|eot_id|>", "<|eot_id|>", is_parallel=False),
    "mistral-array": Ending("</s>", "</s>"),
    "mistral-nemo": Ending("</s>", "</s>", ids=("Ab3456780", "Ab3456781"), users=1),
    "mistral-named": Ending("</s>", "</s>"),
    "gpt_oss": Ending("<|end|>", "<|call|>", sampled="<|return|>", is_parallel=False),
}


def random_episode(known: str, tokenizer: Any, seed: int) -> RandomEpisode:
    ending = ENDINGS[known]
    refused = [] if ending.users > 1 else ["system messages", "more user turns with tools"]
    most = 3 if ending.is_parallel else 1
    return RandomEpisode(tokenizer, seed, {}, TEMPLATES[known][0], refused=refused, most_calls=most)
