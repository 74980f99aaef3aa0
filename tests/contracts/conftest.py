import pytest


@pytest.fixture(autouse=True)
def no_workers_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands of these tests end before they start workers, so nothing imports the workers' libraries."""
    monkeypatch.setenv("OPENRLHF_WARM_WORKERS", "0")
