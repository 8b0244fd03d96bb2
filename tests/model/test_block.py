"""The product with a weight matrix."""

import jax
import numpy as np
import pytest

from noloco_jax.model.block import dense


@pytest.mark.parametrize(("width_in", "width_out"), [(3, 5), (5, 3), (4, 4)])
def test_gradients_of_dense_equal_those_of_the_product(width_in, width_out):
    rng = np.random.default_rng(0)
    x_BTI, kernel_IO, d_y_BTO = (
        rng.normal(size=shape) for shape in [(2, 7, width_in), (width_in, width_out), (2, 7, width_out)]
    )
    with jax.enable_x64(True):
        y_BTO, pull_back = jax.vjp(dense, x_BTI, kernel_IO)
        d_x_BTI, d_kernel_IO = pull_back(d_y_BTO)
    np.testing.assert_allclose(y_BTO, np.einsum("bti,io->bto", x_BTI, kernel_IO), rtol=1e-12)
    np.testing.assert_allclose(d_x_BTI, np.einsum("bto,io->bti", d_y_BTO, kernel_IO), rtol=1e-12)
    np.testing.assert_allclose(d_kernel_IO, np.einsum("bti,bto->io", x_BTI, d_y_BTO), rtol=1e-12)
