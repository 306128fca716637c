"""The user's settings: the mapping under `strands_rollout` in the YAML of slime's `--custom-config-path`.

One pydantic tree, read from the file as slime reads it, and written back as a documented file.
"""

import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, ClassVar, Final, Literal, Self

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    FiniteFloat,
    PlainSerializer,
    Tag,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails

from strands_rollout.errors import ConfigError
from strands_rollout.files.json_codec import Json
from strands_rollout.files.yaml_files import yaml_text
from strands_rollout.secret_mask import MASK, masked_settings
from strands_rollout.validation import explained_fault

SYSTEM_PROMPT: Final = (
    "You are a careful math solver. Reason briefly, use the execute_python_code tool for every computation, "
    "and give the final answer in \\boxed{}."
)
MISSING_CODE_TOOL: Final = (
    "system_prompt is the default, which speaks of execute_python_code, a tool that is not among yours; set it (null "
    "for none)"
)


class _Settings(BaseModel):
    """Settings whose attribute docstrings users read, in a documented file and in docs/."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)
    _short: ClassVar[str] = ""  # the key that a text in place of the mapping is for

    @classmethod
    def __pydantic_init_subclass__(cls, **_kwargs: object) -> None:
        for field in cls.model_fields.values():
            field.description = " ".join((field.description or "").split())

    @model_validator(mode="before")
    @classmethod
    def _of_text(cls, given: object) -> Json:
        return {cls._short: given} if cls._short and isinstance(given, str) else given


class McpServer(_Settings):
    """One server; the keys are those of an `mcpServers` file, as Strands reads them, `name` and `per_episode` besides.

    `${VAR}` in a string is taken from the environment.
    """

    _short = "url"
    name: str | None = None
    """Name by which a row may choose the server."""
    command: str | None = None
    """Command that starts the server, split as a shell would; `python` is this process's own. It talks on stdio."""
    args: tuple[str, ...] = ()
    """Further arguments of the command."""
    env: dict[str, str] | None = None
    """Environment variables of the command."""
    cwd: str | None = None
    """Folder of the command; relative to the configuration's folder."""
    url: str | None = None
    """URL of a running server."""
    headers: dict[str, str] | None = None
    """Sent with each request to the URL."""
    transport: Literal["stdio", "streamable-http", "sse"] | None = Field(
        default=None, description='"stdio" of a command, "streamable-http" of a URL unless it is "sse".'
    )
    prefix: str | None = None
    """Prefix for the names of its tools."""
    tool_filters: dict[Literal["allowed", "rejected"], tuple[str, ...]] | None = None
    """Names of its tools, or patterns of names, that are allowed or rejected."""
    startup_timeout: int = Field(default=30, ge=1)
    """Seconds that its start may take."""
    per_episode: bool = False
    """Whether each episode has its own connection, and with a command its own process; otherwise all share one."""

    @model_validator(mode="after")
    def _is_one_server(self) -> Self:
        if (self.command is None) == (self.url is None):
            raise ValueError("an MCP server needs either a command or a url")
        return self

    @property
    def shown_name(self) -> str:
        """Its name in messages, without secrets."""
        return self.name or str(masked_settings(self.url or self.command))

    def as_strands_config(self) -> dict[str, Any]:
        """The entry of an `mcpServers` mapping for this server."""
        config = self.model_dump(mode="json", exclude_none=True, exclude={"name", "per_episode", "command", "args"})
        if self.command is not None:
            first, *rest = shlex.split(self.command)
            first = sys.executable if first == "python" else first
            config |= {"command": first, "args": [*rest, *self.args]}
        return config


class AgentCommand(_Settings):
    """A process that plays an episode.

    In all texts, `{prompt}` stands for the user's last message, `{task}` for the path of a JSON file with all messages,
    and `{base_url}` (with `/v1`), `{url}` (without), `{api_key}` and `{model}` for the policy's endpoint.
    """

    _short = "command"
    command: str
    """Command that is run, split as a shell would, without one; `python` is this process's own."""
    args: tuple[str, ...] = ()
    """Further arguments."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables beside PATH, locale and those of the endpoint; `${VAR}` is taken from the environment."""
    cwd: str | None = None
    """Its folder, relative to the configuration's; default: an empty one, which is also its home, and removed."""
    stdin: str = ""
    """What it reads on standard input."""
    exit_codes: tuple[int, ...] = (0,)
    """Exit codes with which an episode has ended well; with any other it has failed, and is not trained."""

    @model_validator(mode="after")
    def _is_told_the_prompt(self) -> Self:
        if not any("{prompt}" in one or "{task}" in one for one in (self.command, *self.args, self.stdin)):
            raise ValueError("agent_command needs {prompt}, or {task}, in its command, args or stdin")
        return self


