"""`drift`, `replay`, `check-template`: does text encode to the same tokens, an engine sample, a template keep them?

In a replay each turn is requested with exactly the tokens that the policy had read and written before it, tool results
included: no tool is run, no template is needed, and a turn that departs does not hide what the next one does.
"""

from __future__ import annotations

import textwrap
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, groupby
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Final

import httpx
import orjson
from rich.console import Console
from rich.text import Text

from strands_rollout.client.client import SGLangClient
from strands_rollout.client.generate_api import EncodedIds, load_json
from strands_rollout.client.transport import CONNECTION_ERRORS, JSON_HEADERS, create_client
from strands_rollout.diagnostics.diagnosis import Finding, error, good, skipped, warning
from strands_rollout.dump import DumpRecord, TokenTexts, read_dump, recorded_tokenizer
from strands_rollout.dump.record import check_tokenizer
from strands_rollout.dump.terminal import counter, make_console, show_next
from strands_rollout.errors import (
    ConfigError,
    DumpError,
    EngineResponseError,
    EngineUnavailableError,
    RolloutError,
    TemplateDifferenceError,
    TemplateError,
    foreign_code,
)
from strands_rollout.evaluation.evaluate import ask_engine, check_is_engine, served_engine, served_tokenizer
from strands_rollout.evaluation.options import slime_sampling_params
from strands_rollout.evaluation.rows import json_line
from strands_rollout.files import MAX_JSON_BYTES, Json, read_regular
from strands_rollout.model.sampling import turn_params
from strands_rollout.samples import FinishedSample
from strands_rollout.settings import RolloutSettings
from strands_rollout.slime_plugin.retokenisation import DriftMeter, DriftTotals, EpisodeDrift, SampledEpisode, totals_of
from strands_rollout.slime_plugin.slime_adapter import load_tokenizer, vocab_size_of
from strands_rollout.template import probe
from strands_rollout.template.chat_template import renderer_of
from strands_rollout.template.messages import ChatMessage
from strands_rollout.template.render import SHIPPED, TemplateRenderer, TurnEnds, TurnRenderer, own_template
from strands_rollout.tool_parsers import AUTO, ToolCall, format_of_call, get_parser

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class SavedEpisode(SampledEpisode):
    """One sample of a dump that has tokens and a policy's turn among them."""

    number: int  # its place in the dump, from 0
    record: DumpRecord


def nth_episode(path: Path, number: int) -> SavedEpisode:
    """The episode at a place of a dump, from 0."""
    count = 0
    for at, record in enumerate(read_dump(path)):
        count += 1
        if at == number:
            episode = episode_of(record, at)
            if episode is None:
                raise DumpError(f"{record.where}: the policy's tokens are not in it; expected a sample with tokens")
            return episode
    if not count:
        raise DumpError(f"{path} holds no sample; expected one or more")
    raise DumpError(f"{path} has {count} samples; got sample {number}, expected one of 0 to {count - 1}")


def episode_of(record: DumpRecord, number: int) -> SavedEpisode | None:
    """The episode of a record; None where nothing was sampled, or its tokens were not kept.

    Turns are read from the episode's facts; of a foreign sample each run of trained tokens is one.
    """
    if not record.has_tokens:
        return None
    sample = record.to_sample()
    if not all(type(token) is int and token >= 0 for token in sample.tokens):
        raise DumpError(f"{record.where}: tokens holds something else than token ids; expected integers from 0")
    if not 0 <= sample.response_length <= len(sample.tokens):
        lengths = f"response_length {sample.response_length} of {len(sample.tokens)} tokens"
        raise DumpError(f"{record.where}: got {lengths}; expected no more than there are")
    turns = FinishedSample(sample, record.facts).turn_bounds
    if turns is None:
        mask = [1] * sample.response_length if sample.loss_mask is None else sample.loss_mask  # None: all, in slime
        turns, end = [], len(sample.tokens) - sample.response_length
        for is_trained, run in groupby(mask):
            start, end = end, end + len(list(run))
            turns += [(start, end)] if is_trained else []
    return SavedEpisode(sample, record.facts, turns, number, record) if turns else None


