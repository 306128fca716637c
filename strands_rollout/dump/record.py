"""One sample of a dump: the values that slime's `Sample.to_dict` gives, as a line, and back."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import orjson

from strands_rollout.dump.json_values import from_json, to_json
from strands_rollout.errors import DumpError
from strands_rollout.files import Json
from strands_rollout.samples import Sample, SampleLike
from strands_rollout.secret_mask import masked, without_values
from strands_rollout.template.drift import is_byte_level, token_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MARKED_SPACE: Final = "\u2581".encode()  # as SentencePiece writes a space
VERSION: Final = 1
HEAD_KEY: Final = "strands_rollout_dump"
METADATA_KEY: Final = "strands_rollout"
_TEXTS_KEY: Final = "token_texts"
_TEXTS: Final = ("prompt", "response", "label", "reward")
_MASKED: Final = ("metadata", "train_metadata", "apply_chat_template_kwargs")
_SECRET: Final = re.compile(
    r"authorization$|(api|access|auth|secret|private|bearer|session|hf|wandb)[_-]?(key|token)$|^token$|passw(or)?d$"
    r"|secret$|cookie$",
    re.IGNORECASE,
)
_RESULT_FACTS: Final = (
    *("stop_reason", "error", "turns", "tool_calls", "tool_errors", "parse_failures", "sampled_tokens"),
    "weight_versions",
)
_LONG_INTEGER: Final = re.compile(rb"(?<![\d.])\d{19}")


class TokenTexts(Mapping[int, bytes]):
    """The bytes of all ids of a Hugging Face fast tokenizer, read when asked for; ids without a token are absent."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._size = len(tokenizer)
        self._bytes_of = token_bytes(tokenizer)
        self._spaces_are_marked = not is_byte_level(tokenizer)
        self._token_of = tokenizer.convert_ids_to_tokens

    def __getitem__(self, token_id: int) -> bytes:
        if token_id not in range(self._size) or self._token_of(token_id) is None:
            raise KeyError(token_id)
        text = self._bytes_of(token_id)
        return text.replace(_MARKED_SPACE, b" ") if self._spaces_are_marked else text

    def __iter__(self) -> Iterator[int]:
        return (token_id for token_id in range(self._size) if self._token_of(token_id) is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)


@dataclass(frozen=True, slots=True)
class DumpRecord:
    """One sample as a dump has it.

    Attributes:
        values: Of `Sample.to_dict`; what a file lacks has its default there.
        where: File and line (or position in slime's file, from 0), for people.
        source: "dump", "samples" (version 0), "slime", or "eval": a result of `strands-rollout eval`.
        token_texts: Bytes of token ids, as far as the dump holds them.
        violations: What an evaluation found wrong with it.
    """

    values: dict[str, Any]
    where: str = ""
    source: str = "dump"
    token_texts: Mapping[int, bytes] = field(default_factory=dict)
    violations: tuple[str, ...] = ()

    @property
    def has_tokens(self) -> bool:
        """Whether it can be looked at token by token: a result of `eval` without --save-tokens can't."""
        return bool(self.values.get("tokens"))

    @property
    def facts(self) -> Mapping[str, Any]:
        """What `generate` wrote of the episode; empty for a foreign sample."""
        metadata = self.values.get("metadata")
        facts = metadata.get(METADATA_KEY) if isinstance(metadata, Mapping) else None
        return facts if isinstance(facts, Mapping) else {}

    def to_sample(self, sample_class: Any = Sample) -> Any:  # noqa: ANN401 - slime's class or ours
        """A sample of these values, slime's or ours; it shares lists with the record.

        Raises:
            DumpError: The values are no sample's.
        """
        try:
            return sample_class.from_dict(dict(self.values))
        except (TypeError, ValueError, KeyError, AttributeError) as e:
            raise DumpError(f"{self.where}: no sample can be made of it: {type(e).__name__}: {e}") from e

    @classmethod
    def from_sample(cls, sample: SampleLike, token_texts: Mapping[int, bytes] | None = None) -> DumpRecord:
        """The record of slime's sample or ours, finished or not; it shares lists with it.

        Args:
            sample: Its `to_dict` is called.
            token_texts: Bytes of its token ids, of more, or of some; see `TokenTexts`.
        """
        values: dict[str, Any] = sample.to_dict()  # type: ignore[attr-defined]
        if token_texts is None:
            return cls(values)
        return cls(values, token_texts={i: token_texts[i] for i in sorted(set(values["tokens"])) if i in token_texts})


