"""What ranks write: whole lines, by rank, without loss; one traceback where several say the same."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sherd.cli.launch.request import Showing
from sherd.cli.output.forwarding import output_of
from sherd.cli.output.pieces import Pieces
from sherd.cli.output.tracebacks import Tracebacks, exception_of
from tests.cli.scripts import in_terminal
from tests.helpers.processes import PATIENCE, SHERD, python, sherd

pytestmark = pytest.mark.ranks


def run_codes(codes, showing=None):
    """Plain interpreters in the place of ranks: what each is to run."""
    with output_of(showing or Showing(), len(codes)) as output:
        processes = []
        for rank, code in enumerate(codes):
            command = [sys.executable, "-I", "-S", "-u", "-c", code]
            processes.append(subprocess.Popen(command, **output.files(rank)))
            output.started(rank)
        for process in processes:
            process.wait(PATIENCE)


def by_rank(text):
    """The lines of each rank, without their prefix; every line must be whole."""
    found = {}
    for line in text.splitlines():
        match = re.match(r"\[rank (\d+)\] ", line)
        found.setdefault(int(match[1]) if match else 0, []).append(line[match.end() :] if match else line)
    return found


def test_rank_0_passes_through_and_others_have_a_prefix(capfd):
    code = "import sys; print('out {0}'); print('err {0}', file=sys.stderr)"
    run_codes([code.format(rank) for rank in range(3)])
    output = capfd.readouterr()
    assert sorted(output.out.splitlines()) == ["[rank 1] out 1", "[rank 2] out 2", "out 0"]
    assert sorted(output.err.splitlines()) == ["[rank 1] err 1", "[rank 2] err 2", "err 0"]


def test_a_flood_of_several_ranks_is_whole_and_complete(capfd):
    code = "import sys\nfor i in range(20000): sys.stdout.write(f'{i} '); sys.stdout.write('x' * (i % 97) + '\\n')"
    run_codes([code.replace("'x'", f"'{letter}'") for letter in "abc"])
    found = by_rank(capfd.readouterr().out)
    for rank, letter in enumerate("abc"):
        assert found[rank] == [f"{i} {letter * (i % 97)}" for i in range(20000)]


def test_bytes_of_rank_0_are_not_touched(capfdbinary):
    everything = bytes(range(256)) * 300  # longer than what is kept of a line; no line feed at the end
    run_codes(["import sys; sys.stdout.buffer.write(bytes(range(256)) * 300)", "pass"])
    assert capfdbinary.readouterr().out == everything


def test_an_unfinished_line_is_not_continued_by_another_rank(capfd):
    run_codes(["import time; print('half', end=''); time.sleep(0.5); print('whole')", "print('other')"])
    assert sorted(capfd.readouterr().out.splitlines()) == ["[rank 1] other", "halfwhole"]
    run_codes(["print('no end', end='')", "import time; time.sleep(0.5); print('other', end='')"])
    assert capfd.readouterr().out == "no end\n[rank 1] other"


def test_progress_bars(capfd):
    run_codes(["import sys\nfor i in range(3): sys.stderr.write(f'\\r{i}/3')\nsys.stderr.write('\\n')", "pass"])
    assert capfd.readouterr().err == "\r0/3\r1/3\r2/3\n"


def test_what_a_rank_leaves_behind_is_not_waited_for(capfd):
    code = "import subprocess; print(subprocess.Popen(['sleep', '600']).pid)"
    run_codes([code, code])  # or this would take as long
    left = [int(line.split()[-1]) for line in capfd.readouterr().out.splitlines()]
    assert len(left) == 2
    for pid in left:
        os.kill(pid, signal.SIGKILL)  # raises if it has ended


def test_a_file_per_rank(capfd, tmp_path):
    code = "import sys; print('out {0}'); print('err {0}', file=sys.stderr)"
    run_codes([code.format(0), code.format(1)], Showing(log_dir=tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank00000.log", "rank00001.log"]
    assert sorted((tmp_path / "rank00001.log").read_text().splitlines()) == ["err 1", "out 1"]
    assert "[rank 1] out 1\n" in capfd.readouterr().out


@pytest.mark.parametrize("hook", ["", "[rank{0}]: "])
def test_a_traceback_that_all_share_is_shown_once(capfd, hook):
    lines = ["Traceback (most recent call last):", '  File "x.py", line 1', "ValueError: rank {0} (pid 1{0}) is", "bad"]
    code = "import sys, time; time.sleep(0.{0}); sys.stderr.write({1!r})"
    texts = ["".join(f"{hook}{line}\n" for line in lines).format(rank) for rank in range(4)]
    codes = [code.format(rank, text) for rank, text in enumerate(texts)]
    run_codes([*codes, code.format(4, texts[0].replace("bad", "good").replace("[rank0]", "[rank4]"))])
    output = capfd.readouterr().err
    assert output.count("Traceback") == 2
    assert "sherd run: ranks 1-3: the same\n" in output
    assert "[rank 4] [rank" not in output
    assert re.search(r"^\[rank 4\] .*good$", output, flags=re.MULTILINE)


@pytest.mark.pure
def test_a_rank_that_was_killed_in_the_middle_of_the_same_traceback():
    shown, said = [], []
    tracebacks = Tracebacks(lambda rank, lines: shown.append(rank), said.append)
    for rank, lines in ((0, [b"E: what\n"]), (1, [b"E: w"]), (2, [])):
        tracebacks.take(rank, [b"Traceback (most recent call last):\n", b"  File\n", *lines])
        tracebacks.release(rank, killed=rank > 0)
    tracebacks.close()
    assert (shown, said) == ([0], ["ranks 1-2: the same"])


@pytest.mark.pure
def test_a_rank_that_says_the_same_again_is_heard():
    shown, said = [], []
    tracebacks = Tracebacks(lambda rank, lines: shown.append(rank), said.append)
    for rank in (0, 1, 0, 1):
        tracebacks.take(rank, [b"Traceback (most recent call last):\n", b"  File\n", b"E: what\n"])
        tracebacks.release(rank)
    tracebacks.close()
    assert (shown, said) == ([0, 0], ["rank 1: the same", "rank 1: the same"])


@pytest.mark.pure
def test_the_same_last_words_are_shown_once():
    shown, said = [], []
    tracebacks = Tracebacks(lambda rank, lines: shown.append((rank, b"".join(lines))), said.append)
    tracebacks.take(0, [b"usage: x\n"])
    tracebacks.take(1, [b"usage: x\n", b"x: error: rank 1 does not like it\n"])  # before rank 0 has come to its error
    tracebacks.take(0, [b"x: error: rank 0 does not like it\n"])
    tracebacks.take(2, [b"usage: x\n", b"another error\n"])
    tracebacks.take(3, [b"usage: x\n"])
    for rank in range(3):
        tracebacks.release(rank, failed=True)
    tracebacks.release(3)  # has not failed
    tracebacks.close()
    assert [rank for rank, _ in shown] == [0, 0, 2, 3]
    assert shown[2][1] == b"usage: x\nanother error\n"
    assert said == ["rank 1: the same"]


def test_ranks_that_refuse_their_arguments_say_so_once(here):
    (here / "parse.py").write_text(
        "import argparse, time\np = argparse.ArgumentParser(); p.add_argument('--epochs', type=int); p.parse_args()\n"
    )
    result = sherd("run", "-n", "3", "parse.py", "--epochs", "x")
    assert result.returncode == 2
    assert 1 <= result.stderr.count("invalid int value") <= 2  # two may come to their ends between two looks
    (here / "quit.py").write_text("import sys; sys.exit(3)")
    result = sherd("run", "-n", "2", "quit.py")
    assert result.returncode == 3
    assert "see its output" not in result.stderr


@pytest.mark.pure
def test_the_exception_of_a_chain_is_the_last():
    text = b"""Traceback (most recent call last):
  File "a"
