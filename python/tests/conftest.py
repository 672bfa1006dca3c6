import pytest
import ranks


def pytest_addoption(parser):
    parser.addoption("--runs", type=int, default=1, help="how often each test runs (default: 1)")


def pytest_generate_tests(metafunc):
    runs = metafunc.config.getoption("--runs")
    if runs > 1:
        metafunc.fixturenames.append("run_number")
        metafunc.parametrize("run_number", range(runs))


@pytest.fixture(scope="session")
def rank_pool():
    pool = ranks.Pool()
    yield pool
    pool.close()
