"""Markdown, formulas and code in a real browser: rendered texts, and hostile text that stays text."""

import json
from pathlib import Path

import pytest
from chromium import Page, chromium, written_page
from planted_defects import whole_episode

from strands_rollout.dump import TokenTexts
from strands_rollout.view.page import DumpView, write_page

pytestmark = [pytest.mark.slow, pytest.mark.skipif(chromium() is None, reason="needs Chromium")]
RICH = r"""# Title

1. First **bold** `code` $\frac{a}{b_1} \le \sqrt{2}$ costs $5 and $6
2. Then <b>no markup</b> [a link](https://example.com)

\[ \begin{aligned} a &= \boxed{\text{four}} \\ &= \unknown \end{aligned} \] and $\frac{1$

```python
def f(x):  # twice
    return "s" * 2
```

| a | b |
|---|---|
| 1 | 2 |
"""
NESTED = "{" * 5000 + "> " * 3000 + "\n" + "**_[" * 3000 + "$" + "\\frac{" * 3000


async def test_conversation_has_markdown_formulas_and_code(page, shipped_tokenizer, tmp_path):
    samples = [whole_episode(shipped_tokenizer).sample for _ in range(2)]
    for sample, text in zip(samples, (RICH, NESTED), strict=True):
        sample.prompt = [{"role": "user", "content": text}]
    url = written_page(tmp_path, samples, TokenTexts(shipped_tokenizer))
    await page.go(f"{url}#sample=0")
    await page.until("document.querySelector('.md')")
    await page.run("document.querySelector('.card, details').open = true")
    for selector in (
        "p.h1",
        "ol > li strong",
        "li code",
        "mfrac",
        "msqrt",
        "mtable mtr + mtr",
        "mrow[style*=border]",
        "table td",
    ):
        await page.until(f"document.querySelector('.md {selector}')")
    words = await page.run("document.querySelector('.md').textContent")
    for text in ("costs $5 and $6", "<b>no markup</b>", "a link (https://example.com)", r"\unknown", r"\frac{1"):
        assert text in words
    colors = "[...document.querySelectorAll('.md .code span[class]')].map((s) => s.className + ' ' + s.textContent)"
    colored = await page.run(colors)
    for span in ("hljs-keyword def", "hljs-comment # twice", "hljs-keyword return", 'hljs-string "s"', "hljs-number 2"):
        assert span in colored
    assert await page.run("document.querySelectorAll('.md a, .md img, .md b').length") == 0
    await page.key("m")
    await page.until("!document.querySelector('.md') && byId('sample').textContent.includes('**bold**')")
    await page.run("togglePlain(), openSample(1)")  # deeply nested text does not break the page
    await page.until("document.querySelector('#sample .tabs') && state.picked === 1")


@pytest.fixture
async def empty(page: Page, tmp_path: Path) -> Page:
    """Open a page without samples, whose script renders the texts of a test."""
    out = tmp_path / "empty.html"
    out.write_text(write_page(DumpView(), "empty"), encoding="utf-8")
    await page.go(f"file://{out}")
    await page.until("byId('sample').textContent")
    return page


async def show(page: Page, text: str) -> None:
    """Show a text as Markdown, and force its layout."""
    await page.run(f"byId('sample').replaceChildren(renderMarkdown({json.dumps(text)})), byId('sample').offsetHeight")


SHOWN = {
    "prices": ("costs $5 and $6, or $5-$6", "p", "costs $5 and $6, or $5-$6"),
    "line ends": ("one\ntwo", "p", "one\ntwo"),
    "markup": ("a <b>c</b> &lt; <!-- d -->", "p", "a <b>c</b> &lt; <!-- d -->"),
    "a definition of a link": ("[a]: http://b.c", "p", "[a]: http://b.c"),
    "a link's address": ('[a](http://b.c/d%20e "f")', "p", 'a (http://b.c/d%20e "f")'),
    "an address": ("<http://b.c>", ".link", "http://b.c"),
    "an image": ("![a](http://b.c)", "p", "image: a (http://b.c)"),
    "a script as address": ("[a](javascript:b)", "p", "[a](javascript:b)"),
    "struck out": ("~~a~~", "s", "a"),
    "a table": ("|a|b|\n|-|-|\n|1|$x$|", "td math", "x"),
    "a later start": ("7. a\n8. b", "ol[start='7'] > li + li", "b"),
    "an unknown language": ("```klingon\na *b*\n```", "pre.code", "a *b*"),
    "a formula in words": (r"so \(x_1\) is", "span msub", "x1"),
    "a display in words": ("so $$x_1$$ is", "p msub", "x1"),
    "brackets in words": (r"so \[x\] is", "p .display math", "x"),
    "lines of a display": ("\\[\na\n- b\n= c\n\\]", ".display math", "a\N{MINUS SIGN}b=c"),
    "a display in a list": ("1. so\n   $$\n   x^2\n   $$\n2. b", "li .display msup", "x2"),
    "a display with a full stop": ("$$x$$.", "", "x."),
    "the usual answer": (r"It is \boxed{34}.", "mrow[style*=border]", "34"),
    "an escaped dollar": (r"$\$5 + x$", "math", "$5+x"),
    "an unknown command": (r"$\nosuch{a}$", "math", r"\nosucha"),
    "an unclosed formula": (r"$$\frac{1", "p", r"$$\frac{1"),
    "a formula with a fault": (r"$\frac{1$", "code.formula", r"\frac{1"),
}


