"""Kills a training run again and again at random moments, and compares it with a run that was never stopped.

    python scripts/kill_runs.py [--kills 40] [--seed 0] [--json]

A small run saves a checkpoint after every step, and is killed (SIGKILL, no chance to clean up) some random time after
it has come back to life. Every resume must work, and the losses of the whole, the checkpoint at the end included, must
be those of the undisturbed run, bit for bit.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CONFIG = """
run.blocks = @reversible_transformer_lm()
run.data = @copy_task()
run.optimizer = @adam
run.learning_rate = 1e-3
run.steps = {steps}
run.batch_size = 2
run.length = 16
run.checkpoint_every = 1
copy_task.eval_sequences = 4
reversible_transformer_lm.vocab_size = 128
reversible_transformer_lm.width = 64
reversible_transformer_lm.depth = 2
reversible_transformer_lm.heads = 2
reversible_transformer_lm.ff_width = 256
"""


def command(config: Path, output: Path) -> list[str]:
    return [sys.executable, "-m", "reversible_trainer", "train", "--config", str(config), "--output", str(output)]


def losses(output: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (output / "metrics.jsonl").read_text().splitlines()]


def final(output: Path) -> dict[str, str]:
    """Checksums of the last checkpoint's files."""
    newest = max((output / "checkpoints").glob("step_*"))
    return json.loads((newest / "manifest.json").read_text())["sha256"]


def steps_done(output: Path) -> int:
    found = sorted((output / "checkpoints").glob("step_*"))
    return int(found[-1].name.removeprefix("step_")) if found else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=40, help="default 40")
    parser.add_argument("--steps", type=int, help="of the run (default: 60 for each kill)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (default 0)")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    options = parser.parse_args()
    moments = random.Random(options.seed)
    steps = options.steps or 60 * options.kills
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "run.gin"
        config.write_text(CONFIG.format(steps=steps))
        os.environ |= {  # the programs are compiled once
            "JAX_COMPILATION_CACHE_DIR": str(Path(folder) / "cache"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        whole, killed = Path(folder) / "whole", Path(folder) / "killed"
        subprocess.run(command(config, whole), check=True, capture_output=True)
        kills, resumes = [], 0
        while len(kills) < options.kills:
            done = steps_done(killed)
            if done == steps:
                break
            process = subprocess.Popen(command(config, killed), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
            while steps_done(killed) == done and process.poll() is None:
                time.sleep(0.01)
            time.sleep(moments.uniform(0, 2.0))
            process.send_signal(signal.SIGKILL)
            _, said = process.communicate()
            if process.returncode not in (0, -signal.SIGKILL):
                sys.exit(f"a resume failed: {said.decode()[-500:]}")
            resumes += bool(done)
            kills.append(steps_done(killed))
            print(f"kill {len(kills)}: {kills[-1]} of {steps} steps done", file=sys.stderr)
        subprocess.run(command(config, killed), check=True, capture_output=True)
        found = {
            "kills": len(kills),
            "resumes": resumes + 1,
            "steps": steps,
            "equal_losses": losses(whole) == losses(killed),
            "equal_checkpoints": final(whole) == final(killed),
        }
    print(json.dumps(found) if options.json else "  ".join(f"{k} {v}" for k, v in found.items()))
    sys.exit(0 if found["equal_losses"] and found["equal_checkpoints"] else 1)


if __name__ == "__main__":
    main()
