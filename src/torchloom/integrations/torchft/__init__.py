"""torchft: its Manager counts the steps of a replica, and torchLoom listens to it.

    names      what of torchft is used that is not public, and why
    attaching  attach_manager(): who the replica is, and how all of this is put in place
    steps      commits, discarded steps, and what is done between two steps
    healing    what a replica that heals takes over
    fuse       a quorum that lost a member never completes: end its process group

Nothing is changed in torchft. A few public methods of the one Manager, and of the process group and the transport that
it was given, are replaced on these objects by functions that call them and look on.
"""

from torchloom.integrations.torchft.attaching import attach_manager

__all__ = ["attach_manager"]
