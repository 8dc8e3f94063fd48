"""The command line: `python -m reversible_trainer train|plan|profile|evaluate|sample`."""

from __future__ import annotations

import argparse
import difflib
import inspect
import json
import math
import os
import re
import sys
import tokenize
from pathlib import Path
from typing import Any, NoReturn

# JAX and what needs it is imported when the command line has proved right: it takes seconds.

_EXAMPLES = """\
examples:
  %(prog)s train --config configs/shakespeare.gin --output runs/first
  %(prog)s train --config configs/shakespeare.gin --set 'run.steps = 100' --set 'reversible_transformer_lm.depth = 8'
  %(prog)s plan --config configs/shakespeare.gin
  %(prog)s plan --config configs/shakespeare.gin --accelerator-memory 16GiB --link 50GB/s --flops 450TFLOP/s
  %(prog)s profile --config configs/shakespeare.gin --output runs/profile
  %(prog)s evaluate --checkpoint runs/first
  %(prog)s sample --checkpoint runs/first --prompt 'ROMEO.' --length 300 --top-p 0.9
  %(prog)s export --checkpoint runs/first --best --output first.safetensors
  %(prog)s import --config configs/shakespeare.gin --weights first.safetensors --output runs/second

`train` started again with the same --output goes on from its last checkpoint.
REVERSIBLE_TRAINER_DEBUG=1 shows the traceback of an error. On a CPU malloc is told to keep freed memory for the next
block, which is faster; any of its own variables, such as MALLOC_TRIM_THRESHOLD_, leaves it as it is.
"""


class _ConfigError(Exception):
    """A configuration that cannot be used; its text is the sentence to show."""


_EXPECTED = ValueError, TypeError, OSError, NotImplementedError, FloatingPointError, _ConfigError


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}. See {self.prog} --help\n")


def main(arguments: list[str] | None = None) -> int:
    """Runs a command and returns the exit code: 0, or 2 for what the user can put right."""
    options = _parser().parse_args(arguments)
    try:
        options.command(options)
    except Exception as error:
        if os.environ.get("REVERSIBLE_TRAINER_DEBUG"):
            raise
        text = _explain(error)
        if not isinstance(error, _EXPECTED):
            text = f"{type(error).__name__}: {text}. REVERSIBLE_TRAINER_DEBUG=1 shows where it came from."
        print(f"reversible-trainer: {text}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(
            "reversible-trainer: interrupted; train goes on from its last checkpoint when started again",
            file=sys.stderr,
        )
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="reversible-trainer",
        description="Trains models layer by layer, weights and optimizer slots in host memory.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def add(name: str, command: Any, description: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=description, description=description[0].upper() + description[1:] + ".")
        sub.set_defaults(command=command)
        return sub

    train = add("train", _train, "train a model, or go on with it, and print the result as one line of JSON")
    plan = add("plan", _plan, "print the memory that training would need, block by block; trains nothing")
    profile = add("profile", _profile, "run a few real steps and draw memory, programs and copies over time")
    import_ = add("import", _import, "make a new run of the weights that export wrote; train then goes on from there")
    for sub in (train, plan, profile, import_):
        sub.add_argument("--config", required=True, metavar="FILE", help="gin file of the experiment")
        sub.add_argument(
            "--set",
            action="append",
            default=[],
            metavar="BINDING",
            help="gin binding that overrides the file, repeatable",
        )
    plan.add_argument(
        "--accelerator-memory",
        metavar="BYTES",
        help="plan for an accelerator of so much memory, as in 16GiB; weights and slots are then in pinned host memory",
    )
    plan.add_argument(
        "--link", metavar="SPEED", help="of the link, one way, as in 50GB/s: adds the least time of a step"
    )
    plan.add_argument("--flops", metavar="SPEED", help="that the accelerator sustains, as in 450TFLOP/s; with --link")
    plan.add_argument("--json", action="store_true", help="print one line of JSON")
    profile.add_argument(
        "--output", metavar="DIR", help="folder for profile.png, .json, tables and the trace (default: profiles/NAME)"
    )
    profile.add_argument("--steps", type=int, default=2, metavar="N", help="steps to record (default: %(default)s)")
    train.add_argument(
        "--output", metavar="DIR", help="folder of the run (default: run.output, or runs/NAME_OF_THE_FILE)"
    )

    evaluate = add("evaluate", _evaluate, "print loss and accuracy on the held-out part as one line of JSON")
    sample = add("sample", _sample, "print a text that continues the prompt")
    export = add("export", _export, "write the weights of a checkpoint into one safetensors file")
    for sub in (evaluate, sample, export):
        sub.add_argument("--checkpoint", required=True, metavar="DIR", help="folder of a run, or a checkpoint in it")
        sub.add_argument(
            "--best",
            action="store_true",
            help="of a run, take the checkpoint with the least held-out loss, not the last",
        )
    export.add_argument("--output", required=True, metavar="FILE", help="file to write, as in weights.safetensors")
    import_.add_argument("--weights", required=True, metavar="FILE", help="file that export has written")
    import_.add_argument("--output", required=True, metavar="DIR", help="folder of the new run")
    sample.add_argument("--prompt", default="\n", metavar="TEXT", help="how the text begins (default: a new line)")
    sample.add_argument("--length", type=int, default=300, metavar="N", help="tokens to add (default: %(default)s)")
    sample.add_argument(
        "--temperature", type=float, default=0.8, metavar="T", help="0 takes the likeliest token (default: %(default)s)"
    )
    sample.add_argument("--top-k", type=int, metavar="K", help="choose among the K likeliest tokens only")
    sample.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="choose among the likeliest tokens that have probability P together (default: %(default)s)",
    )
    sample.add_argument("--stop", metavar="TEXT", help="end before this text, if it comes")
    sample.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of the choice of tokens (default: %(default)s)"
    )
    return parser


