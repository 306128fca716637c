"""The user's settings: the mapping under `strands_rollout` in the YAML of slime's `--custom-config-path`.

One pydantic tree, read from the file as slime reads it, and written back as a documented file.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from textwrap import wrap
from types import SimpleNamespace
from typing import Annotated, Any, Final, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Discriminator, Field, FiniteFloat, Tag, ValidationError, model_validator

from strands_rollout.errors import ConfigError
from strands_rollout.files import Json, expanded_size, read_regular
from strands_rollout.secret_mask import MASK, masked_settings

SYSTEM_PROMPT: Final = (
    "You are a careful math solver. Reason briefly, use the execute_python_code tool for every computation, "
    "and give the final answer in \\boxed{}."
)


class McpServer(BaseModel):
    """One server; the keys are those of an `mcpServers` file, as Strands reads them, `name` and `per_episode` besides.

    `${VAR}` in a string is taken from the environment.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str | None = Field(default=None, description="Name by which a row may choose the server.")
    command: str | None = Field(
        default=None,
        description="Command that starts the server, split as a shell would; `python` is this process's own. It "
        "talks on stdio.",
    )
    args: tuple[str, ...] = Field(default=(), description="Further arguments of the command.")
    env: dict[str, str] | None = Field(default=None, description="Environment variables of the command.")
    cwd: str | None = Field(default=None, description="Folder of the command.")
    url: str | None = Field(default=None, description="URL of a running server.")
    headers: dict[str, str] | None = Field(default=None, description="Sent with each request to the URL.")
    transport: Literal["stdio", "streamable-http", "sse"] | None = Field(
        default=None, description='"stdio" of a command, "streamable-http" of a URL unless it is "sse".'
    )
    prefix: str | None = Field(default=None, description="Prefix for the names of its tools.")
    tool_filters: dict[Literal["allowed", "rejected"], tuple[str, ...]] | None = Field(
        default=None, description="Names of its tools, or patterns of names, that are allowed or rejected."
    )
    startup_timeout: int = Field(default=30, ge=1, description="Seconds that its start may take.")
    per_episode: bool = Field(
        default=False,
        description="Whether each episode has its own connection, and with a command its own process; otherwise "
        "all share one.",
    )

    @model_validator(mode="before")
    @classmethod
    def _of_url(cls, given: object) -> Json:
        return {"url": given} if isinstance(given, str) else given

    @model_validator(mode="after")
    def _is_one_server(self) -> Self:
        if (self.command is None) == (self.url is None):
            raise ValueError("an MCP server needs either a command or a url")
        return self

    @property
    def shown_name(self) -> str:
        """What it is called in messages, which hold no secrets."""
        return self.name or str(masked_settings(self.url or self.command))

    def as_strands_config(self) -> dict[str, Any]:
        """The entry of an `mcpServers` mapping for this server."""
        config = self.model_dump(mode="json", exclude_none=True, exclude={"name", "per_episode", "command", "args"})
        if self.command is not None:
            first, *rest = shlex.split(self.command)
            first = sys.executable if first == "python" else first
            config |= {"command": first, "args": [*rest, *self.args]}
        return config


def kind_of_tool(given: object) -> str:
    """Which of the two forms an entry of `tools` has: "path" or "server"."""
    is_path = isinstance(given, str) and "://" not in given
    return "path" if is_path else "server"


REWARD_KEY: Final = "score"

TOOL_SHAPING_CEILING: Final = 0.4