def run_drift(
    dump: Path, tokenizer: Path | None, *, settings: RolloutSettings | None, show: int, as_json: bool
) -> bool:
    """Measure the episodes of a dump and print the report; whether all context is what the template renders."""
    thinking = None if settings is None else settings.enable_thinking
    folder = tokenizer or recorded_tokenizer(dump)
    loaded = load_tokenizer_folder(folder)
    texts = TokenTexts(loaded)
    options = {} if thinking is None else {"enable_thinking": thinking}
    meter = DriftMeter(loaded, options, AUTO if settings is None else settings.tool_parser)
    measured = []
    with counter("episodes") as on_done:
        for number, record in enumerate(read_dump(dump)):
            if episode := episode_of(record, number):
                check_tokenizer(record, texts, str(folder))
                measured.append(meter.measure(episode, number))
                on_done(1)
    if not measured:
        raise DumpError(
            f"{dump} has no whole sample with the policy's tokens; results of eval have them with --save-tokens"
        )
    totals = totals_of(measured)
    if as_json:
        for line in (*map(asdict, measured), {**asdict(totals), "template_fault": meter.template_fault}):
            print(json_line(line).decode(), end="")
    else:
        worst = sorted(measured, key=lambda drift: (-drift.mismatched_tokens, -drift.off_policy, drift.number))
        console = make_console()
        for words, style in (*_totals(totals, meter.template_fault), *chain(*map(_episode, worst[:show]))):
            console.print(Text(words, style=style), soft_wrap=True)
        show_next("view", dump, *(["--tokenizer", tokenizer] if tokenizer else []))
    return not totals.mismatched_episodes


def _totals(totals: DriftTotals, template_fault: str | None) -> Iterator[tuple[str, str]]:
    """Lines about all episodes, each with its style."""
    yield f"{totals.episodes} episodes, {totals.sampled_tokens} sampled tokens", ""
    yield f"drift: in {totals.drifted_episodes} episodes ({totals.drifted_share:.1%})", ""
    yield f"  each turn encoded again:   {totals.turn_drift} tokens change", ""
    yield f"  the whole text encoded again: {totals.text_drift} tokens change", ""
    off_policy = f"{totals.off_policy} sampled tokens ({totals.off_policy_share:.1%})"
    yield f"  off-policy then: {off_policy} come after the first change", ""
    kinds = ", ".join(f"{name} {count}" for name, count in totals.classes.items())
    yield textwrap.fill(f"  by kind: {kinds}", 80, subsequent_indent="    "), ""
    if totals.mismatched_episodes is None:
        yield f"context: not compared{f': {template_fault}' if template_fault else ''}", "yellow"
    elif totals.mismatched_episodes:
        differing = f"{totals.mismatched_tokens} tokens in {totals.mismatched_episodes} episodes"
        yield f"context: {differing} are not what the chat template renders", "bold red"
    else:
        yield "context: what the chat template renders, token for token", "green"


def _episode(drift: EpisodeDrift) -> Iterator[tuple[str, str]]:
    """Lines about one episode with drift or mismatches, each with its style."""
    if drift.first is None and not drift.mismatches:
        return
    changed = f"{drift.turn_drift} turn by turn, {drift.text_drift} in the whole text, {drift.off_policy} off-policy"
    yield f"\nsample {drift.number} (index {drift.index}): of {drift.sampled_tokens} tokens {changed}", ""
    if first := drift.first:
        place = "in what the policy read" if first.turn is None else f"in turn {first.turn}"
        change = f"{first.got} {first.got_texts} becomes {first.again} {first.again_texts}"
        yield f"  first change at token {first.position}, {place}, after {first.before!r}: {change}", ""
    for found in drift.mismatches or []:
        place = f"{found.tokens} tokens from token {found.position} on"
        yield f"  context differs: {place}: got {found.got!r}, expected {found.expected!r}", "red"


_SHOWN_TOKENS: Final = 8