REWARD_KEY: Final = "score"
"""Where `reward_func` puts the number that is trained on; slime's `--reward-key`."""
TOOL_SHAPING_CEILING: Final = 0.4
"""The most that shaping can add to `wrong`: slime's strands example caps a failure at -0.6, with `wrong` at -1.0."""


class Judge(_Settings):
    """A model that is asked for a number; a dotted path alone is that of a Strands model."""

    _short = "strands_model"
    base_url: str | None = None
    """URL of an OpenAI-compatible API, such as `http://127.0.0.1:8000/v1`."""
    model: str | None = None
    """The model's name there."""
    api_key: str | None = None
    """Its key; `${OPENAI_API_KEY}` is taken from the environment, in `base_url` too."""
    params: dict[str, Any] = Field(default_factory=lambda: {"temperature": 0})
    """Further fields of the request."""
    strands_model: str | None = None
    """In place of an API: dotted path of a Strands model, or of a function that makes one."""
    prompt: str = (
        "Rate how well the answer solves the task, from 0 to 1. End with a line `Score: N`.\n\n"
        "Task:\n{question}\n\nAnswer:\n{response}\n\nReference:\n{label}"
    )
    """What is asked. The last `Score: N` of the reply counts, else the number that it is."""
    timeout_s: float = Field(default=60.0, gt=0)
    """Seconds that a reply may take."""
    retries: int = Field(default=3, ge=0)
    """How often the API is asked again after 429, 5xx or no answer."""
    max_concurrency: int = Field(default=64, ge=1)
    """Requests at once, of one process; the rest wait."""

    @model_validator(mode="after")
    def _is_one_model(self) -> Self:
        if (self.base_url is None) == (self.strands_model is None) or (self.base_url is None) != (self.model is None):
            raise ValueError("a judge needs either base_url and model, or strands_model")
        return self


class RewardPart(_Settings):
    """One of several rewards: a function, a judge, an evaluator, or, with none, the reward of this package itself."""

    _short = "function"
    function: str | None = None
    """Dotted path, as that of the whole reward."""
    judge: Judge | None = None
    """A model that is asked for a number, or that the evaluator asks."""
    evaluator: str | None = None
    """Dotted path of an evaluator of strands-agents-evals: a class, an instance, or a function that makes one."""
    weight: FiniteFloat = 1.0
    """What its number is multiplied by in the sum."""

    @model_validator(mode="after")
    def _is_one_reward(self) -> Self:
        if self.function is not None and (self.judge is not None or self.evaluator is not None):
            raise ValueError("a part of the reward has a function, or a judge or evaluator, not both")
        return self


