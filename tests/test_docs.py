"""The README and the pages of docs/ agree with the code: examples, tables, commands, links."""

import ast
import functools
import importlib
import inspect
import itertools
import json
import pkgutil
import re
import runpy
import shlex
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import strands
import yaml
from typer.main import get_command

from strands_rollout import SGLangModel, StopReason, Task, Trajectory
from strands_rollout.agent.loop import HAS_MIDDLEWARE
from strands_rollout.cli.commands import app
from strands_rollout.code_tool import LocalExecutor
from strands_rollout.code_tool.executors import EXECUTORS
from strands_rollout.diagnostics.doctor import LAYER_MEANINGS
from strands_rollout.evaluation.try_row import WrittenTurn
from strands_rollout.model.sampling import SGLangModelConfig
from strands_rollout.samples import Sample
from strands_rollout.settings import RolloutSettings, settings_from_args
from strands_rollout.slime_plugin.inputs import with_row_settings
from strands_rollout.slime_plugin.reward import reward_func

REPOSITORY = Path(__file__).parents[1]
FOLDERS = {path.name for path in REPOSITORY.iterdir() if path.is_dir()}
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
PAGES = sorted(f"docs/{path.name}" for path in (REPOSITORY / "docs").glob("*.md"))
TEXTS = {name: (REPOSITORY / name).read_text() for name in ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", *PAGES]}
USER_TEXTS = {name: text for name, text in TEXTS.items() if name == "README.md" or name in PAGES}
GENERATED = re.compile(r"<!-- generated: [\w-]+ -->.*?<!-- end of generated -->", re.DOTALL)
LAUNCH_SCRIPTS = [
    f"scripts/{name}.sh"
    for name in (
        "train",
        "strands_qwen3_8b",
        "strands_qwen3_4b",
        "strands_qwen3_8b_async",
        "slurm",
        "eval_aime",
        "prepare_model",
    )
]


def page(name: str) -> str:
    return TEXTS[f"docs/{name}.md"]


def code_blocks(language: str) -> list[Any]:
    """Return each code block of all documents as a test parameter, named by page and number."""
    return [
        pytest.param(block, id=f"{name}-{number}")
        for name, text in TEXTS.items()
        for number, block in enumerate(re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL))
    ]


def block_with(word: str, text: str) -> str:
    (block,) = (block for block in re.findall(r"```\w+\n(.*?)```", text, re.DOTALL) if word in block)
    return str(block)


def table_rows(text: str, title: str) -> list[list[str]]:
    """Return the cells of the table whose first heading is `title`."""
    lines = text.split(f"\n| {title} |", 1)[1].splitlines()[2:]
    rows = []
    for line in lines:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


# Every page


@functools.cache
def docs_tables() -> dict[str, Any]:
    return runpy.run_path(str(REPOSITORY / "scripts/docs_tables.py"))


@pytest.mark.parametrize(
    "name",
    [
        # the table in models.md comes from running check_template on the template of every family
        pytest.param(name, marks=pytest.mark.end_to_end if name == "docs/models.md" else ())
        for name in TEXTS
        if GENERATED.search(TEXTS[name])
    ],
)
def test_generated_tables_match_code(name: str) -> None:
    assert docs_tables()["update_tables"](TEXTS[name]) == TEXTS[name], "stale: run python scripts/docs_tables.py"


def test_generated_tables_are_each_on_one_page() -> None:
    placed = re.findall(r"<!-- generated: ([\w-]+) -->", "".join(TEXTS.values()))
    assert sorted(placed) == sorted(docs_tables()["TABLES"])


@pytest.mark.parametrize("name", TEXTS)
def test_links_and_anchors_resolve(name: str) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", TEXTS[name]):
        if target.startswith("http"):
            continue
        path, _, anchor = target.partition("#")
        file = (REPOSITORY / name).parent / path if path else REPOSITORY / name
        assert file.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}, target


def test_readme_links_every_page() -> None:
    assert set(PAGES) <= set(re.findall(r"\]\((docs/\w[\w-]*\.md)", TEXTS["README.md"]))


