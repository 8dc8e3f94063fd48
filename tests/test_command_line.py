import json
import os
import subprocess
import sys

import pytest

from reversible_trainer.__main__ import main

CONFIG = """
run.blocks = @reversible_transformer_lm()
run.data = @shakespeare()
run.optimizer = @adam
run.learning_rate = @warmup_cosine_decay_schedule()
run.steps = 3
run.batch_size = 4
run.length = 16
run.checkpoint_every = 2

reversible_transformer_lm.width = 8
reversible_transformer_lm.depth = 1
reversible_transformer_lm.heads = 2
reversible_transformer_lm.ff_width = 16
reversible_transformer_lm.dropout = 0.1

warmup_cosine_decay_schedule.init_value = 0.0
warmup_cosine_decay_schedule.peak_value = 1e-2
warmup_cosine_decay_schedule.warmup_steps = 1
warmup_cosine_decay_schedule.decay_steps = 3

shakespeare.held_out = ['THE PHOENIX AND THE TURTLE']
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = tmp_path_factory.mktemp("config") / "tiny.gin"
    path.write_text(CONFIG)
    return str(path)


@pytest.fixture(scope="module")
def trained(config, tmp_path_factory):
    """The output folder of a finished run."""
    output = str(tmp_path_factory.mktemp("runs") / "tiny")
    assert main(["train", "--config", config, "--output", output]) == 0
    return output


def test_train_ends_with_one_line_of_json_and_says_the_same_again(config, trained, capsys):
    assert main(["train", "--config", config, "--output", trained]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    result = json.loads(line)
    assert result["step"] == 3
    with open(os.path.join(trained, "metrics.jsonl")) as file:
        assert json.loads(file.readline())["loss"] == result["first_loss"]


def test_the_configuration_is_beside_the_results(trained):
    with open(os.path.join(trained, "config.gin")) as file:
        assert "reversible_transformer_lm.width = 8" in file.read()
    with open(os.path.join(trained, "operative_config.gin")) as file:
        text = file.read()
    assert "adam.b1 = 0.9" in text and "Trainer.prefetch = 1" in text


def test_the_trainer_is_set_from_gin(config, tmp_path, capsys):
    """On the disk, in two microbatches, deferred, in bfloat16."""
    settings = ["microbatches = 2", "update = 'deferred'", "compute_dtype = 'bfloat16'", "placement = @disk()"]
    bindings = [f"Trainer.{setting}" for setting in settings] + [f"disk.folder = {str(tmp_path / 'tier')!r}"]
    command = ["train", "--config", config, "--output", str(tmp_path / "run")]
    assert main([*command, *(x for binding in bindings for x in ("--set", binding))]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 3


def test_evaluate_gives_the_loss_of_the_run(trained, capsys):
    assert main(["evaluate", "--checkpoint", trained]) == 0
    evaluated = json.loads(capsys.readouterr().out)
    with open(os.path.join(trained, "result.json")) as file:
        assert evaluated["eval_loss"] == json.load(file)["eval_loss"]
    assert evaluated["step"] == 3 and 0 <= evaluated["eval_accuracy"] <= 1


def test_sample_continues_the_prompt(trained, capsysbinary):
    def sample(*options):
        assert main(["sample", "--checkpoint", trained, "--prompt", "ROMEO.", "--length", "20", *options]) == 0
        return capsysbinary.readouterr().out.decode()

    text = sample()
    assert text.startswith("ROMEO.") and len(text) == len("ROMEO.") + 20 + len("\n")
    assert text == sample() != sample("--seed", "1")
    first = os.path.join(trained, "checkpoints", "step_000002")
    assert main(["sample", "--checkpoint", first, "--length", "1"]) == 0
    capsysbinary.readouterr()
    assert sample("--temperature", "0") == sample("--top-k", "1", "--seed", "5") == sample("--top-p", "1e-9")
    likeliest = sample("--temperature", "0")[len("ROMEO.") : -1]
    assert (
        sample("--temperature", "0", "--stop", likeliest[3:5]) == "ROMEO." + likeliest.split(likeliest[3:5])[0] + "\n"
    )


def test_weights_are_exported_and_imported(config, trained, tmp_path, capsys):
    """What is imported begins anew, with the same weights."""
    file, output = str(tmp_path / "weights.safetensors"), str(tmp_path / "run")
    assert main(["export", "--checkpoint", trained, "--output", file]) == 0
    assert main(["import", "--config", config, "--weights", file, "--output", output]) == 0
    assert main(["evaluate", "--checkpoint", output]) == 0
    evaluated = json.loads(capsys.readouterr().out)
    with open(os.path.join(trained, "result.json")) as result:
        assert evaluated["eval_loss"] == json.load(result)["eval_loss"] and evaluated["step"] == 0
    assert main(["train", "--config", config, "--output", output, "--set", "run.steps = 1"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["step"] == 1 and "continuing from" in captured.err
    assert main(["import", "--config", config, "--weights", file, "--output", output]) == 2
    assert "there is a run in" in capsys.readouterr().err


def test_the_best_checkpoint_can_be_asked_for(trained, capsys):
    assert main(["evaluate", "--checkpoint", trained, "--best"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 3


@pytest.mark.parametrize("where", ["checkpoint", "disk tier"])
def test_a_full_disk_stops_a_run_that_goes_on_when_there_is_room(config, tmp_path, where):
    """Files may have 24 KiB at most: no checkpoint can be written, or the tier's file not be made."""
    command = [
        sys.executable,
        "-m",
        "reversible_trainer",
        "train",
        "--config",
        config,
        "--output",
        str(tmp_path / "run"),
    ]
    if where == "disk tier":
        command += ["--set", "Trainer.placement = @disk()", "--set", f"disk.folder = {str(tmp_path)!r}"]
    environment = {**os.environ, "JAX_ENABLE_COMPILATION_CACHE": "false"}  # its files would be too large as well
    limited = ["bash", "-c", 'ulimit -f 24; exec "$@"', "bash", *command]
    stopped = subprocess.run(limited, capture_output=True, text=True, env=environment)
    assert stopped.returncode == 2 and "Traceback" not in stopped.stderr
    expected = "cannot write the checkpoint" if where == "checkpoint" else "Placement.disk"
    assert expected in stopped.stderr and "File too large" in stopped.stderr
    assert main(command[3:]) == 0


