"""User code by dotted path or file: how it is found, and the error messages when it is not usable."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import ANSWER, TOOL_CALL, run

from strands_rollout import Sample, user_code
from strands_rollout.agent import tool_loading
from strands_rollout.agent.tool_loading import load_function, load_hooks, load_tools
from strands_rollout.errors import ConfigError, NoModelError, ToolError
from strands_rollout.settings import RolloutSettings
from strands_rollout.slime_plugin.inputs import find_load_errors, with_row_settings
from strands_rollout.slime_plugin.slime_adapter import load_should_abort

TOOL = "\n@tool\ndef {}(question: str) -> str:\n    '''Ask.'''\n    return {}\n"
HEAD = "from strands import Agent, tool\n"
FILES = {
    "found tools.py": HEAD + TOOL.format("look_up", "'3'") + TOOL.format("order", "'ok'") + "class World: pass\n",
    "found_agent.py": HEAD
    + TOOL.format("look_up", "'3'")
    + "agent = Agent(tools=[look_up])\ndef build(model, task):\n    return Agent(model=model)\ndef alone(): pass\n"
    "def team(model, task):\n    return Agent(model=model, tools=[Agent(name='critic').as_tool()])\n"
    "def vendor(model, task):\n    return Agent(model=model, tools=[Agent(name='critic', model='an.id').as_tool()])\n",
    "found_hook.py": "from strands.hooks import HookProvider\nclass Hook(HookProvider):\n"
    "    def register_hooks(self, registry): pass\nasync def late(): pass\n",
    "found_asks.py": HEAD
    + "from strands.models import BedrockModel\ncritic = Agent(name='critic')\n"
    + "vendors = [Agent(model='an.id'), Agent(model=BedrockModel())]\nfirst, second = vendors\n"
    + TOOL.format("ask", "str(critic(question))")
    + TOOL.format("ask_vendor", "str(first(question)) + str(second(question))")
    + TOOL.format("ask_inside", "str(Agent(name='inner', callback_handler=None)(question))"),
    "found_syntax.py": "def f(:\n",
    "found_zero.py": "def f():\n    return 1/0\nf()\n",
    "found_exit.py": "import sys\nsys.exit(3)\n",
    "found_needy.py": "import found_nowhere\n",
    "found_circle.py": "from found_circle_2 import b\na = 1\n",
    "found_circle_2.py": "from found_circle import a\nb = 1\n",
    "code.py": HEAD + TOOL.format("look_up", "'3'"),
    "sub/found_tools.py": HEAD + "from found_beside import WORDS\n" + TOOL.format("other", "WORDS"),
    "sub/found_beside.py": "WORDS = 'beside'\n",
    "other/found_tools.py": HEAD + TOOL.format("another", "'4'"),
    "found_pack/__init__.py": "",
    "found_pack/inner.py": HEAD + "from . import part\n" + TOOL.format("packed", "part.X"),
    "found_pack/part.py": "X = 'x'\n",
}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield a user's folder (its name has a space) that holds the configuration; the working directory is elsewhere."""
    folder = tmp_path / "my project"
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "link.py").symlink_to(folder / "found tools.py")
    (folder / "dangling.py").symlink_to(folder / "nothing.py")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(user_code, "_folders", [])
    before = set(sys.modules)
    user_code.add_config_folder(folder / "rollout.yaml")
    yield folder
    for name in set(sys.modules) - before:
        if str(folder) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["./found tools.py"], ["look_up", "order"]),
        (["found tools.py:order", "./link.py:look_up"], ["order", "look_up"]),
        (["./sub/found_tools.py", "./other/found_tools.py"], ["other", "another"]),
        (["./found_pack/inner.py:packed"], ["packed"]),
        (["./code.py:look_up"], ["look_up"]),
        (["{}/code.py"], ["look_up"]),
        (["./found_asks.py:ask_vendor"], ["ask_vendor"]),
    ],
)
def test_load_tools_by_file(project: Path, paths: list[str], names: list[str]) -> None:
    paths = [path.format(project) for path in paths]
    assert [tool.tool_name for tool in load_tools(paths)] == names
    assert load_tools(paths) == load_tools(paths)


def test_resolve_loads_a_file_once_under_all_its_names(project: Path) -> None:
    assert user_code.resolve("./found_agent.py:build") is user_code.resolve("found_agent.build")
    assert user_code.resolve("./link.py:World") is user_code.resolve(f"{project}/found tools.py:World")


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("./found_tool.py", r"no file \S*/my project/found_tool.py or \S*/elsewhere/found_tool.py; did you mean"),
        ("./dangling.py", "there is no file"),
        ("./found tools.py:ordr", "has no attribute 'ordr'; did you mean 'order'"),
        ("./found tools.py:World", "is the class World, expected a Strands tool"),
        ("./found_hook.py", r"without Strands tools; \S*/my project/found_hook.py defines Hook, late; decorate"),
        ("./found_syntax.py:f", r"raised SyntaxError: invalid syntax \(found_syntax.py, line 1\)"),
        ("./found_zero.py:f", r"ZeroDivisionError: division by zero \(\S*/my project/found_zero.py, line 3\)"),
        ("./found_exit.py", r"importing './found_exit.py' raised SystemExit\(3\)"),
        ("found_needy.tool", "needs 'found_nowhere', and there is no such module"),
        ("./found_circle.py", "most likely due to a circular import"),
        ("found_agnt.tool", "no module 'found_agnt'; did you mean 'found_agent'"),
        ("zzz.tool", "no module 'zzz', installed or in"),
        ("found_pack.iner", "did you mean 'inner'"),
        ("./code.py::look_up", "is not a dotted path; expected 'package.module.name' or './file.py:name'"),
        ("zlib.look_up", r"'zlib' has no attribute 'look_up'; \S*zlib\S* defines adler32"),
        ("shutil.zzz", r"shutil.py defines \w+(, \w+){7} and \d+ more$"),
        (
            "found_agent.agent",
            "is a Agent, expected a Strands tool; build and ask the agent in a function with @strands.tool",
        ),
        ("found_asks.ask", "the agent 'critic' has no model, so Strands would call Amazon Bedrock"),
    ],
)
def test_load_tools_error_is_one_line_with_the_remedy(project: Path, path: str, words: str) -> None:
    with pytest.raises((ToolError, NoModelError), match=words) as caught:
        load_tools([path])
    assert "\n" not in str(caught.value)


