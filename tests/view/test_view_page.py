"""The page holds every sample and executes nothing of it; the server follows runs, and answers only at a secret URL."""

import asyncio
import base64
import copy
import functools
import gzip
import hashlib
import http.client
import io
import json
import re
import threading
from collections.abc import AsyncIterator
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import aiohttp
import pytest
from planted_defects import whole_episode
from rich.console import Console
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from strands_rollout.cli.commands import app
from strands_rollout.dump import TokenTexts, read_dump, write_dump
from strands_rollout.errors import ConfigError
from strands_rollout.samples import Sample
from strands_rollout.slime_plugin.reward_groups import normalize_rewards
from strands_rollout.view.page import view_dump, view_record, write_page
from strands_rollout.view.server import LiveDump, live_server
from strands_rollout.view.terminal import print_dump

ASSETS = Path(__file__).parents[2] / "strands_rollout" / "view" / "assets"
EVIL = "</script ></script><script>document.title='ran'</script><img src=x onerror=\"document.title='ran'\"><!--\u2028"


class Scripts(HTMLParser):
    """All elements of a page, and the text of each script, as a browser parses them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.ours: list[str] = []
        self.data: dict[str | None, str] = {}
        self.policy = ""
        self._open: dict[str, str | None] | None = None
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        named = dict(attrs)
        self._open = named if tag == "script" else None
        if named.get("http-equiv") == "Content-Security-Policy":
            self.policy = str(named["content"])

    def handle_data(self, data: str) -> None:
        if self._open is not None and "type" in self._open:
            self.data[self._open.get("id")] = data
        elif self._open is not None:
            self.ours.append(data)

    def handle_endtag(self, tag: str) -> None:
        self._open = None


def unpacked(detail: bytes | str) -> Any:
    return json.loads(gzip.decompress(base64.b64decode(detail) if isinstance(detail, str) else detail))


def write_lines(path: Path, *lines: Any) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def dump(shipped_tokenizer: Any, tmp_path: Path) -> Path:
    episodes = [whole_episode(shipped_tokenizer, index, result=EVIL if index == 2 else "34") for index in range(6)]
    episodes[2].sample.prompt = EVIL
    episodes[2].sample.label = EVIL
    episodes[2].facts["stop_reason"] = EVIL
    path = tmp_path / "run.jsonl"
    write_dump(path, [episode.sample for episode in episodes], TokenTexts(shipped_tokenizer))
    return path


def test_write_page_holds_every_sample(dump: Path) -> None:
    held = Scripts(write_page(view_dump(dump, None), "run")).data
    rows = json.loads(held["index"])["rows"]
    assert [row["index"] for row in rows] == list(range(6))
    for record, row in zip(read_dump(dump), range(6), strict=True):
        detail = unpacked(held[f"d{row}"])
        assert detail["ids"] == record.values["tokens"]
        assert {int(token) for token in detail["texts"]} == set(detail["ids"])
    assert rows[1]["times"] == {"generate": 0.5, "tool": 0.2, "wait": 0.1, "all": 0.8}


def test_write_page_escapes_text_and_admits_only_its_script(dump: Path) -> None:
    parsed = Scripts(write_page(view_dump(dump, None), EVIL))
    assert parsed.tags.count("script") == 6 + 2
    assert "img" not in parsed.tags
    assert json.loads(parsed.data["index"])["rows"][2]["stop"] == EVIL
    # browsers end a script at texts that Python's parser accepts, but only at a `<`
    assert not any("<" in text for text in parsed.data.values())
    (ours,) = parsed.ours
    digest = base64.b64encode(hashlib.sha256(ours.encode()).digest()).decode()
    for words in (f"script-src 'sha256-{digest}'", "default-src 'none'", "connect-src 'none'"):
        assert words in parsed.policy
    assert "unsafe" not in parsed.policy


def test_page_script_never_parses_text_as_html() -> None:
    markup = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function|http"
    for asset in ASSETS.glob("*.js"):
        assert not re.search(markup, asset.read_text(encoding="utf-8")), asset


def test_view_dump_takes_texts_from_tokenizer(shipped_tokenizer, tmp_path) -> None:
    sample, out = whole_episode(shipped_tokenizer).sample, tmp_path / "x.html"
    write_dump(tmp_path / "run.jsonl", [sample])
    folder = str(shipped_tokenizer.name_or_path)
    done = CliRunner().invoke(app, ["view", str(tmp_path / "run.jsonl"), "--out", str(out), "--tokenizer", folder])
    assert done.exit_code == 0, done.output
    detail = unpacked(Scripts(out.read_text(encoding="utf-8")).data["d0"])
    assert "".join(detail["texts"][str(token)] for token in detail["ids"][detail["prompt"] :]) == sample.response
    assert detail["drift"] == []


def test_write_page_masks_secrets_of_older_dumps(shipped_tokenizer: Any, tmp_path: Path) -> None:
    values = whole_episode(shipped_tokenizer).sample.to_dict()
    values["metadata"] |= {"api_key": "sk-1", "url": "http://me:pass@host"}
    detail = gzip.decompress(view_dump(write_lines(tmp_path / "old.jsonl", values), None).details[0])
    assert b"***" in detail
    assert not re.search(b"sk-1|pass@", detail)


def test_view_dump_reads_eval_results(tmp_path: Path) -> None:
    line = {"data_set": "x", "status": "completed", "response": "34", "reward": {"acc": 1.0}, "seconds": 2.0}
    lines = [line | {"problem": number // 2, "number": number % 2, "violations": ["odd"]} for number in range(4)]
    write_lines(tmp_path / "results.jsonl", *lines)
    view = view_dump(tmp_path, None)
    assert [(row["group"], row["advantage"]) for row in view.rows] == [("x/0", None)] * 2 + [("x/1", None)] * 2
    assert (view.rows[0]["problems"], unpacked(view.details[0])["response"]) == (["violation"], "34")


def test_view_dump_rows_have_step_answer_and_tools(shipped_tokenizer: Any, tmp_path: Path) -> None:
    graded, numbered = whole_episode(shipped_tokenizer, 1), whole_episode(shipped_tokenizer, 2)
    graded.sample.reward = {"score": -1.0, "acc": 0.0, "pred": "35", "label": "34"}
    numbered.sample.reward, numbered.facts["reward"] = 0.5, {"score": 0.5, "acc": True, "parts/tone": 0.25}
    write_dump(tmp_path / "rollout_000007.jsonl.gz", [graded.sample, numbered.sample])
    write_dump(tmp_path / "samples.jsonl", [whole_episode(shipped_tokenizer, 3).sample])
    first, second, third = view_dump(tmp_path, None).rows
    assert [first[name] for name in ("set", "step", "right", "answer", "label")] == ["rollout", 7, 0.0, "35", "34"]
    assert (second["right"], second["answer"], second["tools"]) == (1.0, None, {"run": [1, 1]})
    assert (first["parts"], second["parts"]) == ({}, {"tone": 0.25})
    assert (third["set"], third["step"]) == ("samples", None)
    assert first["question"] == second["question"] != ""


@pytest.mark.parametrize("fault", ["no_judge", "error", "failed"])
def test_ungraded_rows_are_neither_right_nor_wrong(shipped_tokenizer: Any, tmp_path: Path, fault: str) -> None:
    lost = whole_episode(shipped_tokenizer, 1)
    lost.sample.reward = {"score": -1.0, "acc": 0.0, "method": fault, "error": "why."}
    if fault == "failed":
        lost.sample.status = Sample.Status.FAILED
    write_dump(tmp_path / "rollout_000007.jsonl.gz", [lost.sample])
    (row,) = view_dump(tmp_path, None).rows
    assert (row["right"], row["reward"]) == (None, None)


def test_view_command_joins_different_runs(dump: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other, out = tmp_path / "other" / dump.name, tmp_path / "x.html"
    other.write_bytes(dump.read_bytes())
    done = CliRunner().invoke(app, ["view", str(dump), str(other), "--out", str(out)])
    assert done.exit_code == 0, done.output
    held = Scripts(out.read_text(encoding="utf-8")).data
    index = json.loads(held["index"])
    assert index["runs"] == [f"{tmp_path.name}/run.jsonl", "other/run.jsonl"]
    assert [row["run"] for row in index["rows"]] == [0] * 6 + [1] * 6
    assert unpacked(held["d7"])["ids"] == unpacked(held["d1"])["ids"]
    done = CliRunner().invoke(app, ["view", str(dump), str(dump), "--out", str(out)])
    assert (done.exit_code, "each once" in done.output) == (2, True)


def test_live_dump_follows_two_runs(dump: Path, line: bytes, tmp_path: Path) -> None:
    live = LiveDump({"a": dump, "b": tmp_path / "more"}, None)
    assert [row["run"] for row in live.refresh()[0].rows] == [0] * 6 + [1]
    append(dump, line)
    assert [row["run"] for row in live.refresh()[0].rows] == [0] * 7 + [1]


def printed(dump: Path, *wanted: int, width: int = 200) -> str:
    out = io.StringIO()
    print_dump(Console(file=out, width=width), dump, None, wanted)
    return out.getvalue()


def test_print_dump_shows_list_and_chosen_sample(dump: Path) -> None:
    text = printed(dump, 1, width=120)
    assert text.count("completed") >= 5
    assert "trained | <think>" in text
    assert f"1: {dump}:2" in text
    assert f"0: {dump}:1" not in text


class Served(NamedTuple):
    live: LiveDump
    port: int
    root: str


@pytest.fixture
async def server(dump: Path) -> AsyncIterator[Served]:
    live = LiveDump(dump, None)
    async with live_server(live, "run") as url:
        parts = urlsplit(url)
        yield Served(live, parts.port, parts.path)


async def ask(server: Served, path: str, **headers: str) -> tuple[int, bytes, str | None]:
    def asked() -> tuple[int, bytes, str | None]:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        found = answer.status, answer.read(), answer.headers["ETag"]
        connection.close()
        return found

    return await asyncio.to_thread(asked)


async def indexes(server: Served) -> list[int]:
    status, body, _ = await ask(server, server.root + "index.json")
    assert status == 200
    return [row["index"] for row in json.loads(body)["rows"]]


@pytest.fixture
def line(tmp_path: Path, shipped_tokenizer: Any) -> bytes:
    more = tmp_path / "more" / "more.jsonl"
    write_dump(more, [whole_episode(shipped_tokenizer, 6).sample], TokenTexts(shipped_tokenizer))
    return more.read_bytes()


def append(dump: Path, more: bytes) -> None:
    with dump.open("ab") as file:
        file.write(more)


async def test_live_server_follows_running_job(server, dump, line, shipped_tokenizer) -> None:
    assert await indexes(server) == list(range(6))
    tag = {"If-None-Match": str((await ask(server, server.root + "index.json"))[2])}
    assert (await ask(server, server.root + "index.json", **tag))[0] == 304
    append(dump, line[:100])  # the writer stops in the middle of a line, and continues later
    assert await indexes(server) == list(range(6))
    append(dump, line[100:])
    assert (await ask(server, server.root + "index.json", **tag))[0] == 200
    assert await indexes(server) == list(range(7))
    detail = unpacked((await ask(server, server.root + "sample/6"))[1])
    assert detail["ids"] == whole_episode(shipped_tokenizer).tokens
    assert b"connect-src 'self'" in (await ask(server, server.root))[1]


def test_live_dump_rereads_replaced_file(dump: Path, shipped_tokenizer: Any) -> None:
    live = LiveDump(dump, None)
    live.refresh()
    before = dump.stat()
    lines = [json.loads(line) | {"index": number} for number, line in enumerate(dump.read_bytes().splitlines(), 4)]
    dump.write_text("".join(json.dumps(line, separators=(",", ":"), ensure_ascii=False) + "\n" for line in lines))
    assert (dump.stat().st_ino, dump.stat().st_size) == (before.st_ino, before.st_size)
    assert [row["index"] for row in live.refresh()[0].rows] == list(range(4, 10))
    dump.unlink()
    write_dump(dump, [whole_episode(shipped_tokenizer, 9).sample])
    assert [row["index"] for row in live.refresh()[0].rows] == [9]


def test_live_dump_reads_only_new_samples(dump: Path, line: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    judged: list[str] = []
    monkeypatch.setattr(
        "strands_rollout.view.server.view_record",
        lambda record, *more: judged.append(record.where) or view_record(record, *more),
    )
    live = LiveDump(dump, None)
    live.refresh()
    append(dump, line)
    assert (len(live.refresh()[0].rows), judged) == (7, [f"{dump}:{number}" for number in range(1, 8)])


async def test_live_server_stops_during_refresh(dump: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    live, begun = LiveDump(dump, None), threading.Event()
    refresh = live.refresh
    monkeypatch.setattr(live, "refresh", lambda: (begun.set(), refresh())[1])
    async with asyncio.timeout(30), aiohttp.ClientSession() as session:
        with live._lock:  # held as if a large dump were being read
            async with live_server(live, "run") as url:
                asking = asyncio.create_task(session.get(f"{url}index.json"))
                assert await asyncio.to_thread(begun.wait, 30)
            with pytest.raises(aiohttp.ClientError):
                await asking


def test_view_dump_advantages_equal_the_trainers(shipped_tokenizer, tmp_path) -> None:
    samples = [whole_episode(shipped_tokenizer, index).sample for index in range(12)]
    for place, part in ((1, 0), (2, 1), (3, 2)):
        samples[place].index = samples[place].rollout_id = 1
        facts = dict.__getitem__(samples[place].metadata, "strands_rollout")
        facts["fan_out"] = {"part": part, "of": 3, "kind": "agent"}
    samples[5].status = Sample.Status.FAILED
    samples[6].remove_sample = True
    samples[7].reward = None
    for one in samples[8:]:
        one.group_index = 1
    _, expected = normalize_rewards(SimpleNamespace(reward_key="score"), samples)
    write_dump(tmp_path / "run.jsonl", samples)
    rows = view_dump(tmp_path / "run.jsonl", None).rows
    assert [row["part"] for row in rows[:4]] == ["", *(f"agent, {number} of 3" for number in (1, 2, 3))]
    found = [row["advantage"] for row in rows]
    assert found[7] is None
    assert [value or 0.0 for value in found] == expected
    assert len({round(value, 3) for value in expected}) > 3


OWN = "127.0.0.1:{port}"
HOSTS = {"localhost:{port}": 200, "LOCALHOST": 200, "[::1]:{port}": 200, "evil.example": 404, "": 404}
HOSTS |= {"localhost.evil.example:{port}": 404}
ORIGINS = {f"http://{OWN}": 200, "http://evil.example": 404, "null": 404}
REQUESTS = [
    *(("/", {}, 404), ("/index.json", {}, 404), ("{root}sample/99", {}, 404), ("{root}../secrets", {}, 404)),
    ("index.json", {}, 400),  # not an absolute path
    *(("{root}index.json", {"Host": host}, status) for host, status in HOSTS.items()),
    *(("{root}index.json", {"Host": OWN, "Origin": origin}, status) for origin, status in ORIGINS.items()),
]


@pytest.mark.parametrize(("path", "headers", "status"), REQUESTS)
async def test_live_server_refuses_foreign_requests(server, path, headers, status):
    sent = {name: value.replace("{port}", str(server.port)) for name, value in headers.items()}
    assert (await ask(server, path.replace("{root}", server.root), **sent))[0] == status


ODD = ["\ud800", {"\ud800": "\ud800"}, 10**400, None, ["a"], [None], {"a": [10**30]}]


@pytest.mark.parametrize(
    "name", [*Sample().to_dict(), "metadata.strands_rollout.turns", "metadata.strands_rollout.spans"]
)
@pytest.mark.parametrize("is_text", [False, True], ids=["page", "text"])
def test_malformed_sample_does_not_hide_others(name: str, is_text: bool, tmp_path: Path) -> None:
    good = Sample(
        tokens=[1, 2, 3], response_length=1, loss_mask=[1], rollout_log_probs=[-0.5], index=0, group_index=0, reward=1.0
    ).to_dict() | {"metadata": {"strands_rollout": {"turns": 1, "spans": [[0, 2, 3, "1"]]}}}
    lines = [good]
    for odd in ODD:
        sample = copy.deepcopy(good)
        *path, last = name.split(".")
        functools.reduce(dict.__getitem__, path, sample)[last] = odd
        lines += [sample, good]
    dump = write_lines(tmp_path / "run.jsonl", *lines)
    if is_text:
        assert printed(dump).encode().count(b"sampled by the policy, trained; 1 tokens") >= len(ODD) + 1
    else:
        view = view_dump(dump, None)
        assert len(view.rows) == len(lines)
        assert write_page(view, "odd").encode()
        assert [row["problems"] for row in view.rows[::2]] == [view.rows[0]["problems"]] * (len(ODD) + 1)


def test_print_dump_shows_escape_sequences(tmp_path: Path) -> None:
    nasty = "a\x1b]0;owned\x07\x1b[2J\r\x9b31m\u202egnp.exe\u2066\u200f\u2028\x7f\ud800\x00\tb\nc"
    samples = [Sample(response=nasty, label=nasty, prompt=nasty, status=Sample.Status.FAILED, tokens=[], index=0)]
    samples.append(Sample(tokens=[1], response_length=1, loss_mask=[1], rollout_log_probs=[-0.5], label=nasty))
    facts = {"metadata": {"strands_rollout": {"stop_reason": nasty, "error": nasty}}}
    texts = {"strands_rollout_dump": {"version": 1, "token_texts": {"1": list(nasty.encode("utf-8", "surrogatepass"))}}}
    dump = write_lines(tmp_path / "run.jsonl", *(texts | one.to_dict() | facts for one in samples))
    done = CliRunner().invoke(app, ["view", str(dump), "--text"])
    assert done.exit_code == 0, done.output
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]", done.output)
    assert done.output.count("a␛]0;owned␇␛[2J␍\\u009b31m\\u202egnp.exe\\u2066\\u200f\\u2028␡") >= 2


async def test_live_server_reports_broken_dump(server: Served, dump: Path) -> None:
    append(dump, b"nonsense\n")
    status, body, _ = await ask(server, server.root + "index.json")
    assert (status, b"run.jsonl:7 is broken" in body) == (409, True)


def test_view_refuses_tokenizer_of_another_policy(dump: Path, tmp_path: Path) -> None:
    other = Tokenizer(WordLevel({f"word{number}": number for number in range(2000)}))
    PreTrainedTokenizerFast(tokenizer_object=other).save_pretrained(tmp_path / "other")
    arguments = ["view", str(dump), "--out", str(tmp_path / "x.html"), "--tokenizer", str(tmp_path / "other")]
    with pytest.raises(ConfigError, match="name the tokenizer of the policy that sampled the tokens"):
        CliRunner().invoke(app, arguments, catch_exceptions=False)
