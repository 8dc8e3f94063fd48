"""The training loop: from blocks, optimizer and data to a run in a folder that can be stopped and resumed."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import functools
import itertools
import json
import math
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
from reversible_trainer.data import Batch, BatchesAhead, DataError, DataSet, Text
from reversible_trainer.layers.base import Layer
from reversible_trainer.metrics import MetricsLog, Progress, Rate, Record, plot_losses
from reversible_trainer.optimizers import averages, averaging, unmatched
from reversible_trainer.report import print_added, print_plan
from reversible_trainer.streaming import Placement
from reversible_trainer.trainer import Trainer
from reversible_trainer.tree import TrainState, path_name

_COUNTS = ("skipped_blocks", "optimizer_failures", "near_range_blocks", "mismatched_blocks")  # noted unless zero
_RECORD_EVERY = 100  # steps between those whose copies and programs are timed, which costs a little
_SAMPLED = {"length": 200, "temperature": 0.8}  # tokens, of the texts written during training
_SLOW_DATA = 0.1  # of the time; waiting longer for batches is worth a word

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
    keep: int = 2,
    average: float | None = None,
    sample_every: int | None = None,
    prompt: str = "\n",
    max_skipped: int = 10,
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
      eval_every: Steps between evaluations; there is always one at the end. A model that is better
        than all before it is saved, and kept until there is a better one.
      checkpoint_every: Steps between checkpoints; there is always one at the end. They are
        written while training goes on.
      seed: Of weights, dropout and data.
      output: Folder of the run: `checkpoints/`, `metrics.jsonl`, `tensorboard/`,
        `loss.png`, `config.gin` (what was configured), `operative_config.gin` (with all
        defaults), `samples.jsonl` and `result.json`.
      keep: Checkpoints to keep, besides the best one.
      average: If given, an exponential average of the weights with this decay per step, such as
        0.999, is kept among the slots; evaluations, samples and the commands `evaluate`,
        `sample` and `export` use it.
      sample_every: Steps between texts that the model writes, into `samples.jsonl` and onto the terminal.
      prompt: How these begin.
      max_skipped: Steps in a row with a loss or gradients that were not finite, after which the run stops.

    Returns:
      The result, which is also printed, as one line of JSON: `step`; `loss`, mean of the
      last 20 steps; `first_loss`, of step 1 before any update; `eval_loss`, `eval_accuracy`,
      `eval_perplexity` and for text `eval_bits_per_byte`, over everything held out;
      `tokens_per_second`, or images; `data_wait_fraction`, the part of the time in which
      batches were waited for; `peak_accelerator_bytes`; `planned_accelerator_bytes`; `peak_host_bytes`. A finished
      run reports itself again. One that is interrupted (Ctrl-C) or terminated finishes its step,
      saves, and returns the first three without printing them.

    Raises:
      DataError: If the data set fails in the middle of the run, which is saved before.
      FloatingPointError: After `max_skipped` steps; the last checkpoint is from before them.
      OSError: If a checkpoint cannot be written, as on a full disk; those before it are whole.
      ValueError: If settings are wrong or the run does not fit the memory.
    """
    numbers = (steps, batch_size, length, eval_every, checkpoint_every, seed)
    others = (output, keep, average, sample_every, prompt, max_skipped)
    rates = check_settings(blocks, optimizer, data, learning_rate, *numbers, *others)
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

        trainer = make_trainer(blocks, optimizer, average)
        batch = data.batch(seed, 0, batch_size, length)
        check_vocabulary(trainer, data, batch)
        check_routes(trainer, batch)
        with console.status("compiling"):
            trainer.check_memory(batch)
            plan = trainer.plan(batch)
        print_plan(plan, console)
        if saved:
            path, state = checkpoint.newest(saved, lambda path: _restore(path, trainer, batch, description, say), say)
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
            checkpoint.Writer(output / "checkpoints", description, keep) as writer,
            signals() as asked,
        ):
            here = _Run(trainer, data, batch_size, length, seed, output, log, progress, writer, asked, average)
            state = here.train(state, rates, steps, eval_every, checkpoint_every, sample_every, prompt, max_skipped)
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
            result |= {name: value for name, value in held_out.items() if name.startswith("eval_")}
            result |= {
                "tokens_per_second": here.rate.per_second,
                "data_wait_fraction": here.waited / here.rate.seconds if here.rate.seconds else None,
                "peak_accelerator_bytes": trainer.ledger.peak_bytes or None,  # null if all steps were done before
                "planned_accelerator_bytes": plan.peak_accelerator_bytes,
                "peak_host_bytes": _peak_host_bytes(),
            }
        (output / "result.json").write_text(json.dumps(result) + "\n")
        print(json.dumps(result), flush=True)
        return result


