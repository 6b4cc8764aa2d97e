"""Makes `torchloom.views.wording.phrases.render` return noise in this interpreter, as soon as that module is imported.

`pytest --noise` imports this file and puts its folder into PYTHONPATH, so every interpreter that a test starts runs it
before its script. Whatever still works does not depend on the wording of a sentence (docs/decisions/0015-phrases.md).
"""

import sys
from importlib.machinery import PathFinder

MODULE = "torchloom.views.wording.phrases"


def render(prose):
    """The same for the same prose, with the characters that a program might split at. Nothing stays nothing."""
    import zlib  # here: this code runs in another module, which need not import it

    return f"noise/{zlib.crc32(repr(prose).encode()):08x}: #0 (it, or; not)" if prose else ""


def make_noise(module):
    module.render.__code__ = render.__code__  # every name that `render` was imported under is the same function


class _Finder(PathFinder):
    """Finds that one module, and hands it over changed."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        spec = super().find_spec(name, path, target) if name == MODULE else None
        if spec is not None:
            load = spec.loader.exec_module
            spec.loader.exec_module = lambda module: (load(module), make_noise(module))
        return spec


if MODULE in sys.modules:
    make_noise(sys.modules[MODULE])
else:
    sys.meta_path.insert(0, _Finder)
