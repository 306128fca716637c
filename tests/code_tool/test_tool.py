"""The code tool: results for the agent and the model; loading tools by dotted path."""

import sys
from pathlib import Path

import pytest

from strands_rollout.agent.tool_loading import load_tools
from strands_rollout.code_tool import CodeExecutor, ExecutionResult, ExecutorFacts, SubprocessExecutor
from strands_rollout.code_tool.tool import CODE_LIBRARIES, CODE_MEMORY_MB, code_tool, execute_python_code, format_result
from strands_rollout.errors import SandboxError, ToolError


class ScriptedExecutor(CodeExecutor):
    facts = ExecutorFacts(CODE_LIBRARIES, CODE_MEMORY_MB, isolated=True)

    def __init__(self, result: ExecutionResult) -> None:
        self.result = result
        self.calls: list[tuple[str, float | None]] = []

    async def run(self, code: str, *, timeout_s: float | None = None, session: str | None = None) -> ExecutionResult:
        self.calls.append((code, timeout_s))
        return self.result

    async def aclose(self) -> None: ...


async def test_code_tool_raises_executor_fault() -> None:
    with pytest.raises(SandboxError, match="disk full"):
        await code_tool(ScriptedExecutor(ExecutionResult("", "", None, infra_error="disk full")))(code="1")


async def test_code_tool_passes_timeout_s() -> None:
    executor = ScriptedExecutor(ExecutionResult("", "", 0))
    assert await code_tool(executor, timeout_s=7)(code="x") == "(no output)"
    assert executor.calls == [("x", 7)]


async def test_execute_python_code_runs_code() -> None:
    assert await execute_python_code(code="print(1)\n2") == "1\n2"
    assert "ZeroDivisionError" in await execute_python_code(code="1/0")


async def test_code_tool_cuts_output_in_the_middle() -> None:
    async with SubprocessExecutor(max_output_chars=2000) as executor:
        shown = await code_tool(executor, max_output_chars=100)(code="print('a' * 5000 + 'b' * 5000)")
    assert shown == f"{'a' * 50}\n... [9900 characters dropped] ...\n{'b' * 50}"


@pytest.mark.parametrize(
    ("result", "shown"),
    [
        (ExecutionResult("1\n", "", 0), "1"),
        (ExecutionResult("", "", 0), "(no output)"),
        (ExecutionResult("  1\n", "w\n", 0), "  1\nw"),
        (ExecutionResult("", "Traceback\nE\n", 1), "Traceback\nE"),
        (ExecutionResult("1\n", "", 1), "1\nExit code: 1"),
        (
            ExecutionResult("1\n", "", -9, timed_out=True, killed_by="time limit of 5 s"),
            "1\nTimeoutError: the code was stopped at the time limit of 5 s.",
        ),
        (ExecutionResult("", "", -11, killed_by="SIGSEGV (crash)"), "The code was ended by: SIGSEGV (crash)."),
    ],
)
def test_format_result_orders_stdout_stderr_and_status(result: ExecutionResult, shown: str) -> None:
    assert format_result(result) == shown


@pytest.mark.parametrize("digits", ["9" * 4301, "9" * 20, "٣", "", "-5"])
def test_format_result_keeps_marker_printed_by_code(digits: str) -> None:
    forged = f"\n... [{digits} characters dropped] ...\n"
    shown = format_result(ExecutionResult("a" * 100 + forged + "b" * 100, "", 0), 60)
    assert shown == f"{'a' * 30}\n... [{140 + len(forged)} characters dropped] ...\n{'b' * 30}"


TOOL_MODULE = """
from strands import tool
@tool
def add(a: int, b: int) -> int:
    \"\"\"Add.\"\"\"
    return a + b
@tool
def subtract(a: int, b: int) -> int:
    \"\"\"Subtract.\"\"\"
    return a - b
def plain(a): return a
class Nest:
    tool = add
"""
SPEC_MODULE = """
TOOL_SPEC = {"name": "shout", "description": "Shout.", "inputSchema": {"json": {"type": "object", "properties": {}}}}
def shout(tool_use, **kwargs): return {"toolUseId": "x", "status": "success", "content": []}
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    folder = tmp_path / "shelf"
    folder.mkdir()
    sources = {
        "__init__": "",
        "sums": TOOL_MODULE,
        "shout": SPEC_MODULE,
        "broken": "1/0",
        "needy": "import nothing_like_it",
    }
    for name, source in sources.items():
        (folder / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "shelf"]:
        monkeypatch.delitem(sys.modules, name)
    return "shelf"


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["strands_rollout.tools.execute_python_code"], ["execute_python_code"]),
        (["strands_rollout.tools"], ["execute_python_code"]),
        (["shelf.sums"], ["add", "subtract"]),
        (["shelf.sums.subtract", "shelf.shout"], ["subtract", "shout"]),
        (["shelf.sums:Nest.tool"], ["add"]),
    ],
)
def test_load_tools_by_dotted_path(package: str, paths: list[str], names: list[str]) -> None:
    assert [found.tool_name for found in load_tools(paths)] == names


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("shelf.sums.ad", "'shelf.sums' has no attribute 'ad'; did you mean 'add'?"),
        ("shelf.sums.zzz", "sums.py defines Nest, add, plain, subtract"),
        ("shelf.sum.add", "'shelf' has no attribute 'sum'"),
        ("shelf.sums.plain", "is a function, expected a Strands tool; decorate it with @strands.tool"),
        ("shelf.broken.tool", "importing 'shelf.broken' raised ZeroDivisionError"),
        ("shelf.needy.tool", "importing 'shelf.needy' needs 'nothing_like_it'"),
        ("shelf.nowhere:tool", "there is no module 'shelf.nowhere'"),
        ("json", "is a module without Strands tools"),
        ("./tools", "is not a dotted path"),
    ],
)
def test_load_tools_rejects_path_without_tool(package: str, path: str, message: str) -> None:
    with pytest.raises(ToolError) as caught:
        load_tools([path])
    assert message in str(caught.value)
    assert repr(path) in str(caught.value)


def test_load_tools_rejects_duplicate_names(package: str) -> None:
    with pytest.raises(ToolError, match="more than one tool named add"):
        load_tools(["shelf.sums", "shelf.sums.add"])


def test_load_tools_rejects_single_string() -> None:
    with pytest.raises(ToolError, match=r"expected a list of dotted paths: \['strands_rollout.tools'\]"):
        load_tools("strands_rollout.tools")
