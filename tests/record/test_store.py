"""`RecordStore`: records that remain when a process is killed, who takes them over, and damaged or large files."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from full_disk import limit_file_size

from strands_rollout.record import store as store_module
from strands_rollout.record.store import RecordStore, take_leftover_records

WRITER = """
import os, signal, sys
from pathlib import Path
from strands_rollout.record.store import RecordStore
store = RecordStore(Path(sys.argv[1]))
for number in map(int, sys.argv[2:]):
    episode = store.open(f"{number}")
    for step in range(3):
        episode.write(b"%d of %d" % (step, number))
os.kill(os.getpid(), signal.SIGKILL)
"""
READER = """
import sys, time
from pathlib import Path
from strands_rollout.record.store import RecordStore
sys.stdin.readline()
store = RecordStore(Path(sys.argv[1]))
print([number for number in range(int(sys.argv[2])) if store.open(f"{number}").records], flush=True)
sys.stdin.readline()
"""


def left_if_killed(folder: Path, copy: Path) -> dict[str, list[bytes]]:
    """Copy `folder` to `copy`, where no file is locked, and return the records that another process would find."""
    shutil.copytree(folder, copy)
    return take_leftover_records(copy)


def written_file(folder: Path) -> Path:
    """Return the only file of a folder."""
    [path] = folder.iterdir()
    return path


def dead_file(folder: Path, tmp_path: Path, **records: list[bytes]) -> Path:
    """Write a file with these records to a folder, as a dead process leaves it, and return its path."""
    store = RecordStore(tmp_path / "living")
    for name, own in records.items():
        episode = store.open(name)
        for record in own:
            episode.write(record)
    shutil.copytree(tmp_path / "living", folder)
    shutil.rmtree(tmp_path / "living")
    return written_file(folder)


def test_record_store_keeps_records_of_a_killed_process(tmp_path: Path) -> None:
    store = RecordStore(tmp_path / "journal")
    first, second = store.open("1"), store.open("2")
    with pytest.raises(OSError, match="is running already"):
        store.open("1")
    for number in range(3):
        first.write(b"a%d" % number)
        second.write(b"b%d" % number)
    second.begin()  # a new attempt, whose first record replaces all earlier ones
    second.write(b"c")
    store.open("3").write(b"x")
    first.close(keep=False)
    second.close(keep=True)
    assert left_if_killed(tmp_path / "journal", tmp_path / "copy") == {"2": [b"c"], "3": [b"x"]}


def test_record_store_replaces_records_of_a_kept_episode(tmp_path: Path) -> None:
    store = RecordStore(tmp_path / "journal")
    for record in (b"a", b"b"):
        episode = store.open("1")
        assert episode.records == ()  # the state is on its sample instead
        episode.write(record)
        episode.close(keep=True)
    assert left_if_killed(tmp_path / "journal", tmp_path / "copy") == {"1": [b"b"]}


def test_record_store_end_others_spares_running_episodes(tmp_path: Path) -> None:
    store = RecordStore(tmp_path / "journal")
    episodes = {name: store.open(name) for name in ("3-a", "3-b", "3-c", "33-a")}
    for name, episode in episodes.items():
        episode.write(name.encode())
        if name != "3-c":
            episode.close(keep=True)
    store.end_others("3-", "3-b")
    assert sorted(left_if_killed(tmp_path / "journal", tmp_path / "copy")) == ["3-b", "3-c", "33-a"]


def test_record_store_gives_leftover_records_to_one_process(tmp_path: Path) -> None:
    folder = tmp_path / "journal"
    living = RecordStore(folder)
    living.open("0").write(b"another run's")
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, folder, *map(str, range(first, 20, 4))]) for first in range(4)
    ]
    assert [writer.wait(60) for writer in writers] == [-signal.SIGKILL] * 4
    readers = [
        subprocess.Popen(
            [sys.executable, "-c", READER, folder, "20"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    for reader in readers:  # both start at once, and live until each has its records
        reader.stdin.write("\n")
        reader.stdin.flush()
    found = [eval(reader.stdout.readline()) for reader in readers]
    assert sorted(found[0] + found[1]) == list(range(20))
    for reader in readers:
        reader.communicate("\n", timeout=60)
    # neither has continued an episode, so a third process gets all records
    third = RecordStore(folder)
    assert [third.open(f"{number}").records for number in range(20)] == [
        [b"%d of %d" % (step, number) for step in range(3)] for number in range(20)
    ]


def test_record_store_leaves_files_of_living_processes(tmp_path: Path) -> None:
    first, second = RecordStore(tmp_path), RecordStore(tmp_path)
    first.open("1").write(b"a")
    second.open("2").write(b"b")
    assert RecordStore(tmp_path).open("1").records == ()
    assert len([*tmp_path.iterdir()]) == 2


def test_record_store_appends_to_files_it_took_over(tmp_path: Path) -> None:
    dead_file(tmp_path / "journal", tmp_path, first=[b"a", b"b"], second=[b"c"], third=[b"d"])
    store = RecordStore(tmp_path / "journal")
    first, second = store.open("first"), store.open("second")
    assert (first.records, second.records) == ([b"a", b"b"], [b"c"])
    first.begin()
    first.write(b"a and b")
    second.close(keep=False)
    store.open("new").write(b"e")
    found = left_if_killed(tmp_path / "journal", tmp_path / "copy")
    assert found == {"first": [b"a and b"], "third": [b"d"], "new": [b"e"]}
    assert written_file(tmp_path / "journal")


def test_record_store_prefers_the_newer_records_of_an_episode(tmp_path: Path) -> None:
    folder = tmp_path / "journal"
    older = dead_file(folder, tmp_path, same=[b"a"], other=[b"b"])
    newer = shutil.move(dead_file(tmp_path / "second", tmp_path, same=[b"c"]), folder)
    os.utime(older, (1, 1))
    os.utime(newer, (2, 2))
    store = RecordStore(folder)
    episode = store.open("same")
    assert episode.records == [b"c"]
    episode.close(keep=False)
    assert left_if_killed(folder, tmp_path / "copy") == {"other": [b"b"]}


def test_record_store_reads_whole_records_of_a_cut_file(tmp_path: Path) -> None:
    whole = dead_file(tmp_path / "dead", tmp_path, first=[b"a" * 30, b"b" * 30]).read_bytes()
    seen = []
    for cut in range(len(whole) + 1):
        folder = tmp_path / f"cut at {cut}"
        folder.mkdir()
        (folder / "1.records").write_bytes(whole[:cut])
        store = RecordStore(folder)
        episode = store.open("first")
        seen.append(len(episode.records))
        store.open("second").write(b"c")
        expected = {"first": [*episode.records]} if episode.records else {}
        assert left_if_killed(folder, tmp_path / f"copy of {cut}") == expected | {"second": [b"c"]}
    assert (seen[0], seen[-2:], seen) == (0, [1, 2], sorted(seen))


def test_record_store_reads_records_before_damage(tmp_path: Path) -> None:
    path = dead_file(tmp_path / "journal", tmp_path, first=[b"a" * 30], second=[b"b" * 30], third=[b"c" * 30])
    content = bytearray(path.read_bytes())
    content[content.index(b"b" * 30) + 3] ^= 1
    path.write_bytes(content)
    store = RecordStore(tmp_path / "journal")
    episodes = [store.open(name) for name in ("first", "second", "third")]
    assert [episode.records for episode in episodes] == [[b"a" * 30], (), ()]
    episodes[1].write(b"d" * 30)  # replaces the damaged record; the records after it are lost
    assert left_if_killed(tmp_path / "journal", tmp_path / "copy") == {"first": [b"a" * 30], "second": [b"d" * 30]}


@pytest.mark.parametrize("content", [b"\x01" * 8 + b"\0" * 4096, b"strands-rollout records 2\n"], ids=["old", "new"])
def test_record_store_names_a_file_of_another_version(tmp_path: Path, caplog, content: bytes) -> None:
    path = tmp_path / "1-0a.records"
    path.write_bytes(content)
    store = RecordStore(tmp_path)
    store.open("1").write(b"a")
    assert "another version" in caplog.text
    assert str(path) in caplog.text
    assert path.read_bytes() == content


def test_record_store_removes_an_empty_file(tmp_path: Path) -> None:
    dead_file(tmp_path / "journal", tmp_path, first=[b"a"])
    (tmp_path / "journal" / "empty.records").touch()  # its process was killed while it created the file
    assert RecordStore(tmp_path / "journal").open("first").records == [b"a"]
    assert not (tmp_path / "journal" / "empty.records").exists()


def test_record_store_recreates_a_file_removed_before_its_lock(tmp_path: Path, monkeypatch) -> None:
    made: list[str] = []

    def open_and_remove(path: Path, *given: int) -> int:
        descriptor = os_open(path, *given)
        made.append(path.name)
        if len(made) == 1:
            RecordStore(path.parent)
            assert not path.exists()
        return descriptor

    os_open = os.open
    monkeypatch.setattr(store_module.os, "open", open_and_remove)
    store = RecordStore(tmp_path / "journal")
    store.open("1").write(b"a")
    monkeypatch.undo()
    assert written_file(tmp_path / "journal").name == made[-1] != made[0]
    assert left_if_killed(tmp_path / "journal", tmp_path / "copy") == {"1": [b"a"]}


def test_record_store_empties_files_of_ended_episodes(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(store_module, "MAX_FILE_BYTES", 4096)
    folder, store, slow = tmp_path / "journal", RecordStore(tmp_path / "journal"), None
    for number in range(200):
        episode = store.open(str(number))
        for _ in range(3):
            episode.write(bytes([65 + number % 26]) * 300)
        if number == 7:
            slow = episode
        else:
            episode.close(keep=False)
    assert sum(path.stat().st_size for path in folder.iterdir()) < 3 * 4096
    assert left_if_killed(folder, tmp_path / "copy") == {"7": [b"H" * 300] * 3}
    slow.close(keep=False)
    assert left_if_killed(folder, tmp_path / "second copy") == {}
    assert written_file(folder).stat().st_size < 100


def test_record_store_with_ten_thousand_episodes(tmp_path: Path) -> None:
    folder, store = tmp_path / "journal", RecordStore(tmp_path / "journal")
    episodes = [store.open(str(number)) for number in range(10_000)]
    for step in range(2):
        for episode in episodes:
            episode.write(b"%d" % step * 200)
    found = left_if_killed(folder, tmp_path / "copy")
    assert (len(found), found["9999"]) == (10_000, [b"0" * 200, b"1" * 200])
    for episode in episodes:
        episode.close(keep=False)
    assert written_file(folder).stat().st_size < 100


def test_record_store_ends_idle_episodes_above_its_size_limit(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(store_module, "MAX_FILE_BYTES", 4096)
    monkeypatch.setattr(store_module, "MAX_BYTES", 4 * 4096)
    folder, store = tmp_path / "journal", RecordStore(tmp_path / "journal")
    running = store.open("runs")
    running.write(b"r")
    for number in range(300):
        episode = store.open(str(number))
        episode.write(b"k" * 300)
        episode.close(keep=True)
    found = left_if_killed(folder, tmp_path / "copy")
    assert len([*folder.iterdir()]) <= 5
    assert found["runs"] == [b"r"]
    assert "299" in found
    assert 30 < len(found) < 100


def test_record_store_on_a_full_disk(tmp_path: Path, caplog) -> None:
    folder, store = tmp_path / "journal", RecordStore(tmp_path / "journal")
    small, large, late = store.open("small"), store.open("large"), store.open("late")
    small.write(b"s")
    large.write(b"l")
    with limit_file_size(4096):
        large.write(b"l" * 5000)
        late.write(b"t" * 5000)
    assert written_file(folder).stat().st_size < 200  # the part that fit was removed again
    large.write(b"never written")
    small.write(b"s again")
    assert len([record for record in caplog.records if "can't be continued" in record.message]) == 1
    # an incomplete journal is not continued, because finished steps would be repeated
    assert left_if_killed(folder, tmp_path / "copy") == {"small": [b"s", b"s again"]}
    for episode in (small, large, late):
        episode.close(keep=False)
    store.open("large").write(b"there is room")
    assert left_if_killed(folder, tmp_path / "second copy") == {"large": [b"there is room"]}


def test_record_store_without_a_folder_or_room_for_a_file(tmp_path: Path, caplog) -> None:
    folder, store = tmp_path / "journal", RecordStore(tmp_path / "journal")
    with limit_file_size(10):
        episode = store.open("1")
        episode.write(b"a")
    assert [*folder.iterdir()] == []
    episode.close(keep=False)
    folder.rmdir()
    for name in ("2", "3"):
        episode = store.open(name)
        episode.write(b"a")
        episode.close(keep=True)
    assert len(caplog.records) == 1
