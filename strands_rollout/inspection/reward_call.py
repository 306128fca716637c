"""A reward as slime would call it: by its dotted path, sync or async, with a number or a dict for an answer.

A reward for slime's `--group-rm` takes the samples of a group, and returns as many rewards. Knows slime's signature
(`--custom-rm-path`: `async def reward(args, sample)`); nothing of what a reward means.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from strands_rollout.errors import ConfigError, ToolError
from strands_rollout.finished_sample import finite
from strands_rollout.reward import reward_func
from strands_rollout.user_code import was_cancelled

_AT_ONCE: Final = 64


@dataclass(frozen=True, slots=True)
class RewardCall:
    """A reward function and what it is called with.

    Attributes:
        function: Sync or async, of args and sample; sync ones are called in threads.
        args: slime's, as far as this package reads them.
        keys: Where a dict has its number: the first of these that it has.
        takes_groups: Whether it is given all samples of a group as a list, as by slime's `--group-rm`.
    """

    function: Callable[..., Any]
    args: SimpleNamespace
    keys: tuple[str, ...]
    takes_groups: bool = False

    @property
    def is_own(self) -> bool:
        """Whether it is this package's, which looks at a sample's label and words alone."""
        return self.function is reward_func

    async def rewards(self, samples: Sequence[Any]) -> list[Any]:
        """The reward of each sample, in order; the exception where it raised one, never a raised one.

        This package's is given all of them at once: siblings of a fan-out have their main agent's reward.
        """
        if self.is_own:
            return list(await self.function(self.args, list(samples)))
        gate = asyncio.Semaphore(_AT_ONCE)

        async def ask(given: Any) -> Any:  # noqa: ANN401
            async with gate:
                return await self._reward(given)

        asked = _groups(samples) if self.takes_groups else samples
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(ask(given)) for given in asked]
        answers = [task.result() for task in tasks]
        if not self.takes_groups:
            return answers
        return [one for given, answer in zip(asked, answers, strict=True) for one in _each(answer, len(given))]

    def number(self, reward: Any) -> float | None:  # noqa: ANN401
        """The finite number of a reward; None where it has none."""
        if isinstance(reward, Mapping):
            reward = next((reward[key] for key in self.keys if key in reward), None)
        return float(reward) if isinstance(reward, bool) else finite(reward)

    def expected(self) -> str:
        """What a reward must be, in words."""
        return f"a number, or a dict with one under {' or '.join(map(repr, self.keys))} (--reward-key)"

    async def _reward(self, sample: Any) -> Any:  # noqa: ANN401
        try:
            if inspect.iscoroutinefunction(self.function):
                return await self.function(self.args, sample)
            found = await asyncio.to_thread(self.function, self.args, sample)
            return await found if inspect.isawaitable(found) else found
        except Exception as e:  # a user's reward may raise anything: the other samples still count
            return e
        except SystemExit as e:
            return RuntimeError(f"it called sys.exit({e.code!r})")
        except asyncio.CancelledError:
            if was_cancelled():
                raise
            return RuntimeError("it was cancelled by its own code")


def _groups(samples: Sequence[Any]) -> list[list[Any]]:
    """Neighbours of one group together; a sample without one is alone."""
    found: list[list[Any]] = []
    for sample in samples:
        if found and sample.group_index is not None and found[-1][0].group_index == sample.group_index:
            found[-1].append(sample)
        else:
            found.append([sample])
    return found


def _each(answer: Any, count: int) -> list[Any]:  # noqa: ANN401
    """The rewards of a group, one for each of its samples."""
    if isinstance(answer, Exception):
        return [answer] * count
    if not isinstance(answer, list | tuple) or len(answer) != count:
        got = f"{len(answer)}" if isinstance(answer, list | tuple) else f"{answer!r:.200}"
        return [TypeError(f"got {got} for a group; expected a list of {count} rewards")] * count
    return list(answer)


def own_reward() -> RewardCall:
    """This package's, with its defaults; its number says whether an answer is right."""
    return RewardCall(reward_func, SimpleNamespace(), ("acc",))


def load_reward(
    path: str | None, config: Path | None, keys: Sequence[str], *, takes_groups: bool = False
) -> RewardCall:
    """The reward at a dotted path, this package's own for None, with the settings of a configuration.

    Raises:
        ConfigError: There is no such function, or the configuration can't be used.
    """
    # these bring Strands along, which this package's own reward does without
    from strands_rollout.config_file import read_config_file
    from strands_rollout.tool_loading import load_function

    settings = None if config is None else read_config_file(config).model_dump(mode="json")
    args = SimpleNamespace(strands_rollout=settings, reward_key=keys[0], eval_reward_key=keys[0])
    try:
        function = reward_func if path is None else load_function(path)
    except ToolError as e:
        raise ConfigError(str(e)) from e
    return RewardCall(function, args, tuple(keys), takes_groups)
