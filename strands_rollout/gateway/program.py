"""Episodes that a user's program plays with requests to the gateway; the gateway records the policy's exact tokens.

A program is a function or a command. `ProgramRun` calls the function within the episode's limits; for a command, it
calls `play_command`, which runs the command in a process.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import os
import re
import secrets
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from strands_rollout import errors
from strands_rollout.agent.environment import Task, call_user_code, checked_score, describe_failure
from strands_rollout.agent.limits import LENGTH_REASONS, EpisodeLimits, StopReason
from strands_rollout.agent.run import SEVERAL_SEGMENTS, Ending, Episode, EpisodeRun, Journal, ProgramOutcome
from strands_rollout.control import Control
from strands_rollout.gateway.server import SharedGateway
from strands_rollout.gateway.session import Session, SessionEndedError
from strands_rollout.model.sglang_model import SGLangModel
from strands_rollout.own_loop import OwnLoop
from strands_rollout.record.record import Conversation, Reply, StrandsMessages
from strands_rollout.record.saved import EpisodeProgress
from strands_rollout.settings import AgentCommand
from strands_rollout.user_code import find_file

logger = logging.getLogger(__name__)

_MAX_OUTPUT_BYTES: Final = 4096
_CANCEL_TIMEOUT_S: Final = 1.0
_OTHER_MAIN: Final = "another conversation became the main one"  # reason why the episode can't be continued
# environment variable that marks the processes of an episode
_MARK: Final = "STRANDS_ROLLOUT_EPISODE"
# environment variables that a process inherits; others may hold keys, and the policy must not see keys
_INHERITED: Final = re.compile(
    r"PATH|LANG|LC_\w+|TZ|USER|LOGNAME|LD_LIBRARY_PATH|VIRTUAL_ENV|SSL_CERT_\w+|NODE_EXTRA_CA_CERTS"
)
_PLACEHOLDER: Final = re.compile(r"\{(prompt|task|url|base_url|api_key|model)\}")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The endpoint for a program's requests to the policy.

    Attributes:
        base_url: URL for OpenAI's clients, which ends in `/v1`.
        api_key: API key of this episode, which is refused once the program has ended or was stopped.
        model: The model's name.
    """

    base_url: str
    api_key: str
    model: str

    @property
    def url(self) -> str:
        """URL for Anthropic's clients, without `/v1`."""
        return self.base_url.removesuffix("/v1")

    @property
    def env(self) -> dict[str, str]:
        """The endpoint as environment variables that clients of OpenAI's and Anthropic's APIs read."""
        models = ("ANTHROPIC_MODEL", "ANTHROPIC_DEFAULT_HAIKU_MODEL", "ANTHROPIC_SMALL_FAST_MODEL", "OPENAI_MODEL")
        keys = ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN")
        urls = {"OPENAI_BASE_URL": self.base_url, "OPENAI_API_BASE": self.base_url, "ANTHROPIC_BASE_URL": self.url}
        return {**urls, **dict.fromkeys(keys, self.api_key), **dict.fromkeys(models, self.model)}


@dataclass(frozen=True, slots=True)
class Program:
    """A user's program that plays an episode.

    Attributes:
        name: Name of the program in messages: its setting and, for a function, the path.
        play: The function that plays the episode.
        may_replay: True if the program may be started again to repeat an aborted attempt from its record.
        loop: The loop that runs the program's coroutines; None for the running loop.
    """

    name: str
    play: Callable[[Task, Endpoint], Any]
    may_replay: bool = False
    loop: OwnLoop | None = None


@dataclass(frozen=True, slots=True)
class ProcessEnd:
    """The end of a process.

    Attributes:
        exit_code: Exit code of the process; -N if signal N ended it.
        output: The last 4096 bytes of its stdout and stderr, as text.
        escaped: Number of killed descendants that had left the process group, as `_kill_marked` counts them.
    """

    exit_code: int
    output: str
    escaped: int


