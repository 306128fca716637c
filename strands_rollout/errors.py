"""The exceptions of this package, a tree below `RolloutError`."""


class RolloutError(Exception):
    """Base class of this package's own exceptions that reach its callers; internal exceptions may have other bases."""


class ConfigError(RolloutError):
    """A setting, option or input is unknown or invalid, contradicts another, or needs something that is missing."""


class PolicyEndedError(RolloutError):
    """The source of the policy's turns (a script, a person, an API) has too few, too many or unusable turns."""


class PromptError(RolloutError):
    """A row's prompt or a gateway client's request can't be used, or an answer can't be graded as the metadata says."""


class TemplateError(RolloutError):
    """A tokenizer or its chat template can't be used token-exactly."""


class TemplateDifferenceError(TemplateError):
    """A chat template did not render the expected tokens.

    Attributes:
        got: The rendered tokens, from the start of the comparison.
        expected: The expected tokens.
        position: Index of the first token that differs, in both.
    """

    def __init__(self, message: str, *, got: list[int], expected: list[int], position: int) -> None:
        super().__init__(message)
        self.got = got
        self.expected = expected
        self.position = position


class TrajectoryError(RolloutError):
    """A request or an answer would make the trajectory differ from the tokens that the policy reads and samples."""


class UnsendableTextError(TrajectoryError):
    """A prompt or turn contains the placeholder of an image or another medium, but not the medium.

    The placeholder may be a token or its text. SGLang fails on such a prompt or never answers it; slime's trainer fails
    on such a turn.

    Attributes:
        is_sampled: True if the policy sampled the placeholder's token in the failing turn; then the prompt is not the
            cause.
    """

    def __init__(self, message: str, *, is_sampled: bool = False) -> None:
        super().__init__(message)
        self.is_sampled = is_sampled


class ReplayError(RolloutError):
    """A restarted agent's requests differ from the recorded requests of the earlier attempt."""


class ResumeError(RolloutError):
    """The saved state of an unfinished episode can't be written or read, or does not match its tokens."""


class BudgetExhaustedError(RolloutError):
    """A budget has no token left for another turn, or for the rest of an aborted turn.

    Attributes:
        budget: The budget's name: "turn", "response" or "context".
    """

    def __init__(self, message: str, *, budget: str) -> None:
        super().__init__(message)
        self.budget = budget


class EngineError(RolloutError):
    """A server (SGLang, a router in front of it, or a chat API) did not deliver a generation."""


class EngineUnavailableError(EngineError):
    """The server can't be reached or keeps failing.

    It refuses connections, has no worker, keeps answering 429 or any 5xx, or exceeds the read timeout. A server that
    aborts a turn again and again, or because of an error not caused by the request, counts as unavailable, too.
    """


class EngineRejectedError(EngineError):
    """The server rejected the request (400, 404, 422 ...); a retry would fail too.

    Attributes:
        status_code: The HTTP status.
    """

    def __init__(self, message: str, *, status_code: int) -> None:
        super().__init__(message)
        self.status_code = status_code


class EngineOverlongError(EngineRejectedError):
    """The request is longer than the server's context.

    Attributes:
        context_length: The server's limit in tokens; None if its message does not name it.
    """

    def __init__(self, message: str, *, status_code: int, context_length: int | None) -> None:
        super().__init__(message, status_code=status_code)
        self.context_length = context_length


class EngineResponseError(EngineError):
    """The server answered 200 without a valid generation, or was busy, failing or slow when asked for its limits."""


class EngineAbortedError(EngineError):
    """The rollout was aborted, the episode has ended, or the server aborted the generation (finish_reason "abort")."""


class ToolError(RolloutError):
    """A tool or other user code can't be loaded, has the wrong type, blocks, or raised SystemExit or the like."""


class SandboxError(RolloutError):
    """The code executor, an MCP server or other infrastructure of tools failed, independently of the policy's call."""


class UnplayableAgentError(ConfigError):
    """The user's code builds or calls an agent in a way that can't be trained. The policy is never the cause."""


class NoModelError(UnplayableAgentError):
    """An agent in an episode has no model, and would call Strands' default model."""


class BlockingCallError(UnplayableAgentError):
    """User code makes a call that would block the event loop and all its episodes, such as an agent without `await`."""


class TeamLimitError(RolloutError):
    """A swarm or graph reached its own limit, such as its maximum handoffs, or ended before the policy answered."""


class EnvironmentFaultError(RolloutError):
    """A resource, environment, judge or evaluator failed, or the rollout was aborted before the reward was computed.

    The policy is never the cause.
    """


class LostEpisodeError(RolloutError):
    """The process that played an episode died, and the episode can't be continued."""


class FailedGroupsError(RolloutError):
    """Too many consecutive groups of training samples failed; the run ends."""


class WorkersLostError(FailedGroupsError):
    """An episode worker died too many times; the run ends."""


class ExportError(RolloutError):
    """A sample, request or response can't be converted to another trainer's format."""


class DumpError(RolloutError):
    """A dump can't be written or read, for example because it is broken or has a newer version or unknown format."""
