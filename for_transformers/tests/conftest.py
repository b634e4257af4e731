import tests.conftest  # noqa: F401 - one thread, no GPU
