"""Fixtures: a clock that a test sets, and a fake API server that knows one valid token."""

import pytest

from tests.unit.operator.endpoint.support.clock import HandClock
from tests.unit.operator.endpoint.support.fake_api import FakeApi


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
def api() -> FakeApi:
    api = FakeApi()
    api.add("good")
    return api