KeyError: 1

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "b"
OSError: rank 7 at 0x7f00 on port 4711
"""
    assert exception_of(text.splitlines(keepends=True)) == b"OSError: # at # on #"


@pytest.mark.pure
@given(st.lists(st.binary(max_size=12).map(lambda data: data.replace(b"\x00", b"\n").replace(b"\x01", b"\r"))))
def test_pieces_are_the_bytes_that_came(chunks):
    pieces = Pieces()
    found = [piece for chunk in chunks for piece in pieces.cut(chunk)]
    assert b"".join(found) + pieces.take() == b"".join(chunks)
    assert all(piece.endswith((b"\n", b"\r")) for piece in found)
    assert not any(b"\n" in piece[:-1] for piece in found)


def test_ranks_learn_that_nobody_reads_their_output(here):
    (here / "endless.py").write_text("while True: print('y' * 99)")
    command = [*SHERD, "run", "-n", "2", "endless.py"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(PATIENCE) == 1
        assert b"BrokenPipeError" in process.stderr.read()


def test_ctrl_c_shows_one_traceback(here):
    (here / "rank_script.py").write_text(
        "import os, time; print('ready', flush=True)\nwhile True: time.sleep(0.01 * (1 + int(os.environ['RANK'])))"
    )
    command = [*SHERD, "run", "-n", "3", str(here / "rank_script.py")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        for _ in range(3):
            assert "ready" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 128 + signal.SIGINT
    assert errors.count("Traceback") == 1
    assert re.search(r"^sherd run: ranks (0-1|0, 2|1-2): interrupted as well$", errors, flags=re.MULTILINE)
    assert errors.endswith("sherd run: stopped by SIGINT; all ranks have ended\n")


def test_one_rank_has_the_terminal_itself(here):
    script = "import sys; print([f.isatty() for f in (sys.stdin, sys.stdout, sys.stderr)])\nx = 6\nbreakpoint()\n"
    (here / "ask.py").write_text(script + "print('hello', input('name? '))\n")
    answers = [(b"(Pdb) ", b"p x * 7\n"), (b"42", b"c\n"), (b"name? ", b"Ann\n")]
    shown, status = in_terminal([*SHERD, "run", "ask.py"], answers)
    assert status == 0, shown
    assert "[True, True, True]" in shown
    assert "hello Ann" in shown


def test_prefixes_have_colours_in_a_terminal(here):
    (here / "say.py").write_text("print('word')")
    shown, status = in_terminal([*SHERD, "run", "-n", "2", "say.py"])
    assert (status, sorted(shown.splitlines())) == (0, ["\x1b[36m[rank 1]\x1b[0m word", "word"])


def test_quiet_and_logs_of_a_run(here):
    (here / "say.py").write_text("import os; print('word of', os.environ['RANK'])")
    result = sherd("run", "-n", "2", "--quiet", "--log-dir", "logs/new", "say.py")
    assert (result.returncode, sorted(result.stdout.splitlines())) == (0, ["[rank 1] word of 1", "word of 0"])
    assert (here / "logs" / "new" / "rank00001.log").read_text() == "word of 1\n"


def test_other_commands_run_ranks_and_have_their_signals_back(here):
    (here / "say.py").write_text("import os, sys; print(os.environ['RANK'], sys.argv[1:]); sys.exit(3)")
    code = """
import signal
from sherd.cli.run import run_command
print("status", run_command(["say.py", "--x"], 1, quiet=True), flush=True)
signal.raise_signal(signal.SIGTERM)
"""
    result = python(code)
    assert (result.returncode, result.stdout) == (-signal.SIGTERM, "0 ['--x']\nstatus 3\n"), result.stderr
