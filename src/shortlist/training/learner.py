"""What learns: the embedder, its loss, its optimizer, and a step of them; all that a checkpoint must hold."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from shortlist.batches.large_batch import LargeBatchStep, StepOutput, refuse_batch_statistics
from shortlist.batches.sizes import Images
from shortlist.batches.undo import seeded
from shortlist.config import RunConfig
from shortlist.errors import RunError
from shortlist.model import Embedder
from shortlist.seeds import derived_seed
from shortlist.training.checkpoint import TrainingState, load_optimizer_tensors, optimizer_tensors
from shortlist.training.losses import Classes, build_loss
from shortlist.training.parts import build_embedder, build_optimizer

AUTOCAST = {"float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Learned:
    """A step's outcome. Where it is not finite, the weights were left as they were."""

    out: StepOutput
    gradient_norm: Tensor  # before clipping
    finite: bool


class Learner:
    """Takes steps. Whatever is random in one follows from the seed and the step's number: no random state to save.

    Args:
        config: of the run.
        device: where it learns.
        classes: the labels of the training classes, for losses that keep something for each of them.
        embedder: what learns; None: as the config has it.
    """

    def __init__(
        self,
        config: RunConfig,
        device: torch.device,
        classes: Classes | None = None,
        embedder: Embedder | None = None,
    ) -> None:
        self.config, self._device, batch = config, device, config.batch
        self.embedder = (embedder or build_embedder(config)).to(device).train()
        refuse_batch_statistics(self.embedder)  # now, and not at the first step
        self.loss = self._first_loss(torch.empty(0) if classes is None else classes).to(device)
        self._loss_before: dict[str, Tensor] | None = None  # its state before this step's batch
        self.optimizer = build_optimizer(config.optimizer, self.embedder.parts(), self.loss)
        half = config.training.precision == "float16"
        self.scaler = torch.amp.GradScaler(device.type) if half else None
        self.average: AveragedModel | None = None
        if config.training.ema is not None:
            ema = get_ema_multi_avg_fn(config.training.ema)  # type: ignore[no-untyped-call]
            self.average = AveragedModel(self.embedder, multi_avg_fn=ema)
        gigabytes = isinstance(batch.keep_graphs, float)
        self.large_batch = LargeBatchStep(
            self.embedder,
            self._loss_of,
            batch.chunk_size,
            keep_graphs=int(batch.keep_graphs * 2**30) if gigabytes else batch.keep_graphs,  # type: ignore[arg-type]
            autocast=AUTOCAST[config.training.precision],
            scaler=self.scaler,
        )

    def _first_loss(self, classes: Classes) -> nn.Module:
        """With its initial weights, the same for the same seed."""
        with seeded(derived_seed("loss", self.config.training.seed)):
            return build_loss(self.config.loss, classes, self.embedder.dim)

    def _loss_of(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Not finite where the embeddings are not; the loss itself refuses them as a mistake of its caller."""
        if not embeddings.isfinite().all():
            return embeddings.sum() * math.nan
        self._rewind_loss()
        loss: Tensor = self.loss(embeddings, labels)
        return loss

    def _rewind_loss(self) -> None:
        """A step that is taken again, out of memory, finds the loss as it was: a memory takes a batch once."""
        if self._loss_before is not None:
            self.loss.load_state_dict(self._loss_before)
            return
        state = self.loss.state_dict()
        if len(state) > len(list(self.loss.parameters())):  # most losses keep nothing but parameters, if that
            self._loss_before = {name: each.clone() for name, each in state.items()}

    @property
    def result(self) -> Embedder:
        """What is evaluated and kept: the embedder, or the moving average of its weights."""
        averaged = self.embedder if self.average is None else self.average.module
        assert isinstance(averaged, Embedder)
        return averaged

    def set_linear(self, weight: Tensor, bias: Tensor) -> None:
        """Begin with this linear layer; before the first step."""
        for embedder in {self.embedder, self.result}:
            assert isinstance(embedder.linear, nn.Linear)
            with torch.no_grad():
                embedder.linear.weight.copy_(weight)
                embedder.linear.bias.copy_(bias)

    def learn(self, step: int, chunks: Iterable[Images], labels: Tensor, learning_rate_factor: float) -> Learned:
        """Step number `step`, from 0: one batch, one update of the weights."""
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * learning_rate_factor
        self.optimizer.zero_grad()
        with seeded(derived_seed("step", self.config.training.seed, step), self._device):
            out = self.large_batch(chunks, labels)
        self._loss_before = None
        norm = self._clipped_norm()
        # float16 overflows now and then: its scaler leaves such a step out, and scales less
        finite = bool(out.loss.isfinite()) and (self.scaler is not None or bool(norm.isfinite()))
        if finite:
            self._update()
        return Learned(out, norm, finite)

    def _clipped_norm(self) -> Tensor:
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
            self.average.update_parameters(self.embedder)

    def state(self, step: int) -> TrainingState:
        """All that a later step depends on."""
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
        """Go back to a state.

        Raises:
            RunError: it is of another architecture.
        """
        try:
            self.embedder.load_state_dict(state.under("model."))
            self.loss.load_state_dict(state.under("loss."))
            load_optimizer_tensors(self.optimizer, state.under("optimizer."))
            if self.average is not None:
                self.average.load_state_dict(state.under("average."))
        except (RuntimeError, IndexError, ValueError) as error:
            first = " ".join(str(error).split())[:300]
            raise RunError(
                f"The checkpoint of step {state.step} is of another architecture than the "
                f"{self.config.model.backbone} of this run's config.yaml: {first}"
            ) from None
        if self.scaler is not None and state.facts["scaler"] is not None:
            self.scaler.load_state_dict(state.facts["scaler"])
        self.large_batch.chunk_size = state.facts["chunk_size"]
