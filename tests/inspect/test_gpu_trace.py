"""What a profile makes of a GPU's trace, from a trace written by hand: no GPU is needed."""

import pytest
import torch

from fuselab.inspect.findings import find
from fuselab.inspect.kineto import (
    Allocation,
    Detail,
    Details,
    TensorUse,
    attach_details,
    read_window,
    short_kernel_name,
)
from fuselab.inspect.profile_tables import tabulate
from fuselab.inspect.step_split import split_step
from fuselab.inspect.user_code import SourceLine

MAIN, AUTOGRAD = 11, 12


def host(cat, name, ts, dur, tid=MAIN, **arguments):
    return {
        "ph": "X",
        "cat": cat,
        "name": name,
        "pid": 1,
        "tid": tid,
        "ts": ts,
        "dur": dur,
        "args": arguments,
    }


def device(cat, name, ts, dur, correlation, **arguments):
    arguments = {"correlation": correlation, "stream": 7, **arguments}
    return {
        "ph": "X",
        "cat": cat,
        "name": name,
        "pid": 0,
        "tid": 7,
        "ts": ts,
        "dur": dur,
        "args": arguments,
    }


GEMM = "void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_128x64>(cutlass::Params)"
POINTWISE = "void at::native::vectorized_elementwise_kernel<4, at::native::AddOp>(int, AddOp)"


