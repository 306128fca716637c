"""Write the tables of the documentation that come from the code: settings, metrics, commands, families, rooms ...

`python scripts/docs_tables.py` writes them between their markers; with `--check` it changes nothing and exits with 1 if
a page is stale.
"""

import argparse
import ast
import inspect
import json
import logging
import re
import runpy
import shlex
import subprocess
import sys
import textwrap
import tomllib
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, get_args, get_origin, get_type_hints
from unittest.mock import patch

from pydantic import BaseModel
from transformers import AutoTokenizer
from typer.main import get_command

from strands_rollout import Sample, StopReason, log_eval, log_rollout
from strands_rollout.cli.commands import app
from strands_rollout.diagnostics.template_check import check_template
from strands_rollout.evaluation.benchmarks import BENCHMARKS
from strands_rollout.evaluation.protocols import PROTOCOLS
from strands_rollout.samples import EpisodeFacts
from strands_rollout.settings import AgentCommand, EpisodeWorkers, Judge, McpServer, RewardSettings, RolloutSettings
from strands_rollout.slime_plugin import workers
from strands_rollout.slime_plugin.metrics import PER_SAMPLE
from strands_rollout.slime_plugin.sample_writer import _status
from strands_rollout.tool_parsers import get_parser

REPOSITORY: Final = Path(__file__).parents[1]
PAGES: Final = [*sorted((REPOSITORY / "docs").glob("*.md")), REPOSITORY / "CONTRIBUTING.md"]
_TOKENIZER: Final = REPOSITORY / "strands_rollout/engine/checkpoint"
_SLIME: Final = "https://github.com/THUDM/slime/blob/v0.3.1"
_BLOCK: Final = re.compile(r"(<!-- generated: ([\w-]+) -->\n).*?(<!-- end of generated -->)", re.DOTALL)
_STATISTIC: Final = re.compile(r"/(?:mean|p50|p90|p99|max)$")
_NAMED_PER_VALUE: Final = ("workers", "stop_reason", "truncation", "status", "drift_kind", "parts")
"""Metrics that are logged under one name per value, such as `stop_reason/<name>`."""
METRICS: Final[Mapping[str, tuple[str, str]]] = {
    "samples": ("total", "samples of the step"),
    "turns": ("distribution", "turns per sample"),
    "tool_iterations": ("distribution", "turns whose tool calls ran"),
    "tool_calls": ("distribution", "tool calls per sample"),
    "tool_errors": ("distribution", "tool calls that failed"),
    "unknown_tools": ("distribution", "calls of tools that do not exist"),
    "tool_timeouts": ("distribution", "tool calls that timed out"),
    "parse_failures": ("distribution", "malformed tool calls"),
    "sampled_tokens": ("distribution", "tokens that the policy sampled"),
    "generate_s": ("distribution", "seconds at the engine"),
    "tool_s": ("distribution", "seconds in tools"),
    "score_s": ("distribution", "seconds in the reward, from slime's trace or an episode worker"),
    "queue_s": ("distribution", "seconds waiting for an episode worker"),
    "workers/<name>": (
        "number",
        "for each worker N: `N/episodes` and `N/restarts` so far, and `N/busy`, the CPU cores that it used lately",
    ),
    "duration_s": ("distribution", "seconds of the whole episode"),
    "code/queued_s": ("distribution", "seconds waiting for the code executor"),
    "code/run_s": ("distribution", "seconds in the code executor"),
    "code/calls": ("total", "calls of the code tool"),
    "code/finished": ("total", "code calls that ended on their own"),
    "code/timeouts": ("total", "code calls that timed out"),
    "code/nonzero_exits": ("total", "code calls that ended on their own with an error"),
    "code/killed": ("total", "code calls that were ended by a signal, or by a limit other than the timeout"),
    "gateway/requests": ("distribution", "requests of an episode's program that could be parsed"),
    "gateway/repeats": ("distribution", "requests that repeat an earlier request and get its answer"),
    "gateway/forks": ("distribution", "requests that continue a conversation but extend none of its histories"),
    "gateway/refused": ("distribution", "requests that the gateway answered with an error"),
    "budget/response": ("distribution", "fraction of the response budget used, for samples with that limit"),
    "budget/context": ("distribution", "fraction of the context limit used, for samples with that limit"),
    "budget/tool_iterations": ("distribution", "fraction of `max_tool_iterations` used, for samples with that limit"),
    "budget/tool_calls": ("distribution", "fraction of `max_tool_calls` used, for samples with that limit"),
    "aborts": ("distribution", "times that a sample came back ABORTED"),
    "resumes": ("distribution", "times that an episode was resumed after an abort, or continued from its journal"),
    "engine_aborts": ("distribution", "requests that the engine aborted and whose turn was continued or repeated"),
    "weight_versions": ("distribution", "different weight versions in a sample"),
    "weight_version_spread": (
        "distribution",
        "newest weight version minus the oldest, if all versions of the sample are integers of one run",
    ),
    "stale_tokens": ("distribution", "tokens masked by `max_staleness`"),
    "too_old": (
        "share",
        "in training, with `max_sample_staleness`: samples that are too old to be trained; the log warns if the share "
        "is above 0.1",
    ),
    "dropped_sampled_tokens": ("distribution", "sampled tokens of the episode that are in no sample"),
    "stop_reason/<name>": ("share", "samples with this stop reason"),
    "status/<name>": ("share", "samples with this status"),
    "truncation/<name>": ("share", "samples with this stop reason, among the truncated samples"),
    "removed": ("share", "samples kept out of training"),
    "ungraded": (
        "total",
        "samples whose reward failed, for example because a judge was unavailable, or that have no label for the "
        "default grading",
    ),
    "drift_tokens": ("distribution", "sampled tokens that would change if the text of each turn were encoded again"),
    "drift_share": ("distribution", "`drift_tokens` as a fraction of the sampled tokens"),
    "text_drift_tokens": ("distribution", "sampled tokens that would change if the whole text were encoded again"),
    "off_policy_tokens": (
        "distribution",
        "sampled tokens at and after the first position where encoding the whole text again gives another token",
    ),
    "drift_kind/<name>": (
        "total",
        "drifted tokens by kind: `assistant_text`, `tool_call`, `whitespace`, `special_tokens`; `template` counts "
        "context tokens that would change if the whole text were encoded again",
    ),
    "drift_samples": ("total", "samples with any drift"),
    "drift_samples_share": ("share", "samples with any drift, among the measured samples"),
    "drift_measured": ("total", "samples whose drift was measured"),
    "mismatch_tokens": (
        "distribution",
        "context tokens that differ from the chat template's rendering, by default counted only in the first training "
        "step and the first evaluation of each data set; anything but 0 is a fault, which the log reports",
    ),
    "mismatch_samples": ("total", "samples with any mismatch"),
    "mismatch_samples_share": ("share", "samples with any mismatch, among the compared samples"),
    "mismatch_measured": ("total", "samples whose context was compared with the template"),
    "parts/<name>": (
        "distribution",
        "each part of your own reward, and each number of an environment's score except `score` and `acc`",
    ),
    "slowest/total_s": ("seconds", "the total time of the step's slowest sample: episode and reward"),
    "slowest/generate_s": ("seconds", "the slowest sample's time at the engine"),
    "slowest/tool_s": ("seconds", "the slowest sample's time in tools"),
    "slowest/score_s": ("seconds", "the slowest sample's time in the reward"),
    "slowest/other_s": ("seconds", "the slowest sample's remaining time"),
    "missing": (
        "total",
        "in evaluation: samples whose episode failed or was aborted, whose reward failed, or that have no label for "
        "the default grading",
    ),
    "accuracy": ("share", "in evaluation: right answers among the graded samples"),
}
"""Kind and meaning of each metric; `logged_metrics` finds the metrics that exist."""

