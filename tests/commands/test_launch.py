import subprocess
import sys

import pytest
from accelerate.commands.launch import launch_command_parser

from hf_descent.cli import parse_arguments
from hf_descent.commands.launch import CONFIGS, launch_arguments


def test_what_the_short_form_is_short_for():
    argv = [
        "classify",
        "--config",
        "a.yaml",
        "--launch",
        "zero3",
        "--seed",
        "7",
        "--num_processes",
        "4",
    ]
    config, module = ["--config_file", str(CONFIGS / "zero3.yaml")], ["-m", "hf_descent.cli"]
    expected = [
        *config,
        "--num_processes",
        "4",
        *module,
        "classify",
        "--config",
        "a.yaml",
        "--seed",
        "7",
    ]
    assert launch_arguments(argv) == expected
    parsed = launch_command_parser().parse_args(expected)
    assert (parsed.num_processes, parsed.module, parsed.training_script) == (
        4,
        True,
        "hf_descent.cli",
    )
    assert parsed.training_script_args == ["classify", "--config", "a.yaml", "--seed", "7"]


def test_without_launch_nothing_is_taken_away():
    assert launch_arguments(["classify", "--num_processes", "4"]) is None


def test_a_config_is_a_name_or_a_file(tmp_path):
    (tmp_path / "own.yaml").write_text("num_processes: 1")
    path = str(tmp_path / "own.yaml")
    assert launch_arguments(["demo", f"--launch={path}"])[:2] == ["--config_file", path]
    with pytest.raises(ValueError, match="'dpp': give one of cpu_ddp, ddp, .*zero3"):
        launch_arguments(["sft", "--launch", "dpp"])
    with pytest.raises(ValueError, match="--num_processes: invalid int value"):
        launch_arguments(["sft", "--launch", "ddp", "--num_processes", "two"])


@pytest.mark.parametrize("command", ["evaluate", "generate", "tune", "demo"])
def test_a_command_of_one_process_is_not_started_in_several(command, monkeypatch):
    with pytest.raises(ValueError, match=f"`hf-descent {command}` works in one process"):
        launch_arguments([command, "--launch", "cpu_ddp"])
    assert launch_arguments([command, "--launch", "cpu_ddp", "--num_processes", "1"])
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(ValueError, match=f"`hf-descent {command}` works in one process"):
        parse_arguments([command, "RUN"])


def test_machines_do_not_choose_ports_of_their_own():
    several = [
        "--num_machines",
        "2",
        "--num_processes",
        "4",
        "--main_process_ip",
        "10.0.0.1",
        "--machine_rank",
        "0",
    ]
    with pytest.raises(
        ValueError, match="`--num_machines` is 2, and ddp.yaml lets each machine choose its port"
    ):
        launch_arguments(["sft", "--launch", "ddp", *several])
    assert launch_arguments(["sft", "--launch", "ddp", *several, "--main_process_port", "29511"])
    assert launch_arguments(["sft", "--launch", "ddp_multi_node", *several])


@pytest.mark.slow
@pytest.mark.parametrize("processes", ["1", "2"])
def test_an_error_of_the_user_is_told_once_by_all_processes(processes, tmp_path):
    words = [
        "classify",
        "--launch",
        "cpu_ddp",
        "--num_processes",
        processes,
        "--config",
        str(tmp_path / "no.yaml"),
    ]
    words = [sys.executable, "-m", "hf_descent.cli", *words]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("hf-descent: error:")]
    assert "no.yaml" in line
