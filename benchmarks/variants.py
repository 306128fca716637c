"""The variants of the client benchmark: each variant plays a script's episode on the scripted engine.

The tokens, mask and logprobs of every played response are compared with the script: a variant that skips work must not
look fast. Prompts are compared if they are the scripts', and logprobs if the variant has them. A worker process imports
no optional package of another variant. Variants with an agent are in `agent_variants`.
"""

import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal, NamedTuple, Protocol, Self

import httpx
import orjson
from httpx_aiohttp import AiohttpTransport

from benchmarks.script import Script
from strands_rollout.errors import RolloutError
from strands_rollout.play.options import slime_sampling_params

JobKind = Literal["cpu", "turns", "lag", "rss", "traced", "growth", "profile", "start"]
Collector = Literal["own", "frozen", "unfrozen"]
"""Treatment of the garbage collector: "own" leaves it to the variant (only this package freezes its objects, by its
setting `freeze_gc`); "frozen" calls `gc.freeze` after the warm-up; "unfrozen" freezes nothing."""
WITH_IMAGES: Final = "ours-images"
WORKERS: Final = {"ours-1-worker": 1, "ours-2-workers": 2}
"""Variant -> its number of episode workers."""
FLOOR: Final = "floor"
FLOOR_WITH_ORJSON: Final = "floor-orjson"
IMAGE_TOKENS: Final = 256
"""Number of tokens of an image of the variant with images."""
_MAX_RESPONSE_TOKENS: Final = 100_000


class WrongEpisodeError(RolloutError):
    """A variant did not play the script."""


@dataclass(frozen=True, slots=True)
class Step:
    """A measurement of `episodes` episodes with `turns` tool turns each, `concurrency` of them at once.

    `round` is the number of the round, from 0.
    `runs_code` uses the real code tool instead of a tool that knows the results.
    """

    kind: JobKind
    variant: str
    turns: int
    concurrency: int
    episodes: int
    round: int = 0
    runs_code: bool = False

    @property
    def has_script_prompts(self) -> bool:
        """True if the prompts equal the scripts' prompts.

        They differ if they contain the real code tool's description, the episode's own question, or an image.
        """
        return not (self.runs_code or self.kind == "growth" or self.variant == WITH_IMAGES)

    @property
    def label(self) -> str:
        if self.kind == "start":
            return "start of the package"
        tool = ", code tool" if self.runs_code else ""
        return f"{self.kind}: {self.variant}, {self.turns} tool turns, {self.concurrency} at once{tool}"


@dataclass(frozen=True, slots=True)
class Job:
    """A step for a worker process, with the files of the scripts to play and of short scripts to warm up with.

    `port` is the engine's port on 127.0.0.1; `core` is the core to pin the process to, None for any.
    """

    step: Step
    scripts: str
    warm_up_scripts: str
    tokenizer: str
    port: int
    core: int | None = None
    collector: Collector = "own"

    def to_json(self) -> str:
        return orjson.dumps(asdict(self)).decode()

    @classmethod
    def from_json(cls, text: str) -> Self:
        values = orjson.loads(text)
        return cls(**{**values, "step": Step(**values["step"])})


@dataclass(frozen=True, slots=True)
class Played:
    """A finished episode, with the mask and logprobs of the response.

    `logprobs` is None if the variant has none; only logprobs of sampled tokens are compared. `result` is the object for
    the trainer, whose memory is measured.
    """

    tokens: list[int]
    loss_mask: list[int]
    logprobs: list[float] | None
    result: Any


class Player(Protocol):
    """Protocol of players of episodes; many calls of `play` may run at once, and `close` releases connections."""

    async def play(self, script: Script) -> Played: ...

    async def close(self) -> None: ...


def sampling_params() -> dict[str, Any]:
    """Return slime's sampling parameters, with a budget that no script reaches."""
    return slime_sampling_params(1.0, _MAX_RESPONSE_TOKENS)


