"""The arguments of an embedder as data, which is validated and saved with the weights."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from shortlist.errors import ModelError, check_known
from shortlist.imports import is_user_part
from shortlist.model.pooling import POOLINGS

MAX_DIM = 65_536
RESERVED = frozenset({"pretrained", "num_classes", "global_pool", "in_chans", "features_only", "checkpoint_path"})


@dataclass(frozen=True)
class EmbedderConfig:
    """All arguments of an `Embedder`, JSON-compatible; see there for their meaning.

    In `embedder.config`, `mean` and `std` are always set, so that a saved model does not depend on the defaults of the
    installed version of timm.
    """

    backbone: str
    dim: int | None
    pooling: str
    layer_norm: bool
    freeze_batch_norm: bool
    pretrained: bool | str
    mean: tuple[float, ...] | None
    std: tuple[float, ...] | None
    image_size: int | None
    drop_path_rate: float
    backbone_args: Mapping[str, Any]
    l2_pooled: bool
    imports: tuple[str, ...] = ()

    @property
    def returns_vectors(self) -> bool:
        """Whether the backbone is a user-defined model, which needs no pooling and no linear layer."""
        return is_user_part(self.backbone)

    def __post_init__(self) -> None:
        if self.dim is not None and self.dim < 1:
            raise ModelError(f"dim must be at least 1, or None for no linear layer, not {self.dim}.")
        if self.dim is not None and self.dim > MAX_DIM:
            raise ModelError(f"`dim` must be at most {MAX_DIM:,}, not {self.dim:,}.")
        if self.image_size is not None and self.image_size < 1:
            raise ModelError(f"image_size must be at least 1, not {self.image_size}.")
        if not 0 <= self.drop_path_rate < 1:
            raise ModelError(f"drop_path_rate must be at least 0 and below 1, not {self.drop_path_rate}.")
        self._check_head()
        for name in ("mean", "std"):
            object.__setattr__(self, name, _three_numbers(name, getattr(self, name)))
        if self.std is not None and min(self.std) <= 0:
            raise ModelError(f"std must be positive, not {list(self.std)}.")
        object.__setattr__(self, "imports", tuple(self.imports))
        try:
            object.__setattr__(self, "backbone_args", json.loads(json.dumps(dict(self.backbone_args))))
        except (TypeError, ValueError) as error:
            raise ModelError(
                f"backbone_args must be JSON-compatible, since they are saved with the model: {error}"
            ) from error

    def _check_head(self) -> None:
        """Check the settings of pooling and head; set them to fixed values for a user-defined model, which has none."""
        if self.returns_vectors:
            for name, value in {"dim": None, "pooling": "none", "layer_norm": False, "l2_pooled": False}.items():
                object.__setattr__(self, name, value)
            return
        if self.l2_pooled and self.layer_norm:
            raise ModelError("l2_pooled replaces the layer norm: set layer_norm=False.")
        check_known("pooling", self.pooling, POOLINGS, ModelError)
        for name in sorted(RESERVED.intersection(self.backbone_args)):
            raise ModelError(f"backbone_args must not contain {name!r}: the embedder sets it.")

    def to_dict(self) -> dict[str, Any]:
        """Return the arguments as a JSON-compatible dictionary; `imports` only if there are any."""
        values = {name: value for name, value in asdict(self).items() if name != "imports" or value}
        return json.loads(json.dumps(values))  # type: ignore[no-any-return]


def _three_numbers(name: str, values: tuple[float, ...] | None) -> tuple[float, ...] | None:
    if values is None:
        return None
    if len(values) != 3 or not all(math.isfinite(value) for value in values):
        raise ModelError(f"{name} must be three numbers, for red, green and blue in [0, 1], not {list(values)}.")
    return tuple(float(value) for value in values)
