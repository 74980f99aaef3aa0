import os

import pytest


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory):
    """Tests leave nothing in the user's cache, and find nothing there."""
    os.environ["OPENRLHF_CACHE"] = str(tmp_path_factory.mktemp("cache"))
