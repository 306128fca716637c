"""An episode that a program plays in any way it likes, against an endpoint that keeps the policy's exact tokens.

The program is the user's async function, or a process: `play_program` runs it within the episode's limits, and
`play_command` is the function that runs a process.
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
from strands_rollout.agent.episode import SEVERAL_SEGMENTS, Episode, Journal, ProgramOutcome
from strands_rollout.agent.limits import LENGTH_REASONS, EpisodeLimits, StopReason, end_at_deadline, stop_reason_of
from strands_rollout.agent.tool_call import ToolStats
from strands_rollout.control import Control
from strands_rollout.gateway.server import SharedGateway
from strands_rollout.gateway.session import Session, SessionEndedError
from strands_rollout.model.sglang_model import SGLangModel
from strands_rollout.own_loop import OwnLoop
from strands_rollout.record.branch import Conversation, Reply, StrandsMessages
from strands_rollout.record.saved import EpisodeProgress
from strands_rollout.settings import AgentCommand
from strands_rollout.user_code import beside

logger = logging.getLogger(__name__)

_LAST_OUTPUT_BYTES: Final = 4096
_CANCEL_S: Final = 1.0
_OTHER_MAIN: Final = "its main conversation has become another"
_MARK: Final = "STRANDS_ROLLOUT_EPISODE"
# of this process's environment; what else is in it, such as keys, is none of the policy's business
_INHERITED: Final = re.compile(
    r"PATH|LANG|LC_\w+|TZ|USER|LOGNAME|LD_LIBRARY_PATH|VIRTUAL_ENV|SSL_CERT_\w+|NODE_EXTRA_CA_CERTS"
)
_PLACE: Final = re.compile(r"\{(prompt|task|url|base_url|api_key|model)\}")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a program asks the policy.

    Attributes:
        base_url: As OpenAI's clients take it; it ends in `/v1`.
        api_key: Of this episode alone; it is refused when the episode is over.
        model: The model's name.
        env: The same as environment variables that clients of OpenAI's and Anthropic's APIs read.
    """

    base_url: str
    api_key: str
    model: str

    @property
    def url(self) -> str:
        """The base URL as Anthropic's clients take it, without `/v1`."""
        return self.base_url.removesuffix("/v1")

    @property
    def env(self) -> dict[str, str]:
        """See above."""
        models = ("ANTHROPIC_MODEL", "ANTHROPIC_DEFAULT_HAIKU_MODEL", "ANTHROPIC_SMALL_FAST_MODEL", "OPENAI_MODEL")
        keys = ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN")
        urls = {"OPENAI_BASE_URL": self.base_url, "OPENAI_API_BASE": self.base_url, "ANTHROPIC_BASE_URL": self.url}
        return {**urls, **dict.fromkeys(keys, self.api_key), **dict.fromkeys(models, self.model)}


@dataclass(frozen=True, slots=True)
class Program:
    """What plays an episode.

    Attributes:
        name: In messages, as the settings name it.
        play: The function.
        may_replay: Whether it may be started again, against the record of an attempt that was aborted.
        loop: Where its coroutines run; None for the running loop.
    """

    name: str
    play: Callable[[Task, Endpoint], Any]
    may_replay: bool = False
    loop: OwnLoop | None = None


@dataclass(frozen=True, slots=True)
class ProcessEnd:
    """How a process ended: its exit code, the end of its output, and how many had left its process group."""

    exit_code: int
    output: str
    escaped: int


async def play_program(
    program: Program,
    model: SGLangModel,
    task: Task,
    *,
    limits: EpisodeLimits,
    control: Control,
    progress: EpisodeProgress | None = None,
    journal: Journal | None = None,
) -> Episode:
    """Let a program play an episode on a model of its own, which was resumed where there is `progress`.

    A `journal` is told of each turn of the main conversation, against which the program can be started again.

    Raises:
        asyncio.CancelledError: The caller was cancelled. Nothing else: every other failure is in the result.
    """
    with control.running(0.0 if progress is None else progress.duration_s):
        return await _Run(program, model, task, limits, control, progress, journal).play()


