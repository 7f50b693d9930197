"""``fuselab asm`` from the command line: the screen, the files, the JSON and the refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import fuselab
from fuselab.cli.main import run
from fuselab.inspect.assembly import summary, tools
from fuselab.inspect.assembly.architectures import architecture
from fuselab.inspect.assembly.subjects import Request, compiled
from fuselab.report.asm_text import _overview

TARGETS = Path(__file__).parent / "targets"
VECTOR_ADD, KERNELS_CU = str(TARGETS / "vector_add.py"), str(TARGETS / "kernels.cu")
DOCS = Path(__file__).resolve().parents[2] / "docs"


def called(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert run(["asm", *words]) == 0
    return capsys.readouterr().out


def test_the_screen_has_80_columns_and_the_numbers_of_the_json(tmp_path, capsys):
    file = tmp_path / "asm.json"
    text = called(capsys, VECTOR_ADD, "--json", str(file))
    facts = json.loads(file.read_text())
    assert (facts["schema"], facts["verb"], facts["architecture"]) == (1, "asm", "sm_90")
    (kernel,) = facts["kernels"]
    assert max(map(len, text.splitlines())) <= 80
    expected = summary.summarised(compiled(Request(VECTOR_ADD, architecture("sm_90"))).kernels[0])
    assert kernel["registers"] == expected.registers
    assert kernel["occupancy"]["blocks"] == 16 and kernel["grid"] == [98, 1, 1]
    assert f"{expected.registers} per thread, {expected.most_live} live at most" in text
    assert "16 blocks, 64 of 64 warps (100 %), limited by" in text
    assert "global load 128 bit x4, global store 128 bit x2" in text
    assert "line 13 load 4 x 128 bit: 16/16 sectors" in text
    assert "98 blocks, and H100 SXM has 132" in " ".join(text.split())


def test_stages_and_files(tmp_path, capsys):
    folder = tmp_path / "out"
    text = called(capsys, VECTOR_ADD, "--stage", "ptx", "--arch", "sm_80", "-o", str(folder))
    assert ".target sm_80" in text and "ld.global.v4.b32" in text
    names = sorted(path.name for path in folder.iterdir())
    stages = ("llir", "ptx", "sass", "ttgir", "ttir")
    assert names == [f"add_add_kernel.sm_80.{stage}" for stage in stages]
    assert "LDG.E.128" in (folder / "add_add_kernel.sm_80.sass").read_text()
    assert "tt.load" in (folder / "add_add_kernel.sm_80.ttir").read_text()
    assert "#ttg.blocked" in (folder / "add_add_kernel.sm_80.ttgir").read_text()
    amd = called(capsys, VECTOR_ADD, "--stage", "amdgcn", "--arch", "gfx942")
    assert "buffer_load_dwordx4" in amd and "s_endpgm" in amd


def test_annotated_instructions_have_their_source_line_and_live_registers(tmp_path, capsys):
    file = tmp_path / "asm.json"
    text = called(capsys, VECTOR_ADD, "--annotate", "--json", str(file))
    assert max(map(len, text.splitlines())) <= 80
    rows = json.loads(file.read_text())["kernels"][0]["instructions"]
    loads = [row for row in rows if "LDG.E.128" in row["text"]]
    assert len(loads) == 4 and all("tl.load(x + offsets" in row["source"] for row in loads)
    assert all(0 < row["live"] <= 40 for row in rows)
    lines = json.loads(file.read_text())["kernels"][0]["lines"]
    assert [line["line"] for line in lines] == [11, 12, 13, 14]
    assert sum(line["memory"] for line in lines) == 6


def test_two_architectures_settings_or_subjects_side_by_side(tmp_path, capsys):
    file = tmp_path / "asm.json"
    text = called(capsys, VECTOR_ADD, "--diff", "sm_86", "--json", str(file))
    assert max(map(len, text.splitlines())) <= 80
    facts = json.loads(file.read_text())
    left, right = (facts[side]["kernels"][0]["occupancy"] for side in ("left", "right"))
    assert (left["blocks"], right["blocks"]) == (16, 12)
    row = next(line.split() for line in text.splitlines() if "blocks per multiproc" in line)
    assert row[-3:] == ["16", "12", "-4"]
    text = called(capsys, VECTOR_ADD, "--diff", "num_warps=8")
    row = next(line.split() for line in text.splitlines() if "threads per block" in line)
    assert row[-3:] == ["128", "256", "+128"]
    text = called(capsys, VECTOR_ADD, "--diff", "BLOCK=256", "--stage", "ttir")
    assert "-" in text and "tensor<256x" in text and "tensor<1024x" in text
    signature = ("--signature", "*fp32, *fp32, i32:16, 1024")
    text = called(capsys, f"{VECTOR_ADD}:softmax_kernel", *signature, "--diff", "num_stages=1")
    assert "SHFL" not in text and "barriers" not in text and "BAR" in text


def test_an_ejected_package_is_compiled_like_the_library(tmp_path, capsys):
    import torch

    folder = tmp_path / "scaled_gelu"
    fuselab.eject(
        lambda x, y: torch.nn.functional.gelu(x) * y,
        torch.randn(64, 64),
        torch.randn(64, 64),
        out=folder,
        name="scaled_gelu",
        inference=True,
    )
    capsys.readouterr()
    for arch in ("sm_80", "sm_90"):  # of which the second has tuned blocks
        given = (str(folder), "--implementation", "triton", "--arch", arch)
        text = called(capsys, *given)
        assert "(triton forward)" in text and "global load 128 bit" in text


def test_names_in_the_overview_differ_where_they_end_differently():
    kernel = {
        "launched_by": "cuda backward",
        "occupancy": None,
        "static_shared_bytes": 4096,
        "dynamic_shared_bytes": 0,
        "registers": 168,
        "spill_store_bytes": 0,
        "spill_load_bytes": 0,
        "instructions": {"float32": 1398},
    }
    names = (
        "a_long_name_of_backward_input_kernel<RowTile<int>, float>",
        "a_long_name_of_backward_weight_kernel<RowTile<int>, float>",
    )
    lines = _overview([kernel | {"name": name} for name in names])
    assert max(map(len, lines)) <= 80
    first, second = (line.split()[0] for line in lines[-2:])
    assert first.endswith("put_kernel") and second.endswith("ght_kernel")
    sums = _overview([kernel | {"name": f"sum<{threads}>"} for threads in (128, 256)])
    assert [line.split()[0] for line in sums[-2:]] == ["sum<128>", "sum<256>"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["square", "--arch", "sm_60"], "unknown architecture 'sm_60'"),
        (["square", "--stage", "cubin"], "unknown stage 'cubin'"),
        (["square", "--dtype", "floaty"], "unknown dtype 'floaty'"),
        (["nope"], "unknown operator 'nope'"),
        (["README.txt"], "README.txt: no such file"),
        ([VECTOR_ADD, "--set", "BLOCK"], "write NAME=VALUE"),
        ([VECTOR_ADD, "--diff", "faster"], "--diff faster: it is no architecture"),
        ([VECTOR_ADD, "--stage", "amdgcn"], "no stage amdgcn on sm_90"),
        ([VECTOR_ADD, "--annotate", "--stage", "ptx"], "leave --stage and --diff out"),
        ([VECTOR_ADD, "--annotate", "--arch", "gfx942"], "--annotate is for NVIDIA's SASS"),
        ([VECTOR_ADD, "-o", "/dev/null/x"], "cannot write in /dev/null/x"),
        ([VECTOR_ADD, "--json", "/nowhere/x.json"], "cannot write /nowhere/x.json"),
        ([f"{VECTOR_ADD}:matmul_kernel", "--signature", "*fp16"], "takes 8"),
        ([KERNELS_CU, "--arch", "gfx942"], "does not compile for gfx942"),
        ([KERNELS_CU, "--stage", "ttir"], "has no stage ttir"),
    ],
)
def test_mistakes_are_one_sentence_and_status_2(arguments, words, capsys):
    assert run(["asm", *arguments]) == 2
    error = capsys.readouterr().err
    assert words in error and error.startswith("fuselab: ") and error.count("\n") == 1


def test_without_nvidias_tools_the_other_stages_still_work(monkeypatch, capsys):
    monkeypatch.setattr(tools, "_folders", lambda: iter(()))
    tools.path_of.cache_clear()
    summary.code_of.cache_clear()
    assert run(["asm", VECTOR_ADD, "--stage", "sass"]) == 2
    error = capsys.readouterr().err
    assert "nvdisasm is in none of" in error and "pip install triton" in error
    assert error.count("\n") == 1
    assert ".target sm_90" in called(capsys, VECTOR_ADD, "--stage", "ptx")
    tools.path_of.cache_clear()


TWO_FUNCTIONS = """
import torch
import triton
import triton.language as tl


