"""The page in a real browser: its panes, and that it executes nothing of a dump."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from chromium import Page, chromium, written_page
from planted_defects import DEFECTS, whole_episode

from strands_rollout.dump import TokenTexts, write_dump
from strands_rollout.view.page import DumpView, view_dump, write_page
from strands_rollout.view.server import LiveDump, live_server

pytestmark = [pytest.mark.slow, pytest.mark.skipif(chromium() is None, reason="needs Chromium")]
EVIL = "</script><script>window.ran = 1</script><img src=x onerror='window.ran = 1'>\u202eevil"
PHONE = (390, 844)


@pytest.fixture(scope="module")
def written(shipped_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Write a page of 100 samples: valid ones, each defect, and text that tries to run."""
    folder = tmp_path_factory.mktemp("view")
    defects = [make(shipped_tokenizer) for make, _ in DEFECTS.values()]
    evil = whole_episode(shipped_tokenizer, result=EVIL)
    evil.sample.prompt, evil.sample.label = EVIL, EVIL
    odd = [*defects, evil.sample]
    samples = [whole_episode(shipped_tokenizer, index).sample for index in range(100 - len(odd))]
    return written_page(folder, [*samples, *odd], TokenTexts(shipped_tokenizer))


WHOLE_SAMPLES = ("lengths disagree", "trained failure", "trailing context", "unfinished", "text")
FIRST_DEFECT = 100 - len(DEFECTS) - 1


@pytest.mark.parametrize(("number", "name"), list(enumerate(DEFECTS)))
async def test_page_shows_each_planted_defect(number, name, page, written) -> None:
    kind = DEFECTS[name][1]
    await page.go(f"{written}#sample={FIRST_DEFECT + number}&view=tokens&problems=1")
    shown = await page.until("document.querySelector('.found')?.textContent")
    assert kind in shown
    of_picked = "'.row.picked .problem, .row.picked .older'"
    badges = await page.run(f"[...document.querySelectorAll({of_picked})].map((b) => b.textContent)")
    assert len(badges) == 1
    marked = await page.run("document.querySelectorAll('.t.flagged, .t.old').length")
    assert marked or kind in WHOLE_SAMPLES


async def test_page_lists_three_problems_per_kind(page: Page, shipped_tokenizer: Any, tmp_path: Path) -> None:
    sample = whole_episode(shipped_tokenizer).sample
    sample.rollout_log_probs = [-0.25] * sample.response_length
    await page.go(written_page(tmp_path, [sample], TokenTexts(shipped_tokenizer)))
    await page.until("document.querySelector('.found')")
    kinds = await page.run("[...document.querySelectorAll('.found li > b')].map((b) => b.textContent)")
    assert kinds.count("context logprob: ") == 3
    assert "more" in await page.run("document.querySelector('.found').textContent")


async def test_page_executes_nothing_of_a_dump(page: Page, written: str) -> None:
    for view in ("talk", "tokens", "facts"):
        await page.go("about:blank")
        await page.go(f"{written}#sample=99&view={view}")
        await page.until("document.querySelector('#sample .tabs')")
        assert "<script>" in await page.run("document.body.innerText")
    await asyncio.sleep(0.1)
    assert await page.run("window.ran === undefined && document.images.length === 0")
    assert {url.split(":")[0] for url in page.requests} <= {"file", "about"}
    assert "\u202e" not in await page.run("byId('sample').textContent")


