"""Download and conversion of a model, with fakes of the hub's command and of slime's converter."""

from pathlib import Path

import pytest
from launch_stage import Stage, make_stage

SCRIPT = "prepare_model.sh"


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return make_stage(tmp_path)


def converted(stage: Stage) -> Path:
    return stage.root / "models/Qwen3-8B_torch_dist/latest_checkpointed_iteration.txt"


def test_prepare_model_downloads_and_converts_once(stage: Stage) -> None:
    finished = stage.run(SCRIPT)
    assert finished.returncode == 0, finished.stderr
    assert converted(stage).exists()
    (download,) = stage.calls_of("hf", "download")
    assert download.words[:2] == ["download", "Qwen/Qwen3-8B"]
    (conversion,) = (call for call in stage.calls if "--save" in call.words)
    assert "--num-layers" in conversion.words
    assert not Path(f"{converted(stage).parent}.partial").exists()
    again = stage.run(SCRIPT)
    assert (again.returncode, "the model exists" in again.stderr) == (0, True)
    assert len(stage.calls_of("hf", "download")) == len([call for call in stage.calls if "--save" in call.words]) == 1


def test_prepare_model_continues_download(stage: Stage) -> None:
    finished = stage.run(SCRIPT, FAKE_CUT_DOWNLOAD="1")
    assert finished.returncode == 1
    assert "lacks weights after the download; run this script again" in finished.stderr
    assert (stage.run(SCRIPT).returncode, len(stage.calls_of("hf"))) == (0, 2)


def test_prepare_model_discards_failed_conversion(stage: Stage) -> None:
    finished = stage.run(SCRIPT, FAKE_CONVERSION_FAILS="9")
    assert finished.returncode == 1
    assert "slime's conversion failed" in finished.stderr
    assert not converted(stage).exists()
    (stage.root / "models/Qwen3-8B_torch_dist.partial").mkdir()
    assert stage.run(SCRIPT).returncode == 0
    assert converted(stage).exists()


def test_prepare_model_without_hub_explains_manual_copy(stage: Stage) -> None:
    finished = stage.run(SCRIPT, FAKE_HUB_FAILS="1")
    assert finished.returncode == 1
    assert "download the model elsewhere, put it into" in finished.stderr
    (stage.root.parent / "bin" / "hf").unlink()
    assert "install it: python3 -m pip install -U huggingface_hub" in stage.run(SCRIPT).stderr


def test_prepare_model_download_only_needs_no_slime(stage: Stage) -> None:
    finished = stage.run(SCRIPT, "--download-only", SLIME_DIR="")
    assert finished.returncode == 0
    assert "ready: " in finished.stdout
    assert stage.run(SCRIPT, SLIME_DIR="").returncode == 1


def test_prepare_model_checks_converter_before_download(stage: Stage) -> None:
    finished = stage.run(SCRIPT, "--model", "foo/Foo-14B")
    assert (finished.returncode, "/scripts/models/Foo-14B.sh; expected" in finished.stderr) == (1, True)
    assert not stage.calls_of("hf")


def test_prepare_model_passes_arguments_to_converter(stage: Stage) -> None:
    further = ["--", "--expert-model-parallel-size", "2"]
    assert stage.run(SCRIPT, *further).returncode == 0
    (conversion,) = (call for call in stage.calls if "--save" in call.words)
    assert conversion.words[-2:] == further[1:]
    for arguments in (further, ["--download-only", *further]):
        finished = stage.run(SCRIPT, *arguments)
        assert (finished.returncode, "expected none, because nothing is converted" in finished.stderr) == (2, True)
    assert "Arguments after -- go to slime's converter" in stage.run(SCRIPT, "--help").stdout
