"""The command line as a user meets it: real processes, real signals, and no traceback that is not a rank's own."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sherd import strategies
from sherd.cli import main, options
from sherd.cli.launch import checks
from sherd.cli.launch.variables import VARIABLES, misspelt
from sherd.cli.options import STRATEGIES
from sherd.cli.words import ranges
from tests.cli.scripts import notes, ranks_alive, two_ranks_that_sleep
from tests.helpers.processes import PATIENCE, SHERD, free_port, python, run, sherd, wait_for

pytestmark = pytest.mark.ranks


@pytest.mark.pure
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "-n", "0", "rank_script.py"], "'-n' / '--ranks': found '0', expected a whole number from 1"),
        (["run", "-n", "abc", "rank_script.py"], "'-n' / '--ranks': found 'abc', expected a whole number from 1"),
        (["run", "absent.py"], "the script 'absent.py' does not exist; write the path of a Python file"),
        (["run", "temporary"], "the script 'temporary' is a directory"),
        (["run", "-m", "absent.module"], "there is no module 'absent.module'"),
        (["run", "-m", "json.absent"], "there is no module 'json.absent'"),
        (["run", "-m", "json.tool.absent"], "there is no module 'json.tool.absent'"),
        (["run", "-m", "json"], "'json' is a package without a __main__"),
        (["run", "bad_syntax.py"], "the script 'bad_syntax.py' is not valid Python: line 2: "),
        (["run"], "Missing argument"),
        (["run", "--nnodes", "2", "rank_script.py"], "--nnodes 2 needs --master-addr"),
        (["run", "--node-rank", "1", "rank_script.py"], "--node-rank 1 must be below --nnodes 1"),
        (["run", "--standalone", "--nnodes", "2", "rank_script.py"], "--standalone is for one machine"),
        (["run", "--nproc_per_node", "0", "rank_script.py"], "found '0', expected a whole number from 1"),
        (
            ["run", "--rank", "2", "rank_script.py"],
            "No such option: --rank; did you mean '--node-rank' or '--ranks'? (sherd run --help",
        ),
        (["run", "--strategy", "zero4", "rank_script.py"], "--strategy 'zero4' is not known; did you mean 'zero"),
        (["run", "--events", "temporary/..", "rank_script.py"], "is not empty; name a new directory for every run"),
        (
            ["run", "--events", "rank_script.py/x", "rank_script.py"],
            "--events 'rank_script.py/x' cannot be written (Not",
        ),
        (
            ["run", "--log-dir", "rank_script.py", "rank_script.py"],
            "--log-dir 'rank_script.py' is a file; name a directory",
        ),
        (["run", "--csv", "temporary", "rank_script.py"], "--csv 'temporary' cannot be written (Is a directory)"),
        (["run", "--tensorboard", "/proc/x", "rank_script.py"], "--tensorboard '/proc/x' cannot be written"),
        (["run", "--csv", "rank_script.py", "rank_script.py"], "--csv 'rank_script.py' is not empty; name a new file"),
        (["run", "--layers", "rank_script.py"], "--layers adds to the events; also write --events DIR"),
        (["run", "--ssh", "ssh", "rank_script.py"], "--ssh is for --hosts"),
        (["run", "--python", "python3", "rank_script.py"], "--python is for --hosts"),
        (["run", "--hosts", "-oProxyCommand=x", "rank_script.py"], "'-oProxyCommand=x' is not a host"),
        (["run", "--hosts", "a,a", "rank_script.py"], "a is listed twice; write a:2 for more ranks there"),
        (["run", "--hosts", "a:0,b", "rank_script.py"], "a needs at least one rank"),
        (
            ["run", "--hosts", "a,b", "--nnodes", "2", "--master-addr", "a", "x.py"],
            "--hosts starts every machine itself",
        ),
        (["run", "--hosts", "a,b", "--ssh", "", "rank_script.py"], "--ssh is empty"),
        (["run", "--hosts", "a,b", "--live", "rank_script.py"], "with several machines also write --events DIR"),
        (["rum"], "No such command 'rum'; did you mean 'run'? (sherd --help lists"),
        (["doctor", "--jsn"], "No such option: --jsn; did you mean '--json'? (sherd doctor --help"),
    ],
)
def test_bad_input_is_one_kind_line(here, capfd, arguments, message):
    (here / "bad_syntax.py").write_text("x = 1\ny = = 2\n")
    one_kind_line(capfd, arguments, message)


def test_an_ssh_that_cannot_be_run_is_one_kind_line(here, capfd):
    arguments = ["run", "--hosts", "a,b", "--ssh", "/absent/ssh", "rank_script.py"]
    one_kind_line(capfd, arguments, "'/absent/ssh' cannot be run (No such")


def one_kind_line(capfd, arguments, message):
    with pytest.raises(SystemExit) as end:
        main(arguments)
    output = capfd.readouterr()
    assert end.value.code == 2
    assert output.out == ""
    assert output.err.startswith("sherd: ")
    assert message in output.err
    assert output.err.count("\n") == 1


@pytest.mark.pure
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("SHERD_STRATEGY", "zeroo", "SHERD_STRATEGY='zeroo' is not a strategy; did you mean 'zero"),
        ("SHERD_TIMEOUT", "abc", "SHERD_TIMEOUT='abc' must be a number of seconds"),
        ("SHERD_TRANSPORT", "hots", "did you mean 'host'?"),
        ("SHERD_SPIN", "no", "SHERD_SPIN='no' must be 0 or 1"),
    ],
)
def test_bad_values_of_variables_are_one_kind_line(here, capfd, monkeypatch, name, value, message):
    monkeypatch.setenv(name, value)
    test_bad_input_is_one_kind_line(here, capfd, ["run", "rank_script.py"], message)


def test_bad_input_ends_the_process_without_a_traceback(here):
    result = sherd("run", "-n", "two", "rank_script.py")
    assert (result.returncode, result.stdout) == (2, "")
    assert re.fullmatch(r"sherd: .*found 'two', expected a whole number from 1.*\n", result.stderr)


@pytest.mark.pure
@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_help_lists_the_commands(capfd, arguments):
    with pytest.raises(SystemExit) as end:
        main(arguments)
    output = capfd.readouterr()
    assert (end.value.code, output.err) == (0, "")
    assert re.search(r"^  run .*^  doctor ", output.out, flags=re.MULTILINE | re.DOTALL)


def test_help_needs_neither_torch_nor_what_draws():
    code = """
