"""What every test runs under."""

from __future__ import annotations

import gc
import os
import zlib
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests import tools
from tests.devices import why_no_gpu

ALL = "--all"
EVERY_CASE = "--every-case"
ONE_IN = 5

# Read when CUDA starts: without it torch.use_deterministic_algorithms refuses matrix products there.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(EVERY_CASE, action="store_true", help="every case of each test, not one in five; as .ci/run")
    parser.addoption(ALL, action="store_true", help="and the tests with the marker `extended`; as `make test-all`")


def pytest_configure() -> None:
    if lacking := tools.missing():
        raise pytest.UsageError(f"{tools.VARIABLE}=ON, but here is no {', no '.join(lacking)}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption(ALL):
        _keep(config, items, {item for item in items if item.get_closest_marker("extended") is None})
    if reason := why_no_gpu():
        if all(item.get_closest_marker("gpu") for item in items):  # asked for by name
            for item in items:
                item.add_marker(pytest.mark.skip(reason=reason))
        else:  # to skip thousands one by one takes seconds
            _keep(config, items, {item for item in items if item.get_closest_marker("gpu") is None})
    named = any("::" in arg for arg in config.args) or config.option.keyword
    if not (config.getoption(ALL) or config.getoption(EVERY_CASE) or named):
        _keep(config, items, one_in_five(items))  # of those that can run here


def _keep(config: pytest.Config, items: list[pytest.Item], kept: set[pytest.Item]) -> None:
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


def one_in_five(items: list[pytest.Item]) -> set[pytest.Item]:
    """One in five of each test's cases, at least one, and one in five of all slow tests.

    They are chosen by their names' hashes: no axis of a product coincides with the choice, a new case moves few others.
    """
    groups = defaultdict(list)
    for item in items:
        groups["slow" if item.get_closest_marker("slow") else item.nodeid.partition("[")[0]].append(item)
    return {
        item
        for group in groups.values()
        for item in sorted(group, key=lambda item: zlib.crc32(item.nodeid.encode()))[::ONE_IN]
    }


def pytest_collection_finish() -> None:
    """What the imports and the collection made stays: a full collection of garbage in a test need not look at it."""
    gc.collect()
    gc.freeze()


SUMMARY = "printed at the end"  # a property of a test, by record_property: what people should see of one that passed


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for report in terminalreporter.stats.get("passed", []):
        for text in [text for name, text in report.user_properties if name == SUMMARY]:
            terminalreporter.section(report.nodeid, sep="-")
            terminalreporter.write_line(text)


@pytest.fixture(autouse=True)
def _fresh_state() -> Iterator[None]:
    """The same seed for every test, and no determinism setting left behind by another."""
    # Not torch.manual_seed, which notes its whole stack for each kind of accelerator that is not there.
    torch.default_generator.manual_seed(0)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(0)
    torch.backends.cudnn.allow_tf32 = False  # a GPU's convolutions in float32, too, as the bounds have it
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True
    if torch.cuda.is_initialized():
        _end_if_the_gpu_is_lost()


@pytest.fixture
def ranks() -> Any:
    """Two processes joined by gloo, the same for all tests of this one."""
    from tests.models.ranks import joined  # late: few tests need them

    return joined()


def _end_if_the_gpu_is_lost() -> None:
    """After an illegal access every later call of the process fails: under pytest-xdist a new one takes over."""
    try:
        torch.cuda.synchronize()  # errors show in the test that made them
    except RuntimeError:
        if "PYTEST_XDIST_WORKER" in os.environ:
            os._exit(1)
        raise
