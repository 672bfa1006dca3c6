import pytest
import ranks


@pytest.fixture(scope="session")
def rank_pool():
    pool = ranks.Pool()
    yield pool
    pool.close()
