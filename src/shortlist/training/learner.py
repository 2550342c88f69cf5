"""The embedder with its loss and optimizer: one training step, and the state that a checkpoint holds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from shortlist.batches.by_size import Images
from shortlist.batches.large_batch import LargeBatchStep, StepOutput, refuse_batch_statistics
from shortlist.config import RunConfig
from shortlist.distributed import ALONE, Processes
from shortlist.errors import RunError
from shortlist.model import CorrectedLinear, Embedder, Head
from shortlist.seeds import derived_seed, seeded
from shortlist.training.checkpoint import TrainingState, load_optimizer_tensors, optimizer_tensors
from shortlist.training.components import (
    Classes,
    build_embedder,
    build_loss,
    build_optimizer,
    set_progress,
    trained_parts,
)

AUTOCAST = {"float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class StepResult:
    """Result of a training step."""

    output: StepOutput
    gradient_norm: Tensor  # before clipping
    finite: bool  # whether loss and gradient are finite; if not, the weights are unchanged


class Learner:
    """An embedder with its loss, optimizer, gradient scaler and weight average.

    Random numbers in a step depend only on the seed and the number of the step, so there is no random state to save.

    Args:
        config: Configuration of the run.
        device: Device to train on.
        classes: Labels of the training classes, for losses that have parameters per class.
        embedder: Embedder to train; None to build it from the configuration.
        loss: Loss that is given in Python; None to build it from the configuration.
        processes: Processes that share each batch.
    """

    def __init__(
        self,
        config: RunConfig,
        device: torch.device,
        classes: Classes | None = None,
        embedder: Embedder | None = None,
        loss: Callable[..., Tensor] | None = None,
        processes: Processes = ALONE,
    ) -> None:
        self.config, self.device = config, device
        self.embedder = (embedder or build_embedder(config)).to(device).train()
        self.trained: nn.Module = self.embedder.head() if config.frozen else self.embedder
        refuse_batch_statistics(self.trained)  # fail now rather than in the first step
        with seeded(derived_seed("loss", config.training.seed)):  # the initial weights depend on the seed only
            built = build_loss(config.loss, torch.empty(0) if classes is None else classes, self.embedder.dim, loss)
        self.loss = built.to(device)
        self._loss_before: dict[str, Tensor] | None = None  # state of the loss before the current step
        self.optimizer = build_optimizer(config.optimizer, trained_parts(config, self.embedder), self.loss)
        half = config.training.precision == "float16"
        self.scaler = torch.amp.GradScaler(device.type) if half else None
        self.average: AveragedModel | None = None
        if config.training.ema is not None:
            ema = get_ema_multi_avg_fn(config.training.ema)  # type: ignore[no-untyped-call]
            self.average = AveragedModel(self.trained, multi_avg_fn=ema)
        self.large_batch = LargeBatchStep(
            self.trained,
            self._compute_loss,
            config.batch.chunk_size,
            keep_graphs=config.kept_graphs,
            autocast=AUTOCAST[config.training.precision],
            scaler=self.scaler,
            processes=processes,
        )

    def _compute_loss(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Compute the loss; NaN if an embedding is not finite, for which the loss itself would raise an error."""
        if not embeddings.isfinite().all():
            return embeddings.sum() * math.nan
        self._rewind_loss()
        loss: Tensor = self.loss(embeddings, labels)
        return loss

    def _rewind_loss(self) -> None:
        """Restore the loss if a step is repeated after running out of memory, so that a memory stores a batch once."""
        if self._loss_before is not None:
            self.loss.load_state_dict(self._loss_before)
            return
        state = self.loss.state_dict()
        if len(state) > len(list(self.loss.parameters())):  # it has buffers, unlike most losses
            self._loss_before = {name: each.clone() for name, each in state.items()}

    @property
    def result(self) -> Embedder:
        """The embedder that is evaluated and saved: with the trained weights, or their moving average.

        Its linear layer is an ordinary one, which includes the correction if `model.head` trains one.
        """
        source = self._averaged
        embedder = source if isinstance(source, Embedder) else self.embedder
        linear = source.linear.merged() if isinstance(source.linear, CorrectedLinear) else source.linear
        return embedder if linear is embedder.linear else embedder.with_head(source.layer_norm, linear)

    @property
    def _averaged(self) -> Embedder | Head:
        averaged = self.trained if self.average is None else self.average.module
        assert isinstance(averaged, Embedder | Head)
        return averaged

    def set_linear_layer(self, weight: Tensor, bias: Tensor) -> None:
        """Initialise the linear layer, before the first step."""
        for layer in {self.embedder.linear, self._averaged.linear}:
            assert isinstance(layer, nn.Linear | CorrectedLinear)
            with torch.no_grad():
                (layer.initial if isinstance(layer, CorrectedLinear) else layer.weight).copy_(weight)
                layer.bias.copy_(bias)

    def train_step(
        self, step: int, chunks: Iterable[Images], labels: Tensor, lr_factor: float, progress: float = 0.0
    ) -> StepResult:
        """Update the weights with one batch.

        Args:
            step: Number of the step, from 0.
            chunks: Images of the batch, or with a frozen backbone their features, in chunks.
            labels: Labels of the batch (B,).
            lr_factor: Factor by which the learning rates are multiplied; see `learning_rate_factor`.
            progress: Share of training that has passed, for losses with a schedule.
        """
        set_progress(self.loss, progress)
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * lr_factor
        self.optimizer.zero_grad()
        with seeded(derived_seed("step", self.config.training.seed, step), self.device):
            output = self.large_batch(chunks, labels)
        self._loss_before = None
        norm = self._clipped_norm()
        # with float16, gradients overflow occasionally; the scaler skips such a step and reduces the scale
        finite = bool(output.loss.isfinite()) and (self.scaler is not None or bool(norm.isfinite()))
        if finite:
            self._update()
        return StepResult(output, norm, finite)

    def _clipped_norm(self) -> Tensor:
        """Clip the gradient, and return its norm before clipping."""
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        return torch.nn.utils.clip_grad_norm_(parameters, self.config.training.clip_norm or math.inf)

    def _update(self) -> None:
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        if self.average is not None:
            self.average.update_parameters(self.trained)

    def state(self, step: int) -> TrainingState:
        """Return everything that later steps depend on."""
        parts = {
            "model": self.embedder.state_dict(),
            "loss": self.loss.state_dict(),
            "optimizer": optimizer_tensors(self.optimizer),
            "average": {} if self.average is None else self.average.state_dict(),
        }
        tensors = {f"{part}.{name}": tensor for part, each in parts.items() for name, tensor in each.items()}
        scaler = None if self.scaler is None else self.scaler.state_dict()
        return TrainingState(step, tensors, {"chunk_size": self.large_batch.chunk_size, "scaler": scaler})

    def load(self, state: TrainingState) -> None:
        """Restore a state.

        Raises:
            RunError: The state belongs to another architecture.
        """
        try:
            self.embedder.load_state_dict(state.with_prefix("model."))
            self.loss.load_state_dict(state.with_prefix("loss."))
            load_optimizer_tensors(self.optimizer, state.with_prefix("optimizer."))
            if self.average is not None:
                self.average.load_state_dict(state.with_prefix("average."))
        except (RuntimeError, IndexError, ValueError) as error:
            problem = " ".join(str(error).split())[:300]
            raise RunError(
                f"The checkpoint of step {state.step} does not fit the architecture {self.config.model.backbone} in "
                f"this run's config.yaml: {problem}"
            ) from None
        if self.scaler is not None and state.facts["scaler"] is not None:
            self.scaler.load_state_dict(state.facts["scaler"])
        self.large_batch.chunk_size = state.facts["chunk_size"]
