import types

from .. import empty  # noqa: F401


def rendezvous(t, group):
    return types.SimpleNamespace(barrier=lambda channel: None)
