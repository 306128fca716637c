"""The episodes that `generate` plays, and how one is played before any engine, with every token checked on the wire."""

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from many_tools.turns import END, TURNS, question_of
from strands_rollout import Sample, generate, reward_func
from strands_rollout.evaluation.options import slime_sampling_params
from strands_rollout.evaluation.token_audit import Exchange, recording, tito_violations
from strands_rollout.settings import REWARD_KEY
from strands_rollout.slime_plugin.sample_contract import contract_violations
from strands_rollout.slime_plugin.slime_adapter import load_tokenizer

SYSTEM_PROMPT: Final = "Use the tools."
_HERE: Final = "many_tools.tools"
STORE: Final = tuple(f"{_HERE}.{name}" for name in ("stock", "throw_away", "ask_expert", "pack"))
ARITHMETIC: Final = (f"{_HERE}.arithmetic",)
CALCULATOR: Final = ("strands_tools.calculator",)
WATCHED: Final = {"hooks": ["many_tools.hooks.Storekeeper"]}
ENDLESS_TOKENS: Final = 96


@dataclass(frozen=True, slots=True)
class Episode:
    """What a sample asks, and the settings under which an agent answers it."""

    question: str
    tools: Sequence[str] = STORE
    settings: Mapping[str, Any] = field(default_factory=dict)
    max_new_tokens: int = 1024


@dataclass(frozen=True, slots=True)
class Played:
    """What an episode left behind.

    Attributes:
        samples: The main agent's first.
        conversations: What crossed the wire, by conversation: a request that extends no other opens one.
        violations: Whatever is wrong with the samples, in words.
    """

    samples: list[Sample]
    conversations: list[list[Exchange]]
    violations: list[str]
    tokenizer: Any

    @property
    def sample(self) -> Sample:
        return self.samples[0]

    @property
    def facts(self) -> dict[str, Any]:
        return dict(self.sample.metadata["strands_rollout"])

    @property
    def said(self) -> list[list[str]]:
        """The turns of each conversation."""
        return [[self.tokenizer.decode(one.output_ids or []) for one in turns] for turns in self.conversations]

    @property
    def learned(self) -> list[list[str]]:
        """What the policy has learned to say there; of a turn that was cut, its beginning."""
        questions = [question_of(self.tokenizer.decode(turns[0].input_ids)) for turns in self.conversations]
        return [
            [
                turn if turn.endswith(END) else turn[: len(words)]
                for turn, words in zip(TURNS.get(question, ()), said, strict=False)
            ]
            for question, said in zip(questions, self.said, strict=True)
        ]

    def context(self, turn: int, conversation: int = 0) -> str:
        """What the policy read between a turn and the next, without the template's own words."""
        first, second = self.conversations[conversation][turn : turn + 2]
        text = str(self.tokenizer.decode(second.input_ids[len(first.input_ids) + len(first.output_ids or []) :]))
        return text.removeprefix("\n<|im_start|>user\n").removesuffix("<|im_end|>\n<|im_start|>assistant\n")


EPISODES: Final = (
    Episode("Say hello."),
    Episode("Count for ever.", max_new_tokens=ENDLESS_TOKENS),
    Episode("How many bolts?"),
    Episode("How many nuts?"),
    Episode("How many washers?"),
    Episode("How many bolts and nuts?"),
    Episode("How many bolts, tubes and screws?"),
    Episode("Throw the bolts away.", settings=WATCHED),
    Episode("How many screws?", settings=WATCHED),
    Episode("How many pins?", settings=WATCHED),
    Episode("Ask an expert for the weight of all bolts.", settings={"fan_out": True}),
    Episode("Ask two experts for the weights of a nut and a screw.", settings={"fan_out": True}),
    Episode("Have the nuts packed.", settings={"fan_out": True}),
    Episode("Have the screws packed.", settings={"fan_out": True}),
    Episode("What is 1234 * 5678?", CALCULATOR),
    Episode("Add 2 and 40.", ARITHMETIC),
    Episode("Divide 1 by 0.", ARITHMETIC),
    Episode("Draw a dot.", ARITHMETIC),
    Episode("Fetch the key.", ARITHMETIC),
    Episode("Stop the server.", ARITHMETIC),
)
BY_QUESTION: Final = {episode.question: episode for episode in EPISODES}


async def play(
    episode: Episode, base_url: str, tokenizer_dir: Path, *, temperature: float = 0.0, **settings: Any
) -> Played:
    """One episode as slime would have it played by `generate` and rewarded by `reward_func`; settings may be added."""
    tokenizer = load_tokenizer(str(tokenizer_dir))
    async with recording(base_url) as recorder:
        host, _, port = recorder.url.removeprefix("http://").partition(":")
        args = SimpleNamespace(
            hf_checkpoint=str(tokenizer_dir),
            sglang_router_ip=host,
            sglang_router_port=int(port),
            reward_key=REWARD_KEY,
            advantage_estimator=None,
            strands_rollout={
                "system_prompt": SYSTEM_PROMPT,
                "tools": list(episode.tools),
                **episode.settings,
                **settings,
            },
        )
        sample = Sample(prompt=episode.question, label="", index=0, session_id=uuid.uuid4().hex)
        played = await generate(args, sample, slime_sampling_params(temperature, episode.max_new_tokens))
        samples = played if isinstance(played, list) else [played]
        for one, reward in zip(samples, await reward_func(args, samples), strict=True):
            one.reward = reward
        conversations = _conversations(recorder.episodes.get(str(sample.session_id), []))
    return Played(samples, conversations, _violations(samples, conversations, tokenizer), tokenizer)


def _conversations(exchanges: Sequence[Exchange]) -> list[list[Exchange]]:
    """The exchanges of an episode, by agent, in the order in which the agents began."""
    found: list[list[Exchange]] = []
    for exchange in exchanges:
        for conversation in found:
            last = conversation[-1]
            read = [*last.input_ids, *(last.output_ids or [])]
            if exchange.input_ids[: len(read)] == read:
                conversation.append(exchange)
                break
        else:
            found.append([exchange])
    return found


def _violations(samples: Sequence[Sample], conversations: Sequence[Sequence[Exchange]], tokenizer: Any) -> list[str]:
    """What the contract and the wire say against the samples; agents may have begun in another order."""
    found = [
        words
        for sample in samples
        for words in contract_violations(
            sample, decode=lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False)), reward_key=REWARD_KEY
        )
    ]
    for sample in samples:
        by_conversation = [tito_violations(conversation, sample) for conversation in conversations]
        if all(by_conversation):
            found += min(by_conversation, key=len)
    return found