class RewardSettings(_Settings):
    """How an answer becomes a number."""

    _short = "function"
    function: str | None = None
    """Dotted path of your own reward, `score(response, label)` or `score(sample)`, sync or async; `reward: PATH` alone
    means this key. It returns a number, or a mapping with `score`."""
    evaluator: str | None = None
    """Dotted path of an evaluator of strands-agents-evals in its place."""
    judge: Judge | None = None
    """The model that the evaluator asks."""
    parts: dict[str, RewardPart] = Field(default_factory=dict)
    """Several rewards by name, each with `function`, `judge` or `evaluator`, and `weight`; the reward is their weighted
    sum."""
    timeout_s: float = Field(default=300.0, gt=0)
    """Wall-clock limit of your own reward, or of each part; without waits for a judge's places."""
    style: Literal["default", "slime_strands_example"] = Field(
        default="default",
        description='"default" grades with `strands_rollout.grading`; "slime_strands_example" reproduces the score '
        "of slime's examples/strands_sglang exactly, including its faults.",
    )
    correct: FiniteFloat = 1.0
    """Score of a correct answer; from here on, a score of your own reward counts as right."""
    wrong: FiniteFloat = -1.0
    """Score of any other answer, and of one whose reward fails; below `correct`."""
    tool_shaping: bool = False
    """Whether a wrong answer earns (tool iterations - 2) * 0.05 on top, at most 0.4, as in slime's example. A group
    whose answers are all wrong then has a spread that GRPO trains on."""
    symbolic_timeout_s: float = Field(default=5.0, gt=0, le=60)
    """CPU seconds that the comparison of one answer may take; after them the answer is wrong."""

    @property
    def is_own(self) -> bool:
        """Whether the user's own function, evaluator or parts score."""
        return bool(self.all_parts)

    @property
    def all_parts(self) -> dict[str, RewardPart]:
        """The parts; a function or evaluator alone is the only one."""
        if self.function is None and self.evaluator is None:
            return self.parts
        return {"": RewardPart(function=self.function, evaluator=self.evaluator, judge=self.judge)}

    @property
    def has_evaluator(self) -> bool:
        """Whether an evaluator scores, which reads more of an episode than its answer."""
        return any(part.evaluator is not None for part in self.all_parts.values())

    @model_validator(mode="after")
    def _scores_must_rank(self) -> Self:
        given = [name for name in ("function", "evaluator", "parts") if getattr(self, name)]
        if len(given) > 1:
            raise ValueError(f"got {' and '.join(given)}; make the {given[0]} one of the parts")
        if self.judge is not None and self.evaluator is None:
            raise ValueError("got judge alone; make it one of the parts")
        highest_wrong = self.wrong + (TOOL_SHAPING_CEILING if self.tool_shaping else 0.0)
        if not highest_wrong < self.correct:
            raise ValueError(f"a wrong answer could score {highest_wrong}, expected less than correct={self.correct}")
        own = (self.correct, self.wrong, self.tool_shaping) != (1.0, -1.0, False)
        if self.style == "slime_strands_example" and own:
            raise ValueError("style 'slime_strands_example' fixes the scores: remove correct, wrong and tool_shaping")
        if self.function is not None and (self.style != "default" or self.tool_shaping):
            raise ValueError("function replaces the grading: remove style and tool_shaping")
        return self


class EpisodeWorkers(_Settings):
    """Processes on Ray that play episodes."""

    count: int | None = Field(default=0, ge=0)
    """How many; null for `per_node` on each node."""
    per_node: int | None = Field(default=None, ge=1)
    """The most on one node; default: as Ray spreads them."""
    cpus: float = Field(default=1.0, ge=0)
    """CPUs that one takes from what engines and trainer leave of Ray's."""
    max_episodes: int | None = Field(default=None, ge=1)
    """Episodes that one plays at once; further ones wait for a place."""
    resources: dict[str, float] = Field(default_factory=dict)
    """Custom resources of Ray that one takes, by name."""
    env: dict[str, str] = Field(default_factory=dict)
    """Further environment variables of the workers."""

    @model_validator(mode="before")
    @classmethod
    def _of_count(cls, given: object) -> Json:
        if isinstance(given, Mapping):
            return {"count": None, **given} if given else given  # a mapping asks for some
        return {"count": given} if isinstance(given, int) and not isinstance(given, bool) else given

    @property
    def are_wanted(self) -> bool:
        """Whether there are to be any."""
        return self.count != 0

    @model_validator(mode="after")
    def _has_a_number(self) -> Self:
        if self.count is None and self.per_node is None:
            raise ValueError("episode_workers without a count needs per_node")
        return self


def _asked_workers() -> int:
    if (asked := os.environ.get("STRANDS_ROLLOUT_EPISODE_WORKERS") or "0").isdecimal():
        return int(asked)
    raise ConfigError(f"got STRANDS_ROLLOUT_EPISODE_WORKERS={asked!r} in the environment; expected a whole number")


CODE_TOOL_PATH: Final = "strands_rollout.tools.execute_python_code"

NamedTool = Annotated[
    Annotated[str, Tag("path")] | Annotated[McpServer, Tag("server")],
    Discriminator(lambda given: "path" if isinstance(given, str) and "://" not in given else "server"),
]
"""A tool by its dotted path, or the tools of an MCP server."""