@triton.autotune([triton.Config({"BLOCK": n}) for n in (64, 128)], key=["n"])
@triton.jit
def double_kernel(x, y, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + offsets, 2 * tl.load(x + offsets, offsets < n), offsets < n)


def double(x):
    y = torch.empty_like(x)
    double_kernel[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, y, x.numel())
    return y


def in_pytorch(x):
    return 2 * x


def get_inputs():
    return [torch.ones(1000)]
"""


def test_the_function_that_launches_is_found_beside_others(tmp_path, capsys):
    file = tmp_path / "two.py"
    file.write_text(TWO_FUNCTIONS)
    text = called(capsys, str(file))
    assert "double_kernel (double)" in text and "16 blocks of 128 threads; BLOCK=64" in text
    said = " ".join(text.split())
    assert "triton.autotune chooses among 2 configurations of double_kernel" in said
    file = tmp_path / "three.py"  # a file is imported once
    file.write_text(TWO_FUNCTIONS + "\n\ndef again(x):\n    return double(x)\n")
    assert run(["asm", str(file)]) == 2
    said = capsys.readouterr().err
    assert "several functions that launch kernels (double, again); name one" in said


def test_a_function_that_offers_something_launches_nothing(tmp_path, capsys):
    file = tmp_path / "model.py"
    file.write_text(
        "import torch\n"
        "def get_inputs():\n    return [torch.ones(4)]\n"
        "def get_optimizer(module):\n    return torch.optim.SGD(module.parameters(), 0.1)\n"
    )
    assert run(["asm", str(file)]) == 2
    assert capsys.readouterr().err.endswith("has no @triton.jit kernel and no FusedOp.\n")


def test_a_kernel_of_a_cuda_file_is_named_behind_a_colon_and_templates_are_told(tmp_path, capsys):
    file = tmp_path / "some.cu"
    file.write_text(
        "template <typename T, int B, bool F, class U = T>\n"
        "__global__ void first(T* x) { x[0] = B + F; }\n"
        "__global__ void second(float* x) { x[0] = 2; }\n"
        "__global__ void __launch_bounds__(64) third(float* x) { x[0] = 3; }\n"
    )
    text = called(capsys, f"{file}:second", "--threads", "128")
    assert "blocks of 128 threads" in text and "third" not in text and "first" not in text
    said = " ".join(called(capsys, str(file)).split())
    assert "left out: first in" in said and "is a template; name an instantiation" in said
    assert "for example --kernel 'first<float, 256, true>'" in said
    assert "first<float, 4, false>" in called(capsys, f"{file}:first<float, 4, false>")
    assert run(["asm", f"{file}:third", "--threads", "128"]) == 2
    assert "third is bound to 64 threads per block" in capsys.readouterr().err
    assert run(["asm", VECTOR_ADD, "--threads", "128"]) == 2
    assert "--threads is for a .cu file" in capsys.readouterr().err


DECORATED = """
import torch
import triton
import triton.language as tl


