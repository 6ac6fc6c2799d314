"""Fine-tune a model, from loading to the finished folder."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import torch

from kvcache_rag.errors import InvalidInputError
from kvcache_rag.prompt.renderer import PromptRenderer
from kvcache_rag_lab.finetune.carried import Carried, CarriedFolder
from kvcache_rag_lab.finetune.learner import Learner, answer_loss, distillation_loss
from kvcache_rag_lab.finetune.loop import RunFolder, Trainer
from kvcache_rag_lab.finetune.packing import Feed, Portion
from kvcache_rag_lab.finetune.report import Measure, Report, measure
from kvcache_rag_lab.finetune.sources import Data, Encoded, Encoder, open_data

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from kvcache_rag_lab.finetune.config import FinetuneConfig


def finetune(config: FinetuneConfig, *, show_progress: bool = False) -> Report:
    """Fine-tune a model so that stitched chunks read like a full prefill.

    Calling it again with the same settings continues an interrupted run, which gives the same
    weights as an uninterrupted one.

    Args:
        config: Settings of the run.
        show_progress: Whether to show a bar.

    Returns:
        Measures before and after, also in `report.json` of the finished folder.

    Raises:
        InvalidInputError: If `config.out` exists, a file or the model cannot be used, the loss is
            not a number, or the work folder belongs to another run or holds other files.
        UnsupportedModelError: If the model's keys cannot be moved.
        MissingExtraError: If LoRA is requested and peft is not installed.
        KeyboardInterrupt: After Ctrl-C, once everything is saved.
    """
    config.check_folders()
    data = open_data(config.data, config.plain, seed=config.seed, holdout=config.holdout)
    work = RunFolder(config.work_folder)
    carried = None
    if config.checkpoint is not None:
        same = {**config.travelling_settings(), "data digest": data.digest}
        carried = CarriedFolder(config.checkpoint, same)
    with work.open({**config.settings(), "data digest": data.digest}) as unfinished:
        learner = Learner.load(config)
        run = _Run(config, learner, data, work, carried)
        return run.finished(unfinished, show_progress=show_progress)


class _Run:
    """The parts of a run, bound to each other."""

    def __init__(
        self,
        config: FinetuneConfig,
        learner: Learner,
        data: Data,
        work: RunFolder,
        carried: CarriedFolder | None,
    ) -> None:
        self._config, self._learner, self._data, self._work = config, learner, data, work
        self._carried = carried
        self._window = learner.adapter.window(None)
        templates = [replace(learner.template, system=one) for one in config.instructions]
        encoders = [
            Encoder(PromptRenderer(template, learner.tokenizer), learner.tokenizer)
            for template in templates or [learner.template]
        ]
        self._encoder = encoders[0]
        self._feed = Feed(config, data, encoders, self._window)

    def finished(self, unfinished: bool, *, show_progress: bool) -> Report:
        """Measure, train, measure, save."""
        config, learner = self._config, self._learner
        sets = self._held_out()
        torch.manual_seed(config.seed + 1)
        trainer = Trainer(config, learner, self._feed, self._lesson, self._work, self._carried)
        if unfinished:
            trainer.resume()
        carried = self._further(trainer.step)
        if carried is not None:
            trainer.take_up(carried)
        elif not unfinished:
            measures = self._measure(sets)
            trainer.state = {name: asdict(result) for name, result in measures.items()}
            trainer.save()
        trainer.run(show_progress=show_progress)
        learner.finish()
        report = Report(
            before={name: _measure_from(values) for name, values in trainer.state.items()},
            after=self._measure(sets),
            steps=trainer.step,
            tokens=trainer.tokens,
            seconds=trainer.seconds,
            skipped=self._feed.state["skipped"],
            data=self._data.described,
            settings=config.settings(),
        )
        learner.save(config.out, report.to_json(), [self._work.log])
        self._work.remove()
        return report

    def _further(self, step: int) -> Carried | None:
        """The travelling checkpoint, if it is beyond a step."""
        found = self._carried and self._carried.load()
        if not found or found.step <= step:
            return None
        if not self._config.resume:
            raise InvalidInputError(
                f"{self._config.checkpoint} holds a checkpoint of step {found.step}; say resume to "
                "go on from it, or name another folder"
            )
        return found

    def _lesson(self, portion: Portion) -> tuple[Tensor, int]:
        learner, samples = self._learner, portion.samples
        if self._config.objective == "answers":
            batch = learner.batch(samples)
            return answer_loss(learner.rounded_logits(batch), batch), batch.tokens
        if portion.kind == "plain":
            batch = learner.batch(samples)
            wanted = learner.untouched_logits(batch)
        else:
            lesson = learner.lesson(samples)
            batch, wanted = learner.batch(lesson.samples), lesson.logits
        loss = distillation_loss(learner.rounded_logits(batch), wanted, batch)
        return loss, batch.tokens

    def _held_out(self) -> dict[str, list[Encoded]]:
        """Held-out samples as ids; those that do not fit are left out."""
        data, encoder = self._data, self._encoder
        limit = min(self._config.batch_tokens, self._window)
        asked = self._fitting(map(encoder.qa, data.held_qa))
        sets = {"full": [sample.joined for sample in asked], "block": asked}
        if self._config.lora_tokens == "all":  # else nothing changes where no documents are
            texts = (encoder.plain(sample, limit) for sample in data.held_plain)
            free = self._fitting(map(encoder.qa, data.held_free))
            sets = {"plain": self._fitting(texts), "free": free, **sets}
        empty = [name for name, samples in sets.items() if not samples]
        if empty:
            raise InvalidInputError(
                f"nothing to measure with ({', '.join(empty)}): the samples kept out of training "
                f"do not fit into {limit} tokens; raise batch_tokens or give more data"
            )
        return sets

    def _fitting(self, samples: Iterable[Encoded | None]) -> list[Encoded]:
        return [sample for sample in samples if sample is not None and self._feed.fits(sample)]

    def _measure(self, held: dict[str, list[Encoded]]) -> dict[str, Measure]:
        return {
            name: measure(self._learner, samples, texts=name == "plain")
            for name, samples in held.items()
        }


def _measure_from(values: dict[str, Any]) -> Measure:
    return Measure(tuple(values["losses"]), tuple(values["exact"]))
