"""torchft: follow a Manager's steps, quorums and healing in the rank that it runs in.

    attach             attach_manager(): who the replica is, and how the modules below are put in place
    committed_steps    commits, discarded steps, and what is done between two steps
    heal_state         what a healing replica takes over besides its parameters
    quorum_abort       end the process group of a quorum that lost a member, which could never complete
    rendezvous_store   the store in which the ranks of a replica meet, where no torchrun serves one
    manager_internals  which private names of torchft are used, and why

torchft itself is not changed. Some public methods of one Manager, of its process group and of its checkpoint transport
are replaced on these objects by functions that call the original. Importing this package imports none of its modules:
ranks import `rendezvous_store` before their script starts.
"""