@triton.autotune([triton.Config({"BLOCK": n}, num_warps=2) for n in (512, 64)], key=["numel"])
@triton.heuristics({"EVEN": lambda values: values["numel"] % values["BLOCK"] == 0})
@triton.jit
def copy_kernel(x, out, numel, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = (offsets < numel) | EVEN
    tl.store(out + offsets, tl.load(x + offsets, inside), inside)


def get_inputs():
    x = torch.ones(1024)
    return OFFERED
"""


@pytest.mark.parametrize("launched", [False, True])
def test_a_decorated_kernel_is_compiled_as_its_decorators_choose(launched, tmp_path, capsys):
    file, result = tmp_path / f"kernels_{launched}.py", tmp_path / "asm.json"
    launcher = "\n\ndef copied(x):\n    copy_kernel[(2,)](x, torch.empty_like(x), x.numel())\n"
    offered = "[x]" if launched else "[x, torch.empty_like(x), 1024]"
    file.write_text(DECORATED.replace("OFFERED", offered) + launcher * launched)
    text = called(capsys, f"{file}:copy_kernel", "--json", str(result))
    (kernel,) = json.loads(result.read_text())["kernels"]
    chosen = {"BLOCK": "512", "EVEN": "True", "num_warps": "2", "num_stages": "3"}
    assert kernel["settings"] == chosen
    assert "among 2 configurations of copy_kernel" in " ".join(text.split())


@pytest.mark.parametrize("verb", [["asm"], ["new", "made", "--from"]])
def test_a_cuda_file_that_is_no_text_is_one_sentence(verb, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "binary.cu").write_bytes(b"\xff\xfe__global__ void f(float* x) {}")
    assert run([*verb, "binary.cu"]) == 2
    assert capsys.readouterr().err == (
        "fuselab: binary.cu is no text in UTF-8; give a file of CUDA C++.\n"
    )
