r"""Formulas of the documentation as MathML, written when the site is built: a hook of MkDocs.

The pages have LaTeX in `$...$` and in fences of the language `math`, as GitHub reads them. pymdownx.arithmatex finds
the formulas, and pandoc turns them into MathML, which browsers draw themselves. A reader needs neither scripts nor a
network. `\tag{...}` is the number of an equation.
"""

from __future__ import annotations

import re
from html import escape, unescape
from typing import Any
from xml.etree import ElementTree

import pypandoc  # type: ignore[import-untyped]

__all__ = ["mathml", "on_page_content"]

_NAMESPACE = "{http://www.w3.org/1998/Math/MathML}"
ElementTree.register_namespace("", _NAMESPACE[1:-1])
_FOUND = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
_JOINED = re.compile(
    r"""(\(?)(<math[^>]*display="inline"(?:(?!</math>).)*</math>)((?:-th\b|%)?[.,;:!?)]*)""", re.DOTALL
)
_MATH = re.compile(r"<math.*?</math>", re.DOTALL)
_TAG = re.compile(r"\\tag\{([^{}]*)\}")
_TOKEN = r"<m[ino][^>]*>[^<]*</m[ino]>"
_PRIMED_INDEX = re.compile(rf"<msubsup>({_TOKEN}{_TOKEN})<mo>(′+|″)</mo></msubsup>")
_PRIMED = re.compile(r"<msup>(<mi[^>]*>[^<]*</mi>|<mrow>(?:(?!<m?row>).)*?</mrow>)<mo>(′+|″)</mo></msup>")


_STRUT = '<mspace height="0.8em" depth="0.2em"></mspace>'


def mathml(formulas: list[str]) -> list[str]:
    """Convert LaTeX formulas, by one call of pandoc.

    Args:
        formulas: Each with its delimiters, `$...$` or `$$...$$`.
    """
    found = pypandoc.convert_text("\n\n".join(formulas), "html", format="markdown", extra_args=["--mathml"])
    converted = [_polish(each) for each in _MATH.findall(found)]
    if len(converted) != len(formulas):
        bad = [each for each in formulas if len(formulas) == 1 or not _is_converted(each)]
        raise ValueError(f"pandoc cannot read {', '.join(bad)}: write the formula with commands that it knows.")
    return converted


def _is_converted(formula: str) -> bool:
    try:
        return bool(mathml([formula]))
    except ValueError:
        return False


def _polish(math: str) -> str:
    """Put primes on the base line, as fonts have them raised, and keep the bars of a norm as high as its content.

    Roots of single letters are as high as each other.
    """
    math = re.sub(r"<mo>(?:&#8289;|\u2061)</mo>", "", math)  # an invisible sign, which fonts lack
    math = _spaced(math).replace("<msqrt>", f"<msqrt>{_STRUT}")
    math = _PRIMED_INDEX.sub(r'<mrow><msub>\1</msub><mo lspace="0" rspace="0">\2</mo></mrow>', math)
    math = _PRIMED.sub(r'<mrow>\1<mo lspace="0" rspace="0">\2</mo></mrow>', math)
    return re.sub(r'<mo stretchy="true" form="(\w+)">([‖|])', r'<mo stretchy="false" form="\1">\2', math)


def _spaced(math: str) -> str:
    """Put thin spaces around log, sup and the like, also with limits, but none beside a bracket or another space."""
    root = ElementTree.fromstring(math)
    for row in root.iter(f"{_NAMESPACE}mrow"):
        for i in reversed(range(len(row))):
            name = row[i]
            while (tag := name.tag.removeprefix(_NAMESPACE)) in ("msub", "munder") or (tag, len(name)) == ("mrow", 1):
                name = name[0]
            if name.get("mathvariant") != "normal" or len(name.text or "") < 2:
                continue
            for place, beside in ((i + 1, row[i + 1 : i + 2]), (i, row[i - 1 : i] if i else [])):
                if beside and _wants_space(beside[0], after=place > i):
                    row.insert(place, ElementTree.Element(f"{_NAMESPACE}mspace", width="0.167em"))
    return ElementTree.tostring(root, encoding="unicode", short_empty_elements=False)


def _wants_space(beside: ElementTree.Element, *, after: bool) -> bool:
    """Whether a name like log is apart from what stands after, or before it."""
    tag = beside.tag.removeprefix(_NAMESPACE)
    if after:
        return beside.get("form") != "prefix" and tag != "mspace"
    is_sign = beside.text == "−"  # pandoc makes a letter of a leading one
    return tag in ("mi", "mn", "msub", "msup", "msubsup", "mfrac", "msqrt") and not is_sign  # operators have their own


def on_page_content(html: str, **_: Any) -> str:
    """Replace the formulas of a page."""
    formulas = []
    for element, tex in _FOUND.findall(html):
        around = "$$" if element == "div" else "$"
        formulas.append(around + " ".join(_TAG.sub("", unescape(tex)).split()) + around)
    if not formulas:
        return html
    converted = iter(mathml(formulas))

    def replace(match: re.Match[str]) -> str:
        element, tex = match.groups()
        if element == "span":
            return next(converted)
        number = _TAG.search(tex)
        shown = f'<span class="number">({escape(number.group(1))})</span>' if number else ""
        return f'<div class="equation"><div class="scroll" tabindex="0">{next(converted)}</div>{shown}</div>'

    return _JOINED.sub(_join, _FOUND.sub(replace, html))


def _join(match: re.Match[str]) -> str:
    """Keep a formula on one line with the brackets and punctuation marks around it, with % and -th."""
    before, _, after = match.groups()
    return f'<span class="joined">{match.group()}</span>' if before or after else match.group()