_MODELS: Final[Mapping[str, str]] = {
    "hermes": "Qwen2.5, Qwen3, QwQ",
    "qwen3_coder": "Qwen3-Coder, Qwen3.5",
    "glm4": "GLM-4.5, 4.6",
    "glm4-7": "GLM-4.7",
    "kimi_k2": "Kimi K2",
    "deepseek_v3": "DeepSeek V3, R1",
    "deepseek_v3-1": "DeepSeek V3.1, with the package's template",
    "deepseek_v3-2": "DeepSeek V3.2",
    "deepseek_v4": "DeepSeek V4",
    "minimax_m2": "MiniMax-M2, M2.1, M2.5",
    "muse_glimmer": "Muse Glimmer",
    "seed_oss": "Seed-OSS",
    "gemma4": "Gemma 4",
    "apertus": "Apertus",
    "kimi_k3": "Kimi K3",
    "lfm2": "LFM2, LFM2.5",
    "pythonic": "Llama 4, Llama 3.2, in Python",
    "hunyuan3": "Hunyuan 3 (Hy3)",
    "hunyuan_a13b": "Hunyuan A13B",
    "llama3_json": "Llama 3.1, 3.2, 3.3; Llama 4",
    "mistral-array": "Mistral, calls as an array",
    "mistral-nemo": "Mistral Nemo, Small 3.2",
    "mistral-named": "Devstral, Ministral 3",
    "gpt_oss": "gpt-oss",
}
"""The models that use each of the tests' templates; a template without an entry is shown by its own name."""
_EPISODES: Final = 20


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table with a final newline."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines).replace("| --- ", "|---").replace("|--- |", "|---|")


