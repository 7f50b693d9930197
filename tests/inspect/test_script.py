"""A script profiled as a whole: its steps, its output, its mistakes."""

import sys
import textwrap

import pytest

from fuselab.errors import TargetError
from fuselab.inspect import script_runner
from fuselab.inspect.script import profile_script


def write(folder, text):
    (folder / "sibling.py").write_text("FEATURES = 16\n")
    (folder / "train.py").write_text(textwrap.dedent(text))
    return str(folder / "train.py")


def test_optimizer_steps_are_the_steps(tmp_path, capfd):
    script = write(
        tmp_path,
        """
        import sys
        import torch
        from torch.profiler import record_function
        from sibling import FEATURES

        print("arguments", *sys.argv[1:])
        model = torch.nn.Linear(FEATURES, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if __name__ == "__main__":
            for _ in range(8):
                with record_function("[blue]mine"):
                    loss = model(torch.ones(4, FEATURES)).sum()
                loss.backward()
                optimizer.step()
        """,
    )
    found = profile_script(script, ["--epochs", "3"])
    assert found.name == "train.py" and found.steps == 3
    ranges = {row.name: row.calls for row in found.tables.ranges}
    assert ranges["[blue]mine"] == 1
    assert "train.py:14" in {row.name for row in found.tables.lines}
    output = capfd.readouterr()
    assert output.out == "" and "arguments --epochs 3" in output.err


def test_an_optimizers_operators_are_not_the_users_to_batch(tmp_path):
    script = write(
        tmp_path,
        """
        import torch

        parameters = [torch.nn.Parameter(torch.ones(8)) for _ in range(16)]
        optimizer = torch.optim.Adam(parameters, foreach=False)
        for _ in range(8):
            sum(p.sum() for p in parameters).backward()
            optimizer.step()
        """,
    )
    found = profile_script(script, []).findings
    assert "many small optimizer kernels" in {finding.kind for finding in found}
    repeated = [f.line_number for f in found if f.kind == "repeated small operator"]
    assert set(repeated) == {7}  # the sums, and not the optimizer's step


def test_a_script_without_an_optimizer_is_one_step(tmp_path):
    found = profile_script(
        write(tmp_path, "import torch\ntorch.ones(8, 8) @ torch.ones(8, 8)\n"), []
    )
    assert found.steps == 1
    assert next(r for r in found.tables.operators if r.name == "aten::mm").calls == 1


def test_a_module_of_a_package_is_a_script_too(tmp_path, monkeypatch):
    package = tmp_path / "mine"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "sizes.py").write_text("FEATURES = 8\n")
    (package / "train.py").write_text(
        "import sys\nimport torch\nfrom .sizes import FEATURES\n"
        "assert sys.argv[1:] == ['--small'] and sys.argv[0].endswith('train.py')\n"
        "torch.ones(8, FEATURES) @ torch.ones(FEATURES, 8)\n"
    )
    (package / "__main__.py").write_text("from . import train\n")
    monkeypatch.chdir(tmp_path)
    found = profile_script("-m", ["mine.train", "--small"])
    assert found.name == "mine.train" and found.steps == 1
    assert next(r for r in found.tables.operators if r.name == "aten::mm").calls == 1
    with pytest.raises(TargetError, match=r"mine raised AssertionError \(train.py:4\)"):
        profile_script("-m", ["mine"])
    with pytest.raises(TargetError, match=r"no module is called 'mine\.gone'"):
        profile_script("-m", ["mine.gone"])


def test_a_script_that_ends_the_process(tmp_path):
    with pytest.raises(TargetError, match=r"exit status 4\) before its profile was written"):
        profile_script(write(tmp_path, "import os; os._exit(4)"), [])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "x = 1\nraise ValueError('[red]no')",
            "train.py raised ValueError: [red]no (train.py:2).",
        ),
        ("import sys; sys.exit(3)", "train.py exited with 3; it must succeed to be profiled."),
    ],
)
def test_scripts_that_fail(tmp_path, monkeypatch, text, words):
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert script_runner.run(write(tmp_path, text), [], (1, 1, 3, 1)) == words


def test_a_script_that_a_signal_ends_and_one_that_profiles_itself(tmp_path):
    ended = write(tmp_path, "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    with pytest.raises(TargetError) as raised:
        profile_script(ended, [])
    assert str(raised.value).endswith("was ended by SIGKILL before its profile was written.")
    ended = write(
        tmp_path, "import torch.profiler, os, signal\nos.kill(os.getpid(), signal.SIGKILL)"
    )
    with pytest.raises(TargetError, match="seems to start PyTorch's profiler itself"):
        profile_script(ended, [])


def test_a_missing_script(tmp_path):
    with pytest.raises(TargetError, match="no file"):
        profile_script(str(tmp_path / "nope.py"), [])


def test_an_optimizer_that_steps_within_the_backward(tmp_path):
    found = profile_script(
        write(
            tmp_path,
            """
            import torch

            model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
            optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
            for parameter in model.parameters():
                parameter.register_post_accumulate_grad_hook(lambda p: optimizers[p].step())
            for _ in range(8):
                model(torch.ones(4, 8)).sum().backward()
            """,
        ),
        [],
    )
    assert found.steps == 3
    ranges = {row.name: row.calls for row in found.tables.ranges}
    assert ranges["Optimizer.step#SGD.step"] == 4  # one of each parameter
    assert next(r for r in found.tables.operators if r.name == "aten::addmm").calls == 2
