"""The evaluation: problems sampled on an engine, results kept as they come, a report at the end.

Glue: what is asked, the engine, the folder, the samples, the report, in this order.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from strands_rollout import __version__
from strands_rollout.config import CODE_TOOL_PATH, RolloutSettings
from strands_rollout.evaluate import playing
from strands_rollout.evaluation.episodes import Episodes
from strands_rollout.evaluation.identity import run_identity
from strands_rollout.evaluation.options import DEFAULT_KS, EvalOptions, idle_ks, load_sets, load_settings
from strands_rollout.evaluation.report import evaluation_report, report_notes, without_problems
from strands_rollout.evaluation.run_folder import RunFolder
from strands_rollout.evaluation.session import Session
from strands_rollout.evaluation.tables import print_evaluation
from strands_rollout.json_file import write_json
from strands_rollout.report import accuracy_bar, make_console
from strands_rollout.retokenisation.meter import DriftMeter, evenly_spread
from strands_rollout.secret_mask import secret_values
from strands_rollout.served_engine import ask_engine, served_engine, start_executor, tokenizer_folder
from strands_rollout.sglang_connection import parse_base_url, redacted

EXIT_OK: Final = 0
EXIT_INCOMPLETE: Final = 1
EXIT_INTERRUPTED: Final = 130


def run_evaluation(options: EvalOptions) -> int:
    """Run it, or go on with it; the last line on stdout is the report without its problems, as JSON.

    Returns:
        The exit code: 0 if every sample is scored and nothing is violated, 1 if not, 130 after Ctrl-C.

    Raises:
        RolloutError: The data, the engine, the tokenizer or the folder can't be used.
    """
    log = make_console(stderr=True)

    def note(text: str) -> None:
        log.print(text, markup=False, soft_wrap=True)

    how_to_go_on = f"what is done is kept: the same command with --out {options.out} goes on from there"
    try:
        report = asyncio.run(_run(options, log, note))
    except KeyboardInterrupt:
        note(f"interrupted; {how_to_go_on}")
        return EXIT_INTERRUPTED
    if not options.json_only:
        console = make_console()
        print_evaluation(console, report)
        console.print(f"report: {RunFolder(options.out).report_path}", markup=False, soft_wrap=True)
    if not report["complete"]:
        note(how_to_go_on)
    print(json.dumps(without_problems(report)), flush=True)
    return EXIT_OK if report["complete"] and not report["violations"] else EXIT_INCOMPLETE


async def _run(options: EvalOptions, log: Console, note: Callable[[str], None]) -> dict[str, Any]:
    settings, sets = load_settings(options), load_sets(options, note)
    for chosen in sets:
        chosen.check_settings(settings)
    for words in idle_ks(options.ks or (), sets):
        note(words)
    model_dir = options.model_dir.resolve() if options.model_dir else None
    async with served_engine(options.base_url, model_dir) as base_url:
        info = await ask_engine(base_url)
        tokenizer_dir = options.tokenizer_dir or tokenizer_folder(info, base_url)
        folder = RunFolder(options.out)
        identity = run_identity(
            sets, settings, info, tokenizer_dir, seed=options.seed, max_context_tokens=options.max_context_tokens
        )
        with folder.open_results(identity) as file:
            note(f"engine at {redacted(parse_base_url(base_url))}, results in {options.out}")
            session = Session.begin(sets, file, note)
            if session.left:
                await _play(options, settings, session, base_url, tokenizer_dir, log)
            outcome = evaluation_report(sets, session.results, options.ks or DEFAULT_KS)
            report = {
                **outcome,
                "notes": report_notes(outcome, info.weight_version),
                "model": info.model_path,
                "weight_version": info.weight_version,
                "strands_rollout": __version__,
                "session": session.record(),
            }
            write_json(folder.report_path, report)
    stopped = [f"stopped: {session.stopped}"] if session.stopped else []
    for words in [*stopped, *session.errors(), *report["notes"]]:
        note(words)
    return report


async def _play(
    options: EvalOptions, settings: RolloutSettings, session: Session, base_url: str, tokenizer_dir: Path, log: Console
) -> None:
    if CODE_TOOL_PATH in settings.tools:
        log.print(f"code runs with isolation {await start_executor(settings.executor)!r}")
    async with playing(
        base_url,
        tokenizer_dir,
        settings.model_dump(exclude_unset=True),
        audited=options.audits,
        evaluation=True,
        max_context_tokens=options.max_context_tokens,
    ) as player:
        episodes = Episodes(
            player,
            {chosen.name: chosen for chosen in session.sets},
            options.seed,
            options.keeps_tokens,
            DriftMeter(player.tokenizer, tool_parser=settings.tool_parser),
            {key for chosen in session.sets for key in evenly_spread(list(chosen.sample_keys()))},
            secret_values(os.environ, settings.model_dump(mode="json")),
        )
        earlier = [result.is_right for result in session.scored]
        with accuracy_bar(log, len(session.left) + len(earlier), earlier) as tell:
            await session.play(episodes, tell, concurrency=options.concurrency)