_ELSEWHERE: Final[Mapping[type, str]] = {
    RewardSettings: "[rewards](rewards.md#settings)",
    EpisodeWorkers: "[`0`](training.md#episode-workers)",
}
"""Texts to show instead of the default, by the default's type."""


def settings_table(model: type[BaseModel]) -> str:
    """Keys, defaults and descriptions of a settings model."""
    rows = []
    for name, field in model.model_fields.items():
        default = field.get_default(call_default_factory=True)
        is_shown = type(default) not in _ELSEWHERE and not field.is_required()
        shown = f"`{json.dumps(default)}`" if is_shown else _ELSEWHERE.get(type(default), "")
        rows.append([f"`{name}`", shown, field.description or ""])
    return table(["key", "default", "meaning"], rows)


def stop_reasons_table() -> str:
    """Stop reasons with their docstrings, and the status of the sample."""
    meanings = attribute_docstrings(StopReason)
    rows = [
        [f"`{reason}`", meanings[reason.name].rstrip("."), _status(Sample(), reason, may_abort=True).name]
        for reason in StopReason
    ]
    return table(["stop reason", "when", "sample"], rows)


def facts_table() -> str:
    """The facts of an episode with their docstrings, and their types in JSON."""
    kinds = {float: "number", int: "integer", str: "string", bool: "boolean", list: "array", Mapping: "object"}
    meanings = attribute_docstrings(EpisodeFacts)
    rows = []
    for name, hint in get_type_hints(EpisodeFacts).items():
        kind = get_args(hint)[0]
        rows.append([f"`{name}`", kinds.get(get_origin(kind) or kind, "any"), meanings[name]])
    return table(["name", "type", "meaning"], rows)


def attribute_docstrings(given: type) -> dict[str, str]:
    """The docstrings below the attributes of a class, by name, on one line each.

    Raises:
        TypeError: `given` is not a class.
    """
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(given))).body
    if not isinstance(definition, ast.ClassDef):
        raise TypeError(f"got {definition}; expected a class")
    found = {}
    for assigned, following in pairwise(definition.body):
        target = assigned.targets[0] if isinstance(assigned, ast.Assign) else getattr(assigned, "target", None)
        text = following.value.value if isinstance(following, ast.Expr) else None  # type: ignore[attr-defined]
        if isinstance(target, ast.Name) and isinstance(text, str):
            found[target.id] = re.sub(r"\s+", " ", text)
    return found


def commands_table() -> str:
    """The commands of `strands-rollout` with the first sentence of their help."""
    commands: Mapping[str, Any] = get_command(app).commands  # type: ignore[attr-defined]
    rows = [[f"`strands-rollout {name}`", _first_sentence(command.help)] for name, command in commands.items()]
    return table(["command", "what it does"], rows)


