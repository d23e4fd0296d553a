"""SAM as an optimal relaxation of Bayes, in numbers: conjugates, objectives and exact solvers for small problems.

Möllenhoff and Khan (2023), "SAM as an Optimal Relaxation of Bayes", ICLR. Everything here is float64, meant for one
to three dimensions, and independent of the rest of the package. Equations are cited by their numbers in the paper.

| module | contents |
|---|---|
| `gaussian` | Gaussians as exponential families: natural, expectation and mean-covariance parameters |
| `losses` | the definition of a loss, and examples: quadratic, three minima, logistic regression |
| `fenchel` | the expected loss $f$, its conjugate $f^*$ (the max-loss), and its biconjugate $f^{**}$ (Theorem 1) |
| `objectives` | the objectives of SAM, Bayes and relaxed Bayes, the two ELBOs, and Theorem 2 in both directions |
| `derivation` | the closed forms of the appendix that lead from $f^{**}$ to Algorithm 1 |
| `relaxed_bayes` | Bayes and relaxed Bayes solved exactly by the Bayesian learning rule with full covariance |
"""

try:
    from bsam.theory import derivation, fenchel, gaussian, losses, objectives, relaxed_bayes
except ModuleNotFoundError as error:
    if error.name is None or error.name.startswith("bsam"):
        raise
    raise ModuleNotFoundError(
        f"bsam.theory needs {error.name}, which is not installed. In the folder of bsam's source, write: "
        "pip install '.[theory]'",
        name=error.name,
    ) from error

__all__ = ["derivation", "fenchel", "gaussian", "losses", "objectives", "relaxed_bayes"]
