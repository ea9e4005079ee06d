"""What the tests of this room start from."""

import pytest
from kernels import Kernel


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    """One kernel for all tests: each leaves ranks with which the next can begin."""
    made = Kernel(tmp_path_factory.mktemp("kernel"))
    yield made
    made.client.stop_channels()
    made.manager.shutdown_kernel()
