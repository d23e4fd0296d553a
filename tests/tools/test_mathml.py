"""Formulas of the pages become MathML when the site is built."""

import re
from pathlib import Path

import pytest

pytest.importorskip("pypandoc")

from tools.mathml import mathml, on_page_content

ROOT = Path(__file__).parent.parent.parent
FENCE = re.compile(r"^```math\n(.*?)^```", re.MULTILINE | re.DOTALL)


def test_formulas_are_converted_in_order():
    first, second = mathml([r"$\rho$", r"$$\sup_{\epsilon} \ell(\theta)$$"])
    assert "ρ" in first
    assert "display=" not in first or 'display="inline"' in first
    assert 'display="block"' in second
    assert "<munder>" in second  # limits below the operator, not beside it


def test_primes_stand_on_the_base_line_and_bars_keep_their_height():
    (found,) = mathml([r"$\delta' \lVert \epsilon \rVert$"])
    assert "<msup>" not in found
    assert 'stretchy="true"' not in found
    (found,) = mathml([r"$\lambda_2'$"])
    assert "<msub>" in found
    assert "<msubsup>" not in found


def test_roots_of_small_and_tall_letters_are_equally_high():
    (found,) = mathml([r"$\sqrt s + \sqrt{N s}$"])
    assert found.count('<msqrt><mspace height="0.8em" depth="0.2em"></mspace>') == 2


def test_a_thin_space_stands_between_a_name_and_a_letter():
    space = '<mspace width="0.167em"></mspace>'
    for formula in (r"$\log p$", r"$\max_k p_k$", r"$$\sup_{\lVert x \rVert \le 1} \ell$$"):
        (found,) = mathml([formula])
        assert found.count(space) == 1
    for formula in (r"$q \log p$", r"$0 \log 0$", r"$\frac{P}{2} \log p$"):
        (found,) = mathml([formula])
        assert found.count(space) == 2
    for formula in (r"$-\log (p)$", r"$x + \log (p)$", r"$(\log (p))$"):
        (found,) = mathml([formula])
        assert space not in found
    for formula in (r"$\log (p)$", r"$\sup_x \, \ell$", r"$\sin$"):
        (found,) = mathml([formula])
        assert found.count("mspace") == 2 * formula.count(r"\,")


def test_a_formula_that_pandoc_does_not_know_is_named():
    with pytest.raises(ValueError, match=r"pandoc cannot read \$\\nosuchcommand"):
        mathml(["$x$", r"$\nosuchcommand{x}$"])


def test_a_page():
    html = (
        '<p>Let <span class="arithmatex">\\(a &lt; b\\)</span>.</p>'
        '<div class="arithmatex">\\[\nf(x) \\tag{9}\n\\]</div><pre>$x$</pre>'
    )
    found = on_page_content(html)
    assert found.count("<math") == 2
    assert '<span class="number">(9)</span>' in found
    assert "arithmatex" not in found
    assert re.search(r'<span class="joined"><math(?:(?!</math>).)*</math>\.</span></p>', found)
    assert "<pre>$x$</pre>" in found
    assert on_page_content("<p>no formula</p>") == "<p>no formula</p>"


def test_no_equation_of_the_pages_is_typed_by_hand():
    """Formulas are LaTeX, in fences of `math`; a fence of plain text with an equation would not be typeset."""
    pages = sorted((ROOT / "docs").rglob("*.md"))
    assert sum(len(FENCE.findall(page.read_text())) for page in pages) > 20
    for page in pages:
        for block in re.findall(r"^```text\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
            assert not re.search(r"sqrt|\bomega\b|<-|\^2", block), page


def test_the_equations_have_the_papers_numbers():
    """All equations of the main text that the theory needs, each once."""
    tags = re.findall(r"\\tag\{([^}]*)\}", (ROOT / "docs" / "theory.md").read_text())
    numbers = [int(number) for tag in tags for number in tag.split(", ")]
    assert len(numbers) == len(set(numbers))
    assert {1, 2, 3, 4, 6, 7, 8, 9, 10, 11, 12, 13, 14} <= set(numbers)
