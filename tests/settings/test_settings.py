"""Settings from slime's args and from files: shipped files, errors, and `strands-rollout config`."""

import json
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Literal

import pytest
import yaml
from omegaconf import OmegaConf
from pydantic import Field, FiniteFloat, TypeAdapter, ValidationError
from typer.testing import CliRunner

from strands_rollout.cli.commands import app
from strands_rollout.cli.options import format_settings
from strands_rollout.errors import ConfigError
from strands_rollout.evaluation.plan import read_eval_config
from strands_rollout.play.options import Sampling
from strands_rollout.secret_mask import find_secrets
from strands_rollout.settings import RewardSettings, RolloutSettings, read_config_file, settings_from_args
from strands_rollout.validation import expectation

CONFIGS = Path(__file__).parents[2] / "configs"
ROLLOUT_CONFIGS = sorted(path for path in CONFIGS.glob("*.yaml") if path.stem != "aime_eval")


def write_config(folder: Path, text: str) -> Path:
    path = folder / "rollout.yaml"
    path.write_text(text)
    return path


def as_slime_reads(path: Path) -> SimpleNamespace:
    """Set the file's keys on an args object, as slime does for --custom-config-path (slime/utils/arguments.py)."""
    args = SimpleNamespace()
    for name, value in yaml.safe_load(path.read_text()).items():
        setattr(args, name, value)
    return args


def parsed(given: Any) -> RolloutSettings:
    return settings_from_args(SimpleNamespace(strands_rollout=given))


@pytest.mark.parametrize(
    "args", [SimpleNamespace(), SimpleNamespace(strands_rollout=None), SimpleNamespace(strands_rollout={})]
)
def test_settings_from_args_defaults(args: Any, tmp_path: Path) -> None:
    assert (settings_from_args(args), settings_from_args(args).max_tool_iterations) == (RolloutSettings(), 5)
    assert settings_from_args(args).tools == ("strands_rollout.tools.execute_python_code",)
    # a file with slime's own keys beside ours
    text = "lr: 3\nstrands_rollout: {max_tool_iterations: null, tools: [a.b], reward: {style: slime_strands_example}}\n"
    settings = read_config_file(write_config(tmp_path, text))
    given = (settings.max_tool_iterations, settings.tools, settings.reward.style)
    assert given == (None, ("a.b",), "slime_strands_example")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"max_tool_iters": 3}, "unknown setting strands_rollout.max_tool_iters; did you mean 'max_tool_iterations'"),
        ({"reward": {"stile": "x"}}, "unknown setting strands_rollout.reward.stile; did you mean 'style'"),
        ({"max_tool_iterations": -1}, "got strands_rollout.max_tool_iterations=-1; expected: at least 0$"),
        ({"tool_timeout_s": "soon"}, "got strands_rollout.tool_timeout_s='soon'; expected: a number$"),
        ({"max_tool_iterations": "x"}, "got strands_rollout.max_tool_iterations='x'; expected: an integer$"),
        ({"fan_out": "perhaps"}, "got strands_rollout.fan_out='perhaps'; expected: true or false$"),
        ({"tools": "a.b"}, r"got strands_rollout.tools='a.b'; expected: a list, in \[ \]$"),
        ({"reward": {"judge": 3}}, "got strands_rollout.reward.judge=3; expected: a mapping$"),
        ({"reward": {"style": "mine"}}, "expected: 'default' or 'slime_strands_example'$"),
        ({"reward": {"correct": 1.0, "wrong": 1.0}}, "less than correct=1.0 for a wrong answer, which could score 1.0"),
        ({"reward": {"correct": 0.4, "wrong": 0.0, "tool_shaping": True}}, "a wrong answer, which could score 0.4"),
        ({"reward": {"function": "x.y", "style": "slime_strands_example"}}, "no style or tool_shaping with function"),
        ({"reward": {"evaluator": "x.y", "tool_shaping": True}}, "no style or tool_shaping with evaluator, which"),
        (
            {"reward": {"parts": {"a": {"function": "x.y"}}, "tool_shaping": True}},
            "no style or tool_shaping with part",
        ),
        ({"reward": {"parts": {"a": {"function": "x.y", "judge": "x.z"}}}}, "either a function, or a judge"),
        ({"reward": {"parts": {"a": {"function": "x.y", "evaluator": "x.z"}}}}, "either a function, or a judge"),
    ],
)
def test_settings_error_names_got_and_expected(given: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parsed(given)


@pytest.mark.parametrize(
    ("kind", "given", "words"),
    [
        (int, 1.5, "an integer"),
        (Annotated[int, Field(gt=3)], 3, "more than 3"),
        (Annotated[int, Field(lt=3)], 3, "less than 3"),
        (Annotated[int, Field(le=3)], 4, "at most 3"),
        (FiniteFloat, float("inf"), "a finite number"),
        (str, 3, "a string"),
        (dict[str, int], 3, "a mapping"),
        (list[int], 3, "a list, in [ ]"),
        (list[int], ["x"], "an integer"),
        (RewardSettings, 3, "a mapping"),
        (None, 3, "nothing"),
        (Annotated[list[int], Field(min_length=2)], [1], "at least 2 items"),
        (Annotated[str, Field(min_length=2)], "a", "at least 2 characters"),
        (Annotated[str, Field(pattern="^a")], "b", "a string matching '^a'"),
        (Literal["a", "b"], "c", "'a' or 'b'"),
        (Path, 3, "a path"),
    ],
    ids=str,
)
def test_expectation_of_pydantic_errors(kind: Any, given: Any, words: str) -> None:
    with pytest.raises(ValidationError) as refused:
        TypeAdapter(kind).validate_python(given)
    assert expectation(refused.value.errors()[0]) == words


@pytest.mark.parametrize("path", ROLLOUT_CONFIGS, ids=lambda path: path.stem)
def test_shipped_config_reads_as_slime_reads_it(path: Path) -> None:
    args = as_slime_reads(path)
    assert (list(vars(args)), settings_from_args(args)) == (["strands_rollout"], read_config_file(path))


def test_shipped_eval_config_uses_data_dir(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATA_DIR", "/sets")
    config = OmegaConf.to_container(OmegaConf.load(CONFIGS / "aime_eval.yaml"), resolve=True)
    paths = {each["name"]: each["path"] for each in config["eval"]["datasets"]}
    assert paths == {name: f"/sets/{name}.jsonl" for name in ("aime-2024", "aime-2025", "gsm8k-test")}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("strands_rollout: {tols: []}", "unknown setting strands_rollout.tols; did you mean 'tools'"),
        ("strands_rolout: {}", "has no key strands_rollout:; did you mean 'strands_rollout' by 'strands_rolout'"),
        ("- a\n", "contains a list; expected a mapping with the key strands_rollout:"),
        ("strands_rollout: [\n", "can't be read as YAML: "),
        ("strands_rollout: 3\n", "expected a mapping of settings under the key"),
    ],
)
def test_read_config_file_error_names_the_file(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=r"can't read .*rollout\.yaml: No such file"):
        read_config_file(tmp_path / "rollout.yaml")
    path = write_config(tmp_path, text)
    with pytest.raises(ConfigError, match=words) as refused:
        read_config_file(path)
    assert str(path) in str(refused.value)