async def test_markdown_renders_each_construct(empty: Page) -> None:
    for name, (text, selector, expected) in SHOWN.items():
        await show(empty, text)
        shown = await empty.run(f'byId("sample").querySelector(".md {selector}")?.textContent')
        assert (name, shown) == (name, expected), await empty.run("document.querySelector('.md').outerHTML")


HOSTILE = [
    "<script>window.ran = 1</script><img src=x onerror='window.ran = 1'><svg onload='window.ran = 1'>",
    "<style>* { display: none }</style><iframe src='http://evil.example'></iframe><base href='http://evil.example'>",
    "<a href='javascript:window.ran = 1'>a</a> <http://evil.example> <javascript:window.ran=1> http://evil.example",
    "[a](javascript:window.ran=1) [a](JaVaScRiPt&colon;window.ran=1) [a](data:text/html,<script>window.ran=1</script>)",
    "![a](http://evil.example/a.png) ![a][b]\n\n[b]: http://evil.example/b.png\n\n[b]",
    "[a](http://evil.example '\"onmouseover=window.ran=1')\n\n# a {onclick=window.ran=1}",
    "```html\n<script>window.ran = 1</script><style>* { display: none }</style>\n```",
    '```"><script>window.ran=1</script>\na\n```\n\n`<script>window.ran=1</script>`',
    "|<script>window.ran=1</script>|\n|-|\n|<img src=x onerror=window.ran=1>|",
    r"$\href{javascript:window.ran=1}{a}$ $\url{http://evil.example}$ $\includegraphics{http://evil.example/a.png}$",
    r"$\class{bar}{a}$ $\id{tip}{a}$ $\style{background: url(http://evil.example)}{a}$ $\data{a=b}{c}$",
    r"$$\label{tip} a$$ $$\begin{align} a \label{sample} \\ b \tag{1} \end{align}$$ $\ref{sample=1}$ $\eqref{d0}$",
    r"$\text{<script>window.ran=1</script><img src=x onerror=window.ran=1>}$ $\unicode{x3c}script>$",
    r"$\color{red;background:url(http://evil.example)}a$ $\colorbox{url(http://evil.example)}{a}$",
    r"$\begin{CD} a @>{<script>}>> b \end{CD}$ $\cancelto{a}{b}$ $\verb|<script>window.ran=1</script>|$",
]
UNEXPECTED = """[...document.querySelectorAll('.md *')].filter((element) => {
    const isMath = element.namespaceURI.endsWith('MathML');
    const isText = /^(p|span|div|pre|code|table|thead|tbody|tr|th|td|em)$/.test(element.localName);
    return !(isMath || isText) || [...element.attributes].some(({ name, value }) =>
        /^(on.*|id|.*href|src)$/.test(name) || (name === 'style' && value.includes('url('))
        || (isText && !/^(class|title|style|start)$/.test(name)));
}).map((element) => element.outerHTML)"""


async def test_markdown_keeps_hostile_text_as_text(empty: Page) -> None:
    address = await empty.run("location.href")
    for text in HOSTILE:
        await show(empty, text)
        assert (text, await empty.run(UNEXPECTED)) == (text, [])
        await empty.run("document.querySelectorAll('.md *').forEach((e) => e.dispatchEvent(new MouseEvent('click')))")
        assert await empty.run("byId('tip').getAttribute('role') + byId('sample').localName") == "tooltipsection"
    assert await empty.run("window.ran === undefined && location.href") == address
    assert {url.split(":")[0] for url in empty.requests} <= {"file", "about"}


GROWING = {
    "a macro of itself": r"$\def\a{\a\a}\a$",
    "an expanded macro": r"$\edef\a{xx}" + r"\edef\a{\a\a}" * 20 + r"\a$",
    "a global macro": r"$\gdef\a{" + "x" * 100 + "}" + r"\a" * 100 + "$",
    "a command": r"$$\newcommand{\x}[1]{#1#1#1#1}" + r"\x{" * 99 + "y" + "}" * 99 + "$$",
    "another name": r"$\let\a=\frac \a12$",
    "roots": "$$" + r"\sqrt{" * 99 + "x" + "}" * 99 + "$$",
    "fractions": "$$" + r"\frac{1}{" * 99 + "x" + "}" * 99 + "$$",
    "open braces": "$$" + "{" * 1900 + "$$",
    "a long formula": "$$" + "x+" * 5000 + "$$",
}


async def test_formula_with_macros_or_nesting_stays_raw(empty: Page) -> None:
    for name, text in GROWING.items():
        await show(empty, text)
        assert (name, await empty.run("document.querySelectorAll('.md math').length")) == (name, 0)
        shown = await empty.run("document.querySelector('.md').textContent")
        assert shown.strip("$") == text.strip("$"), name