class ProgramRun(EpisodeRun):
    """An episode that a program plays at the gateway.

    Args:
        program: The program.
        model: A model for this episode alone, resumed if `progress` is given.
        task: The task.
        limits: The episode's limits.
        control: The episode's control.
        progress: The state of an aborted attempt; the program repeats the attempt, then continues it. None for a new
            episode.
        journal: Stores each turn of the main conversation, so that another process can start the program again and
            continue the episode; None for no journal.
    """

    player_name = "the program"

    def __init__(
        self,
        program: Program,
        model: SGLangModel,
        task: Task,
        limits: EpisodeLimits,
        control: Control,
        *,
        progress: EpisodeProgress | None = None,
        journal: Journal | None = None,
    ) -> None:
        start = progress or EpisodeProgress((), 0)
        super().__init__(model, control, limits, start)
        self.program, self.task, self.journal, self.is_resumable = program, task, journal, program.may_replay
        self.session = Session(model, self)
        if progress is not None:
            self.session.restore(progress.messages)
        # numbers of tool iterations and tool calls
        main_counts = [start.tool_iterations, start.tool_calls]
        self.counts_by_conversation: dict[Conversation, list[int]] = {model.conversation: main_counts}
        turns = model.trajectory.turns
        self.user_turns = _count_user_turns(start.messages, len(turns) - model.trajectory.is_open)
        self.limit: StopReason | None = None
        self.must_end = asyncio.Event()  # set at a limit or an abort
        calls = (block["toolUse"] for message in start.messages for block in message["content"] if "toolUse" in block)
        self.tool_names = {call["toolUseId"]: call["name"] for call in calls}
        self.counted_results = {call["id"] for call in start.calls}
        self.result: object = None
        self.score: dict[str, Any] | None = None
        self.process: ProcessEnd | None = None
        self.journaled_conversation: Conversation | None = None

    async def _play(self) -> Ending:
        self.result = result = await self._run_program()
        if not self.must_end.is_set():
            self.session.end_replay()
        if not isinstance(result, str | ProcessEnd | None):
            self.score = checked_score(result, self.program.name)
        return self._ordinary_end()

    def on_request(self, conversation: Conversation, messages: StrandsMessages, waited_s: float | None) -> None:
        """Count the tool results and user turns of a request, and end the session at the limit of user turns."""
        results = [block["toolResult"] for message in messages for block in message["content"] if "toolResult" in block]
        new = [result for result in results if waited_s is not None and result["toolUseId"] not in self.counted_results]
        for result in new:
            use_id, status = result["toolUseId"], result["status"]
            self.stats.errors += status == "error"
            call = {"id": use_id, "tool": self.tool_names.get(use_id, ""), "status": status, "s": waited_s}
            self.stats.calls.append({**call, "at_s": self.control.step_start_s(waited_s or 0.0)})
            self.stats.seconds += waited_s or 0.0
            self.counted_results.add(use_id)
            if status == "success":
                self.stats.succeeded.add(use_id)
        self.stats.waited_s += (waited_s or 0.0) if new else 0.0
        # a user turn brings new messages without results; a repeated request of an interrupted turn has no new message
        if waited_s is not None and messages and not results and conversation is self.session.main:
            limit = self.limits.max_user_turns
            if limit is not None and self.user_turns >= limit:
                self._reach_limit(StopReason.MAX_USER_TURNS)
            self.user_turns += 1

    def on_turn(self, conversation: Conversation, reply: Reply) -> None:
        """Count the calls of a turn, and add a turn of the main conversation to the journal.

        A turn whose calls exceed a limit ends the session.
        """
        if reply.calls:
            self._count_calls(conversation, reply)
        if self.journal is not None and conversation is self.model.conversation:
            self._record_turn(self.journal)

    def _count_calls(self, conversation: Conversation, reply: Reply) -> None:
        counts = self.counts_by_conversation.setdefault(conversation, [0, 0])
        iterations, calls = self.limits.max_tool_iterations, self.limits.max_tool_calls
        if iterations is not None and counts[0] >= iterations:
            self._reach_limit(StopReason.MAX_TOOL_ITERATIONS)
        if calls is not None and counts[1] + len(reply.calls) > calls:
            self._reach_limit(StopReason.MAX_TOOL_CALLS)
        counts[0] += 1
        counts[1] += len(reply.calls)
        self.tool_names |= {call["toolUseId"]: call["name"] for call in reply.calls}

    def _record_turn(self, journal: Journal) -> None:
        main = self.model.conversation
        if len(main.branches) > 1:
            journal.close(SEVERAL_SEGMENTS)
            return
        if self.journaled_conversation not in (None, main):
            journal.close(_OTHER_MAIN)
            return
        self.journaled_conversation = main
        journal.call_ended(self.progress())

    def on_abort(self) -> None:
        """End the episode after an abort, so that the client's retries don't continue it."""
        self.must_end.set()

    def on_restart(self, conversation: Conversation, messages: StrandsMessages, kept: Sequence[Reply]) -> None:
        """Replace the counts of an earlier attempt with the counts of the turns that are kept."""
        calls = [len(reply.calls) for reply in kept]
        self.counts_by_conversation[conversation] = [sum(count > 0 for count in calls), sum(calls)]
        blocks = [block for message in messages for block in message["content"]]
        answered = {block["toolResult"]["toolUseId"] for block in blocks if "toolResult" in block}
        stats = self.stats
        stats.calls[:] = [call for call in stats.calls if call["id"] in answered]
        self.counted_results &= answered  # later calls may have the ids of dropped calls
        self.user_turns = _count_user_turns(messages, len(kept))
        stats.errors = sum(call["status"] == "error" for call in stats.calls)
        stats.seconds, stats.timeouts = sum(call["s"] for call in stats.calls), 0

    def _reach_limit(self, limit: StopReason) -> None:
        self.limit = limit
        self.must_end.set()
        raise SessionEndedError(f"the limit {limit} of this episode is reached")

    async def _run_program(self) -> object:
        """Return the program's result; None if it was stopped."""
        gateway = await SharedGateway.running()
        key = gateway.add(self.session)
        endpoint = Endpoint(f"{gateway.base_url}/v1", key, self.model.config["model_id"] or "policy")
        playing = asyncio.ensure_future(call_user_code(self.program.play, self.task, endpoint, loop=self.program.loop))
        must_end = asyncio.ensure_future(self.must_end.wait())
        try:
            await asyncio.wait([playing, must_end], return_when=asyncio.FIRST_COMPLETED)
            return playing.result() if playing.done() else None
        finally:
            must_end.cancel()
            playing.cancel()
            await gateway.remove(key, SessionEndedError("its program has ended, or was stopped"))
            # a program that ignores its cancellation is left running; the gateway refuses its key
            await asyncio.wait([playing], timeout=_CANCEL_TIMEOUT_S)
            if playing.done() and not playing.cancelled():
                outcome = playing.exception() or playing.result()
                self.process = outcome if isinstance(outcome, ProcessEnd) else getattr(outcome, "process", None)

    def _root_cause(self) -> Ending | None:
        """Return the ending if a limit or an error of the policy's turns made the program's requests fail; else None.

        A ConfigError is the client's fault, such as an image for a text model. It is not a root cause, so the timeout
        takes precedence.
        """
        if self.limit is not None:
            return self.limit, None
        fault = self.session.error
        is_client_fault = isinstance(fault, errors.ConfigError)
        return None if fault is None or is_client_fault else self._ending_of(fault)

    def _ending_by_error(self, error: Exception) -> Ending:
        if self.session.error is not None:
            return self._ending_of(self.session.error)
        is_programs_own = not isinstance(error, errors.RolloutError) or isinstance(error, errors.ToolError)
        if is_programs_own:
            error = errors.ConfigError(describe_failure(self.program.name, error, self.task))
        # clients may raise an error for an answer cut off by a token limit; then the limit is the stop reason
        if self._is_cut and (is_programs_own or isinstance(error, CommandError)):
            return LENGTH_REASONS[self.model.cut_by or "turn"], error
        return self._ending_of(error)

    def _ordinary_end(self) -> Ending:
        if self.session.error is not None:
            return self._ending_of(self.session.error)
        if not self.model.conversation.turn_count:
            message = (
                f"{self.program.name} ended without an answer of the policy; expected the policy to answer at least "
                "one of the program's requests to the endpoint"
            )
            return StopReason.SETUP_ERROR, errors.ConfigError(message)
        if self._is_cut:
            return LENGTH_REASONS[self.model.cut_by or "turn"], None
        return StopReason.COMPLETED, None

    @property
    def _is_cut(self) -> bool:
        return self.model.conversation.branch.stop_reason == "max_tokens"

    def _finish(self, ending: Ending) -> Episode:
        episode = super()._finish(ending)
        facts = self.session.facts.as_json()
        dropped = facts.pop("dropped_tokens")
        if self.process is not None:
            facts["process"] = asdict(self.process)
        text = self.result if isinstance(self.result, str) else None
        episode.program = ProgramOutcome(text, self.score, facts, dropped if facts["diverged"] else None)
        self.session.release()
        return episode

    def _history(self) -> Sequence[Mapping[str, Any]]:
        return self.session.main_messages

    def _counts(self) -> tuple[int, int]:
        iterations, calls = self.counts_by_conversation.get(self.model.conversation, (0, 0))
        return iterations, calls