@pytest.mark.parametrize("name", ["EPISODE_WORKERS", "MAX_SAMPLE_STALENESS"])
def test_read_config_file_error_names_only_the_variable(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"STRANDS_ROLLOUT_{name}", "many")
    for path in (None, write_config(tmp_path, "strands_rollout: {}")):
        with pytest.raises(ConfigError, match=f"^got STRANDS_ROLLOUT_{name}='many' in the environment"):
            read_config_file(path)


@pytest.mark.parametrize("path", ROLLOUT_CONFIGS, ids=lambda path: path.stem)
def test_format_settings_reads_back_as_the_same_settings(path: Path, tmp_path: Path) -> None:
    settings = read_config_file(path)
    text = format_settings(settings)
    assert read_config_file(write_config(tmp_path, text)) == settings
    meanings = re.sub(r"\n +# ", " ", text)
    for name, field in RolloutSettings.model_fields.items():
        assert f" {field.description}\n  {name}:" in meanings


def test_config_command_marks_values_other_than_defaults() -> None:
    defaults = CliRunner().invoke(app, ["config"])
    assert defaults.exit_code == 0
    assert "# default" not in defaults.stdout
    shown = CliRunner().invoke(app, ["config", str(CONFIGS / "calculator.yaml")]).stdout
    assert "  max_tool_iterations: 8  # default: 5\n" in shown
    assert "  # Maximum turns per episode that run tool calls.\n" in shown
    assert not {word for word in ("***", "masked") if word in shown}
    values = json.loads(CliRunner().invoke(app, ["config", "--json"]).stdout)
    assert list(values) == list(RolloutSettings.model_fields)
    assert list(values["reward"]) == list(RewardSettings.model_fields)