# The commands.


def _train(options: argparse.Namespace) -> None:
    loop, gin = _configure(options.config, options.set)
    output = options.output
    if output is None and "output" not in gin.get_bindings(loop.run, resolve_references=False):
        output = Path("runs") / Path(options.config).stem
    loop.run(**({} if output is None else {"output": output}))


def _plan(options: argparse.Namespace) -> None:
    from rich.console import Console

    from reversible_trainer import report
    from reversible_trainer.streaming import parse_amount

    if bool(options.link) != bool(options.flops):
        raise ValueError("plan: --link and --flops go together, as in --link 50GB/s --flops 450TFLOP/s.")
    speeds = ()
    if options.link:
        flops = parse_amount(options.flops, "plan: --flops", "FLOP/s", "450TFLOP/s")
        speeds = flops, parse_amount(options.link, "plan: --link", "B/s", "50GB/s")
    bindings = list(options.set)  # may override what is put before them
    if options.accelerator_memory:
        bindings.insert(0, f"Trainer.accelerator_memory = {options.accelerator_memory!r}")
    if (options.accelerator_memory or options.link) and "Trainer.placement" not in _read(options.config):
        bindings.insert(0, "Trainer.placement = @pinned()")
    trainer, batch = _build(options.config, bindings)[1:3]
    plan = trainer.plan(batch)
    limits = trainer.limits()
    headroom = refusal = None
    try:
        trainer.check_memory(batch)
        headroom = trainer.headroom(batch)
    except ValueError as error:
        refusal = str(error)
    if options.json:
        found = report.plan_record(plan)
        found["limits"] = {where: {"needed": needed(plan), "limit": limit} for where, needed, limit in limits}
        floor = {"floor": plan.floor(*speeds)._asdict()} if speeds else {}
        print(json.dumps({**found, **floor, "headroom": headroom and headroom._asdict(), "refusal": refusal}))
        return
    console = Console()
    report.print_plan(plan, console)
    if speeds:
        report.print_floor(plan, *speeds, console)
    report.print_limits(limits, plan, console)
    if headroom:
        report.print_headroom(headroom, console)
    else:
        console.print(f"training would be refused. {refusal}", highlight=False, soft_wrap=True)


