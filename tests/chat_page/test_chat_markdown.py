"""Markdown of replies: what it looks like as elements, and that model text stays text."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
from chat_page import ChatPage

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.slow

RENDER = """async ([name, texts]) => {
  const { blocksOf } = await import(`/chat/${name}`);
  return texts.map((text) => {
    const places = [];
    const leaf = (start, end) => (places.push([start, end]), text.slice(start, end));
    const box = document.createElement("div");
    box.append(...blocksOf(text, leaf).map((block) => block.build()));
    for (const head of box.querySelectorAll(".nci-code-head")) head.remove();
    for (const element of box.querySelectorAll("*")) element.removeAttribute("class");
    const all = [...box.querySelectorAll("*")];
    const isActive = ({ attributes }) => [...attributes].some(({ name }) => name.startsWith("on") || name === "src");
    const wrong = all.filter((element) => !element.tagName.match(TAGS) || isActive(element));
    const links = [...box.querySelectorAll("a")].map((link) => link.protocol);
    return { html: box.innerHTML, places, wrong: wrong.map((element) => element.outerHTML), links };
  });
}""".replace(
    "TAGS", "/^(A|BLOCKQUOTE|BR|CODE|DEL|DIV|EM|H[3-6]|HR|LI|OL|P|PRE|SPAN|STRONG|TABLE|TBODY|TD|TH|THEAD|TR|UL)$/"
)
LINK = ' target="_blank" rel="noopener noreferrer nofollow" title='
CASES = {
    "plain": "<p>plain</p>",
    "a\nb\n\nc": "<p>a<br>b</p><p>c</p>",
    "# T\n## U ##\ntext": "<h3>T</h3><h4>U</h4><p>text</p>",
    "**b** *i* ***x*** ~~d~~ __u__ _v_": "<p><strong>b</strong> <em>i</em> <em><strong>x</strong></em> <del>d</del> "
    "<strong>u</strong> <em>v</em></p>",
    "2 * 3 * 4, snake_case_name, a ** b": "<p>2 * 3 * 4, snake_case_name, a ** b</p>",
    "**bold *both* bold**": "<p><strong>bold <em>both</em> bold</strong></p>",
    "*open and **never closed": "<p>*open and **never closed</p>",
    r"\*no\* and \(x^2\)": r"<p>*no* and \(x^2\)</p>",
    "`a *b*` ``c`d``": "<p><code>a *b*</code> <code>c`d</code></p>",
    "- a\n- b\n  - c\n- d": "<ul><li>a</li><li>b<ul><li>c</li></ul></li><li>d</li></ul>",
    "3. x\n4. y": '<ol start="3"><li>x</li><li>y</li></ol>',
    "1. x\n\n   more\n2. y": "<ol><li><p>x</p><p>more</p></li><li><p>y</p></li></ol>",
    "> q\n> r\n\np": "<blockquote><p>q<br>r</p></blockquote><p>p</p>",
    "a\n***\nb": "<p>a</p><hr><p>b</p>",
    "[t](https://a.example/x)": f'<p><a href="https://a.example/x"{LINK}"https://a.example/x">t</a></p>',
    "![p](https://a.example/x.png)": f'<p><a href="https://a.example/x.png"{LINK}"https://a.example/x.png">'
    "Picture: p</a></p>",
    "[t](javascript:alert(1)) [u](data:text/html,x) [v](/etc)": "<p>t u v</p>",
    "see https://a.example/b.": f'<p>see <a href="https://a.example/b"{LINK}"https://a.example/b">'
    "https://a.example/b</a>.</p>",
    "<b onclick=x>&amp;</b>": "<p>&lt;b onclick=x&gt;&amp;amp;&lt;/b&gt;</p>",
    "| a | b |\n|---|---|\n| 1 | `x` |": '<div tabindex="0" role="region" aria-label="Table"><table><thead><tr>'
    '<th scope="col">a</th><th scope="col">b</th></tr></thead><tbody><tr><td>1</td><td><code>x</code></td></tr>'
    "</tbody></table></div>",
    "```\nx < 1\n  y\n```\nz": '<div><pre tabindex="0" role="region" aria-label="Code"><code>x &lt; 1\n  y</code></pre>'
    "</div><p>z</p>",
    "```py\nif 1:  # c": '<div><pre tabindex="0" role="region" aria-label="Code: py"><code><span>if</span> '
    "<span>1</span>:  <span># c</span></code></pre></div>",
}
PARTS = [
    *("*", "**", "***", "_", "__", "`", "``", "```", "~~", "[", "](", ")", "![", "\\", "|", "---", "# ", "> ", "- "),
    *("1. ", "\n", "\n\n", "    ", "\t", " ", "word", "https://a.example/", "<img src=x onerror=alert(1)>", "<script>"),
    *("javascript:x", "data:,x", "é", "🙂", "&lt;", "http:", "|-|", "a|b"),
]


def render(page: Page, texts: list[str]) -> list[dict[str, Any]]:
    return page.evaluate(RENDER, ["markdown.js", texts])  # type: ignore[no-any-return]


def test_elements(chat: ChatPage) -> None:
    found = render(chat.page, [*CASES])
    for (text, html), each in zip(CASES.items(), found, strict=True):
        assert each["html"] == html, text


def test_any_text_becomes_harmless_elements(chat: ChatPage) -> None:
    """Also texts that are cut anywhere, as they stream. Every part is shown at most once."""
    made = random.Random(4)
    texts = ["".join(made.choices(PARTS, k=made.randrange(1, 60))) for _ in range(1500)]
    texts += [text[:cut] for text in [*CASES] for cut in range(len(text))]
    for text, each in zip(texts, render(chat.page, texts), strict=True):
        assert each["wrong"] == [], text
        assert {*each["links"]} <= {"http:", "https:", "mailto:"}, text
        places = sorted(each["places"])
        assert all(end <= start for (_, end), (start, _) in pairwise(places)), text


def test_hostile_lengths_take_no_time(chat: ChatPage) -> None:
    count = 20_000
    parts = ("*a ", "**a ", "[", "![a](", "`a ``", "> ", "- ", "|", "\n- a\n", "_a", "~~a ", "```\n", "<", "\\", "1. ")
    texts = [part * count for part in parts]
    begin = chat.page.evaluate("performance.now()")
    render(chat.page, texts)
    assert chat.page.evaluate("performance.now()") - begin < 60_000  # quadratic ones would take hours


IMAGE = "<img src='https://evil.example/x.png' onerror='window.attacked=1'><script>window.attacked=1</script>"


def test_a_reply_runs_no_code_and_loads_nothing(chat: ChatPage) -> None:
    text = f"{IMAGE} ![x](https://evil.example/y.png) [z](javascript:window.attacked=1)"
    requests: list[str] = []
    chat.page.on("request", lambda request: requests.append(request.url))
    chat.page.route(
        "**/v1/chat/completions",
        lambda route: route.continue_(
            post_data={**route.request.post_data_json, "structured_outputs": {"choice": [text]}}
        ),
    )
    chat.send(IMAGE)
    assert chat.messages()[0] == IMAGE
    assert chat.messages()[1].startswith(IMAGE)
    chat.point_at(3)
    assert chat.page.locator("img, .nci script, iframe").count() == 0
    assert chat.page.evaluate("() => window.attacked") is None
    assert not [url for url in requests if "evil" in url]
