"""The parsers that are installed are asked, in a child process; what can't be imported is known from the record."""

from __future__ import annotations

from pathlib import Path

import pytest
from flag_checkout import FILES, MEGATRON, NEVER_IMPORTED, ROUTER, SGLANG, write_checkout

from strands_rollout.errors import ConfigError
from strands_rollout.flag_check.judgement import check_command
from strands_rollout.flag_check.real_parsers import find_slime, table_of

WHOLE = ["--rollout-batch-size", "4", "--num-rollout", "10"]


@pytest.fixture(autouse=True)
def nothing_else_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLIME_DIR", "MEGATRON_DIR", "PYTHONPATH"):
        monkeypatch.delenv(name, raising=False)


def test_all_four_are_asked_where_all_can_be_imported(tmp_path: Path) -> None:
    table = table_of(write_checkout(tmp_path, FILES, SGLANG, ROUTER, MEGATRON))

    assert [source.how for source in table.sources] == ["parser"] * 4
    assert [source.version for source in table.sources][2:] == ["9.9", "8.8"]
    assert {flag.names[0]: flag.system for flag in table.flags} == {
        "-h": "megatron",
        "--lr": "megatron",
        "--newest-of-megatron": "megatron",
        "--kind": "megatron",
        "--rollout-batch-size": "slime",
        "--num-rollout": "slime",
        "--newest-of-slime": "slime",
        "--debug-train-only": "slime",
        "--sglang-router-ip": "slime",
        "--sglang-newest-of-sglang": "sglang",
        "--router-newest": "router",
    }
    assert table.left_out == {"--sglang-tp-size"}
    assert table.abbreviating == {"sglang"}


@pytest.mark.parametrize("place", ["named", "environment", "beside"])
def test_megatron_is_found_by_its_folder_the_environment_or_beside_slime(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slime = write_checkout(tmp_path / "slime", FILES)
    megatron = write_checkout(tmp_path / ("Megatron-LM" if place == "beside" else "elsewhere"), MEGATRON)
    if place == "environment":
        monkeypatch.setenv("MEGATRON_DIR", str(megatron))

    table = table_of(slime, megatron if place == "named" else None)

    assert table.sources[1].how == "parser"
    assert table.find("--newest-of-megatron")


def test_the_rules_of_the_parsers_that_were_asked_hold(tmp_path: Path) -> None:
    table = table_of(write_checkout(tmp_path, FILES, SGLANG, ROUTER, MEGATRON))

    fine = ["--newest-of-megatron", "1", "2", "--router-newest", "a", "--router-newest", "b", "--kind", "flash"]
    assert check_command([*WHOLE, *fine], table=table).findings == ()
    for words in (
        ["--newest-of-slime", "c"],
        ["--newest-of-megatron", "x"],
        ["--kind", "Kind.flash"],
        ["--use-tis"],
        ["--sglang-tp-size", "2"],
    ):
        assert not check_command([*WHOLE, *words], table=table).ok


def test_what_cannot_be_imported_is_known_from_the_record_and_the_reason_is_told(tmp_path: Path) -> None:
    table = table_of(write_checkout(tmp_path, FILES, SGLANG))

    assert [source.how for source in table.sources] == ["parser", "record", "parser", "record"]
    assert "No module named 'megatron'" in table.sources[1].line()
    assert check_command([*WHOLE, "--newest-of-slime", "a", "--tensor-model-parallel-size", "2"], table=table).ok
    assert not check_command([*WHOLE, "--sglang-mem-fraction-static", "0.7"], table=table).ok
    assert [flag.system for flag in table.find("--lr")] == ["megatron"]


def test_parsers_that_take_too_long_are_known_from_the_record(tmp_path: Path) -> None:
    table = table_of(write_checkout(tmp_path, FILES, NEVER_IMPORTED), limit_s=0.5)

    assert {source.how for source in table.sources} == {"record"}
    assert "did not answer within 0.5 s" in table.sources[0].line()


def test_a_checkout_whose_arguments_cannot_be_executed_is_known_from_the_record(tmp_path: Path) -> None:
    checkout = write_checkout(tmp_path, FILES)
    (checkout / "slime/utils/arguments.py").write_text("raise RuntimeError('half written')")

    table = table_of(checkout)

    assert {source.how for source in table.sources} == {"record"}
    assert "half written" in table.sources[0].line()


def test_without_slime_all_is_known_from_the_record() -> None:
    assert {source.how for source in table_of(None).sources} == {"record"}


def test_slime_is_found_by_its_folder_then_by_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = write_checkout(tmp_path / "named", FILES)
    other = write_checkout(tmp_path / "other", FILES)
    monkeypatch.setenv("SLIME_DIR", str(other))

    assert find_slime(named) == named
    assert find_slime(None) == other


def test_an_importable_slime_is_found_and_the_other_package_of_that_name_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(write_checkout(tmp_path / "unrelated", {"slime/__init__.py": ""})))
    assert find_slime(None) is None

    monkeypatch.syspath_prepend(str(write_checkout(tmp_path / "real", {**FILES, "slime/__init__.py": ""})))
    assert find_slime(None) == tmp_path / "real"


def test_a_folder_without_slime_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected a checkout of THUDM/slime"):
        find_slime(tmp_path)
