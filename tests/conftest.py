"""Fixtures that several test files share."""

import os
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the checkout."""
    return REPOSITORY


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real text and labelled sets that stand beside the checkout (or where SHARED_DATA says)."""
    folder = Path(os.environ.get("SHARED_DATA", REPOSITORY.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"real text is not here: {folder} does not exist (set SHARED_DATA)")
    return folder