DIGITS = """
run.blocks = @rev_net()
run.data = @digits()
run.optimizer = @adam
run.learning_rate = 1e-2
run.steps = 2
run.batch_size = 40

rev_net.width = 2
rev_net.depth = 0
"""


def test_data_without_text_train_and_evaluate_and_are_not_sampled(tmp_path, capsys):
    config, output = tmp_path / "digits.gin", str(tmp_path / "run")
    config.write_text(DIGITS)
    assert main(["train", "--config", str(config), "--output", output]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["step"] == 2 and 0 < result["eval_accuracy"] < 1
    assert main(["evaluate", "--checkpoint", output]) == 0
    evaluated = json.loads(capsys.readouterr().out)
    assert all(evaluated[name] == result[name] for name in ("eval_loss", "eval_accuracy"))
    assert main(["plan", "--config", str(config), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["peak_accelerator_bytes"] == result["planned_accelerator_bytes"]
    profile = ["profile", "--config", str(config), "--output", str(tmp_path / "profile"), "--steps", "1"]
    assert main(profile) == 0
    capsys.readouterr()
    message = "sample: the run's data, ImageData, is no text that could be continued."
    refused(["sample", "--checkpoint", output], message, capsys)


def test_plan_prints_the_blocks_and_trains_nothing(config, capsys):
    assert main(["plan", "--config", config, "--set", "reversible_transformer_lm.depth = 3"]) == 0
    out = capsys.readouterr().out
    assert [line.split()[:2] for line in out.splitlines()[1:4]] == [
        ["0", "Serial"],
        ["1-3", "ReversibleSerial"],
        ["4", "LossSerial"],
    ]
    assert "planned peak: accelerator" in out


@pytest.mark.parametrize(
    "binding, message",
    [
        ("run.stepz = 3", "Configurable 'run' doesn't have a parameter named 'stepz'; did you mean steps?"),
        ("rum.steps = 3", "No configurable matching 'rum'; did you mean run?"),
        ("run.data = @shakespear()", "No configurable matching reference '@shakespear()'; did you mean shakespeare?"),
        ("zzz.x = 1", "known are "),
        ("run.steps", "cannot be parsed"),
        ("run.steps = three", "cannot be parsed: Failed to parse token 'three'; a binding looks like"),
        ("run.steps = (3", "a bracket or quote is not closed"),
        ("run.steps = %STEPS", "%STEPS is used but never set"),
        ("run.steps = -3", "run.steps must be a whole number, at least 1; got -3."),
        ("run.blocks = @reversible_transformer_lm", "run.blocks must be a list of layers"),
        ("run.optimizer = @adam()", "name an optimizer without parentheses"),
        ("reversible_transformer_lm.heads = 3", "reversible_transformer_lm: "),
        ("shakespeare.held_out = ['MACDUFF']", "no work is called 'MACDUFF'"),
        ("Trainer.verify_reversal = 3", "Trainer(verify_reversal=3): expected one of False, True, 'warn'"),
        ("Trainer.clip_global = 1.0", "Set update='deferred'"),
        (
            "run.optimizer = @route()\nroute.rules = {'*/kernl': @muon}\nroute.default = @adam",
            "no weights match '*/kernl'",
        ),
        ("import nothing.here", "No module named 'nothing'"),
    ],
)
def test_a_wrong_binding_is_one_sentence(config, tmp_path, capsys, binding, message):
    refused(["train", "--config", config, "--output", str(tmp_path), "--set", binding], message, capsys)


@pytest.mark.parametrize(
    "content, message",
    [
        (None, "cannot read the configuration FILE: No such file"),
        (b"\xff\xfe\x00", "cannot read the configuration FILE: it is not a text file"),
        (b"# a comment\nrun.stepz = 3\n", "FILE, line 2: Configurable 'run' doesn't have a parameter named 'stepz'"),
        (
            b"run.steps = 3\n",
            "FILE does not set run.blocks, run.optimizer, run.data, run.learning_rate, run.batch_size",
        ),
    ],
)
def test_a_wrong_file_is_one_sentence(tmp_path, capsys, content, message):
    file = tmp_path / "wrong.gin"
    if content is not None:
        file.write_bytes(content)
    refused(["train", "--config", str(file)], message.replace("FILE", str(file)), capsys)


def test_an_unwritable_output_folder_is_one_sentence(config, tmp_path, capsys):
    (tmp_path / "file").touch()
    for output in ("/proc/nowhere", str(tmp_path / "file")):
        message = f"cannot write to the output folder {output}: "
        refused(["train", "--config", config, "--output", output], message, capsys)


def test_the_checkpoint_of_another_model_is_one_sentence(config, trained, capsys):
    binding = "reversible_transformer_lm.width = 16"
    message = "belongs to another model: its block 0 says 'features=8' where this one says 'features=16'."
    refused(["train", "--config", config, "--output", trained, "--set", binding], message, capsys)


@pytest.mark.parametrize("command", ["evaluate", "sample"])
def test_a_missing_checkpoint_is_one_sentence(command, tmp_path, capsys):
    refused([command, "--checkpoint", str(tmp_path)], f"there is no checkpoint in {tmp_path}", capsys)


@pytest.mark.parametrize("option", ["--temperature=-1", "--length=-1", "--prompt=", "--temperature=nan"])
def test_wrong_options_of_sample_are_one_sentence(option, tmp_path, capsys):
    refused(["sample", "--checkpoint", str(tmp_path), option], "sample: needs", capsys)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "COMMAND"),
        (["trian"], "invalid choice: 'trian' (choose from"),
        (["train"], "--config"),
        (["sample", "--checkpoint", "x", "--length", "many"], "argument --length: invalid int value: 'many'"),
    ],
)
def test_a_wrong_command_line_is_one_sentence(arguments, message, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    one_sentence(capsys.readouterr(), message)


def refused(arguments, message, capsys):
    assert main(arguments) == 2
    one_sentence(capsys.readouterr(), message)


def one_sentence(captured, message):
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("reversible-trainer") and message in line


def test_the_module_runs_and_helps():
    command = [sys.executable, "-m", "reversible_trainer"]
    shown = subprocess.run([*command, "--help"], capture_output=True, text=True, check=True).stdout
    assert all(name in shown for name in ("train", "plan", "evaluate", "sample", "examples:"))
    failed = subprocess.run([*command, "train", "--config", "nowhere.gin"], capture_output=True, text=True)
    assert failed.returncode == 2 and failed.stderr.count("\n") == 1 and "nowhere.gin" in failed.stderr


def test_a_traceback_can_be_asked_for(config, monkeypatch):
    monkeypatch.setenv("REVERSIBLE_TRAINER_DEBUG", "1")
    with pytest.raises(ValueError, match="run.steps must be"):
        main(["train", "--config", config, "--set", "run.steps = 0"])
