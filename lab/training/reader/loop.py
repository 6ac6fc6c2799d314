"""The training loop of one worker: curriculum, learning rate, averaging, checkpoints."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch.nn import functional

from kvcache_rag_lab.reader.generator import READING
from kvcache_rag_lab.reader.language import INSTRUCTION
from training.reader.batches import IGNORED, read
from training.reader.data import BINDING, KEEPING, STAGES, training_batch
from training.reader.network import Network
from training.reader.tokenizer import BOS, PAD, WordEncoder, build_tokenizer
from training.reader.wiring import wire

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor
    from torch.optim import Optimizer

    from training.reader.batches import Batch
    from training.reader.settings import TrainConfig


_FORGET: Final = 0.95

_AFTER_ADVANCE: Final = 0.6

_SMALL_CONTEXT: Final = 9  # facts; larger contexts learn language only every fourth step


@dataclass
class Progress:
    """What changes while training, beside weights and optimiser."""

    step: int = 0
    stage: int = 0
    accuracy: float = 0.0
    tokens: int = 0
    seconds: float = 0.0


class Trainer:
    """One worker of a run; `directory` keeps checkpoints and the log."""

    def __init__(self, config: TrainConfig, rank: int, directory: Path) -> None:
        self.config, self.rank, self.directory = config, rank, directory
        self.progress = Progress()
        self.encoder = WordEncoder(build_tokenizer())
        self.prefix = [BOS, *self.encoder.encode(INSTRUCTION)]
        torch.manual_seed(config.seed)
        self.network = Network(config.network)
        wire(self.network)
        self.optimizers = make_optimizers(self.network, config)
        self._base = [[g["lr"] for g in o.param_groups] for o in self.optimizers]

    def run(self) -> None:
        """Train to the end, from the newest checkpoint if there is one."""
        self._resume()
        started = time.monotonic() - self.progress.seconds
        while self.progress.step < self.config.total_steps:
            self._step()
            self.progress.step += 1
            self.progress.seconds = time.monotonic() - started
            if self.progress.step % self.config.average_every == 0:
                self._average()
                self._advance()
            if self.progress.step % self.config.checkpoint_every == 0:
                self._save()
            self._keep()
        self._average()

    def _keep(self) -> None:
        """Keep the weights at the end of a phase."""
        config = self.config
        ends = {config.steps: "block", config.names_from: "names", config.links_from: "links"}
        if self.rank == 0 and self.progress.step in ends:
            name = f"before-{ends[self.progress.step]}.pt"
            torch.save(self.network.state_dict(), self.directory / name)

    def _step(self) -> None:
        config, progress = self.config, self.progress
        batch, blocked = self._batch()
        facts = STAGES[progress.stage][0] * STAGES[progress.stage][1]
        language = facts < _SMALL_CONTEXT or progress.step % 4 == 0
        with torch.autocast("cpu", torch.bfloat16):
            weight = config.language_weight if language else 0.0
            loss, accuracy = batch_loss(self.network, batch, weight)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        factor = config.rate(progress.step)
        for optimizer, rates in zip(self.optimizers, self._base, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        progress.tokens += batch.tokens
        progress.accuracy = _FORGET * progress.accuracy + (1 - _FORGET) * accuracy
        if self.rank == 0 and progress.step % 25 == 0:
            self._log(loss=round(float(loss.detach()), 4), block=blocked, rate=round(factor, 4))

    def _batch(self) -> tuple[Batch, bool]:
        config, step, stage = self.config, self.progress.step, self.progress.stage
        name = f"{config.seed}/{self.rank}/{step}"
        last = stage == len(STAGES) - 1
        # Deterministic, evenly spread and different on each worker.
        turn = (step + self.rank) * config.block_share
        linking = step >= config.links_from
        alternates = config.steps <= step and not linking
        blocked = alternates and int(turn) != int(turn + config.block_share)
        batch = training_batch(
            name,
            KEEPING if linking else READING if last else BINDING,
            STAGES[stage],
            self.encoder,
            self.prefix,
            questions=config.questions,
            block=blocked,
            wide=step >= config.names_from,
            linked=config.link_share if linking else 0.0,
        )
        return batch, blocked

    def _average(self) -> None:
        """Average parameters and accuracy over the workers."""
        if self.config.workers == 1:
            return
        parameters = list(self.network.parameters())
        with torch.no_grad():
            parts = [parameter.flatten() for parameter in parameters]
            flat = torch.cat([*parts, torch.tensor([self.progress.accuracy])])
            dist.all_reduce(flat)
            flat /= self.config.workers
            sizes = [part.numel() for part in parts]
            *averaged, accuracy = torch.split(flat, [*sizes, 1])
            for parameter, values in zip(parameters, averaged, strict=True):
                parameter.copy_(values.view_as(parameter))
        self.progress.accuracy = float(accuracy)

    def _advance(self) -> None:
        progress = self.progress
        if progress.accuracy > self.config.advance_at and progress.stage < len(STAGES) - 1:
            progress.stage += 1
            progress.accuracy = min(progress.accuracy, _AFTER_ADVANCE)

    def _log(self, **values: object) -> None:
        record = {**vars(self.progress), **values}
        with (self.directory / "log.jsonl").open("a") as log:
            log.write(json.dumps(record) + "\n")

    def _save(self) -> None:
        """Write this worker's checkpoint and drop those before the last but one."""
        state: dict[str, Any] = {
            "network": self.network.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "progress": vars(self.progress),
        }
        target = self.directory / f"worker{self.rank}-{self.progress.step:06d}.pt"
        partial = target.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(target)
        for old in sorted(self.directory.glob(f"worker{self.rank}-*.pt"))[:-2]:
            old.unlink()

    def _resume(self) -> None:
        """Load the newest step that every worker has saved."""
        saved = [
            {path.stem.partition("-")[2] for path in self.directory.glob(f"worker{rank}-*.pt")}
            for rank in range(self.config.workers)
        ]
        common = set.intersection(*saved)
        if self.config.workers > 1:
            dist.barrier()  # every worker has looked before any writes
        if not common:
            return
        state = torch.load(self.directory / f"worker{self.rank}-{max(common)}.pt")
        self.network.load_state_dict(state["network"])
        for optimizer, values in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(values)
        self.progress = Progress(**state["progress"])