def make_trainer(blocks: Sequence[Layer], optimizer: Callable[..., Any], average: float | None = None) -> Trainer:
    """The trainer of a run, as gin has configured it."""
    return configured_trainer(blocks, optimizer if average is None else averaging(optimizer, average))


@dataclasses.dataclass
class _Run:
    """What the parts of a run share.

    Attributes:
      asked: Signals that ask it to stop.
      skipped: Steps in a row, up to the last one, in which something was not finite.
      waited: Seconds in which batches were waited for.
      told_slow: Whether a note has said that this is long.
    """

    trainer: Trainer
    data: DataSet
    batch_size: int
    length: int | None
    seed: int
    output: Path
    log: MetricsLog
    progress: Progress
    writer: checkpoint.Writer
    asked: list[str]
    average: float | None
    rate: Rate = dataclasses.field(default_factory=Rate)
    skipped: int = 0
    waited: float = 0.0
    told_slow: bool = False

    def train(
        self,
        state: TrainState,
        rates: Callable[[int], Any],
        steps: int,
        eval_every: int | None,
        checkpoint_every: int | None,
        sample_every: int | None,
        prompt: str,
        max_skipped: int,
    ) -> TrainState:
        """Steps until `steps`, evaluating, saving and sampling now and then and at the end."""
        waiting = None
        coming = range(state.step, steps)
        with BatchesAhead(self.data, self.seed, self.batch_size, self.length, coming) as batches:
            self.rate.resume()
            for step in range(state.step + 1, steps + 1):
                try:
                    batch = batches.next()
                except DataError:
                    if waiting:
                        self.log.write(self._record(*waiting))
                    self._save(state)
                    raise
                learning_rate = rates(step - 1)
                self.writer.check()
                # In the first step much else is done.
                records = step % _RECORD_EVERY == 2 and not self.trainer.placement.same_memory
                with self.trainer.recording() if records else contextlib.nullcontext() as recorder:
                    state, metrics = self.trainer.step(state, batch, learning_rate, self.writer.wait_for)
                if waiting:  # the step before; reading the metrics of this one would wait for it
                    self.log.write(self._record(*waiting))
                waiting = step, learning_rate, metrics, recorder and recorder.hidden_link_fraction
                self._note_slow_data(batches.waited, step)
                evaluates, saves, samples = (
                    bool(every) and step % every == 0 for every in (eval_every, checkpoint_every, sample_every)
                )
                last = step == steps
                evaluates, saves = evaluates or last, saves or last
                if evaluates or saves or samples or self.asked or self.skipped:
                    record, waiting = self._record(*waiting), None
                    before = [r["eval_loss"] for r in self.log.records if r.get("eval_loss") is not None]
                    found = self.evaluate(state) if evaluates else {}
                    self.log.write(record | found)
                    if self.skipped >= max_skipped:
                        raise FloatingPointError(self._not_finite(step))
                    if samples:
                        self._sample(state, prompt)
                    improved = evaluates and eval_every and found["eval_loss"] < min(before, default=float("inf"))
                    # Among skipped steps nothing is saved: the last checkpoint is one to go on from.
                    if (saves or improved) and not self.skipped or last or self.asked:
                        self._save(state, found.get("eval_loss"))
                    if self.asked:
                        break
                    self.rate.resume()
        self.writer.finish()
        return state

    def evaluate(self, state: TrainState) -> Record:
        """Evaluates on the held-out part."""
        state = state if self.average is None else averages(state)
        found = evaluate(self.trainer, state, self.data.eval_batches(self.batch_size, self.length), self.data)
        self.progress.note(f"step {state.step}: held-out {described(found)}")
        return found

    def _record(self, step: int, learning_rate: Any, metrics: dict[str, Any], hidden: float | None) -> Record:
        """Reads a step's metrics, which waits until it is done, and shows them."""
        loss = float(metrics["loss"])
        self.rate.add(self.batch_size * (self.length or 1))
        self.progress.show(step, loss, self.rate.per_second, self.trainer.ledger.peak_bytes)
        counted = {name: float(metrics[name]) for name in _metric_names(self.trainer)}
        record = {"step": step, "loss": loss, **counted, "learning_rate": float(learning_rate)}
        counts = {name: int(metrics[name]) for name in _COUNTS if name in metrics}
        if counts.get("near_range_blocks") and "near_range_blocks" not in (self.log.records or [{}])[-1]:
            self.progress.note(
                f"step {step}: {counts['near_range_blocks']} blocks leave fixed-point streams within a factor of 4 of "
                "their range. Use a smaller learning rate, norms, or fewer bits of ToFixedPoint.fraction."
            )
        bad = not math.isfinite(loss) or bool(counts.get("skipped_blocks"))
        if bad and not self.skipped:
            self.progress.note(f"step {step}: the loss ({loss:g}) or gradients were not finite; blocks are not updated")
        self.skipped = self.skipped + 1 if bad else 0
        record |= {name: count for name, count in counts.items() if count}
        record |= {name: float(metrics[name]) for name in ("drift",) if name in metrics}
        return record if hidden is None else {**record, "hidden_link_fraction": hidden}

    def _not_finite(self, step: int) -> str:
        self.writer.finish()
        saved = checkpoint.checkpoints(self.output / "checkpoints")
        go_on = f"the last good checkpoint is {saved[-1]}" if saved else "there is no checkpoint yet"
        return (
            f"run: in {self.skipped} steps in a row, up to step {step}, the loss or gradients were not finite, so "
            f"blocks were not updated; {go_on}. Use a smaller run.learning_rate or Trainer.clip_per_block, and start "
            "the same command again."
        )

    def _note_slow_data(self, waited: float, step: int) -> None:
        """Says once if batches are made too slowly."""
        self.waited, since = waited, self.rate.seconds
        if step % 20 == 0 and waited > _SLOW_DATA * since > 0 and not self.told_slow:
            self.told_slow = True
            self.progress.note(
                f"step {step}: {waited / since:.0%} of the time was spent waiting for batches of "
                f"{type(self.data).__name__}"
            )

    def _sample(self, state: TrainState, prompt: str) -> None:
        """Lets the model write, onto the terminal and into `samples.jsonl`."""
        assert isinstance(self.data, Text) and self.length
        tokens = self.data.encode(prompt).tolist()
        state = state if self.average is None else averages(state)
        written = generate(self.trainer, state, tokens, self.length, _SAMPLED["temperature"], self.seed)
        text = self.data.decode([*tokens, *itertools.islice(written, _SAMPLED["length"])])
        self.progress.note(f"step {state.step}: it writes\n{text}")
        with open(self.output / "samples.jsonl", "a") as file:
            file.write(json.dumps({"step": state.step, "text": text}) + "\n")

    def _save(self, state: TrainState, eval_loss: float | None = None) -> None:
        self.log.sync()
        config = gin.config_str()
        self.writer.save(state, self.trainer.update_order, config, eval_loss)
        (self.output / "config.gin").write_text(config)
        (self.output / "operative_config.gin").write_text(gin.operative_config_str())
        try:
            plot_losses(self.log.records, self.output / "loss.png")
        except OSError as error:  # it is drawn again, and no checkpoint is given up for it
            self.progress.note(f"step {state.step}: loss.png cannot be written: {error.strerror}")


