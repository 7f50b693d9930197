"""TARGET: what it resolves to, how its inputs reach it, and the one sentence for each mistake."""

import random
import sys
from pathlib import Path

import pytest
import torch

import fuselab.models
from fuselab.errors import DeviceError, TargetError
from fuselab.inspect import targets

TARGETS = Path(__file__).parent / "targets"


@pytest.fixture
def write(tmp_path):
    def write(text: str, name: str = "mine.py") -> str:
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write


INPUTS = "\nimport torch\ndef get_inputs():\n    return [torch.ones(2)]\n"


def refused(spec: str, **options) -> str:
    with pytest.raises(TargetError) as error:
        targets.load(spec, **options)
    message = str(error.value)
    assert "\n" not in message and message.endswith(".")
    return message


def test_model_is_found_without_a_name_and_built_from_get_init_inputs():
    target = targets.load(str(TARGETS / "linear_relu.py"))
    assert target.is_module
    assert target.name == "Model"
    assert target.callable.first.weight.shape == (8, 6)
    assert target.file == str(TARGETS / "linear_relu.py")
    assert target.run().shape == (4, 1)


def test_loading_twice_gives_the_same_weights_and_inputs_and_leaves_the_callers_state_alone():
    torch.manual_seed(5)
    random.seed(5)
    expected = torch.rand(3), random.random()
    torch.manual_seed(5)
    random.seed(5)
    first = targets.load(str(TARGETS / "linear_relu.py"))
    assert torch.equal(torch.rand(3), expected[0])
    assert random.random() == expected[1]
    second = targets.load(str(TARGETS / "linear_relu.py"))
    assert torch.equal(first.args[0], second.args[0])
    assert torch.equal(first.run(), second.run())


def test_the_only_public_callable_is_taken_and_imported_ones_do_not_count(write):
    file = write(
        "from torch.nn.functional import relu\ndef double(x):\n    return x * 2\n" + INPUTS
    )
    target = targets.load(file)
    assert target.name == "double" and not target.is_module
    assert torch.equal(target.run(), torch.full((2,), 2.0))


def test_two_public_callables_need_a_name(write):
    file = write("def a(x):\n    return x\ndef b(x):\n    return -x\n" + INPUTS)
    assert "defines a, b; say which" in refused(file)
    assert torch.equal(targets.load(f"{file}:b").run(), -torch.ones(2))


def test_a_path_with_a_colon_is_a_path(tmp_path):
    folder = tmp_path / "a:b"
    folder.mkdir()
    (folder / "m.py").write_text("def f(x):\n    return x\ndef g(x):\n    return x + 1\n" + INPUTS)
    assert torch.equal(targets.load(f"{folder}/m.py:g").run(), torch.full((2,), 2.0))


def test_import_path(monkeypatch):
    monkeypatch.syspath_prepend(str(TARGETS))
    assert targets.load("linear_relu:Model").run().shape == (4, 1)
    assert "no 'Modle'; it has Model (did you mean 'Model'?)" in refused("linear_relu:Modle")
    assert "no module 'no_such_package'" in refused("no_such_package.inner:f")


def test_built_in_name(monkeypatch):
    monkeypatch.syspath_prepend(str(TARGETS))
    monkeypatch.setitem(fuselab.models.BUILT_IN, "tiny", "linear_relu:Model")
    target = targets.load("tiny")
    assert target.name == "tiny" and target.run().shape == (4, 1)
    assert "did you mean 'tiny'?" in refused("tinny")


@pytest.mark.parametrize(
    ("offer", "shape"),
    [
        ("[3, 5]", (5, 3)),
        ("{'inner': 3, 'outer': 5}", (5, 3)),
        ("[[3], {'outer': 5}]", (5, 3)),
        ("[[], {'inner': 3, 'outer': 5}]", (5, 3)),
        ("3", (4, 3)),
    ],
)
def test_the_forms_of_get_init_inputs(write, offer, shape):
    file = write(
        "import torch\nclass Model(torch.nn.Module):\n"
        "    def __init__(self, inner, outer=4):\n        super().__init__()\n"
        "        self.linear = torch.nn.Linear(inner, outer)\n"
        "    def forward(self, x):\n        return self.linear(x)\n"
        f"def get_init_inputs():\n    return {offer}\n"
        "def get_inputs():\n    return [torch.ones(1, 3)]\n"
    )
    assert targets.load(file).callable.linear.weight.shape == shape


@pytest.mark.parametrize(
    "offer", ["[torch.ones(2)]", "(torch.ones(2),)", "torch.ones(2)", "{'x': torch.ones(2)}"]
)
def test_the_forms_of_get_inputs(write, offer):
    file = write(
        f"import torch\ndef f(x, y=1.0):\n    return x + y\ndef get_inputs():\n    return {offer}\n"
    )
    assert torch.equal(targets.load(file).run(), torch.full((2,), 2.0))


def test_inputs_keep_requires_grad_and_containers(write):
    file = write(
        "import torch\nfrom collections import namedtuple\n"
        "Pair = namedtuple('Pair', 'left right')\n"
        "def f(pair, table):\n    return pair.left * table['w']\n"
        "def get_inputs():\n    w = torch.ones(2, requires_grad=True)\n"
        "    return [Pair(torch.ones(2), 3), {'w': w}]\n"
    )
    target = targets.load(f"{file}:f")
    assert target.args[1]["w"].requires_grad and target.args[1]["w"].is_leaf
    assert target.run().requires_grad


