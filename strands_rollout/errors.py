"""The tree of errors."""


class RolloutError(Exception):
    """Base of every error that this package raises on purpose."""


class ConfigError(RolloutError):
    """A setting is unknown, out of range, or contradicts another."""


class PolicyEndedError(RolloutError):
    """What gives a policy's turns (a script, a person, an API) has no further one, or has one too many."""


class PromptError(RolloutError):
    """A dataset row's prompt can't be turned into chat messages."""


class TemplateError(RolloutError):
    """A tokenizer or its chat template can't be used token-exactly."""


class TemplateDifferenceError(TemplateError):
    """A template makes other tokens of the same messages than it must.

    Attributes:
        got: What it makes, from the place on that was compared.
        expected: What it would have to.
        position: The first token that differs, in both.
    """

    def __init__(self, message: str, *, got: list[int], expected: list[int], position: int) -> None:
        super().__init__(message)
        self.got = got
        self.expected = expected
        self.position = position


class TrajectoryError(RolloutError):
    """Tokens, mask or logprobs would no longer describe one exact token sequence."""


class UnsendableTextError(TrajectoryError):
    """A token of an image or another medium, or its text, stands for none: no engine takes it.

    Attributes:
        is_sampled: The policy has sampled it in the turn that fails, so that no prompt is to blame.
    """

    def __init__(self, message: str, *, is_sampled: bool = False) -> None:
        super().__init__(message)
        self.is_sampled = is_sampled


class ResumeError(RolloutError):
    """The saved state of an aborted episode can't be written, read, or used with its tokens."""


class BudgetExhaustedError(RolloutError):
    """No token of a budget is left for another model turn, or for the rest of an aborted one.

    Attributes:
        budget: The budget's name: "turn", "response" or "context".
    """

    def __init__(self, message: str, *, budget: str) -> None:
        super().__init__(message)
        self.budget = budget


class EngineError(RolloutError):
    """A server (SGLang, a router before it, or a chat API) did not deliver a generation."""


class EngineUnavailableError(EngineError):
    """The server can't be reached, or keeps answering 429, 500, 502, 503 or 504."""


class EngineRejectedError(EngineError):
    """The server refused the request itself (400, 404, 422 ...); sending it again can't help.

    Attributes:
        status_code: The HTTP status.
    """

    def __init__(self, message: str, *, status_code: int) -> None:
        super().__init__(message)
        self.status_code = status_code


class EngineOverlongError(EngineRejectedError):
    """The request is longer than the server's context.

    Attributes:
        context_length: The server's limit in tokens, where its message names it.
    """

    def __init__(self, message: str, *, status_code: int, context_length: int | None) -> None:
        super().__init__(message, status_code=status_code)
        self.context_length = context_length


class EngineResponseError(EngineError):
    """The server answered 200 with something that is not a valid generation."""


class EngineAbortedError(EngineError):
    """The server aborted the generation (finish_reason "abort"), by request or for a weight update."""


class ToolError(RolloutError):
    """A tool can't be loaded or is not a Strands tool."""


class SandboxError(RolloutError):
    """The code executor itself failed; never the fault of the code that it was given."""


class UnplayableAgentError(ConfigError):
    """An agent that takes part in an episode can't be played as it was made, or asked; never the policy's fault."""


class NoModelError(UnplayableAgentError):
    """An agent that takes part in an episode was given no model, so that it asks Strands' default."""


class BlockingCallError(UnplayableAgentError):
    """An agent was asked without `await` on the event loop that plays episodes, all of which would stand still."""


class TeamLimitError(RolloutError):
    """A swarm or graph ended at a limit of its own, such as its handoffs."""


class EnvironmentFaultError(RolloutError):
    """A resource or the environment of an episode failed, or a judge of it; never the fault of the policy."""


class LostEpisodeError(RolloutError):
    """The process that ran an episode died, and nothing can continue the episode."""


class FailedGroupsError(RolloutError):
    """So many groups of training samples have failed in a row that the run is ended."""


class WorkersLostError(FailedGroupsError):
    """An episode worker dies again and again, so that the run is ended."""


class ExportError(RolloutError):
    """A sample, a request or an answer has no form that another trainer takes."""


class DumpError(RolloutError):
    """A dump can't be written, or can't be read: it is broken, of a newer version, or holds what is not read."""