def evaluate(trainer: Trainer, state: TrainState, batches: Iterable[Batch], data: Any = None) -> Record:
    """Mean loss and other metrics over all that the batches weigh, without dropout.

    Args:
      trainer: Of the model.
      state: Its weights.
      batches: What to evaluate on.
      data: The data set; if it is text there are `eval_bits_per_byte`.
    """
    metrics = [trainer.evaluate(state, batch) for batch in batches]  # read when all are under way
    weight = np.array([m["weight"] for m in metrics])
    if not weight.sum():
        raise ValueError("evaluate: the data has nothing held out to evaluate on.")
    means = {
        f"eval_{name}": float(np.average(np.array([m[name] for m in metrics], np.float64), weights=weight))
        for name in ("loss", *_metric_names(trainer))
    }
    loss = means["eval_loss"]
    means["eval_perplexity"] = float(np.exp(min(loss, 700)))  # the largest float is exp(709)
    if isinstance(data, Text):
        means["eval_bits_per_byte"] = loss / math.log(2) / data.bytes_per_token
    return means


def described(found: Record) -> str:
    """An evaluation as a person would say it.

    Example:
      >>> described({"eval_loss": 1.5, "eval_accuracy": 0.5, "eval_perplexity": 4.482, "eval_bits_per_byte": 2.164})
      'loss 1.5000, accuracy 50.00%, perplexity 4.482, bits per byte 2.164'
    """
    forms = {"loss": ".4f", "accuracy": ".2%"}
    named = ((name.removeprefix("eval_"), value) for name, value in found.items())
    return ", ".join(f"{name.replace('_', ' ')} {value:{forms.get(name, '.4g')}}" for name, value in named)


def _metric_names(trainer: Trainer) -> tuple[str, ...]:
    """What the loss layer counts besides the loss, such as the accuracy."""
    loss: Any = trainer.blocks[-1]
    return loss.metric_names


