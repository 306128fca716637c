"""The progress of a training run: a bar on a terminal, else a line per step; and its steps in wandb.

wandb is set up by the environment alone (WANDB_MODE, WANDB_PROJECT ...); no key is read or written here.
"""

import os
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Self

from rich.console import Console

from strands_rollout.evaluation.display import progress_bar
from strands_rollout.integrations.wandb import check_wandb, start_run
from strands_rollout.train.run_folder import finite

_WORDS: Final[Mapping[str, Callable[[float], str]]] = {
    "reward": lambda value: f"reward {value:.2f}",
    "accuracy": lambda value: f"accuracy {value:.0%}",
    "held_out_accuracy": lambda value: f"held out {value:.0%}",
}
_TIMES: Final = ("rollout_s", "train_s", "sync_s", "eval_s")
_TOLD_AFTER: Final = (1, 3, 10, 30, 100)  # steps in a row without a spread
_PROJECT: Final = "strands-rollout-train"


class TrainingProgress:
    """Shows the progress of a run; a context manager.

    `total` counts the steps of the whole run, `done` those before this process, `groups` a step's.
    """

    def __init__(self, console: Console, *, total: int, done: int = 0, groups: int | None = None) -> None:
        self._console, self._total, self._done, self._groups = console, total, done, groups
        self._steps_without_spread = 0
        self._words = self._phase = ""
        # two draws a second: the thread that draws shares its core with the training
        self._bar = progress_bar(console, refresh_per_second=2)
        self._task = self._bar.add_task("steps", total=total, completed=done)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._bar.stop()

    def phase(self, words: str) -> None:
        """Show the phase that begins, as in "rollout"; nothing without a terminal."""
        self._phase = words
        self._show()

    def step_done(self, record: Mapping[str, float | int | str | None]) -> None:
        """Show a step's reward and accuracies."""
        self._done += 1
        parts = [form(value) for key, form in _WORDS.items() if isinstance(value := record.get(key), int | float)]
        self._words = "  ".join(parts)
        if not self._console.is_interactive:
            seconds = sum(value for key in _TIMES if isinstance(value := record.get(key), int | float))
            line = f"step {self._done}/{self._total}  {self._words}  {seconds:.1f} s"
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)
        self._watch_spread(record)
        self._show()

    def _watch_spread(self, record: Mapping[str, float | int | str | None]) -> None:
        """Say where no group's episodes have different rewards, so that nothing is learned."""
        has_none = self._groups is not None and record.get("dropped_groups") == self._groups
        self._steps_without_spread = self._steps_without_spread + 1 if has_none else 0
        if self._steps_without_spread in _TOLD_AFTER:
            steps = self._steps_without_spread
            where = f"step {self._done}" if steps == 1 else f"{steps} steps in a row up to step {self._done}"
            words = (
                f"nothing learned in {where}: all rewards of each group are alike. Take easier or harder rows, a "
                "reward with more values than right and wrong, more --samples-per-prompt, or a model that can do the "
                "task; `strands-rollout try` shows an episode"
            )
            self._console.print(words, highlight=False, markup=False, soft_wrap=True)

    def _show(self) -> None:
        description = "  ".join(filter(None, (self._words, self._phase)))
        self._bar.update(self._task, completed=self._done, description=description)


class WandbLog:
    """A run in wandb, resumed where the same folder was logged before; a context manager.

    Only what is given here is logged; see `start_run`. wandb's own files lie in the run's folder `out` unless WANDB_DIR
    is set; nothing secret may be among the options.

    Raises:
        ConfigError: wandb can't start a run.
    """

    def __init__(self, out: Path, options: Mapping[str, Any]) -> None:
        check_wandb()
        id_file = out / "wandb_id"
        if not id_file.exists():
            id_file.write_text(secrets.token_hex(4) + "\n")
        self._run = start_run(
            project=os.environ.get("WANDB_PROJECT", _PROJECT),
            name=os.environ.get("WANDB_NAME", out.name),
            id=id_file.read_text().strip(),
            resume="allow",
            dir=os.environ.get("WANDB_DIR", str(out)),
            config=dict(options),
        )
        # a resumed run does some steps again, which wandb's own step, a counter, would refuse
        self._run.define_metric("*", step_metric="step")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        self._run.finish(exit_code=0 if kind is None else 1)

    def append(self, record: Mapping[str, float | int | str | None]) -> None:
        """Log a step; what is no finite number is left out."""
        self._run.log({name: value for name, value in finite(record).items() if value is not None})

    def sum_up(self, summary: Mapping[str, Any]) -> None:
        """Log the run's result."""
        self._run.summary.update(dict(summary))