def sized(text: str, size: int = 60_000) -> str:
    return text * (size // len(text))


REPEATED = (
    "[",
    "![",
    "`",
    "*a **b ",
    "> ",
    "- a\n",
    "$",
    "\\(",
    "\\[\n",
    "$$\n",
    "\\boxed{",
    "$x$ ",
    "$\\frac{a}{b}$ ",
)
LARGE = {
    **{repr(text): sized(text) for text in (*REPEATED, "# a\n", "|", "<", "a\n-\n", "\u202e", "a``b`")},
    "a table of many cells": "|a" * 7000 + "\n" + "|-" * 7000 + "\n" + "|\n" * 15000,
    "large matrices": "\n\n".join(["$$\\begin{matrix}" + "&" * 1900 + "\\end{matrix}$$"] * 30),
    "accents": "\n\n".join(["$" + "é" * 390 + "$"] * 150),
    "a line of a megabyte": "a" * 1_000_000,
    "a megabyte of Markdown": sized("**a** $x$ `b`\n\n", 1_000_000),
    "a long word of code": "```java\n" + "a" * 19_000 + "\n```",
    "brackets of code": "```json\n" + "[" * 19_000 + "\n```",
    "a megabyte of code": "```python\n" + sized("a = 'b'\n", 1_000_000) + "```",
}


async def test_markdown_bounds_number_of_elements(empty: Page) -> None:
    for name, text in LARGE.items():
        await show(empty, text)
        count = await empty.run("document.querySelectorAll('.md *').length")
        assert count <= 70_000, (name, count)


async def test_markdown_shows_text_it_would_drop(empty: Page) -> None:
    quotes = "".join(">" * depth + f" level {depth}\n\n" for depth in range(1, 40))
    lists = "".join("  " * depth + f"- level {depth}\n" for depth in range(40))
    marks = "*a _b " * 4000 + "c" + " b_ a*" * 4000
    for text in (quotes, lists, marks, sized("a **b**\n", 70_000)):
        await show(empty, text)
        assert await empty.run("document.querySelector('.md').textContent") == text
        assert not await empty.run("isTooDeep(document.querySelector('.md'))")


PAINTING = (
    r"\rule{99em}{99em}",
    r"\rule[9em]{9em}{99em}",
    r"\raisebox{9em}{\rule{9em}{9em}}",
    r"\kern-9em\rule{9em}{9em}",
)
PAINTING += (
    r"\llap{\rule{9em}{9em}}",
    r"\smash{\rule{9em}{9em}}",
    r"\colorbox{red}{\rule{9em}{9em}}",
    r"\fcolorbox{red}{red}{\strut}",
)


async def test_formula_paints_over_nothing_else(empty: Page) -> None:
    await show(empty, "x")
    bar = {"x": 0, "y": 0, "width": 1400, "height": 44, "scale": 1}
    before = await empty.call("Page.captureScreenshot", clip=bar)
    for formula in PAINTING:
        await show(empty, f"${formula}$")
        assert await empty.call("Page.captureScreenshot", clip=bar) == before, formula
        assert await empty.run("document.documentElement.scrollWidth <= innerWidth"), formula


CODE = [
    "def f(x): return f'{x}' # \"\n",
    "<script>/* ' */</script>",
    '{"a": [1, tru',
    "$(`\\",
    "\u202e\0<b>\r\n",
    "'''",
]


async def test_colored_code_keeps_characters(empty: Page) -> None:
    for code in CODE:
        shown = f"make('i', '', '', highlighted({json.dumps(code)}, name)).textContent"
        differing = f"libraries.hljs.listLanguages().filter((name) => {shown} !== visible({json.dumps(code)}))"
        assert await empty.run(differing) == []
    spans = "make('i', '', '', highlighted('x = 1', {})).querySelectorAll('.hljs-number').length"
    names = ["python", "py", "python3", "Python", "js", "c++", "klingon", "constructor", ""]
    found = [name for name in names if await empty.run(spans.replace("{}", json.dumps(name)))]
    assert found == names[:6]


UNCOLORED_CODE = [
    ("java", "int x = 1; " + "\N{LATIN SMALL LETTER E WITH ACUTE}" * 300),
    ("c", "int x = 1; " + "a" * 300),
    ("javascript", "x = 1;" + "\n" * 300),
    ("python", "x = 1\n" * 5000),
    ("python", "f'{" * 5000),
    ("javascript", "`${" * 5000),
    ("bash", '"$(' * 5000),
    ("rust", "/*" * 5000),
]


async def test_slow_or_deep_code_stays_uncolored(empty: Page) -> None:
    for language, code in UNCOLORED_CODE:
        assert await empty.run(f"highlighted({json.dumps(code)}, '{language}')") == code, language
    chinese = json.dumps({"a": "\N{CJK UNIFIED IDEOGRAPH-4E2D}" * 300}, ensure_ascii=False)
    assert await empty.run(f"highlighted({json.dumps(chinese)}, 'json').querySelectorAll('.hljs-string').length") == 1
