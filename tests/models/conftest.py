import pytest
import torch

from tests.tiny import tiny

__all__ = ["tiny"]


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Keep torch to one thread: tiny products gain nothing from more, and on a busy machine the others only spin."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
