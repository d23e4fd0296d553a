"""What the tool that tries the wheel takes from README, and which distributions follow from it."""

from pathlib import Path

from tools.wheel import code_of, needed, said_to_install

README = (Path(__file__).parents[2] / "README.md").read_text()


def test_the_code_is_one_program():
    page = "a\n```python\nx = 1\n```\n```bash\nls\n```\n```python\nassert x == 1\n```\n"
    assert code_of(page) == "x = 1\n\nassert x == 1\n"
    compile(code_of(README), "README.md", "exec")


def test_readme_shows_the_whole_way_to_a_prediction():
    for call in (
        "optimizer.step(",
        "optimizer.posterior()",
        "bsam.predict(",
        "bsam.metrics.summary(",
        "posterior.save(",
    ):
        assert call in code_of(README), call


def test_what_a_page_says_to_install():
    assert said_to_install("```bash\npip install .   # this\npip install a b  # and these\n```\n") == ["a", "b"]
    assert said_to_install(README) == ["scikit-learn"]


def test_what_is_needed_leads_on_and_leaves_extras_out():
    found = needed(["scikit-learn"])
    assert {"scikit-learn", "numpy", "scipy", "joblib"} <= set(found)
    assert "pytest" not in found  # an extra of scikit-learn
