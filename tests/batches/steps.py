"""Small models, losses and batches for the tests of the large-batch step, and the plain step that it must equal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from timm.layers import DropPath
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from shortlist import RecallAtKLoss, SiMix, SmoothAPLoss
from shortlist.seeds import derived_seed, seeded

Loss = Callable[[Tensor, Tensor], Tensor]
SIZE, CLASSES, PER_CLASS = 8, 5, 4  # images (3, SIZE, SIZE); a batch of 20
DIMENSIONS = 6
TEMPERATURE = 0.1  # wide enough for every pair to have a gradient


class Unit(nn.Module):
    def forward(self, vectors: Tensor) -> Tensor:
        return normalize(vectors)


class Residual(nn.Module):
    """x + f(x), which stochastic depth drops for some of the images."""

    def __init__(self, branch: nn.Module, drop: float) -> None:
        super().__init__()
        self.branch, self.drop = branch, DropPath(drop)

    def forward(self, features: Tensor) -> Tensor:
        return features + self.drop(self.branch(features))


class Tokens(nn.Module):
    """Feature maps (n, c, h, w) to tokens (n, h w, c)."""

    def forward(self, maps: Tensor) -> Tensor:
        return maps.flatten(2).transpose(1, 2)


class MeanToken(nn.Module):
    def forward(self, tokens: Tensor) -> Tensor:
        return tokens.mean(1)


def mlp(*extra: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * SIZE**2, 16), nn.GELU(), *extra, nn.Linear(16, DIMENSIONS), Unit())


def conv_net(*extra: nn.Module) -> nn.Module:
    """Fully convolutional, with BatchNorm frozen at statistics of its own."""
    norm = nn.BatchNorm2d(8)
    norm.running_mean.uniform_(-0.1, 0.1)
    norm.running_var.uniform_(0.5, 2)
    net = nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), norm, nn.ReLU(inplace=True), *extra, nn.Conv2d(8, 8, 3, stride=2)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, DIMENSIONS), Unit()),
    ).train()
    norm.eval()
    return net


def dropping_conv_net() -> nn.Module:
    return conv_net(Residual(nn.Conv2d(8, 8, 1), drop=0.4), nn.Dropout(0.3))


def vision_transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, activation="gelu", batch_first=True, norm_first=True)
    return nn.Sequential(nn.Conv2d(3, 8, 4, stride=4), Tokens(), layer, MeanToken(), nn.Linear(8, DIMENSIONS), Unit())


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp,
    "mlp with dropout": lambda: mlp(nn.Dropout(0.4)),
    "conv": conv_net,
    "conv with dropout and stochastic depth": dropping_conv_net,
    "transformer": vision_transformer,
}


class Proxies(nn.Module):
    """Cross-entropy with a learned vector for each class, which is a parameter of the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.proxies = nn.Parameter(torch.randn(CLASSES, DIMENSIONS))

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(embeddings @ normalize(self.proxies).T / TEMPERATURE, labels)


def _metric_learning_loss(name: str) -> nn.Module:
    from pytorch_metric_learning import losses  # imported only where it is used: this takes a second

    loss: nn.Module = getattr(losses, name)(CLASSES, DIMENSIONS)
    return loss


LOSSES: dict[str, Callable[[], nn.Module]] = {
    "recall": lambda: RecallAtKLoss((1, 2, 4), 1.0, TEMPERATURE),
    "smooth ap": lambda: SmoothAPLoss(TEMPERATURE),
    "recall + simix": lambda: RecallAtKLoss((1, 4, 16, 32), 1.0, TEMPERATURE, simix=SiMix()),
    "proxies": Proxies,
    "proxy anchor": lambda: _metric_learning_loss("ProxyAnchorLoss"),
    "soft triple": lambda: _metric_learning_loss("SoftTripleLoss"),
}


def make(what: Callable[[], nn.Module], dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return what().to(dtype)


def some_images(number: int = CLASSES * PER_CLASS, dtype: torch.dtype = torch.float64, seed: int = 1) -> Tensor:
    return torch.randn(number, 3, SIZE, SIZE, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def some_labels() -> Tensor:
    return torch.arange(CLASSES).repeat_interleave(PER_CLASS)


def plain_step(model: nn.Module, loss: Loss, chunks: Iterable[Tensor], labels: Tensor) -> tuple[Tensor, Tensor]:
    """One ordinary backward pass over the whole batch, embedded chunk by chunk: the loss and the embeddings.

    The random numbers of a chunk depend on a number that is drawn for the step, and on where the chunk starts.
    """
    seed, vectors, start = int(torch.randint(2**62, ())), [], 0
    for chunk in chunks:
        with seeded(derived_seed("chunk", seed, start)):
            vectors.append(model(chunk))
        start += len(chunk)
    embeddings = torch.cat(vectors)
    with seeded(derived_seed("loss", seed)):
        value = loss(embeddings, labels)
    value.backward()
    return value.detach(), embeddings.detach()


def take_gradients(*modules: nn.Module) -> list[Tensor | None]:
    """Return the gradients of all parameters, and clear them."""
    parameters = [parameter for module in modules for parameter in module.parameters()]
    gradients = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    return gradients


def difference(found: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> float:
    """The largest difference, relative to the largest gradient. None must correspond to None."""
    assert [one is None for one in found] == [one is None for one in expected]
    pairs = [(one, other) for one, other in zip(found, expected, strict=True) if one is not None and other is not None]
    largest = max(float(other.abs().max()) for _, other in pairs)
    assert largest > 1e-4, "all gradients are almost 0, so that the comparison is meaningless"
    return max(float((one - other).abs().max()) for one, other in pairs) / largest
