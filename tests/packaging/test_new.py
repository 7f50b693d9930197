"""``fuselab new``: what is derived of a user's kernel computes what its reference says."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
import torch

from fuselab.cli.main import run
from fuselab.errors import ArgumentError, FuselabError, TargetError
from fuselab.inspect.assembly.triton_roles import roles_of
from fuselab.packaging.cuda_block import Asked
from fuselab.packaging.new import check_name, new_package
from fuselab.packaging.sizes import Known, size_texts
from fuselab.prove.load import load_op
from fuselab.runtime import interpreter


def new(*words: str) -> int:
    return run(["new", *words])


def launched(package: str, *args: object) -> object:
    """Return what the launcher of a package computes in Triton's interpreter."""
    return interpreter.run(f"{Path(package).resolve()}/op.py:forward", *args)


def test_a_bare_kernel_with_a_reference_needs_nothing_else(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert new("rms", "--from", "rows.py", "--reference", "reference.py:rms") == 0
    said = capsys.readouterr().out
    assert "fill in" not in said
    assert "rms_kernel runs one program per row of x" in said
    x, w = torch.randn(7, 40), torch.randn(40)
    expected = load_op("rms").reference(x, w, 0.5)
    torch.testing.assert_close(launched("rms", x, w, 0.5), expected)
    kernels = (files / "rms" / "triton_kernels.py").read_text()
    assert "# A program owns one row.\n@triton.jit\ndef rms_kernel" in kernels
    assert "def rms(" not in kernels


def test_a_function_that_launches_brings_its_file_and_those_beside_it(files: Path) -> None:
    assert new("scaled", "--from", "scaled.py:scaled", "--reference", "scaled.py:plain") == 0
    assert launched("scaled", torch.arange(70.0)).tolist() == [3.0 * i for i in range(70)]
    assert (files / "scaled" / "shared.py").read_text().endswith("FACTOR = 3.0\n")
    op = load_op("scaled")
    assert op.parameters == ("x",)  # the block is the launcher's own affair
    for path in (files / "scaled").glob("*.py"):
        assert "UNUSED" not in path.read_text()


def test_without_a_reference_check_says_what_is_to_be_filled_in(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert new("scaled", "--from", "scaled.py:scaled") == 0
    assert "fill in: what scaled computes" in capsys.readouterr().out
    assert run(["check", "scaled", "--quick"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "reference.py:9 what scaled computes, in plain PyTorch" in said
    reference = files / "scaled" / "reference.py"
    lines = reference.read_text().splitlines()
    reference.write_text("\n".join([*lines[:-2], "    return 3 * x"]))
    assert load_op("scaled").reference(torch.ones(2)).tolist() == [3.0, 3.0]


def test_the_gradient_is_ejected_from_the_reference(files: Path) -> None:
    words = ["--from", "scaled.py:scaled", "--reference", "scaled.py:plain", "--backward"]
    assert new("trained", *words) == 0
    op = load_op("trained")
    assert op.gradient is not None
    assert op.implementations["triton"].backward is not None
    x = torch.arange(5.0)
    grad = torch.ones(5)
    (computed,) = interpreter.run(f"{files}/trained/op.py:backward", (True,), grad, x)
    assert computed.tolist() == [3.0] * 5
    assert op.gradient.reference((True,), grad, x)[0].tolist() == [3.0] * 5


def test_a_cuda_file_loses_its_host_code_and_keeps_its_launch(files: Path) -> None:
    made = new_package("saxpy", "saxpy.cu", "saxpy.py:saxpy")
    code, contract = made.files["cuda_kernels.cu"], made.files["op.py"]
    assert made.facts["blanks"] == []
    assert "torch" not in code.replace("scalar_t", "")
    assert "<<<blocks" not in code
    assert "twice" in code
    assert "(x.numel() + 128 - 1) // 128, 1, 1" in contract
    assert "(128, 1, 1)" in contract
    assert "f32(float(a)), i32(x.numel())" in contract
    # A template is tried with every dtype; these compile.
    for name in ("float", "__half", "__nv_bfloat16", "double"):
        assert f'"saxpy_kernel<{name}>"' in contract
    assert "saxpy(x, y, a=a)" in made.files["reference.py"]


def test_headers_beside_a_cuda_file_become_part_of_its_kernels(files: Path) -> None:
    Path("parts").mkdir()
    Path("parts/twice.cuh").write_text(
        "#pragma once\ntemplate <typename T> __device__ T twice_of(T x) { return x + x; }\n"
    )
    Path("parts/all.cuh").write_text('#pragma once\n#include "twice.cuh"\n')
    Path("doubled.cu").write_text(
        '#include <torch/extension.h>\n#include "parts/all.cuh"\n#include "parts/twice.cuh"\n'
        "__global__ void doubled(const float* x, float* y, int n) {\n"
        "  int i = blockIdx.x * blockDim.x + threadIdx.x;\n"
        "  if (i < n) y[i] = twice_of(x[i]);\n}\n"
    )
    code = new_package("doubled", "doubled.cu", asked=Asked(block=(128, 1, 1))).files[
        "cuda_kernels.cu"
    ]
    assert code.count("T twice_of(T x)") == 1
    assert "#include" not in code and "pragma" not in code


def test_numbers_are_fixed_where_the_gradient_is_ejected(files: Path) -> None:
    made = new_package("saxpy", "saxpy.cu", "saxpy.py:saxpy", backward=True)
    assert made.facts["blanks"] == []
    assert "a is fixed at 2.0" in made.facts["guesses"]
    assert made.facts["parameters"] == ["x: Tensor", "y: Tensor"]
    assert "f32(2.0)" in made.files["op.py"]
    assert 'backward = _EJECTED.implementations["cuda"].backward' in made.files["op.py"]


def test_a_tensor_that_may_be_none(files: Path) -> None:
    with open("scaled.py", "a") as file:
        file.write("\n\ndef shifted(x, shift=None):\n    return scaled(x)\n")
    made = new_package("shifted", "scaled.py:shifted")
    assert made.facts["parameters"] == ["x: Tensor", "shift: Tensor | None = None"]


LIBRARY = """
#include <cfloat>
#include <ATen/ATen.h>
namespace mylib {
constexpr int kThreads = 64;
template <typename T, int NT>
__global__ void row_kernel(const T* __restrict__ in, T* __restrict__ out, const int64_t rows,
                           const int64_t cols) {
  extern __shared__ float held[];
  float most = -FLT_MAX;
  const int64_t row = blockIdx.x * cols;
  for (int64_t c = threadIdx.x; c < cols; c += NT) most = fmaxf(most, (float)in[row + c]);
  for (int64_t c = threadIdx.x; c < cols; c += NT) out[row + c] = (T)(most + held[0]);
}
at::Tensor forward(const at::Tensor& x) {
  at::Tensor y = at::empty_like(x);
  const auto cols = x.size(-1);
  const auto rows = x.numel() / cols;
  dim3 block(kThreads);
  row_kernel<scalar_t, kThreads><<<dim3(rows), block, cols * sizeof(float)>>>(
      x.data_ptr<scalar_t>(), y.data_ptr<scalar_t>(), rows, cols);
  return y;
}
}  // namespace mylib
template <typename T>
__global__ void histogram(const int64_t* ids, const T* w, T* bins, int n_ids) {
  int i = blockIdx.x * (int)blockDim.x + threadIdx.x;
  if (i < n_ids) atomicAdd(&bins[ids[i]], w[i]);
}
__global__ void product(const float* A, const float* B, float* C, int M, int N, int K) { C[0] = 0; }
int main() { product<<<dim3(4, 4), dim3(16, 16)>>>(a, b, c, 64, 64, 64); }
"""


def test_the_kernels_of_a_library_file(files: Path) -> None:
    Path("library.cu").write_text(LIBRARY)
    made = new_package("rows", "library.cu:row_kernel")
    contract = made.files["op.py"]
    assert made.facts["parameters"] == ["input: Tensor"]
    assert '"mylib::row_kernel<float,64>"' in contract
    assert "grid = (input.numel() // input.shape[-1], 1, 1)" in contract
    assert "(64, 1, 1)" in contract
    assert "shared_bytes=input.shape[-1] * 4" in contract
    assert "at::" not in made.files["cuda_kernels.cu"]
    # Sums go to zeroed memory; the dtype is that of the template's tensor, not of the ids.
    made = new_package("histogram", "library.cu:histogram")
    contract = made.files["op.py"]
    assert "bins.zero_()" in contract
    assert "CUDA_NAMES[w.dtype]" in contract
    assert "grid = (-(-ids.numel() // 256), 1, 1)" in contract
    # What a main() passes is its own affair; only its block says something of the kernel.
    made = new_package("product", "library.cu:product")
    assert "i32(64)" not in made.files["op.py"]
    assert "(16, 16, 1)" in made.files["op.py"]
    assert "i32(a.shape[0]), i32(b.shape[-1]), i32(a.shape[-1])" in " ".join(
        made.files["op.py"].split()
    )
    assert "how many blocks of product run: (x, y, z)" in made.facts["blanks"]


def test_sizes_that_names_tell() -> None:
    tensors = [Known("a", 2), Known("b", 2), Known("c", 2)]
    strides = ["stride_am", "stride_ak", "stride_bk", "stride_bn", "stride_cm", "stride_cn"]
    found = size_texts(["M", "N", "K", *strides], tensors)
    assert found["M"] == "a.shape[0]"
    assert found["N"] == "b.shape[1]"
    assert found["K"] == "a.shape[1]"
    assert found["stride_bk"] == "b.stride(0)"
    assert found["stride_cn"] == "c.stride(1)"
    assert size_texts(["wobble"], tensors) == {}
    assert size_texts(["n_rows", "n_cols", "x_row_stride"], [Known("x", 2)]) == {
        "n_rows": "x.shape[0]",
        "n_cols": "x.shape[-1]",
        "x_row_stride": "x.stride(-2)",
    }


NORM = """
def norm_kernel(X, Y, W, stride, N, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    Y += row * stride
    for off in range(0, N, BLOCK):
        cols = off + tl.arange(0, BLOCK)
        x = tl.load(X + row * stride + cols, mask=cols < N)
        tl.store(Y + cols, x * tl.load(W + cols, mask=cols < N), mask=cols < N)
"""
TILE = """
def tile_kernel(src, dst, rows, cols, sr, sc, BR: tl.constexpr, BC: tl.constexpr):
    r, c = tl.program_id(0), tl.program_id(1)
    p = tl.make_block_ptr(src, (rows, cols), (sr, sc), (r * BR, c * BC), (BR, BC), (1, 0))
    tl.atomic_add(dst + r, tl.sum(tl.load(p)))
"""


def test_roles_that_a_kernels_text_tells() -> None:
    roles = roles_of(ast.parse(NORM.strip()).body[0], {})  # type: ignore[arg-type]
    assert {name: kinds for name, kinds in roles.accesses.items() if kinds} == {
        "X": {"loads"},
        "W": {"loads"},
        "Y": {"stores"},
    }
    assert roles.programs == {0}
    assert roles.widths == {"BLOCK": "N"}
    roles = roles_of(ast.parse(TILE.strip()).body[0], {})  # type: ignore[arg-type]
    assert roles.accesses["dst"] == {"adds"}
    assert roles.blocks == {0: "BR", 1: "BC"}
    assert roles.limits == {0: "rows", 1: "cols"}
    assert roles.sizes["sr"] == ("src", "stride", 0)
    assert roles.sizes["cols"] == ("src", "shape", 1)


def test_what_a_cuda_file_does_not_say_is_left_to_fill_in(files: Path) -> None:
    Path("odd.cu").write_text(
        "__global__ void odd(const float* x, float* out, int wobble) {\n"
        "  out[blockIdx.y * gridDim.x + blockIdx.x] = x[0] * wobble;\n}\n"
    )
    made = new_package("odd", "odd.cu")
    assert made.facts["blanks"] == [
        "what odd computes",
        "the kernel's wobble",
        "how many blocks of odd run: (x, y, z)",
        "example inputs",
    ]
    assert "DTYPES = (torch.float32,)" in made.files["op.py"]


BLOCKS = """
#include <torch/extension.h>
#define ROWS 4
constexpr int WIDTH = 64;

__global__ void bounded(const float* x, float* out, int n) __attribute__((unused));
__global__ void __launch_bounds__(2 * WIDTH) bounds(const float* x, float* out, int n) {
  out[blockIdx.x] = x[threadIdx.x];
}
__global__ void positions(const float* x, float* out, int n) {
  int i = blockIdx.x * WIDTH + (int)threadIdx.x;
  if (i < n) out[i] = x[i];
}
__global__ void strides(const float* x, float* out, int n) {
  const int lane = threadIdx.x;
  for (int i = lane; i < n; i += 96) out[blockIdx.x * n + i] = x[i];
}
__global__ void tile(const float* x, float* out, int n) {
  __shared__ float held[ROWS][WIDTH + 1];
  held[threadIdx.y][threadIdx.x] = x[n];
  out[blockIdx.x] = held[0][0];
}
__global__ void any_size(const float* x, float* out, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] = x[i];
}
__global__ void unsaid(const float* x, float* out, int n) {
  out[blockIdx.x * n] = x[threadIdx.x];
}
template <typename T, int BLOCK>
__global__ void templated(const T* x, T* out, int n) {
  __shared__ T held[BLOCK];
  held[threadIdx.x] = x[n];
  out[blockIdx.x] = held[0];
}
template <typename T, int BLOCK>
__global__ void looped(const T* __restrict__ x, T* __restrict__ out, int n) {
  for (int c = threadIdx.x; c < n; c += BLOCK)
    out[(size_t)blockIdx.x * n + c] = x[(size_t)blockIdx.x * n + c];
}
template <typename T, int UNROLL, bool FAST = true>
__global__ void unrolled(const T* x, T* out, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] = FAST ? x[i] : x[i] * T(UNROLL);
}
template <typename T, int BLOCK>
__global__ void wrapped(const T* x, T* out, int n) { out[blockIdx.x] = x[threadIdx.x]; }
template <typename T, int NUM>
void launch(const torch::Tensor& x, torch::Tensor& out) {
  wrapped<T, NUM><<<x.size(0), NUM>>>(x.data_ptr<T>(), out.data_ptr<T>(), x.size(1));
}
void run(const torch::Tensor& x, torch::Tensor& out) { launch<float, 192>(x, out); }
__global__ void by_size(const float* x, float* out, int n) { out[blockIdx.x] = x[threadIdx.x]; }
void sized(const torch::Tensor& x, torch::Tensor& out) {
  const int threads = std::min<int>(x.size(1), 512);
  by_size<<<x.size(0), threads>>>(x.data_ptr<float>(), out.data_ptr<float>(), x.size(1));
}
__global__ void by_caller(const float* x, float* out, int n) { out[blockIdx.x] = x[threadIdx.x]; }
void called(const torch::Tensor& x, torch::Tensor& out, int threads) {
  by_caller<<<x.size(0), threads>>>(x.data_ptr<float>(), out.data_ptr<float>(), x.size(1));
}
"""


@pytest.mark.parametrize(
    ("kernel", "asked", "block", "note"),
    [
        ("bounds", [], "(128, 1, 1)", "blocks of 128 threads, as its __launch_bounds__ allow"),
        ("bounds", ["--block", "32"], "(32, 1, 1)", None),
        ("positions", [], "(64, 1, 1)", "blocks of 64 threads, as its text says"),
        ("strides", [], "(96, 1, 1)", "blocks of 96 threads, as its text says"),
        ("tile", [], "(64, 4, 1)", "blocks of 64 x 4 threads, as its text says"),
        ("any_size", [], "(256, 1, 1)", "256 threads, and takes any, since it reads blockDim"),
        ("any_size", ["--block", "96"], "(96, 1, 1)", None),
        ("unsaid", ["--block", "32,2"], "(32, 2, 1)", None),
        ("templated", ["--block", "64"], "(64, 1, 1)", None),
        ("templated", ["--set", "BLOCK=128"], "(128, 1, 1)", "128 threads, as its text says"),
        ("looped", ["--set", "BLOCK=128"], "(128, 1, 1)", "128 threads, as its text says"),
        ("unrolled", ["--set", "UNROLL=4"], "(256, 1, 1)", "takes any"),
        ("wrapped", [], "(192, 1, 1)", None),
        ("by_size", [], "(min(x.shape[1], 512), 1, 1)", None),
        ("by_caller", ["--block", "64"], "(64, 1, 1)", None),
    ],
)
def test_the_block_is_what_the_file_says(
    files: Path, kernel: str, asked: list[str], block: str, note: str | None
) -> None:
    Path("blocks.cu").write_text(BLOCKS)
    result = Path("made.json")
    assert new("made", "--from", f"blocks.cu:{kernel}", *asked, "--json", str(result)) == 0
    contract = Path("made/op.py").read_text()
    assert f"grid, {block}, (" in " ".join(contract.split())
    notes = [one for one in json.loads(result.read_text())["guesses"] if "runs in blocks" in one]
    assert (note is None and not notes) or (len(notes) == 1 and note in notes[0])
    threads = block[1:].split(",")[0]
    constants = dict.fromkeys(("templated", "looped"), f"<float,{threads}>")
    assert {**constants, "unrolled": "<float,4,true>"}.get(kernel, "") in contract


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["unsaid"], "does not say how many threads a block of unsaid has; give --block 256"),
        (["by_caller"], "how many threads ('threads') a block of by_caller has; give --block"),
        (["templated"], "does not say how many threads a block of templated has; give --block"),
        (["unrolled"], "does not say what UNROLL of unrolled's template is; give --set UNROLL="),
        (["unrolled", "--set", "OTHER=1"], "has the constants UNROLL, FAST"),
        (["positions", "--set", "OTHER=1"], "has no constants; leave --set out"),
        (["unrolled", "--set", "UNROLL"], "write NAME=VALUE"),
        (["positions", "--block", "32"], "says 64 threads along x; leave --block out"),
        (["bounds", "--block", "256"], "__launch_bounds__ of bounds in blocks.cu allow 128 thr"),
        (["templated", "--block", "64", "--set", "BLOCK=32"], "give one of them"),
        (["unsaid", "--block", "0"], "write the threads per axis, 256 or 32,8"),
        (["unsaid", "--block", "64,64"], "a block has at most 1024 threads"),
    ],
)
def test_a_block_that_the_file_does_not_say_is_asked_for(
    files: Path, capsys: pytest.CaptureFixture[str], words: list[str], sentence: str
) -> None:
    Path("blocks.cu").write_text(BLOCKS)
    assert new("made", "--from", f"blocks.cu:{words[0]}", *words[1:]) == 2
    said = capsys.readouterr().err.strip()
    assert sentence in said and "\n" not in said
    assert not Path("made").exists()


def test_a_block_is_for_a_cuda_kernel(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert new("made", "--from", "rows.py", "--block", "32") == 2
    assert "--block and --set are for a .cu kernel" in capsys.readouterr().err


def test_vectors_are_refused_with_what_to_write(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("wide.cu").write_text(
        "__global__ void wide(const float4* x, float4* out, int n) {\n"
        "  int i = blockIdx.x * blockDim.x + threadIdx.x;\n  if (i < n) out[i] = x[i];\n}\n"
    )
    assert new("wide", "--from", "wide.cu") == 2
    said = capsys.readouterr().err
    assert "points to float4; a tensor's elements are" in said
    assert "read vectors of them (float4, __half2) through a reinterpret_cast" in said
    assert not Path("wide").exists()


def test_an_argument_that_the_kernel_does_not_read_is_told(files: Path) -> None:
    """The kernel's x and out match the reference's x; nothing of it reads the reference's y."""
    Path("blocks.cu").write_text(BLOCKS)
    Path("two.py").write_text(
        "import torch\nfrom torch import Tensor\n\n\n"
        "def two(x: Tensor, y: Tensor) -> Tensor:\n    return x + y\n\n\n"
        "def get_inputs():\n    return [torch.ones(8), torch.ones(8)]\n"
    )
    made = new_package("two", "blocks.cu:any_size", "two.py:two")
    assert "the kernel reads nothing of y" in made.facts["guesses"]


def test_a_plain_function_is_ejected(files: Path) -> None:
    made = new_package("triple", "scaled.py:plain")
    assert {"triton_kernels.py", "cuda_kernels.cu", "cpu_kernels.cpp"} <= made.files.keys()


def test_a_function_that_only_shares_a_kernels_name_launches_nothing(files: Path) -> None:
    Path("named.py").write_text(
        "import torch, triton\nimport triton.language as tl\n\n\n"
        "@triton.jit\ndef relu(x, out):\n    tl.store(out, tl.load(x))\n\n\n"
        "class Plain(torch.nn.Module):\n"
        "    def forward(self, x):\n        return torch.relu(x) + 1\n\n\n"
        "def get_inputs():\n    return [torch.randn(8)]\n"
    )
    made = new_package("plain", "named.py:Plain")
    assert made.facts["language"] == "ejected"
    assert "module.py" in made.files


REFUSED = {
    "a missing file": (["x", "--from", "nowhere.py"], "no such file"),
    "a missing .cu file": (["x", "--from", "nowhere.cu"], "no such file"),
    "an unknown kernel": (["x", "--from", "rows.py:wrong"], "it has squared, rms_kernel"),
    "an unknown CUDA kernel": (["x", "--from", "saxpy.cu:wrong"], "it has saxpy_kernel, saxpy_b"),
    "no reference for the gradient": (["x", "--from", "rows.py", "--backward"], "--reference"),
    "an unknown reference": (
        ["x", "--from", "scaled.py:scaled", "--reference", "scaled.py:no"],
        "has no 'no'",
    ),
    "a bad name": (["Bad-Name", "--from", "rows.py"], "Python identifier in lower case"),
    "a name in use": (["json", "--from", "rows.py"], "would hide"),
    "a reference to a plain function": (
        ["x", "--from", "scaled.py:plain", "--reference", "scaled.py:plain"],
        "leave --reference out",
    ),
    "no example inputs": (["x", "--from", "rows.py", "--reference", "rows.py:rms"], "get_inputs"),
    "another kind of file": (["x", "--from", "kernel.txt"], "give FILE.py"),
}


@pytest.mark.parametrize("given", REFUSED)
def test_a_call_that_cannot_be_answered_is_one_sentence(
    files: Path, capsys: pytest.CaptureFixture[str], given: str
) -> None:
    words, sentence = REFUSED[given]
    assert new(*words) == 2
    said = capsys.readouterr().err.strip()
    assert sentence in said
    assert said.count("\n") == 0
    assert not Path("x").exists()


def test_an_existing_folder_is_kept(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (files / "scaled").mkdir()
    assert new("scaled", "--from", "scaled.py:scaled") == 2
    assert "exists" in capsys.readouterr().err
    assert list((files / "scaled").iterdir()) == []


def test_an_edited_file_survives_force(files: Path) -> None:
    assert new("odd", "--from", "rows.py") == 0
    (files / "odd" / "reference.py").write_text("mine\n")
    assert new("odd", "--from", "rows.py", "--force") == 1
    assert (files / "odd" / "reference.py").read_text() == "mine\n"
    assert "FILL IN" in (files / "odd" / "reference.py.new").read_text()


def test_a_launcher_has_to_return_tensors(files: Path) -> None:
    with open("scaled.py", "a") as file:
        file.write("\n\ndef named(x):\n    return {'scaled': scaled(x)}\n")
        file.write("\n\ndef twice(x):\n    return scaled(x), scaled(x)\n")
        file.write("\n\nclass Layer(torch.nn.Module):\n    def forward(self, x):\n")
        file.write("        return scaled(x)\n")
    with pytest.raises(TargetError, match=r"named in scaled.py returns dict"):
        new_package("named", "scaled.py:named")
    with pytest.raises(TargetError, match="twice returns 2 tensors, and the reference 1"):
        new_package("twice", "scaled.py:twice", "scaled.py:plain")
    with pytest.raises(TargetError, match="Layer is a class that launches"):
        new_package("layer", "scaled.py:Layer")


def test_names_of_operators() -> None:
    check_name("fused_norm2")
    for name in ("", "norm_", "2norm", "class", "torch", "a.b"):
        with pytest.raises(ArgumentError):
            check_name(name)


def test_a_declared_operator_is_refused(files: Path) -> None:
    example = Path(__file__).resolve().parents[2] / "examples" / "own_triton_op.py"
    with pytest.raises(TargetError, match="declares an operator already"):
        new_package("mine", str(example))


def test_errors_are_fuselabs(files: Path) -> None:
    Path("broken.cu").write_text("__global__ void f(const float* x, float* y) { y[0] = oops; }\n")
    with pytest.raises(FuselabError, match=r"does not compile without the host's code: .*oops"):
        new_package("broken", "broken.cu")


TUNED = """
import torch
import triton
import triton.language as tl


@triton.autotune([triton.Config({"BLOCK": n}) for n in (16, 32)], key=["n"])
@triton.jit
def twice_kernel(x, y, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + offsets, 2 * tl.load(x + offsets, offsets < n), offsets < n)


def twice(x, label: str = "plain"):
    y = torch.empty_like(x)
    twice_kernel[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, y, x.numel())
    return y


def get_inputs():
    return [torch.arange(70.0)]
"""


def test_inputs_of_another_function_of_the_references_file_are_not_taken(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (files / "tuned.py").write_text(TUNED)
    (files / "several.py").write_text(
        "import torch\n\n\ndef twice(x, label: str = 'plain'):\n    return 2 * x\n\n\n"
        "def single(x):\n    return 2 * x\n\n\ndef both(x, y):\n    return x + y\n\n\n"
        "def get_inputs():\n    return [torch.ones(3), torch.ones(3)]\n"
    )
    assert new("twice", "--from", "tuned.py", "--reference", "several.py:twice") == 0
    assert "does not run in Triton's interpreter" not in capsys.readouterr().out
    assert launched("twice", torch.arange(70.0), "plain").tolist() == [2.0 * i for i in range(70)]
    assert new("first", "--from", "tuned.py:twice", "--reference", "several.py:single") == 0
    (files / "without.py").write_text(TUNED.replace("def get_inputs", "def other_inputs"))
    assert new("again", "--from", "without.py", "--reference", "several.py:twice") == 2
    said = capsys.readouterr().err
    assert "'label' is str, and they have Tensor there" in said and not Path("again").exists()
