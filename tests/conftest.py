import os

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import pytest
from hypothesis import settings

# Laws are tested, not speed: a busy machine is no failure. Where the environment says CI, every run tries the same examples, so that a
# failure is the change's own; elsewhere each run looks for new ones.
settings.register_profile("ssd", deadline=None)
settings.register_profile("ssd-ci", deadline=None, derandomize=True)
settings.load_profile("ssd-ci" if os.environ.get("CI") else "ssd")


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    """Tiny models gain nothing from threads, and a drafter in a thread of its own would fight for them."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _cores_are_given_back():
    """A test that left this process on fewer cores would have those after it skipped, or crowded."""
    from ssd.devices import available_cores

    before = available_cores()
    yield
    assert available_cores() == before


@pytest.fixture(autouse=True, scope="session")
def _short_profiles():
    """A real profile averages over seconds for the sake of its numbers, which no test reads; programs that tests start do."""
    from ssd import forwards

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forwards, "LEAST_SECONDS", 0.01)
        yield


@pytest.fixture(scope="session")
def tiny_pair(tmp_path_factory):
    """Paths of a tiny random target and its noisy draft."""
    from tests.tiny import make_pair

    return make_pair(tmp_path_factory.mktemp("pair"), "llama", seed=1, noise=0.1)


@pytest.fixture
def plan_for(tiny_pair):
    """A hand-typed plan for the tiny pair on two cores."""
    from tests.plans import hand_typed

    return lambda **changes: hand_typed(*tiny_pair, **changes)


@pytest.fixture
def _few_simulations(monkeypatch):
    """Plans for tests of laws that a few rivals tell as well as dozens."""
    monkeypatch.setattr("ssd.planner.SCREENED", 6)
    monkeypatch.setattr("ssd.planner.SIMULATED", 2)