def _profile(options: argparse.Namespace) -> None:
    import jax
    from rich.console import Console

    from reversible_trainer.profiling import profile
    from reversible_trainer.report import print_plan

    if options.steps < 1:
        raise ValueError(f"profile: --steps must be 1 or more, got {options.steps}.")
    loop, trainer, batch, settings = _build(options.config, options.set)
    output = loop.prepared_folder(Path(options.output or Path("profiles") / Path(options.config).stem))
    console = Console(stderr=True)
    with console.status("compiling"):
        state = trainer.init(jax.random.key(settings.get("seed", 0)), batch)
    print_plan(trainer.plan(batch), console)
    with console.status("recording"):
        rates = loop.check_settings(**settings)
        state, found = profile(trainer, state, batch, rates(0), options.steps, trace=output)
    del state
    found.save(output)
    console.print(f"written: {output}/profile.png, profile.json, blocks.csv, spans.csv, memory.csv", highlight=False)
    for trace in sorted(output.glob("plugins/profile/*/perfetto_trace.json.gz"))[-1:]:
        console.print(f"trace, for https://ui.perfetto.dev: {trace}", highlight=False, soft_wrap=True)
    print(json.dumps(found.summary()))


def _evaluate(options: argparse.Namespace) -> None:
    loop, trainer, settings, state = _load(Path(options.checkpoint), options.best)
    data = settings["data"]
    batches = data.eval_batches(settings["batch_size"], settings.get("length"))
    found = loop.evaluate(trainer, state, batches, data)
    finite = {name: value if math.isfinite(value) else None for name, value in found.items()}
    print(json.dumps({"step": state.step, **finite}))


def _sample(options: argparse.Namespace) -> None:
    import itertools

    from reversible_trainer.data import Text

    if options.length < 0 or not 0 <= options.temperature < 1e6 or not options.prompt or options.seed < 0:
        raise ValueError("sample: needs a prompt, no negative length or seed, and a temperature from 0 to 1e6.")
    if options.top_k is not None and options.top_k < 1 or not 0 < options.top_p <= 1 or options.stop == "":
        raise ValueError("sample: --top-k must be 1 or more, --top-p above 0 and at most 1, --stop not empty.")
    loop, trainer, settings, state = _load(Path(options.checkpoint), options.best)
    data = settings["data"]
    if not isinstance(data, Text):
        raise ValueError(f"sample: the run's data, {type(data).__name__}, is no text that could be continued.")
    prompt = data.encode(options.prompt).tolist()
    how = options.temperature, options.seed, options.top_k, options.top_p
    written: list[int] = []
    for token in itertools.islice(loop.generate(trainer, state, prompt, settings["length"], *how), options.length):
        written.append(token)
        if options.stop and options.stop in (text := data.decode(written)):
            print(data.decode(prompt) + text[: text.index(options.stop)])
            return
    print(data.decode([*prompt, *written]))


def _export(options: argparse.Namespace) -> None:
    from reversible_trainer import checkpoint

    *_, state = _load(Path(options.checkpoint), options.best)
    checkpoint.export_weights(options.output, state)
    print(f"step {state.step}: written to {options.output}", file=sys.stderr)