class RolloutSettings(_Settings):
    """All settings and their defaults; None means no limit, or leaves the choice to what is named."""

    system_prompt: str | None = SYSTEM_PROMPT
    """System prompt of rows without a system message of their own."""
    tools: tuple[NamedTool, ...] = (CODE_TOOL_PATH,)
    """Strands tools: paths of tools, modules, files (`./tools.py`, `./tools.py:name`) or tool providers; MCP servers by
    URL, or as a mapping with `command` or `url`."""
    row_tools: tuple[NamedTool, ...] = ()
    """Further tools, which an episode has only if its row asks for them."""
    agent_factory: str | None = None
    """Path of a function of a model and a task that returns the agent of an episode: a Strands Agent, Swarm or
    Graph."""
    agent_program: str | None = None
    """In its place: path of a function of a task and an endpoint that plays the episode with any client of OpenAI's or
    Anthropic's API, and returns the answer as text, a score, or nothing."""
    agent_command: AgentCommand | None = None
    """In its place: a process that does."""
    resumable: Literal["replay"] | None = None
    """Whether `agent_program` or `agent_command` may be started again when an aborted sample is resumed, or its process
    has died: its first requests are then answered as they were, until it is where it was. Otherwise the sample starts
    afresh, or has failed."""
    resources: dict[str, str] = Field(default_factory=dict)
    """Names and dotted paths of functions of a task that return an async context manager; each is open during an
    episode."""
    environment: str | None = None
    """Dotted path of a class, or a function of a task: what an episode acts on. It may prepare state, offer tools,
    answer as a user, and score the episode."""
    environment_timeout_s: float | None = Field(default=300.0, gt=0)
    """Wall-clock limit of each step of resources and environment: open, prepare, answer, score."""
    hooks: tuple[str, ...] = ()
    """Dotted paths of Strands hook providers' classes, or of functions that make one; new ones for each episode, and
    when an aborted one is resumed."""
    max_tool_iterations: int | None = Field(default=5, ge=0)
    """Model turns whose tool calls are run."""
    max_tool_calls: int | None = Field(default=None, ge=0)
    """Tool calls of an episode."""
    max_parallel_tool_calls: int | None = Field(default=None, ge=1)
    """Tool calls of one turn that are run; further ones are answered with an error."""
    max_user_turns: int | None = Field(default=None, ge=0)
    """Times that the environment may answer the policy as a user."""
    tool_timeout_s: float | None = Field(default=60.0, gt=0)
    """Wall-clock limit of one tool call; for the code tool, of the code itself."""
    episode_timeout_s: float | None = Field(default=None, gt=0)
    """Wall-clock limit of an episode."""
    max_turn_tokens: int | None = Field(default=None, ge=1)
    """Tokens that one turn may sample."""
    min_turn_tokens: int = Field(default=16, ge=1)
    """Tokens that a cut tool result leaves for the next turn."""
    executor: str | dict[str, Any] = "local"
    """Where the code tool runs its code: a name, or a mapping of name and options."""
    code_session: bool = False
    """Whether all code calls of an episode share one interpreter, which keeps variables and files."""
    model_name: str | None = None
    """Model of slime's `--sglang-config` that is the policy; default: the first one."""
    resume_aborted: bool = True
    """Whether an aborted sample is resumed from its own tokens; false starts it from scratch."""
    journal_dir: str | None = None
    """Folder in which unfinished episodes are kept, turn by turn, so that a run that was killed continues them when it
    is restarted and slime asks for the same samples again. One folder for one run."""
    repeat_interrupted_tools: bool = False
    """Whether a tool that was running when its process died is called again; otherwise the episode fails and is not
    trained, since the tool may have acted. The code tool is called again in any case, but in a session."""
    episode_workers: EpisodeWorkers = Field(default_factory=lambda: EpisodeWorkers(count=_asked_workers()))
    """Processes on the job's Ray cluster that play the episodes: a number, or a mapping. 0 plays them in the process
    that calls `generate`. Default: what STRANDS_ROLLOUT_EPISODE_WORKERS in the environment says, else 0."""
    on_engine_abort: Literal["continue", "return"] = "continue"
    """What to do when the engine aborts a turn and the rollout does not, as for a weight update: "continue" the turn
    from its own tokens, or "return" the sample ABORTED."""
    engine_patience_s: float = Field(default=90.0, ge=0, allow_inf_nan=False)
    """Seconds for which a request is retried while the engine is away, busy or failing; 0 sends it once."""
    max_failed_groups: int | None = Field(default=16, ge=0)
    """Groups of training samples that may fail in a row, by faults of the infrastructure, the setup or the reward,
    before the run is ended with the last error; null or 0 never ends it."""
    max_staleness: int | None = Field(default=None, ge=0)
    """Tokens sampled by weights that are more versions older than those of the sample's last token are not trained."""
    max_sample_staleness: int | None = Field(default=None, ge=0)
    """Samples whose last weights are more versions behind the newest known version are not trained: those that waited
    long in a fully asynchronous rollout. Needs slime's --custom-reward-post-process-path
    strands_rollout.normalize_rewards."""
    abort_grace_s: float | None = Field(default=None, ge=0)
    """Seconds that an abort waits at most for what an engine has sampled; default: 4 s where that is kept, as in
    slime's partial rollouts, otherwise 0.2 s."""
    conversation_manager: str | None = None
    """Dotted path of a Strands conversation manager that may drop or summarize messages, or of a function that makes
    one."""
    fan_out: bool = False
    """Return a list of samples: the main agent's, one for each sub-agent, and one for each history that was rewritten
    later."""
    transient_context: Literal["segment", "keep"] = "segment"
    """What to do with a text that a plugin shows in one request only, such as a reminder: "segment" begins a new
    segment after it, as for a history that was rewritten; "keep" leaves it in the context, and the sample is one."""
    should_abort: Annotated[str | Callable[[], bool] | None, PlainSerializer(str, when_used="json-unless-none")] = None
    """Without slime: a function without arguments, or its dotted path, that returns whether the rollout is being
    aborted."""
    freeze_gc: bool = True
    """Before the process's first episode, exclude all that it has loaded from Python's garbage collection
    (`gc.freeze`), and make full collections rarer."""
    dump_dir: str | None = None
    """Folder in which `log_rollout`, `log_eval` and `strands-rollout train` (default: `samples` in its run's folder)
    write samples of each step, for `strands-rollout view`."""
    dump_samples: int = Field(default=64, ge=1)
    """Samples of a step that are written to `dump_dir`."""
    mismatch_check: Literal["first_step", "every_step"] = "first_step"
    """When the context of samples is compared with what the chat template renders, for the metrics `mismatch_*`: on the
    "first_step" or on "every_step"."""
    tool_parser: str = "hermes"
    """Format of the model's tool calls; "auto" for the one that its chat template writes."""
    enable_thinking: bool | None = None
    """Given to the chat template if set."""
    reward: RewardSettings = Field(default_factory=RewardSettings)
    """How an answer is rewarded: settings of the grading, or your own reward."""

    @property
    def has_code_tool(self) -> bool:
        """Whether a tool has the code tool's name."""
        name = CODE_TOOL_PATH.rpartition(".")[2]
        return any(isinstance(tool, str) and re.split("[.:]", tool)[-1] == name for tool in self.tools)

    @property
    def has_program(self) -> bool:
        """Whether a program plays the episodes, against the endpoint."""
        return self.agent_program is not None or self.agent_command is not None

    @property
    def misses_code_tool(self) -> bool:
        """Whether the default system prompt speaks of the code tool, and the agent seems not to have it."""
        has_own = self.agent_factory or self.has_program or "system_prompt" in self.model_fields_set
        return not (self.has_code_tool or has_own)

    @model_validator(mode="after")
    def _one_plays(self) -> Self:
        given = [name for name in ("agent_factory", "agent_program", "agent_command") if getattr(self, name)]
        if len(given) > 1:
            raise ValueError(f"got {' and '.join(given)}; one of them plays an episode")
        if self.resumable and not self.has_program:
            raise ValueError(
                "resumable is for agent_program and agent_command; other agents resume with resume_aborted"
            )
        of_agents = ("hooks", "conversation_manager", "max_parallel_tool_calls", "row_tools")
        unheeded = [name for name in of_agents if getattr(self, name)]
        if self.has_program and unheeded:
            raise ValueError(f"{given[0]} plays by itself: leave out {' and '.join(unheeded)}")
        return self

    @property
    def needs_labels(self) -> bool:
        """Whether nothing but the grading, which needs a label, can score."""
        parts = self.reward.all_parts.values()
        is_graded = any(part.function is None and part.judge is None and part.evaluator is None for part in parts)
        return self.environment is None and (is_graded or not self.reward.is_own)


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
    """As `settings_from_args`, of a mapping; `where` stands before the names in messages."""
    try:
        return RolloutSettings.model_validate(dict(given))
    except ValidationError as e:
        raise ConfigError("; ".join(_explained(fault, RolloutSettings, where) for fault in e.errors())) from e


