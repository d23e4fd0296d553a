"""The fully connected network of the authors' code, layer by layer."""

from tests.experiments.models.test_init import make


def test_mlp_elu_layer_by_layer():
    assert [type(layer).__name__ for layer in make("mlp_elu")] == [
        "Flatten",
        "Linear",
        "ELU",
        "Linear",
        "ELU",
        "Linear",
    ]
