"""The settings of an SGLangModel, in the form that Strands reads (`get_config`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from typing import Any, Literal, TypedDict, cast

from strands_rollout.errors import BudgetExhaustedError, ConfigError
from strands_rollout.token_limits import TokenLimits


class SGLangModelConfig(TypedDict):
    """Settings that `SGLangModel.update_config` changes; their meaning is documented there."""

    model_id: str | None
    sampling_params: dict[str, Any]
    limits: TokenLimits
    return_logprobs: bool
    context_window_limit: int | None
    headers: dict[str, str]
    extra: dict[str, Any]
    continue_aborted: bool
    on_rewritten_history: Literal["error", "segment"]


def config_after(config: SGLangModelConfig, spent: int) -> SGLangModelConfig:
    """The settings with what is left of the response budget after `spent` tokens of earlier histories.

    Raises:
        BudgetExhaustedError: Nothing is left.
    """
    limits = config["limits"]
    if limits.max_response_tokens is None or not spent:
        return config
    left = limits.max_response_tokens - spent
    if left < 1:
        raise BudgetExhaustedError(
            f"no token of the response budget is left: {spent} of {limits.max_response_tokens} were used before the "
            "history was rewritten. Raise the budget.",
            budget="response",
        )
    return {**config, "limits": replace(limits, max_response_tokens=left)}


def updated_config(config: SGLangModelConfig, changes: Mapping[str, Any]) -> SGLangModelConfig:
    """A copy of `config` with `changes`.

    Raises:
        ConfigError: A name is unknown; the message names the nearest known one.
    """
    for name in changes:
        if name not in config:
            raise ConfigError(unknown_name("setting", name, config))
    return cast("SGLangModelConfig", {**config, **changes})


def unknown_name(what: str, got: str, known: Mapping[str, Any]) -> str:
    """The message for a name that is not among `known`, with the nearest one."""
    near = get_close_matches(got, known, n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"got the unknown {what} {got!r}; expected one of {', '.join(sorted(known))}.{hint}"
