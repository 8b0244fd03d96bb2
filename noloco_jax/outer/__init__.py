"""The outer optimizers: pairing, exchange, NoLoCo and DiLoCo. Knows no model, no mesh, no config."""
