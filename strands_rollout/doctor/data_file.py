"""Is a prompt data set what a run can read: JSON with usable prompts and labels, and the file that was prepared?"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Final

import orjson

from strands_rollout.doctor.finding import Finding, error, good, lacking, skipped, warning
from strands_rollout.doctor.question import Question
from strands_rollout.doctor.tokenizer_folder import template_of
from strands_rollout.errors import PromptError, RolloutError

ROWS: Final = 200
MAX_HASHED_BYTES: Final = 4_000_000_000
_ONLY_EVALUATED: Final = "aime-2025.jsonl"
_BLOCK_BYTES: Final = 1 << 20
_SCRIPTS: Final = {
    "dapo-math-17k": "dapo_math_17k",
    "aime-2024": "aime_2024",
    "aime-2025": "aime_2025",
    "gsm8k": "gsm8k",
}
_NOT_RENDERED: Final = "leave --apply-chat-template off, and prepare the data as chats or plain text"


def check_data(question: Question) -> list[Finding]:
    """Each data file that is named; else those that the scripts use, which may be missing."""
    if question.data:
        return [finding for path in question.data for finding in _check_file(path, question, needed=True)]
    findings = [
        finding for path in question.training_data for finding in _check_file(path, question, needed=question.training)
    ]
    further = question.data_dir / _ONLY_EVALUATED
    return findings if further in question.training_data else [*findings, *_check_further(further, question)]


def check_rows(path: Path, template: Any, rows: int = ROWS) -> list[Finding]:  # noqa: ANN401 - a ChatTemplate
    """Whether the first rows of a file can be trained on.

    Args:
        path: Of the file.
        template: What a prompt must not have been rendered by.
        rows: How many to look at.
    """
    faults: list[str] = []
    count = 0
    with path.open("rb") as file:
        for number, line in enumerate(islice((line for line in file if line.strip()), rows), start=1):
            count = number
            fault = _fault(line, template)
            faults += [f"row {number}: {fault}"] if fault else []
    name = f"data: {path.name}"
    if not count:
        return [error(name, f"{path} has no rows; expected one JSON object a line", _prepare(path))]
    if faults:
        more = f" (and {len(faults) - 1} more of the first {count} rows)" if len(faults) > 1 else ""
        remedy = _NOT_RENDERED if "render" in faults[0] else _prepare(path)
        return [error(name, f"{path}: {faults[0]}{more}", remedy)]
    return [good(name, f"{path}: the first {count} rows have usable prompts and labels")]


def check_manifest(path: Path, max_bytes: int = MAX_HASHED_BYTES) -> list[Finding]:
    """Whether a file is still the one whose manifest lies beside it.

    Args:
        path: Of the data file.
        max_bytes: A larger file is not read.
    """
    name, manifest_path = f"manifest: {path.name}", Path(f"{path}.manifest.json")
    if not manifest_path.is_file():
        return [skipped(name, f"no {manifest_path.name}: where {path.name} comes from is not known")]
    try:
        manifest = orjson.loads(manifest_path.read_bytes())
        rows, sha256 = int(manifest["rows"]), str(manifest["sha256"])
    except (OSError, ValueError, KeyError, TypeError) as e:
        return [error(name, f"{manifest_path} can't be read: {type(e).__name__}: {e}", _prepare(path))]
    if path.stat().st_size > max_bytes:
        return [skipped(name, f"{path} is larger than {max_bytes / 1e9:g} GB: not compared with its manifest")]
    got_rows, got_sha256 = _totals(path)
    if got_sha256 != sha256:
        found = f"{path} is not the file that was prepared: {got_rows} rows, sha256 {got_sha256[:12]}..."
        return [error(name, f"{found}; its manifest tells {rows} rows, sha256 {sha256[:12]}...", _prepare(path))]
    if got_rows != rows:
        return [error(name, f"{path} has {got_rows} rows; its manifest tells {rows}", _prepare(path))]
    source = f"{manifest.get('dataset')} at {str(manifest.get('revision') or 'an unknown revision')[:12]}"
    return [good(name, f"{rows} rows of {source}, unchanged since they were prepared")]


def _check_further(path: Path, question: Question) -> list[Finding]:
    if path.is_file():
        return _check_file(path, question, needed=False)
    return [warning(f"data: {path.name}", f"{path} is not there: scripts/eval_aime.sh needs it", _prepare(path))]


def _check_file(path: Path, question: Question, *, needed: bool) -> list[Finding]:
    if not path.is_file():
        return [lacking(f"data: {path.name}", f"{path} is not there", _prepare(path), training=needed)]
    try:
        return [*check_rows(path, _template(question)), *check_manifest(path)]
    except OSError as e:
        return [
            error(
                f"data: {path.name}", f"{path} can't be read: {e.strerror or e}", f"check who may read it: ls -l {path}"
            )
        ]


def _template(question: Question) -> Any:  # noqa: ANN401
    """The run's chat template; the shipped one where it can't be used, which is another check's to say."""
    try:
        return template_of(question.tokenizer_dir)
    except RolloutError:
        return template_of(question.shipped_tokenizer_dir)


def _prepare(path: Path) -> str:
    for name, script in _SCRIPTS.items():
        if path.name.startswith(name):
            return f"python data_prep/{script}.py"
    return 'make it one JSON object a line: {"prompt": [{"role": "user", "content": "..."}], "label": "34"}'


def _fault(line: bytes, template: Any) -> str | None:  # noqa: ANN401
    """What is wrong with a row, in words."""
    from strands_rollout.prompt_messages import to_episode_prompt

    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError as e:
        return f"not JSON: {e}"
    if not isinstance(row, dict) or not {"prompt", "label"} <= row.keys():
        return f"got {line[:80]!r}; expected a JSON object with prompt and label"
    try:
        to_episode_prompt(row["prompt"], None, template)
    except PromptError as e:
        return str(e)
    if any(template.is_rendered(text) for text in _texts(row["prompt"])):
        return "a message of the prompt was already rendered by a chat template"
    return _fault_of_label(row["label"])


def _fault_of_label(label: object) -> str | None:
    from strands_rollout.grading import label_texts

    texts = (label,) if not isinstance(label, list) else label
    if any(isinstance(text, dict | bool) for text in texts):
        return f"the label is {label!r}; expected text, a number, or a list of them"
    if not any(text.strip() for text in label_texts(label)):
        return f"the label is {label!r}: with an empty label every answer is wrong"
    return None


def _texts(prompt: object) -> Iterator[str]:
    for message in prompt if isinstance(prompt, list) else []:
        if isinstance(message["content"], str):
            yield message["content"]


def _totals(path: Path) -> tuple[int, str]:
    """How many rows a file has, and the hash of its bytes."""
    digest, rows, last = hashlib.sha256(), 0, b"\n"
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
            rows += block.count(b"\n")
            last = block[-1:]
    return rows + (last != b"\n"), digest.hexdigest()
