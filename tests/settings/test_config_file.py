"""Configuration files: those that are shipped, what is refused, and `strands-rollout config`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from omegaconf import OmegaConf
from pydantic import BaseModel
from typer.testing import CliRunner

from strands_rollout.cli import app
from strands_rollout.config import RolloutSettings, settings_from_args
from strands_rollout.config_file import documented, read_config_file
from strands_rollout.errors import ConfigError
from strands_rollout.executors import shared_executor
from strands_rollout.reward_settings import RewardSettings
from strands_rollout.tool_loading import load_tools

CONFIGS = Path(__file__).parents[1] / "configs"
ROLLOUT_CONFIGS = sorted(path for path in CONFIGS.glob("*.yaml") if path.stem != "aime_eval")


def written(folder: Path, text: str) -> Path:
    path = folder / "rollout.yaml"
    path.write_text(text)
    return path


def as_slime_reads(path: Path) -> SimpleNamespace:
    """slime sets the keys of --custom-config-path on its args (slime/utils/arguments.py)."""
    args = SimpleNamespace()
    for name, value in yaml.safe_load(path.read_text()).items():
        setattr(args, name, value)
    return args


def test_the_configurations_are_the_promised_ones() -> None:
    assert {path.name for path in CONFIGS.iterdir()} == {
        "math_code.yaml",
        "aime_eval.yaml",
        "calculator.yaml",
        "gsm8k.yaml",
        "guessing_game.yaml",
        "mcp.yaml",
        "shop.yaml",
        "smoke.yaml",
        "sub_agent.yaml",
        "two_tools.yaml",
    }


@pytest.mark.parametrize("path", ROLLOUT_CONFIGS, ids=lambda path: path.stem)
def test_a_shipped_configuration_has_one_key_and_reads_as_slime_reads_it(path: Path) -> None:
    args = as_slime_reads(path)
    assert list(vars(args)) == ["strands_rollout"]
    assert settings_from_args(args) == read_config_file(path)


@pytest.mark.parametrize("name", ["math_code", "shop", "smoke"])
async def test_what_a_shipped_configuration_names_can_be_loaded(name: str) -> None:
    settings = read_config_file(CONFIGS / f"{name}.yaml")
    assert load_tools(settings.tools)
    assert shared_executor(settings.executor)


def test_the_evaluations_sets_lie_where_data_dir_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATA_DIR", "/sets")
    config = OmegaConf.to_container(OmegaConf.load(CONFIGS / "aime_eval.yaml"), resolve=True)
    paths = {each["name"]: each["path"] for each in config["eval"]["datasets"]}
    assert paths == {name: f"/sets/{name}.jsonl" for name in ("aime-2024", "aime-2025", "gsm8k-test")}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "strands_rollout:\n  max_tool_iterations: 3\n  tols: []\n",
            "unknown setting strands_rollout.tols; did you mean 'tools'",
        ),
        (
            "strands_rolout:\n  tools: []\n",
            "has no key strands_rollout:; did you mean 'strands_rollout' by 'strands_rolout'",
        ),
        ("lr: 3\n", "has no key strands_rollout:; got lr"),
        ("{}", "has no key strands_rollout:; got none"),
        ("- a\n", "holds list; expected a mapping with the key strands_rollout:"),
        ("strands_rollout: [\n", "is no YAML: "),
        ("strands_rollout: 3\n", "expected a mapping of settings under the key"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_with_its_name(tmp_path: Path, text: str, words: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ConfigError, match=words) as refused:
        read_config_file(path)
    assert str(path) in str(refused.value)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"can't read .*rollout\.yaml: No such file"):
        read_config_file(tmp_path / "rollout.yaml")


def test_a_file_may_hold_slimes_own_keys_too(tmp_path: Path) -> None:
    path = written(tmp_path, "lr: 3\nstrands_rollout:\n  max_tool_iterations: 9\n")
    assert read_config_file(path).max_tool_iterations == 9


@pytest.mark.parametrize("model", [RolloutSettings, RewardSettings])
def test_every_setting_is_documented_where_it_is_defined(model: type[BaseModel]) -> None:
    assert [name for name, field in model.model_fields.items() if not field.description] == []


@pytest.mark.parametrize("path", ROLLOUT_CONFIGS, ids=lambda path: path.stem)
def test_what_config_prints_is_the_same_configuration(path: Path, tmp_path: Path) -> None:
    settings = read_config_file(path)
    text = documented(settings)
    assert read_config_file(written(tmp_path, text)) == settings
    meanings = re.sub(r"\n +# ", " ", text)
    for name, field in RolloutSettings.model_fields.items():
        assert f" {field.description}\n  {name}:" in meanings


def test_config_shows_defaults_and_marks_what_differs_from_them() -> None:
    defaults = CliRunner().invoke(app, ["config"])
    assert defaults.exit_code == 0
    assert "# default" not in defaults.stdout
    shown = CliRunner().invoke(app, ["config", str(CONFIGS / "calculator.yaml")]).stdout
    assert "  max_tool_iterations: 8  # default: 5\n" in shown
    assert "  # Model turns whose tool calls are run.\n" in shown


def test_config_as_json_has_every_setting() -> None:
    shown = json.loads(CliRunner().invoke(app, ["config", "--json"]).stdout)
    assert list(shown) == list(RolloutSettings.model_fields)
    assert list(shown["reward"]) == list(RewardSettings.model_fields)


SECRETIVE = """
strands_rollout:
  executor:
    name: sandbox_fusion
    url: https://me:hunt@er2@sandbox.example/run
    mirror: http://me:hunter2@sandbox.example:81/run
    headers: {Authorization: Bearer hunter2, X-Api-Key: hunter2, Accept: text/plain}
    cookies: [hunter2]
    max_tokens: 7
  tools:
    - url: https://tools.example/mcp
      headers: {Authorization: Bearer hunter2}
    - command: python -m server
      env: {API_KEY: hunter2}
"""


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_config_masks_secrets_and_says_so(form: list[str], tmp_path: Path) -> None:
    path = written(tmp_path, SECRETIVE)
    shown = CliRunner().invoke(app, ["config", str(path), *form])
    assert shown.exit_code == 0
    assert not {word for word in ("hunter2", "er2@", "hunt@") if word in shown.output}
    assert "put them in again" in (shown.stderr if form else shown.stdout.splitlines()[0])
    settings = json.loads(shown.stdout) if form else yaml.safe_load(shown.stdout)["strands_rollout"]
    assert settings["executor"] == {
        "name": "sandbox_fusion",
        "url": "https://***@sandbox.example/run",
        "mirror": "http://***@sandbox.example:81/run",
        "headers": {"Authorization": "***", "X-Api-Key": "***", "Accept": "text/plain"},
        "cookies": "***",
        "max_tokens": 7,
    }
    assert settings["tools"][0]["headers"] == {"Authorization": "***"}
    assert settings["tools"][1]["env"] == {"API_KEY": "***"}


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_a_configuration_without_secrets_is_not_called_masked(form: list[str]) -> None:
    shown = CliRunner().invoke(app, ["config", str(CONFIGS / "math_code.yaml"), *form])
    assert "***" not in shown.output
    assert "masked" not in shown.output
