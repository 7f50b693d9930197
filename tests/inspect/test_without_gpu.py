"""Explain for a GPU that is not there: Inductor's Triton code, on a machine without a GPU."""

import json
from pathlib import Path

import pytest
import torch

from fuselab.cli.main import run
from fuselab.inspect import targets
from fuselab.inspect.assembly.architectures import architecture
from fuselab.inspect.explain import explain_without_gpu
from fuselab.report.explain_text import explain_text

SINS = Path(__file__).parent / "targets" / "sins.py"
SOURCE = SINS.read_text().splitlines()


@pytest.fixture(scope="module")
def found():
    """A module with a graph break, forward and backward, for an H100."""
    target = targets.load(f"{SINS}:Breaks")
    return explain_without_gpu(target, architecture("sm_90"), backward=True)


def test_the_kernels_are_tritons_with_lines_and_bytes(found):
    facts = json.loads(json.dumps(found.facts))
    assert (facts["device"], facts["graphs"], len(facts["breaks"])) == ("cuda:sm_90", 2, 1)
    fused = [k for k in facts["kernels"] if k["kind"] == "fused"]
    assert fused and all(k["name"].startswith("triton_") for k in fused)
    assert {k["phase"] for k in facts["kernels"]} == {"forward", "backward"}
    assert {"mm", "addmm"} & {k["name"] for k in facts["kernels"]}
    (last,) = [k for k in fused if "aten.sigmoid" in k["operators"] and k["phase"] == "forward"]
    assert [SOURCE[line["line_number"] - 1].strip() for line in last["lines"]] == [
        "return torch.sigmoid(hidden * 2.0)"
    ]
    assert last["bytes"] == 2 * 256 * 32 * 4  # read and written once
    assert all(k["us"] is None for k in facts["kernels"])


def test_the_code_can_be_saved_and_is_for_the_architecture(found, tmp_path):
    found.save(tmp_path)
    code = (tmp_path / "graph_0_forward.py").read_text()
    assert "@triton.jit" in code and "tl.load" in code and "cpp_fused" not in code
    assert "cc=90" in code and "multi_processor_count=132" in code


def test_the_screen_says_that_nothing_was_timed(found):
    text = explain_text(found.facts)
    assert max(map(len, text.splitlines())) <= 80
    assert "written for an H100" in text and "of ceiling" not in text and "compile:" not in text


def test_the_backward_of_an_unpacked_tensor_has_its_code(tmp_path):
    file = tmp_path / "heads.py"
    file.write_text(
        "import torch\n\n\ndef heads(x, weight):\n"
        "    q, k, v = (x @ weight).reshape(4, 16, 3, 8).permute(2, 0, 1, 3)\n"
        "    return (q @ k.transpose(1, 2)).softmax(-1) @ v\n\n\ndef get_inputs():\n"
        "    weight = torch.randn(8, 24, requires_grad=True)\n"
        "    return [torch.randn(4, 16, 8), weight]\n"
    )
    facts = explain_without_gpu(
        targets.load(f"{file}:heads"), architecture("sm_80"), backward=True
    ).facts
    assert facts["graphs"] == 1 and not facts["breaks"]
    assert {k["phase"] for k in facts["kernels"]} == {"forward", "backward"}


def test_this_process_still_has_no_gpu(found):
    assert torch.cuda.is_available() == (torch.cuda.device_count() > 0)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--device", "cuda:sm_1"], "architecture 'sm_1'"),
        (["--device", "cuda:sm_90", "--dynamic"], "is a GPU that is not there"),
        (["--device", "cuda:sm_90", "--mode", "max-autotune"], "is a GPU that is not there"),
    ],
)
def test_mistakes_are_one_sentence_and_status_2(arguments, words, capsys):
    assert run(["explain", f"{SINS}:clean", *arguments]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


def test_the_private_parts_are_where_this_version_of_torch_keeps_them():
    import torch._inductor.scheduler as scheduler
    import torch.utils._triton as torch_triton
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.device_interface import CudaInterface
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._guards import TracingContext, detect_fake_mode
    from torch._inductor import compile_fx
    from torch._inductor.debug import DebugContext
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes.post_grad import view_to_reshape
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V
    from triton.runtime import driver

    called = (aot_autograd, min_cut_rematerialization_partition, select_decomp_table, DebugContext)
    assert all(map(callable, (*called, detect_fake_mode, TracingContext.get, driver.set_active)))
    assert callable(scheduler.has_triton) and callable(torch_triton.has_triton)
    for name in ("get_device_properties", "get_compute_capability", "raise_if_triton_unavailable"):
        assert callable(getattr(CudaInterface, name))
    assert callable(CudaInterface.Worker.get_device_properties)
    assert callable(GraphLowering.run) and callable(GraphLowering.codegen)
    assert hasattr(GraphLowering, "save_output_code")  # what capture() replaces
    for name in ("_recursive_joint_graph_passes", "_recursive_post_grad_passes"):
        assert callable(getattr(compile_fx, name))
    assert callable(view_to_reshape)
    assert callable(V.set_graph_handler) and callable(V.set_fake_mode)