def _import(options: argparse.Namespace) -> None:
    import gin
    import jax

    from reversible_trainer import checkpoint

    loop, trainer, batch, settings = _build(options.config, options.set)
    output, seed = loop.prepared_folder(Path(options.output)), settings.get("seed", 0)
    description = checkpoint.Description.of(settings["blocks"], settings["optimizer"], seed)
    with loop.alone(output):
        if found := checkpoint.checkpoints(output / "checkpoints"):
            raise ValueError(f"import: there is a run in {output} already, {found[-1]}; name another folder.")
        place = trainer.placement.to_host
        state = checkpoint.import_weights(options.weights, trainer.init_signature(batch), place)
        state.key = place(jax.random.key(seed))
        state = trainer.new_slots(state, batch)
        path = checkpoint.save(output / "checkpoints", state, description, gin.config_str())
    print(f"written: {path}; train --output {output} goes on from there", file=sys.stderr)


# From text to objects.


def _configure(file: str, bindings: list[str], text: str | None = None) -> tuple[Any, Any]:
    """Parses a configuration and locks it.

    Args:
      file: The gin file, or where `text` comes from.
      bindings: What `--set` gave.
      text: The configuration, if it is not to be read from `file`.

    Returns:
      The modules `reversible_trainer.loop` and `gin`.
    """
    import gin

    from reversible_trainer import data, loop, models, optimizers  # these register what can be configured

    del data, models, optimizers
    _keep_freed_memory()
    text = _read(file) if text is None else text
    gin.clear_config()
    for where, part in [(file, text), *((f"--set {binding!r}", binding) for binding in bindings)]:
        try:
            gin.parse_config(part)
        except Exception as error:
            line, message = _explain_binding(error)
            where += f", line {line}" if line and part is text else ""
            raise _ConfigError(f"{where}: {message}") from error
    _check_macros(gin.config_str(), text, file)
    bound = gin.get_bindings(loop.run, resolve_references=False)
    required = [p.name for p in inspect.signature(loop.run).parameters.values() if p.default is p.empty]
    missing = [f"run.{name}" for name in required if name not in bound]
    if missing:
        raise _ConfigError(f"{file} does not set {', '.join(missing)}; set it there or with --set")
    try:
        gin.finalize()
    except ValueError as error:
        raise _ConfigError(f"{file}: {_explain(error)}") from error
    return loop, gin


def _read(file: str) -> str:
    try:
        return Path(file).read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not a text file"
        raise _ConfigError(f"cannot read the configuration {file}: {reason}") from error


def _keep_freed_memory() -> None:
    """Tells glibc's malloc not to give freed memory back to the system, which would zero its pages at each use."""
    import ctypes

    import jax

    if jax.default_backend() != "cpu" or any(name.startswith("MALLOC_") for name in os.environ):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:  # musl has none
        mallopt(-4, 0)  # M_MMAP_MAX: nothing is mapped by itself
        mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD


def _check_macros(config: str, text: str, file: str) -> None:
    """Refuses macros that nothing uses, or used before `--set`: as a rule settings whose first half was forgotten."""
    for name in re.findall(r"^(\w+) =", config, re.MULTILINE):
        if f"%{name}" not in config + text:
            raise _ConfigError(f"{file}: {name!r} is set but nothing uses it; a setting reads 'name.parameter = value'")


def _build(file: str, bindings: list[str]) -> tuple[Any, Any, Any, dict[str, Any]]:
    """The loop, the trainer, a training batch, and the arguments that `run` would get."""
    loop, gin = _configure(file, bindings)
    trainer, settings = _trainer(loop, gin)
    batch = _signature(settings)
    loop.check_vocabulary(trainer, settings["data"], batch)
    loop.check_routes(trainer, batch)
    return loop, trainer, batch, settings


def _trainer(loop: Any, gin: Any) -> tuple[Any, dict[str, Any]]:
    """The trainer, and the arguments that `run` would get."""
    settings = gin.get_bindings(loop.run)
    loop.check_settings(**settings)
    return loop.make_trainer(settings["blocks"], settings["optimizer"], settings.get("average")), settings


def _signature(settings: dict[str, Any]) -> tuple[Any, ...]:
    """Signature of a training batch."""
    return settings["data"].batch(0, 0, settings["batch_size"], settings.get("length"))


