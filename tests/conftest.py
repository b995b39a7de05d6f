"""For every test there is."""

from importlib.util import find_spec

# Where only GPU tests run, it need not be installed.
if find_spec("hypothesis") is not None:
    from hypothesis import settings

    # No test is about how long one example takes, and a busy machine has taken all deadlines. The
    # same examples each time, so that what fails fails again; others are for `make fuzz`.
    settings.register_profile("kvpool", deadline=None, derandomize=True)
    settings.register_profile("fuzz", deadline=None, derandomize=False, print_blob=True)
    settings.load_profile("kvpool")
