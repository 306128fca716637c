"""The user's settings: the mapping under `strands_rollout` in the YAML of slime's `--custom-config-path`.

Pydantic models, and functions that read them from a file or from slime's args. The attribute docstrings are the
settings' documentation: `strands-rollout config` and docs/settings.md show them.
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
from strands_rollout.secret_mask import MASK, mask_settings
from strands_rollout.validation import explain_fault

SYSTEM_PROMPT: Final = (
    "You are a careful math solver. Reason briefly, use the execute_python_code tool for every computation, "
    "and give the final answer in \\boxed{}."
)
MISSING_CODE_TOOL: Final = (
    "system_prompt is the default, which mentions execute_python_code, a tool that is not in tools; set system_prompt "
    "(null for none)"
)


class _Settings(BaseModel):
    """Base of all settings; attribute docstrings become field descriptions."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)
    _string_key: ClassVar[str] = ""  # a string in place of the mapping sets this key

    @classmethod
    def __pydantic_init_subclass__(cls, **_kwargs: object) -> None:
        for field in cls.model_fields.values():
            field.description = " ".join((field.description or "").split())

    @model_validator(mode="before")
    @classmethod
    def _expand_string(cls, given: object) -> Json:
        return {cls._string_key: given} if cls._string_key and isinstance(given, str) else given


class McpServer(_Settings):
    """An MCP server, with the keys of a server in Strands' `mcpServers` files, plus `name` and `per_episode`.

    `${VAR}` in a string is replaced from the environment.
    """

    _string_key = "url"
    name: str | None = None
    """Name that a row may use to choose the server."""
    command: str | None = None
    """Command that starts a server on stdio, split as in a shell; `python` is this process's interpreter."""
    args: tuple[str, ...] = ()
    """Additional arguments of the command."""
    env: dict[str, str] | None = None
    """Environment variables of the command."""
    cwd: str | None = None
    """Working directory of the command, relative to the configuration's folder."""
    url: str | None = None
    """URL of a running server."""
    headers: dict[str, str] | None = None
    """HTTP headers of each request to the URL."""
    transport: Literal["stdio", "streamable-http", "sse"] | None = None
    """Transport: "stdio" (the default for a command), "streamable-http" (the default for a URL) or "sse"."""
    prefix: str | None = None
    """Prefix of the names of the server's tools."""
    tool_filters: dict[Literal["allowed", "rejected"], tuple[str, ...]] | None = None
    """Names or patterns of the server's tools to allow or reject."""
    startup_timeout: int = Field(default=30, ge=1)
    """How long the server may take to start, in seconds."""
    per_episode: bool = False
    """Give each episode its own connection and, with `command`, its own server process. If false, the episodes of a
    rollout process share one connection."""

    @model_validator(mode="after")
    def _check_one_source(self) -> Self:
        if (self.command is None) == (self.url is None):
            raise ValueError("an MCP server with either a command or a url")
        return self

    @property
    def shown_name(self) -> str:
        """The server's name, or its URL or command without secrets, for messages."""
        return self.name or str(mask_settings(self.url or self.command))

    def as_strands_config(self) -> dict[str, Any]:
        """Return the server's entry in an `mcpServers` mapping."""
        config = self.model_dump(mode="json", exclude_none=True, exclude={"name", "per_episode", "command", "args"})
        if self.command is not None:
            first, *rest = shlex.split(self.command)
            first = sys.executable if first == "python" else first
            config |= {"command": first, "args": [*rest, *self.args]}
        return config


