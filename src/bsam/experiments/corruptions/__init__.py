"""The 15 corruptions of CIFAR-10-C in torch: noise, blur, weather and digital artefacts, each at five strengths.

Hendrycks and Dietterich (2019), ICLR, "Benchmarking neural network robustness to common corruptions and perturbations".
The constants are those that its authors published for CIFAR-10 (images of 32 x 32 pixels with three colours).
"""

from bsam.experiments.corruptions.corrupt import KINDS, STRENGTHS, check_images, corrupt

__all__ = ["KINDS", "STRENGTHS", "check_images", "corrupt"]
