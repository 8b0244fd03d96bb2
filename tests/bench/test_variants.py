"""Variants of a configuration to measure."""

from noloco_jax.bench.variants import make_variants


def test_variants_are_all_combinations_over_the_overrides(config_file):
    variants = make_variants(
        str(config_file), ["--config.model.num_layers=3"], ["num_replicas=2,4", "model.num_layers=1,2"]
    )
    assert [(v.config.num_replicas, v.config.model.num_layers) for v in variants] == [(2, 1), (2, 2), (4, 1), (4, 2)]
    assert variants[1].label == "num_replicas=2 model.num_layers=2"


def test_without_fields_to_vary_the_configuration_is_the_variant(config_file):
    [variant] = make_variants(str(config_file), ["--config.num_replicas=2"], [])
    assert variant.config.num_replicas == 2
    assert variant.label == "method=noloco num_replicas=2"


def test_one_replica_is_measured_as_local_with_a_note(config_file):
    one, two = make_variants(str(config_file), [], ["num_replicas=1,2"])
    assert (one.config.method, two.config.method) == ("local", "noloco")
    assert "method=local" in one.note and not two.note
    assert one.overrides[-1] == "--config.method=local"
