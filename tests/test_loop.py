import json
import os
import signal
import types

import gin
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from reversible_trainer import checkpoint, loop
from reversible_trainer.data import ImageData, TextData
from reversible_trainer.metrics import MetricsLog, Rate, plot_losses
from reversible_trainer.models import rev_net, reversible_transformer_lm
from reversible_trainer.streaming import Placement
from reversible_trainer.tree import TrainState

TEXT = np.frombuffer(b"The quality of mercy is not strained. " * 40, np.uint8)
LABELS = np.arange(5, dtype=np.int32)
PICTURES = np.broadcast_to(LABELS[:, None, None, None].astype(np.float32), (5, 4, 4, 1))
IMAGES = ImageData(PICTURES, LABELS, PICTURES, LABELS)
KEYS = [
    *("step", "loss", "first_loss", "eval_loss", "eval_accuracy", "tokens_per_second"),
    *("peak_accelerator_bytes", "planned_accelerator_bytes", "peak_host_bytes"),
]


def blocks(dropout=0.1, heads=2):
    return reversible_transformer_lm(width=8, depth=1, heads=heads, ff_width=16, dropout=dropout)


def settings(output, **changes):
    data = TextData(TEXT[:1200], TEXT[1200:])
    always = {"optimizer": optax.adam, "data": data, "learning_rate": lambda step: 1e-2 / (1 + step)}
    sizes = {"steps": 5, "batch_size": 4, "length": 16, "eval_every": 2, "checkpoint_every": 2, "seed": 3}
    return {"blocks": blocks(), **always, **sizes, "output": output, **changes}


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that was never stopped: its folder and result."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, loop.run(**settings(folder))


def test_a_run_writes_its_results(whole):
    folder, result = whole
    assert list(result) == KEYS
    assert [record["step"] for record in lines(folder)] == [1, 2, 3, 4, 5]
    assert [record["step"] for record in lines(folder) if "eval_loss" in record] == [2, 4, 5]
    losses = [record["loss"] for record in lines(folder)]
    assert result["step"] == 5 and result["first_loss"] == losses[0] and result["loss"] == np.mean(losses)
    assert all(result[name] == lines(folder)[-1][name] for name in ("eval_loss", "eval_accuracy"))
    assert abs(result["first_loss"] - np.log(256)) < 1
    assert (
        0.9 * result["planned_accelerator_bytes"]
        < result["peak_accelerator_bytes"]
        <= result["planned_accelerator_bytes"]
    )
    assert [path.name for path in checkpoint.checkpoints(folder / "checkpoints")] == ["step_000004", "step_000005"]
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert list((folder / "tensorboard").glob("events*"))


def test_the_learning_rate_follows_its_schedule(whole):
    np.testing.assert_allclose([record["learning_rate"] for record in lines(whole[0])], 1e-2 / np.arange(1, 6))


def test_a_finished_run_reports_itself_again(whole, capsys):
    folder, result = whole
    assert loop.run(**settings(folder)) == result
    captured = capsys.readouterr()
    assert json.loads(captured.out) == result and "all 5 steps are done" in captured.err


class Killed(Exception):
    pass


class Stopping(TextData):
    """Data that kill the run when they are asked for a step."""

    def batch(self, seed, step, batch_size, length):
        if step == 3:
            raise Killed
        return super().batch(seed, step, batch_size, length)