class AgentCommand(_Settings):
    """A process that plays an episode.

    `command`, `args`, `env` and `stdin` may contain these placeholders:

    - `{prompt}`: the user's last message.
    - `{task}`: the path of a JSON file with all messages.
    - `{base_url}`: the URL of the policy's endpoint, with `/v1`.
    - `{url}`: the same URL without `/v1`.
    - `{api_key}`: the endpoint's API key.
    - `{model}`: the policy's model name.
    """

    _string_key = "command"
    command: str
    """Command to run, split as in a shell but run without a shell; `python` is this process's interpreter."""
    args: tuple[str, ...] = ()
    """Additional arguments."""
    env: dict[str, str] = Field(default_factory=dict)
    """Additional environment variables; `${VAR}` is replaced from the environment. The process also gets variables with
    the endpoint's URL, key and model, such as OPENAI_BASE_URL, and inherits a few, such as PATH and the locale."""
    cwd: str | None = None
    """Working directory, relative to the configuration's folder. Default: the process's HOME, a temporary folder that
    contains only the file `{task}`."""
    stdin: str = ""
    """Text for the process's standard input."""
    exit_codes: tuple[int, ...] = (0,)
    """Exit codes that mean success. After any other exit code, the episode fails, unless a limit has ended it."""

    @model_validator(mode="after")
    def _check_prompt_is_passed(self) -> Self:
        if not any("{prompt}" in text or "{task}" in text for text in (self.command, *self.args, self.stdin)):
            raise ValueError("{prompt} or {task} in the command, args or stdin")
        return self


REWARD_KEY: Final = "score"
"""Value for slime's `--reward-key`: the key of the number to train on, in the dict that `reward_func` returns."""
MAX_TOOL_SHAPING: Final = 0.4
"""Maximum that tool shaping adds to `wrong`. In slime's strands example, `wrong` is -1.0 and a wrong answer scores at
most -0.6."""


class Judge(_Settings):
    """A model that rates an answer with a number. A string in place of the mapping sets `strands_model`."""

    _string_key = "strands_model"
    base_url: str | None = None
    """URL of an OpenAI-compatible API, such as `http://127.0.0.1:8000/v1`."""
    model: str | None = None
    """Name of the model at the API."""
    api_key: str | None = None
    """API key. In `api_key` and `base_url`, `${VAR}` is replaced from the environment, as in `${OPENAI_API_KEY}`."""
    params: dict[str, Any] = Field(default_factory=lambda: {"temperature": 0})
    """Additional fields of a request to the API."""
    strands_model: str | None = None
    """Instead of an API: dotted path of a Strands model, or of a function that returns one."""
    prompt: str = (
        "Rate how well the answer solves the task, from 0 to 1. End with a line `Score: N`.\n\n"
        "Task:\n{question}\n\nAnswer:\n{response}\n\nReference:\n{label}"
    )
    """Prompt of the judge; `{question}`, `{response}` and `{label}` are replaced. The last `Score: N` in the reply
    counts; if the reply has none, the whole reply must be a number."""
    timeout_s: float = Field(default=60.0, gt=0)
    """Timeout of a reply, in seconds."""
    retries: int = Field(default=3, ge=0)
    """Maximum retries of a request to the API after a response of 429 or 5xx, or no response."""
    max_concurrency: int = Field(default=64, ge=1)
    """Maximum number of answers rated at once in a process; further answers are queued."""

    @model_validator(mode="after")
    def _check_one_model(self) -> Self:
        if (self.base_url is None) == (self.strands_model is None) or (self.base_url is None) != (self.model is None):
            raise ValueError("a judge with either base_url and model, or strands_model")
        return self


class RewardPart(_Settings):
    """A part of the reward: a function, a judge or an evaluator.

    If none of the three is set, the part is the environment's score or, if there is no such score, the default grading.
    """

    _string_key = "function"
    function: str | None = None
    """Dotted path of a reward function, as for `reward.function`."""
    judge: Judge | None = None
    """Model that rates the answer. With `evaluator`, the model that the evaluator calls."""
    evaluator: str | None = None
    """Dotted path of an evaluator of strands-agents-evals: a class, an instance, or a function that returns one."""
    weight: FiniteFloat = 1.0
    """Weight of this part in the sum."""

    @model_validator(mode="after")
    def _check_one_source(self) -> Self:
        if self.function is not None and (self.judge is not None or self.evaluator is not None):
            raise ValueError("either a function, or a judge, or an evaluator with or without a judge")
        return self


