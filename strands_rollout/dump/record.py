"""A sample of a dump: its conversion to and from a line of JSON, its tokenizer, and its episode's steps and times.

A value that JSON can't express becomes an object with one key:

- `$tuple`: the items;
- `$bytes`: base64;
- `$float`: "nan", "inf" or "-inf";
- `$int`: the decimal digits of an integer beyond 64 bits;
- `$text`: base64 of UTF-8, for a text with lone surrogates;
- `$array`: dtype, shape, and base64 of the items in C order, also for tensors. For a NumPy number, the shape is empty;
- `$image`: base64 of a PNG, for a PIL image;
- `$map`: pairs of key and value, for a mapping with keys that are not strings or have lone surrogates, or with a single
  key that begins with `$`.
"""

from __future__ import annotations

import base64
import binascii
import functools
import hashlib
import io
import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import orjson

from strands_rollout.errors import ConfigError, DumpError
from strands_rollout.files.json_codec import Json
from strands_rollout.samples import METADATA_KEY, EpisodeFacts, Sample, SampleLike, finite_number, recorded_facts
from strands_rollout.secret_mask import mask, mask_values
from strands_rollout.template.tokens import is_byte_level, token_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
_INT64_MIN: Final = -(2**63)
_UINT64_MAX: Final = 2**64 - 1
_ARRAY_KINDS: Final = "biufc"  # NumPy's kind codes of booleans and numbers
_MAX_DTYPE_CHARS: Final = 16
_MAX_EMPTY_ROWS: Final = 1 << 20
_PNG_MODES: Final = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")
_JSON_SCALARS: Final = frozenset({int, float, str, bool, type(None)})


def to_json(value: object, where: str) -> Json:
    """Return a JSON value that `from_json` converts back; tensors come back as NumPy arrays, mappings as dicts.

    Raises:
        DumpError: The value contains itself, is nested too deeply, or holds an unsupported object. These are supported:
            plain values, NumPy arrays and scalars (numbers, booleans), tensors, and PIL images that a PNG can hold. The
            message names `where`.
    """
    try:
        return _encode(value)
    except _NotExpressibleError as e:
        raise DumpError(
            f"{where} holds {e}; expected plain values (numbers, text, lists, mappings, arrays): convert it first"
        ) from None
    except RecursionError as e:
        raise DumpError(f"{where} holds itself, or is nested too deeply; expected plain values") from e


def from_json(value: Json) -> Json:
    """Convert the JSON of `to_json` back to the value; raise ValueError if the JSON is damaged."""
    if isinstance(value, list):
        # take a fast path: most of a dump is lists of numbers
        return value if set(map(type, value)) <= _JSON_SCALARS else [from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) != 1 or not (key := next(iter(value))).startswith("$"):
        return {key: from_json(item) for key, item in value.items()}
    decode = _DECODERS.get(key)
    if decode is None:
        raise ValueError(f"got the key {key!r:.40}; expected one of {', '.join(_DECODERS)}")
    try:
        return decode(value[key])
    except (TypeError, ValueError, LookupError, binascii.Error) as e:
        raise ValueError(f"{key} is damaged: {e}") from e


class _NotExpressibleError(Exception):
    """JSON can't express a value of this type."""


def _encode(value: Json) -> Json:
    encode = _ENCODERS.get(type(value))
    if encode is not None:
        return encode(value)
    if isinstance(value, Mapping):
        return _encode_mapping(value)
    if all(hasattr(value, name) for name in ("detach", "cpu", "numpy")):
        value = value.detach().cpu().numpy()
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in _ARRAY_KINDS:
        little = np.asarray(value, dtype=value.dtype.newbyteorder("<"))
        return {"$array": [little.dtype.str, list(value.shape), _base64(little.tobytes())]}
    if getattr(value, "mode", None) in _PNG_MODES and type(value).__module__.startswith("PIL."):
        png = io.BytesIO()
        value.save(png, format="PNG")
        return {"$image": _base64(png.getvalue())}
    raise _NotExpressibleError(f"{type(value).__module__}.{type(value).__qualname__}")


