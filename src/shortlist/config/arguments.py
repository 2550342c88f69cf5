"""The keys of a configuration, by the arguments that their values become."""

from __future__ import annotations

ARGUMENTS = {
    "batch_size": "batch.size",
    "chunk_size": "batch.chunk_size",
    "freeze_batch_norm": "model.freeze_batch_norm",
    "keep_graphs": "batch.keep_graphs",
    "on_missing": "data.on_missing",
    "per_class": "batch.per_class",
    "pretrained": "model.weights",
    "root": "data.root",
    "train_share": "data.train_share",
    "workers": "data.workers",
}  # for `errors.translate_arguments`, around what a whole configuration is given to