class RewardSettings(_Settings):
    """The reward of an episode: grading of the answer, or the user's reward."""

    _string_key = "function"
    function: str | None = None
    """Dotted path of your reward, `score(response, label)`, `score(sample)` or slime's `reward(args, sample)`, sync or
    async. It returns a number, or a mapping with `score`. `reward: PATH` sets this key."""
    evaluator: str | None = None
    """Instead of a function: dotted path of an evaluator of strands-agents-evals."""
    judge: Judge | None = None
    """Model that the evaluator calls."""
    parts: dict[str, RewardPart] = Field(default_factory=dict)
    """Several rewards by name, each with `function`, `judge` or `evaluator`, and `weight`; the reward is their weighted
    sum. A part without a function, judge or evaluator is the environment's score or, if there is no such score, the
    default grading."""
    timeout_s: float = Field(default=300.0, gt=0)
    """Wall-clock timeout of your reward, or of each part, in seconds. Waiting in a judge's queue (see the judge's
    `max_concurrency`) does not count."""
    style: Literal["default", "slime_strands_example"] = Field(
        default="default",
        description='"default" grades with `strands_rollout.grading`; "slime_strands_example" reproduces the score '
        "of slime's examples/strands_sglang exactly, including its bugs.",
    )
    correct: FiniteFloat = 1.0
    """Score of a correct answer. If your reward returns no `acc`, an answer counts as correct if its score is at least
    `correct`."""
    wrong: FiniteFloat = -1.0
    """Score of a wrong answer, and of an answer whose reward fails; must be less than `correct`."""
    tool_shaping: bool = False
    """Add (tool iterations - 2) * 0.05, at most 0.4, to the score of a wrong answer, as in slime's example. GRPO can
    then train on a group whose answers are all wrong."""
    symbolic_timeout_s: float = Field(default=5.0, gt=0, le=60)
    """CPU timeout, in seconds, for comparing an answer with the label; after it, the answer counts as wrong."""

    @property
    def is_user_defined(self) -> bool:
        """True if the score comes from the user's function, evaluator or parts."""
        return bool(self.all_parts)

    @property
    def all_parts(self) -> dict[str, RewardPart]:
        """The parts; a function or evaluator is a single part named ""."""
        if self.function is None and self.evaluator is None:
            return self.parts
        return {"": RewardPart(function=self.function, evaluator=self.evaluator, judge=self.judge)}

    @property
    def has_evaluator(self) -> bool:
        """True if a part has an evaluator. An evaluator reads the whole episode, not only the answer."""
        return any(part.evaluator is not None for part in self.all_parts.values())

    @model_validator(mode="after")
    def _check_combination(self) -> Self:
        given = [name for name in ("function", "evaluator", "parts") if getattr(self, name)]
        if len(given) > 1:
            raise ValueError(f"only one of {' and '.join(given)}; to combine rewards, list all of them in parts")
        if self.judge is not None and self.evaluator is None:
            raise ValueError("an evaluator that calls this judge, or the judge as one of the parts")
        highest_wrong = self.wrong + (MAX_TOOL_SHAPING if self.tool_shaping else 0.0)
        if not highest_wrong < self.correct:
            raise ValueError(f"less than correct={self.correct} for a wrong answer, which could score {highest_wrong}")
        has_own_scores = (self.correct, self.wrong, self.tool_shaping) != (1.0, -1.0, False)
        if self.style == "slime_strands_example" and has_own_scores:
            raise ValueError("no correct, wrong or tool_shaping: style 'slime_strands_example' fixes the scores")
        if given and (self.style != "default" or self.tool_shaping):
            raise ValueError(f"no style or tool_shaping with {given[0]}, which replaces the grading")
        return self


class EpisodeWorkers(_Settings):
    """Processes on Ray that play episodes."""

    count: int | None = Field(default=0, ge=0)
    """Number of workers. With null, `per_node` workers are started on each node; `per_node` must then be set. In a
    mapping with other keys but without `count`, `count` is null."""
    per_node: int | None = Field(default=None, ge=1)
    """Maximum number of workers per node; with `count: null`, the exact number. Default: no maximum; Ray spreads the
    workers over the nodes."""
    cpus: float = Field(default=1.0, ge=0)
    """CPUs that a worker reserves on Ray. The engines and the trainer must leave these CPUs free."""
    max_episodes: int | None = Field(default=None, ge=1)
    """Maximum number of episodes that a worker plays at once; further episodes are queued."""
    resources: dict[str, float] = Field(default_factory=dict)
    """Custom resources that a worker reserves on Ray, by name."""
    env: dict[str, str] = Field(default_factory=dict)
    """Additional environment variables of the workers."""

    @model_validator(mode="before")
    @classmethod
    def _expand_count(cls, given: object) -> Json:
        if isinstance(given, Mapping):
            return {"count": None, **given} if given else given  # a mapping without a count means null, not 0
        return {"count": given} if isinstance(given, int) and not isinstance(given, bool) else given

    @property
    def is_enabled(self) -> bool:
        """True if there is at least one worker."""
        return self.count != 0

    @model_validator(mode="after")
    def _check_count(self) -> Self:
        if self.count is None and self.per_node is None:
            raise ValueError("a count or per_node")
        return self