async def test_overview_filters_list_and_groups(page: Page, written: str) -> None:
    await page.go(written)
    await page.until("document.querySelectorAll('.tile').length > 5 && document.querySelectorAll('.worth').length")
    assert "accuracy" in await page.run("document.querySelector('.tiles').textContent")
    await page.run("[...document.querySelectorAll('.entry')].find((e) => e.textContent.includes('aborted')).click()")
    await page.until("byId('count').textContent === '1 of 100' && location.hash.includes('stop=aborted')")
    await page.key("g")
    await page.until("document.querySelectorAll('.columns > .card').length === 1")
    await page.run("clearFilters(), byId('query').value = 'reword<1', filtersChanged()")
    await page.until("byId('hint').textContent.includes('did you mean \"reward\"?')")
    mask = "[...document.querySelectorAll('.entry')].find((e) => e.textContent.startsWith('mask'))"
    await page.run(f"clearFilters(), showOverview(), {mask}.click()")
    has_it = "state.rows.filter((row) => row.problems.includes('mask')).length"
    assert await page.run(f"byId('query').value + state.shown.length === 'problem=\"mask\"' + {has_it}")
    assert await page.run(f"{mask}.ariaPressed") == "true"
    await page.run(f"{mask}.click()")  # a second click removes the filter
    assert await page.run("byId('query').value") == ""
    await page.run("byId('query').value = 'answer=\"no such words\"', filtersChanged()")
    assert await page.run("byId('count').textContent + byId('hint').textContent") == "0 of 100"
    await page.run("clearFilters(), showOverview(), document.querySelector('.worth').click()")
    await page.until("document.querySelector('#sample .tabs') && location.hash.includes('view=talk')")
    assert await page.run("document.querySelector('.verdict').textContent") == "reward -1said The answer is 34.label 34"


async def test_overview_shows_steps_and_runs(page: Page, shipped_tokenizer: Any, tmp_path: Path) -> None:
    for run in ("a", "b"):
        for step in range(3):
            samples = [whole_episode(shipped_tokenizer, index + step * (run == "b")).sample for index in range(4)]
            write_dump(tmp_path / run / f"rollout_{step:06d}.jsonl", samples)
    out = tmp_path / "x.html"
    views = {run: view_dump(tmp_path / run, None) for run in ("a", "b")}
    out.write_text(write_page(DumpView.side_by_side(views), "a | b"), encoding="utf-8")
    await page.go(f"file://{out}")
    await page.until("document.querySelectorAll('.line').length === 2")
    steps = "[...document.querySelectorAll('.axis-x > span')].map((label) => label.textContent)"
    assert await page.run(steps) == ["0", "1", "2"]
    await page.run("document.querySelectorAll('.dot')[1].click()")
    await page.until("byId('step').value === '1' && byId('count').textContent === '8 of 24'")
    assert await page.run("document.querySelectorAll('.dot').length") == 6
    await page.run("clearFilters(), showGroups()")
    await page.until("document.querySelectorAll('.beside > div').length === 2")
    assert await page.run("document.querySelectorAll('.beside .card').length") == 2 * 4
    await page.run("document.querySelector('.beside button').click()")
    assert await page.run("document.querySelectorAll('.beside .card').length") == 12 + 4


async def test_token_shows_its_details(page: Page, written: str) -> None:
    await page.go(f"{written}#sample=1&view=tokens")
    await page.until("document.querySelector('.t.trained[data-i]')")
    await page.run(
        "document.querySelector('.t.trained[data-i]').dispatchEvent(new MouseEvent('mouseover', {bubbles: true}))"
    )
    tip = await page.run("byId('tip').textContent")
    for words in ("id ", 'text "<think>"', "bytes 3c 74", "logprob -0.250", "turn 1", "weights 7", "mask 1"):
        assert words in tip


async def test_keys_navigate_samples(page: Page, written: str) -> None:
    await page.go(written)
    await page.until("document.querySelectorAll('.row').length")
    await page.key("j")
    await page.key("j")
    await page.key("Enter")
    await page.until("location.hash.startsWith('#sample=1&view=talk')")
    await page.key("t")
    await page.until("location.hash.includes('view=tokens') && document.querySelector('.t.trained[data-i]')")
    await page.key("k")
    await page.until("location.hash.startsWith('#sample=0&view=tokens')")
    await page.key("Escape")
    await page.until("!location.hash.includes('sample')")
    await page.key("/")
    await page.key("z")
    await page.key("q")
    await page.until("byId('query').value === 'zq' && byId('count').textContent === '0 of 100'")
    await page.key("Escape")
    await page.key("?")
    await page.until("byId('keys').open")
    await page.key("Escape")
    await page.until("!byId('keys').open")


