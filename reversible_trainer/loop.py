"""The training loop: from blocks, optimizer and data to a run in a folder that can be stopped and resumed."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import functools
import json
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import gin
import jax
import numpy as np
from rich.console import Console

from reversible_trainer import checkpoint
from reversible_trainer.data import Batch, DataSet
from reversible_trainer.layers.base import Layer
from reversible_trainer.metrics import MetricsLog, Progress, Rate, Record, plot_losses
from reversible_trainer.optimizers import unmatched
from reversible_trainer.report import print_added, print_plan
from reversible_trainer.streaming import Placement
from reversible_trainer.trainer import Trainer
from reversible_trainer.tree import TrainState, path_name

_COUNTS = ("skipped_blocks", "optimizer_failures", "near_range_blocks", "mismatched_blocks")  # noted unless zero
_RECORD_EVERY = 100  # steps between those whose copies and programs are timed, which costs a little

configured_trainer = cast(type[Trainer], gin.external_configurable(Trainer, "Trainer"))
for _name in ("pinned", "shared", "disk"):  # Trainer.placement = @disk(), disk.folder = '/scratch'
    gin.external_configurable(getattr(Placement, _name), _name, module="placement")


@gin.configurable
def run(
    blocks: Sequence[Layer],
    optimizer: Callable[..., Any],
    data: DataSet,
    learning_rate: float | Callable[[int], Any],
    steps: int,
    batch_size: int,
    length: int | None = None,
    eval_every: int | None = None,
    checkpoint_every: int | None = None,
    seed: int = 0,
    output: str | os.PathLike[str] = "runs/run",
) -> Record:
    """Trains until `steps`, from the last checkpoint in `output` if there is one.

    Args:
      blocks: The model.
      optimizer: Factory, learning rate -> `optax.GradientTransformation`.
      data: Gives the batches.
      learning_rate: Number, or schedule from the steps done so far to a number.
      steps: Steps of the whole run.
      batch_size: Sequences, or images, per step.
      length: Tokens per sequence; None for data that are no sequences.
      eval_every: Steps between evaluations; there is always one at the end.
      checkpoint_every: Steps between checkpoints; there is always one at the end.
      seed: Of weights, dropout and data.
      output: Folder of the run: `checkpoints/`, `metrics.jsonl`, `tensorboard/`,
        `loss.png`, `config.gin` (what was configured), `operative_config.gin` (with all
        defaults) and `result.json`.

    Returns:
      The result, which is also printed, as one line of JSON: `step`; `loss`, mean of the
      last 20 steps; `first_loss`, of step 1 before any update; `eval_loss` and
      `eval_accuracy`, over everything held out; `tokens_per_second`, or images;
      `peak_accelerator_bytes`; `planned_accelerator_bytes`; `peak_host_bytes`. A finished
      run reports itself again. One that is interrupted (Ctrl-C) or terminated finishes its step,
      saves, and returns the first three without printing them.
    """
    numbers = (steps, batch_size, length, eval_every, checkpoint_every, seed)
    rates = check_settings(blocks, optimizer, data, learning_rate, *numbers)
    console, output = Console(stderr=True), prepared_folder(Path(output))
    say = functools.partial(console.print, highlight=False, soft_wrap=True)
    description = checkpoint.Description.of(blocks, optimizer, seed)
    with alone(output):
        saved = checkpoint.checkpoints(output / "checkpoints")
        done = _steps_done(saved, description, steps, output)
        if done == steps and (result := _stored_result(output)).get("step") == steps:
            say(f"{output}: all {steps} steps are done")
            print(json.dumps(result), flush=True)
            return result

        trainer = configured_trainer(blocks, optimizer)
        batch = data.batch(seed, 0, batch_size, length)
        check_vocabulary(trainer, data, batch)
        check_routes(trainer, batch)
        with console.status("compiling"):
            trainer.check_memory(batch)
            plan = trainer.plan(batch)
        print_plan(plan, console)
        if saved:
            place, expected = trainer.placement.to_host, trainer.init_signature(batch)
            path, state = checkpoint.newest(
                saved, lambda path: checkpoint.restore(path, expected, place, description), say
            )
            say(f"continuing from {path}")
            for line in _changed(checkpoint.read_manifest(path)["config"], gin.config_str()):
                say(f"  the configuration has changed: {line}")
        else:
            state = trainer.init(jax.random.key(seed), batch)
            print_added(trainer.added, console)
        done, unit = state.step, "tokens" if length else "images"
        with (
            contextlib.closing(MetricsLog(output, done)) as log,
            Progress(console, done, steps, unit) as progress,
            signals() as asked,
        ):
            here = _Run(trainer, data, batch_size, length, seed, output, description, log, progress, asked)
            state = here.train(state, rates, steps, eval_every, checkpoint_every)
            last = log.records[-1] if log.records else {}
            result = {
                "step": state.step,
                "loss": _mean([record["loss"] for record in log.records[-20:]]),
                "first_loss": next((record["loss"] for record in log.records if record["step"] == 1), None),
            }
            if state.step < steps:
                say(f"stopped by {asked[0]} after step {state.step} of {steps}; the same command goes on from there")
                return result
            held_out = last if "eval_loss" in last else here.evaluate(state)
            result |= {
                "eval_loss": held_out["eval_loss"],
                "eval_accuracy": held_out["eval_accuracy"],
                "tokens_per_second": here.rate.per_second,
                "peak_accelerator_bytes": trainer.ledger.peak_bytes or None,  # null if all steps were done before
                "planned_accelerator_bytes": plan.peak_accelerator_bytes,
                "peak_host_bytes": _peak_host_bytes(),
            }
        (output / "result.json").write_text(json.dumps(result) + "\n")
        print(json.dumps(result), flush=True)
        return result


@dataclasses.dataclass(frozen=True)
class _Run:
    """What the parts of a run share."""

    trainer: Trainer
    data: DataSet
    batch_size: int
    length: int | None
    seed: int
    output: Path
    description: checkpoint.Description
    log: MetricsLog
    progress: Progress
    asked: list[str]  # signals that ask it to stop
    rate: Rate = dataclasses.field(default_factory=Rate)

    def train(
        self,
        state: TrainState,
        rates: Callable[[int], Any],
        steps: int,
        eval_every: int | None,
        checkpoint_every: int | None,
    ) -> TrainState:
        """Steps until `steps`, evaluating and saving now and then and at the end."""
        waiting = None
        self.rate.resume()
        for step in range(state.step + 1, steps + 1):
            batch = self.data.batch(self.seed, step - 1, self.batch_size, self.length)
            learning_rate = rates(step - 1)
            # In the first step much else is done.
            records = step % _RECORD_EVERY == 2 and not self.trainer.placement.same_memory
            with self.trainer.recording() if records else contextlib.nullcontext() as recorder:
                state, metrics = self.trainer.step(state, batch, learning_rate)
            if waiting:  # the step before; reading the metrics of this one would wait for it
                self.log.write(self._record(*waiting))
            waiting = step, learning_rate, metrics, recorder and recorder.hidden_link_fraction
            evaluates, saves = (e and step % e == 0 or step == steps for e in (eval_every, checkpoint_every))
            if evaluates or saves or self.asked:
                record, waiting = self._record(*waiting), None
                self.log.write({**record, **self.evaluate(state)} if evaluates else record)
                if saves or self.asked:
                    self._save(state)
                if self.asked:
                    break
                self.rate.resume()
        return state

    def evaluate(self, state: TrainState) -> Record:
        """Evaluates on the held-out part."""
        found = evaluate(self.trainer, state, self.data.eval_batches(self.batch_size, self.length))
        loss, accuracy = found["eval_loss"], found["eval_accuracy"]
        self.progress.note(f"step {state.step}: held-out loss {loss:.4f}, accuracy {accuracy:.2%}")
        return found

    def _record(self, step: int, learning_rate: Any, metrics: dict[str, Any], hidden: float | None) -> Record:
        """Reads a step's metrics, which waits until it is done, and shows them."""
        loss, accuracy = float(metrics["loss"]), float(metrics["accuracy"])
        self.rate.add(self.batch_size * (self.length or 1))
        self.progress.show(step, loss, self.rate.per_second, self.trainer.ledger.peak_bytes)
        record = {"step": step, "loss": loss, "accuracy": accuracy, "learning_rate": float(learning_rate)}
        counts = {name: int(metrics[name]) for name in _COUNTS if name in metrics}
        if counts.get("near_range_blocks") and "near_range_blocks" not in (self.log.records or [{}])[-1]:
            self.progress.note(
                f"step {step}: {counts['near_range_blocks']} blocks leave fixed-point streams within a factor of 4 of "
                "their range. Use a smaller learning rate, norms, or fewer bits of ToFixedPoint.fraction."
            )
        record |= {name: count for name, count in counts.items() if count}
        record |= {name: float(metrics[name]) for name in ("drift",) if name in metrics}
        return record if hidden is None else {**record, "hidden_link_fraction": hidden}

    def _save(self, state: TrainState) -> None:
        self.log.sync()
        config = gin.config_str()
        checkpoint.save(self.output / "checkpoints", state, self.description, config)
        (self.output / "config.gin").write_text(config)
        (self.output / "operative_config.gin").write_text(gin.operative_config_str())
        plot_losses(self.log.records, self.output / "loss.png")