class _VariableError(ConfigError):
    """An environment variable that sets the default of a setting is invalid."""


def _workers_of_environment() -> int:
    if (given := os.environ.get("STRANDS_ROLLOUT_EPISODE_WORKERS") or "0").isdecimal():
        return int(given)
    raise _VariableError(
        f"got STRANDS_ROLLOUT_EPISODE_WORKERS={given!r} in the environment; expected an integer of at least 0"
    )


def _staleness_of_environment() -> int | None:
    if (given := os.environ.get("STRANDS_ROLLOUT_MAX_SAMPLE_STALENESS") or "none") == "none":
        return None
    if given.isdecimal():
        return int(given)
    raise _VariableError(
        f"got STRANDS_ROLLOUT_MAX_SAMPLE_STALENESS={given!r} in the environment; expected an integer of at least 0, "
        "or 'none'"
    )


CODE_TOOL_PATH: Final = "strands_rollout.tools.execute_python_code"

ENVIRONMENT_LIBRARIES: Final = {"strands_env": "strands_rollout.environments.strands_env.StrandsEnvironment"}
"""Classes that play environments of other libraries, by the library's name in the setting `environment`."""

NamedTool = Annotated[
    Annotated[str, Tag("path")] | Annotated[McpServer, Tag("server")],
    Discriminator(lambda given: "path" if isinstance(given, str) and "://" not in given else "server"),
]
"""The dotted path of a tool; or an MCP server whose tools are used, as a URL or an `McpServer`."""


