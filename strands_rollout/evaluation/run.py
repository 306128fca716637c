"""The commands `eval` and `demo`.

`eval` saves each result as it arrives, and finally a report; `demo` prints results and a transcript, and writes a dump
of its samples. Start reading at `run_evaluation`.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any, Final

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from strands_rollout import __version__, dump
from strands_rollout.client.transport import parse_base_url, redacted
from strands_rollout.dump import TokenTexts
from strands_rollout.dump.record import TokenizerIdentity, masked_values
from strands_rollout.dump.terminal import make_console, print_transcript, progress_bar, show_next
from strands_rollout.errors import ConfigError, DumpError
from strands_rollout.evaluation.evaluate import RunPlan, Summary, evaluate
from strands_rollout.evaluation.plan import DEFAULT_KS, EvalSet, SampleKey, load_sets
from strands_rollout.evaluation.protocols import find_protocol
from strands_rollout.evaluation.results import (
    ResultsFile,
    SampleResult,
    evaluation_report,
    report_notes,
    run_identity,
    without_problems,
)
from strands_rollout.files.json_files import write_json
from strands_rollout.play.engine import (
    SHIPPED_MODEL_EXECUTOR,
    fetch_engine_info,
    fetch_tokenizer_folder,
    load_settings,
    served_engine,
    shipped_model_note,
    start_executor,
    tokenizer_folder,
)
from strands_rollout.play.options import DemoOptions, EvalOptions, merge_changes, slime_sampling_params
from strands_rollout.play.player import Outcome, Player, open_player
from strands_rollout.play.rows import shipped_rows, take_rows
from strands_rollout.samples import PART_PREFIX, Sample, finished_samples, question_of
from strands_rollout.secret_mask import find_secrets, mask_values
from strands_rollout.settings import CODE_TOOL_PATH, RolloutSettings
from strands_rollout.slime_plugin.drift import DriftMeter, evenly_spread, measure_some
from strands_rollout.slime_plugin.slime_adapter import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
EXIT_OK: Final = 0
EXIT_FAILED: Final = 1
EXIT_INTERRUPTED: Final = 130
REPORT_NAME: Final = "report.json"
_MIN_CONSECUTIVE_FAILURES: Final = 8
_MAX_ERROR_KINDS: Final = 5
_COUNTS: Final = ("sampled_tokens", "turns", "tool_calls", "tool_errors", "unknown_tools", "parse_failures")
_LEFT_ALIGNED: Final = frozenset({"question", "label", "predicted", "status", "stop reason", "majority"})
_OTHER_COLUMNS_WIDTH: Final = 84
_MIN_QUESTION_WIDTH, _MAX_QUESTION_WIDTH = 24, 60
_ANSWER_WIDTH: Final = 12
_MAJORITY_WIDTH: Final = 24
_MAX_VIOLATIONS_SHOWN: Final = 20
_MAX_ERRORS_SHOWN: Final = 5
_PROGRESS_LINES: Final = 10
_STATUS_STYLES: Final = {"completed": "green", "truncated": "yellow", "aborted": "yellow", "failed": "red"}


def run_evaluation(options: EvalOptions) -> int:
    """Run or resume an evaluation; the last line on stdout is the report without its entries per problem, as JSON.

    Returns:
        The exit code: 0 if every sample is scored and no check failed, 130 after Ctrl-C, else 1.

    Raises:
        RolloutError: The data, the engine, the tokenizer or the folder can't be used.
    """
    log = make_console(stderr=True)
    note = functools.partial(log.print, markup=False, soft_wrap=True)
    how_to_resume = f"finished samples are saved; to resume, run the same command with --out {options.out}"
    try:
        report = asyncio.run(_run(options, log, note))
    except KeyboardInterrupt:
        note(f"interrupted; {how_to_resume}")
        return EXIT_INTERRUPTED
    if not options.json_only:
        console = make_console()
        print_evaluation(console, report)
        console.print(f"report: {options.out / REPORT_NAME}", markup=False, soft_wrap=True)
    if not report["complete"]:
        note(how_to_resume)
    print(json.dumps(without_problems(report)), flush=True)
    if report["complete"] and not options.json_only:
        show_next("view", options.out)
    return EXIT_OK if report["complete"] and not report["violations"] else EXIT_FAILED


async def _run(options: EvalOptions, log: Console, note: Callable[[str], None]) -> dict[str, Any]:
    changes = merge_changes(options.changes, options.reward)
    settings = await load_settings(options.config, changes, options.base_url, options.model_dir)
    protocol = None if options.protocol is None else find_protocol(options.protocol)
    if protocol is not None:
        settings = protocol.apply_to(settings)
    sets = load_sets(options, settings, note, protocol)
    if text := shipped_model_note(settings, options.config, options.base_url, options.model_dir):
        note(text)
    for eval_set in sets:
        eval_set.check_settings(settings)
        if settings.needs_labels:
            eval_set.check_grading()
        samples = eval_set.sampling.samples
        for k in options.ks or ():
            if k > samples:
                note(f"{eval_set.name}: no pass@{k}, since each problem has {samples} samples")
    model_dir = options.model_dir.resolve() if options.model_dir else None
    async with served_engine(options.base_url, model_dir) as base_url:
        info = await fetch_engine_info(base_url)
        tokenizer_dir = options.tokenizer_dir or tokenizer_folder(info, base_url)
        known_limits = [limit for limit in (options.max_context_tokens, info.context_length) if limit is not None]
        check_response_fits(sets, min(known_limits, default=None))
        with ResultsFile(options.out, run_identity(options, sets, settings, info, tokenizer_dir)) as file:
            note(f"engine at {redacted(parse_base_url(base_url))}, results in {options.out}")
            session = EvaluationSession(options, settings, sets, file, note)
            if session.remaining:
                await session.play(base_url, tokenizer_dir, log)
            results_report = evaluation_report(sets, session.results, options.ks or DEFAULT_KS)
            report = {
                "protocol": options.protocol,
                **results_report,
                "notes": report_notes(results_report, info.weight_version),
                "model": info.model_path,
                "weight_version": info.weight_version,
                "strands_rollout": __version__,
                "session": session.facts(),
            }
            write_json(options.out / REPORT_NAME, report)
    failed = Counter(result.fault or result.stop_reason for result in session.results.values() if not result.is_scored)
    stopped = [f"stopped: {session.stopped}"] if session.stopped else []
    errors = [f"{count} failed: {error}" for error, count in failed.most_common(_MAX_ERROR_KINDS)]
    for message in [*stopped, *errors, *report["notes"]]:
        note(message)
    return report


def check_response_fits(sets: Sequence[EvalSet], context_tokens: int | None) -> None:
    """Raise a ConfigError if a protocol's responses may fill the whole context of `context_tokens` tokens.

    Do nothing if `context_tokens` is None.
    """
    for eval_set in sets:
        length = eval_set.sampling.max_new_tokens
        if eval_set.measurement and context_tokens is not None and length >= context_tokens:
            raise ConfigError(
                f"{eval_set.name}: got responses of up to {length} tokens and a context of {context_tokens} tokens; "
                "expected a context that holds the prompt and the response. Serve the model with a longer context "
                "(SGLang's --context-length), or shorten the responses with --max-new-tokens, which modifies the "
                "protocol"
            )


class EvaluationSession:
    """A session of a run: plays the samples that have no score, and saves each result as it arrives.

    Attributes:
        results: The last result of each sample, from this or an earlier session.
        remaining: The keys of the samples without a score at the start of the session, in the order of the data sets.
        stopped: The reason why the session ended before all samples were played; None if it did not.

    Raises:
        ConfigError: A line of the file is not a result of this run.
    """

    def __init__(
        self,
        options: EvalOptions,
        settings: RolloutSettings,
        sets: Sequence[EvalSet],
        file: ResultsFile,
        note: Callable[[str], None],
    ) -> None:
        self._options, self._settings, self._file = options, settings, file
        self._sets = {eval_set.name: eval_set for eval_set in sets}
        planned = [key for eval_set in sets for key in eval_set.sample_keys()]
        self.results = {result.key: result for result in file.results({*planned})}
        scored = {result.key for result in self.scored}
        self.remaining = [key for key in planned if key not in scored]
        self.stopped: str | None = None
        self._played = self._sampled_tokens = 0
        self._seconds = 0.0
        if file.dropped_bytes:
            note(f"{file.path}: dropped {file.dropped_bytes} bytes of a half-written last line")
        if self.results:
            failed = len(self.results) - len(scored)
            retried = f"; {failed} failed samples are played again" if failed else ""
            note(f"{len(scored)} samples have a score already{retried}")

    @property
    def scored(self) -> list[SampleResult]:
        """Return the results that have a score."""
        return [result for result in self.results.values() if result.is_scored]

    async def play(self, base_url: str, tokenizer_dir: Path, log: Console) -> None:
        """Play the remaining samples.

        Raises:
            RolloutError: A result can't be written, or the tokenizer or the sandbox can't be used.
        """
        options, settings = self._options, self._settings
        if CODE_TOOL_PATH in settings.tools:
            log.print(f"code runs with isolation {await start_executor(settings.executor)!r}")
        earlier = [result.is_right for result in self.scored]
        measured_keys = {key for eval_set in self._sets.values() for key in evenly_spread(list(eval_set.sample_keys()))}
        secrets = find_secrets(os.environ, settings.model_dump(mode="json"))
        async with open_player(
            base_url,
            tokenizer_dir,
            settings.model_dump(exclude_unset=True),
            audited=options.audits,
            evaluation=True,
            max_context_tokens=options.max_context_tokens,
            workers=options.workers,
        ) as player:
            meter = DriftMeter(player.tokenizer, tool_parser=settings.tool_parser)
            with accuracy_bar(log, len(self.remaining) + len(earlier), earlier) as show:

                async def run(key: SampleKey) -> SampleResult:
                    outcome, line = await self._play_sample(player, key)
                    if key in measured_keys:
                        drifts = measure_some(finished_samples(outcome.sample), meter)
                        # None if no sampled turn is recorded, or measuring failed
                        line["drift"] = drifts[0].counts if drifts else None
                    line = mask_values(line, secrets)
                    if options.keeps_tokens:
                        line["sample"] = masked_values(outcome.sample.to_dict(), secrets)
                        line["tokenizer"] = asdict(TokenizerIdentity.of(player.tokenizer))
                    result = self._save(line)
                    show(result.is_right if result.is_scored else None)
                    return result

                started = time.monotonic()
                self.stopped = await run_samples(self.remaining, run, concurrency=options.concurrency)
                self._seconds = time.monotonic() - started

    async def _play_sample(self, player: Player, key: SampleKey) -> tuple[Outcome, dict[str, Any]]:
        """Play a sample; return its outcome, and its line for the results file."""
        eval_set = self._sets[key.data_set]
        sample = eval_set.rows[key.problem].sample(
            index=key.problem * eval_set.sampling.samples + key.number,
            apply_chat_template_kwargs=dict(eval_set.template_kwargs),
        )
        seed = None if self._options.seed is None else key.seed(self._options.seed)
        seed_params = {} if seed is None else {"sampling_seed": seed}
        outcome = await player.play(sample, {**eval_set.sampling.params, **seed_params})
        return outcome, {**_result_line(key, outcome, seed), "audited": player.audited, "drift": None}

    def _save(self, line: Mapping[str, Any]) -> SampleResult:
        result = self._file.append(line)
        self.results[result.key] = result
        self._played += 1
        self._sampled_tokens += result.sampled_tokens
        return result

    def facts(self) -> dict[str, Any]:
        """Return facts about the session; they are not results, since they depend on the clock and on interruptions.

        The mean and the longest duration of an episode include scored samples of earlier sessions.
        """
        durations = [result.seconds for result in self.scored]
        return {
            "stopped": self.stopped,
            "seconds": round(self._seconds, 3),
            "samples": self._played,
            "samples_per_s": round(self._played / self._seconds, 3) if self._seconds else None,
            "sampled_tokens_per_s": round(self._sampled_tokens / self._seconds, 1) if self._seconds else None,
            "mean_episode_s": round(sum(durations) / len(durations), 3) if durations else None,
            "longest_episode_s": round(max(durations), 3) if durations else None,
        }


def _result_line(key: SampleKey, outcome: Outcome, seed: int | None) -> dict[str, Any]:
    sample, facts = outcome.sample, outcome.facts
    # combine slime's weight version per request with the versions within a request
    versions = [*sample.weight_versions, *(facts.weight_versions or [])]
    return {
        "data_set": key.data_set,
        "problem": key.problem,
        "number": key.number,
        "seed": seed,
        "status": str(sample.status.value),
        "stop_reason": str(facts.stop_reason),
        "error": facts.error,
        "label": sample.label,
        "reward": sample.reward,
        "response": sample.response,
        "prompt_tokens": len(sample.tokens) - sample.response_length,
        "response_tokens": sample.response_length,
        **{name: getattr(facts, name) or 0 for name in _COUNTS},
        "nonzero_exits": (facts.code or {}).get("nonzero_exits", 0),
        "seconds": facts.duration_s or 0.0,
        "weight_versions": list(dict.fromkeys(str(version) for version in versions if version is not None)),
        "violations": [*outcome.contract_violations, *outcome.tito_violations],
    }


class _TooManyFailuresError(Exception):
    """Too many consecutive samples failed for the same reason."""


async def run_samples(
    keys: Iterable[SampleKey], run: Callable[[SampleKey], Awaitable[SampleResult]], *, concurrency: int
) -> str | None:
    """Call `run` once with each key in turn, `concurrency` at a time; stop after many consecutive failures.

    The limit is `concurrency` consecutive failures for the same reason, but at least 8. So an outage that fails only
    some of the running samples does not end the run.

    Returns:
        The reason for stopping early, with the running samples cancelled; None if all keys were run.

    Raises:
        Exception: The first exception that `run` raised; the other samples are cancelled.
    """
    waiting, max_failures = iter(keys), max(_MIN_CONSECUTIVE_FAILURES, concurrency)
    last_reasons: deque[str] = deque(maxlen=max_failures)

    async def work() -> None:
        for key in waiting:
            result = await run(key)
            if result.is_scored:
                last_reasons.clear()
                continue
            error = result.fault or result.stop_reason
            last_reasons.append(f"{result.stop_reason} {(result.fault or '').partition(':')[0]}")
            if last_reasons.count(last_reasons[-1]) == max_failures:
                raise _TooManyFailuresError(
                    f"{max_failures} consecutive samples failed for the same reason, the last with {error}"
                )

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(work())
    except ExceptionGroup as e:
        first = e.exceptions[0]
        if isinstance(first, _TooManyFailuresError):
            return str(first)
        raise first from None
    return None


def run_demo(options: DemoOptions) -> Summary:
    """Run the demo: print the results and write the samples; the last line on stdout is the summary as JSON.

    Raises:
        RolloutError: The data, the engine or the tokenizer can't be used.
    """
    summary = asyncio.run(_demo(options))
    print(json.dumps(summary.to_dict()), flush=True)
    if not options.json_only:
        show_next("view", options.dump_dir)
    return summary


async def _demo(options: DemoOptions) -> Summary:
    log = make_console(stderr=True)
    rows = take_rows(options.data or shipped_rows(), options.samples)
    check_writable(options.dump_dir)
    started = time.monotonic()
    async with served_engine(options.base_url, options.model_dir) as base_url:
        log.print(f"engine at {redacted(parse_base_url(base_url))} after {time.monotonic() - started:.1f} s")
        tokenizer_dir = options.tokenizer_dir or await fetch_tokenizer_folder(base_url)
        # load it before the episodes start: importing transformers would block their event loop for seconds
        tokenizer = load_tokenizer(str(tokenizer_dir))
        executor = "local" if options.base_url or options.model_dir else SHIPPED_MODEL_EXECUTOR
        plan = RunPlan(
            base_url=base_url,
            tokenizer_dir=tokenizer_dir,
            sampling_params=slime_sampling_params(options.temperature, options.max_new_tokens),
            concurrency=options.concurrency,
            seed=options.seed,
            settings={"executor": executor},
        )
        log.print(f"code runs with isolation {await start_executor(executor)!r}", highlight=False)
        started = time.monotonic()
        with accuracy_bar(log, len(rows)) as show:
            outcomes = await evaluate(rows, plan, on_done=lambda outcome: show(bool(outcome.reward_details.get("acc"))))
    seconds = time.monotonic() - started
    summary = Summary.of(outcomes)
    written = write_dump(options.dump_dir, outcomes, tokenizer)
    if not options.json_only:
        console, shown = make_console(), most_instructive(outcomes).sample
        print_outcomes(console, outcomes)
        console.print(f"\nsample {shown.index}, token for token:")
        print_transcript(console, shown, lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False)))
        console.print()
        print_summary(console, outcomes, summary, seconds=seconds)
        console.print(f"all samples: {written}", soft_wrap=True)
    return summary


def check_writable(folder: Path) -> None:
    """Raise ConfigError if no dump can be written to a folder; the folder need not exist."""
    existing = next(parent for parent in (folder, *folder.resolve().parents) if parent.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise ConfigError(f"{existing} is not a writable folder; choose another folder with --dump")


def write_dump(folder: Path, outcomes: Sequence[Outcome], tokenizer: PreTrainedTokenizerBase = None) -> Path:
    """Write the outcomes' samples to a new file in `folder`; if `tokenizer` is given, also write the tokens' texts.

    Raises:
        ConfigError: The folder can't be written to.
    """
    path = folder / f"samples-{time.strftime('%Y%m%d-%H%M%S')}-{time.monotonic_ns() % 1_000_000:06d}.jsonl"
    texts = None if tokenizer is None else TokenTexts(tokenizer)
    try:
        dump.write_dump(path, [outcome.sample for outcome in outcomes], texts)
    except DumpError as e:
        raise ConfigError(f"{e}; choose another folder with --dump") from e
    return path


def most_instructive(outcomes: Sequence[Outcome]) -> Outcome:
    """Return the outcome to show: the first correct outcome with tool calls, else the first outcome with tool calls.

    If no outcome has tool calls, return the first correct outcome, else the first outcome.
    """
    return max(outcomes, key=lambda outcome: (bool(outcome.facts.tool_calls), bool(outcome.reward_details.get("acc"))))


@contextmanager
def accuracy_bar(console: Console, total: int, earlier: Sequence[bool] = ()) -> Iterator[Callable[[bool | None], None]]:
    """Show a progress bar with the accuracy until the block ends.

    Call the yielded function with the verdict on each sample, or with None if the sample has no score. If the console
    is not a terminal, a line is printed at each tenth of the samples instead. `total` counts the samples of the whole
    run; `earlier` has the verdicts on samples of earlier sessions.
    """
    done = scored = len(earlier)
    right = sum(earlier)
    with progress_bar(console) as bar:
        task = bar.add_task("episodes", total=total)

        def show(is_right: bool | None) -> None:  # noqa: FBT001 - a verdict, not a flag
            nonlocal done, right, scored
            done += 1
            scored += is_right is not None
            right += bool(is_right)
            accuracy = f"  accuracy {right / scored:.0%}" if scored else ""
            bar.update(task, completed=done, description=f"episodes{accuracy}")
            if not console.is_interactive and done * _PROGRESS_LINES // total > (done - 1) * _PROGRESS_LINES // total:
                console.print(f"episodes {done}/{total}{accuracy}", highlight=False, soft_wrap=True)

        yield show


def print_outcomes(console: Console, outcomes: Sequence[Outcome]) -> None:
    """Print a table with a line per sample, without the questions if the console is too narrow for them."""
    question_width = min(console.width - _OTHER_COLUMNS_WIDTH, _MAX_QUESTION_WIDTH)
    rows = [_outcome_row(outcome, max(question_width, _MIN_QUESTION_WIDTH)) for outcome in outcomes]
    if question_width < _MIN_QUESTION_WIDTH:
        for row in rows:
            del row["question"]
    console.print(_table(rows))


def _table(rows: Sequence[Mapping[str, str | Text]]) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    for name in rows[0]:
        table.add_column(name, justify="left" if name in _LEFT_ALIGNED else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row.values())
    return table


def _outcome_row(outcome: Outcome, question_width: int) -> dict[str, str | Text]:
    sample, facts, details = outcome.sample, outcome.facts, outcome.reward_details
    status, score = str(sample.status.value), details.get("score")
    return {
        "#": str(sample.index),
        "question": _clip(question_of(sample.prompt), question_width),
        "label": _clip(sample.label, _ANSWER_WIDTH),
        "predicted": _clip(details.get("pred") or "-", _ANSWER_WIDTH),
        "reward": Text("-" if score is None else f"{score:g}", style="green" if details.get("acc") else ""),
        "status": Text(status, style=_STATUS_STYLES.get(status, "")),
        "stop reason": facts.stop_reason or "-",
        "turns": str(facts.turns or 0),
        "calls": str(facts.tool_calls or 0),
        "tokens": str(sample.response_length),
    }


def _clip(value: object, width: int, style: str = "") -> Text:
    return Text(shorten(str(value), width, placeholder="..."), style=style)


def print_summary(console: Console, outcomes: Sequence[Outcome], summary: Summary, *, seconds: float) -> None:
    """Print the totals, then the first violations of each check and the most frequent errors of failed samples."""
    reasons = Counter(str(outcome.facts.stop_reason) for outcome in outcomes)
    tokens = sum(outcome.facts.sampled_tokens or 0 for outcome in outcomes)
    console.print(
        f"{summary.samples} samples in {seconds:.1f} s: accuracy {summary.accuracy:.1%}, mean reward "
        f"{summary.mean_reward:.3f}, {summary.tool_calls} tool calls, {tokens} sampled tokens"
    )
    console.print(f"stop reasons: {_join_counts(dict(reasons.most_common()))}")
    for check, name in (("token exactness", "tito_violations"), ("slime's contract", "contract_violations")):
        violations = [(outcome.sample.index, violation) for outcome in outcomes for violation in getattr(outcome, name)]
        if not violations:
            console.print(Text(f"{check}: every sample passed", style="green"))
            continue
        console.print(Text(f"{check}: {len(violations)} violations", style="bold red"))
        for index, violation in violations[:_MAX_VIOLATIONS_SHOWN]:
            console.print(Text(f"  sample {index}: {violation}", style="red"), soft_wrap=True)
    failed = [outcome for outcome in outcomes if outcome.sample.status is Sample.Status.FAILED]
    errors = Counter(str(outcome.facts.error) for outcome in failed)
    for error, count in errors.most_common(_MAX_ERRORS_SHOWN):
        console.print(Text(f"{count} of {len(outcomes)} samples failed: {error}", style="red"), soft_wrap=True)


def print_evaluation(console: Console, report: Mapping[str, Any]) -> None:
    """Print the report of each data set, then the notes."""
    for name, data_set in report["data_sets"].items():
        console.print(Text(name, style="bold"))
        console.print(_table(_problem_rows(data_set["by_problem"])))
        for line in _total_lines(name, data_set):
            console.print(line, soft_wrap=True, markup=False)
        if missing := data_set["missing"]:
            text = f"{missing} samples are missing ({data_set['failed']} failed) and are not counted"
            console.print(Text(text, "red"), soft_wrap=True)
        console.print()
    for note in report["notes"]:
        console.print(Text(note, style="yellow"), soft_wrap=True)


def _problem_rows(problems: Sequence[Mapping[str, Any]]) -> list[dict[str, str | Text]]:
    has_answers = any(problem["majority"] for problem in problems)
    unused = {"reward" if has_answers else "majority"}
    unused |= {"label"} if all(problem["label"] is None for problem in problems) else set()
    rows = [_problem_row(problem) for problem in problems]
    return [{name: cell for name, cell in row.items() if name not in unused} for row in rows]


def _problem_row(problem: Mapping[str, Any]) -> dict[str, str | Text]:
    majority = " | ".join(problem["majority"]) or "-"
    tokens, calls = problem["mean_response_tokens"], problem["mean_tool_calls"]
    return {
        "problem": str(problem["problem"]),
        "label": _clip(problem["label"], _MAJORITY_WIDTH),
        "reward": "-" if problem["mean_reward"] is None else f"{problem['mean_reward']:.3g}",
        "right": str(problem["right"]),
        "of": str(problem["scored"]),
        "majority": _clip(majority, _MAJORITY_WIDTH, "green" if problem["majority_score"] == 1 else ""),
        "tokens": "-" if tokens is None else f"{tokens:.0f}",
        "calls": "-" if calls is None else f"{calls:.1f}",
        "truncated": str(problem["truncated"]),
        "failed": Text(str(problem["failed"]), style="red" if problem["failed"] else ""),
    }


def _total_lines(name: str, data_set: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines below a data set's table."""
    samples, interval = data_set["samples_per_problem"], data_set["interval_95"]
    interval_text = " (no 95% interval: all problems have the same accuracy)" if data_set["standard_error"] == 0 else ""
    if interval:
        interval_text = f" (95% interval {_percent(interval[0])} to {_percent(interval[1])}, by problem)"

    def over(problems: int) -> str:
        return "" if problems == data_set["problems"] else f" over {problems} of {data_set['problems']} problems"

    over_scored = over(data_set["problems_scored"])
    protocol = data_set["protocol"]
    pass_at_k = ", ".join(
        f"pass@{k} {_percent(value)}{over(data_set['pass_at_k_problems'][k])}"
        for k, value in data_set["pass_at_k"].items()
    )
    has_answers = data_set["maj_at_n"] is not None
    majority = f", maj@{samples} {_percent(data_set['maj_at_n'])}{over_scored}" if has_answers else ""
    yield f"\n{name}: avg@{samples} {_percent(data_set['avg_at_n'])}{over_scored}{interval_text}{majority}"
    if pass_at_k:
        yield pass_at_k
    if data_set["instruction_accuracy"] is not None:
        yield (
            f"IFEval, strict: by prompt {_percent(data_set['avg_at_n'])}, by instruction "
            f"{_percent(data_set['instruction_accuracy'])}"
        )
    if protocol is not None:
        modified = f", modified: {', '.join(protocol['modified'])}" if protocol["modified"] else ""
        yield f"protocol {protocol['name']} ({protocol['source']}){modified}"
        yield protocol["comparability"]
    if data_set["mean_reward"] is not None:
        parts = [f"{part.removeprefix(PART_PREFIX)} {value:.4g}" for part, value in data_set["mean_parts"].items()]
        yield f"mean reward {data_set['mean_reward']:.4g}{over_scored}{': ' * bool(parts)}{', '.join(parts)}"
    without_answer = f", {data_set['without_answer']} without an answer" if has_answers else ""
    scored = f"{data_set['scored']} of {data_set['planned']} samples scored{without_answer}"
    yield f"{scored}; {data_set['sampled_tokens']} sampled tokens"
    failed = f"{data_set['tool_errors']} failed, {data_set['unknown_tools']} of them of unknown tools"
    yield f"{data_set['tool_calls']} tool calls, {failed}; {data_set['nonzero_exits']} code runs exited with an error"
    yield f"stop reasons: {_join_counts(data_set['stop_reasons']) or 'none'}"


def _join_counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items())


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
