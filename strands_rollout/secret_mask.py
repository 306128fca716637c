"""Find secrets in nested plain values, and mask them: by the key in a mapping, by the position in a text, or by value.

Secrets in a text are the user, password and secret parameters of a URL, and bearer tokens. In settings, a command may
have secrets, too: arguments with the name of a secret (`--api-key x`, `TOKEN=x`).
"""

import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Final

from strands_rollout.files.json_codec import Json

MASK: Final = "***"
_NAME: Final = re.compile(
    r"(^|[_.-])(key|token|secret|passw(or)?d|pass|passphrase|pat|credentials?|authorization|auth|cookie|sig|signature"
    r"|jwt|bearer)([_.-]?\d+)?$|(api|access|secret|private)key$|(auth|access|api)token$|password|passphrase|credential"
    r"|secret|(?-i:[a-z](Key|Token|Pass|Pat|Auth|Sig|Signature))$",
    re.IGNORECASE,
)
_USER_INFO: Final = re.compile(r"(\b[a-z][a-z0-9+.-]*://)[^/\s]*@", re.IGNORECASE)
_PASSWORD: Final = re.compile(r"\b[a-z][a-z0-9+.-]*://[^/\s:@]*:([^/\s@]+)@", re.IGNORECASE)
_PARAMETER: Final = re.compile(r"(?<=[?&;#])([\w.~%-]+)=([^&;#\s\"'<>]+)")
_BEARER: Final = re.compile(r"\b(bearer\s+)((?=\S*\d)[\w.~+/=-]{8,}|[\w.~+/=-]{16,})", re.IGNORECASE)
_ASSIGNED: Final = re.compile(r"-{0,2}([A-Za-z][\w.-]*)[=:](.*)", re.DOTALL)  # --name=value, NAME=value, Name: value
_FLAG: Final = re.compile(r"--?([A-Za-z][\w.-]*)")
_SPACES: Final = re.compile(r"(\s+)")
_REFERENCE: Final = re.compile(r"(bearer\s+)?\$\{\w+\}", re.IGNORECASE)
_HARMLESS_HEADERS: Final = (
    "accept",
    "accept-encoding",
    "accept-language",
    "cache-control",
    "connection",
    "content-type",
    "host",
    "user-agent",
)
_NO_SECRETS: Final = (None, "", True, False)


