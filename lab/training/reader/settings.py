"""Everything a training run of the reader depends on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from training.reader.network import NetworkConfig

_FLOOR: Final = 0.05


@dataclass(frozen=True)
class TrainConfig:
    """Everything a run depends on.

    Attributes:
        seed: Weights and data; the same seed and number of workers give the same run.
        workers: One-thread processes that average their parameters.
        steps: Steps under full attention, all stages together.
        block_steps: Steps after that in which half of the batches use the block mask.
        name_steps: Steps after those, block batches too, in which names are of every make.
        link_steps: Steps after those, full attention only, in which facts need the chunk before.
        decay_from: Fraction of `steps` after which the learning rate falls linearly.
        block_rate: Learning rate at the start of the block steps, as a share of the full one.
        name_rate: The same at the start of the name steps.
        link_rate: The same in the link steps, warmed up and falling from `link_decay_from` on.
        link_decay_from: Fraction of `link_steps`.
        link_share: Share of linked contexts in the link steps.
        block_share: Share of block batches in the block and name steps.
        matrix_rate: Learning rate of Muon, for matrices.
        embedding_rate: Learning rate of AdamW, for the embedding.
        vector_rate: Learning rate of AdamW, for biases and norms.
        warm_up: Steps of linear warm-up.
        average_every: Steps between two averagings of the parameters.
        advance_at: First-token accuracy at which the next stage begins.
        questions: Questions per context.
        language_weight: Weight of the language-model loss on the context.
        checkpoint_every: Steps between checkpoints, a multiple of `average_every`.
        network: Sizes of the model.
    """

    seed: int = 0
    workers: int = 2
    steps: int = 1900
    block_steps: int = 300
    name_steps: int = 600
    link_steps: int = 700
    decay_from: float = 0.55
    block_rate: float = 0.25
    name_rate: float = 0.5
    link_rate: float = 0.6
    link_decay_from: float = 0.4
    link_share: float = 0.6
    block_share: float = 0.5
    matrix_rate: float = 0.01
    embedding_rate: float = 0.006
    vector_rate: float = 0.0015
    warm_up: int = 50
    average_every: int = 20
    advance_at: float = 0.85
    questions: int = 14
    language_weight: float = 0.2
    checkpoint_every: int = 100
    network: NetworkConfig = field(default_factory=NetworkConfig)

    @property
    def names_from(self) -> int:
        """The first step with names of every make."""
        return self.steps + self.block_steps

    @property
    def links_from(self) -> int:
        """The first step with facts that need the chunk before."""
        return self.names_from + self.name_steps

    @property
    def total_steps(self) -> int:
        """Steps of all phases."""
        return self.links_from + self.link_steps

    def rate(self, step: int) -> float:
        """Return the learning-rate factor of `step`."""
        if step >= self.links_from:
            done = (step - self.links_from) / max(1, self.link_steps)
            decay = 1 - max(0.0, done - self.link_decay_from) / (1 - self.link_decay_from)
            warm = min(1.0, (step - self.links_from + 1) / self.warm_up)
            return self.link_rate * warm * max(_FLOOR, decay)
        if step >= self.names_from:
            done = (step - self.names_from) / max(1, self.name_steps)
            return self.name_rate * max(_FLOOR, 1 - done)
        if step >= self.steps:
            done = (step - self.steps) / max(1, self.block_steps)
            return self.block_rate * max(_FLOOR, 1 - done)
        done = step / max(1, self.steps)
        decay = 1 - max(0.0, done - self.decay_from) / (1 - self.decay_from)
        return min(1.0, (step + 1) / self.warm_up) * max(_FLOOR, decay)