class _Run:
    """One episode while it runs; as the session's watch it counts requests and turns, and ends it at a limit."""

    def __init__(
        self,
        program: Program,
        model: SGLangModel,
        task: Task,
        limits: EpisodeLimits,
        control: Control,
        progress: EpisodeProgress | None,
        journal: Journal | None,
    ) -> None:
        self.program, self.model, self.task, self.limits = program, model, task, limits
        self.control = control
        self.journal = journal
        self.begun = begun = progress or EpisodeProgress((), 0)
        self.stats = ToolStats(
            control, begun.tool_s, begun.tool_errors, begun.tool_timeouts, calls=list(map(dict, begun.calls))
        )
        self.session = Session(model, self)
        if progress is not None:
            self.session.restore(progress.messages)
        self.counts: dict[Conversation, list[int]] = {model.conversation: [begun.tool_iterations, begun.tool_calls]}
        turns = model.trajectory.turns
        self.user_turns = _user_turns(begun.messages, len(turns) - model.trajectory.is_open)
        self.limit: StopReason | None = None
        self.tripped = asyncio.Event()
        calls = (block["toolUse"] for message in begun.messages for block in message["content"] if "toolUse" in block)
        self.names = {call["toolUseId"]: call["name"] for call in calls}
        self.counted = {call["id"] for call in begun.calls}
        self.process: ProcessEnd | None = None
        self.recorded: Conversation | None = None  # that the journal is told of

    async def play(self) -> Episode:
        limit_s = self.limits.episode_timeout_s
        deadline = self.control.deadline(self.control.left_s(limit_s), model=self.model)
        given, score, raised = None, None, None
        try:
            async with deadline:
                given = await self._played()
            if not self.tripped.is_set():
                self.session.end_replay()
            if not isinstance(given, str | ProcessEnd | None):
                score = checked_score(given, self.program.name)
        except Exception as e:  # a user's program may raise anything, which is data for the caller
            raised = e
        reason, error = self._end(raised)
        if deadline.expired():
            fault = self.model.engine_fault
            reason, error = end_at_deadline(was_aborted=deadline.was_aborted, limit_s=limit_s, fault=fault)
        progress = self._progress()
        facts = self.session.facts.as_json()
        dropped = facts.pop("dropped_tokens")
        if self.process is not None:
            facts["process"] = asdict(self.process)
        text = given if isinstance(given, str) else None
        told = ProgramOutcome(text, score, facts, dropped if facts["diverged"] else None)
        return Episode(
            stop_reason=reason,
            error=error,
            tool_iterations=progress.tool_iterations,
            tool_calls=progress.tool_calls,
            tools=self.stats,
            duration_s=progress.duration_s,
            limits=self.limits,
            progress=progress,
            user_turns=self.user_turns,
            is_resumable=self.program.may_replay,
            program=told,
        )

    def on_request(self, conversation: Conversation, messages: StrandsMessages, waited_s: float | None) -> None:
        """A request has brought these messages, so many seconds after the answer before them."""
        results = [block["toolResult"] for message in messages for block in message["content"] if "toolResult" in block]
        fresh = [result for result in results if waited_s is not None and result["toolUseId"] not in self.counted]
        for result in fresh:
            use_id, status = result["toolUseId"], result["status"]
            self.stats.errors += status == "error"
            call = {"id": use_id, "tool": self.names.get(use_id, ""), "status": status, "s": waited_s}
            self.stats.calls.append({**call, "at_s": self.control.at_s(waited_s or 0.0)})
            self.stats.seconds += waited_s or 0.0
            self.counted.add(use_id)
            if status == "success":
                self.stats.succeeded.add(use_id)
        self.stats.waited_s += (waited_s or 0.0) if fresh else 0.0
        # a turn that was interrupted is asked again without anything new
        if waited_s is not None and messages and not results and conversation is self.session.main:
            most = self.limits.max_user_turns
            if most is not None and self.user_turns >= most:
                self._trip(StopReason.MAX_USER_TURNS)
            self.user_turns += 1

    def on_turn(self, conversation: Conversation, reply: Reply) -> None:
        """A turn was sampled, which may be one too many."""
        if reply.calls:
            self._count_calls(conversation, reply)
        if self.journal is not None and conversation is self.model.conversation:
            self._record_turn(self.journal)

    def _count_calls(self, conversation: Conversation, reply: Reply) -> None:
        counts = self.counts.setdefault(conversation, [0, 0])
        iterations, calls = self.limits.max_tool_iterations, self.limits.max_tool_calls
        if iterations is not None and counts[0] >= iterations:
            self._trip(StopReason.MAX_TOOL_ITERATIONS)
        if calls is not None and counts[1] + len(reply.calls) > calls:
            self._trip(StopReason.MAX_TOOL_CALLS)
        counts[0] += 1
        counts[1] += len(reply.calls)
        self.names |= {call["toolUseId"]: call["name"] for call in reply.calls}

    def _record_turn(self, journal: Journal) -> None:
        """Let another process answer the main conversation's turns as they were; its calls are made again there."""
        main = self.model.conversation
        if len(main.branches) > 1:
            journal.close(SEVERAL_SEGMENTS)
            return
        if self.recorded not in (None, main):
            journal.close(_OTHER_MAIN)
            return
        self.recorded = main
        journal.call_ended(self._progress())

    def on_abort(self) -> None:
        """The engine has aborted a turn, which ends the episode, whether or not the client would ask again."""
        self.tripped.set()

    def on_restart(self, conversation: Conversation, messages: StrandsMessages, kept: Sequence[Reply]) -> None:
        """Count what is kept of an earlier attempt, and nothing else of it."""
        calls = [len(reply.calls) for reply in kept]
        self.counts[conversation] = [sum(count > 0 for count in calls), sum(calls)]
        blocks = [block for message in messages for block in message["content"]]
        told = {block["toolResult"]["toolUseId"] for block in blocks if "toolResult" in block}
        stats = self.stats
        stats.calls[:] = [call for call in stats.calls if call["id"] in told]
        self.counted &= told  # a turn may have calls of the same ids again
        self.user_turns = _user_turns(messages, len(kept))
        stats.errors = sum(call["status"] == "error" for call in stats.calls)
        stats.seconds, stats.timeouts = sum(call["s"] for call in stats.calls), 0

    def _trip(self, limit: StopReason) -> None:
        self.limit = limit
        self.tripped.set()
        raise SessionEndedError(f"the limit {limit} of this episode is reached")

    async def _played(self) -> object:
        """What the program gives; nothing more is answered when this returns, however it does."""
        gateway = await SharedGateway.running()
        key = gateway.add(self.session)
        endpoint = Endpoint(f"{gateway.base_url}/v1", key, self.model.config["model_id"] or "policy")
        playing = asyncio.ensure_future(call_user_code(self.program.play, self.task, endpoint, loop=self.program.loop))
        tripped = asyncio.ensure_future(self.tripped.wait())
        try:
            await asyncio.wait([playing, tripped], return_when=asyncio.FIRST_COMPLETED)
            return playing.result() if playing.done() else None
        finally:
            tripped.cancel()
            playing.cancel()
            await gateway.remove(key, SessionEndedError("its program has ended, or was stopped"))
            # what does not end is left alone, with a key that is refused
            await asyncio.wait([playing], timeout=_CANCEL_S)
            if playing.done() and not playing.cancelled():
                ended = playing.exception() or playing.result()
                self.process = ended if isinstance(ended, ProcessEnd) else getattr(ended, "process", None)

    def _end(self, error: Exception | None) -> tuple[StopReason, Exception | None]:
        """Why it ended: what the endpoint had to refuse explains what the program raised after it."""
        conversation, fault = self.model.conversation, self.session.error
        has_turns, cut_by = conversation.turn_count > 0, self.model.cut_by
        was_cut = conversation.branch.stop_reason == "max_tokens"
        if self.limit is not None:
            return self.limit, None
        if fault is not None:
            return stop_reason_of(fault, cut_by=cut_by, has_turns=has_turns), fault
        if error is not None:
            is_programs_own = not isinstance(error, errors.RolloutError) or isinstance(error, errors.ToolError)
            if is_programs_own:
                error = errors.ConfigError(describe_failure(self.program.name, error, self.task))
            if was_cut and (is_programs_own or isinstance(error, CommandError)):
                return LENGTH_REASONS[cut_by or "turn"], error  # clients raise at a cut answer, which is the policy's
            return stop_reason_of(error, cut_by=cut_by, has_turns=has_turns), error
        if not has_turns:
            words = f"{self.program.name} has ended without asking the policy; expected a request to the endpoint"
            return StopReason.SETUP_ERROR, errors.ConfigError(words)
        if was_cut:
            return LENGTH_REASONS[cut_by or "turn"], None
        return StopReason.COMPLETED, None

    def _progress(self) -> EpisodeProgress:
        """Return where the main conversation stands, against which the program can be started again."""
        stats = self.stats
        iterations, calls = self.counts.get(self.model.conversation, (0, 0))
        return EpisodeProgress(
            messages=self.session.main_messages,
            covered=self.model.conversation.branch.covered,
            tool_iterations=iterations,
            tool_calls=calls,
            tool_errors=stats.errors,
            tool_timeouts=stats.timeouts,
            tool_s=stats.seconds,
            duration_s=self.control.elapsed_s,
            calls=stats.calls,
        )


