import os

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the models of the tests are so small that a second one costs


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory):
    """Tests leave nothing in the user's cache, and find nothing there."""
    os.environ["OPENRLHF_CACHE"] = str(tmp_path_factory.mktemp("cache"))
