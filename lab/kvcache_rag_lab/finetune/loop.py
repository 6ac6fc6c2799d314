"""The training loop, and the folder from which a stopped run continues, bit for bit.

`Trainer` takes steps: rate, log, checkpoints, and stopping when asked to.  `RunFolder` keeps what
it needs to go on: weights, optimiser, random states, place in the data.  What another machine goes
on from is in `carried`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO, Final, Protocol

import torch

from kvcache_rag.errors import InvalidInputError
from kvcache_rag.progress import progress_bar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path
    from types import FrameType

    from torch import Tensor

    from kvcache_rag_lab.finetune.carried import Carried, CarriedFolder
    from kvcache_rag_lab.finetune.config import FinetuneConfig
    from kvcache_rag_lab.finetune.learner import Learner
    from kvcache_rag_lab.finetune.packing import Feed, Portion


_LOCK: Final = "lock"

RESUMED_WARM_UP: Final = 10
"""Steps in which the rate rises again where the optimiser's moments begin anew."""


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
        taken_up: The step at which the run was taken up on this machine without its moments; None
            where it began here.
    """

    def __init__(
        self,
        config: FinetuneConfig,
        learner: Learner,
        feed: Feed,
        lesson: Lesson,
        work: RunFolder,
        carried: CarriedFolder | None = None,
    ) -> None:
        self.config, self._learner, self._feed = config, learner, feed
        self._lesson, self._work, self._carried = lesson, work, carried
        self.step = self.tokens = 0
        self.seconds = 0.0
        self.state: dict[str, Any] = {}
        self.taken_up: int | None = None
        self._trained = learner.trained
        self._optimizer = torch.optim.AdamW(
            self._trained.values(), lr=0.0, weight_decay=config.weight_decay
        )

    def resume(self) -> None:
        """Go on from the checkpoint."""
        saved = self._work.load()
        self._take(saved)
        self.taken_up = saved.get("taken_up")
        self._optimizer.load_state_dict(saved["optimizer"])
        with torch.no_grad():
            for name, parameter in self._trained.items():
                parameter.copy_(saved["weights"][name])
        self._work.cut_log(self.step)

    def take_up(self, carried: Carried) -> None:
        """Go on from a travelling checkpoint, with new moments."""
        self._take(carried.progress)
        self.taken_up = self.step
        torch.manual_seed(self.config.seed + 1 + self.step)
        self._learner.load_adapter_weights(carried.weights)
        self._work.log.write_text(carried.log, encoding="utf-8")
        self._work.cut_log(self.step)

    def _take(self, saved: Mapping[str, Any]) -> None:
        self.step, self.tokens, self.seconds = (
            saved[name] for name in ("step", "tokens", "seconds")
        )
        self.state = saved["state"]
        self._feed.state = saved["feed"]

    def save(self) -> None:
        """Write all checkpoints."""
        progress = {
            "step": self.step,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "state": self.state,
            "feed": dict(self._feed.state),
        }
        self._work.save(
            {
                **progress,
                "taken_up": self.taken_up,
                "optimizer": self._optimizer.state_dict(),
                "weights": {name: value.detach() for name, value in self._trained.items()},
            }
        )
        if self._carried is not None:
            log = self._work.log.read_text(encoding="utf-8") if self._work.log.exists() else ""
            self._carried.save(self._learner, progress, log)

    def rate(self) -> float:
        """Learning rate of the next step: the schedule's, but for a warm-up of new moments."""
        rate = self.config.rate_at(self.step)
        if self.taken_up is None:
            return rate
        return rate * min(1.0, (self.step - self.taken_up + 1) / RESUMED_WARM_UP)

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
        every = [value for kind in losses.values() for value in kind]
        mean = sum(every) / len(every)
        if norm != norm or mean != mean:
            raise InvalidInputError(
                f"the loss of step {self.step + 1} is not a number; remove {config.work_folder} "
                f"and begin anew with a lower rate than {config.highest_rate}"
            )
        rate = self.rate()
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