def _user_turns(messages: Sequence[Mapping[str, Any]], turns: int) -> int:
    """How often the user has spoken after the first of so many last turns of the policy."""
    answers = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
    own = answers[max(0, len(answers) - turns) :]
    said = [messages[begin + 1 : end] for begin, end in pairwise((*own, len(messages)))]
    return sum(
        bool(given) and not any("toolResult" in block for message in given for block in message["content"])
        for given in said
    )


class CommandError(errors.ConfigError):
    """A process can't be started, or has failed.

    Attributes:
        process: How it ended, where it was started.
    """

    def __init__(self, message: str, process: ProcessEnd | None = None) -> None:
        super().__init__(message)
        self.process = process


async def play_command(command: AgentCommand, task: Task, endpoint: Endpoint) -> ProcessEnd:
    """Run a process in a session, a process group and a scratch folder of its own, all of which end with it.

    Raises:
        CommandError: It can't be started, or its exit code is none of those that are expected.
    """
    scratch = tempfile.mkdtemp(prefix="strands-rollout-")
    try:
        told = Path(scratch) / "task.json"
        shown = {"messages": task.messages, "metadata": task.metadata, "index": task.index}
        told.write_text(json.dumps(shown, default=str), encoding="utf-8")
        values = {"prompt": task.text, "task": str(told), "url": endpoint.url}
        values |= {name: getattr(endpoint, name) for name in ("base_url", "api_key", "model")}
        filled = functools.partial(_PLACE.sub, lambda found: values[found[1]])
        first, *rest = shlex.split(command.command)
        argv = [sys.executable if first == "python" else filled(first), *map(filled, (*rest, *command.args))]
        mark = secrets.token_hex(16)
        env = {name: value for name, value in os.environ.items() if _INHERITED.fullmatch(name)}
        env |= {"HOME": scratch, "TMPDIR": scratch, _MARK: mark, **endpoint.env}
        env |= {name: filled(os.path.expandvars(value)) for name, value in command.env.items()}
        cwd = str(beside(command.cwd)) if command.cwd is not None else scratch
        ended = await _process(argv, env, cwd, filled(command.stdin), mark)
    finally:  # a policy may have left any number of files
        await asyncio.to_thread(shutil.rmtree, scratch, ignore_errors=True)
    if ended.exit_code not in command.exit_codes:
        words = f"agent_command {command.command!r} ended with exit code {ended.exit_code}"
        raise CommandError(
            f"{words}; expected one of {command.exit_codes}. The end of its output: {ended.output}", ended
        )
    return ended


async def _process(argv: Sequence[str], env: Mapping[str, str], cwd: str, stdin: str, mark: str) -> ProcessEnd:
    # files in the place of pipes, which a child that has left would keep open
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
        printed.seek(max(0, printed.seek(0, os.SEEK_END) - _LAST_OUTPUT_BYTES))
        output = printed.read().decode(errors="replace").strip()
    return ProcessEnd(process.returncode or 0, output, escaped)


def _kill_marked(mark: str, group: int) -> int:
    """Kill the processes outside of a group that have an episode's mark in their environment; how many. Linux only."""
    found = 0
    for _ in range(3):  # one may be starting another
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
