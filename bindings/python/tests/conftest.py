from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import moe4


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(1)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """Each device in turn; tensors that a test makes without naming one are on it."""
    if request.param == "cuda":
        request.getfixturevalue("kernels")
    before = torch.get_default_device()
    torch.set_default_device(request.param)
    yield torch.device(request.param)
    torch.set_default_device(before)


@pytest.fixture(scope="session")
def kernels() -> None:
    """Most of what tests need on a GPU, compiled on all cores."""
    for activation in ("swiglu", "srelu"):
        moe4.compile_kernels(activation)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    gpu = [item for item in items if "gpu" in item.keywords]
    items[:] = [item for item in items if "gpu" not in item.keywords]
    config.hook.pytest_deselected(items=gpu)