@dataclass(frozen=True)
class RunFolder:
    """The folder of an unfinished run."""

    folder: Path

    @property
    def log(self) -> Path:
        """JSON lines, one per step."""
        return self.folder / "training_log.jsonl"

    @property
    def _checkpoint(self) -> Path:
        return self.folder / "checkpoint.pt"

    @property
    def _settings(self) -> Path:
        return self.folder / "settings.json"

    @contextmanager
    def open(self, settings: dict[str, Any]) -> Iterator[bool]:
        """Make the folder, or take up the run in it; True if there is a checkpoint.

        No other process can open it meanwhile.  A run that failed before its first checkpoint (a
        model that does not load) has done nothing that other settings could spoil.

        Raises:
            InvalidInputError: If it belongs to a run with other settings or data or to one that is
                still going on, holds other files, or is damaged.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        if not self._settings.exists() and any(self._foreign()):
            raise InvalidInputError(
                f"{self.folder} holds other files; name an empty folder, or a new one, for the "
                "work in progress"
            )
        with self._alone():
            unfinished = self._checkpoint.exists()
            if unfinished:
                self._compare(settings)
            else:
                self._replace(self._settings, json.dumps(settings, indent=2).encode())
                self.log.unlink(missing_ok=True)
            yield unfinished

    def _compare(self, settings: dict[str, Any]) -> None:
        try:
            known = dict(json.loads(self._settings.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise InvalidInputError(
                f"{self._settings} is damaged; remove {self.folder} to begin anew"
            ) from error
        other = [name for name in settings if known.get(name) != settings[name]]
        if other:
            raise InvalidInputError(
                f"{self.folder} holds an unfinished run with another {', '.join(other)}; "
                "go on with its settings, remove the folder, or choose another output"
            )

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold a lock that the system gives back however this process ends."""
        with (self.folder / _LOCK).open("ab") as file:
            try:
                _lock(file)
            except OSError as error:
                raise InvalidInputError(
                    f"another run is at work in {self.folder}; wait for it or choose another output"
                ) from error
            yield

    def _foreign(self) -> Iterator[Path]:
        """What is in the folder and not ours."""
        ours = {path.name for path in (self.log, self._checkpoint, self._settings)}
        known = {_LOCK, *ours, *(f"{name}.partial" for name in ours), "checkpoint.partial"}
        return (path for path in self.folder.iterdir() if path.name not in known)

    def save(self, state: dict[str, Any]) -> None:
        """Replace the checkpoint; a crash leaves the old one or the new one."""
        partial = self._checkpoint.with_suffix(".partial")
        torch.save({**state, "random": _random_states()}, partial)
        _sync(partial)
        os.replace(partial, self._checkpoint)

    def load(self) -> dict[str, Any]:
        """The newest checkpoint; puts the random states back.

        Raises:
            InvalidInputError: If the file is damaged.
        """
        try:
            state: dict[str, Any] = torch.load(
                self._checkpoint, map_location="cpu", weights_only=True
            )
        except Exception as error:  # torch raises what it likes for a damaged file
            raise InvalidInputError(
                f"{self._checkpoint} is damaged; remove {self.folder} to begin anew"
            ) from error
        _restore(state.pop("random"))
        return state

    def cut_log(self, step: int) -> None:
        """Forget the lines of steps behind the checkpoint: they will be run again."""
        if not self.log.exists():
            return
        lines = self.log.read_text(encoding="utf-8").splitlines(keepends=True)
        kept = [line for line in lines if line.endswith("\n") and _step_of(line) <= step]
        self._replace(self.log, "".join(kept).encode())

    def remove(self) -> None:
        """Remove the folder of a finished run; if files of others came into it, it stays."""
        foreign = set(self._foreign())
        for path in self.folder.iterdir():
            if path not in foreign:
                path.unlink(missing_ok=True)
        if not foreign:
            self.folder.rmdir()

    def _replace(self, path: Path, content: bytes) -> None:
        partial = path.with_name(path.name + ".partial")
        partial.write_bytes(content)
        os.replace(partial, path)


def _step_of(line: str) -> int:
    """Step of a line of the log; beyond all of them for a damaged one, which is dropped."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, TypeError, KeyError):
        return sys.maxsize


def _lock(file: BinaryIO) -> None:
    """Lock a file, at once or not at all; where there is no `fcntl`, two runs are not told apart.

    Raises:
        OSError: If another process holds it.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        return
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _random_states() -> dict[str, Any]:
    states: dict[str, Any] = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def _restore(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(states["cuda"])
