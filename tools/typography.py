"""Where a line of the documentation may break, and which signs it has: a hook of MkDocs.

Short code stays on its line, and long code breaks after the signs between its words. A number stays with its unit and
its sign, and the hyphen before it becomes a minus sign. A word does not break beside a single letter: k-th. Cells of
several words are marked, so that they are not made as narrow as a word: the table scrolls instead.
"""

from __future__ import annotations

import re
from typing import Any

__all__ = ["on_page_content"]

_SHORT = 30  # characters, which fit into the narrowest window
_CODE = re.compile(r"(?<!<pre>)(?<!<span></span>)<code>([^<]+)</code>")
_BETWEEN_WORDS = re.compile(r"(?<=[_/.,:=(])(?=[^\W\d])")
_OPTION = re.compile(r"(?<![\w-])--[\w-]+")
_CELL = re.compile(r"<td>(?=(.*?)</td>)", re.DOTALL)
_LONG = 20  # characters of a line of a cell
_TAG = re.compile(r"<annotation.*?</annotation>|<[^>]*>", re.DOTALL)
_NO_TEXT = re.compile(r"(<(pre|code|math|script)\b.*?</\2>|<[^>]*>)", re.DOTALL)
_MINUS = re.compile(r"(?<![\w.)\]&;-])-(?=\d|inf\b)|(?<=\d )-(?= )|^-$")
_TOGETHER = re.compile(
    r" (?=[↑↓×·−]|/ \d)|(?<=[±×−]) |(?<=&[gl]t;) (?=\d)|(?<=\d) (?=(?:[mµ]?s|[KMGT]B|of(?= \d))\b)|(?<=\d of) (?=\d)"
)
_LETTER = re.compile(r"(?<![\w-])(?:[^\W\d_]-\w+|\w+-[^\W\d_])(?![\w-])")
_NTH = re.compile(r'<code class="joined">[^<]*</code>-th\b')


def on_page_content(html: str, **_: Any) -> str:
    """Set the code and the numbers of a page."""
    html = re.sub(r"(?<=</code>)\s+\)", ")", html)  # as mkdocstrings closes the default of an argument
    parts = _NO_TEXT.split(_NTH.sub(_join, _CODE.sub(_set_code, _CELL.sub(_mark, html))))
    parts[::3] = (_LETTER.sub(_join, _TOGETHER.sub("\u00a0", _MINUS.sub(_minus, text))) for text in parts[::3])
    del parts[2::3]  # the names of elements
    return "".join(parts)


def _mark(match: re.Match[str]) -> str:
    lines = (_TAG.sub("", line) for line in match.group(1).split("<br"))
    return '<td class="words">' if max(map(len, lines)) > _LONG else match.group()


def _set_code(match: re.Match[str]) -> str:
    code = match.group(1)
    if len(code) <= _SHORT:
        return f'<code class="joined">{code}</code>'
    code = _OPTION.sub(r'<span class="joined">\g<0></span>', _BETWEEN_WORDS.sub("<wbr>", code))
    return f"<code>{code}</code>"


def _join(match: re.Match[str]) -> str:
    return f'<span class="joined">{match.group()}</span>'


def _minus(match: re.Match[str]) -> str:
    return "−" if match.end() < len(match.string) else "–"  # a lone hyphen is an empty cell