@dataclass(frozen=True, slots=True)
class ReplayedTurn:
    """A recorded turn, and what the engine samples in its place now."""

    turn: int  # from 0
    start: int  # index in the sample's tokens of its first one
    recorded: list[int]
    again: list[int]  # what the engine samples now; as many at most
    same: int  # tokens at their beginning that are the same
    finish: str  # why the engine stopped: "length" where it reached as many tokens
    gaps: list[float]  # of the same tokens, the logprob now less the recorded one; empty where none were recorded

    @property
    def departs(self) -> bool:
        """Whether it samples something else, or stops before."""
        return self.same < len(self.recorded)


async def replay(
    client: SGLangClient, episode: SavedEpisode, params: Mapping[str, Json]
) -> AsyncIterator[ReplayedTurn]:
    """Request each turn of an episode again.

    `params` are SGLang's sampling parameters; each turn makes its own seed of a `sampling_seed`, as in an episode.
    """
    tokens = episode.tokens
    logprobs = _recorded_logprobs(episode)
    for turn, (start, end) in enumerate(episode.turns):
        asked = {**params, "max_new_tokens": end - start}
        if asked.get("sampling_seed") is not None:
            asked = turn_params(asked, turn)
        answer = await client.generate(tokens[:start], asked)
        recorded, again = tokens[start:end], answer.output_ids
        shorter = min(len(recorded), len(again))
        same = next((at for at in range(shorter) if recorded[at] != again[at]), shorter)
        gaps = [now - then for now, then in zip(answer.logprobs[:same], logprobs[start:end], strict=False)]
        yield ReplayedTurn(turn, start, recorded, again, same, answer.finish_reason.type, gaps)


async def recorded_gaps(
    http: httpx.AsyncClient, episode: SavedEpisode, *, vocab_size: int | None
) -> list[float] | None:
    """For each sampled token the engine's logprob at temperature 1 of that very token, less the recorded one.

    Requested by SGLang's `logprob_start_len`: the engine reads the whole episode and returns the logprob of each token
    of its input (`meta_info.input_token_logprobs`, sglang/srt/managers/tokenizer_manager.py). None where none were
    recorded, or the engine gives none, as the embedded one. Ids must be below `vocab_size`; None: not checked.

    Raises:
        TrajectoryError: An id is not of the vocabulary; nothing was sent.
        EngineUnavailableError: Nothing answers.
        EngineResponseError: The answer is not of these tokens.
    """
    tokens, logprobs = episode.tokens, _recorded_logprobs(episode)
    sampled = [at for start, end in episode.turns for at in range(start, end)]
    if not logprobs or sampled[0] == 0:
        return None
    asked = {
        "sampling_params": {"temperature": 1.0, "max_new_tokens": 1},
        "return_logprob": True,
        "logprob_start_len": sampled[0] - 1,
    }
    body = EncodedIds(tokens, vocab_size=vocab_size).to_json(b'{"input_ids":', b"," + orjson.dumps(asked)[1:])
    try:
        response = await http.post("/generate", content=body, headers=JSON_HEADERS)
    except CONNECTION_ERRORS as e:
        raise EngineUnavailableError(f"no answer to a request for logprobs: {e}") from e
    if response.status_code != httpx.codes.OK:
        return None
    now = _input_logprobs(load_json(response.content), tokens, vocab_size)
    return None if now is None else [now[at] - logprobs[at] for at in sampled]


def _input_logprobs(answer: Json, tokens: Sequence[int], vocab_size: int | None) -> dict[int, float] | None:
    """By position, the logprobs of the input's last tokens; None where there are none.

    SGLang 0.5.23 shows the vocabulary's last id as 0 there, beside that id's own logprob
    (sglang/srt/managers/scheduler_components/logprob_result_processor.py).
    """
    try:
        entries = [(entry[0], entry[1]) for entry in answer["meta_info"].get("input_token_logprobs") or ()]
    except (TypeError, IndexError, KeyError, AttributeError) as e:
        raise EngineResponseError("input_token_logprobs: expected a list of [logprob, token id, text]") from e
    first = len(tokens) - len(entries)
    last_id = None if vocab_size is None else vocab_size - 1
    named = zip(entries, tokens[max(first, 0) :], strict=False)
    if first < 0 or any(name not in (token, 0 if token == last_id else token) for (_, name), token in named):
        raise EngineResponseError("the engine's input logprobs are of other tokens than those that it was sent")
    return {first + at: logprob for at, (logprob, _) in enumerate(entries) if logprob is not None} or None


