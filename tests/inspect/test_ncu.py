"""Nsight Compute: its raw page read as our table, from text in its documented format."""

import csv
import io
from dataclasses import asdict

import pytest

from fuselab.cli.main import run
from fuselab.errors import DeviceError, MissingDependencyError, TargetError
from fuselab.inspect import ncu, targets
from fuselab.inspect.ncu import profile_kernel, read_raw_page
from fuselab.inspect.profile import significant_everywhere
from fuselab.report.ncu_text import ncu_text

NAME = "void softmax_kernel<float, 4>(const float *, float *, int)"
ELAPSED = "pct_of_peak_sustained_elapsed"
METRICS = {
    "gpu__time_duration.sum": ("ns", "81,920"),
    f"gpu__dram_throughput.avg.{ELAPSED}": ("%", "41.5"),
    f"lts__throughput.avg.{ELAPSED}": ("%", "38.25"),
    f"sm__throughput.avg.{ELAPSED}": ("%", "22.1"),
    "dram__bytes_read.sum": ("byte", "67,108,864"),
    "dram__bytes_write.sum": ("byte", "33,554,432"),
    "device__attribute_multiprocessor_count": ("", "132"),
    "launch__grid_size": ("", "1,400"),
    "launch__block_size": ("", "256"),
    "launch__waves_per_multiprocessor": ("", "1.3258"),
    "launch__registers_per_thread": ("register/thread", "40"),
    "launch__shared_mem_per_block_static": ("byte/block", "1,024"),
    "launch__shared_mem_per_block_dynamic": ("Kbyte/block", "32"),
    "launch__occupancy_limit_registers": ("block", "6"),
    "launch__occupancy_limit_shared_mem": ("block", "6"),
    "launch__occupancy_limit_warps": ("block", "8"),
    "launch__occupancy_limit_blocks": ("block", "32"),
    "sm__maximum_warps_per_active_cycle_pct": ("%", "75"),
    "sm__warps_active.avg.pct_of_peak_sustained_active": ("%", "51.2"),
    "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum": ("", "1000"),
    "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum": ("sector", "16000"),
    "l1tex__t_requests_pipe_lsu_mem_global_op_st.sum": ("", "1000"),
    "l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum": ("sector", "4000"),
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum": ("", "5,000"),
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum": ("", "250"),
    "smsp__thread_inst_executed_per_inst_executed.ratio": ("", "21.5"),
    "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio": ("inst", "9.5"),
    "smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio": ("inst", "1.25"),
    "smsp__average_warps_issue_stalled_selected_per_issue_active.ratio": ("inst", "1"),
    "smsp__pcsamp_interval": ("", "n/a"),
}


def page(*launches, metrics=METRICS):
    """Return a raw page as ``ncu --import F --page raw --csv --print-units base`` prints it."""
    out = io.StringIO()
    writer = csv.writer(out, quoting=csv.QUOTE_ALL, lineterminator="\n")
    writer.writerow(["ID", "Process ID", "Kernel Name", *metrics])
    writer.writerow(["", "", "", *(unit for unit, _ in metrics.values())])
    for number, (name, changes) in enumerate(launches or [(NAME, {})]):
        values = [changes.get(key, value) for key, (_, value) in metrics.items()]
        writer.writerow([number, 4711, name, *values])
    return out.getvalue()


def test_the_counters_become_figures():
    (found,) = read_raw_page(page())
    assert (found.name, found.us, found.grid, found.block) == (NAME, 81.92, 1400, 256)
    assert (found.dram_share, found.l2_share, found.sm_share) == (0.415, 0.3825, 0.221)
    assert (found.bytes_read, found.bytes_written) == (67108864, 33554432)
    assert found.tail_share == pytest.approx((2 - 1.3258) / 2)
    assert (found.occupancy_asked, found.occupancy_reached) == (0.75, 0.512)
    assert [(limit.resource, limit.blocks) for limit in found.limits] == [
        ("registers", 6),
        ("shared memory", 6),
        ("warps", 8),
        ("blocks", 32),
    ]
    assert (found.registers, found.shared_bytes, found.multiprocessors) == (40, 33024, 132)
    assert (found.load_sectors, found.store_sectors, found.bank_conflicts) == (16, 4, 5250)
    assert found.stalls == (("long_scoreboard", 9.5), ("barrier", 1.25), ("selected", 1.0))