def evaluate(trainer: Trainer, state: TrainState, batches: Iterable[Batch]) -> Record:
    """Mean loss and accuracy over all that the batches weigh, without dropout."""
    metrics = [trainer.evaluate(state, batch) for batch in batches]  # read when all are under way
    loss, accuracy, weight = (np.array([m[name] for m in metrics]) for name in ("loss", "accuracy", "weight"))
    if not weight.sum():
        raise ValueError("evaluate: the data has nothing held out to evaluate on.")
    mean = {"eval_loss": loss, "eval_accuracy": accuracy}
    return {name: float(np.average(np.float64(value), weights=weight)) for name, value in mean.items()}


def generate(
    trainer: Trainer, state: TrainState, prompt: Sequence[int], length: int, temperature: float = 1.0, seed: int = 0
) -> Iterator[int]:
    """Tokens that continue `prompt`, without end.

    Args:
      trainer: Of a causal language model: what stands to the right of a position has no
        influence on it, so windows of one fixed length need one compilation.
      state: Its weights.
      prompt: Tokens, at least one.
      length: Of the window that the model sees.
      temperature: Logits are divided by it; 0 takes the likeliest token.
      seed: Of the choice.
    """
    generator = np.random.default_rng(seed)
    tokens = list(prompt)[-length:]
    while True:
        window = np.zeros((1, length), np.int32)
        window[0, : len(tokens)] = tokens
        logits = np.asarray(trainer.predict(state, (window,)), np.float64)[0, len(tokens) - 1]
        noise = generator.gumbel(size=logits.shape)  # the argmax of logits + Gumbel noise is a sample of their softmax
        token = int(np.argmax(logits + temperature * noise))
        tokens = [*tokens, token][-length:]
        yield token


