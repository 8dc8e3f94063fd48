"""What the README claims, by the scripts that reproduce it, each in a process of its own."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parent.parent / "scripts"


def run(name, *arguments):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")}
    command = [sys.executable, SCRIPTS / name, *map(str, arguments), "--json"]
    finished = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert finished.returncode == 0, finished.stderr
    return json.loads(finished.stdout)


def test_the_operating_system_agrees_with_the_ledger():
    found = run("measure_rss.py", "--blocks", 8, "--rows", 1024)
    assert found["temporary_bytes"] > 200e6
    assert 0.85 <= found["ratio"] <= 1.15


@pytest.mark.slow
def test_with_the_disk_tier_little_of_the_state_is_in_memory(tmp_path):
    sizes = ("--blocks", 32, "--width", 512, "--ff-width", 2048, "--rows", 16)
    found = run("measure_rss.py", "--disk", tmp_path, "--optimizer", "adam", *sizes)
    assert found["disk_bytes"] > 700e6
    assert found["ratio"] <= 0.3


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        ("bench_step.py", "--size", "wide", "--length", 16, "--repeats", 1),
        ("bench_link.py", "--depth", 2, "--width", 16, "--rows", 8, "--repeats", 1),
        ("bench_optimizers.py", "--part", "updates", "--repeats", 1),
        ("bench_reversal.py", "--part", "drift", "--depths", 2, 4),
        ("bench_steps_to_loss.py", "--steps", 20, "--every", 10, "--seeds", 1, "--optimizers", "muon"),
    ],
    ids=lambda command: command[0],
)
def test_benchmarks_run_and_draw(command, tmp_path):
    assert run(*command, "--png", tmp_path / "picture.png")


@pytest.mark.slow
def test_killed_runs_go_on_as_if_they_had_not_been():
    assert run("kill_runs.py", "--kills", 3, "--steps", 100)["resumes"]


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["pinned", "shared"])
def test_depth_costs_time_and_host_memory_but_no_accelerator_memory(placement):
    ratios = []
    for _ in range(3):  # the machine may be busy with something else for a while
        found = run("bench_depth.py", "--placement", placement, "--width", 32, "--depths", 4, 12, 36)
        peaks = [row["peak_accelerator_bytes"] for row in found["rows"]]
        assert max(peaks) <= 1.01 * min(peaks)
        assert len({row["programs"] for row in found["rows"]}) == 1
        ratios.append(found["slope_ratio"])
        if ratios[-1] <= 1.1:
            break
    assert min(ratios) <= 1.1


@pytest.mark.parametrize("script", sorted(SCRIPTS.glob("*.py")), ids=lambda path: path.stem)
def test_scripts_explain_themselves(script, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(script), "--help"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(script), run_name="__main__")
    assert end.value.code == 0 and "--json" in capsys.readouterr().out
