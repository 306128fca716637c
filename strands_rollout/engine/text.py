"""The tokenizer of a model folder, read without transformers: text to ids, ids to text, chat messages to a prompt."""

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import jinja2.ext
import jinja2.sandbox
from tokenizers import Tokenizer

from strands_rollout.engine.qwen3 import MAX_CONFIG_BYTES
from strands_rollout.engine.requests import RequestRefusedError
from strands_rollout.errors import ConfigError, foreign_code
from strands_rollout.files import read_regular

_LONG_TEXT_CHARS = 10_000
_MAX_TOKENIZER_BYTES = 200_000_000
_SPECIAL_TOKEN_KEYS = ("bos_token", "eos_token", "pad_token", "unk_token")


class TextCodec:
    """Encodes, decodes and renders with one model's tokenizer and template."""

    def __init__(self, tokenizer: Tokenizer, special_tokens: dict[str, str], template: str | None) -> None:
        self._tokenizer = tokenizer
        self._special_tokens = special_tokens
        self._template = _compiled(template) if template else None

    @property
    def eos_token_id(self) -> int | None:
        """The id of the tokenizer's own end-of-sequence token, where it names one."""
        token = self._special_tokens.get("eos_token")
        found: int | None = self._tokenizer.token_to_id(token) if token else None
        return found

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; text that spells a special token becomes that token."""
        if len(text) < _LONG_TEXT_CHARS:
            encoding = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        else:
            # tokenizers releases Python's lock for batches only
            encoding = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
        return list(encoding.ids)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of `ids`; bytes that are not valid UTF-8 become U+FFFD."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def render_chat(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], options: dict[str, Any]) -> str:
        """The prompt of a chat, ending where the assistant's turn begins; RequestRefusedError where it has none."""
        if self._template is None:
            raise RequestRefusedError("this model folder has no chat template; use /generate")
        names = {"add_generation_prompt": True, **self._special_tokens, **options}
        with foreign_code("a template fails in any way on messages that it was not written for") as outcome:
            return self._template.render(messages=messages, tools=tools or None, **names)
        raise RequestRefusedError(f"the chat template refused the messages: {outcome.error!r:.300}") from outcome.error


def read_text_codec(folder: Path) -> TextCodec:
    """Read tokenizer.json and, where present, tokenizer_config.json and chat_template.jinja, or raise ConfigError."""
    path = folder / "tokenizer.json"
    if not path.exists():
        raise ConfigError(f"{folder} has no tokenizer.json; the embedded engine needs a fast tokenizer")
    config_path, template_path = folder / "tokenizer_config.json", folder / "chat_template.jinja"
    config: dict[str, Any] = {}
    with foreign_code("tokenizers raises plain Exception for a broken file") as outcome:
        tokenizer = Tokenizer.from_buffer(read_regular(path, _MAX_TOKENIZER_BYTES))
        if config_path.exists():
            config = json.loads(read_regular(config_path, MAX_CONFIG_BYTES))
        template = config.get("chat_template")
        if template_path.exists():
            template = read_regular(template_path, MAX_CONFIG_BYTES).decode("utf-8")
        tokens = {key: config[key] for key in _SPECIAL_TOKEN_KEYS if config.get(key)}
        special_tokens = {key: token["content"] if isinstance(token, dict) else token for key, token in tokens.items()}
    if outcome.error is not None:
        raise ConfigError(f"can't read the tokenizer of {folder}: {outcome.error}") from outcome.error
    try:
        return TextCodec(tokenizer, special_tokens, template)
    except jinja2.TemplateError as e:
        raise ConfigError(f"the chat template of {folder} is not valid Jinja: {e}") from e


def _compiled(template: str) -> jinja2.Template:
    """`template` in the environment that transformers gives to chat templates."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    # Jinja's own filter escapes <, > and & for HTML, which a prompt must not do.
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    environment.globals["raise_exception"] = _raise_template_error
    environment.globals["strftime_now"] = lambda form: datetime.now(tz=UTC).strftime(form)
    return environment.from_string(template)


def _raise_template_error(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
