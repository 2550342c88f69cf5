"""Embedders: timm backbones with pooling and a linear layer, multi-scale embedding and whitening."""

from shortlist.extras import extra

with extra("training", __name__):
    from shortlist.model.backbone import DataConfig
    from shortlist.model.embedder import Embedder
    from shortlist.model.embedder_config import EmbedderConfig
    from shortlist.model.head import CorrectedLinear, Head
    from shortlist.model.multiscale import MultiScale
    from shortlist.model.pooling import Average, ClassToken, GeM, Max
    from shortlist.model.whitening import pair_whitening, pca_whitening

__all__ = [
    "Average",
    "ClassToken",
    "CorrectedLinear",
    "DataConfig",
    "Embedder",
    "EmbedderConfig",
    "GeM",
    "Head",
    "Max",
    "MultiScale",
    "pair_whitening",
    "pca_whitening",
]