def test_a_resumed_run_equals_the_one_that_never_stopped(whole, tmp_path, capsys):
    folder, result = whole
    data = Stopping(TEXT[:1200], TEXT[1200:])
    with pytest.raises(Killed):
        loop.run(**settings(tmp_path, data=data))
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 3, "loss": 1.0}\n{"step": 4, "lo')  # steps after the checkpoint, the last line cut off
    resumed = loop.run(**settings(tmp_path))
    assert "continuing from" in capsys.readouterr().err
    assert lines(tmp_path) == lines(folder)
    same = ("step", "loss", "first_loss", "eval_loss", "eval_accuracy")
    assert [resumed[name] for name in same] == [result[name] for name in same]
    sums = [checkpoint.read_manifest(path / "checkpoints" / "step_000005")["sha256"] for path in (folder, tmp_path)]
    assert sums[0] == sums[1]  # weights, slots, states and key, bit by bit


def test_a_damaged_checkpoint_costs_the_steps_since_the_one_before(whole, tmp_path, capsys):
    folder, result = whole
    loop.run(**settings(tmp_path))
    (tmp_path / "result.json").unlink()
    newest = tmp_path / "checkpoints" / "step_000005"
    (newest / "block_001.safetensors").write_bytes(b"")
    resumed = loop.run(**settings(tmp_path))
    said = capsys.readouterr().err
    assert "block_001.safetensors is damaged" in said and "step_000004" in said.split("continuing from")[1]
    assert lines(tmp_path) == lines(folder) and resumed["loss"] == result["loss"]


class Asking(TextData):
    """Data that ask the run to stop in its third step."""

    def batch(self, seed, step, batch_size, length):
        if step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().batch(seed, step, batch_size, length)


def test_a_run_that_is_asked_to_stop_finishes_its_step_and_saves(whole, tmp_path, capsys):
    before = signal.getsignal(signal.SIGTERM)
    stopped = loop.run(**settings(tmp_path, data=Asking(TEXT[:1200], TEXT[1200:])))
    assert stopped["step"] == 3 and signal.getsignal(signal.SIGTERM) is before
    captured = capsys.readouterr()
    assert "stopped by SIGTERM after step 3 of 5; the same command goes on" in captured.err and not captured.out
    resumed = loop.run(**settings(tmp_path))
    assert lines(tmp_path) == lines(whole[0]) and resumed["loss"] == whole[1]["loss"]


def test_two_runs_do_not_write_to_one_folder(tmp_path):
    with loop.alone(tmp_path), pytest.raises(ValueError, match="another run is writing to .*stop it, or choose"):
        loop.run(**settings(tmp_path))


def test_a_run_killed_before_its_result_was_written_makes_up_for_it(whole, tmp_path):
    folder, result = whole
    loop.run(**settings(tmp_path))
    (tmp_path / "result.json").unlink()
    again = loop.run(**settings(tmp_path))
    assert again["loss"] == result["loss"] and again["eval_loss"] == result["eval_loss"]
    assert again["peak_accelerator_bytes"] is None and again["tokens_per_second"] is None


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"steps": 3}, "has done 5 steps, more than run.steps = 3"),
        ({"seed": 4}, "made with seed 3, this run has seed 4"),
        ({"blocks": blocks(dropout=0.2)}, "another model: its block 0 says 'rate=0.1' where this one says 'rate=0.2'"),
        ({"optimizer": optax.sgd, "steps": 6}, "written by 'adam', this run uses 'sgd'"),
    ],
)
def test_the_folder_of_another_run_is_refused(whole, changes, message):
    with pytest.raises(ValueError, match=message):
        loop.run(**settings(whole[0], **changes))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"steps": 0}, "run.steps must be a whole number, at least 1; got 0"),
        ({"batch_size": "2"}, "run.batch_size must be a whole number, at least 1; got '2'"),
        ({"length": True}, "run.length must be a whole number"),
        ({"eval_every": 0}, "run.eval_every must be a whole number, at least 1; got 0"),
        ({"seed": -1}, "run.seed must be a whole number, at least 0; got -1"),
        ({"blocks": 3}, "run.blocks must be a list of layers"),
        ({"optimizer": optax.adam(1.0)}, "run.optimizer must be a factory"),
        ({"learning_rate": "fast"}, "run.learning_rate must be a number, or a schedule .* got 'fast'"),
        ({"data": "shakespeare"}, "run.data must be a data set"),
        ({"length": 5000}, "a window of length"),
        ({"length": None}, "set run.length"),
        ({"data": TextData(TEXT, TEXT[:0])}, "run.data has nothing held out to evaluate on"),
        ({"data": IMAGES}, "Leave run.length out"),
        ({"data": IMAGES, "length": None, "blocks": rev_net(2, 2, 0, 1)}, "5 classes, but the model predicts 2"),
        ({"output": "/proc/nowhere"}, "cannot write to the output folder /proc/nowhere"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_compiled(tmp_path, changes, message):
    with pytest.raises((ValueError, TypeError), match=message):
        loop.run(**{**settings(tmp_path), **changes})


def test_the_loop_never_waits_for_the_step_just_enqueued(tmp_path):
    events = []

    class Scalar:
        def __init__(self, step):
            self.step = step

        def __float__(self):
            events.append(f"read {self.step}")
            return 0.0

    class Trainer:
        ledger = types.SimpleNamespace(peak_bytes=0)
        placement = Placement.shared()

        def step(self, state, batch, learning_rate):
            events.append(f"step {state.step + 1}")
            scalar = Scalar(state.step + 1)
            metrics = {"loss": scalar, "accuracy": 0.0, "skipped_blocks": 0, "optimizer_failures": 0}
            return TrainState(state.step + 1, state.key, [], [], []), metrics

    log = types.SimpleNamespace(write=lambda record: None)
    progress = types.SimpleNamespace(show=lambda *figures: None)
    data = TextData(TEXT, TEXT)
    run = loop._Run(Trainer(), data, 1, 8, 0, tmp_path, None, log, progress, [])
    object.__setattr__(run, "evaluate", lambda state: events.append("evaluate") or {})
    object.__setattr__(run, "_save", lambda state: events.append("save"))
    run.train(TrainState(0, None, [], [], []), lambda step: 1.0, 4, eval_every=2, checkpoint_every=None)
    assert events == [
        *("step 1", "step 2", "read 1", "read 2", "evaluate"),
        *("step 3", "step 4", "read 3", "read 4", "evaluate", "save"),
    ]


class Counting:
    """A model that is sure of the successor of every token, and a trainer of it."""

    def __init__(self):
        self.windows = []

    def predict(self, state, inputs):
        (tokens,) = inputs
        self.windows.append(tokens[0].tolist())
        return 100.0 * (np.arange(256) == (tokens[..., None] + 1) % 256)

    def evaluate(self, state, batch):
        _, targets, mask = batch
        mean = (targets * mask).sum() / max(mask.sum(), 1)
        return {"loss": jnp.float32(mean), "accuracy": jnp.float32(0), "weight": jnp.float32(mask.sum())}


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_generation_slides_a_window_of_fixed_length(temperature):
    trainer = Counting()
    tokens = loop.generate(trainer, None, [7, 8], 4, temperature)
    assert [next(tokens) for _ in range(5)] == [9, 10, 11, 12, 13]
    assert trainer.windows == [[7, 8, 0, 0], [7, 8, 9, 0], [7, 8, 9, 10], [8, 9, 10, 11], [9, 10, 11, 12]]


def test_generation_samples_from_the_distribution():
    logits = np.log([0.7, 0.2, 0.1])
    trainer = types.SimpleNamespace(predict=lambda state, inputs: np.broadcast_to(logits, (1, 2, 3)))
    tokens = loop.generate(trainer, None, [0], 2, seed=1)
    counts = np.bincount([next(tokens) for _ in range(4000)], minlength=3)
    np.testing.assert_allclose(counts / 4000, [0.7, 0.2, 0.1], atol=0.03)  # 4 standard deviations


def test_evaluation_is_the_mean_over_tokens_not_over_batches():
    held_out = np.arange(11, dtype=np.uint8)
    found = loop.evaluate(Counting(), None, TextData(TEXT, held_out).eval_batches(2, 4))
    assert found["eval_loss"] == pytest.approx(5.0)
    with pytest.raises(ValueError, match="nothing held out"):
        loop.evaluate(Counting(), None, [(held_out, held_out, np.zeros(11, bool))])


def test_metrics_that_are_not_finite_are_null_and_steps_are_never_there_twice(tmp_path):
    log = MetricsLog(tmp_path, 0)
    for step in (1, 2, 3):
        log.write({"step": step, "loss": float("nan") if step == 2 else 1.0})
    log.close()
    assert lines(tmp_path)[1] == {"step": 2, "loss": None}
    log = MetricsLog(tmp_path, 2)
    log.write({"step": 3, "loss": 2.0})
    log.close()
    assert [record["loss"] for record in lines(tmp_path)] == [1.0, None, 2.0]
    plot_losses(log.records, tmp_path / "loss.png")
    assert [path.name for path in tmp_path.glob("*.png")] == ["loss.png"]


def test_pauses_do_not_count_for_the_rate(monkeypatch):
    now = iter([0.0, 0.0, 2.0, 100.0, 102.0])
    monkeypatch.setattr("reversible_trainer.metrics.time.perf_counter", lambda: next(now))
    rate = Rate()
    for _ in range(2):
        rate.resume()
        rate.add(8)
    assert rate.per_second == 4


def test_run_is_the_root_of_gin():
    assert gin.get_configurable("run") is not None and gin.get_configurable("Trainer") is not None