async def test_permalink_opens_same_view(page: Page, written: str) -> None:
    await page.go(f"{written}#sample=4&view=tokens&token=30&query=turns%3E1&sort=-length")
    await page.until("document.querySelector('.t.picked')?.dataset.i === '30'")
    assert await page.run("byId('query').value + byId('sort').value") == "turns>1-length"


async def test_back_restores_pane_and_scroll_position(page: Page, written: str) -> None:
    await page.go(written)
    await page.until("document.querySelector('.worth')")
    await page.run("byId('sample').scrollTop = 60, document.querySelector('.worth').click()")
    await page.until("location.hash.includes('sample=') && document.querySelector('#sample .tabs')")
    await page.key("j")  # moving between samples adds no history entry
    await page.key("g")
    await page.until("document.querySelector('.columns')")
    await page.run("history.back()")
    await page.until("document.querySelector('#sample .tabs')")
    await page.run("history.back()")
    await page.until("document.querySelector('.tile') && byId('sample').scrollTop === 60")
    await page.run("history.forward()")
    await page.until("document.querySelector('#sample .tabs')")


async def test_page_shows_eval_results(page: Page, tmp_path: Path) -> None:
    said = "<think>\nSix words.\n</think>\n\nIt is $\\frac{1}{2}$.<|im_end|>"
    line = {"data_set": "x", "status": "completed", "response": said, "reward": {"acc": 1.0}, "seconds": 2.0}
    lines = [json.dumps(line | {"problem": 0, "number": number}) + "\n" for number in range(2)]
    (tmp_path / "results.jsonl").write_text("".join(lines))
    out, empty = tmp_path / "x.html", tmp_path / "none.html"
    out.write_text(write_page(view_dump(tmp_path / "results.jsonl", None), "x"), encoding="utf-8")
    empty.write_text(write_page(DumpView(), "none"), encoding="utf-8")
    await page.go(f"file://{out}")
    await page.until("document.querySelector('.tile')")
    assert "drift" not in await page.run("byId('sample').textContent")  # these results have no tokens
    await page.run("openSample(0)")
    await page.until("document.querySelector('#sample .tabs')")
    assert await page.run("document.querySelector('#sample .time-words').textContent") == "time2.00 s"
    assert await page.run("document.querySelector('details.think').open") is False
    await page.until("document.querySelector('.md mfrac')")
    assert "im_end" not in await page.run("document.body.innerText")
    await page.go(f"file://{empty}")
    assert "this dump has no samples" in await page.run("byId('sample').textContent")


async def test_conversation_shows_calls_and_folds_thoughts(page: Page, written: str) -> None:
    await page.go(f"{written}#sample=1")
    await page.until("document.querySelectorAll('.call').length === 1")
    assert await page.run("[...document.querySelectorAll('.call pre')].map((p) => p.textContent)") == [
        "print(17*2)",
        "34",
    ]
    assert "run: error, exit 3" in await page.run("document.querySelector('.call').textContent")
    assert await page.run("[...document.querySelectorAll('details.think')].map((d) => d.open)") == [False, False]


async def test_timeline_without_start_times(page: Page, written: str) -> None:
    await page.go(f"{written}#sample=1")
    await page.until("document.querySelector('.time')")
    call = "run: error, exit 3, ran 0.10 s, waited 50.0 ms"
    assert await page.run("[...document.querySelectorAll('.time span')].map((part) => part.title)") == [
        "turn 1, 0.30 s",
        "waiting for a free sandbox, 50.0 ms",
        f"{call}, 0.15 s",
        "turn 2, 0.20 s",
        "the rest of the episode, 0.10 s",
    ]
    assert await page.run("document.querySelector('.outcome').textContent") == f"{call}, 0.20 s"


