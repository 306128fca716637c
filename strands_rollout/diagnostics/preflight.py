"""`strands-rollout doctor --training`: the checks of one training command, and a summary of what its run will do."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import nlargest
from pathlib import Path
from statistics import fmean
from typing import Final

import httpx

from strands_rollout import diagnostics
from strands_rollout.diagnostics import DoctorOptions, Finding, count_of, error, good, run_program, skipped, warning
from strands_rollout.diagnostics.flag_check import check_flags, find_slime_checkout, load_flag_table, read_command
from strands_rollout.diagnostics.run_files import check_eval_config, settings_or_defaults
from strands_rollout.diagnostics.slime_episode import find_megatron
from strands_rollout.diagnostics.training_command import (
    GB,
    EngineCache,
    TrainingCommand,
    data_file,
    engine_cache,
    evaluation_sets,
    model_size,
    saved_gb,
    training_memory,
)
from strands_rollout.errors import ConfigError, PromptError, RolloutError
from strands_rollout.evaluation.slime_protocol import model_positions
from strands_rollout.play.rows import Row, iter_rows
from strands_rollout.secret_mask import mask_text
from strands_rollout.settings import RolloutSettings, read_config_file

_DEFAULT_SCRIPT: Final = "scripts/strands_qwen3_8b.sh"
_TOKENIZED_ROWS: Final = 100
_LONG_ROWS: Final = 3
_GPU_GB: Final = 80.0  # an H100's memory, used if nvidia-smi lists no GPU here
_MIB_GB: Final = 1024**2 / GB
_JUDGE_TIMEOUT_S: Final = 5.0
_OUTAGE_S: Final = 300.0  # an outage of all engines up to this length should cost no step
_MEGATRON_TIMEOUT_S: Final = 50.0
# This program applies Megatron's own rule for batch sizes, and prints why Megatron refuses them, if it does.
_MEGATRON_RULE: Final = """
import sys
from megatron.core.num_microbatches_calculator import ConstantNumMicroBatchesCalculator as Calculator
batch, micro, replicas = map(int, sys.argv[1:4])
try:
    Calculator(batch, micro, replicas, False, 0)
except AssertionError as e:
    print(e)
