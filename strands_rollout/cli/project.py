"""The command `init`: a small project to start from, whose files are in `data/project/`."""

import json
import re
import shlex
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Final, Literal

import typer

from strands_rollout.errors import ConfigError

Kind = Literal["tools", "factory", "environment", "mcp"]

_DATA: Final = Path(str(files("strands_rollout") / "data"))
_COMMON: Final = ("agent.py", "reward.py", "test_agent.py", "rollout.yaml", "turns.yaml", "run_slime.sh", "README.md")
_FURTHER: Final = {"factory": ("factory.py",), "environment": ("environment.py",), "mcp": ("server.py",)}
_AGENTS: Final[dict[Kind, str]] = {
    "tools": "tools: [agent.look_up_price, agent.execute_python_code]\n  reward: reward.score",
    "factory": "agent_factory: factory.build\n  tools: []\n  reward: reward.score",
    "environment": "environment: environment.Shop # its score, made of reward.py's, is the reward\n  tools: []",
    "mcp": "tools:\n    - name: shop\n      command: python server.py\n      cwd: @FOLDER@\n  reward: reward.score",
}
"""What rollout.yaml says of the agent."""
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_SHOP_PROBLEM: Final = re.compile(r"dollars each|dollars and \w+ cost")
"""Those of the shipped problems that a shop's till can answer."""
_TRAINING_ROWS: Final = 96


def init(
    folder: Annotated[Path, typer.Argument(help="The project's folder, which is made.", metavar="DIR")],
    kind: Annotated[
        Kind,
        typer.Option(
            help="What the agent is made of. tools: functions; factory: a function that builds it; environment: a "
            "world with tools, a state and a score; mcp: an MCP server."
        ),
    ] = "tools",
) -> None:
    """Write a small project to start from, which works at once.

    It has an agent, a reward, their tests, rows, and what tries and trains them. Writes nothing into a folder that has
    files.
    """
    folder = folder.expanduser()
    place = folder.resolve()
    if not _NAME.fullmatch(place.name):
        raise ConfigError(f"got the name {place.name!r}; expected letters, digits, dots, dashes and underscores")
    texts = _texts(kind, place)
    try:
        place.mkdir(parents=True, exist_ok=True)
        if held := sorted(path.name for path in place.iterdir()):
            raise ConfigError(f"{folder} is not empty, it holds {', '.join(held[:3])}; name a new folder")
        for name, text in texts.items():
            (place / name).write_text(text, encoding="utf-8")
    except OSError as e:
        raise ConfigError(f"can't write {folder}: {e.strerror}; name another folder") from e
    enter = "" if place == Path.cwd() else f"cd {shlex.quote(str(folder))} && "
    typer.echo(f"wrote {', '.join(texts)}\nnext: {enter}strands-rollout try rollout.yaml --script turns.yaml")


def _texts(kind: Kind, place: Path) -> dict[str, str]:
    """The project's files by name."""
    texts = {}
    for name in (*_COMMON, *_FURTHER.get(kind, ())):
        text = (_DATA / "project" / name).read_text(encoding="utf-8").replace("@AGENT@", _AGENTS[kind])
        texts[name] = text.replace("@NAME@", place.name).replace("@FOLDER@", json.dumps(str(place)))
    for name, source in (("train.jsonl", "train.jsonl"), ("held_out.jsonl", "demo.jsonl")):
        rows = (_DATA / source).read_text(encoding="utf-8").splitlines(keepends=True)
        texts[name] = "".join([row for row in rows if _SHOP_PROBLEM.search(row)][:_TRAINING_ROWS])
    return texts
