"""Shared by all tests: `--long`, GPU and namespace markers with a reason, and property tests that repeat."""

import os

import pytest
from hypothesis import settings

settings.register_profile("swarmnet", derandomize=True, deadline=None, print_blob=True)
settings.load_profile("swarmnet")
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="also run the tests that take minutes")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    skip_long = pytest.mark.skip(reason="takes minutes: run with --long")
    skip_gpu = pytest.mark.skip(reason="no CUDA device here")
    skip_netns = pytest.mark.skip(reason="needs root and network namespaces")
    for item in items:
        if "long" in item.keywords and not config.getoption("--long"):
            item.add_marker(skip_long)
        if "gpu" in item.keywords and not _has_cuda():
            item.add_marker(skip_gpu)
        if "netns" in item.keywords and os.geteuid() != 0:
            item.add_marker(skip_netns)


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()