class RewardSettings(BaseModel):
    """How a graded answer becomes a number."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    style: Literal["default", "slime_strands_example"] = Field(
        default="default",
        description='"default" grades with `strands_rollout.grading`; "slime_strands_example" reproduces the score '
        "of slime's examples/strands_sglang exactly, including its faults.",
    )
    correct: FiniteFloat = Field(default=1.0, description="Score of a correct answer.")
    wrong: FiniteFloat = Field(default=-1.0, description="Score of any other answer; below `correct`.")
    tool_shaping: bool = Field(
        default=False,
        description="Whether a wrong answer earns (tool iterations - 2) * 0.05 on top, at most 0.4, as in slime's "
        "example. A group whose answers are all wrong then has a spread that GRPO trains on.",
    )
    symbolic_timeout_s: float = Field(
        default=5.0,
        gt=0,
        le=60,
        description="CPU seconds that the comparison of one answer may take; after them the answer is wrong.",
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


CODE_TOOL_PATH: Final = "strands_rollout.tools.execute_python_code"

NamedTool = Annotated[Annotated[str, Tag("path")] | Annotated[McpServer, Tag("server")], Discriminator(kind_of_tool)]
"""A tool by its dotted path, or the tools of an MCP server."""


class RolloutSettings(BaseModel):
    """All settings and their defaults; None means no limit, or leaves the choice to what is named."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    system_prompt: str | None = Field(
        default=SYSTEM_PROMPT, description="System prompt of rows without a system message of their own."
    )
    tools: tuple[NamedTool, ...] = Field(
        default=(CODE_TOOL_PATH,),
        description="Strands tools: dotted paths of tools, modules or tool providers; MCP servers by URL, or as a "
        "mapping with `command` or `url`.",
    )
    row_tools: tuple[NamedTool, ...] = Field(
        default=(), description="Further tools, which an episode has only if its row asks for them."
    )
    agent_factory: str | None = Field(
        default=None,
        description="Dotted path of a function of a model and a task that returns the agent of an episode: a "
        "Strands Agent, Swarm or Graph.",
    )
    resources: dict[str, str] = Field(
        default_factory=dict,
        description="Names and dotted paths of functions of a task that return an async context manager; each is "
        "open during an episode.",
    )
    environment: str | None = Field(
        default=None,
        description="Dotted path of a class, or a function of a task: what an episode acts on. It may prepare "
        "state, offer tools, answer as a user, and score the episode.",
    )
    environment_timeout_s: float | None = Field(
        default=300.0,
        gt=0,
        description="Wall-clock limit of each step of resources and environment: open, prepare, answer, score.",
    )
    hooks: tuple[str, ...] = Field(
        default=(),
        description="Dotted paths of Strands hook providers' classes, or of functions that make one; new ones for "
        "each episode, and when an aborted one is resumed.",
    )
    max_tool_iterations: int | None = Field(default=5, ge=0, description="Model turns whose tool calls are run.")
    max_tool_calls: int | None = Field(default=None, ge=0, description="Tool calls of an episode.")
    max_parallel_tool_calls: int | None = Field(
        default=None, ge=1, description="Tool calls of one turn that are run; further ones are answered with an error."
    )
    max_user_turns: int | None = Field(
        default=None, ge=0, description="Times that the environment may answer the policy as a user."
    )
    tool_timeout_s: float | None = Field(
        default=60.0, gt=0, description="Wall-clock limit of one tool call; for the code tool, of the code itself."
    )
    episode_timeout_s: float | None = Field(default=None, gt=0, description="Wall-clock limit of an episode.")
    max_turn_tokens: int | None = Field(default=None, ge=1, description="Tokens that one turn may sample.")
    min_turn_tokens: int = Field(
        default=16, ge=1, description="Tokens that a cut tool result leaves for the next turn."
    )
    executor: str | dict[str, Any] = Field(
        default="local", description="Where the code tool runs its code: a name, or a mapping of name and options."
    )
    code_session: bool = Field(
        default=False,
        description="Whether all code calls of an episode share one interpreter, which keeps variables and files.",
    )
    model_name: str | None = Field(
        default=None, description="Model of slime's `--sglang-config` that is the policy; default: the first one."
    )
    resume_aborted: bool = Field(
        default=True,
        description="Whether an aborted sample is resumed from its own tokens; false starts it from scratch.",
    )
    on_engine_abort: Literal["continue", "return"] = Field(
        default="continue",
        description="What to do when the engine aborts a turn and the rollout does not, as for a weight update: "
        '"continue" the turn from its own tokens, or "return" the sample ABORTED.',
    )
    engine_patience_s: float = Field(
        default=90.0,
        ge=0,
        allow_inf_nan=False,
        description="Seconds for which a request is retried while the engine is away, busy or failing; 0 sends it "
        "once.",
    )
    max_failed_groups: int | None = Field(
        default=16,
        ge=0,
        description="Groups of training samples that may fail in a row, by faults of the infrastructure or the "
        "setup, before the run is ended with the last error; null or 0 never ends it.",
    )
    max_staleness: int | None = Field(
        default=None,
        ge=0,
        description="Tokens sampled by weights that are more versions older than those of the sample's last token "
        "are not trained.",
    )
    max_sample_staleness: int | None = Field(
        default=None,
        ge=0,
        description="Samples whose last weights are more versions behind the newest known version are not trained: "
        "those that waited long in a fully asynchronous rollout. Needs slime's "
        "--custom-reward-post-process-path strands_rollout.normalize_rewards.",
    )
    abort_grace_s: float | None = Field(
        default=None,
        ge=0,
        description="Seconds that an abort waits at most for what an engine has sampled; default: 4 s where that "
        "is kept, as in slime's partial rollouts, otherwise 0.2 s.",
    )
    conversation_manager: str | None = Field(
        default=None,
        description="Dotted path of a Strands conversation manager that may drop or summarize messages, or of a "
        "function that makes one.",
    )
    fan_out: bool = Field(
        default=False,
        description="Return a list of samples: the main agent's, one for each sub-agent, and one for each history "
        "that was rewritten later.",
    )
    should_abort: str | Callable[[], bool] | None = Field(
        default=None,
        description="Without slime: a function without arguments, or its dotted path, that returns whether the "
        "rollout is being aborted.",
    )
    freeze_gc: bool = Field(
        default=True,
        description="Before the process's first episode, exclude all that it has loaded from Python's garbage "
        "collection (`gc.freeze`), and make full collections rarer.",
    )
    dump_dir: str | None = Field(
        default=None,
        description="Folder in which `log_rollout`, `log_eval` and `strands-rollout train` write samples of each "
        "step, for `strands-rollout view`.",
    )
    dump_samples: int = Field(default=64, ge=1, description="Samples of a step that are written to `dump_dir`.")
    tool_parser: str = Field(
        default="hermes",
        description='Format of the model\'s tool calls; "auto" for the one that its chat template writes.',
    )
    enable_thinking: bool | None = Field(default=None, description="Given to the chat template if set.")
    reward: RewardSettings = Field(default_factory=RewardSettings, description="How an answer is graded.")


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
        name = path[-1] if path else ""
        shown = MASK if {"env", "headers"} & {*path[:-1]} else masked_settings({name: error["input"]})[name]
        return f"got {where}={shown!r:.500}; expected: {error['msg']}"
    model = _NESTED.get(path[0], RolloutSettings) if len(path) > 1 else RolloutSettings
    known = sorted(model.model_fields)
    near = get_close_matches(str(error["loc"][-1]), known, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(known)}"
    return f"got the unknown setting {where}; {hint}"