def check_settings(
    blocks: Any,
    optimizer: Any,
    data: Any,
    learning_rate: Any,
    steps: Any,
    batch_size: Any,
    length: Any = None,
    eval_every: Any = None,
    checkpoint_every: Any = None,
    seed: Any = 0,
    output: Any = None,
) -> Callable[[int], Any]:
    """Refuses what `run` cannot use, and returns the learning rate as a function of the steps done."""
    if not isinstance(blocks, Sequence) or not all(isinstance(block, Layer) for block in blocks):
        raise TypeError(f"run.blocks must be a list of layers, as in @transformer_lm(); got {blocks!r}.")
    if not callable(optimizer):
        raise TypeError(f"run.optimizer must be a factory, as in @adam without parentheses; got {optimizer!r}.")
    if not isinstance(data, DataSet):
        raise TypeError(f"run.data must be a data set, as in @shakespeare(); got {data!r}.")
    for name, number in {"steps": steps, "batch_size": batch_size}.items():
        _check_whole(name, number, 1)
    for name, number in {"length": length, "eval_every": eval_every, "checkpoint_every": checkpoint_every}.items():
        _check_whole(name, 1 if number is None else number, 1)
    _check_whole("seed", seed, 0)
    if next(iter(data.eval_batches(batch_size, length)), None) is None:
        raise ValueError("run.data has nothing held out to evaluate on; hold some part of it out.")
    rates: Callable[[int], Any] = learning_rate if callable(learning_rate) else lambda step: learning_rate
    try:
        float(rates(0))
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"run.learning_rate must be a number, or a schedule as in @cosine_decay_schedule(); got {learning_rate!r} "
            f"({error})."
        ) from None
    return rates