def _count_user_turns(messages: Sequence[Mapping[str, Any]], turns: int) -> int:
    """Return how many of the policy's last `turns` answers are followed by a user turn.

    User messages with tool results are not a user turn.
    """
    answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    policy_answers = answers[max(0, len(answers) - turns) :]
    replies = [messages[begin + 1 : end] for begin, end in pairwise((*policy_answers, len(messages)))]
    return sum(
        bool(reply) and not any("toolResult" in block for message in reply for block in message["content"])
        for reply in replies
    )


class CommandError(errors.ConfigError):
    """A command's process could not be started, or ended with an unexpected exit code.

    Attributes:
        process: The end of the process; None if it was not started.
    """

    def __init__(self, message: str, process: ProcessEnd | None = None) -> None:
        super().__init__(message)
        self.process = process


async def play_command(command: AgentCommand, task: Task, endpoint: Endpoint) -> ProcessEnd:
    """Run a command's process in its own session and process group, with a scratch folder as HOME.

    Afterwards, kill the processes that the command has left, and remove the folder.

    Raises:
        CommandError: The process can't be started, or ends with an unexpected exit code.
    """
    scratch = tempfile.mkdtemp(prefix="strands-rollout-")
    try:
        task_file = Path(scratch) / "task.json"
        task_json = {"messages": task.messages, "metadata": task.metadata, "index": task.index}
        task_file.write_text(json.dumps(task_json, default=str), encoding="utf-8")
        values = {"prompt": task.text, "task": str(task_file), "url": endpoint.url}
        values |= {name: getattr(endpoint, name) for name in ("base_url", "api_key", "model")}
        fill = functools.partial(_PLACEHOLDER.sub, lambda found: values[found[1]])
        first, *rest = shlex.split(command.command)
        argv = [sys.executable if first == "python" else fill(first), *map(fill, (*rest, *command.args))]
        mark = secrets.token_hex(16)
        env = {name: value for name, value in os.environ.items() if _INHERITED.fullmatch(name)}
        env |= {"HOME": scratch, "TMPDIR": scratch, _MARK: mark, **endpoint.env}
        env |= {name: fill(os.path.expandvars(value)) for name, value in command.env.items()}
        cwd = str(find_file(command.cwd)) if command.cwd is not None else scratch
        ended = await _run_process(argv, env, cwd, fill(command.stdin), mark)
    finally:  # remove the folder in a thread, since the policy may have left many files
        await asyncio.to_thread(shutil.rmtree, scratch, ignore_errors=True)
    if ended.exit_code not in command.exit_codes:
        raise CommandError(
            f"agent_command {command.command!r} ended with exit code {ended.exit_code}; expected "
            f"{' or '.join(map(str, command.exit_codes))}. The end of its output: {ended.output}",
            ended,
        )
    return ended