def _load(path: Path, best: bool) -> tuple[Any, Any, dict[str, Any], Any]:
    """Loop, trainer, settings and state, without slots, of a checkpoint.

    Args:
      path: A checkpoint, or the folder of a run.
      best: Of a run, whether to take the best checkpoint, not the last one.
    """
    from reversible_trainer import checkpoint
    from reversible_trainer.optimizers import averages

    found = checkpoint.checkpoints(path / "checkpoints")
    if not found and not (path / "manifest.json").exists():
        raise ValueError(f"there is no checkpoint in {path}; name the output folder of a run, or a step_* folder in it")
    if best:
        if (chosen := checkpoint.best_of(found)) is None:
            raise ValueError(f"--best: no checkpoint in {path} was evaluated; leave --best out, or set run.eval_every")
        found = [chosen]
    say = lambda text: print(text, file=sys.stderr)  # noqa: E731
    path, manifest = checkpoint.newest(found or [path], checkpoint.read_manifest, say)
    if not manifest["config"]:
        raise ValueError(f"{path} has no gin configuration, since its run was not started from one; use it from Python")
    loop, gin = _configure(f"the configuration in {path}", [], manifest["config"])
    trainer, settings = _trainer(loop, gin)
    description = checkpoint.Description.of(settings["blocks"], settings["optimizer"], settings.get("seed", 0))
    expected = trainer.init_signature(_signature(settings))
    averaged = settings.get("average") is not None
    place, parts = trainer.placement.to_host, ("weights", *(["slots"] if averaged else []), "states")
    paths = found[: found.index(path) + 1] if found else [path]
    _, state = checkpoint.newest(paths, lambda p: checkpoint.restore(p, expected, place, description, parts), say)
    return loop, trainer, settings, averages(state) if averaged else state


# From exceptions to sentences.


def _explain(error: BaseException) -> str:
    """An exception as one line; gin adds lines about where it was called from, of which only the name is of use."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    head, *more = str(error).strip().splitlines() or [type(error).__name__]
    if macro := re.match(r"No bindings specified for '(.+)/gin.macro'", head):
        return f"%{macro[1]} is used but never set"
    if "missing" in head and "'learning_rate'" in head:
        return f"{head}; name an optimizer without parentheses, as in run.optimizer = @adam"
    called = re.search(r"In call to configurable '(.+?)'", "\n".join(more))
    return f"{called[1]}: {head}" if called and called[1] not in head else head


def _explain_binding(error: BaseException) -> tuple[Any, str]:
    """Line of a gin binding, and what is wrong with it, naming what may have been meant."""
    text = str(error)
    line = error.lineno if isinstance(error, SyntaxError) else (re.search(r"line (\d+)", text) or [None, None])[1]
    if isinstance(error, tokenize.TokenError):
        line, message = error.args[1][0], "a bracket or quote is not closed"
    elif isinstance(error, SyntaxError):
        message = (
            f"cannot be parsed: {error.msg.splitlines()[-1].strip(' .')}; a binding looks like 'name.parameter = value'"
        )
    else:
        message = text.splitlines()[0].rstrip(".") + _meant(text)
    return line, message


def _meant(text: str) -> str:
    """The known names that are close to the one gin does not know."""
    from gin import config

    known = {found.name: found for _, found in config._REGISTRY.items()}  # gin has no public list
    if unknown := re.search(r"No configurable matching (?:reference )?'@?(?:.*/)?([\w.]+)", text):
        name, names = unknown[1], known
    elif unknown := re.search(r"Configurable '(.+?)' doesn't have a parameter named '(\w+)'", text):
        name, names = unknown[2], inspect.signature(known[unknown[1]].wrapped).parameters
    else:
        return ""
    close = difflib.get_close_matches(name, names, n=3)
    return f"; did you mean {' or '.join(close)}?" if close else f"; known are {', '.join(sorted(names))}"


if __name__ == "__main__":
    sys.exit(main())
