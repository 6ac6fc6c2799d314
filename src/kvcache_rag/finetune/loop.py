"""The training loop: steps, rate, log, checkpoints, and stopping when asked to."""

from __future__ import annotations

import json
import signal
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import torch

from kvcache_rag.errors import InvalidInputError
from kvcache_rag.progress import progress_bar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    from torch import Tensor

    from kvcache_rag.finetune.checkpoint import Work
    from kvcache_rag.finetune.config import FinetuneConfig
    from kvcache_rag.finetune.feed import Feed, Portion
    from kvcache_rag.finetune.learner import Learner


class Lesson(Protocol):
    """What a portion teaches."""

    def __call__(self, portion: Portion) -> tuple[Tensor, int]:
        """Loss of one forward pass with gradients (a scalar), and its tokens without padding."""


class Trainer:
    """One run.

    Attributes:
        step: Steps done.
        tokens: Tokens seen, without padding.
        seconds: Time spent training, over all sittings.
        state: Everything else that a checkpoint keeps for the caller.
    """

    def __init__(
        self,
        config: FinetuneConfig,
        learner: Learner,
        feed: Feed,
        lesson: Lesson,
        work: Work,
        state: dict[str, Any],
    ) -> None:
        self.config, self._learner, self._feed = config, learner, feed
        self._lesson, self._work = lesson, work
        self.step = self.tokens = 0
        self.seconds = 0.0
        self.state = state
        self._trained = learner.trained
        self._optimizer = torch.optim.AdamW(
            self._trained.values(), lr=0.0, weight_decay=config.weight_decay
        )

    def resume(self) -> None:
        """Go on from the checkpoint."""
        saved = self._work.load()
        self.step, self.tokens, self.seconds = (
            saved[name] for name in ("step", "tokens", "seconds")
        )
        self.state = saved["state"]
        self._feed.state = saved["feed"]
        self._optimizer.load_state_dict(saved["optimizer"])
        with torch.no_grad():
            for name, parameter in self._trained.items():
                parameter.copy_(saved["weights"][name])
        self._work.cut_log(self.step)

    def save(self) -> None:
        """Write a checkpoint."""
        self._work.save(
            {
                "step": self.step,
                "tokens": self.tokens,
                "seconds": self.seconds,
                "state": self.state,
                "feed": dict(self._feed.state),
                "optimizer": self._optimizer.state_dict(),
                "weights": {name: value.detach() for name, value in self._trained.items()},
            }
        )

    def run(self, *, show_progress: bool) -> None:
        """Train to the last step.

        Raises:
            KeyboardInterrupt: If Ctrl-C was pressed; the step in progress is finished and saved
                first.  A second Ctrl-C stops at once.
            InvalidInputError: If the loss is no longer a number.
        """
        config = self.config
        self._learner.adapter.model.train()
        started = time.monotonic() - self.seconds
        with (
            progress_bar(config.steps, "fine-tuning", "step", show=show_progress) as bar,
            self._work.log.open("a", encoding="utf-8") as log,
            _interruptible() as interrupted,
        ):
            bar.update(self.step)
            while self.step < config.steps:
                line = self._step()
                self.step += 1
                self.seconds = time.monotonic() - started
                line = {"step": self.step, **line, "seconds": round(self.seconds, 3)}
                log.write(json.dumps(line) + "\n")
                log.flush()
                bar.set_postfix(loss=f"{line['loss']:.4f}", refresh=False)
                bar.update(1)
                if interrupted():
                    self.save()
                    raise KeyboardInterrupt
                if self.step % config.save_every == 0 or self.step == config.steps:
                    self.save()

    def _step(self) -> dict[str, Any]:
        config = self.config
        losses: dict[str, list[float]] = {}
        seen = 0
        for _ in range(config.accumulate):
            portion = self._feed.next()
            loss, tokens = self._lesson(portion)
            # The mean of means: a portion of few answers weighs as much as one of long texts.
            torch.autograd.backward(loss / config.accumulate)
            losses.setdefault(portion.kind, []).append(float(loss.detach()))
            seen += tokens
        self.tokens += seen
        norm = float(torch.nn.utils.clip_grad_norm_(self._trained.values(), config.clip))
        every = [one for kind in losses.values() for one in kind]
        mean = sum(every) / len(every)
        if norm != norm or mean != mean:
            raise InvalidInputError(
                f"the loss of step {self.step + 1} is not a number; remove {config.work_folder} "
                f"and begin anew with a lower rate than {config.highest_rate}"
            )
        rate = config.rate_at(self.step)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        by_kind = {kind: round(sum(each) / len(each), 6) for kind, each in losses.items()}
        return {"loss": mean, "by_kind": by_kind, "rate": rate, "norm": norm, "tokens": seen}


@contextmanager
def _interruptible() -> Iterator[Callable[[], bool]]:
    """Turn the first Ctrl-C into a flag, so that it falls between two steps."""
    pressed = threading.Event()

    def note(_number: int, _frame: FrameType | None) -> None:
        if pressed.is_set():
            raise KeyboardInterrupt
        pressed.set()

    if threading.current_thread() is not threading.main_thread():
        yield pressed.is_set  # signals reach the main thread only
        return
    before = signal.signal(signal.SIGINT, note)
    try:
        yield pressed.is_set
    finally:
        signal.signal(signal.SIGINT, before)