def test_each_hint_names_what_triton_and_cuda_can_change():
    (found,) = read_raw_page(page())
    seen = [hint.seen for hint in found.hints]
    words = (
        "9.5 cycles",
        "1.33 waves",
        "51% reached",
        "16 sectors",
        "5,250 bank",
        "21.5 of the 32",
    )
    assert len(seen) == len(words)
    assert all(word in each for word, each in zip(words, seen, strict=True))
    assert all(hint.triton and hint.cuda for hint in found.hints)
    fine = {
        f"gpu__dram_throughput.avg.{ELAPSED}": "93",
        "launch__waves_per_multiprocessor": "12",
        "sm__warps_active.avg.pct_of_peak_sustained_active": "72",
        "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum": "4000",
        "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum": "0",
        "smsp__thread_inst_executed_per_inst_executed.ratio": "31.9",
    }
    (found,) = read_raw_page(page((NAME, fine)))
    (only,) = found.hints
    assert only.seen.startswith("DRAM runs at 93% of its peak")


def test_low_occupancy_names_the_resource_and_a_small_grid_its_empty_places():
    changes = {
        "sm__maximum_warps_per_active_cycle_pct": "25",
        "sm__warps_active.avg.pct_of_peak_sustained_active": "24",
        "launch__occupancy_limit_shared_mem": "2",
        "launch__waves_per_multiprocessor": "0.4",
    }
    (found,) = read_raw_page(page((NAME, changes)))
    seen = " ".join(hint.seen for hint in found.hints)
    assert "shared memory hold occupancy at 25%: 2 blocks per multiprocessor" in seen
    assert "the grid fills 40% of the places" in seen


def test_a_kernel_appears_once_per_launch_size_and_missing_counters_stay_empty():
    found = read_raw_page(page((NAME, {}), (NAME, {}), (NAME, {"launch__grid_size": "7"})))
    assert [one.grid for one in found] == [1400, 7]
    (bare,) = read_raw_page(page(metrics={"gpu__time_duration.sum": ("us", "2.5")}))
    assert bare.us == 2.5 and bare.hints == () and bare.limits == ()
    assert bare.dram_share is bare.waves is bare.shared_bytes is bare.bank_conflicts is None


def test_the_screen_has_80_columns_and_every_figure():
    facts = [
        significant_everywhere({**asdict(one), "least_bytes": 1.0e8})
        for one in read_raw_page(page())
    ]
    text = ncu_text(facts, "softmax.ncu-rep")
    assert max(map(len, text.splitlines())) <= 80
    for word in ("81.9 µs", "41.5 %", "1.33", "33.7 %", "75.0 %", "101 MB", "100 MB", "5,250"):
        assert word in text
    text = " ".join(text.split())
    assert "registers 6, shared memory 6" in text and "long scoreboard 9.50" in text
    assert "Triton:" in text and "CUDA:" in text and "softmax.ncu-rep" in text


@pytest.mark.parametrize("text", ["", "==ERROR== no such file", '"ID","Kernel Name"\n"",""\n'])
def test_what_is_no_raw_page_is_one_sentence(text):
    with pytest.raises(TargetError, match="no raw page"):
        read_raw_page(text)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("==ERROR== ERR_NVGPUCTRPERM - no permission", "keeps its counters to administrators"),
        ("==ERROR== The application returned an error code (1).", "ncu failed: The application"),
        ("==WARNING== No kernels were profiled.", "no kernel of the step matches 'gem'"),
    ],
)
def test_why_there_is_no_report(said, words):
    assert words in ncu._why_nothing("gem", said)


def test_without_a_gpu_or_ncu_it_is_one_sentence_and_status_2(monkeypatch, tmp_path, capsys):
    assert run(["profile", "dlrm", "--device", "cpu", "--ncu", "gemm"]) == 2
    error = capsys.readouterr().err
    assert "--ncu reads the counters of an NVIDIA GPU" in error and error.count("\n") == 1
    with pytest.raises(DeviceError, match="runs on none"):
        profile_kernel(targets.load("dlrm", "cpu"), "gemm", tmp_path / "r.ncu-rep")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setattr(ncu.shutil, "which", lambda name, path: None)
    with pytest.raises(MissingDependencyError, match="install NVIDIA Nsight Compute"):
        ncu.path_of_ncu()


@pytest.mark.gpu
def test_a_real_kernel_under_ncu(tmp_path):
    target = targets.load("dlrm", "cuda")
    report = tmp_path / "r.ncu-rep"
    found = profile_kernel(target, "gemm|nvjet|cutlass", report)
    assert report.stat().st_size > 1000
    for one in found:
        assert one.us > 0 and one.grid > 0 and one.block > 0
        assert one.waves >= 0  # of a few blocks ncu writes 0.00
        assert 0 < one.occupancy_reached <= one.occupancy_asked <= 1
        assert 0 <= one.dram_share <= 1.05 and one.stalls and one.limits