class RolloutSettings(_Settings):
    """All settings and their defaults.

    None means no limit, or that the setting is not used, unless its description names another default.
    """

    system_prompt: str | None = SYSTEM_PROMPT
    """System prompt for rows without a system message."""
    tools: tuple[NamedTool, ...] = (CODE_TOOL_PATH,)
    """Strands tools: paths of tools, modules, files (`./tools.py`, `./tools.py:name`) or tool providers; MCP servers by
    URL, or as a mapping with `command` or `url`."""
    row_tools: tuple[NamedTool, ...] = ()
    """Additional tools, available only to episodes whose row names them."""
    agent_factory: str | None = None
    """Dotted path of a function `(model, task)` that returns the agent of an episode: a Strands Agent, Swarm or
    Graph."""
    agent_program: str | None = None
    """Instead of agent_factory: dotted path of a function `(task, endpoint)` that plays the episode with any OpenAI or
    Anthropic client. The function returns the text of the answer, a score, or None."""
    environment_config: str | dict[str, Any] | None = None
    """With `agent_program`: path of a file, relative to the configuration's folder. The program gets the path as
    `task.environment_config`; `strands_rollout.environments.verifiers.play` needs the TOML of a verifiers environment.
    With `environment_factory`: the keyword arguments of that setting's function or class, as a mapping, or as a YAML or
    JSON file with a mapping."""
    agent_command: AgentCommand | None = None
    """Instead of agent_factory: a process that plays the episode with any OpenAI or Anthropic client."""
    resumable: Literal["replay"] | None = None
    """"replay" continues an episode of `agent_program` or `agent_command` after an abort, or after the process that
    plays the episode died. The program is started again. Its first requests, up to the interrupted turn, get their
    recorded answers. An aborted episode of `environment_factory` continues in the same way, in a new environment. With
    null, episodes of these three settings start from scratch after an abort, and fail if their episode worker dies."""
    resources: dict[str, str] = Field(default_factory=dict)
    """Resources by name: dotted paths of functions `(task)`. Each function returns an async context manager, which is
    open during the episode."""
    environment: str | None = None
    """Dotted path of the environment of an episode: a class or a function `(task)`. The environment may prepare state,
    offer tools, answer as a user, and score the episode. Or the name of a library whose own environments play the
    episodes: `strands_env`."""
    environment_factory: str | None = None
    """With the name of a library as `environment`: dotted path of an environment of that library. The path names a hook
    file, an environment class, or a function that returns an environment or a factory of environments."""
    environment_timeout_s: float | None = Field(default=300.0, gt=0)
    """Wall-clock timeout of each step of resources and environment (open, prepare, answer, score, state) in seconds."""
    hooks: tuple[str, ...] = ()
    """Dotted paths of Strands hook provider classes, or of functions that return a hook provider. Each episode creates
    new providers, also when it is resumed."""
    max_tool_iterations: int | None = Field(default=5, ge=0)
    """Maximum turns per episode that run tool calls."""
    max_tool_calls: int | None = Field(default=None, ge=0)
    """Maximum tool calls of an episode."""
    max_parallel_tool_calls: int | None = Field(default=None, ge=1)
    """Maximum tool calls of a turn that are run; each further call receives an error."""
    max_user_turns: int | None = Field(default=None, ge=0)
    """Maximum user messages after the first in an episode, such as answers of the environment."""
    tool_timeout_s: float | None = Field(default=60.0, gt=0)
    """Wall-clock timeout of a tool call, in seconds. A code call's wait in the queue does not count."""
    episode_timeout_s: float | None = Field(default=None, gt=0)
    """Wall-clock timeout of an episode, in seconds."""
    max_turn_tokens: int | None = Field(default=None, ge=1)
    """Maximum tokens sampled in a turn."""
    min_turn_tokens: int = Field(default=16, ge=1)
    """Minimum tokens left for the next turn when a tool result is cut to fit."""
    executor: str | dict[str, Any] = "local"
    """Executor of the code tool: a name, or a mapping with `name` and options."""
    code_session: bool = False
    """Run all code calls of an episode in one interpreter, which keeps variables and files."""
    model_name: str | None = None
    """Name of the policy among the models of slime's `--sglang-config`. Default: the first model."""
    resume_aborted: bool = True
    """Resume an aborted sample from its own tokens; false starts it from scratch. A sample also starts from
    scratch if its episode can't be continued, for example with `resources`, or after a rewrite of its history."""
    journal_dir: str | None = None
    """Folder for the journals of unfinished episodes. A killed run continues these episodes after a restart, once slime
    requests the same samples again. An episode that can't be continued, for example with `resources` or an
    `environment`, starts from scratch. Each run needs a folder of its own. Needs `resume_aborted`."""
    repeat_interrupted_tools: bool = False
    """Call a tool again if the episode's process died during the call. If false, the episode fails and is not trained
    on, since the tool may have acted. The code tool is always called again, except in a code session."""
    episode_workers: EpisodeWorkers = Field(default_factory=lambda: EpisodeWorkers(count=_workers_of_environment()))
    """Processes on the job's Ray cluster that play the episodes: a number, or a mapping. With 0, the process that calls
    `generate` plays the episodes. Default: the environment variable STRANDS_ROLLOUT_EPISODE_WORKERS, else 0."""
    on_engine_abort: Literal["continue", "return"] = "continue"
    """Reaction to an engine that aborts a turn while the rollout continues, as for a weight update. "continue" samples
    the rest of the turn. "return" ends the episode; its sample becomes ABORTED, or FAILED if slime can't take an
    ABORTED sample."""
    engine_patience_s: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """How long to retry a request while the engine is unreachable, busy or failing, in seconds. With 0, no request is
    retried. Default: 600 in a job of slime, where giving up costs training data, else 90."""
    max_failed_groups: int | None = Field(default=16, ge=0)
    """After this number of consecutive failed groups of training samples, the run ends with an error that names the
    last failure. A group has failed if all of its samples failed by a fault of the infrastructure, the setup or the
    reward, or by a bug. With null or 0, no number of failed groups ends the run."""
    max_staleness: int | None = Field(default=None, ge=0)
    """Maximum number of weight versions that a trained token may be behind the sample's last token. Older tokens are
    not trained on."""
    max_sample_staleness: int | None = Field(default_factory=_staleness_of_environment, ge=0)
    """Maximum number of weight versions that the last token of a trained sample may be behind the newest known
    version. Older samples, which waited long in a fully asynchronous rollout, are not trained on. Needs slime's
    --custom-reward-post-process-path strands_rollout.normalize_rewards. The rollout function
    strands_rollout.generate_rollout_fully_async also starts no more groups than this limit allows. Default: the
    environment variable STRANDS_ROLLOUT_MAX_SAMPLE_STALENESS, else null."""
    abort_grace_s: float | None = Field(default=None, ge=0)
    """Maximum time that an aborted episode waits for tokens already sampled by the engine, in seconds. Default: 4 if
    these tokens are kept, as in slime's partial rollouts, else 0.2."""
    conversation_manager: str | None = None
    """Dotted path of a Strands conversation manager, or of a function that returns one. A conversation manager may drop
    or summarize messages."""
    fan_out: bool = False
    """Return several samples per episode: one for the main agent's last history, and one for each other history with
    sampled tokens: of a sub-agent, of a side conversation, or of the main agent before a rewrite."""
    transient_context: Literal["segment", "keep"] = "segment"
    """Treatment of text that a plugin adds to one request only, such as a reminder: "segment" starts a new segment
    after that request, as after a rewrite of the history; "keep" leaves the text in the context of later requests, so
    that the episode stays one sample."""
    should_abort: Annotated[str | Callable[[], bool] | None, PlainSerializer(str, when_used="json-unless-none")] = None
    """A function without arguments, or its dotted path. The function must return True while the rollout is being
    aborted; episodes then end. In a run with slime, episodes also end when slime sets its abort flag."""
    freeze_gc: bool = True
    """Before the process's first episode, exclude all loaded objects from Python's garbage collection (`gc.freeze`),
    and make collections rarer."""
    dump_dir: str | None = None
    """Folder for samples of each step, which `log_rollout`, `log_eval` and `strands-rollout train` write, and
    `strands-rollout view` shows. Default: no folder; for `strands-rollout train`, `samples` in the run's folder."""
    dump_samples: int = Field(default=64, ge=1)
    """Maximum samples written to `dump_dir` per training step, or per data set of an evaluation."""
    mismatch_check: Literal["first_step", "every_step"] = "first_step"
    """Steps that compare the context of samples with the chat template's rendering, for the metrics
    `mismatch_*`: "first_step" for the first training step and the first evaluation of each data set after each start of
    a run, or "every_step"."""
    tool_parser: str = Field(default_factory=lambda: os.environ.get("STRANDS_ROLLOUT_TOOL_PARSER") or "hermes")
    """Format of the model's tool calls; "auto" detects it from the chat template. Default: the environment variable
    STRANDS_ROLLOUT_TOOL_PARSER, which the launch scripts set for their model, else "hermes"."""
    enable_thinking: bool | None = None
    """Value of the chat template's variable `enable_thinking`; null leaves the variable out."""
    reward: RewardSettings = Field(default_factory=RewardSettings)
    """Reward of an episode: settings of the grading, or your own reward."""

    @property
    def has_code_tool(self) -> bool:
        """True if one of `tools` has the code tool's name. Always False with environments of a library."""
        if self.environment_plays:
            return False
        name = CODE_TOOL_PATH.rpartition(".")[2]
        return any(isinstance(tool, str) and re.split("[.:]", tool)[-1] == name for tool in self.tools)

    @property
    def has_program(self) -> bool:
        """True if agent_program or agent_command plays the episodes."""
        return self.agent_program is not None or self.agent_command is not None

    @property
    def environment_path(self) -> str | None:
        """Dotted path of the environment: the setting or, if it names a library, the path of the library's class."""
        return self.environment and ENVIRONMENT_LIBRARIES.get(self.environment, self.environment)

    @property
    def environment_plays(self) -> bool:
        """True if environments of a library play the episodes, with agents of their own."""
        return self.environment in ENVIRONMENT_LIBRARIES

    @property
    def lacks_code_tool(self) -> bool:
        """True if an agent without the code tool gets the default system prompt. The prompt mentions that tool."""
        has_own = self.agent_factory or self.has_program or self.environment_plays
        return not (self.has_code_tool or has_own or "system_prompt" in self.model_fields_set)

    @model_validator(mode="after")
    def _check_one_player(self) -> Self:
        given = [name for name in ("agent_factory", "agent_program", "agent_command") if getattr(self, name)]
        if len(given) > 1:
            raise ValueError(f"only one of {' and '.join(given)}")
        if self.resumable and not (self.has_program or self.environment_plays):
            raise ValueError(
                "no resumable, which is for agent_program, agent_command and environment_factory; for other agents use "
                "resume_aborted"
            )
        if self.environment_config and self.agent_program is None and not self.environment_plays:
            raise ValueError("no environment_config, which is for agent_program and environment_factory")
        if isinstance(self.environment_config, dict) and self.agent_program is not None:
            raise ValueError("the path of a file as environment_config of an agent_program")
        self._check_environment(given)
        loop_settings = ("hooks", "conversation_manager", "max_parallel_tool_calls", "row_tools")
        ignored = [name for name in loop_settings if getattr(self, name)]
        if self.has_program and ignored:
            raise ValueError(f"no {' and '.join(ignored)}, which {given[0]} ignores")
        return self

    def _check_environment(self, players: Sequence[str]) -> None:
        """Check the settings of a library's environments, which play with agents of their own."""
        if not self.environment_plays:
            if self.environment_factory is not None:
                raise ValueError(f"environment_factory only with environment: {', '.join(ENVIRONMENT_LIBRARIES)}")
            return
        if self.environment_factory is None:
            raise ValueError(
                f"environment_factory, the dotted path of an environment, with environment: {self.environment}"
            )
        loop_settings = ("conversation_manager", "max_parallel_tool_calls", "max_user_turns", "row_tools", "tools")
        defaults = {name: RolloutSettings.model_fields[name].get_default() for name in loop_settings}
        ignored = [*players, *(name for name in loop_settings if getattr(self, name) not in (defaults[name], ()))]
        if ignored:
            raise ValueError(
                f"no {' and '.join(ignored)} with environment: {self.environment}, whose environments build their own "
                "agents"
            )

    @property
    def needs_labels(self) -> bool:
        """True if each row needs a label, for this package's grading."""
        parts = self.reward.all_parts.values()
        is_graded = any(part.function is None and part.judge is None and part.evaluator is None for part in parts)
        plays_environment = self.environment is not None or self.environment_config is not None
        return not plays_environment and (is_graded or not self.reward.is_user_defined)