def _recorded_logprobs(episode: SavedEpisode) -> list[float]:
    """One for each token, prompt included; empty where none were recorded."""
    recorded = episode.sample.rollout_log_probs
    if not recorded or not any(recorded):  # a sample that is kept out of training has zeros
        return []
    return [0.0] * (len(episode.sample.tokens) - len(recorded)) + list(recorded)


async def run_replay(
    dump: Path,
    *,
    sample: int = 0,
    base_url: str | None = None,
    model_dir: Path | None = None,
    tokenizer_dir: Path | None = None,
    temperature: float | None = None,
    seed: int | None = None,
    as_json: bool = False,
) -> bool:
    """Replay and show; whether every turn is the same. The arguments are those of the command; see its --help."""
    episode = nth_episode(dump, sample)
    if episode.sample.multimodal_train_inputs is not None:
        raise DumpError(f"{episode.record.where} has images, which replay does not send; choose an episode of text")
    params = _params(episode, temperature, seed)
    async with served_engine(base_url, model_dir) as url:
        check_is_engine(await ask_engine(url), url)
        recorded = episode.record.tokenizer and episode.record.tokenizer.folder
        folder = tokenizer_dir or recorded or await served_tokenizer(url)
        tokenizer = load_tokenizer(str(folder))
        check_tokenizer(episode.record, TokenTexts(tokenizer), str(folder))
        vocab_size = vocab_size_of(SimpleNamespace(hf_checkpoint=str(folder))) or len(tokenizer)
        async with create_client(url) as http:
            turns = [turn async for turn in replay(SGLangClient(http, vocab_size=vocab_size), episode, params)]
            gaps = await recorded_gaps(http, episode, vocab_size=vocab_size)
    report = {
        "number": episode.number,
        "index": episode.sample.index,
        "temperature": params["temperature"],
        "seed": params.get("sampling_seed"),
        "same": not any(turn.departs for turn in turns),
        "turns": [_turn(turn, episode, tokenizer) for turn in turns],
        "recorded_tokens": _gap_facts(gaps),
    }
    if as_json:
        print(json_line(report).decode(), end="")
    else:
        _show(make_console(), report)
    return bool(report["same"])


def _params(episode: SavedEpisode, temperature: float | None, seed: int | None) -> dict[str, Json]:
    """What was asked for; else the episode's own, where they decide what is sampled; else greedy."""
    recorded = episode.facts.get("sampling_params")
    own: Mapping[str, Json] = recorded if isinstance(recorded, Mapping) else {}
    decides = own.get("sampling_seed") is not None or own.get("temperature") == 0
    if decides and temperature is None and seed is None:
        return {**slime_sampling_params(1.0, 1), **own}
    if temperature is None:
        temperature = 0.0 if seed is None else 1.0
    return slime_sampling_params(temperature, 1) | ({} if seed is None else {"sampling_seed": seed})