def _encode_list(values: list[Any]) -> list[Any]:
    kinds = set(map(type, values))
    if kinds == {int} and min(values) >= _INT64_MIN and max(values) <= _UINT64_MAX:
        return values
    if kinds == {float} and all(map(math.isfinite, values)):
        return values
    return [_encode(value) for value in values]


def _encode_mapping(value: Mapping[Any, Any]) -> dict[str, Any]:
    looks_tagged = len(value) == 1 and str(next(iter(value))).startswith("$")
    if looks_tagged or not all(type(key) is str and _is_text(key) for key in value):
        return {"$map": [[_encode(key), _encode(item)] for key, item in value.items()]}
    return {key: _encode(item) for key, item in value.items()}


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _base64(value: bytes) -> str:
    return base64.b64encode(value).decode("ascii")


def _decode_bytes(encoded: Json) -> bytes:
    return base64.b64decode(encoded, validate=True)


_ENCODERS: Final[Mapping[type, Callable[[Any], Any]]] = {
    bool: lambda value: value,
    type(None): lambda value: value,
    int: lambda value: value if _INT64_MIN <= value <= _UINT64_MAX else {"$int": str(value)},
    float: lambda value: value if math.isfinite(value) else {"$float": str(value)},
    str: lambda value: value if _is_text(value) else {"$text": _base64(value.encode("utf-8", "surrogatepass"))},
    list: _encode_list,
    tuple: lambda value: {"$tuple": _encode_list(list(value))},
    dict: _encode_mapping,
    bytes: lambda value: {"$bytes": _base64(value)},
}


def _decode_array(encoded: Json) -> np.ndarray[Any, Any]:
    name, shape, data = encoded
    dtype = np.dtype(name) if isinstance(name, str) and len(name) <= _MAX_DTYPE_CHARS else None
    if dtype is None or dtype.kind not in _ARRAY_KINDS:
        raise ValueError(f"got an array of {name!r:.40}; expected numbers")
    if 0 in shape and math.prod(filter(None, shape)) > _MAX_EMPTY_ROWS:
        raise ValueError(f"got an empty array of shape {shape!r:.80}; expected at most {_MAX_EMPTY_ROWS} rows")
    return np.frombuffer(base64.b64decode(data), dtype=dtype).reshape(shape).copy()[()]


def _decode_image(encoded: Json) -> object:
    """Return a PIL image; without Pillow, return the PNG's bytes, which this package accepts instead of an image."""
    png = _decode_bytes(encoded)
    try:
        from PIL import Image
    except ImportError:
        return png
    try:
        image = Image.open(io.BytesIO(png), formats=["PNG"])
        image.load()
    except (OSError, SyntaxError, Image.DecompressionBombError) as e:
        raise ValueError(str(e)) from e
    return image.copy()


