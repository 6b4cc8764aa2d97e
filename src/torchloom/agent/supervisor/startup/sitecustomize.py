"""Run by a fresh interpreter of a rank before its script: have its steps counted, and leave no trace.

This folder stands first in the PYTHONPATH of such a rank. It is taken out again, so that what the rank itself starts
gets the environment it would have had, and the sitecustomize that would have been run is run.
"""

import contextlib
import os
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec

_here = os.path.dirname(__file__)  # noqa: PTH120  pathlib is not loaded yet, and need not be
if _here in sys.path:
    sys.path.remove(_here)
    sys.path_importer_cache.pop(_here, None)
_first, _, _others = os.environ.get("PYTHONPATH", "").partition(os.pathsep)
if _first == _here:
    if _others:
        os.environ["PYTHONPATH"] = _others
    else:
        del os.environ["PYTHONPATH"]

    with contextlib.suppress(Exception):  # an interpreter without torchLoom, or with another one: uncounted, then
        from torchloom.integrations.torchft import rendezvous_store
        from torchloom.threadlet import unattached

        unattached.install()
        rendezvous_store.install()

_spec = PathFinder.find_spec("sitecustomize")
if _spec is not None and _spec.loader is not None:
    sys.modules["sitecustomize"] = _own = module_from_spec(_spec)
    _spec.loader.exec_module(_own)
