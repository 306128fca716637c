"""A run in wandb that is told nothing but what is logged to it.

Knows wandb, which may be absent; must not know what is logged, nor read or write a key.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any, Final

from strands_rollout.errors import ConfigError

_WITHOUT_KEY: Final = frozenset({"offline", "dryrun", "disabled"})


def check_wandb(asked_by: str = "--wandb") -> None:
    """Refuse to log before anything runs.

    Args:
        asked_by: The option that asks for wandb, for the message.

    Raises:
        ConfigError: wandb is not installed, or would ask for a key.
    """
    if find_spec("wandb") is None:
        raise ConfigError(f"{asked_by} needs wandb, which is not installed; pip install 'strands-rollout[wandb]'")
    mode = os.environ.get("WANDB_MODE", "")
    if mode not in _WITHOUT_KEY and not os.environ.get("WANDB_API_KEY"):
        raise ConfigError(
            f"{asked_by} found no WANDB_API_KEY in the environment; set it, or WANDB_MODE=offline to upload later"
        )


def start_run(**settings: Any) -> Any:  # noqa: ANN401 - wandb's own
    """Start a run; what is left unsaid, the environment says (WANDB_MODE, WANDB_RUN_ID ...).

    No command line, no output, no code and no name of a git remote goes along, as any of these may hold a secret.

    Args:
        settings: What `wandb.init` is given; nothing secret may be among them.

    Raises:
        ConfigError: wandb can't start a run.
    """
    import wandb

    quiet = wandb.Settings(
        silent=True,
        console="off",
        disable_code=True,
        disable_git=True,
        x_disable_meta=True,
        x_disable_stats=True,
        x_save_requirements=False,
    )
    try:
        return wandb.init(settings=quiet, **settings)
    except (wandb.Error, OSError) as e:
        raise ConfigError(f"wandb can't start a run: {e}; mend that, or set WANDB_MODE=offline") from e
