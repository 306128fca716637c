"""Does a server cut text into the same tokens as the run's tokenizer? Other ids at a server can kill it.

Knows SGLang's /tokenize (0.5.23), which routers and older servers lack; there, the server's own folder is read if it is
on this machine.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import httpx
import orjson

from strands_rollout.doctor.finding import Finding, error, good, skipped, warning
from strands_rollout.server_info import ServerInfo

if TYPE_CHECKING:
    from strands_rollout.doctor.engine_server import Expected

# words, numbers and control tokens that vocabularies cut in different ways
_TEXT: Final = "<|im_start|>Zwölf Boxkämpfer: x = 1234567, \\boxed{42}; unbelievably<tool_call>\n\n\t東京<|im_end|>"
_REMEDY: Final = "name the folder of the served model with --tokenizer, or serve the model that is trained"


async def check_tokens(http: httpx.AsyncClient, info: ServerInfo, expected: Expected) -> list[Finding]:
    """Whether server and tokenizer agree on a text; nothing is said where one of them does not tell."""
    own = _ids_of(expected.tokenizer) if expected.tokenizer is not None else None
    if own is None:
        return [skipped("server tokens", "no --tokenizer to compare with the server's")]
    served = await _served_ids(http, info)
    if served is None:
        return [skipped("server tokens", "the server has no /tokenize, and its tokenizer is not on this machine")]
    if served == own:
        return [good("server tokens", f"a text has the same {len(own)} tokens there as in {expected.tokenizer}")]
    found = (
        f"the tokenizer {expected.tokenizer} is not that of the served {info.model_path}: a text is {len(own)} tokens "
        f"here, {own[:6]}..., and {len(served)} there, {served[:6]}..."
    )
    make = error if expected.tokenizer_is_named else warning
    return [make("server tokens", found, _REMEDY)]


async def _served_ids(http: httpx.AsyncClient, info: ServerInfo) -> list[int] | None:
    name = info.raw.get("served_model_name") or info.model_path
    response = await http.post("/tokenize", json={"model": name, "prompt": _TEXT, "add_special_tokens": False})
    try:
        answer: Any = orjson.loads(response.content) if response.status_code == httpx.codes.OK else None
    except orjson.JSONDecodeError:
        answer = None
    tokens = answer.get("tokens") if isinstance(answer, dict) else None
    if isinstance(tokens, list):
        return tokens
    folder = info.raw.get("tokenizer_path") or info.model_path
    return _ids_of(Path(str(folder)))


def _ids_of(folder: Path) -> list[int] | None:
    """The text's ids by the tokenizer of a folder; None where there is none that works."""
    from tokenizers import Tokenizer

    file = folder / "tokenizer.json"
    if not file.is_file():
        return None
    try:
        return list(Tokenizer.from_file(str(file)).encode(_TEXT, add_special_tokens=False).ids)
    except Exception:  # whatever tokenizers raises: that file is another check's
        return None