def settings_from_args(args: object) -> RolloutSettings:
    """Return the settings in slime's `args.strands_rollout`; the defaults if it is missing or None.

    Raises:
        ConfigError: `args.strands_rollout` is not a mapping, a key is unknown (the message suggests the nearest known
            key) or a value is invalid.
    """
    given = getattr(args, "strands_rollout", None)
    if given is None:
        return RolloutSettings()
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"got strands_rollout={given!r:.200} of type {type(given).__name__}; expected a mapping of settings under "
            "the key strands_rollout: of the --custom-config-path YAML"
        )
    return validate_settings(given, "strands_rollout")


def validate_settings(given: Mapping[Any, Any], where: str) -> RolloutSettings:
    """Return the settings in a mapping; `where` prefixes the names in messages.

    Raises:
        ConfigError: As `settings_from_args`.
    """
    try:
        return RolloutSettings.model_validate(dict(given))
    except ValidationError as e:
        raise ConfigError("; ".join(_explain(fault, RolloutSettings, where) for fault in e.errors())) from e


def reward_settings(given: object) -> RewardSettings:
    """Return the reward's settings from the value of the key `reward`; the defaults if the value is None.

    Raises:
        ConfigError: As `settings_from_args`.
    """
    try:
        return RewardSettings.model_validate({} if given is None else given)
    except ValidationError as e:
        raise ConfigError("; ".join(_explain(fault, RewardSettings, f"{KEY}.reward") for fault in e.errors())) from e