import sys
from sherd.cli import main
try:
    main(["run", "--help"])
except SystemExit as end:
    assert end.code == 0
print(sorted({"torch", "rich", "plotext", "psutil"} & set(sys.modules)))
"""
    result = python(code)
    assert "Run a script on several ranks" in result.stdout
    assert result.stdout.splitlines()[-1] == "[]"
    assert "nproc" not in result.stdout  # torchrun's names are accepted and not listed


def test_the_package_is_the_command_too():
    result = run(sys.executable, "-m", "sherd", "--version")
    assert result.stdout.startswith("sherd ")


def test_completion(monkeypatch):
    words = {"_SHERD_COMPLETE": "complete_bash", "COMP_WORDS": "sherd run --strategy ze", "COMP_CWORD": "3"}
    result = run(*SHERD, **words)
    assert result.stdout.split() == ["zero1", "zero2", "zero3"], result.stderr


@pytest.mark.pure
def test_the_names_of_strategies_are_those_of_the_registry():
    by_tests = ("average-every-3", "teams-of-two")
    ours = tuple(name for name in strategies.names() if name not in by_tests)
    assert ours == STRATEGIES


@pytest.mark.pure
@pytest.mark.parametrize(
    ("found", "words"),
    [
        ([], ""),
        ([3], "3"),
        ([0, 1], "0-1"),
        ([5, 0, 2, 1], "0-2, 5"),
        ([1, 3, 5, 6, 7], "1, 3, 5-7"),
    ],
)
def test_ranges(found, words):
    assert ranges(found) == words


@pytest.mark.pure
def test_every_variable_in_the_source_is_known_and_documented():
    root = Path(__file__).parents[2]
    found = set()
    for file in (root / "src").rglob("*.py"):
        found |= set(re.findall(r"\bSHERD_[A-Z]+(?:_[A-Z]+)*\b", file.read_text()))
    assert found == set(VARIABLES)
    page = (root / "docs" / "running.md").read_text()
    for name, meaning in VARIABLES.items():
        assert f"| `{name}` | {meaning} |" in page, name


@pytest.mark.pure
def test_misspelt_variables_are_named():
    assert misspelt(["SHERD_TIMEOUT", "HOME", "SHERD_TIMOUT", "SHERD_QQ"]) == [
        "SHERD_QQ is not known; docs/running.md lists the variables",
        "SHERD_TIMOUT is not known; did you mean SHERD_TIMEOUT?",
    ]


@pytest.mark.pure
def test_what_deserves_a_warning(monkeypatch):
    monkeypatch.setattr(checks, "available_memory", lambda: 8 * checks.RANK_BYTES)
    monkeypatch.setattr(checks, "cores", lambda: 2)
    monkeypatch.setattr(os, "environ", {})
    assert checks.warnings_at_start(4) == []
    crowded, starved = checks.warnings_at_start(9)
    assert crowded.startswith("9 ranks on 2 cores compete for them")
    assert starved.startswith("9 ranks need 1.8 GiB for torch alone, and 1.6 GiB are free")


@pytest.mark.pure
def test_auto_is_a_rank_per_core_up_to_eight(monkeypatch):
    for cores, ranks in ((1, 1), (6, 6), (64, 8)):
        monkeypatch.setattr(options, "cores", lambda cores=cores: cores)
        assert options.rank_count("auto") == ranks


@pytest.mark.pure
def test_version(capfd):
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert re.fullmatch(r"sherd .+\n", capfd.readouterr().out)


def test_run_starts_ranks_and_passes_on_their_arguments(here):
    result = sherd("run", "-n", "2", str(here / "rank_script.py"), "pass", "SIGUSR1", "SIGHUP")
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    assert [(note["RANK"], note["WORLD_SIZE"], note["LOGLEVEL"]) for note in notes(here)] == [
        ("0", "2", None),
        ("1", "2", None),
    ]
    for note in notes(here):
        assert note["arguments"] == ["pass", "SIGUSR1", "SIGHUP"]
        assert int(note["OMP_NUM_THREADS"]) == max(1, len(os.sched_getaffinity(0)) // 2)


def test_torchruns_spellings_and_warnings_and_the_strategy(here, monkeypatch):
    (here / "echo.py").write_text("import os; print(os.environ['RANK'], os.environ['SHERD_STRATEGY'])")
    monkeypatch.setenv("SHERD_TIMOUT", "3")
    count = 2 * len(os.sched_getaffinity(0)) + 1
    spelt = ["--nproc_per_node", str(count), "--nnodes", "1", "--node_rank", "0", "--standalone"]
    spelt += ["--master_port", "12345"]
    result = sherd("run", *spelt, "--strategy", "zero1", "echo.py")
    plain = [line.rpartition("] ")[2] for line in result.stdout.splitlines()]
    assert (result.returncode, sorted(plain, key=lambda line: int(line.split()[0]))) == (
        0,
        [f"{rank} zero1" for rank in range(count)],
    )
    warnings = [line for line in result.stderr.splitlines() if "warning" in line]
    assert warnings[0] == "sherd run: warning: SHERD_TIMOUT is not known; did you mean SHERD_TIMEOUT?"
    assert warnings[1].startswith(f"sherd run: warning: {count} ranks on ")


def test_run_takes_a_module_of_this_directory_and_keeps_omp_num_threads(here, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    result = sherd("run", "-m", "rank_script")
    assert (result.returncode, result.stderr) == (0, "")
    assert [(note["WORLD_SIZE"], note["OMP_NUM_THREADS"]) for note in notes(here)] == [("1", "3")]


def test_options_after_the_script_are_the_scripts(here):
    (here / "echo.py").write_text("import sys; print(sys.argv[1:])")
    result = sherd("run", "echo.py", "-n", "5", "--help", "--", "-m")
    assert (result.returncode, result.stdout) == (0, "['-n', '5', '--help', '--', '-m']\n")
    note = "note: -n comes after the script, so it is passed to the script; options of sherd come before it"
    assert result.stderr == f"sherd run: {note}\n"


def test_a_full_disk_is_said_in_one_line(here):
    (here / "say.py").write_text("print('word')")
    for command, name in ((["--help"], "sherd: stdout"), (["run", "-n", "2", "say.py"], "sherd run: no more")):
        with Path("/dev/full").open("w") as full:
            result = subprocess.run(
                [*SHERD, *command], stdout=full, stderr=subprocess.PIPE, text=True, timeout=PATIENCE, check=False
            )
        assert result.stderr.count("No space left on device") == 1, result.stderr
        assert result.stderr.startswith(name)


def test_two_machines_meet_at_the_master(here):
    meeting = ["--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    script = str(here / "rank_script.py")
    nodes = [subprocess.Popen([*SHERD, "run", *meeting, "--node-rank", node, script]) for node in "01"]
    assert [node.wait(timeout=PATIENCE) for node in nodes] == [0, 0]
    assert [(note["RANK"], note["LOCAL_RANK"], note["WORLD_SIZE"]) for note in notes(here)] == [
        ("0", "0", "2"),
        ("1", "0", "2"),
    ]


def test_the_first_rank_to_fail_is_named_after_its_own_traceback(here):
    result = sherd("run", "-n", "3", str(here / "rank_script.py"), "raise")
    assert result.returncode == 1
    traceback, *summary = re.split(r"^(?=sherd run: )", result.stderr, flags=re.MULTILINE)
    assert traceback.startswith("[rank 1] Traceback (most recent call last):")
    assert traceback.count("Traceback") == 1
    assert traceback.endswith("ValueError: the weather is bad\n")
    assert re.fullmatch(r"sherd run: rank 1 failed first \(pid \d+\): exit code 1; see its output above\n", summary[0])
    assert summary[1:] == ["sherd run: after it, ranks 0, 2: ended by SIGTERM\n"]


def test_a_killed_rank_is_named_with_its_signal(here):
    result = sherd("run", "-n", "2", str(here / "rank_script.py"), "kill")
    assert result.returncode == 128 + signal.SIGKILL
    assert re.match(r"sherd run: rank 1 failed first \(pid \d+\): killed by SIGKILL", result.stderr)
    assert "Traceback" not in result.stderr


def test_a_traceback_that_the_rank_recorded_is_shown(here):
    result = sherd("run", "-n", "2", str(here / "rank_script.py"), "record")
    assert result.returncode == 7
    lines = result.stderr.splitlines()
    assert re.fullmatch(r"sherd run: rank 1 failed first \(pid \d+\): exit code 7", lines[0])
    assert lines[1:] == ["recorded by rank 1", "sherd run: after it, rank 0: ended by SIGTERM"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_and_leaves_no_rank(here, number):
    with two_ranks_that_sleep(here) as process:
        process.send_signal(number)
        assert process.wait(timeout=PATIENCE) == 128 + number
    assert ranks_alive(here) == []
    stderr = (here / "stderr").read_text()
    assert stderr.endswith(f"sherd run: stopped by {number.name}; all ranks have ended\n")
    assert "torch/distributed" not in stderr


@pytest.mark.alone
def test_pressing_ctrl_c_again_ends_ranks_that_ignore_it(here):
    with two_ranks_that_sleep(here, "SIGINT", "SIGTERM") as process:
        start = time.monotonic()
        while process.poll() is None:
            process.send_signal(signal.SIGINT)
            time.sleep(0.3)
        assert time.monotonic() - start < 8
    assert ranks_alive(here) == []
    assert process.returncode == 128 + signal.SIGINT


def catches(pid, number):
    """Whether a process has a handler of its own for this signal."""
    caught = re.search(r"^SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), flags=re.MULTILINE)
    return bool(int(caught.group(1), 16) & 1 << number - 1)


@pytest.mark.parametrize("delay", [0.0, 0.3])
def test_a_signal_while_the_run_is_being_set_up_ends_it(here, delay):
    with subprocess.Popen([*SHERD, "run", str(here / "rank_script.py"), "sleep"]) as process:
        wait_for(lambda: catches(process.pid, signal.SIGTERM))
        time.sleep(delay)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=PATIENCE) == 128 + signal.SIGTERM


def test_doctor_prints_a_table():
    result = sherd("doctor")
    assert (result.returncode, result.stderr) == (0, "")
    for word in ("python", "torch", "gloo", "cores", "memory", "memfd", "futex", "pidfd", "/dev/shm", "transport"):
        assert re.search(rf"\b{word}\b" if word[0] != "/" else word, result.stdout), word


def test_doctor_prints_json(capfd):
    with pytest.raises(SystemExit):
        main(["doctor", "--json"])
    facts = json.loads(capfd.readouterr().out)
    assert facts["python"] == ".".join(map(str, sys.version_info[:3]))
    assert facts["cores"] == len(os.sched_getaffinity(0))
    assert facts["gloo"] is True
    assert facts["transport"] == ("host" if facts["host_unsupported"] is None else "c10d")