class Floor:
    """The lower bound: sends the same requests without an agent, and appends the answers to the episode's lists.

    Writes the whole input as JSON in each turn, by httpx's own JSON or, as `FLOOR_WITH_ORJSON`, by orjson. Knows the
    tools' results, so it renders, parses and calls nothing.
    """

    def __init__(self, job: Job) -> None:
        self._has_orjson = job.step.variant == FLOOR_WITH_ORJSON
        limits = httpx.Limits(max_connections=1024, max_keepalive_connections=1024)
        self._http = httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{job.port}",
            transport=AiohttpTransport(limits=limits),
            timeout=httpx.Timeout(None),
            trust_env=False,
        )
        self._params = sampling_params()

    async def play(self, script: Script) -> Played:
        tokens = list(script.prompt_ids)
        loss_mask: list[int] = []
        logprobs: list[float] = []
        headers = {"content-type": "application/json", "x-smg-routing-key": uuid.uuid4().hex}
        for turn in script.turns:
            request = {
                "input_ids": tokens,
                "sampling_params": self._params,
                "return_logprob": True,
                "rid": uuid.uuid4().hex,
            }
            if self._has_orjson:
                response = await self._http.post("/generate", content=orjson.dumps(request), headers=headers)
            else:
                response = await self._http.post("/generate", json=request, headers=headers)
            if response.status_code != 200:
                raise WrongEpisodeError(f"got HTTP {response.status_code}: {response.text:.300}")
            answer = orjson.loads(response.content) if self._has_orjson else response.json()
            sampled = answer["output_ids"]
            tokens += sampled
            tokens += turn.context_ids
            loss_mask += [1] * len(sampled) + [0] * len(turn.context_ids)
            logprobs += [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
            logprobs += [0.0] * len(turn.context_ids)
        return Played(tokens, loss_mask, logprobs, (tokens, loss_mask, logprobs))

    async def close(self) -> None:
        await self._http.aclose()


VARIANTS: Final = (
    "ours",
    "ours-hook",
    "ours-plugin",
    "ours-factory",
    "ours-journal",
    WITH_IMAGES,
    *WORKERS,
    "one-model",
    "own-model",
    "gateway-chat",
    "gateway-responses",
    "gateway-messages",
    FLOOR,
    FLOOR_WITH_ORJSON,
    "strands-sglang",
    "openai",
)


class Need(NamedTuple):
    """A module that may be missing, and the extra of this package that installs it."""

    module: str
    extra: str


NEEDS: Final = {
    "openai": Need("openai", "bench"),
    WITH_IMAGES: Need("PIL", "images"),
    **dict.fromkeys(WORKERS, Need("ray", "ray")),
}
"""The optional module that a variant needs."""


def make_player(job: Job, scripts: Sequence[Script]) -> Player:
    """Return the player of the job's variant, importing no other variant's package.

    `scripts` are all scripts that may be played.
    """
    if job.step.variant in (FLOOR, FLOOR_WITH_ORJSON):
        return Floor(job)
    from benchmarks.agent_variants import AGENT_VARIANTS, register_results

    register_results(scripts)
    return AGENT_VARIANTS[job.step.variant](job)


def check_played(played: Played, script: Script, *, any_prompt: bool = False) -> None:
    """Compare an episode with its script, token by token; the prompt too unless `any_prompt`.

    Raises:
        WrongEpisodeError: Tokens, mask or logprobs differ.
    """
    mask = script.loss_mask()
    expected, got = script.tokens(), played.tokens
    if any_prompt:
        expected, got = expected[-len(mask) :], got[-len(mask) :]
    pairs: dict[str, tuple[Sequence[Any], Sequence[Any]]] = {
        "tokens": (got, expected),
        "loss_mask": (played.loss_mask, mask),
    }
    if played.logprobs is not None:
        sampled = [logprob for logprob, bit in zip(played.logprobs, mask, strict=False) if bit]
        pairs["logprobs"] = (sampled, script.logprobs())
    for name, (found, wanted) in pairs.items():
        if found != wanted:
            raise WrongEpisodeError(f"an episode of {script.tool_turns} tool turns: {_difference(name, found, wanted)}")


def _difference(name: str, got: Sequence[Any], expected: Sequence[Any]) -> str:
    at = next((n for n, pair in enumerate(zip(got, expected, strict=False)) if pair[0] != pair[1]), None)
    where = "" if at is None else f"; the first difference is at {at}: {got[at]!r}, expected {expected[at]!r}"
    return f"got {len(got)} {name}, expected {len(expected)}{where}"