def _turn(turn: ReplayedTurn, episode: SavedEpisode, tokenizer: PreTrainedTokenizerBase) -> dict[str, Json]:
    def text(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    departure = None
    if turn.departs:
        at = turn.start + turn.same
        recorded, again = (ids[turn.same : turn.same + _SHOWN_TOKENS] for ids in (turn.recorded, turn.again))
        departure = {
            "token": turn.same,
            "position": at,
            "before": text(episode.tokens[max(0, at - _SHOWN_TOKENS) : at]),
            "recorded": {"ids": recorded, "text": text(recorded)},
            "again": {"ids": again, "text": text(again), "finish": turn.finish},
        }
    facts = {"turn": turn.turn, "tokens": len(turn.recorded), "same_tokens": turn.same}
    return {**facts, "logprobs": _gap_facts(turn.gaps), "departure": departure}


def _gap_facts(gaps: Sequence[float] | None) -> dict[str, float] | None:
    if not gaps:
        return None
    sizes = [abs(gap) for gap in gaps]
    return {"tokens": len(sizes), "largest_gap": max(sizes), "mean_gap": sum(sizes) / len(sizes)}


def _show(console: Console, report: dict[str, Json]) -> None:
    for turn in report["turns"]:
        gaps, departure = turn["logprobs"], turn["departure"]
        logprobs = "" if gaps is None else f"; logprobs differ by {gaps['largest_gap']:.2g} at most"
        words = f"turn {turn['turn']}: {turn['same_tokens']} of {turn['tokens']} tokens are the same{logprobs}"
        console.print(Text(words, style="green" if departure is None else "red"), soft_wrap=True)
        if departure is not None:
            then, now = departure["recorded"], departure["again"]
            ends = f"{now['ids']} {now['text']!r}" if now["ids"] else f"the end ({now['finish']})"
            words = (
                f"  departs at its token {departure['token']} ({departure['position']} of the sample), after "
                f"{departure['before']!r}:\n  recorded {then['ids']} {then['text']!r}\n  now      {ends}"
            )
            console.print(Text(words), soft_wrap=True)
    recorded = report["recorded_tokens"]
    if recorded is None:
        words = "recorded tokens: no logprobs of its input from this engine, or none recorded"
    else:
        gaps = f"{recorded['largest_gap']:.2g} at most, {recorded['mean_gap']:.2g} on average"
        words = f"recorded tokens: the engine's logprobs differ from the recorded ones by {gaps}"
    console.print(Text(words), soft_wrap=True)


_NO_TOOLS: Final = "use a model that was trained to call tools, set tools: [], or "
_PARSER: Final = "set tool_parser (--tool-parser) to auto, or to the name of the model's own format"
_WINDOW: Final = 8
_REASONING: Final = "probed-reasoning"
_USER_TURN: Final[ChatMessage] = {"role": "user", "content": "question"}
_TOOL_RESULT: Final[ChatMessage] = {"role": "tool", "name": "probe", "tool_call_id": "call00001", "content": "1"}
_CALL: Final = {"type": "function", "id": "call00001", "function": {"name": "probe", "arguments": {"x": "1"}}}


def load_tokenizer_folder(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder.

    Raises:
        ConfigError: It can't be loaded; the message names the file.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder; expected one with a tokenizer.json")
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ConfigError(
            f"{folder} has no tokenizer.json; expected a fast tokenizer, which tells control tokens apart"
        )
    try:
        orjson.loads(read_regular(file, MAX_JSON_BYTES))
    except (OSError, orjson.JSONDecodeError) as e:
        raise ConfigError(f"{file} can't be read: {e}") from e
    with foreign_code("tokenizers raises plain Exceptions, transformers what its parts raise") as outcome:
        return load_tokenizer(str(folder))
    fault = outcome.error
    if isinstance(fault, RolloutError):
        raise fault
    raise ConfigError(f"the tokenizer of {folder} can't be loaded: {type(fault).__name__}: {fault}") from fault


def read_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder, or of an id on the hub; a ConfigError where it can't be loaded."""
    return load_tokenizer_folder(Path(name)) if Path(name).exists() else load_tokenizer(name)


def read_object(file: Path) -> dict[str, Json]:
    """The JSON object of a file; empty where there is none."""
    try:
        value = orjson.loads(read_regular(file, MAX_JSON_BYTES))
    except (OSError, orjson.JSONDecodeError):
        return {}
    return value if isinstance(value, dict) else {}


def template_text(given: Path) -> str:
    """The template of a file, or the name of one of this package; a ConfigError where it is neither."""
    if str(given) in SHIPPED:
        return str(given)
    try:
        return given.read_text(encoding="utf-8")
    except OSError as e:
        raise ConfigError(f"got the template {given}: {e}; expected a file, or one of {', '.join(SHIPPED)}") from e


def check_template(
    name: str, tokenizer: PreTrainedTokenizerBase, *, chat_template: str | None = None, tool_parser: str = AUTO
) -> list[Finding]:
    """Try each rule on the template of a tokenizer of that folder or id, or on another template in its place.

    Calls must be read by `tool_parser`, whichever fits for "auto".
    """
    rule, own = "template", own_template(chat_template or tokenizer.chat_template)
    try:
        template = renderer_of(tokenizer, {} if chat_template is None else {"chat_template": chat_template})
        rule = "end of turn"
        end_of_turn = probe.find_end_of_turn(template)
    except TemplateError as e:
        return [error(rule, str(e), own)]
    tool_findings = [
        good(rule, "yes") if fault is None else error(rule, fault, _NO_TOOLS + own)
        for rule, fault in probe.tool_faults(template)
    ]
    with_tools = all(finding.status == "ok" for finding in tool_findings)
    ends = TurnEnds(end_of_turn, end_of_turn)
    if len(tool_findings) > 1:  # else tools are not rendered
        try:
            ends = probe.find_ends(template, end_of_turn)
        except TemplateError as e:
            tool_findings.append(error("end of a turn with calls", str(e), own))
            with_tools = False
    turns = TurnRenderer(template, ends)
    system_fault = probe.system_fault(template, turns, with_tools=with_tools)
    return [
        _end_of_turn(Path(name), tokenizer, template, ends),
        _tried("encoding", template, lambda: probe.check_encoding(template, with_tools=with_tools)),
        _appends("user turns", template, turns, probe.USER_TURNS),
        *tool_findings,
        *_tool_rules(template, turns, with_tools=with_tools),
        _needed_by_some("system message", system_fault, f"set system_prompt to an empty text, or {own}"),
        _calls(template, ends, tool_parser),
        _reasoning(template, tokenizer),
    ]


def _end_of_turn(
    folder: Path, tokenizer: PreTrainedTokenizerBase, template: TemplateRenderer, ends: TurnEnds
) -> Finding:
    """Whether a generation stops where a turn ends: engines stop at the ids of three places."""
    places = {
        "tokenizer_config.json": tokenizer.eos_token_id,
        "generation_config.json": read_object(folder / "generation_config.json").get("eos_token_id"),
        "config.json": read_object(folder / "config.json").get("eos_token_id"),
    }
    stops = {name: ids if isinstance(ids, list) else [ids] for name, ids in places.items() if ids is not None}
    shown = ", ".join(f"{ids} in {name}" for name, ids in stops.items()) or "none"
    known = {token for ids in stops.values() for token in ids}
    ids = {template.encoder.encode_trusted(end)[0]: end for end in (ends.answer, ends.calls)}
    for token, end in ids.items():
        if token not in known:
            turn = f"a turn ends with id {token}, {end!r}"
            remedy = f'add {token} to "eos_token_id" in {folder / "generation_config.json"}'
            found = f"{turn}, but the end-of-sequence ids are {shown}: turns would not stop there"
            return error("end of turn", found, remedy)
    names = " and ".join(f"id {token}, {end!r}," for token, end in ids.items())
    return good("end of turn", f"{names} ends a generation: {shown}")


def _tool_rules(template: TemplateRenderer, turns: TurnRenderer, *, with_tools: bool) -> Iterator[Finding]:
    """How results are appended, and what becomes of the assistant's own turns, which breaks nothing."""
    conversations = {"tool results": probe.TOOL_TURNS, "several calls": probe.PARALLEL_TURNS}
    if not with_tools:
        yield from (skipped(rule, "the template can't be used with tools") for rule in conversations)
        return
    notes = dict(probe.turn_notes(template, turns.ends))
    for rule in ("text beside calls", "end of a turn with calls"):
        yield good(rule, notes[rule] or "yes")
    for rule, conversation in conversations.items():
        note = notes.get(rule)
        yield good(rule, note) if note else _appends(rule, template, turns, conversation, tools=probe.TOOLS)
    fault = probe.user_turns_fault(template, turns)
    remedy = f"let conversations with tools have one user's turn, or {own_template(template.source)}"
    yield _needed_by_some("user turns with tools", fault, remedy)


def _needed_by_some(rule: str, fault: str | None, remedy: str) -> Finding:
    """A rule that only some conversations need; they are refused where it does not hold."""
    if fault is None:
        return good(rule, "append-only")
    return warning(rule, f"{fault} Such conversations are refused.", remedy)


def _appends(
    rule: str, template: TemplateRenderer, turns: TurnRenderer, parts: Sequence[Sequence[ChatMessage]], **tools: Json
) -> Finding:
    return _tried(rule, template, lambda: probe.check_append_only(template, turns, rule, parts, **tools))


def _tried(rule: str, template: TemplateRenderer, check: Callable[[], None]) -> Finding:
    """What a check of the probe finds; where tokens differ, with both renderings around the first difference."""
    try:
        check()
    except TemplateDifferenceError as e:
        around = {}
        for side, ids in (("got", e.got), ("expected", e.expected)):
            part = ids[max(0, e.position - _WINDOW) : e.position + _WINDOW]
            around[side] = {"ids": part, "text": template.encoder.decode(part)}
        shown = "".join(f"\n  {side:<8} {part['ids']} {part['text']!r}" for side, part in around.items())
        facts = {f"{rule.replace(' ', '_')}_difference": {"position": e.position, **around}}
        return Finding(rule, "error", f"{e}{shown}", own_template(template.source), facts)
    except TemplateError as e:
        return error(rule, str(e), own_template(template.source))
    return good(rule, "append-only" if rule != "encoding" else "the tokenizer's own ids, piece by piece")


def _calls(template: TemplateRenderer, ends: TurnEnds, tool_parser: str) -> Finding:
    """Which parser reads the call that the template writes."""
    call = probe.find_written_call(template, ends)
    try:
        name = format_of_call(*call) if tool_parser == AUTO else tool_parser
        read = [segment for segment in get_parser(name).parse(call.turn) if isinstance(segment, ToolCall)]
    except ConfigError as e:
        return error("calls", str(e), _PARSER)
    if [(segment.name, segment.arguments) for segment in read] != [(call.name, dict(call.arguments))]:
        return error("calls", f"{name!r} does not read the call in {call.turn!r}", _PARSER)
    return good("calls", f"written as {call.turn!r}; tool_parser {name!r} reads them", tool_parser=name)


def _reasoning(template: TemplateRenderer, tokenizer: PreTrainedTokenizerBase) -> Finding:
    """Rollouts keep what was sampled in any case; a chat endpoint shows the policy what its template keeps."""
    opens, _ = probe.find_lead(template)
    with_thinking, without = (
        tokenizer.apply_chat_template(
            [_USER_TURN], tokenize=False, add_generation_prompt=True, enable_thinking=on, **template.kwargs
        )
        for on in (True, False)
    )
    if with_thinking == without:
        opening = f"enable_thinking changes nothing{', answers begin inside reasoning' if opens else ''}"
    elif opens:
        opening = "answers begin inside reasoning, unless enable_thinking is false"
    else:
        opening = "enable_thinking: false leaves thinking out"
    kept = {"after a tool result": _keeps(template, _TOOL_RESULT), "after a user turn": _keeps(template, _USER_TURN)}
    shown = ", ".join(f"{what} {when}" for when, what in kept.items())
    words = f"{opening}; an earlier turn's is {shown}"
    return good("reasoning", words, opens_reasoning=opens, earlier_reasoning=kept)


def _keeps(template: TemplateRenderer, following: ChatMessage) -> str:
    """What becomes of a turn's reasoning, given by its own key or within the text, before a message."""
    calls = {"tool_calls": [_CALL]} if following["role"] == "tool" else {}
    for text in (
        {"content": "answer", "reasoning_content": _REASONING},
        {"content": f"<think>\n{_REASONING}\n</think>\n\nanswer"},
    ):
        try:
            rendered = template.render([_USER_TURN, {"role": "assistant", **text, **calls}, following], escaped=False)
        except TemplateError:
            return "refused"
        if _REASONING in rendered:
            return "kept"
    return "dropped"