def record_line(record: DumpRecord, secrets: Collection[str] = ()) -> bytes:
    """The record as a line, its end included; secrets masked, as `shown_values` does.

    DumpError where it holds what has no form in JSON, itself, or lists and mappings nested too deeply.
    """
    where = f"sample index={record.values.get('index')}"
    head: dict[str, Any] = {"version": VERSION}
    if record.token_texts:
        head[_TEXTS_KEY] = {str(token): text_or_bytes(text) for token, text in record.token_texts.items()}
    try:
        values = shown_values(record.values, secrets)
        named = {name: to_json(value, f"{where}: {name}") for name, value in values.items()}
        return orjson.dumps({HEAD_KEY: head, **named}) + b"\n"
    except (RecursionError, orjson.JSONEncodeError) as e:
        raise DumpError(f"{where} can't be written: {e}; expected plain values, nested less than 250 deep") from e


def shown_values(sample: Mapping[str, Any], secrets: Collection[str] = ()) -> dict[str, Any]:
    """A sample's values with secrets masked, by name and, where `secrets` stand in texts, by value; tokens stay."""
    named = {name: sample[name] for name in _MASKED if isinstance(sample.get(name), Mapping)}
    texts = {name: sample[name] for name in _TEXTS if name in sample}
    shown = {name: without_secrets(values) for name, values in named.items()} | texts
    return {**sample, **{name: without_values(value, secrets) for name, value in shown.items()}}


def read_line(line: bytes, where: str) -> DumpRecord:
    """The record in a line, of this format or one that it succeeds; DumpError, with `where`, if it is none."""
    try:
        # orjson makes a float of an integer above 64 bits
        read = json.loads(line) if _LONG_INTEGER.search(line) else _loaded(line)
    except (ValueError, RecursionError) as e:
        raise DumpError(f"{where} is broken: {e}; got {line[:60]!r}; expected one sample as a JSON object") from e
    if not isinstance(read, dict):
        raise DumpError(f"{where} holds {type(read).__name__}; expected one sample as a JSON object")
    try:
        return _record(read, where)
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as e:
        raise DumpError(f"{where} is broken: {e}") from e


def _loaded(line: bytes) -> Json:
    try:
        return orjson.loads(line)
    except orjson.JSONDecodeError:
        return json.loads(line)  # which also takes NaN


def _record(read: dict[str, Any], where: str) -> DumpRecord:
    head = read.pop(HEAD_KEY, None)
    if head is None:
        return _older(read, where)
    version = head.get("version") if isinstance(head, dict) else None
    if version != VERSION:
        raise DumpError(f"{where} is of dump version {version!r}; this release reads {VERSION}: use a newer one")
    given = head.get(_TEXTS_KEY, {}).items()
    texts = {int(token): text.encode() if isinstance(text, str) else bytes(text) for token, text in given}
    return DumpRecord(_checked(from_json(read), where), where, token_texts=texts)


def _older(read: dict[str, Any], where: str) -> DumpRecord:
    if "data_set" not in read or "problem" not in read:
        return DumpRecord(_checked(read, where), where, "samples")
    values = read.get("sample")
    if not isinstance(values, dict):  # an evaluation that kept no tokens
        values = {name: read.get(name) for name in ("status", "label", "reward")} | {
            "tokens": [],
            "response": read.get("response") or "",
            "response_length": read.get("response_tokens") or 0,
            "metadata": {
                METADATA_KEY: {name: read.get(name) for name in _RESULT_FACTS} | {"duration_s": read.get("seconds")}
            },
        }
    values = _checked(values, where)
    values.setdefault("metadata", {})["eval"] = {name: read.get(name) for name in ("data_set", "problem", "number")}
    return DumpRecord(values, where, "eval", violations=tuple(map(str, read.get("violations") or ())))


def _checked(values: object, where: str) -> dict[str, Any]:
    if not isinstance(values, dict) or "status" not in values or "tokens" not in values:
        raise DumpError(f"{where} is no sample: expected an object with at least status and tokens")
    return {**Sample().to_dict(), **values}


def slime_record(values: object, where: str) -> DumpRecord:
    """The record of a sample of slime's own file; DumpError where it is none."""
    return DumpRecord(_checked(values, where), where, "slime")


def without_secrets(values: Mapping[str, Any]) -> dict[str, Any]:
    """A sample's metadata with its secrets masked.

    An aborted episode's saved messages are what the policy read: they stay, so that it can be resumed.
    """
    cleaned: dict[str, Any] = masked(values, _SECRET)
    facts = values.get(METADATA_KEY)
    if isinstance(facts, Mapping) and "resume" in facts:
        cleaned[METADATA_KEY] = {**cleaned[METADATA_KEY], "resume": facts["resume"]}
    return cleaned


def text_or_bytes(text: bytes) -> str | list[int]:
    """The form of a token's text in JSON."""
    try:
        return text.decode()
    except UnicodeDecodeError:
        return list(text)
