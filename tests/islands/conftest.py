"""Islands whose programs every test of this folder shares."""

import pytest


@pytest.fixture(scope="session")
def world(tmp_path_factory):
    """Islands of a small configuration; a test begins them in a folder of its own."""
    from support.training_islands import World, small  # imports jax

    return World(small(), tmp_path_factory.mktemp("islands"))


@pytest.fixture(scope="session", autouse=True)
def rarely_watched_ports():
    """Look at the islands' sockets a tenth as often: the threads that do so took a third of the tests' CPU time."""
    from noloco_jax.islands import doorkeeper

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(doorkeeper, "_EVERY_SECONDS", 10 * doorkeeper._EVERY_SECONDS)
        yield