def make_optimizers(network: Network, config: TrainConfig) -> list[Optimizer]:
    """Return Muon for the matrices and AdamW for the embedding and the vectors."""
    embedding = network.embed_tokens.weight
    rest = [parameter for parameter in network.parameters() if parameter is not embedding]
    matrices = [parameter for parameter in rest if parameter.dim() == 2]
    vectors = [parameter for parameter in rest if parameter.dim() < 2]
    muon = torch.optim.Muon(matrices, lr=config.matrix_rate, momentum=0.95, weight_decay=0.0)
    adamw = torch.optim.AdamW(
        [
            {"params": [embedding], "lr": config.embedding_rate},
            {"params": vectors, "lr": config.vector_rate},
        ],
        betas=(0.9, 0.98),
        weight_decay=0.0,
    )
    return [muon, adamw]


def batch_loss(network: Network, batch: Batch, language_weight: float) -> tuple[Tensor, float]:
    """Return the loss of the answers (plus the contexts' own) and the first-token accuracy."""
    asked, context = read(network, batch, hidden=language_weight > 0)
    chosen = batch.labels != IGNORED
    scores, labels = network.logits(asked[chosen]), batch.labels[chosen]
    loss = functional.cross_entropy(scores.float(), labels)
    first = chosen.clone()
    first[:, 1:] &= ~chosen[:, :-1]
    right = (scores.argmax(-1) == labels)[first[chosen]]
    if language_weight > 0:
        real = batch.ids[:, 1:] != PAD
        guesses = network.logits(context[:, :-1][real]).float()
        loss = loss + language_weight * functional.cross_entropy(guesses, batch.ids[:, 1:][real])
    return loss, float(right.float().mean())
