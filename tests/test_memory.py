import ctypes
import subprocess
import sys

import pytest

# Two threads allocate; then malloc_info reports the number of heaps.
TAKE = """
import ctypes, sys, threading
from infd.memory import use_one_heap
if sys.argv[1] == "shared":
    use_one_heap()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
both = threading.Barrier(2)
def take():
    libc.malloc(ctypes.c_size_t(1000))
    both.wait()
threads = [threading.Thread(target=take) for _ in range(2)]
for each in threads: each.start()
for each in threads: each.join()
stdout = ctypes.c_void_p.in_dll(libc, "stdout")
libc.malloc_info(0, stdout)
libc.fflush(stdout)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_info"), reason="another C library than glibc")
def test_threads_share_one_heap():
    heaps = {
        how: subprocess.run([sys.executable, "-c", TAKE, how], capture_output=True, text=True, check=True).stdout.count(
            "<heap "
        )
        for how in ("apart", "shared")
    }
    assert heaps["shared"] == 1 < heaps["apart"]