def _explain(fault: ErrorDetails, model: type[BaseModel], root: str) -> str:
    """Return the message of `explain_fault`, with secrets masked; or the remedy for a space in `tools.py: name`."""
    path = [str(part) for part in fault["loc"] if part not in ("path", "server")]  # drop the tags of NamedTool
    if path and path[-1].endswith(".py"):  # `- tools.py: name`, which YAML reads as a mapping
        return f"got the mapping {path[-1]}: in {root}.{path[0]}; remove the space: {path[-1]}:NAME"
    name = path[-1] if path else ""
    shown = MASK if {"env", "headers"} & {*path[:-1]} else mask_settings({name: fault["input"]})[name]
    masked: ErrorDetails = {**fault, "loc": tuple(path), "input": shown}
    return explain_fault(masked, model, root=root, noun="setting")


KEY: Final = "strands_rollout"


def read_config_file(path: Path | None, changes: Sequence[str] | None = None) -> RolloutSettings:
    """Return the settings under `strands_rollout:` in a file; its other keys are for slime.

    Each change is `setting=value` and overrides the file; `reward.correct=2` sets a key of a mapping. If `path` is
    None, the changes apply to the defaults.

    Raises:
        ConfigError: The file can't be read, is not a YAML mapping or lacks the key; a change is not `setting=value`; a
            setting in the file or in `changes` is unknown or invalid; or an environment variable that sets a default is
            invalid.
    """
    given = {} if path is None else _read_key(path)
    try:
        settings = settings_from_args(SimpleNamespace(strands_rollout=given))
    except _VariableError:  # not a fault of the file
        raise
    except ConfigError as e:
        raise ConfigError(f"{path}: {e}") from e
    for change in changes or ():
        settings, given = _apply_change(given or {}, change)
    return settings