"""
_REMEDY_MEMORY: Final = (
    "raise --tensor-model-parallel-size or --context-parallel-size, or lower --max-tokens-per-gpu "
    "together with --rollout-max-context-len"
)


def _default_script(options: DoctorOptions) -> Path | None:
    script = options.repository / _DEFAULT_SCRIPT
    is_default_model = options.model_id.endswith(f"/{diagnostics.DEFAULT_MODEL_NAME}")
    return script if is_default_model and script.is_file() else None


def read_preflight(script: Path | None, arguments: Sequence[str], options: DoctorOptions) -> Preflight | None:
    """Return the checks of the command with the arguments in `script` (see `read_command`), followed by `arguments`.

    Without a script and arguments, take the command of Qwen3-8B's launch script. In this case, return None if that
    script is missing or the options name another model.

    Raises:
        ConfigError: `read_command` can't read the arguments.
    """
    if script is None and not arguments:
        script = _default_script(options)
        if script is None:
            return None
    read = read_command(script, _slime_checkout(options))
    return Preflight((*read.words, *arguments), read.source)


@dataclass(frozen=True, slots=True)
class Prompts:
    """The prompts of a data set.

    Attributes:
        rows: Number of rows that slime takes.
        lengths: Tokens of the first request, system prompt and tools included, for rows spread evenly over the data.
        longest: Maximum tokens of a first request, also over the rows whose prompts have the most characters.
    """

    rows: int
    lengths: Sequence[int]
    longest: int


class Preflight:
    """The checks of a command: methods that take the doctor's options and yield findings."""

    def __init__(self, words: Sequence[str], source: str) -> None:
        self.command = TrainingCommand(tuple(words))
        self._words, self._source = tuple(words), source
        self._size = model_size(self.command)

    def with_command_values(self, options: DoctorOptions) -> DoctorOptions:
        """Return the options, with the model, files, GPUs per node and keys of rows taken from the command.

        The options `data`, `gpus` and `model_name` take precedence over the command. The command takes precedence over
        `config`, over the keys of rows, and over the environment variables HF_CHECKPOINT, REF_LOAD and SAVE_DIR. If
        RAY_ADDRESS is set, the command's GPUs per node are ignored, because they need not be on this machine.
        """
        command = self.command
        variables = {"HF_CHECKPOINT": "--hf-checkpoint", "REF_LOAD": "--ref-load", "SAVE_DIR": "--save"}
        given = {name: value for name, flag in variables.items() if (value := command.text(flag))}
        config = command.text("--custom-config-path")
        evaluated = evaluation_sets(command.values.get("--eval-prompt-data", ()))
        data = [data_file(path)[0] for path in (command.text("--prompt-data"), *evaluated.values()) if path]
        gpus = options.gpus
        if gpus is None and not options.env.get("RAY_ADDRESS"):
            gpus = command.int_value("--num-gpus-per-node") or command.int_value("--actor-num-gpus-per-node") or None
        return replace(
            options,
            env={**options.env, **given},
            model_name=options.model_name or (Path(given["HF_CHECKPOINT"]).name if "HF_CHECKPOINT" in given else None),
            gpus=gpus,
            config=Path(config) if config else options.config,
            data=options.data or data or None,
            # "input" is slime's default (slime/utils/arguments.py)
            prompt_key=command.text("--input-key") or ("input" if command.has("--prompt-data") else options.prompt_key),
            label_key=command.text("--label-key") or options.label_key,
        )

    def check_flags(self, options: DoctorOptions) -> Iterator[Finding]:
        """Check the flags as `doctor --flags` does."""
        table = load_flag_table(_slime_checkout(options), find_megatron(options))
        found = check_flags(self._words, table)
        for fault in found.findings:
            remedy = f"use {fault.nearest}" if fault.nearest else "correct it in the command"
            yield (error if fault.severity == "error" else warning)(f"command: {fault.flag}", fault.problem, remedy)
        if found.unread:
            unread = f"{', '.join(found.unread)} could not be read, because slime was not found"
            yield skipped("command: model", f"{unread}, so sizes of the model are not checked")
        if found.ok:
            yield good("command", f"{self._source}: slime's parsers know all {found.flags} flags")

    def check_batch(self, options: DoctorOptions) -> Iterator[Finding]:
        """Check that engines use all generating GPUs, and that replicas share an optimizer step evenly.

        The check of replicas runs Megatron-LM's own rule, or checks divisibility if Megatron-LM can't be run.
        """
        command = self.command
        # --sglang-config has its own sizes of engines
        if command.rollout_gpus % command.engine_gpus and not command.has("--sglang-config"):
            found = (
                f"{command.rollout_gpus} GPUs generate; engines have {command.engine_gpus} each, so some GPUs are idle"
            )
            remedy = "make --rollout-num-gpus a multiple of --rollout-num-gpus-per-engine"
            yield error("command: engines", found, remedy)
        batch, micro = command.optimizer_batch, max(command.int_value("--micro-batch-size", 1), 1)
        if not batch or command.training_gpus % command.replica_gpus:
            return  # `check_flags` reports GPUs that form no whole replicas; without a batch size nothing is checked
        if not command.training_gpus:
            yield error("command: batch", "no GPU trains", "set --actor-num-nodes and --actor-num-gpus-per-node")
            return
        replicas, folder = command.replicas, find_megatron(options)
        paths = [str(folder)] if folder else []
        env = {**options.env, "PYTHONPATH": os.pathsep.join([*paths, options.env.get("PYTHONPATH", "")])}
        numbers = map(str, (batch, micro, replicas))
        answer = run_program(sys.executable, "-c", _MEGATRON_RULE, *numbers, env=env, timeout_s=_MEGATRON_TIMEOUT_S)
        rule = "Megatron-LM's own rule"
        if answer is None or answer.exit_code != 0:
            rule = "Megatron-LM's rule, as the doctor computes it"
            refusal = "" if batch % (micro * replicas) == 0 else f"{batch} is not divisible by {micro} x {replicas}"
        else:
            refusal = answer.stdout
        shown = f"{batch} samples an optimizer step, {count_of(replicas, 'replica')}, micro batches of {micro}"
        if refusal:
            each = micro * replicas
            remedy = f"set --global-batch-size to a multiple of {each}, such as {(batch // each + 1) * each}"
            if command.int_value("--num-steps-per-rollout"):
                sizes = "--num-steps-per-rollout and --rollout-batch-size"
                remedy = f"choose {sizes} so that an optimizer step has a multiple of {each} samples"
            yield error("command: batch", f"{shown}; refused by {rule}: {refusal}", remedy)
        else:
            yield good("command: batch", f"{shown}: accepted by {rule}")

    def check_context(self, options: DoctorOptions) -> Iterator[Finding]:
        """Check that the longest episode fits a micro batch and the model, and that responses leave tokens for prompts.

        For evaluations, check that the context fits the model, and that responses are shorter than the context.
        """
        command, name = self.command, "command: context"
        context, response = command.context, command.int_value("--rollout-max-response-len")
        trainable, faults = command.trainable_context, False
        if trainable and context > trainable:
            faults = True
            found = (
                f"--rollout-max-context-len is {context}; --max-tokens-per-gpu x context parallel size is {trainable}"
            )
            yield error(name, f"{found}: a longer sample may exhaust the memory", "make the product at least as large")
        if context and response >= context:
            faults = True
            found = f"--rollout-max-response-len is {response} and the context {context}, so prompts get no tokens"
            yield error(
                name, found, "raise --rollout-max-context-len to the sum of the response and the longest prompt"
            )
        evaluated, response_evaluated = command.evaluated_context, command.int_value("--eval-max-response-len")
        if evaluated and command.evaluations and response_evaluated >= evaluated:
            faults = True
            found = (
                f"--eval-max-response-len is {response_evaluated}; the evaluation's context has {evaluated} tokens, "
                "prompt included, so responses are cut"
            )
            yield error(name, found, "raise --eval-max-context-len, or lower --eval-max-response-len")
        given = command.int_value("--sglang-context-length")
        positions = given or model_positions(options.model)
        limit = f"--sglang-context-length is {positions}" if given else f"the model has {positions} positions"
        for phase, length in (("training", context), ("evaluation", command.evaluated_context)):
            if positions and length > positions:
                faults = True
                found = f"the context of {phase} is {length} tokens; {limit}"
                yield error(
                    name,
                    found,
                    f"lower --rollout-max-context-len (for evaluations, --eval-max-context-len) to {positions}: SGLang "
                    "refuses longer requests",
                )
        if context and not faults:
            fits = f", which fits into the {trainable} tokens of a micro batch" if trainable else ""
            yield good(name, f"{response} tokens of a response in a context of {context}{fits}")

    def check_memory(self, options: DoctorOptions) -> Iterator[Finding]:
        """Check that a training step fits into a GPU's memory, and concurrent episodes into an engine's KV cache."""
        size, command = self._size, self.command
        if size is None:
            yield skipped("command: memory", "the size of the model is unknown, so memory is not computed")
            return
        gpu_gb, kind = _gpu_memory(options)
        parts = training_memory(command, size)
        total = sum(parts.values())
        shown = ", ".join(f"{name} {gb:.1f}" for name, gb in parts.items() if gb)
        found = f"training takes about {total:.0f} of {gpu_gb:.0f} GB of {kind}: {shown}"
        is_too_much = total > gpu_gb
        yield (warning("command: memory", found, _REMEDY_MEMORY) if is_too_much else good("command: memory", found))
        model_gb = _weights_gb(options.model)
        cache = engine_cache(command, size, gpu_gb, model_gb)
        if cache is not None:
            yield self._check_cache(cache, "" if model_gb else " (in bf16, if the model is not quantized)")

    def _check_cache(self, cache: EngineCache, assumption: str) -> Finding:
        name, needed = "command: KV cache", self._episode_tokens()
        command = self.command
        each = -(-command.concurrent_episodes // max(command.engines, 1))
        weights = f"{cache.weights_gb:.0f} GB of weights per GPU{assumption}"
        shown = f"{weights}, {max(cache.tokens, 0):,} tokens of cache per engine"
        if cache.tokens // cache.parts < command.context:
            remedy = "raise --rollout-num-gpus-per-engine or --sglang-mem-fraction-static"
            found = f"{shown}; one episode of {command.context:,} tokens does not fit"
            return (warning if assumption else error)(name, found, remedy)
        found = f"{shown}; {each} episodes of {needed:,} tokens need {each * needed:,}"
        if command.only_evaluates:
            return good(name, shown)
        if each * needed > cache.tokens:
            most = max(cache.tokens // needed, 1)
            remedy = (
                f"lower --sglang-server-concurrency to {most}; otherwise, SGLang retracts requests and reads their "
                "tokens again"
            )
            return warning(name, found, remedy)
        return good(name, found)

    def _episode_tokens(self) -> int:
        """Return the tokens that an unfinished episode is assumed to hold on average."""
        return max(self.command.context // 2, 1)

    def check_disk(self, _options: DoctorOptions) -> Iterator[Finding]:
        """Check that `--save-interval` is above 0, and that simultaneous checkpoints fit the free space."""
        size, folder = self._size, self.command.text("--save")
        yield from self._check_interval("command: disk", "--save-interval")
        if size is None or folder is None or not self.command.saves:
            return
        each, kept = saved_gb(self.command, size), self.command.kept_saves
        paths = (Path(folder).absolute(), *Path(folder).absolute().parents)
        try:
            free = shutil.disk_usage(next(path for path in paths if path.exists())).free / GB
        except (OSError, ValueError) as e:
            yield error("command: disk", f"--save {folder:.200} can't be used: {e}", "name a writable folder")
            return
        found = f"{kept} checkpoints of {each:.0f} GB at once: {kept * each:,.0f} GB; {free:,.0f} GB free at {folder}"
        if kept * each > free:
            remedy = (
                "free some space, save to a larger disk, or keep fewer checkpoints: KEEP_ALL_CHECKPOINTS=0, or "
                "a larger --save-interval"
            )
            yield error("command: disk", found, remedy)
        else:
            yield good("command: disk", found)

    def _check_interval(self, name: str, flag: str) -> Iterator[Finding]:
        """Yield an error if the interval is 0: slime's `should_run_periodic_action` divides by it after a step."""
        if self.command.int_value(flag, 1) == 0:
            yield error(name, f"{flag} is 0; slime divides by it after the first step", "set it to at least 1")

    def check_data(self, options: DoctorOptions) -> Iterator[Finding]:
        """Check that prompts are within their limit and leave tokens for responses, and that no step repeats rows.

        Only some of the rows are measured; see `measure_prompts`.
        """
        name, command = "command: prompts", self.command
        path = command.text("--prompt-data")
        if path is None or not _is_file(data_file(path)[0]):
            return  # `run_files.check_data` reports a missing file
        try:
            prompts = measure_prompts(path, options, command.text("--hf-checkpoint"))
        except RolloutError as e:
            yield error(name, f"{path}: {e}", "correct the rows, the tools or the chat template")
            return
        longest, mean = prompts.longest, fmean(prompts.lengths)
        measured = (
            f"{len(prompts.lengths)} of {prompts.rows:,} prompts have {mean:.0f} tokens on average, and the longest "
            f"measured prompt has {longest} tokens"
        )
        steps, batch = command.int_value("--num-rollout"), command.int_value("--rollout-batch-size")
        epochs = f"; {steps * batch / prompts.rows:.1f} passes over the data" if steps and batch else ""
        context_limit = command.context - 1 if command.context else sys.maxsize
        limit = command.int_value("--rollout-max-prompt-len") or context_limit
        response = command.int_value("--rollout-max-response-len")
        if longest > limit:
            remedy = "raise --rollout-max-prompt-len (if it is not set, --rollout-max-context-len), or drop long rows"
            yield error(name, f"{path}: {measured}; the limit is {limit}", remedy)
        elif command.context and longest + response > command.context:
            left = command.context - longest
            found = f"{path}: {measured}, which leave {left} for a response (--rollout-max-response-len is {response})"
            yield warning(name, found, f"raise --rollout-max-context-len to {longest + response}, or drop long rows")
        elif batch > prompts.rows:
            found = f"{path}: {measured}; a step has {batch} prompts, so it repeats some"
            yield warning(name, found, "add rows, or lower --rollout-batch-size")
        else:
            yield good(name, f"{path}: {measured}{epochs}", prompt_rows=prompts.rows, prompt_tokens_max=longest)

    def check_evaluation(self, _options: DoctorOptions) -> Iterator[Finding]:
        """Check that evaluations have an interval, a rollout function that can evaluate, and readable data."""
        command = self.command
        yield from self._check_interval("command: evaluation", "--eval-interval")
        if command.fails_to_evaluate:
            found = "slime's fully asynchronous rollout can't evaluate, so the first evaluation ends the run"
            yield error("command: evaluation", found, "leave out --eval-interval, and run scripts/eval_aime.sh --watch")
        elif command.evaluations and not (command.has("--eval-prompt-data") or command.has("--eval-config")):
            interval = command.int_value("--eval-interval")
            found = f"--eval-interval is {interval}, but no data set to evaluate is named; slime refuses that"
            yield error("command: evaluation", found, "add --eval-prompt-data NAME FILE, or leave out --eval-interval")
        if config := command.text("--eval-config"):
            if _is_file(Path(config)):
                yield check_eval_config(Path(config))
            else:
                found = f"{config:.200} does not exist"
                yield warning(
                    "eval config",
                    found,
                    "correct --eval-config; a launch script writes the file of an evaluation protocol when it starts",
                )

    def check_outage(self, options: DoctorOptions) -> Iterator[Finding]:
        """Check that `episode_timeout_s` and `engine_patience_s` outlast a short outage of all engines."""
        settings = settings_or_defaults(options)
        for name in ("episode_timeout_s", "engine_patience_s"):
            limit_s: float | None = getattr(settings, name)
            if limit_s is not None and limit_s < _OUTAGE_S:
                found = f"{name} is {limit_s:g} s: if all engines are down for longer, all running episodes fail"
                remedy = f"raise it to {_OUTAGE_S:g} s or more, so that an outage of a few minutes costs no step"
                yield warning("command: outage", found, remedy)

    def check_pass_rates(self, options: DoctorOptions) -> Iterator[Finding]:
        """Yield an error if fan-out and --log-passrate are both on: slime's pass rates need groups of equal size."""
        if settings_or_defaults(options).fan_out and self.command.has("--log-passrate"):
            found = "fan_out is on; with fan-out, --log-passrate ends the run at its first training step"
            yield error("command: pass rates", found, "leave out --log-passrate (LOG_PASSRATE=0)")

    def check_judges(self, options: DoctorOptions) -> Iterator[Finding]:
        """Check that the server of each judge with a `base_url` answers and accepts the key."""
        for name, url, key in _judges(settings_or_defaults(options)):
            shown = mask_text(url)
            try:
                headers = {"authorization": f"Bearer {key}"} if key else {}
                status = httpx.get(f"{url.rstrip('/')}/models", headers=headers, timeout=_JUDGE_TIMEOUT_S).status_code
            except UnicodeError:
                yield error(
                    f"judge {name}".strip(), "the key has a character that no HTTP header may have", "correct api_key"
                )
                continue
            except (httpx.HTTPError, httpx.InvalidURL) as e:
                found = f"nothing answers at {shown}: {mask_text(str(e)) or type(e).__name__}"
                yield error(f"judge {name}".strip(), found, "start the judge's server, or correct base_url")
                continue
            if status in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
                yield error(f"judge {name}".strip(), f"{shown} refuses the key ({status})", "correct api_key")
            elif status >= httpx.codes.INTERNAL_SERVER_ERROR:
                yield warning(f"judge {name}".strip(), f"{shown} is up, but fails ({status})", "see its log")
            else:
                yield good(f"judge {name}".strip(), f"{shown} answers ({status})")

    def summarize(self, options: DoctorOptions) -> Iterator[Finding]:
        """Yield the lines that show what the run will do."""
        for name, text in self._lines(options):
            yield good(f"this run: {name}", text)

    def _lines(self, options: DoctorOptions) -> Iterator[tuple[str, str]]:
        command, size = self.command, self._size
        model = Path(command.text("--hf-checkpoint") or "the model").name
        # layers of a --spec have parameters that are not counted
        at_least = "at least " if command.has("--spec") else ""
        parameters = f" ({at_least}{size.parameters / 1e9:.1f} billion parameters)" if size else ""
        yield "model", f"{model}{parameters}"
        sizes = ", ".join(
            f"{title} {command.parallel(kind)}"
            for title, kind in (("TP", "tensor-model"), ("PP", "pipeline-model"), ("CP", "context"))
        )
        where = "the same GPUs generate in turns" if command.is_colocated else f"{command.rollout_gpus} others generate"
        yield (
            "GPUs",
            f"{command.training_gpus} train as {count_of(command.replicas, 'replica')} ({sizes}); {where}, as "
            f"{count_of(command.engines, 'engine')} of {command.engine_gpus}",
        )
        if command.only_evaluates:
            yield "samples", "none for training: the job only evaluates"
        else:
            yield from self._step_lines()
        held = f"{command.kept_saves} on disk at once" if command.saves else ""
        gb = f" of {saved_gb(command, size):.0f} GB" if size else ""
        save = (
            f"{command.saves}{gb}, every {command.int_value('--save-interval')} steps, {held}, in "
            f"{command.text('--save')}"
        )
        yield "checkpoints", save if command.saves else "none"
        yield "evaluations", self._evaluations()
        yield "agent", f"{options.config_file}, reward {command.text('--custom-rm-path') or command.text('--rm-type')}"
        wandb = f"wandb, group {command.text('--wandb-group')}" if command.has("--use-wandb") else "the job's output"
        dumps = command.text("--save-debug-rollout-data")
        yield "logs", f"{wandb}; samples of each step: {dumps or 'not kept'}"

    def _step_lines(self) -> Iterator[tuple[str, str]]:
        command = self.command
        batch = command.optimizer_batch or command.samples
        prompts, each = command.int_value("--rollout-batch-size"), command.int_value("--n-samples-per-prompt", 1)
        yield (
            "samples",
            f"{command.int_value('--num-rollout'):,} steps of {prompts} prompts x {each} episodes = {command.samples} "
            f"samples; {command.samples // max(batch, 1)} x {batch} samples for the optimizer",
        )
        most = command.samples * command.context
        yield (
            "tokens",
            f"at most {most:,} a step, {most // 2:,} if episodes use half of their context; a micro batch has at most "
            f"{command.trainable_context or command.context:,}",
        )
        concurrent, tokens = command.concurrent_episodes, self._episode_tokens()
        yield (
            "in flight",
            f"up to {concurrent} episodes on {count_of(command.engines, 'engine')}, about "
            f"{concurrent * tokens:,} tokens",
        )
        yield "rollout", self._rollout()

    def _rollout(self) -> str:
        command = self.command
        if command.is_fully_async:
            held = command.concurrent_episodes
            return f"fully asynchronous: engines generate while the trainer trains, up to {held} episodes at once"
        parts = []
        if over := command.int_value("--over-sampling-batch-size"):
            parts.append(f"{over} prompts start at once")
        if path := command.text("--dynamic-sampling-filter-path"):
            parts.append(f"groups must pass {path}")
        parts.append(
            "unfinished episodes resume" if command.has("--partial-rollout") else "a step waits for its episodes"
        )
        return "; ".join(parts)

    def _evaluations(self) -> str:
        command = self.command
        if not command.evaluations:
            return "none in this run; see scripts/eval_aime.sh --watch"
        every = f"{command.evaluations}, every {command.int_value('--eval-interval')} steps, of"
        tokens = f"responses of at most {command.int_value('--eval-max-response-len'):,} tokens"
        if config := command.text("--eval-config"):
            return f"{every} the sets in {config}; {tokens}"
        sets = evaluation_sets(command.values.get("--eval-prompt-data", ()))
        if not sets:
            return f"{every} no data set"
        samples = command.int_value("--n-samples-per-eval-prompt", 1)
        rows = [_count_rows(path) for path in sets.values()]
        episodes = f" = {sum(rows) * samples} episodes" if all(rows) else ""
        return f"{every} {', '.join(sets)}: {samples} samples a problem{episodes}; {tokens}"


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # such as a name that is too long
        return False


def _count_rows(path: str) -> int:
    """Return the number of rows that slime takes from a JSONL file; 0 if the number is unknown."""
    file, rows = data_file(path)
    if file.suffix != ".jsonl" or not _is_file(file):
        return 0
    with file.open("rb") as lines:
        count = sum(bool(line.strip()) for line in lines)
    return len(range(count)[rows])


def _weights_gb(model: Path) -> float | None:
    """Return the GB of a model's weight files, which may be in FP8 or int4; None if there are none on this machine."""
    try:
        return sum(file.stat().st_size for file in model.glob("*.safetensors")) / GB or None
    except (OSError, ValueError):  # a ValueError for a path with a NUL, from Python 3.13 on
        return None


def _judges(settings: RolloutSettings) -> Iterator[tuple[str, str, str | None]]:
    for name, part in settings.reward.all_parts.items():
        if part.judge is not None and part.judge.base_url is not None:
            key = part.judge.api_key
            yield name, os.path.expandvars(part.judge.base_url), key and os.path.expandvars(key)


def measure_prompts(path: str, options: DoctorOptions, tokenizer: str | None = None) -> Prompts:
    """Count the rows of a data set, and tokenize the first request of some rows as an episode does.

    Args:
        path: The data set, as in slime's --prompt-data.
        options: The doctor's options.
        tokenizer: Folder of the tokenizer. If it is None or lacks tokenizer.json, the options' `tokenizer_dir` is used.

    Raises:
        RolloutError: The settings, a row, a tool, the tokenizer or its template can't be used; or there are no rows.
    """
    from strands_rollout.agent.tool_loading import load_tools
    from strands_rollout.diagnostics.template_check import load_tokenizer_folder
    from strands_rollout.slime_plugin.inputs import to_episode_prompt, with_row_settings
    from strands_rollout.template.chat_template import ChatTemplate
    from strands_rollout.template.messages import to_chat_messages, to_chat_tools
    from strands_rollout.user_code import add_config_folder

    settings = RolloutSettings(tool_parser="auto")
    if options.config_file or options.changes:
        settings = read_config_file(options.config_file, options.changes)
    add_config_folder(options.config_file)
    file, taken = data_file(path)
    rows = list[Row]()
    for _, row in list(iter_rows(file, prompt_key=options.prompt_key, needs_label=False))[taken]:
        if not isinstance(row, Row):
            raise row
        rows.append(row)
    if not rows:
        raise PromptError(f"{path} selects no rows; expected at least one")
    thinking = {} if settings.enable_thinking is None else {"enable_thinking": settings.enable_thinking}
    folder = Path(tokenizer) if tokenizer and _is_file(Path(tokenizer) / "tokenizer.json") else options.tokenizer_dir
    template = ChatTemplate(load_tokenizer_folder(folder), **thinking)

    def length(row: Row) -> int:
        own = with_row_settings(settings, row.metadata)
        # the tools of MCP servers are unknown until a connection is made
        tools = [tool.tool_spec for tool in load_tools(own.tools) if hasattr(tool, "tool_spec")]
        prompt = to_episode_prompt(row.prompt, own.system_prompt, template)
        chat = to_chat_messages(prompt.messages)
        if prompt.system_prompt:
            chat = [{"role": "system", "content": prompt.system_prompt}, *chat]
        return len(template.prompt_ids(chat, to_chat_tools(tools)))

    count = min(len(rows), _TOKENIZED_ROWS)
    lengths = [length(rows[number * len(rows) // count]) for number in range(count)]
    most_characters = nlargest(_LONG_ROWS, rows, key=lambda row: len(str(row.prompt)))
    return Prompts(len(rows), lengths, max(*lengths, *map(length, most_characters)))


def _gpu_memory(options: DoctorOptions) -> tuple[float, str]:
    """Return the memory in GB and the name of this machine's smallest GPU; without a GPU, of an H100."""
    query = ("nvidia-smi", "--query-gpu=memory.total,name", "--format=csv,noheader,nounits")
    answer = run_program(*query, env=options.env, timeout_s=10.0)
    lines = answer.stdout.splitlines() if answer is not None and answer.exit_code == 0 else []
    found = [line.split(",", 1) for line in lines if line.split(",")[0].strip().isdecimal()]
    if not found:
        return _GPU_GB, "an H100"
    mib, name = min(found, key=lambda cells: int(cells[0]))
    return int(mib) * _MIB_GB, name.strip()


def _slime_checkout(options: DoctorOptions) -> Path | None:
    try:
        return find_slime_checkout(options.slime_dir)
    except ConfigError:  # `check_slime` reports it
        return None