"""Where `reward_func` puts the number that is trained on; slime's `--reward-key`."""
"""The most that shaping can add to `wrong`: slime's strands example caps a failure at -0.6, with `wrong` at -1.0."""


KEY: Final = "strands_rollout"
MASK_NOTE: Final = f"Secrets are masked as {MASK}: put them in again before you use this."
_MAX_BYTES: Final = 1_000_000
_MAX_VALUES: Final = 100_000
_WIDTH: Final = 116
_SECRET: Final = re.compile(r"authorization|token(?!s)|key|password|passphrase|secret|cookie|credential", re.IGNORECASE)


def read_config_file(path: Path) -> RolloutSettings:
    """The settings under `strands_rollout:` of a file; its other keys are slime's, which sets them on its args.

    Raises:
        ConfigError: The file can't be read, is no YAML mapping, lacks the key, or holds a setting that is unknown or
            out of range.
    """
    try:
        content = yaml.safe_load(yaml_text(path))
    except (yaml.YAMLError, ValueError, ArithmeticError) as e:
        raise ConfigError(f"{path} is no YAML: {e}") from e
    if not isinstance(content, Mapping):
        raise ConfigError(f"{path} holds {type(content).__name__}; expected a mapping with the key {KEY}:")
    if KEY not in content:
        near = get_close_matches(KEY, map(str, content), n=1)
        hint = f"did you mean {KEY!r} by {near[0]!r}?" if near else f"got {', '.join(map(str, content)) or 'none'}"
        raise ConfigError(f"{path} has no key {KEY}:; {hint}")
    try:
        return settings_from_args(SimpleNamespace(strands_rollout=content[KEY]))
    except ConfigError as e:
        raise ConfigError(f"{path}: {e}") from e