def _apply_change(given: Mapping[str, Json], change: str) -> tuple[RolloutSettings, dict[str, Json]]:
    """Return the settings after a change, and the changed mapping.

    The value is tried as YAML, then as a string, then as a comma-separated list, until the settings accept it.

    Raises:
        ConfigError: The change is not KEY=VALUE, or the settings accept the value in none of these forms.
    """
    name, equals, text = change.partition("=")
    if not equals or not text.strip():
        raise ConfigError(f"got --set {change}; expected KEY=VALUE, such as max_tool_iterations=8, or KEY=null")
    fault = None
    # on a command line, ` #` is text, not a YAML comment
    for read in (str if " #" in text else yaml.safe_load, str, lambda text: text.split(",")):
        try:
            values = _with_value(given, name.strip().removeprefix(f"{KEY}.").split("."), read(text))
            return validate_settings(values, KEY), values
        except ConfigError as e:
            fault = fault or e
        except (yaml.YAMLError, ValueError, ArithmeticError):
            continue
    raise ConfigError(f"--set {name}: {fault}") from fault


def _with_value(given: Mapping[str, Json], path: Sequence[str], value: Json) -> dict[str, Json]:
    """Return a copy of the mapping with `value` at the path of keys; a mapping replaces any other value on the path."""
    key, *rest = path
    current = given.get(key)
    inner = current if isinstance(current, Mapping) else {}
    return {**given, key: _with_value(inner, rest, value) if rest else value}


def _read_key(path: Path) -> Json:
    """Return the value of the key `strands_rollout:` in a file."""
    try:
        content = yaml.safe_load(yaml_text(path))
    except (yaml.YAMLError, ValueError, ArithmeticError) as e:
        raise ConfigError(f"{path} can't be read as YAML: {e}") from e
    if not isinstance(content, Mapping):
        raise ConfigError(f"{path} contains a {type(content).__name__}; expected a mapping with the key {KEY}:")
    if KEY not in content:
        near = get_close_matches(KEY, map(str, content), n=1)
        hint = f"did you mean {KEY!r} by {near[0]!r}?" if near else f"got {', '.join(map(str, content)) or 'none'}"
        if "eval" in content:
            hint = f"it is for slime's --eval-config; to check it, run: EVAL_CONFIG={path} strands-rollout doctor"
        raise ConfigError(f"{path} has no key {KEY}:; {hint}")
    return content[KEY]
