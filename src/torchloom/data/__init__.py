"""Feed training: a DataLoader whose loader processes change in number while it runs.

    from torchloom.data import ElasticLoader

This package needs torch, and is imported only when it is asked for.
"""

from torchloom.data.loader import ElasticLoader
from torchloom.data.prepared import make_elastic

__all__ = ["ElasticLoader", "make_elastic"]