def reward_settings(given: object) -> RewardSettings:
    """The reward's settings of what slime's args have, None for the defaults; ConfigError where they can't be used."""
    try:
        return RewardSettings.model_validate({} if given is None else given)
    except ValidationError as e:
        raise ConfigError("; ".join(_explained(fault, RewardSettings, f"{KEY}.reward") for fault in e.errors())) from e


def _explained(fault: ErrorDetails, model: type[BaseModel], root: str) -> str:
    """`explained_fault` of a setting, its secrets masked."""
    path = [str(part) for part in fault["loc"] if part not in ("path", "server")]  # what tells kinds of tools apart
    if path and path[-1].endswith(".py"):  # YAML reads a colon and a space as a mapping
        return f"got the mapping {path[-1]}: in {root}.{path[0]}; leave out the space: {path[-1]}:NAME"
    name = path[-1] if path else ""
    shown = MASK if {"env", "headers"} & {*path[:-1]} else masked_settings({name: fault["input"]})[name]
    masked: ErrorDetails = {**fault, "loc": tuple(path), "input": shown}
    return explained_fault(masked, model, root=root, noun="setting")


KEY: Final = "strands_rollout"


def read_config_file(path: Path | None, changes: Sequence[str] | None = None) -> RolloutSettings:
    """The settings under `strands_rollout:` of a file; its other keys are slime's, which sets them on its args.

    Each change is `setting=value` in place of the file's, or of the default; a dot leads into a mapping.

    Raises:
        ConfigError: The file can't be read, is no YAML mapping, lacks the key, or holds a setting that is unknown or
            out of range; or a change does.
    """
    given = {} if path is None else _under_key(path)
    try:
        settings = settings_from_args(SimpleNamespace(strands_rollout=given))
    except ConfigError as e:
        raise ConfigError(f"{path}: {e}") from e
    for change in changes or ():
        settings, given = _changed(given or {}, change)
    return settings