def launch_settings_table() -> str:
    """The settings that the scripts for slime declare.

    If a default depends on the model, show the default of a model without a row, which is also Qwen3-8B's. Show no
    default that depends on other settings or on the machine.

    Raises:
        ValueError: A setting's meaning can't be read.
    """
    folder = REPOSITORY / "scripts"
    rows: dict[str, list[str]] = {}
    shared = [folder / f"launch/{name}.sh" for name in ("job", "evaluation", "training", "slime", "ray", "watch")]
    scripts = ["train", "eval_aime", "prepare_model"]
    for path in (*shared, *(folder / f"{name}.sh" for name in scripts)):
        source = path.read_text().replace("\\\n", " ")
        for line in re.findall(r"^ *setting [A-Z0-9_]+ .*", source, re.MULTILINE):
            name, default, meaning = shlex.split(line)[1:4]
            if " " not in meaning:
                raise ValueError(f"the meaning of {name} in {path.name} can't be read: {line}")
            default = re.sub(r"\$\{(?:default_\w+|response):-([\w.]*)\}", r"\1", default)  # without a model's row
            chosen = re.fullmatch(r"\$\(smoke_or_full (\S+) (\S+)\)", default)
            if chosen:
                default, smoke = chosen[2], f" Default in a smoke run: `{chosen[1].removeprefix('$')}`."
            else:
                smoke = ""
            of = "" if path in shared or name == "NUM_GPUS" else f"`{path.name}`: "
            shown = f"`{default}`" if default and "$" not in default else ""
            rows.setdefault(name, [f"`{name}`", shown, f"{of}{meaning}.{smoke}"])
    return table(["setting", "default", "meaning"], rows.values())


