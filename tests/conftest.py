"""For every test there is."""

from importlib.util import find_spec

# Where only GPU tests run, it need not be installed.
if find_spec("hypothesis") is not None:
    from hypothesis import settings

    # No test is about how long one example takes, and a busy machine has taken all deadlines.
    settings.register_profile("kvpool", deadline=None)
    settings.load_profile("kvpool")