SOURCE = re.compile(r"(?<![\w/.<{$-])((?:[\w.-]+/)*[\w.-]+\.(?:py|sh|ya?ml|md|toml|jinja|js))(?![\w/])")
RUN_FOLDERS = {"data", "models", "checkpoints"}  # a run creates them in the repository
SLIMES_FILES = {"qwen3-4B.sh", "NAME.sh"}
USERS_FILES = {"my.yaml", "my_script.sh", "agents/tools.py", "./my_search.py", "agent.js", "env.toml"} | SLIMES_FILES


@pytest.mark.parametrize("name", [name for name in TEXTS if name != "CHANGELOG.md"])
def test_named_files_exist(name: str) -> None:
    """Paths may begin at the repository, the package or Strands, or be a file name alone."""
    roots = [REPOSITORY, REPOSITORY / "strands_rollout", Path(strands.__file__).parent]
    if not HAS_MIDDLEWARE:
        pytest.skip("this Strands lacks files that the newest has")
    missing = []
    for span in re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", TEXTS[name], flags=re.DOTALL)):
        for path in (path for word in span.split() for path in SOURCE.findall(word)):
            is_there = any((root / path).exists() for root in roots) or path in file_names()
            missing += [] if is_there or path in USERS_FILES else [path]
        is_ours = span.partition("/")[0] in FOLDERS - RUN_FOLDERS and re.fullmatch(r"[\w.]+/[\w./-]+", span)
        missing += [span] if is_ours and not (REPOSITORY / span).exists() else []
    assert missing == []


@functools.cache
def file_names() -> set[str]:
    """Return the names of all files in the repository's folders and in Strands."""
    folders = [REPOSITORY / name for name in FOLDERS - RUN_FOLDERS if not name.startswith(".")]
    return {path.name for folder in (*folders, Path(strands.__file__).parent) for path in folder.rglob("*.*")}


# "`name` (`path.py`)" and "`name`, `path.py`"
NAMED_CODE = re.findall(r"`([\w.]+)`(?: \(|,\s+)`(\w[\w/]*\.py)`", " ".join(TEXTS["docs/architecture.md"].split()))


@pytest.mark.parametrize(("name", "path"), sorted(set(NAMED_CODE)), ids=str)
def test_architecture_page_names_existing_code(name: str, path: str) -> None:
    tree = ast.parse((REPOSITORY / "strands_rollout" / path).read_text())
    *outer, last = name.split(".")
    for part in outer:
        [tree] = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == part]
    assert last in {getattr(node, "name", None) for node in tree.body}


@pytest.mark.parametrize("name", USER_TEXTS)
def test_dotted_paths_resolve(name: str) -> None:
    prose = re.sub(r"```.*?```", "", TEXTS[name], flags=re.DOTALL)
    for path in re.findall(r"[`(/ ](strands_rollout(?:\.\w+)+)", prose):
        if path != "strands_rollout.times":  # an attribute of traces
            for library in ("torchrl", "verifiers"):
                if library in path and find_spec(library) is None:
                    path = path.rpartition(".")[0].rpartition(".")[0]
            assert pkgutil.resolve_name(path) is not None
    for module, names in re.findall(r"`(strands_rollout\.\w+)` reads and writes \w+ \(([^)]*)\)", prose):
        assert all(pkgutil.resolve_name(f"{module}:{name}") for name in re.findall(r"[\w.]+", names))


# Examples


