from __future__ import annotations

from collections.abc import Iterator

import pytest

import moe4


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    moe4.synchronize()