def check_vocabulary(trainer: Trainer, data: DataSet, batch: Batch) -> None:
    """Refuses a model that does not know all of the data's tokens or classes."""
    known = trainer.predict_signature(batch).shape[-1]
    if known < data.vocab_size:
        name, noun = ("vocab_size", "tokens") if batch[1].ndim > 1 else ("classes", "classes")
        raise ValueError(
            f"run: the data has {data.vocab_size} {noun}, but the model predicts {known}. Set the model's "
            f"{name} to {data.vocab_size}."
        )


def check_routes(trainer: Trainer, batch: Batch) -> None:
    """Refuses a `route` with a rule for no weights at all: a misspelt pattern would silently do nothing."""
    state = trainer.init_signature(batch)
    if idle := unmatched(state.slots):
        named = {block.name: weights for block, weights in zip(trainer.blocks, state.weights, strict=True)}
        known = (path_name(path) for path, _ in jax.tree.leaves_with_path(named))
        raise ValueError(
            f"route: no weights match {', '.join(map(repr, idle))}. Mend or remove the rule; the paths are: "
            f"{', '.join(known)}."
        )


def _check_whole(name: str, value: Any, least: int) -> None:
    if type(value) is not int or value < least:
        raise ValueError(f"run.{name} must be a whole number, at least {least}; got {value!r}.")
    if value >= 2**31:
        raise ValueError(f"run.{name} must be below 2^31; got {value!r}.")


def prepared_folder(output: Path) -> Path:
    """An output folder, made and known to be writable."""
    try:
        output.mkdir(parents=True, exist_ok=True)
        probe = output / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ValueError(
            f"run: cannot write to the output folder {output}: {error.strerror}. Choose another."
        ) from None
    return output


@contextlib.contextmanager
def alone(output: Path) -> Iterator[None]:
    """While it lasts, no other run may write to the folder; the system forgets it when the process ends, however."""
    with open(output / ".lock", "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"run: another run is writing to {output}. Wait for it, stop it, or choose another output folder."
            ) from None
        yield


@contextlib.contextmanager
def signals() -> Iterator[list[str]]:
    """Names of the signals that have asked the process to stop; the second stops it at once."""
    asked: list[str] = []
    before = {}

    def ask(number: int, _frame: Any) -> None:
        asked.append(signal.Signals(number).name)
        for number, handler in before.items():
            signal.signal(number, handler)

    if threading.current_thread() is threading.main_thread():  # others may not
        before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _steps_done(saved: list[Path], description: checkpoint.Description, steps: int, output: Path) -> int:
    """Steps of the last checkpoint, which must be this run's."""
    if not saved:
        return 0
    path, manifest = checkpoint.newest(saved, checkpoint.read_manifest, lambda _: None)
    checkpoint.check(path, manifest, description)
    if manifest["step"] > steps:
        raise ValueError(
            f"run: {output} has done {manifest['step']} steps, more than run.steps = {steps}. "
            "Set run.steps higher to go on, or start afresh in another output folder."
        )
    return manifest["step"]


def _changed(old: str, new: str) -> list[str]:
    """The settings, `name = value`, of the new configuration that are not in the old one."""
    before = set(old.splitlines())
    return [line for line in new.splitlines() if " = " in line and line not in before]


def _stored_result(output: Path) -> Record:
    path = output / "result.json"
    return json.loads(path.read_text()) if path.exists() else {}


def _mean(values: list[float | None]) -> float | None:
    finite = [value for value in values if value is not None]
    return sum(finite) / len(finite) if finite else None


def _peak_host_bytes() -> int:
    """Largest resident set of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # KiB, but bytes on macOS