class HooksWithAReason:
    def __init__(self) -> None:
        try:
            int("four")
        except ValueError as e:
            raise ToolError("the number of hooks is no number") from e


def test_load_hooks_error_keeps_the_reason_of_a_constructor() -> None:
    with pytest.raises(ToolError, match="raised ToolError: the number of hooks is no number"):
        load_hooks([f"{__name__}.HooksWithAReason"])


def test_load_hooks_error_names_the_exit_of_a_constructor() -> None:
    with pytest.raises(ToolError, match=r"^'user_exits.BrokenConstructor' raised SystemExit: 2; expected a class"):
        load_hooks(["user_exits.BrokenConstructor"])


async def test_find_load_errors_names_each_bad_setting(project: Path) -> None:
    given = {
        "agent_factory": "./found_agent.py:agent",
        "hooks": ["./found_hook.py"],
        "executor": "./found_agent.py:buil",
    }
    given |= {"environment": "found_agent.alone", "should_abort": "./found_agent.py:aloen"}
    said = {name: str(fault) for name, fault in await find_load_errors(RolloutSettings.model_validate(given))}
    assert said.keys() == given.keys()
    assert "def build(model, task):\n          return Agent(model=model, system_prompt=task" in said["agent_factory"]
    assert said["agent_factory"].endswith(
        "tools=[look_up])\n      # and in the configuration: agent_factory: ./found_agent.py:build"
    )
    assert "is a module; expected a class or function that makes a hook provider" in said["hooks"]
    assert "can't load the executor './found_agent.py:buil'" in said["executor"]
    assert "can't be called with (task): too many positional arguments" in said["environment"]
    assert "did you mean 'alone'?" in said["should_abort"]
    for load in (load_function, load_should_abort, lambda path: load_hooks(["./found_hook.py:Hook"]) and path):
        assert load("./found_agent.py:alone")


@pytest.mark.parametrize(
    ("settings", "turns", "agent"),
    [
        ({"agent_factory": "found_agent.team", "tools": []}, [], "critic"),
        (
            {"tools": ["./found_asks.py:ask_inside"]},
            [TOOL_CALL.format(name="ask_inside", arguments='{"question": "?"}')],
            "inner",
        ),
    ],
)
async def test_agent_without_a_model_is_a_setup_error(
    shipped_tokenizer: Any, project: Path, settings: dict[str, Any], turns: list[str], agent: str
) -> None:
    played = await run(shipped_tokenizer, turns, settings=settings)
    assert (played.sample.status, played.facts["stop_reason"]) == (Sample.Status.FAILED, "setup_error")
    assert f"the agent {agent!r}" in played.facts["error"]
    assert not any(played.sample.loss_mask)


async def test_agent_with_another_vendors_model_plays(shipped_tokenizer: Any, project: Path) -> None:
    played = await run(shipped_tokenizer, [ANSWER], settings={"agent_factory": "found_agent.vendor", "tools": []})
    assert played.sample.status is Sample.Status.COMPLETED


async def test_config_folder_is_searched_before_a_rows_tools(
    shipped_tokenizer: Any, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder != str(project)])
    sample = Sample(prompt="?", label="34", index=0, metadata={"tools": [{"name": "look_up"}]})
    args = {"custom_config_path": str(project / "rollout.yaml")}
    settings = {"tools": ["found_agent.look_up"]}
    played = await run(shipped_tokenizer, [ANSWER], settings=settings, sample=sample, args=args)
    assert played.sample.status is Sample.Status.COMPLETED


def test_with_row_settings_refuses_files_outside_row_tools(project: Path) -> None:
    settings = RolloutSettings(tools=["./code.py:look_up"], row_tools=["./link.py"])
    row = {"strands_rollout_settings": {"tools": ["./link.py"]}}
    assert with_row_settings(settings, row).tools == ("./link.py",)
    with pytest.raises(ConfigError, match="got the tools .* expected some of"):
        with_row_settings(settings, {"strands_rollout_settings": {"tools": ["./found_exit.py"]}})


@pytest.mark.parametrize(("path", "asks"), [("strands_tools.python_repl", True), ("strands_tools.calculator", False)])
def test_load_tools_warns_of_tools_that_ask_for_consent(monkeypatch, caplog, path, asks) -> None:
    pytest.importorskip(path)
    monkeypatch.delenv("BYPASS_TOOL_CONSENT", raising=False)
    tool_loading._warn_of_consent.cache_clear()
    load_tools([path])
    load_tools([path])
    assert caplog.text.count("set BYPASS_TOOL_CONSENT=true") == asks
    monkeypatch.setenv("BYPASS_TOOL_CONSENT", "true")
    tool_loading._warn_of_consent.cache_clear()
    load_tools([path])
    assert caplog.text.count("BYPASS_TOOL_CONSENT") == asks