def _changed(given: Mapping[str, Json], change: str) -> tuple[RolloutSettings, dict[str, Json]]:
    """The settings and their mapping after a change, whose value is YAML, a text, or a list with commas: what fits."""
    name, equals, text = change.partition("=")
    if not equals or not text.strip():
        raise ConfigError(f"got --set {change}; expected --set KEY=VALUE, such as --set max_tool_iterations=8 or =null")
    fault = None
    # in a shell's word, `#` begins no comment
    for read in (str if " #" in text else yaml.safe_load, str, lambda words: words.split(",")):
        try:
            values = _with_value(given, name.strip().removeprefix(f"{KEY}.").split("."), read(text))
            return checked_settings(values, KEY), values
        except ConfigError as e:
            fault = fault or e
        except (yaml.YAMLError, ValueError, ArithmeticError):
            continue
    raise ConfigError(f"--set {name}: {fault}") from fault


def _with_value(given: Mapping[str, Json], path: Sequence[str], value: Json) -> dict[str, Json]:
    """The mapping with a value at a path of keys; what is no mapping on the way gives place to one."""
    key, *further = path
    held = given.get(key)
    inner = held if isinstance(held, Mapping) else {}
    return {**given, key: _with_value(inner, further, value) if further else value}


def _under_key(path: Path) -> Json:
    """What a file has under `strands_rollout:`."""
    try:
        content = yaml.safe_load(yaml_text(path))
    except (yaml.YAMLError, ValueError, ArithmeticError) as e:
        raise ConfigError(f"{path} is no YAML: {e}") from e
    if not isinstance(content, Mapping):
        raise ConfigError(f"{path} holds {type(content).__name__}; expected a mapping with the key {KEY}:")
    if KEY not in content:
        near = get_close_matches(KEY, map(str, content), n=1)
        hint = f"did you mean {KEY!r} by {near[0]!r}?" if near else f"got {', '.join(map(str, content)) or 'none'}"
        if "eval" in content:
            hint = f"it is for slime's --eval-config, and checked by EVAL_CONFIG={path} strands-rollout doctor"
        raise ConfigError(f"{path} has no key {KEY}:; {hint}")
    return content[KEY]