_DECODERS: Final[Mapping[str, Callable[[Any], Any]]] = {
    "$tuple": lambda encoded: tuple(from_json(list(encoded))),
    "$bytes": _decode_bytes,
    "$float": lambda encoded: {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[encoded],
    "$int": int,
    "$text": lambda encoded: _decode_bytes(encoded).decode("utf-8", "surrogatepass"),
    "$array": _decode_array,
    "$image": _decode_image,
    "$map": lambda encoded: {from_json(name): from_json(item) for name, item in encoded},
}


_MARKED_SPACE: Final = "\u2581".encode()  # SentencePiece's mark for a space
VERSION: Final = 1
HEAD_KEY: Final = "strands_rollout_dump"
_TEXTS_KEY: Final = "token_texts"
_TOKENIZER_KEY: Final = "tokenizer"
_TEXT_FIELDS: Final = ("prompt", "response", "label", "reward")
_MASKED_FIELDS: Final = ("metadata", "train_metadata", "apply_chat_template_kwargs")
_SECRET_KEYS: Final = re.compile(
    r"authorization$|(api|access|auth|secret|private|bearer|session|hf|wandb)[_-]?(key|token)$|^token$|passw(or)?d$"
    r"|secret$|cookie$",
    re.IGNORECASE,
)
_RESULT_FACTS: Final = (
    "stop_reason",
    "error",
    "turns",
    "tool_calls",
    "tool_errors",
    "parse_failures",
    "sampled_tokens",
    "weight_versions",
)
_MAX_UNKNOWN_SHARE: Final = 0.1
_LONG_INTEGER: Final = re.compile(rb"(?<![\d.])\d{19}")


@dataclass(frozen=True, slots=True)
class TokenizerIdentity:
    """Name and vocabulary hash of a sample's tokenizer."""

    name: str  # the tokenizer's absolute folder, or its id on the hub; may be empty
    fingerprint: str  # a hash of the vocabulary without added tokens, which depend on transformers' release

    @classmethod
    @functools.lru_cache(maxsize=8)
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> TokenizerIdentity:
        """Return the identity of a Hugging Face fast tokenizer, computed once (0.2 s for 150,000 tokens)."""
        vocabulary = tokenizer.backend_tokenizer.get_vocab(with_added_tokens=False)
        in_order = "\0".join(sorted(vocabulary, key=vocabulary.__getitem__))
        digest = hashlib.blake2b(in_order.encode("utf-8", "surrogatepass"), digest_size=16)
        name = str(tokenizer.name_or_path)
        return cls(str(Path(name).resolve()) if name and Path(name).is_dir() else name, digest.hexdigest())

    @classmethod
    def read(cls, value: Json) -> TokenizerIdentity | None:
        """Read the identity recorded in a line of a dump; return None if `value` is None.

        Raises:
            LookupError, TypeError: The recorded identity is malformed.
        """
        return None if value is None else cls(str(value["name"]), str(value["fingerprint"]))

    @property
    def folder(self) -> Path | None:
        """The tokenizer's folder if it is on this machine, else None."""
        return Path(self.name) if self.name and Path(self.name).is_dir() else None


class TokenTexts(Mapping[int, bytes]):
    """The bytes of each id of a Hugging Face fast tokenizer, read on demand; ids without a token are missing."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.identity = TokenizerIdentity.of(tokenizer)
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
    """A sample of a dump.

    Attributes:
        values: The values of `Sample.to_dict`; fields missing in a file have their defaults.
        where: File and line (or position in slime's file, from 0), for messages; empty if made from a sample.
        source: "dump", "samples" (version 0), "slime", or "eval": a result of `strands-rollout eval`.
        token_texts: Bytes by token id, for ids whose texts are in the dump.
        violations: Faults that an evaluation found in the sample.
        tokenizer: The sample's tokenizer, if recorded.
    """

    values: dict[str, Any]
    where: str = ""
    source: str = "dump"
    token_texts: Mapping[int, bytes] = field(default_factory=dict)
    violations: tuple[str, ...] = ()
    tokenizer: TokenizerIdentity | None = None

    @property
    def has_tokens(self) -> bool:
        """True if the record has tokens; results of `eval` without --save-tokens have none."""
        return bool(self.values.get("tokens"))

    @property
    def facts(self) -> EpisodeFacts:
        """The recorded facts of the episode; all unknown if the sample has none."""
        return EpisodeFacts.read(recorded_facts(self.values.get("metadata")))

    @property
    def has_facts(self) -> bool:
        """True if the sample has recorded facts of the episode."""
        return bool(recorded_facts(self.values.get("metadata")))

    def to_sample(self, sample_class: Any = Sample) -> Any:  # noqa: ANN401 - slime's class or ours
        """Return a sample (slime's or this package's class) with these values; it shares lists with the record.

        Raises:
            DumpError: The values do not make a sample.
        """
        try:
            return sample_class.from_dict(dict(self.values))
        except (TypeError, ValueError, KeyError, AttributeError) as e:
            raise DumpError(f"{self.where} can't be converted to a sample: {type(e).__name__}: {e}") from e

    @classmethod
    def from_sample(cls, sample: SampleLike, token_texts: Mapping[int, bytes] | None = None) -> DumpRecord:
        """Return the dump record of a sample, finished or not; it shares lists with the sample.

        Args:
            sample: The sample, read through its `to_dict`.
            token_texts: Bytes of token ids; missing and additional ids are allowed. If it is a `TokenTexts`, its
                tokenizer is recorded too.
        """
        values: dict[str, Any] = sample.to_dict()  # type: ignore[attr-defined]
        if token_texts is None:
            return cls(values)
        texts = {token: token_texts[token] for token in sorted(set(values["tokens"])) if token in token_texts}
        tokenizer = token_texts.identity if isinstance(token_texts, TokenTexts) else None
        return cls(values, token_texts=texts, tokenizer=tokenizer)


def check_tokenizer(record: DumpRecord, texts: TokenTexts, name: str) -> None:
    """Raise ConfigError if a dump record was not written with the tokenizer of `texts`; messages call it `name`.

    The tokenizer must have at least nine tenths of the record's ids. If the record has a fingerprint or texts of ids,
    they must equal the tokenizer's.
    """
    if record.tokenizer is not None and record.tokenizer.fingerprint != texts.identity.fingerprint:
        raise ConfigError(
            f"{record.where} was written with the tokenizer {record.tokenizer.name}, and {name} has another "
            "vocabulary; name the tokenizer of the policy that sampled the tokens"
        )
    ids = set(record.values["tokens"])
    unknown = sorted(token for token in ids if token not in texts)
    if len(unknown) > len(ids) * _MAX_UNKNOWN_SHARE:  # a policy may sample ids that only pad its vocabulary
        raise ConfigError(
            f"{record.where}: {name} lacks {len(unknown)} of the {len(ids)} ids, such as {unknown[-1]}; "
            "name the tokenizer of the policy that sampled the tokens"
        )
    for token, text in record.token_texts.items():
        if texts.get(token, text) != text:
            raise ConfigError(
                f"{record.where} has the token {token} with the text {text!r}; in {name}, its text is "
                f"{texts[token]!r}; name the tokenizer of the policy that sampled the tokens"
            )


def record_line(record: DumpRecord, secrets: Collection[str] = ()) -> bytes:
    """Return a record as a line with its line end, with secrets masked by `masked_values`.

    Raises:
        DumpError: A value can't be expressed in JSON, contains itself, or is nested too deeply.
    """
    where = f"sample index={record.values.get('index')}"
    head: dict[str, Any] = {"version": VERSION}
    if record.token_texts:
        head[_TEXTS_KEY] = {str(token): text_or_bytes(text) for token, text in record.token_texts.items()}
    if record.tokenizer is not None:
        head[_TOKENIZER_KEY] = asdict(record.tokenizer)
    try:
        values = masked_values(record.values, secrets)
        encoded = {name: to_json(value, f"{where}: {name}") for name, value in values.items()}
        return orjson.dumps({HEAD_KEY: head, **encoded}) + b"\n"
    except (RecursionError, orjson.JSONEncodeError) as e:
        raise DumpError(
            f"{where} can't be written: {e}; expected plain values, nested fewer than 250 levels deep"
        ) from e


def masked_values(sample: Mapping[str, Any], secrets: Collection[str] = ()) -> dict[str, Any]:
    """Return a sample's values with secrets masked.

    The texts in `secrets` are masked in `_TEXT_FIELDS` and `_MASKED_FIELDS`. In `_MASKED_FIELDS`, the secrets that
    `without_secrets` finds are masked, too.
    """
    mappings = {name: sample[name] for name in _MASKED_FIELDS if isinstance(sample.get(name), Mapping)}
    texts = {name: sample[name] for name in _TEXT_FIELDS if name in sample}
    masked_by_key = {name: without_secrets(values) for name, values in mappings.items()}
    return {**sample, **{name: mask_values(value, secrets) for name, value in (masked_by_key | texts).items()}}


def read_line(line: bytes, where: str) -> DumpRecord:
    """Return the record in a line of a dump (of this or an earlier version) or of `eval`'s results.

    Raises:
        DumpError: The line has no sample, is broken, or has a newer format; the message begins with `where`.
    """
    try:
        # orjson converts an integer above 64 bits to a float
        content = json.loads(line) if _LONG_INTEGER.search(line) else _parse_json(line)
    except (ValueError, RecursionError) as e:
        raise DumpError(f"{where} is broken: {e}; got {line[:60]!r}; expected one sample as a JSON object") from e
    if not isinstance(content, dict):
        raise DumpError(f"{where} holds {type(content).__name__}; expected one sample as a JSON object")
    try:
        return _parse_record(content, where)
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as e:
        raise DumpError(f"{where} is broken: {e}") from e


def _parse_json(line: bytes) -> Json:
    try:
        return orjson.loads(line)
    except orjson.JSONDecodeError:
        return json.loads(line)  # Python's json also reads NaN


def _parse_record(content: dict[str, Any], where: str) -> DumpRecord:
    head = content.pop(HEAD_KEY, None)
    if head is None:
        return _read_other_format(content, where)
    if not isinstance(head, dict):
        expected = f"expected an object with version {VERSION}: the line is damaged"
        raise DumpError(f"{where} has {HEAD_KEY}={head!r:.40}; {expected}")
    version = head.get("version")
    if isinstance(version, int) and version > VERSION:
        raise DumpError(f"{where} has the dump version {version}; this release reads {VERSION}: use a newer release")
    if version != VERSION:
        raise DumpError(f"{where} has the dump version {version!r:.40}; expected {VERSION}: the line is damaged")
    encoded_texts = head.get(_TEXTS_KEY, {}).items()
    texts = {int(token): text.encode() if isinstance(text, str) else bytes(text) for token, text in encoded_texts}
    tokenizer = TokenizerIdentity.read(head.get(_TOKENIZER_KEY))
    return DumpRecord(_with_defaults(from_json(content), where), where, token_texts=texts, tokenizer=tokenizer)


def _read_other_format(content: dict[str, Any], where: str) -> DumpRecord:
    """Return the record of a sample of version 0, or of a result of `strands-rollout eval`."""
    if "data_set" not in content or "problem" not in content:
        return DumpRecord(_with_defaults(content, where), where, "samples")
    values = content.get("sample")
    if not isinstance(values, dict):  # an evaluation that saved no tokens
        facts = {name: content.get(name) for name in _RESULT_FACTS} | {"duration_s": content.get("seconds")}
        values = {name: content.get(name) for name in ("status", "label", "reward")} | {
            "tokens": [],
            "response": content.get("response") or "",
            "response_length": content.get("response_tokens") or 0,
            "metadata": {METADATA_KEY: facts},
        }
    values = _with_defaults(values, where)
    values.setdefault("metadata", {})["eval"] = {name: content.get(name) for name in ("data_set", "problem", "number")}
    tokenizer = TokenizerIdentity.read(content.get(_TOKENIZER_KEY))
    violations = tuple(map(str, content.get("violations") or ()))
    return DumpRecord(values, where, "eval", violations=violations, tokenizer=tokenizer)


def _with_defaults(values: object, where: str) -> dict[str, Any]:
    if not isinstance(values, dict) or "status" not in values or "tokens" not in values:
        raise DumpError(f"{where} is not a sample; expected an object with at least 'status' and 'tokens'")
    return {**Sample().to_dict(), **values}


def slime_record(values: object, where: str) -> DumpRecord:
    """Return the record of a sample in slime's own file; raise DumpError if it is not a sample."""
    return DumpRecord(_with_defaults(values, where), where, "slime")


def without_secrets(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return one of a sample's mappings, such as `metadata`, with secrets masked.

    This masks values whose keys name a secret, and secrets in texts, such as bearer tokens. The saved state of an
    aborted episode stays unchanged, so that the episode can be resumed.
    """
    cleaned: dict[str, Any] = mask(values, _SECRET_KEYS)
    facts = recorded_facts(values)
    if "resume" in facts:
        cleaned[METADATA_KEY] = {**cleaned[METADATA_KEY], "resume": facts["resume"]}
    return cleaned


def text_or_bytes(text: bytes) -> str | list[int]:
    """Return a token's text for JSON: a string, or the bytes as numbers if they are not valid UTF-8."""
    try:
        return text.decode()
    except UnicodeDecodeError:
        return list(text)


@dataclass(frozen=True, slots=True)
class Step:
    """A request to the engine or a tool call.

    Attributes:
        kind: "generate" or "tool".
        at_s: The start, in seconds since the episode began.
        s: The duration in seconds.
        turn: The turn's number from 0; None if unknown, and for a tool call.
        call: The index in the facts' `calls`; None for a request.
    """

    kind: str
    at_s: float
    s: float
    turn: int | None = None
    call: int | None = None


def steps_of(facts: EpisodeFacts) -> list[Step]:
    """Return all steps in order of their start; empty if a step has no recorded start or duration."""
    requests, calls = facts.requests or [], facts.calls or []
    steps = []
    for item in requests:
        turn, at_s, s = item if isinstance(item, list | tuple) and len(item) == 3 else (None, None, None)
        steps.append(_build_step("generate", at_s, s, turn=turn if type(turn) is int else None))
    for number, call in enumerate(calls):
        call_facts = call if isinstance(call, Mapping) else {}
        steps.append(_build_step("tool", call_facts.get("at_s"), call_facts.get("s"), call=number))
    known = [step for step in steps if step is not None]
    return sorted(known, key=lambda step: step.at_s) if len(known) == len(steps) else []


def _build_step(kind: str, at_s: object, s: object, **more: int | None) -> Step | None:
    start, duration = _seconds(at_s), _seconds(s)
    return None if start is None or duration is None else Step(kind, start, duration, **more)


def durations_of(facts: EpisodeFacts) -> dict[str, float] | None:
    """Return the seconds of generation, tools, waiting and the whole episode; None if the whole is unknown.

    If the start of each step is recorded, overlapping steps of a kind are counted once. Waiting is the rest, and
    includes the time that tools waited for the sandbox.
    """
    generate_s, tool_s, duration_s = map(_seconds, (facts.generate_s, facts.tool_s, facts.duration_s))
    if duration_s is None:
        return None
    steps = steps_of(facts)
    if steps:
        generate_s = _busy_seconds(step for step in steps if step.kind == "generate")
        tool_s = _busy_seconds(step for step in steps if step.kind == "tool")
    queued_s = _seconds((facts.code or {}).get("queued_s"))
    generate_s, tool_s = generate_s or 0.0, max(0.0, (tool_s or 0.0) - (queued_s or 0.0))
    wait_s = max(0.0, duration_s - generate_s - tool_s)
    sums = {"generate": generate_s, "tool": tool_s, "wait": wait_s, "all": duration_s}
    return {name: round(value, 4) for name, value in sums.items()}


def _busy_seconds(steps: Iterable[Step]) -> float:
    """Return how many seconds at least one step was in progress; the steps must be sorted by their start."""
    total = end = 0.0
    for step in steps:
        total += max(0.0, step.at_s + step.s - max(end, step.at_s))
        end = max(end, step.at_s + step.s)
    return total


def _seconds(value: object) -> float | None:
    number = finite_number(value)
    return number if number is not None and number >= 0 else None