def yaml_text(path: Path) -> str:
    """The text of a YAML file that is of a config's size, also where each alias (`*name`) is written out.

    Raises:
        ConfigError: It can't be read, or is no YAML, or far larger than a config.
    """
    try:
        text = read_regular(path, _MAX_BYTES).decode("utf-8")
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        count = 0 if root is None else expanded_size(root, _nodes)
    except OSError as e:
        raise ConfigError(f"can't read {path}: {e.strerror}") from e
    except (yaml.YAMLError, ValueError, RecursionError) as e:
        raise ConfigError(f"{path} is no YAML: {e}") from e
    if count > _MAX_VALUES:
        raise ConfigError(f"{path} stands for {count} values, with its aliases written out; expected a config")
    return text


def _nodes(node: yaml.Node) -> tuple[int, list[yaml.Node]]:
    parts = [part for pair in node.value for part in pair] if isinstance(node, yaml.MappingNode) else node.value
    return (len(parts), parts) if isinstance(node, yaml.CollectionNode) else (0, [])


def documented(settings: RolloutSettings) -> str:
    """All settings as a config file: each with its meaning, and with its default where it has another value.

    Secrets in it are masked, which it then says at its top.
    """
    lines = list(_lines(settings, "  "))
    notes = [f"# {MASK_NOTE}"] if is_masked(settings) else []
    return "\n".join([*notes, f"{KEY}:", *lines]) + "\n"


def masked_values(settings: RolloutSettings) -> dict[str, Any]:
    """All settings as values of JSON, with secrets masked."""
    values = settings.model_dump(mode="json")
    return {name: masked_settings(value, _SECRET) for name, value in values.items()}


def is_masked(settings: RolloutSettings) -> bool:
    """Whether a setting holds a secret, which is shown masked."""
    return masked_values(settings) != settings.model_dump(mode="json")


def _lines(settings: BaseModel, indent: str) -> Iterator[str]:
    for name, field in type(settings).model_fields.items():
        value, default = getattr(settings, name), field.get_default(call_default_factory=True)
        if isinstance(value, tuple):
            value, default = _plain(value), _plain(default)
        meaning = wrap(str(field.description), _WIDTH - len(indent), break_on_hyphens=False)
        yield from (f"{indent}# {line}" for line in meaning)
        if isinstance(value, BaseModel):
            yield f"{indent}{name}:"
            yield from _lines(value, indent + "  ")
        else:
            note = "" if value == default else f"  # default: {_flow(default)}"
            yield f"{indent}{name}: {_flow(masked_settings(value, _SECRET))}{note}"


def _plain(values: tuple[Any, ...]) -> list[Any]:
    """MCP servers among tools as what is set of them."""
    return [value.model_dump(exclude_defaults=True) if isinstance(value, BaseModel) else value for value in values]


def _flow(value: object) -> str:
    """A value on one line; JSON is YAML."""
    return json.dumps(value, default=str)
