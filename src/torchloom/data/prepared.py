"""Loaders that accelerate has prepared: it splits batches and moves them to a device, an ElasticLoader loads them."""

from __future__ import annotations

from typing import Any, Unpack

from torchloom.data.dataloader_arguments import OwnArguments
from torchloom.data.loader import ElasticLoader
from torchloom.errors import BadInput


def make_elastic(prepared: Any, **own: Unpack[OwnArguments]) -> Any:
    """Let a loader that `Accelerator.prepare` returned iterate with an ElasticLoader, and return it.

    accelerate builds a DataLoader of its own from the one that it prepares, with a share of the batches for this rank.
    This takes the place of that one. The prepared loader still moves batches to the device, and now also has `resize`;
    `Accelerator.save_state` contains its position.
    """
    base = getattr(prepared, "base_dataloader", None)
    if base is None:
        raise BadInput(
            f"a {type(prepared).__name__} was not prepared by accelerate",
            hint="pass what Accelerator.prepare returned; for another DataLoader use ElasticLoader.from_dataloader",
        )
    elastic = ElasticLoader.from_dataloader(base, **own)
    prepared.base_dataloader = elastic
    prepared.dl_state_dict = elastic.state_dict()
    prepared.use_stateful_dataloader = True  # what `save_state` and `load_state` ask
    return prepared