@pytest.fixture
def window():
    """One step of 100 us: copy 0-10, gemm 20-50, pointwise 40-60 on another stream, item waits."""
    return read_window(
        {
            "traceEvents": [
                host("user_annotation", "ProfilerStep#3", 1000, 100),
                host("user_annotation", "copy data", 1000, 8),
                host("cpu_op", "aten::to", 1001, 6, **{"External id": 1}),
                host("cuda_runtime", "cudaMemcpyAsync", 1002, 4, correlation=50),
                host("user_annotation", "forward", 1010, 40),
                host("cpu_op", "aten::linear", 1010, 20, **{"External id": 2}),
                host("cpu_op", "aten::addmm", 1012, 16, **{"External id": 3}),
                host("cuda_runtime", "cudaLaunchKernel", 1014, 5, correlation=51),
                host("cpu_op", "aten::add", 1035, 5, tid=AUTOGRAD, **{"External id": 4}),
                host("cuda_runtime", "cudaLaunchKernel", 1036, 3, tid=AUTOGRAD, correlation=52),
                host("cpu_op", "aten::_local_scalar_dense", 1050, 30, **{"External id": 5}),
                host("cuda_runtime", "cudaStreamSynchronize", 1052, 27, correlation=53),
                host("cpu_op", "aten::outside", 1500, 3),
                device("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", 1000, 10, 50, bytes=4096),
                device("kernel", GEMM, 1020, 30, 51, grid=[4, 2, 1], block=[128, 1, 1]),
                device("kernel", POINTWISE, 1040, 20, 52, grid=[8, 1, 1], block=[64, 1, 1]),
                device("kernel", "later", 1500, 9, 99),
                {"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "ts": 1005},
            ]
        },
        whole_steps=1,
    )


def test_every_instant_has_one_class(window):
    split = split_step(window, on_gpu=True)
    assert split.compute_us == 30
    assert split.memory_us == 10  # 20 us, of which 10 beside the gemm
    assert split.data_us == 10
    assert split.overhead_us == 50


def test_a_kernel_that_runs_after_its_step_belongs_to_it():
    events = [
        host("user_annotation", "ProfilerStep#3", 0, 100),
        host("cpu_op", "aten::mm", 80, 10, **{"External id": 1}),
        host("cuda_runtime", "cudaLaunchKernel", 82, 5, correlation=5),
        device("kernel", GEMM, 150, 50, 5),
        device("kernel", "not ours", 160, 50, 6),
    ]
    window = read_window({"traceEvents": events}, whole_steps=1)
    assert [kernel.name for kernel in window.kernels] == [GEMM]
    assert window.duration_us == 200
    assert split_step(window, on_gpu=True).compute_us == 50


def test_events_nest_and_kernels_find_their_operator(window):
    assert window.steps == 1 and window.duration_us == 100
    linear = next(s for s in window.ops() if s.name == "aten::linear")
    assert [child.name for child in linear.children] == ["aten::addmm"]
    assert linear.self_us == 4
    assert linear.children[0].self_us == 16  # its runtime call is part of it
    assert [(k.name, k.span.parent.name) for k in window.kernels] == [
        ("Memcpy HtoD (Pageable -> Device)", "aten::to"),
        (GEMM, "aten::addmm"),
        (POINTWISE, "aten::add"),
    ]


def test_tables_of_a_gpu(window):
    tables = tabulate([window], Details([], []), on_gpu=True)
    assert tables.busy_share == 0.5
    kernels = {row.short_name: row for row in tables.kernels}
    assert kernels["Kernel2"].grid == (4, 2, 1) and kernels["Kernel2"].block == (128, 1, 1)
    assert kernels["Kernel2"].share == 0.3
    operators = {row.name: row for row in tables.operators}
    assert operators["aten::addmm"].self_device_us == 30
    assert operators["aten::linear"].self_device_us == 0
    assert operators["aten::linear"].device_us == 30
    ranges = {row.name: row for row in tables.ranges}
    assert ranges["forward"].device_us == 50  # the other thread's launch fell into it too
    assert ranges["copy data"].device_us == 10
    (addmm,) = next(n for n in tables.tree if n.name == "forward").children[0].children
    assert addmm.children[0].kernels[0].grid == (4, 2, 1)


def test_a_sync_names_what_it_waited_for_and_a_pageable_copy_is_found(window):
    attach_details(window, Details([], []))
    split = split_step(window, on_gpu=True)
    found = {f.kind: f for f in find([window], Details([], []), split, on_gpu=True)}
    # not the call's 30 us: what the device idles after its last kernel, from 1060 to the end
    assert found["host sync"].saved_us == 40
    assert "it waits for aten::add" in found["host sync"].title
    assert found["pageable copy"].saved_us == 5


@pytest.mark.parametrize(("kernel_us", "found"), [(40, 1), (1, 0)])
def test_a_look_up_is_found_on_a_gpu_where_comparing_is_worth_a_line(kernel_us, found):
    """Device time counts, comparison and reader: 2 us of a step of 2 ms are no finding."""
    names = ("aten::eq", "aten::to")
    events = [host("user_annotation", "ProfilerStep#3", 0, 2000)]
    for at, name in enumerate(names):
        events += [
            host("cpu_op", name, 100 * at + 10, 50, **{"External id": at}),
            host("cuda_runtime", "cudaLaunchKernel", 100 * at + 20, 5, correlation=at),
            device("kernel", POINTWISE, 100 * at + 40, kernel_us, at),
        ]
    line = SourceLine("/home/me/model.py", 7)
    result = Allocation(0.0, 256 * 1024, (1, 1), "cuda", 256 * 1024)
    ids, known = ((2, 2), (256, 1), (1, 1)), ((3, 3), (1, 1024), (1024, 1))
    given = tuple(TensorUse(*use, torch.int64) for use in (ids, known))
    equal = TensorUse((1, 1), (256, 1024), (1024, 1), torch.bool)
    details = [
        Detail(name, line, None, (), False, MAIN, -1, inputs, made, None)
        for name, inputs, made in zip(names, (given, (equal,)), ([result], []), strict=True)
    ]
    window = read_window({"traceEvents": events}, whole_steps=1)
    assert attach_details(window, Details(details, [])) == 1.0
    split = split_step(window, on_gpu=True)
    ranked = find([window], Details(details, []), split, on_gpu=True)
    look_ups = [each for each in ranked if each.kind == "quadratic look-up"]
    assert [each.saved_us for each in look_ups] == [2 * kernel_us] * found


@pytest.mark.parametrize(
    ("name", "short"),
    [
        (GEMM, "Kernel2"),
        (POINTWISE, "vectorized_elementwise_kernel"),
        ("triton_poi_fused_add_0", "triton_poi_fused_add_0"),
        ("Memcpy HtoD (Pageable -> Device)", "Memcpy HtoD (Pageable -> Device)"),
    ],
)
def test_short_kernel_names(name, short):
    assert short_kernel_name(name) == short


def test_details_match_by_thread_name_and_order():
    def detail(name, thread, line):
        where = SourceLine("/home/me/model.py", line)
        return Detail(name, where, None, (), False, thread, -1, (), [], None)

    events = [host("user_annotation", f"ProfilerStep#{i}", 100 * i, 100) for i in range(2)]
    for step in range(2):
        # The autograd thread's events stand first in the file; the main thread began first.
        events.append(host("cpu_op", "aten::mul", 100 * step + 60, 5, tid=AUTOGRAD))
        events += [host("cpu_op", "aten::mul", 100 * step + at, 5) for at in (10, 20)]
    window = read_window({"traceEvents": events}, whole_steps=2)
    details = [detail("aten::mul", 1, 7), detail("aten::mul", 1, 8), detail("aten::mul", 2, 9)]
    assert attach_details(window, Details(details, [])) == 1.0
    by_time = sorted(window.ops(), key=lambda span: span.start_us)
    assert [span.detail.line.line for span in by_time] == [7, 8, 9, 7, 8, 9]
