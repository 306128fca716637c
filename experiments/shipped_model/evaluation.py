"""Play episodes with a model at temperature 1, with real tools, and grade the answers."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from transformers import PreTrainedTokenizerBase, Qwen3ForCausalLM

from experiments.shipped_model.conversation import END_OF_TURN
from experiments.shipped_model.task import Task
from experiments.shipped_model.tool_answers import answer_turns
from strands_rollout.template.chat_template import ChatTemplate

MAX_TURNS: Final = 6
MAX_TURN_TOKENS: Final = 128
MAX_EPISODE_TOKENS: Final = 1024
EPISODES_PER_BATCH: Final = 128
_BOXED: Final = re.compile(r"\\boxed\{([^{}]*)\}")


@dataclass(slots=True)
class PlayedEpisode:
    """An episode that is being played.

    Attributes:
        label: The expected answer.
        token_ids: All tokens that the model has read and sampled.
        turns: Text of each sampled turn, with its end token.
        tool_calls: Number of calls that were answered, malformed calls included.
        is_over: True if the last turn called no tool.
    """

    label: str
    token_ids: list[int]
    turns: list[str] = field(default_factory=list)
    tool_calls: int = 0
    is_over: bool = False

    @property
    def is_correct(self) -> bool:
        """True if the last turn ends the episode with the expected answer in a box, after its reasoning."""
        if not self.is_over or not self.turns:
            return False
        found = _BOXED.findall(self.turns[-1].split("</think>")[-1])
        return bool(found) and found[-1].strip() == self.label


@dataclass(frozen=True, slots=True)
class Report:
    """The result of a model's evaluation.

    Attributes:
        episodes: Number of episodes.
        accuracy: Share of episodes with the right answer.
        mixed_problems: Share of problems with both right and wrong answers.
        tool_calls_per_episode: Mean number of calls that were answered, malformed calls included.
        finished: Share of episodes that ended with a turn without a call.
    """

    episodes: int
    accuracy: float
    mixed_problems: float
    tool_calls_per_episode: float
    finished: float


def evaluate(
    task: Task[Any],
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[dict[str, Any]],
    *,
    samples_per_row: int,
    seed: int,
    on_progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> Report:
    """Play every row `samples_per_row` times and return the report; on one machine, equal seeds give equal reports.

    Args:
        task: Task whose agent plays.
        model: The model, in fp32.
        tokenizer: The model's tokenizer.
        rows: Rows of the task.
        samples_per_row: Episodes per row.
        seed: Sampling seed; sets torch's global random state.
        on_progress: Called with the number of finished episodes and of all episodes.
    """
    torch.manual_seed(seed)
    template = ChatTemplate(tokenizer)
    plays = [
        PlayedEpisode(row["label"], task.prompt.prompt_ids(template, row["prompt"][-1]["content"]))
        for row in rows
        for _ in range(samples_per_row)
    ]
    for start in range(0, len(plays), EPISODES_PER_BATCH):
        play_episodes(task, model, template, plays[start : start + EPISODES_PER_BATCH])
        on_progress(min(start + EPISODES_PER_BATCH, len(plays)), len(plays))
    groups = [plays[start : start + samples_per_row] for start in range(0, len(plays), samples_per_row)]
    solved = [sum(play.is_correct for play in group) for group in groups]
    return Report(
        episodes=len(plays),
        accuracy=round(sum(solved) / len(plays), 4),
        mixed_problems=round(sum(0 < count < samples_per_row for count in solved) / len(groups), 4),
        tool_calls_per_episode=round(sum(play.tool_calls for play in plays) / len(plays), 4),
        finished=round(sum(play.is_over for play in plays) / len(plays), 4),
    )


def play_episodes(
    task: Task[Any], model: Qwen3ForCausalLM, template: ChatTemplate, plays: Sequence[PlayedEpisode]
) -> None:
    """Play the episodes as a batch, up to the limits on turns and tokens; a turn that is cut off ends its episode."""
    active = list(plays)
    for _ in range(MAX_TURNS):
        if not active:
            return
        sampled = sample_turns(model, [play.token_ids for play in active])
        complete = []
        for play, ids in zip(active, sampled, strict=True):
            play.token_ids += ids
            play.turns.append(template.encoder.decode(ids))
            if ids and ids[-1] == template.end_of_turn_id:
                complete.append(play)
        answers = answer_turns([play.turns[-1].removesuffix(END_OF_TURN) for play in complete], task.open_tools)
        for play, answered in zip(complete, answers, strict=True):
            play.is_over = not answered
            play.tool_calls += len(answered)
            play.token_ids += task.prompt.tool_answer_ids(template, answered) if answered else []
        active = [play for play in complete if not play.is_over and len(play.token_ids) < MAX_EPISODE_TOKENS]


@torch.inference_mode()  # type: ignore[untyped-decorator]
def sample_turns(model: Qwen3ForCausalLM, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Sample a turn for each prompt with torch's global random state; a turn includes its end token, if any."""
    model.eval()
    width = max(len(prompt) for prompt in prompts)
    pad = model.config.pad_token_id
    token_ids = torch.tensor([[pad] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    stop_ids = [model.config.eos_token_id, pad]
    generated = model.generate(
        input_ids=token_ids,
        attention_mask=mask,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=MAX_TURN_TOKENS,
        eos_token_id=stop_ids,
        pad_token_id=pad,
    )
    return [_until_stop(row, stop_ids) for row in generated[:, width:].tolist()]


def _until_stop(ids: list[int], stop_ids: Sequence[int]) -> list[int]:
    end = next((at + 1 for at, token_id in enumerate(ids) if token_id in stop_ids), len(ids))
    return ids[:end]