def test_data_reaches_get_inputs(write):
    file = write(
        "import torch\ndef f(x):\n    return x\n"
        "def get_inputs(data=None):\n    return [torch.ones(2 if data is None else len(data))]\n"
    )
    assert targets.load(file).run().shape == (2,)
    assert targets.load(file, data="12345").run().shape == (5,)
    plain_inputs = write("def f(x):\n    return x\n" + INPUTS, "plain.py")
    assert "takes no parameter 'data'" in refused(plain_inputs, data="x.tsv")


def test_mistakes_in_the_target_text(tmp_path):
    assert "no file" in refused(str(tmp_path / "nope.py"))
    assert "did you mean 'linear_relu.py'" in refused(str(TARGETS / "linear_rely.py"))
    assert "is a folder" in refused(str(tmp_path))
    assert "no file, module or built-in model is called 'nope'" in refused("nope")


def test_a_model_that_the_file_imports_under_this_name(write):
    file = write("from torch.nn import ReLU as Model\n" + INPUTS)
    assert isinstance(targets.load(str(file)).callable, torch.nn.ReLU)


def test_mistakes_in_the_file(write):
    assert "has no get_inputs()" in refused(write("def f(x):\n    return x\n"))
    assert "defines no public function" in refused(write("x = 1\n"))
    file = write("class Plain:\n    pass\nx = 3\n" + INPUTS)
    assert "'Plain' in mine.py is a class that is no nn.Module" in refused(f"{file}:Plain")
    assert "'x' in mine.py is an int" in refused(f"{file}:x")
    raising = write("y = 1\n\nz = y / 0\n")
    assert "importing mine.py raised ZeroDivisionError: division by zero (mine.py:3)" in refused(
        raising
    )
    assert "SyntaxError" in refused(write("def f(:\n    pass\n"))
    assert "(mine.py:1)" in refused(write("def f(:\n    pass\n"))
    assert "SystemExit: 3" in refused(write("import sys\nsys.exit(3)\n"))
    assert "ModuleNotFoundError" in refused(write("import no_such_thing_at_all\n"))


def test_a_file_reads_no_arguments_of_the_verb(write, monkeypatch):
    monkeypatch.setattr("sys.argv", ["fuselab", "profile", "mine.py:f", "--batches", "4"])
    text = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--rows", type=int, default=3)
options = parser.parse_args()
def f(x):
    return x * options.rows
def get_inputs():
    import torch
    return [torch.ones(2)]
"""
    assert targets.load(write(text)).callable(2) == 6
    assert sys.argv[0] == "fuselab"


@pytest.mark.parametrize("text", ["import sys\nsys.exit(2)\n", "loss = 1.0\n"])
def test_a_script_is_told_how_it_is_profiled(write, text):
    path = write(text)
    name = Path(path).name
    with pytest.raises(TargetError, match=f"script, 'fuselab profile -- python {name}' profiles"):
        targets.load(path)


def test_wrong_inputs(write):
    two = write("def f(x, y):\n    return x + y\n" + INPUTS)
    assert "get_inputs() does not fit f(x, y): missing a required argument: 'y'" in refused(two)
    none = write("def f(x):\n    return x\ndef get_inputs():\n    return None\n")
    assert "returned NoneType" in refused(none)
    model = write(
        "import torch\nclass Model(torch.nn.Module):\n    def __init__(self, n):\n"
        "        super().__init__()\n    def forward(self, x):\n        return x\n" + INPUTS
    )
    assert "without get_init_inputs() does not fit Model(n)" in refused(model)


def test_a_raising_function_names_the_exception_and_the_users_line(write):
    file = write(
        "import torch\ndef inner(x):\n    return x @ torch.ones(7, 7)\n"
        "def f(x):\n    return inner(x)\n" + INPUTS
    )
    with pytest.raises(TargetError, match=r"f raised when it ran: RuntimeError: .* \(mine.py:3\)"):
        targets.load(f"{file}:f").run()


def test_hostile_text_stays_one_plain_line(write):
    file = write(
        "def f(x):\n    raise ValueError('[red]\\x1b[31m<script>\\nsecond line')\n" + INPUTS
    )
    with pytest.raises(TargetError) as error:
        targets.load(file).run()
    assert "ValueError: [red] [31m<script> second line (mine.py:2)" in str(error.value)


def test_devices():
    with pytest.raises(DeviceError, match="'warp' is no device"):
        targets.load(str(TARGETS / "linear_relu.py"), "warp")
    if not torch.cuda.is_available():
        with pytest.raises(DeviceError, match="'cuda' is not there"):
            targets.load(str(TARGETS / "linear_relu.py"), "cuda")


@pytest.mark.gpu
def test_weights_and_inputs_move_to_the_gpu():
    target = targets.load(str(TARGETS / "linear_relu.py"), "cuda")
    assert target.args[0].is_cuda and target.callable.first.weight.is_cuda
    assert target.run().is_cuda
