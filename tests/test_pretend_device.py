"""
Nothing mixes tensors of two devices, and nothing waits for a device unseen.

Another process runs the tests of on_pretend_device.py, because a device stays in its process.
"""
import os
import subprocess
import sys

import pytest
import torch
from torch.utils import backend_registration

from tests.helpers import ROOT
from tests.pretend_device import SETUP


@pytest.mark.skipif(not hasattr(backend_registration, SETUP),
                    reason=f"torch {torch.__version__} has no {SETUP}")
def test_on_a_pretended_device():
    tests = subprocess.run([sys.executable, "-m", "tests.on_pretend_device"], cwd=ROOT,
                           env={**os.environ, "OMP_NUM_THREADS": "1"}, text=True,
                           stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    print(tests.stdout)
    status = tests.returncode
    assert status == 0
    assert not hasattr(torch, "pretend")