@pytest.mark.parametrize("block", code_blocks("python"))
def test_python_examples_import_existing_names(block: str) -> None:
    for optional in ("torchrl", "strands_evals", "strands_harness"):
        if optional in block and find_spec(optional) is None:
            pytest.skip(f"{optional} is not installed")
    tree = ast.parse(block)
    compile(tree, "example", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            module = importlib.import_module(node.module)
            assert all(hasattr(module, alias.name) for alias in node.names)
    known = {field.name for field in fields(Trajectory)}
    assert set(re.findall(r"^trajectory\.(\w+)", block, re.MULTILINE)) <= known


@pytest.mark.parametrize("block", code_blocks("yaml"))
def test_yaml_examples_are_valid_settings(block: str) -> None:
    given = yaml.safe_load(block)
    if isinstance(given, list):
        assert all(isinstance(turn, str) or WrittenTurn(**turn).calls for turn in given)
        return
    settings = settings_from_args(SimpleNamespace(**given))
    assert settings != RolloutSettings()
    if isinstance(settings.executor, dict):
        options = settings.executor.keys() - {"name"}
        assert options <= inspect.signature(LocalExecutor).parameters.keys()
    for path in re.findall(r"(?<=[ :])strands_rollout(?:\.\w+)+$", block, re.MULTILINE):
        if f"-m {path}" not in block and not ("verifiers" in path and find_spec("verifiers") is None):
            assert pkgutil.resolve_name(path) is not None


@pytest.mark.parametrize("block", code_blocks("json"))
def test_row_examples_are_valid_settings(block: str) -> None:
    settings = RolloutSettings.model_validate(
        yaml.safe_load((REPOSITORY / "configs/two_tools.yaml").read_text())["strands_rollout"]
    )
    chosen = with_row_settings(settings, json.loads(block))
    assert chosen != settings


async def test_environments_example_plays() -> None:
    names: dict[str, Any] = {}
    exec(block_with("class GuessingGame", page("environments")), names)
    game = names["GuessingGame"](Task(label="7", **dict.fromkeys(task_fields() - {"label"})))
    assert "1 to 100" in await game.prepare()
    assert await game.guess(number=5) == "Higher."
    assert await game.answer("Is it 5?") is not None
    assert await game.guess(number=7) == "Right!"
    assert await game.answer("It is 7.") is None
    assert await game.score() == {"score": 1.0, "acc": 1.0}


def task_fields() -> set[str]:
    return {field.name for field in fields(Task)}


async def test_code_execution_example_prints_its_result() -> None:
    async with LocalExecutor(memory_mb=1024) as executor:
        result = await executor.run("import sympy\nsympy.factorint(360)", timeout_s=60)
    assert repr(result.stdout).replace("'", '"') in block_with("memory_mb=1024", page("code-execution"))


def shell_commands() -> Iterator[list[str]]:
    """Yield each command of the examples and of the text, without its environment variables."""
    for text in (text for name, text in TEXTS.items() if name != "CHANGELOG.md"):
        lines = "\n".join(re.findall(r"```bash\n(.*?)```", text, re.DOTALL)).splitlines()
        lines += re.findall(r"`((?:bash|python|strands-rollout|[A-Z_]+=\S+ bash) [^`]*)`", text)
        for line in lines:
            for command in re.split(r"&&|\||; do |;", line):
                words = shlex.split(command, comments=True)
                while words and re.match(r"[A-Z_]+=", words[0]):
                    words.pop(0)
                if len(words) > 1 and words[0].endswith(("bash", "python", "strands-rollout")) and "$" not in words[1]:
                    yield words


@functools.cache
def settings_of(script: str) -> list[str]:
    """Return the settings of a launch script and of the files that it may source."""
    sources = [REPOSITORY / script, REPOSITORY / "scripts/train.sh", *(REPOSITORY / "scripts/launch").iterdir()]
    return [name for path in sources for name in re.findall(r"^ *setting ([A-Z_]+) ", path.read_text(), re.MULTILINE)]


def options_of(command: str) -> set[str]:
    """Return the options of a script, or of a command of `strands-rollout`."""
    if command == "scripts/demo.sh":
        command = "demo"
    if "/" not in command:
        return set(options_in(get_command(app).commands[command]).split())  # type: ignore[attr-defined]
    if command in ("data_prep/reasoning_gym.py", "data_prep/question_answering.py"):
        names = re.findall(r"^    (\w+): ", (REPOSITORY / command).read_text(), re.MULTILINE)
        return {"--set", "--json", *(f"--{name.replace('_', '-')}" for name in names)}
    if command.startswith("data_prep/"):  # all others have these options, most of them named like a parameter
        files = [REPOSITORY / "data_prep/preparation" / name for name in ("command_line.py", "request.py")]
        source = "\n".join(file.read_text() for file in files)
        names = re.findall(r"^    (\w+): ", source, re.MULTILINE)
    else:
        source, names = (REPOSITORY / command).read_text(), [*settings_of(command), "DRY_RUN"]
    return {*re.findall(r"--[\w-]+", source), *(f"--{name.lower().replace('_', '-')}" for name in names)}


def options_in(*commands: Any) -> str:
    parameters = [parameter for command in commands for parameter in command.params]
    return " ".join(name for parameter in parameters for name in (*parameter.opts, *parameter.secondary_opts))


def test_commands_exist_with_their_options() -> None:
    seen = set()
    for program, command, *rest in shell_commands():
        if program == "python" and command == "-m":
            assert find_spec(rest[0]) is not None, rest
            if rest[0] in FOLDERS:  # options may be before or after the command
                group: Any = get_command(importlib.import_module(f"{rest[0]}.__main__").app)
                known = options_in(group, *(group.commands[word] for word in rest[1:] if word in group.commands))
                assert {word for word in rest if word.startswith("--")} <= {*known.split(), "--help"}, rest
            continue
        if command.startswith("-"):
            assert (program, command) in {("python", "-c"), ("python", "-I"), ("bash", "--help")}
            continue
        if command == "run_slime.sh":  # in the project that `init` writes
            command = f"strands_rollout/data/project/{command}"
        own = itertools.takewhile(lambda word: word != "--", rest)  # the rest are arguments of slime
        options = {re.sub("=.*", "", word) for word in own if word.startswith("--")} - {"--help"}
        if command in LAUNCH_SCRIPTS:
            options.discard("--dry-run")
        seen.add(command)
        if program == "strands-rollout":
            assert command in get_command(app).commands, command  # type: ignore[attr-defined]
        else:
            assert (REPOSITORY / command).is_file(), command
        assert options <= (options and options_of(command)), (command, rest)
    assert {"scripts/demo.sh", "scripts/test.sh", "scripts/strands_qwen3_8b.sh", "eval", "doctor"} <= seen


# Start


@pytest.mark.parametrize("name", ["README.md", "docs/index.md"])
def test_supported_versions_match_pyproject(name: str) -> None:
    strands = next(name for name in PROJECT["dependencies"] if name.startswith("strands-agents"))
    lowest, below = re.fullmatch(r"strands-agents>=([\d.]+),<(\d+)", strands).groups()  # type: ignore[union-attr]
    assert f"strands-agents {lowest} or newer, below {below}" in TEXTS[name]
    pythons = [name.rpartition(" ")[2] for name in PROJECT["classifiers"] if "Python :: 3." in name]
    assert f"Python {pythons[0]} to {pythons[-1]}" in TEXTS[name]


def test_changelog_begins_with_this_version() -> None:
    first = re.search(r"^## (\S+)", TEXTS["CHANGELOG.md"], re.MULTILINE)
    assert first is not None
    assert first[1] == PROJECT["version"] == importlib.import_module("strands_rollout").__version__


def flags(text: str, word: str) -> dict[str, str]:
    """Return slime's flags in the code block that contains `word`."""
    words = block_with(word, text).split()
    return dict(zip(words[::2], words[1::2], strict=True))


def test_readme_and_index_give_slime_the_same_flags() -> None:
    readme, overview = (
        flags(TEXTS[name], "--custom-generate-function-path") for name in ("README.md", "docs/index.md")
    )
    assert {**readme, "--custom-config-path": "rollout.yaml"} == overview
    script = (REPOSITORY / "strands_rollout/data/project/run_slime.sh").read_text()
    assert all(f"{flag} {value}\n" in script for flag, value in readme.items())


def test_extras_are_all_listed() -> None:
    listed = [extra for row in table_rows(page("index"), "extra") for extra in re.findall(r"`([\w-]+)`", row[0])]
    assert sorted(listed) == sorted(PROJECT["optional-dependencies"])


def test_extras_named_in_docs_exist() -> None:
    texts = "".join(USER_TEXTS.values())
    named = re.findall(r"(?:strands-rollout|'\.)\[([\w,-]+)\]", texts)
    assert len(named) >= 20
    assert set(",".join(named).split(",")) <= PROJECT["optional-dependencies"].keys()


# Training and data


def test_launch_scripts_are_all_listed() -> None:
    assert [row[0].strip("`") for row in table_rows(page("training"), "script")] == LAUNCH_SCRIPTS
    files = {row[0].strip("`") for row in table_rows(page("training"), "file in `scripts/launch/`")}
    assert files == {path.name for path in (REPOSITORY / "scripts/launch").iterdir()}
    prepared = {path.name for path in (REPOSITORY / "data_prep").glob("*.py")} - {"contamination.py"}
    assert prepared == set(re.findall(r"data_prep/(\w+\.py)", page("evaluation")))


def test_configurations_are_all_listed() -> None:
    listed = [row[0].strip("`") for row in table_rows(page("agents"), "file in `configs/`")]
    assert sorted(listed) == sorted(path.name for path in (REPOSITORY / "configs").iterdir())


def test_launch_settings_named_in_docs_exist() -> None:
    text = page("training") + page("training-models") + page("evaluation") + page("troubleshooting")
    named = set(re.findall(r"`(?:export )?([A-Z][A-Z_]+[A-Z])(?:=[^`]*)?`", text))
    known = {name for script in LAUNCH_SCRIPTS for name in settings_of(script)}
    elsewhere = {"PYTHONPATH", "WANDB_API_KEY", "WANDB_KEY", "WANDB_MODE", "HF_ENDPOINT", "HF_HUB_OFFLINE", "HF_TOKEN"}
    of_the_job = {f"{name}_SOCKET_IFNAME" for name in ("GLOO", "TP", "NCCL")} | {"NO_PROXY", "NVSHMEM_DISABLE_NCCL"}
    of_the_job |= {"STRANDS_ROLLOUT_TOOL_PARSER", "SLIME_HOST_IP"}
    assert named - known <= elsewhere | of_the_job | {"STRANDS_ROLLOUT_VENV", "NLTK_DATA"}
    assert {"MAX_RESPONSE_LEN", "RAY_ADDRESS", "DYNAMIC_SAMPLING"} <= named


def test_settings_by_task_lists_every_setting_once() -> None:
    listed = re.findall(r"`(\w+)`", "".join(row[1] for row in table_rows(page("settings"), "task")))
    assert sorted(listed) == sorted(RolloutSettings.model_fields)


def test_slime_arguments_that_are_read_are_all_listed() -> None:
    sources = "".join(path.read_text() for path in (REPOSITORY / "strands_rollout").rglob("*.py"))
    read = set(re.findall(r'getattr\(args, "(\w+)"', sources)) - {"strands_rollout", "reward_key"}
    listed = set(re.findall(r"`(\w+)`", page("settings").partition("## Arguments of slime that this package reads")[2]))
    listed -= {"normalize_rewards", "model_name"}
    assert read <= listed
    assert all(name in sources for name in listed)


# Tests


def test_support_modules_are_all_listed() -> None:
    folder = REPOSITORY / "tests/support"
    listed = re.findall(r"`(\w+\.py)`", (folder / "README.md").read_text().partition("## Stand-ins")[2])
    assert {path.name for path in folder.glob("*.py")} - {"test_fake_sglang.py"} <= {*listed}


# Code execution


def test_executors_table_has_every_name_and_option() -> None:
    rows = {row[0].strip("`"): row[2] for row in table_rows(page("code-execution"), "executor")}
    assert list(rows)[:-1] == list(EXECUTORS)
    for name, path in EXECUTORS.items():
        options = inspect.signature(pkgutil.resolve_name(path)).parameters.keys() - {"timeout_s", "disabled_layers"}
        assert options == set(re.findall(r"`(\w+)`", rows[name])), name


def test_sandbox_layers_table_matches_code() -> None:
    assert [row[0].strip("`") for row in table_rows(page("code-execution"), "layer")] == list(LAYER_MEANINGS)


# Episodes and rewards


def test_episodes_page_explains_every_status() -> None:
    statuses = {status.name for status in Sample.Status} - {"PENDING"}
    assert {row[0] for row in table_rows(page("episodes"), "sample")} == statuses


def test_episodes_page_has_the_order_of_limits() -> None:
    documented = re.sub(r"\s+", " ", inspect.getdoc(StopReason) or "")
    order = re.search(r"Limits are checked in this order: .*? The first limit reached ends the episode\.", documented)
    assert order is not None
    assert order[0] in re.sub(r"\s+", " ", page("episodes"))


async def test_rewards_page_names_the_keys_of_reward_func() -> None:
    shown = re.search(r"returns `\{(.*?)\}` for each sample", page("rewards"))
    reward = await reward_func(SimpleNamespace(), Sample(response="\\boxed{4}", label="4"))
    assert shown is not None
    assert isinstance(reward, dict)
    assert shown[1].split(", ") == list(reward)
    for name in ("README.md", "docs/index.md"):
        given = flags(TEXTS[name], "--custom-generate-function-path")
        assert {given["--reward-key"], given["--eval-reward-key"]} <= set(reward)


async def test_rewards_example_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "reward.py").write_text(block_with("def score(response", page("rewards")))
    monkeypatch.syspath_prepend(tmp_path)
    args = SimpleNamespace(**yaml.safe_load(block_with("reward: reward.score", page("rewards"))))
    reward = await reward_func(args, Sample(response="It is 4", label="4"))
    del sys.modules["reward"]  # another test may have a module of this name
    assert isinstance(reward, dict)
    assert (reward["score"], reward["acc"], reward["parts/brevity"], reward["error"]) == (1.0, 1.0, 0.25, "")