async def _run_process(argv: Sequence[str], env: Mapping[str, str], cwd: str, stdin: str, mark: str) -> ProcessEnd:
    # use files instead of pipes, since an escaped child process would keep pipes open
    with tempfile.TemporaryFile() as read, tempfile.TemporaryFile() as printed:
        read.write(stdin.encode())
        read.seek(0)
        try:
            process = await asyncio.create_subprocess_exec(
                *argv, env=env, cwd=cwd, stdin=read, stdout=printed, stderr=printed, start_new_session=True
            )
        except (OSError, ValueError) as e:
            raise CommandError(f"agent_command can't start {argv[0]!r} in {cwd}: {e}") from e
        try:
            await process.wait()
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            escaped = await asyncio.to_thread(_kill_marked, mark, process.pid)
            await process.wait()
        printed.seek(max(0, printed.seek(0, os.SEEK_END) - _MAX_OUTPUT_BYTES))
        output = printed.read().decode(errors="replace").strip()
    return ProcessEnd(process.returncode or 0, output, escaped)


def _kill_marked(mark: str, group: int) -> int:
    """Kill processes that have an episode's mark and are not in the process group `group` (Linux only).

    Returns:
        The largest number of processes found in one pass.
    """
    found = 0
    for _ in range(3):  # each pass kills processes that were started during the previous pass
        alive = 0
        for entry in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                pid = int(entry.parent.name)
                if mark.encode() in entry.read_bytes() and os.getpgid(pid) != group:
                    os.kill(pid, signal.SIGKILL)
                    alive += 1
        if not alive:
            break
        found = max(found, alive)
    return found
