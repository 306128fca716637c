"""Facts about each model family's chat template (turn ends, call ids, limits), for random episodes in its format."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from family_templates import TEMPLATES

from strands_rollout.diagnostics.template_check import RandomEpisode
from strands_rollout.template.chat_template import ChatTemplate


@dataclass(frozen=True, slots=True)
class Ending:
    """Facts about a family's template: the ends of its turns, and the histories that it accepts."""

    answer: str  # end token of a turn without calls, before a user turn
    calls: str  # end token of a turn with calls
    sampled: str | None = None  # token that the policy samples at the end of an answer, if it differs
    ids: tuple[str, ...] | None = None  # ids that the policy writes for two calls of `add`; None if it writes none
    is_parallel: bool = True  # True if a turn may have several calls
    users: int = 2  # maximum number of user turns of an episode with tools
    arguments_as_text: bool = False  # True if the template needs arguments as JSON text
    opens_reasoning: bool = False  # True if the generation prompt opens the reasoning
    moves_text: bool = False  # True if the template moves the text of a turn with calls behind the results


_EOS = "<｜end▁of▁sentence｜>"  # noqa: RUF001 - DeepSeek's own characters
_HY_EOS = _EOS.replace("end▁of▁sentence", "hy_eos:opensource")
MARK = "an-earlier-turn-{}"
ENDINGS: dict[str, Ending] = {
    "hermes": Ending("<|im_end|>", "<|im_end|>"),
    "qwen3_coder": Ending("<|im_end|>", "<|im_end|>"),
    "glm4": Ending("<|user|>", "<|observation|>"),
    "glm4-7": Ending("<|user|>", "<|observation|>", opens_reasoning=True),
    "kimi_k2": Ending("<|im_end|>", "<|im_end|>", ids=("functions.add:0", "functions.add:1")),
    "deepseek_v3": Ending(_EOS, _EOS, arguments_as_text=True),
    "deepseek_v3-1": Ending(_EOS, _EOS),
    "deepseek_v3-2": Ending(_EOS, _EOS, opens_reasoning=True),
    "deepseek_v4": Ending(_EOS, _EOS, opens_reasoning=True),
    "minimax_m2": Ending("[e~[", "[e~[", opens_reasoning=True),
    "muse_glimmer": Ending("<|eot|>", "<|eot|>"),
    "lfm2": Ending("<|im_end|>", "<|im_end|>"),
    "pythonic": Ending("<|eot|>", "<|eot|>"),
    "hunyuan3": Ending(_HY_EOS, _HY_EOS),
    "hunyuan_a13b": Ending("<|eos|>", "<|eos|>"),
    "llama3_json": Ending("<|eot_id|>", "<|eot_id|>", is_parallel=False),
    "mistral-array": Ending("</s>", "</s>"),
    "mistral-nemo": Ending("</s>", "</s>", ids=("Ab3456780", "Ab3456781"), users=1),
    "mistral-named": Ending("</s>", "</s>"),
    "gpt_oss": Ending("<|end|>", "<|call|>", sampled="<|return|>", is_parallel=False),
    "apertus": Ending("<|assistant_end|>", "<|tools_suffix|>"),
    "gemma4": Ending("<turn|>", "<|tool_response>", moves_text=True),
    "kimi_k3": Ending("<|end_of_msg|>", "<|end_of_msg|>", opens_reasoning=True),
    "seed_oss": Ending("<seed:eos>", "<seed:eos>"),
    "smollm3": Ending("<|im_end|>", "<|im_end|>"),
    "deepseek_r1_tools": Ending(_EOS, _EOS),
    "hermes_tools": Ending("<|im_end|>", "<|im_end|>"),
    "command_r7b": Ending("<|END_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>"),
}


def random_episode(family: str, tokenizer: Any, seed: int) -> RandomEpisode:
    ending = ENDINGS[family]
    refused = [] if ending.users > 1 else ["system messages", "more user turns with tools"]
    ends = {"max_calls": 3 if ending.is_parallel else 1, "is_silent": ending.moves_text}
    return RandomEpisode(tokenizer, seed, {}, TEMPLATES[family][0], refused=refused, **ends)


def expected_context(
    tokenizer: Any, messages: Sequence[Any], ending: Ending, number: int, tools: Sequence[Any]
) -> list[int]:
    """Return the ids that a template renders for messages, from the end token of assistant turn `number` - 1 on.

    If `number` is 0, return all ids. Control tokens in the text of messages are escaped, as in the package.
    """
    encoder = ChatTemplate(tokenizer).encoder
    shown = [{**message, "content": encoder.escape(message["content"])} for message in messages]
    named = {"tools": list(tools), "xml_tools": list(tools)}
    rendered = tokenizer.apply_chat_template(shown, tokenize=False, add_generation_prompt=True, **named)
    if number:
        mark = MARK.format(number - 1)
        end = ending.calls if messages[-1]["role"] == "tool" else ending.answer
        rendered = rendered[rendered.index(end, rendered.rindex(mark)) :]
    return encoder.encode_rendered(rendered)