async def test_rewards_example_reads_facts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "reward_of_calls.py").write_text(block_with("def few_calls(sample", page("rewards")))
    monkeypatch.syspath_prepend(tmp_path)
    part = yaml.safe_load(block_with("few_calls:", page("rewards")))["strands_rollout"]["reward"]["parts"]["few_calls"]
    settings = {"reward": {"parts": {"few_calls": part | {"function": "reward_of_calls.few_calls"}}}}
    sample = Sample(response="It is 4", label="4", metadata={"strands_rollout": {"tool_calls": 3}})
    reward = await reward_func(SimpleNamespace(strands_rollout=settings), sample)
    assert isinstance(reward, dict)
    assert (reward["parts/few_calls"], reward["score"]) == (-3, pytest.approx(-0.15))


def test_token_exactness_rules_each_have_a_test() -> None:
    rules = re.findall(r"^(\d+)\. ", page("token-exactness"), re.MULTILINE)
    assert rules == [str(number) for number in range(1, 16)]
    tests = next((REPOSITORY / "tests").rglob("test_token_exactness.py")).read_text()
    assert all(f"def test_rule_{int(number):02d}_" in tests for number in rules)


# Metrics


@pytest.mark.parametrize(
    ("name", "flag", "parameters"),
    [
        ("README.md", "--custom-generate-function-path", ["args", "sample", "sampling_params", "evaluation"]),
        ("README.md", "--custom-rm-path", ["args", "sample", "kwargs"]),
        ("docs/rewards.md", "--custom-reward-post-process-path", ["args", "samples"]),
        ("docs/rewards.md", "--dynamic-sampling-filter-path", ["args", "samples"]),
        ("docs/metrics.md", "--custom-rollout-log-function-path",
         ["rollout_id", "args", "samples", "rollout_extra_metrics", "rollout_time"]),
        ("docs/metrics.md", "--custom-eval-rollout-log-function-path",
         ["rollout_id", "args", "data", "extra_metrics"]),
    ],
)  # fmt: skip
def test_functions_named_in_docs_have_slimes_signature(name: str, flag: str, parameters: list[str]) -> None:
    function = pkgutil.resolve_name(flags(TEXTS[name], flag)[flag])
    assert list(inspect.signature(function).parameters)[: len(parameters)] == parameters


# The model alone, and the engine


def test_sglang_model_page_names_every_argument() -> None:
    own = [name for name in inspect.signature(SGLangModel.__init__).parameters if name not in ("self", "model_config")]
    for name in (*own, *SGLangModelConfig.__annotations__):
        assert re.search(rf"`[^`]*\b{name}\b[^`]*`", page("sglang-model")), name


def test_engine_page_lists_served_endpoints() -> None:
    from strands_rollout.engine.http_server import engine_app

    engine: Any = None  # the routes don't use it
    served = {resource.canonical for resource in engine_app(engine).router.resources()}
    text = page("engine").partition("## The embedded engine")[2].partition("\n## ")[0]
    listed = set(re.findall(r"`(/[\w/]+)`", text))
    assert len(listed) >= 10
    assert listed <= served