def launch_models_table() -> str:
    """The rows of scripts/launch/models.sh, as bash reads them."""
    keys = ["nodes", "gpus", "tp", "pp", "cp", "ep", "tokens", "response", "engine", "memory", "offload", "estimator"]
    keys += ["parser", "thinking", "r3", "fp8", "gpu_gb", "source"]
    shown = " ".join(f'"$model_{key}"' for key in keys)
    program = f"""repository={REPOSITORY}; source "$repository/scripts/launch/models.sh"; fail() {{ exit 1; }}
        for name in $(model_names); do model_row "$name"; printf '%s|' "$name" {shown}; echo; done"""
    bash = ["bash", "-euc", program]
    printed = subprocess.run(bash, capture_output=True, text=True, check=True).stdout  # noqa: S603 - the repository's own script
    rows = []
    for line in printed.splitlines():
        name, *values = line.rstrip("|").split("|")
        row = dict(zip(keys, values, strict=True))
        budget = row["tokens"] and int(row["tokens"]) * int(row["cp"]) - 2048
        response = row["response"] or str(min(16384, int(budget)))
        tokens = row["tokens"] or str((int(response) + 2048) // int(row["cp"]))
        engines = f"{row['engine']}, {row['memory']}"
        extras = {"offload": "CPU Adam", "r3": "R3", "fp8": "FP8 rollout"}
        marks = [text for key, text in extras.items() if row[key] == "1"]
        marks += [row["estimator"]] if row["estimator"] != "grpo" else []
        marks += [f"GPUs of {row['gpu_gb']} GB"] if row["gpu_gb"] else []
        sizes = " ".join(f"{key.upper()}{row[key]}" for key in ("tp", "pp", "cp", "ep") if row[key] != "1")
        nodes = f"{row['nodes']} x {row['gpus']}"
        files = [part for part in row["source"].split(", ") if "/" in part]
        sources = ", ".join(f"[{path.rsplit('/')[-1]}]({_SLIME}/{path})" for path in files) or row["source"]
        parser = "" if row["parser"] == "unknown" else f"`{row['parser']}`"
        cells = [f"`{name}`", nodes, sizes or "TP1", tokens, response, engines, parser, row["thinking"]]
        rows.append([*cells, ", ".join(marks), sources])
    head = ["`MODEL`", "nodes x GPUs", "trainer", "tokens per GPU", "response", "engine: GPUs, memory", "`tool_parser`"]
    return table([*head, "reasoning", "also", "numbers from slime's"], rows)


def layers() -> list[list[str]]:
    """The layers that import-linter checks, top to bottom, each with its rooms (see docs/architecture.md)."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    contracts = project["tool"]["importlinter"]["contracts"]
    (lines,) = (contract["layers"] for contract in contracts if contract["id"] == "layers")
    return [re.findall(r"\w+", line) for line in lines]


def layers_picture() -> str:
    """Return the layers as text, one line per layer."""
    return "```text\n" + "".join(f"{' | '.join(rooms)}\n" for rooms in layers()) + "```\n"


def rooms_table() -> str:
    """Return the rooms by layer, with the first sentence of each room's docstring."""
    rows = []
    for number, rooms in enumerate(layers(), start=1):
        for room in rooms:
            folder = REPOSITORY / "strands_rollout" / room
            source = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
            sentence = _first_sentence(ast.get_docstring(ast.parse(source.read_text())))
            rows.append([str(number), f"`{room}`", sentence])
    return table(["layer", "room", "purpose"], rows)


def _first_sentence(text: str | None) -> str:
    sentence = re.match(r".*?\.(?=\s|$)", re.sub(r"\s+", " ", text or ""))
    return sentence[0] if sentence else ""


def logged_metrics() -> dict[str, bool]:
    """Return the metrics of a sample that has every fact, and whether each metric is a distribution."""
    facts = {
        **dict.fromkeys(PER_SAMPLE, 1),
        "stop_reason": "turn_length",
        "budgets": dict.fromkeys(["response", "context", "tool_iterations", "tool_calls"], 0.5),
        "queue_s": 0.0,
        "code": {"calls": 1, "queued_s": 0.0, "run_s": 0.0, "timeouts": 0, "killed": 0, "nonzero_exits": 0},
        "gateway": {"requests": 1, "repeats": 0, "forks": 0, "refused": {}},
        "weight_versions": ["1"],
        "spans": [[0, 0, 1, "1"]],
    }
    times = [
        {"type": f"span_{edge}", "name": "reward_model", "ts": ts, "span_id": "a"}
        for edge, ts in (("start", 1.0), ("end", 2.0))
    ]
    sample = SimpleNamespace(
        metadata={"strands_rollout": facts},
        trace={"events": times},
        tokens=[1],
        status="truncated",
        remove_sample=False,
        reward={"acc": 1.0, "parts/tone": 0.5},
    )
    args = Namespace(hf_checkpoint=str(_TOKENIZER), strands_rollout={"max_sample_staleness": 4})
    with patch.object(workers, "pool_metrics", lambda: {"workers/0/busy": 0.5}):
        lines = _lines_logged_by(lambda: log_rollout(0, args, [sample], None, 1.0))
        lines += _lines_logged_by(lambda: log_eval(0, args, {"set": {"rewards": [1.0], "samples": [sample]}}, None))
    found: dict[str, bool] = {}
    for name in re.findall(r"(?:rollout|eval/set)/agent/(\S+)=", "\n".join(lines)):
        base = _STATISTIC.sub("", name)
        group = base.partition("/")[0]
        found[f"{group}/<name>" if group in _NAMED_PER_VALUE else base] = base != name
    return found


def _lines_logged_by(log: Callable[[], object]) -> list[str]:
    """Return the log lines of a call."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("strands_rollout")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        log()
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    return lines


def metrics_table() -> str:
    """The metrics that are logged.

    Raises:
        ValueError: `METRICS` lacks a logged metric, has a metric that is not logged, or has a wrong kind.
    """
    found = logged_metrics()
    expected = {name: kind == "distribution" for name, (kind, _) in METRICS.items()}
    if found != expected:
        raise ValueError(
            f"METRICS and the logged metrics differ in {found.items() ^ expected.items()}; correct METRICS"
        )
    return table(["metric", "kind", "meaning"], [[f"`{name}`", *about] for name, about in METRICS.items()])


def families_table() -> str:
    """Return the findings of `check-template` about each family's template in tests/support."""
    support = runpy.run_path(str(REPOSITORY / "tests/support/family_templates.py"))
    tokenizer, rows = AutoTokenizer.from_pretrained(_TOKENIZER), []
    for family, (_, template) in support["TEMPLATES"].items():
        found = check_template(family, support["tokenizer_with"](template, tokenizer), episodes=_EPISODES)
        rules, facts = {one.name: one for one in found}, {key: fact for one in found for key, fact in one.facts.items()}
        parser = get_parser(facts["tool_parser"])
        played = facts.get("random_episodes", {"contexts": 0, "without": ["everything"]})
        notes = [
            *(["drops text in turns with calls"] if rules["text beside calls"].found != "yes" else []),
            *(["uses another end token after calls"] if rules["end of a turn with calls"].found != "yes" else []),
            *(f"refuses {name}" for name in played["without"]),
        ]
        tag = getattr(parser, "open_reasoning", "").replace("|", "\\|")
        reasoning = f"`{tag}`{', which the prompt opens' if facts['opens_reasoning'] else ''}" if tag else "a channel"
        several = "yes" if rules["several calls"].found == "append-only" else "each result rendered as after one call"
        exact = f"all {played['contexts']}" if rules["random episodes"].status == "ok" else "**no**"
        name = _MODELS.get(family, f"`{family}`")
        rows.append([name, f"`{facts['tool_parser']}`", exact, "; ".join(notes), reasoning, several])
    head = ["family", "`tool_parser`", "identical contexts", "template", "reasoning", "parallel calls"]
    return table(head, rows)


def benchmarks_table() -> str:
    """Return the benchmarks with their data sets, their grading, and the sampling of each protocol."""
    grading = {"math": "mathematics", "choice": "letter of a choice", "ifeval": "instructions"}
    rows = []
    for benchmark in BENCHMARKS.values():
        config = f", `{benchmark.config}`" if benchmark.config else ""
        cells = [f"`{benchmark.name}`", str(benchmark.rows), f"`{benchmark.data_set}`{config}, {benchmark.split}"]
        cells.append(grading[benchmark.grading])
        for protocol in PROTOCOLS.values():
            sampling = protocol.sampling_of(benchmark)
            is_covered = benchmark.grading not in protocol.excluded
            cells.append(f"{sampling.samples} x {sampling.max_new_tokens:,} tokens" if is_covered else "no")
        rows.append(cells)
    head = ["benchmark", "problems", "data set on the hub", "grading", *(f"`{name}`" for name in PROTOCOLS)]
    return table(head, rows)


TABLES: Final[Mapping[str, Callable[[], str]]] = {
    "benchmarks": benchmarks_table,
    "settings": lambda: settings_table(RolloutSettings),
    "reward": lambda: settings_table(RewardSettings),
    "judge": lambda: settings_table(Judge),
    "command": lambda: settings_table(AgentCommand),
    "mcp": lambda: settings_table(McpServer),
    "workers": lambda: settings_table(EpisodeWorkers),
    "launch": launch_settings_table,
    "models": launch_models_table,
    "stop-reasons": stop_reasons_table,
    "families": families_table,
    "commands": commands_table,
    "metrics": metrics_table,
    "layers": layers_picture,
    "facts": facts_table,
    "rooms": rooms_table,
}


def update_tables(text: str) -> str:
    """Return a page with its tables updated from the code."""
    return _BLOCK.sub(lambda block: f"{block[1]}\n{TABLES[block[2]]()}\n{block[3]}", text)


def main() -> int:
    """Write or check all pages; return 1 if a checked page is stale."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing, and exit with 1 if a page is stale")
    only_check = parser.parse_args().check
    stale = []
    for page in PAGES:
        text = page.read_text()
        new = update_tables(text)
        if new != text:
            stale.append(page.name)
            if not only_check:
                page.write_text(new)
    if stale:
        print(f"{'stale' if only_check else 'written'}: {', '.join(stale)}", file=sys.stderr)
    return int(only_check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