async def test_timeline_stacks_concurrent_steps(page, shipped_tokenizer, tmp_path):
    episode = whole_episode(shipped_tokenizer)
    call = dict(episode.facts["calls"][0])
    episode.facts["requests"] = [[0, 0.0, 0.2], [1, 0.6, 0.2]]
    episode.facts["calls"] = [call | {"at_s": 0.2}, call | {"id": "call_1_2", "at_s": 0.3}]
    url = written_page(tmp_path, [episode.sample], TokenTexts(shipped_tokenizer))
    await page.go(f"{url}#sample=0&view=tokens")
    await page.until("document.querySelector('.time.placed')")
    parts = "[...document.querySelectorAll('.placed > span')]"
    assert await page.run(parts + ".map((p) => p.className)") == ["generate", "tool", "tool", "generate"]
    places = await page.run(parts + ".map((p) => [parseFloat(p.style.left), parseFloat(p.style.width), p.offsetTop])")
    assert [[round(left), round(width)] for left, width, _ in places] == [[0, 25], [25, 25], [38, 25], [75, 25]]
    assert places[2][2] > places[1][2] == places[0][2] == places[3][2]
    assert "from 0.20 s on" in await page.run(parts + "[1].title")
    assert "wait 0.05 s" not in await page.run("document.querySelector('.time').getAttribute('aria-label')")
    await page.run(parts + "[3].click()")
    await page.until("location.hash.includes('view=talk') && document.querySelector('[data-turn=\"1\"]')")


async def test_groups_show_advantages(page: Page, written: str) -> None:
    await page.go(f"{written}#groups=1")
    await page.until("document.querySelectorAll('.columns').length === 20")
    assert await page.run("document.querySelectorAll('.columns')[1].childElementCount") == 4
    assert "advantage +" in await page.run("document.querySelector('.columns').textContent")


@pytest.mark.parametrize("dark", [False, True])
async def test_phone_shows_one_pane(dark: bool, page: Page, written: str) -> None:
    await page.screen(*PHONE, dark=dark)
    await page.go(f"{written}#sample={FIRST_DEFECT}&view=tokens")
    await page.until("document.querySelector('.t.flagged')")
    assert await page.run("byId('list').offsetParent === null")
    assert await page.run("document.documentElement.scrollWidth") == PHONE[0]
    assert await page.run("document.documentElement.dataset.theme") == ("dark" if dark else "light")
    for view in ("talk", "facts"):
        await page.run(f"openSample({FIRST_DEFECT}, {{view: '{view}'}})")
        assert await page.run("document.documentElement.scrollWidth") == PHONE[0]
    await page.run("showGroups()")
    assert await page.run("document.documentElement.scrollWidth") == PHONE[0]
    await page.run("state.rows[0].parts = {['a_long_name_of_a_part_'.repeat(9)]: 1}, addRewardParts(), showOverview()")
    assert await page.run("byId('sample').scrollWidth <= byId('sample').clientWidth")
    await page.run("byId('back').click()")
    list_alone = "byId('list').offsetParent !== null && byId('sample').offsetParent === null"
    assert await page.run(list_alone)
    await page.run("document.querySelector('.row').click()")
    assert not await page.run(list_alone)
    await page.run("history.back()")
    await page.until(list_alone)


async def test_live_page_shows_new_samples(page, shipped_tokenizer, tmp_path) -> None:
    dump, more = tmp_path / "run.jsonl", tmp_path / "more.jsonl"
    write_dump(dump, [whole_episode(shipped_tokenizer).sample], TokenTexts(shipped_tokenizer))
    write_dump(more, [whole_episode(shipped_tokenizer, 1).sample], TokenTexts(shipped_tokenizer))
    async with live_server(LiveDump(dump, None), "live") as url:
        await page.go(f"{url}#sample=0&view=tokens")
        await page.until("document.querySelectorAll('.t.trained').length")
        with dump.open("ab") as file:
            file.write(more.read_bytes())
        await page.until("byId('count').textContent === '2 samples'")
        assert await page.run("location.hash.startsWith('#sample=0')")
        other = whole_episode(shipped_tokenizer, 5, result="thirty-four").sample
        write_dump(tmp_path / "other.jsonl", [other], TokenTexts(shipped_tokenizer))
        (tmp_path / "other.jsonl").rename(dump)
        await page.until("document.querySelector('#sample h2').textContent === '#5'")
        assert await page.run("byId('count').textContent") == "1 sample"