def generate(
    trainer: Trainer,
    state: TrainState,
    prompt: Sequence[int],
    length: int,
    temperature: float = 1.0,
    seed: int = 0,
    top_k: int | None = None,
    top_p: float = 1.0,
) -> Iterator[int]:
    """Tokens that continue `prompt`, without end.

    Args:
      trainer: Of a causal language model: what stands to the right of a position has no
        influence on it, so windows of one fixed length need one compilation. If its weights fit
        the accelerator they stay there, else they are streamed for every token.
      state: Its weights.
      prompt: Tokens, at least one.
      length: Of the window that the model sees.
      temperature: Logits are divided by it; 0 takes the likeliest token.
      seed: Of the choice.
      top_k: Only the so many likeliest tokens are chosen from.
      top_p: Only the likeliest tokens that together have this probability are chosen from.
    """
    random, held = np.random.default_rng(seed), trainer.reside(state)
    tokens = list(prompt)[-length:]
    while True:
        window = np.zeros((1, length), np.int32)
        window[0, : len(tokens)] = tokens
        logits = np.asarray(trainer.predict(held, (window,))[0, len(tokens) - 1], np.float64)
        token = choose(logits, random, temperature, top_k, top_p)
        tokens = [*tokens, token][-length:]
        yield token


def choose(
    logits: np.ndarray, random: np.random.Generator, temperature: float, top_k: int | None = None, top_p: float = 1.0
) -> int:
    """One token at random; see `generate`.

    Example:
      >>> logits, random = np.log([0.1, 0.2, 0.3, 0.4]), np.random.default_rng(0)
      >>> {choose(logits, random, 1.0, top_k=2) for _ in range(100)} == {2, 3}
      True
      >>> {choose(logits, random, 1.0, top_p=0.6) for _ in range(100)} == {2, 3}
      True
      >>> choose(logits, random, temperature=0)
      3
    """
    order = np.argsort(-logits, kind="stable")[:top_k]
    if not temperature:
        return int(order[0])
    scaled = (logits[order] - logits[order[0]]) / temperature
    odds = np.exp(scaled)
    before = np.cumsum(odds) - odds  # of those that are likelier
    odds = np.where(before < top_p * odds.sum(), odds, 0)
    return int(random.choice(order, p=odds / odds.sum()))


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
    keep: Any = 2,
    average: Any = None,
    sample_every: Any = None,
    prompt: Any = "\n",
    max_skipped: Any = 10,
) -> Callable[[int], Any]:
    """Refuses what `run` cannot use, and returns the learning rate as a function of the steps done."""
    if not isinstance(blocks, Sequence) or not all(isinstance(block, Layer) for block in blocks):
        raise TypeError(f"run.blocks must be a list of layers, as in @transformer_lm(); got {blocks!r}.")
    if not callable(optimizer):
        raise TypeError(f"run.optimizer must be a factory, as in @adam without parentheses; got {optimizer!r}.")
    if not isinstance(data, DataSet):
        raise TypeError(f"run.data must be a data set, as in @shakespeare(); got {data!r}.")
    for name, number in {"steps": steps, "batch_size": batch_size, "keep": keep, "max_skipped": max_skipped}.items():
        _check_whole(name, number, 1)
    every = {"eval_every": eval_every, "checkpoint_every": checkpoint_every, "sample_every": sample_every}
    for name, number in {"length": length, **every}.items():
        _check_whole(name, 1 if number is None else number, 1)
    _check_whole("seed", seed, 0)
    if average is not None and not (isinstance(average, int | float) and 0 <= average < 1):
        raise ValueError(f"run.average must be a decay from 0 to below 1, such as 0.999; got {average!r}.")
    if not isinstance(prompt, str) or not prompt:
        raise ValueError(f"run.prompt must be a text that is not empty; got {prompt!r}.")
    if sample_every and not (isinstance(data, Text) and length):
        raise ValueError(f"run.sample_every needs text as data, and run.length; got {type(data).__name__}.")
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


def _restore(
    path: Path, trainer: Trainer, batch: Batch, description: checkpoint.Description, say: Callable[[str], None]
) -> TrainState:
    """A checkpoint; with slots of their own if it has those of another optimizer."""
    expected, place = trainer.init_signature(batch), trainer.placement.to_host
    try:
        return checkpoint.restore(path, expected, place, description)
    except checkpoint.SlotsError as error:
        say(f"{path}: weights are taken over, slots begin afresh, as this is another optimizer. {error}")
        state = checkpoint.restore(path, expected, place, description, ("weights", "states"))
        return trainer.new_slots(state, batch)


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