LEAKY = """
strands_rollout:
  executor:
    name: sandbox_fusion
    url: https://sandbox.example/run?lang=py&api_key=s3cretAAAA&sig=s3cretBBBB#access_token=s3cretCCCC
    mirror: https://me:s3cret@1@sandbox.example:81/run
    headers: {Authorization: Bearer s3cretSSSS, Accept: text/plain}
    cookies: [s3cretTTTT]
    max_tokens: 7
  tools:
    - url: https://me:s3cretDDDD@tools.example/mcp?token=s3cretEEEE&page=2
      headers: {X-Team: s3cretFFFF, Content-Type: application/json, Accept: "*/*", X-Ref: "${FROM_ENV}"}
    - command: python -m server --api-key s3cretGGGG --password=s3cretHHHH --port 8080 --host tools.example
      args: [--token, s3cretIIII, --client-secret=s3cretJJJJ, -e, GITHUB_PAT=s3cretKKKK, --verbose, plain, -H,
             "Authorization: Bearer s3cretLLLL", "Bearer s3cretMMMM12345"]
      env: {GH_PAT: s3cretNNNN, HOME_GROWN: s3cretOOOO, MY_CREDENTIALS: s3cretPPPP, BASIC_AUTH: s3cretQQQQ,
            FROM: "${FROM_ENV}"}
"""


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_config_command_masks_secrets(form: list[str], tmp_path: Path) -> None:
    shown = CliRunner().invoke(app, ["config", str(write_config(tmp_path, LEAKY)), *form])
    assert isinstance(shown.exception, ConfigError)  # for the executor's options, after the settings were printed
    assert re.findall(r"s3cret\w*|1@sandbox", f"{shown.output} {shown.exception}") == []
    assert "fill them in before" in (shown.stderr if form else shown.stdout.splitlines()[0])
    settings = json.loads(shown.stdout) if form else yaml.safe_load(shown.stdout)["strands_rollout"]
    assert settings["executor"] == {
        "name": "sandbox_fusion",
        "url": "https://sandbox.example/run?lang=py&api_key=***&sig=***#access_token=***",
        "mirror": "https://***@sandbox.example:81/run",
        "headers": {"Authorization": "***", "Accept": "text/plain"},
        "cookies": "***",
        "max_tokens": 7,
    }
    assert settings["tools"][0]["url"] == "https://***@tools.example/mcp?token=***&page=2"
    headers = {"X-Team": "***", "Content-Type": "application/json", "Accept": "*/*", "X-Ref": "${FROM_ENV}"}
    assert settings["tools"][0]["headers"] == headers
    command = "python -m server --api-key *** --password=*** --port 8080 --host tools.example"
    assert settings["tools"][1]["command"] == command
    assert settings["tools"][1]["args"] == [
        "--token",
        "***",
        "--client-secret=***",
        "-e",
        "GITHUB_PAT=***",
        "--verbose",
        "plain",
        "-H",
        "Authorization: Bearer ***",
        "Bearer ***",
    ]
    assert settings["tools"][1]["env"].pop("FROM") == "${FROM_ENV}"
    assert set(settings["tools"][1]["env"].values()) == {"***"}


@pytest.mark.parametrize(
    "line",
    [
        "  tools: [{command: x, env: {GH_PAT: [s3cret]}}]",
        "  tools: [{url: 'http://x?api_key=s3cret', headers: [Authorization: Bearer s3cretAAAA1]}]",
        "  max_tool_iterations: https://me:s3cret@x",
    ],
)
def test_settings_error_hides_secrets(line: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refusal:
        read_config_file(write_config(tmp_path, f"strands_rollout:\n{line}\n"))
    assert "s3cret" not in str(refusal.value)


def test_find_secrets_finds_all_secret_values(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FROM_ENV", "s3cretRRRR")
    known = find_secrets(read_config_file(write_config(tmp_path, LEAKY)).model_dump(mode="json"))
    assert {f"s3cret{letter * 4}" for letter in "ABCDEFGHIJKNPQR"} <= known
    assert not {"application/json", "tools.example", "plain"} & known


def doubling_lines(line: str, count: int) -> str:
    """Return lines that each refer `count` times to the line before."""
    pairs = zip("abcdefgh", "bcdefghi", strict=True)
    return "a: &a {x: 1}\n" + "".join(
        line.format(name=name, aliases=", ".join([f"*{before}"] * count)) for before, name in pairs
    )


BOMBS = {
    "aliases": doubling_lines("{name}: &{name} [{aliases}]\n", 9),
    "merged keys": doubling_lines("{name}: &{name} {{<<: [{aliases}]}}\n", 20),
    "a list in itself": "strands_rollout: &a [*a]\n",
    "deep nesting": "strands_rollout: " + "[" * 1000,
    "a megabyte": "#" * 2_000_000,
}


@pytest.mark.parametrize("text", BOMBS.values(), ids=BOMBS.keys())
def test_read_config_file_refuses_yaml_bombs(text: str, tmp_path: Path) -> None:
    path = write_config(tmp_path, text)
    shown = CliRunner().invoke(app, ["config", str(path)])
    assert isinstance(shown.exception, ConfigError), shown.output
    with pytest.raises(ConfigError, match=r"rollout\.yaml"):
        read_eval_config(path, Sampling(1, 1), limit=None, on_note=print)


def test_read_config_file_refuses_a_pipe(tmp_path: Path) -> None:
    path = tmp_path / "rollout.yaml"
    os.mkfifo(path)
    with pytest.raises(ConfigError, match="expected a regular file"):
        read_config_file(path)


def test_tool_parser_defaults_to_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STRANDS_ROLLOUT_TOOL_PARSER", raising=False)
    assert RolloutSettings().tool_parser == "hermes"
    monkeypatch.setenv("STRANDS_ROLLOUT_TOOL_PARSER", "qwen3_coder")
    assert RolloutSettings().tool_parser == "qwen3_coder"
    assert RolloutSettings(tool_parser="auto").tool_parser == "auto"
