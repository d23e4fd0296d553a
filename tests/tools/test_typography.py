"""Line breaks and signs of the pages."""

import pytest

from tools.typography import on_page_content


def test_short_code_stays_on_its_line_and_long_code_breaks_between_words():
    assert on_page_content("<p><code>--stack-size</code></p>") == '<p><code class="joined">--stack-size</code></p>'
    found = on_page_content("<p><code>tests/optim/test_bsam.py::test_a_step</code></p>")
    assert (
        found
        == f"<p><code>{'<wbr>'.join(['tests/', 'optim/', 'test_', 'bsam.', 'py::', 'test_', 'a_', 'step'])}</code></p>"
    )


def test_an_option_of_a_command_is_not_torn():
    found = on_page_content("<code>bsam figure film --out film.webp</code>")
    assert found == '<code>bsam figure film <span class="joined">--out</span> film.<wbr>webp</code>'


def test_cells_of_words_are_marked():
    found = on_page_content("<td>at least one of them here</td><td>0.1 (0.2)<br>0.3 (0.4) worse</td><td></td>")
    assert found.count('<td class="words">') == 1
    assert found.startswith('<td class="words">at least')


@pytest.mark.parametrize("code", ["<pre><code>a_b -1</code></pre>", "<pre><span></span><code>a_b -1</code></pre>"])
def test_blocks_of_code_are_left_alone(code):
    assert on_page_content(code) == code


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("-0.5 and (-2), +-1", "−0.5 and (−2), +−1"),
        ("CIFAR-10, 1e-3, 2-24-1, --1", None),
        ("<td>-</td><td>-<br>-0.1</td>", "<td>–</td><td>–<br>−0.1</td>"),
        ("inf; -inf if std &gt; 0, 1 - <b>x</b>", "inf;~−inf if std &gt;~0, 1~−~<b>x</b>"),
        ("ECE ↓", "ECE~↓"),
        ("<a>Tutorial</a> · <a>Demo</a>", "<a>Tutorial</a>~· <a>Demo</a>"),
        ("the k-th, Ctrl-C", 'the <span class="joined">k-th</span>, <span class="joined">Ctrl-C</span>'),
        ("1.0 ± 0.1", "1.0 ±~0.1"),
        ("0.9 / 0.1", "0.9~/ 0.1"),
        ("5 × bSAM", "5~×~bSAM"),
        ("1 ms, 2 s, 3 GB, 4 seeds", "1~ms, 2~s, 3~GB, 4 seeds"),
        ("3 of 24 runs, 3 of them", "3~of~24 runs, 3 of them"),
        ("<code class='x'>-1 ms</code><math><mo>-1</mo></math>", None),
        ('<a title="-1 ms">x</a>', None),
    ],
)
def test_signs_and_spaces(text, wanted):
    assert on_page_content(text) == (wanted or text).replace("~", "\u00a0")
