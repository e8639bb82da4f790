import pytest
from plan_world import World


@pytest.fixture
def world() -> World:
    """Nothing seen, nothing learned."""
    return World()