def mask(value: object, secret_key: re.Pattern[str]) -> Json:
    """Return the value with secrets masked: values whose key matches `secret_key`, and secrets in texts.

    None, empty texts, bools, 0 and 1 are never masked because of their key.
    """
    if isinstance(value, Mapping):
        is_secret = {key: secret_key.search(str(key)) and item not in _NO_SECRETS for key, item in value.items()}
        return {key: MASK if is_secret[key] else mask(item, secret_key) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [mask(item, secret_key) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return mask_text(value) if isinstance(value, str) else value


def mask_text(text: str) -> str:
    """Return the text with bearer tokens and the secrets of URLs masked."""
    text = _USER_INFO.sub(rf"\g<1>{MASK}@", text)
    text = _PARAMETER.sub(lambda found: f"{found[1]}={MASK}" if _NAME.search(found[1]) else found[0], text)
    return _BEARER.sub(rf"\g<1>{MASK}", text)


def mask_settings(value: object, secret_key: re.Pattern[str] = _NAME) -> Json:
    """Return settings with secrets masked; references to environment variables (`${NAME}`) are not masked.

    Masks the same secrets as `mask`, all variables in `env` and `environment`, and secrets in commands. Headers are
    masked, too, except harmless ones such as `accept`.
    """
    if isinstance(value, Mapping):
        return {key: _masked_setting(str(key), item, secret_key) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [mask_settings(item, secret_key) for item in value]
        for i, (item, secret) in enumerate(_find_secrets_in_arguments(value)):
            if secret == item:  # a secret within an item is masked already
                items[i] = MASK
        return items if isinstance(value, list) else tuple(items)
    if not isinstance(value, str) or _REFERENCE.fullmatch(value):
        return value
    words = [
        MASK.join(word.rsplit(secret, 1)) if secret else word
        for word, secret in _find_secrets_in_arguments(_SPACES.split(value))
    ]
    return mask_text("".join(words))


def _find_secrets_in_arguments(words: Iterable[Any]) -> Iterator[tuple[Any, str]]:
    """Yield each word of a command with the secret in it, or with "" if it has no secret.

    The secret's name is in the same word (`TOKEN=x`), or is the word before (`--api-key x`).
    """
    is_awaited = False  # True if the previous word is the name of a secret
    for word in words:
        bare = word.strip("\"'") if isinstance(word, str) else ""
        assigned, flag = _ASSIGNED.fullmatch(bare), _FLAG.fullmatch(bare)
        if not bare.strip() or (is_awaited and bare.lower() in ("bearer", "basic")):
            yield word, ""
        elif assigned and _NAME.search(assigned[1]):
            is_awaited = assigned[2].strip().lower() in ("", "bearer", "basic")
            yield word, "" if is_awaited or _REFERENCE.fullmatch(assigned[2]) else assigned[2]
        elif is_awaited and flag is None:
            is_awaited = False
            yield word, "" if _REFERENCE.fullmatch(bare) else bare
        else:
            is_awaited = flag is not None and _NAME.search(flag[1]) is not None
            yield word, ""


def _masked_setting(key: str, item: Json, secret_key: re.Pattern[str]) -> Json:
    if isinstance(item, str) and _REFERENCE.fullmatch(item):
        return item
    if isinstance(item, Mapping) and (kind := key.lower()) in ("env", "environment", "headers"):
        known = _HARMLESS_HEADERS if kind == "headers" else ()
        return {
            name: text if str(name).lower() in known or text in (None, "") or _REFERENCE.fullmatch(str(text)) else MASK
            for name, text in item.items()
        }
    if secret_key.search(key) or (isinstance(item, str) and _NAME.search(key)):
        return MASK if item not in _NO_SECRETS else item
    return mask_settings(item, secret_key)


def find_secrets(*mappings: Json) -> frozenset[str]:
    """Return the secrets in mappings, such as the environment and settings; secrets under 8 characters are left out.

    A text whose key names a secret is a secret. So is a header, except a harmless one such as `accept`. Other texts may
    contain secrets: passwords and secret parameters of URLs, bearer tokens, and secrets in commands. In a text whose
    key names a secret, and in a header, a reference to an environment variable (`${NAME}`) is replaced by the
    variable's value.
    """
    return frozenset(text for value in mappings for text in _iter_secrets(value) if len(text) >= 8)


def _iter_secrets(value: object, key: str = "") -> Iterator[str]:
    if isinstance(value, Mapping):
        for name, item in value.items():
            is_header = key.lower() == "headers" and str(name).lower() not in _HARMLESS_HEADERS
            if isinstance(item, str) and (is_header or _NAME.search(str(name))):
                text = os.path.expandvars(item).strip()
                yield text
                yield text.split()[-1] if text else ""  # the token of "Bearer ..." by itself too
            else:
                yield from _iter_secrets(item, str(name))
    elif isinstance(value, list | tuple):
        yield from (os.path.expandvars(secret) for _, secret in _find_secrets_in_arguments(value))
        for item in value:
            yield from _iter_secrets(item, key)
    elif isinstance(value, str):
        yield from (found[1] for found in _PASSWORD.finditer(value))
        yield from (found[2] for found in _PARAMETER.finditer(value) if _NAME.search(found[1]))
        yield from (found[2] for found in _BEARER.finditer(value))
        yield from (secret for _, secret in _find_secrets_in_arguments(_SPACES.split(value)))


def mask_values(value: object, secrets: Collection[str]) -> Json:
    """Return the value with each occurrence of the secrets masked, in keys and values of mappings and in lists too."""
    if not secrets:
        return value
    secret = re.compile("|".join(map(re.escape, sorted(secrets, key=len, reverse=True))))

    def replace(part: object) -> Json:
        if isinstance(part, str):
            return secret.sub(MASK, part)
        if isinstance(part, Mapping):
            return {replace(key): replace(item) for key, item in part.items()}
        if isinstance(part, list | tuple):
            return list(map(replace, part)) if isinstance(part, list) else tuple(map(replace, part))
        return part

    return replace(value)
