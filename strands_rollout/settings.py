"""The settings of a rollout: the mapping that slime's `--custom-config-path` YAML sets under the key `strands_rollout`.

Read from slime's args and checked here; knows nothing of what the settings do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError

from strands_rollout.errors import ConfigError
from strands_rollout.mcp_settings import McpServer, kind_of_tool
from strands_rollout.prompts import SYSTEM_PROMPT
from strands_rollout.reward_settings import RewardSettings

CODE_TOOL_PATH: Final = "strands_rollout.tools.execute_python_code"

NamedTool = Annotated[Annotated[str, Tag("path")] | Annotated[McpServer, Tag("server")], Discriminator(kind_of_tool)]
"""A tool by its dotted path, or the tools of an MCP server."""


class RolloutSettings(BaseModel):
    """All settings and their defaults; None means no limit, or leaves the choice to what is named."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    system_prompt: str | None = Field(
        default=SYSTEM_PROMPT, description="For rows without a system message of their own."
    )
    tools: tuple[NamedTool, ...] = Field(
        default=(CODE_TOOL_PATH,),
        description="Strands tools: dotted paths of tools, modules or tool providers; MCP servers by URL, or as a "
        "mapping with `command` or `url`.",
    )
    row_tools: tuple[NamedTool, ...] = Field(
        default=(), description="Further tools, which no episode has unless its row asks for them."
    )
    agent_factory: str | None = Field(
        default=None,
        description="Dotted path of a function of a model and a task that builds the agent of an episode: a Strands "
        "Agent, Swarm or Graph.",
    )
    resources: dict[str, str] = Field(
        default_factory=dict,
        description="What each episode has open while it runs: names, and dotted paths of functions of a task that "
        "give an async context manager.",
    )
    environment: str | None = Field(
        default=None,
        description="Dotted path of a class, or a function of a task: what an episode acts on, which may prepare it, "
        "have tools, answer as a user, and score it.",
    )
    environment_timeout_s: float | None = Field(
        default=300.0,
        gt=0,
        description="Wall-clock of each step of resources and environment: to open, prepare, answer or score.",
    )
    hooks: tuple[str, ...] = Field(
        default=(),
        description="Dotted paths of Strands hook providers' classes, or of functions that make one; made anew for "
        "each episode, and when an aborted one is gone on with.",
    )
    max_tool_iterations: int | None = Field(default=5, ge=0, description="Model turns whose tool calls are run.")
    max_tool_calls: int | None = Field(default=None, ge=0, description="Tool calls of an episode.")
    max_parallel_tool_calls: int | None = Field(default=None, ge=1, description="Tool calls of one turn that are run.")
    max_user_turns: int | None = Field(
        default=None, ge=0, description="Messages that the environment may answer the policy with, as a user."
    )
    tool_timeout_s: float | None = Field(
        default=60.0, gt=0, description="Wall-clock of one tool call; of the code itself for the code tool."
    )
    episode_timeout_s: float | None = Field(default=None, gt=0, description="Wall-clock of an episode.")
    max_turn_tokens: int | None = Field(default=None, ge=1, description="Tokens that one turn may sample.")
    min_turn_tokens: int = Field(default=16, ge=1, description="Room that a cut tool result leaves for the next turn.")
    executor: str | dict[str, Any] = Field(
        default="local", description="Where the code tool runs its code: a name, or a mapping of name and options."
    )
    code_session: bool = Field(
        default=False, description="One interpreter for all code calls of an episode: variables and files are kept."
    )
    model_name: str | None = Field(
        default=None, description="The model of slime's `--sglang-config` that plays the policy; its first one if none."
    )
    resume_aborted: bool = Field(
        default=True, description="Go on with an aborted sample where it was cut; false starts it afresh."
    )
    on_engine_abort: Literal["continue", "return"] = Field(
        default="continue",
        description="What to do when the engine aborts a turn and the rollout does not, as for a weight update: "
        '"continue" it from its own tokens, or "return" the sample ABORTED.',
    )
    max_staleness: int | None = Field(
        default=None,
        ge=0,
        description="Tokens that weights sampled which are more versions older than the sample's last are not trained.",
    )
    abort_grace_s: float | None = Field(
        default=None,
        ge=0,
        description="How long an abort waits at most for what an engine has sampled; default: 4 s where it is kept, "
        "as in slime's partial rollouts, else 0.2 s.",
    )
    conversation_manager: str | None = Field(
        default=None,
        description="Dotted path of a Strands conversation manager that may drop or sum up messages, or of a function "
        "that makes one.",
    )
    fan_out: bool = Field(
        default=False,
        description="Return a list: the main agent's sample, one for each sub-agent, and one for each history that was "
        "rewritten later.",
    )
    should_abort: str | Callable[[], bool] | None = Field(
        default=None,
        description="Without slime: a function of no arguments, or its dotted path, that tells whether the rollout is "
        "being aborted.",
    )
    freeze_gc: bool = Field(
        default=True,
        description="Before the process's first episode, take all that it has loaded out of Python's garbage "
        "collection (`gc.freeze`), so that full collections look through episodes alone, and make these rarer.",
    )
    dump_dir: str | None = Field(
        default=None,
        description="Folder in which `log_rollout`, `log_eval` and `strands-rollout train` write samples of each step, "
        "for `strands-rollout view`.",
    )
    dump_samples: int = Field(default=64, ge=1, description="Samples of a step that are written there.")
    tool_parser: str = Field(
        default="hermes", description='Format of the model\'s tool calls; "auto" for the one that its template writes.'
    )
    enable_thinking: bool | None = Field(default=None, description="Handed to the chat template when set.")
    reward: RewardSettings = Field(default_factory=RewardSettings, description="How an answer is scored.")


_NESTED: Final[Mapping[str, type[BaseModel]]] = {
    "reward": RewardSettings,
    "tools": McpServer,
    "row_tools": McpServer,
}


def settings_from_args(args: object) -> RolloutSettings:
    """The settings that slime's args carry as `args.strands_rollout`; defaults where there are none.

    Raises:
        ConfigError: A key is unknown (the message names the nearest known one) or a value is out of range.
    """
    given = getattr(args, "strands_rollout", None)
    if given is None:
        return RolloutSettings()
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"got strands_rollout={given!r:.200} of type {type(given).__name__}; expected a mapping of settings under "
            "the key strands_rollout: of the --custom-config-path YAML"
        )
    return checked_settings(given, "strands_rollout")


def checked_settings(given: Mapping[Any, Any], where: str) -> RolloutSettings:
    """The settings that a mapping holds, and defaults for the others.

    Args:
        given: By their names.
        where: Stands before their names in messages.

    Raises:
        ConfigError: A key is unknown (the message names the nearest known one) or a value is out of range.
    """
    try:
        return RolloutSettings.model_validate(dict(given))
    except ValidationError as e:
        raise ConfigError("; ".join(_explain(error, where) for error in e.errors())) from e


def _explain(error: Any, root: str) -> str:  # noqa: ANN401 - pydantic's ErrorDetails
    path = [str(part) for part in error["loc"] if part not in ("path", "server")]
    where = ".".join([root, *path])
    if error["type"] != "extra_forbidden":
        return f"got {where}={error['input']!r:.500}; expected: {error['msg']}"
    model = _NESTED.get(path[0], RolloutSettings) if len(path) > 1 else RolloutSettings
    known = sorted(model.model_fields)
    near = get_close_matches(str(error["loc"][-1]), known, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(known)}"
    return f"got the unknown setting {where}; {hint}"
