"""
One folder for the code that transformers copies from models, for all tests of this room.
"""
import sys

import pytest


@pytest.fixture(scope="session", autouse=True)
def modules(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        if "transformers" in sys.modules:
            patch.setattr(sys.modules["transformers"].dynamic_module_utils, "HF_MODULES_CACHE",
                          str(tmp_path_factory.mktemp("modules")))
        patch.setattr(sys, "path", [*sys.path])
        yield
