"""Fixtures of the data_prep tests: the modules' path, a separate cache, and preparation in this process."""

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
from prep_support import DATA_PREP, Main, Prepare, Result, lines_of, write_parquet

sys.path.append(str(DATA_PREP))  # at the end, since a script has the name of the library reasoning_gym


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def own_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(cache))


@pytest.fixture
def prepare(tmp_path: Path) -> Prepare:
    """Return a function that prepares rows, a file or a folder into `out.jsonl`; options are fields of `Request`."""
    from preparation.prepare import prepare as prepare_request
    from preparation.request import Request

    def run(source: list[dict[str, Any]] | Path, *, force: bool = False, **settings: Any) -> Result:
        path = source if isinstance(source, Path) else write_parquet(source, tmp_path / "source.parquet")
        request = Request(dataset="someone/problems", path=path, out=tmp_path / "out.jsonl", **settings)
        prepared = prepare_request(request, force=force)
        rows, rejected = lines_of(request.out), lines_of(request.rejected_file)
        return Result(prepared.manifest, rows, rejected, prepared.done_before)

    return run


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Main:
    """Return a function that runs a script as `__main__` in this process, and returns exit code, stdout and stderr."""

    def run(script: str, *arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", [script, *arguments])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(DATA_PREP / script), run_name="__main__")
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    return run
