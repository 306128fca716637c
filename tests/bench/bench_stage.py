"""A scripted engine with the shipped tokenizer, for the benchmarks' own tests."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import strands_rollout
from benchmarks.client import scripted_engine
from benchmarks.script import Script, save_scripts
from benchmarks.variants import Job, Played, Player, Step, make_player

SHIPPED_TOKENIZER = Path(strands_rollout.__file__).parent / "engine" / "checkpoint"


@dataclass(frozen=True)
class Stage:
    """A running engine and its scripts."""

    port: int
    scripts: list[Script]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def player(self, variant: str) -> Player:
        step = Step("cpu", variant, turns=2, concurrency=2, episodes=1)
        return make_player(Job(step, "", "", str(SHIPPED_TOKENIZER), self.port), self.scripts)


@contextmanager
def stage_of(scripts: list[Script], folder: Path) -> Iterator[Stage]:
    path = folder / "scripts.json"
    save_scripts(scripts, path)
    with scripted_engine([path], core=None) as port:
        yield Stage(port, scripts)


def perfect(script: Script) -> Played:
    """Return the script's episode as a correct variant plays it."""
    logprobs = iter(script.logprobs())
    mask = script.loss_mask()
    return Played(script.tokens(), mask, [next(logprobs) if bit else 0.0 for bit in mask], None)
