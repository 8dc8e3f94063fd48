import json
import os
import shutil
import signal
import time
import types

import gin
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from reversible_trainer import checkpoint, loop
from reversible_trainer.data import DataError, ImageData, TextData
from reversible_trainer.metrics import MetricsLog, Rate, plot_losses
from reversible_trainer.models import rev_net, reversible_transformer_lm
from reversible_trainer.streaming import Placement
from reversible_trainer.tree import TrainState

TEXT = np.frombuffer(b"The quality of mercy is not strained. " * 40, np.uint8)
LABELS = np.arange(5, dtype=np.int32)
PICTURES = np.broadcast_to(LABELS[:, None, None, None].astype(np.float32), (5, 4, 4, 1))
IMAGES = ImageData(PICTURES, LABELS, PICTURES, LABELS)
KEYS = [
    *("step", "loss", "first_loss", "eval_loss", "eval_accuracy", "eval_perplexity", "eval_bits_per_byte"),
    *("tokens_per_second", "data_wait_fraction"),
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
    assert result["eval_perplexity"] == np.exp(result["eval_loss"])
    assert result["eval_bits_per_byte"] == result["eval_loss"] / np.log(2)
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


def rate_that(does):
    """The learning rate of `settings`, which does something when it is asked for in the fourth step."""

    def rate(step):
        if step == 3:
            does()
        return 1e-2 / (1 + step)

    return rate


def killed():
    raise Killed


def test_a_resumed_run_equals_the_one_that_never_stopped(whole, tmp_path, capsys):
    folder, result = whole
    with pytest.raises(Killed):
        loop.run(**settings(tmp_path, learning_rate=rate_that(killed)))
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


def test_a_run_that_is_asked_to_stop_finishes_its_step_and_saves(whole, tmp_path, capsys):
    before = signal.getsignal(signal.SIGTERM)
    rate = rate_that(lambda: os.kill(os.getpid(), signal.SIGTERM))
    stopped = loop.run(**settings(tmp_path, learning_rate=rate))
    assert stopped["step"] == 4 and signal.getsignal(signal.SIGTERM) is before
    captured = capsys.readouterr()
    assert "stopped by SIGTERM after step 4 of 5; the same command goes on" in captured.err and not captured.out
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


def test_another_optimizer_keeps_the_weights_and_says_so(whole, tmp_path, capsys):
    shutil.copytree(whole[0], tmp_path, dirs_exist_ok=True)
    result = loop.run(**settings(tmp_path, optimizer=optax.sgd, steps=6, learning_rate=0.0))
    said = capsys.readouterr().err
    assert "weights are taken over, slots begin afresh, as this is another optimizer" in said
    assert "written by 'adam', this run uses 'sgd'" in said
    assert result["step"] == 6 and result["eval_loss"] == whole[1]["eval_loss"]  # at a learning rate of 0


def test_the_best_checkpoint_is_kept(tmp_path):
    """Held-out losses rise, since the steps go uphill."""
    changes = {"optimizer": lambda rate: optax.sgd(-rate), "learning_rate": 0.1, "eval_every": 1, "keep": 1}
    result = loop.run(**settings(tmp_path, **changes, checkpoint_every=1))
    losses = [record["eval_loss"] for record in lines(tmp_path)]
    assert losses == sorted(losses)
    found = checkpoint.checkpoints(tmp_path / "checkpoints")
    assert [path.name for path in found] == ["step_000001", "step_000005"]
    assert checkpoint.best_of(found) == found[0]
    assert checkpoint.read_manifest(found[1])["eval_loss"] == losses[-1] == result["eval_loss"]


def test_an_evaluation_better_than_all_before_is_saved(tmp_path):
    loop.run(**settings(tmp_path, eval_every=1, checkpoint_every=None, keep=9))
    losses = [record["eval_loss"] for record in lines(tmp_path)]
    assert losses == sorted(losses, reverse=True)
    assert len(checkpoint.checkpoints(tmp_path / "checkpoints")) == 5


def test_average_weights_are_evaluated_and_saved(whole, tmp_path):
    """With a decay of 0 they are the weights themselves; the updates are the same in any case."""
    for decay in (0.0, 0.9):
        folder = tmp_path / str(decay)
        result = loop.run(**settings(folder, average=decay))
        assert [r["loss"] for r in lines(folder)] == [r["loss"] for r in lines(whole[0])]
        assert (result["eval_loss"] == whole[1]["eval_loss"]) == (decay == 0)
        assert result["eval_loss"] > whole[1]["eval_loss"] - 1e-9  # of so short a run the average is of worse weights


def test_texts_are_written_during_training(tmp_path, capsys):
    loop.run(**settings(tmp_path, sample_every=2, prompt="The "))
    samples = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert [sample["step"] for sample in samples] == [2, 4]
    assert all(sample["text"].startswith("The ") and len(sample["text"]) > 100 for sample in samples)
    assert "step 2: it writes\nThe " in capsys.readouterr().err


class Failing(TextData):
    def batch(self, seed, step, batch_size, length):
        if step == 3:
            raise FileNotFoundError(2, "No such file or directory", "/corpus/part-7.txt")
        return super().batch(seed, step, batch_size, length)


def test_data_that_fail_are_named_and_the_run_is_saved(whole, tmp_path):
    message = "Failing could not make the batch of step 4: No such file or directory: /corpus/part-7.txt"
    with pytest.raises(DataError, match=message):
        loop.run(**settings(tmp_path, data=Failing(TEXT[:1200], TEXT[1200:])))
    assert checkpoint.checkpoints(tmp_path / "checkpoints")[-1].name == "step_000003"
    loop.run(**settings(tmp_path))
    assert lines(tmp_path) == lines(whole[0])


class Slow(TextData):
    def batch(self, seed, step, batch_size, length):
        time.sleep(0.05)
        return super().batch(seed, step, batch_size, length)


def test_slow_data_are_named(tmp_path, capsys):
    result = loop.run(**settings(tmp_path, data=Slow(TEXT[:1200], TEXT[1200:]), steps=21, eval_every=None))
    assert "of the time was spent waiting for batches of Slow" in capsys.readouterr().err
    assert result["data_wait_fraction"] > 0.1


def test_a_run_stops_when_nothing_is_finite_any_more(tmp_path):
    """From the fourth step on; the last checkpoint is from before, and the run goes on from there."""
    rate = lambda step: 1e-2 if step < 3 else float("nan")  # noqa: E731
    sgd = {"optimizer": optax.sgd, "steps": 12}
    with pytest.raises(FloatingPointError, match="in 3 steps in a row, up to step 7, .* checkpoint is .*step_000004"):
        loop.run(**settings(tmp_path, learning_rate=rate, **sgd, max_skipped=3))
    assert [r["loss"] is None for r in lines(tmp_path)] == 4 * [False] + 3 * [True]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"steps": 3}, "has done 5 steps, more than run.steps = 3"),
        ({"seed": 4}, "made with seed 3, this run has seed 4"),
        ({"blocks": blocks(dropout=0.2)}, "another model: its block 0 says 'rate=0.1' where this one says 'rate=0.2'"),
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
        ({"keep": 0}, "run.keep must be a whole number, at least 1; got 0"),
        ({"average": 1.0}, "run.average must be a decay from 0 to below 1, such as 0.999; got 1.0"),
        ({"prompt": ""}, "run.prompt must be a text that is not empty"),
        ({"data": IMAGES, "length": None, "sample_every": 1}, "run.sample_every needs text as data"),
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

        blocks = [types.SimpleNamespace(metric_names=("accuracy",))]
        update_order = ()

        def step(self, state, batch, learning_rate, before_update):
            events.append(f"step {state.step + 1}")
            scalar = Scalar(state.step + 1)
            metrics = {"loss": scalar, "accuracy": 0.0, "skipped_blocks": 0, "optimizer_failures": 0}
            return TrainState(state.step + 1, state.key, [], [], []), metrics

    log = types.SimpleNamespace(write=lambda record: None)
    progress = types.SimpleNamespace(show=lambda *figures: None)
    data = TextData(TEXT, TEXT)
    log.records, writer = [], types.SimpleNamespace(check=lambda: None, finish=lambda: None, wait_for=None)
    run = loop._Run(Trainer(), data, 1, 8, 0, tmp_path, log, progress, writer, [], None)
    run.evaluate = lambda state: events.append("evaluate") or {"eval_loss": float("nan")}
    run._save = lambda state, eval_loss: events.append("save")
    run.train(TrainState(0, None, [], [], []), lambda step: 1.0, 4, 2, None, None, "", 10)
    assert events == [
        *("step 1", "step 2", "read 1", "read 2", "evaluate"),
        *("step 3", "step 4", "read 3", "read 4", "evaluate", "save"),
    ]


class Counting:
    """A model that is sure of the successor of every token, and a trainer of it."""

    def __init__(self):
        self.windows = []

    blocks = [types.SimpleNamespace(metric_names=("accuracy",))]

    def reside(self, state):
        return state

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
    predict = lambda state, inputs: np.broadcast_to(logits, (1, 2, 3))  # noqa: E731
    trainer = types.SimpleNamespace(predict=predict, reside=lambda state: state)
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
