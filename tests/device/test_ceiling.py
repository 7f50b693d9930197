"""Streaming kernels move what they claim; ceilings are measured once and kept."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from time import perf_counter

import pytest
import torch

from fuselab.device import ceiling
from fuselab.device.ceiling import Ceilings, measured_again, measured_ceilings, streaming_ceiling
from fuselab.device.streaming import CUDA_EXPRESSIONS, CUDA_SOURCE, Streams, variants
from fuselab.measure.machine_state import MachineState
from fuselab.runtime import cache

CPU = torch.device("cpu")
KIB = 1 << 10


@pytest.mark.parametrize(
    ("bytes_read", "bytes_written", "reads", "writes"),
    [
        (64 * KIB, 64 * KIB, 1, 1),
        (128 * KIB, 64 * KIB, 2, 1),
        (128 * KIB + 512, 64 * KIB, 2, 1),  # a bias beside the two large inputs
        (192 * KIB, 128 * KIB, 3, 2),
        (64 * KIB, 128 * KIB, 1, 2),
        (1024 * KIB, 64, 4, 1),  # a reduction
        (64 * KIB, 0, 1, 0),
        (0, 64 * KIB, 0, 1),
    ],
)
@pytest.mark.parametrize("line_bytes", [16, 64])
def test_streams_have_the_ratio_and_the_bytes(
    bytes_read: int, bytes_written: int, reads: int, writes: int, line_bytes: int
) -> None:
    streams = Streams.of(bytes_read, bytes_written, line_bytes)
    assert (streams.reads, streams.writes) == (reads, writes)
    wanted = bytes_read + bytes_written
    assert wanted <= streams.bytes_moved < wanted + line_bytes * (reads + writes)


MIXES = [(64, 64), (4096, 4096), (8192, 4096), (4096, 8192), (12288, 8192), (1040, 4096), (0, 4096)]


def check_every_variant_overwrites_all_of_its_output(device: torch.device) -> None:
    for bytes_read, bytes_written in MIXES:
        streams = Streams.of(bytes_read, bytes_written, 16 if device.type == "cuda" else 64)
        for way in variants(bytes_read, bytes_written, device):
            way.outputs.fill_(-1)
            way.call()
            end = streams.line_bytes // 4 * streams.writes * streams.write_lines
            written = way.outputs[:end]
            assert written.nbytes >= bytes_written
            assert not bool((written == -1).any()), (way.name, bytes_read, bytes_written)
            assert bool((way.outputs[end:] == -1).all()), (way.name, bytes_read, bytes_written)


def test_every_variant_overwrites_all_of_its_output_on_the_cpu() -> None:
    check_every_variant_overwrites_all_of_its_output(CPU)


def test_what_is_read_reaches_what_is_written() -> None:
    way = variants(8192, 4096, CPU)[0]
    way.inputs[: 4096 // 4] = torch.arange(1024, dtype=torch.int32)
    way.call()
    assert torch.equal(way.outputs[:1024], torch.arange(1024, dtype=torch.int32) ^ 1)


def test_a_pure_read_reads_all_of_it() -> None:
    way = variants(1 << 20, 0, CPU)[0]
    for place in (0, 15, (1 << 17) + 3, (1 << 18) - 1):
        way.inputs.fill_(1)
        way.outputs.fill_(7)
        way.call()
        assert int(way.outputs[0]) == 7
        # A line of 15 ones and this folds to the value that makes the kernel leave a trace.
        way.inputs[place] = 0x1E3779B9 ^ 1
        way.call()
        assert int(way.outputs[0]) == 1


def test_the_best_ways_come_back_and_nothing_to_move_has_none() -> None:
    assert streaming_ceiling(0, 0, CPU) == []
    best = streaming_ceiling(4096, 4096, CPU)
    assert len(best) == 2
    assert {way.name for way in best} <= {"stream", "stream, non-temporal", "torch copy"}


def test_cuda_kernels_compile_for_every_architecture() -> None:
    for arch in ("sm_80", "sm_90"):
        assert CUDA_SOURCE.compile_many(CUDA_EXPRESSIONS, arch).startswith(b"\x7fELF")


def test_ceilings_are_measured_once_and_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cache, "folder", lambda: tmp_path)
    monkeypatch.setitem(ceiling.COPY_BYTES, "cpu", (1 << 16, 1 << 20))
    monkeypatch.setitem(ceiling.MATMUL_SIZE, "cpu", 64)
    begin = perf_counter()
    first = measured_ceilings(CPU)
    elapsed_us = 1e6 * (perf_counter() - begin)
    assert set(first.copy_gbps) == {"65536", "1048576"}
    assert set(first.matmul_tflops) == {"fp32", "bf16", "fp64"}
    assert first.best_gbps == max(first.copy_gbps.values()) > 0
    assert 0 < first.launch_us < elapsed_us
    (kept,) = (tmp_path / "ceilings").glob("*.json")
    assert json.loads(kept.read_text())["copy_gbps"] == first.copy_gbps

    monkeypatch.setattr(ceiling, "_copy_gbps", lambda device: pytest.fail("measured again"))
    assert measured_ceilings(CPU) == first
    monkeypatch.setattr(ceiling, "_copy_gbps", lambda device: {"1": 5.0})
    assert measured_ceilings(CPU, refresh=True).copy_gbps == {"1": 5.0}


@pytest.fixture
def busy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Ceilings]:
    """Ceilings kept while the machine was busy; a copy reads 8 GB/s now, a product 0.5 TFLOP/s."""
    monkeypatch.setattr(cache, "folder", lambda: tmp_path)
    monkeypatch.setattr(ceiling, "_copy_gbps", lambda device: {"1024": 0.4, "4096": 9.0})
    monkeypatch.setattr(ceiling, "_matmul_tflops", lambda device: {"fp32": 0.07})
    monkeypatch.setattr(ceiling, "_launch_us", lambda device: 50.0)
    ceiling._second.cache_clear()
    kept = measured_ceilings(CPU)
    monkeypatch.setattr(ceiling, "_copy_rate", lambda device, size: 8.0)
    monkeypatch.setattr(ceiling, "_matmul_rate", lambda device, unit: 0.5)
    monkeypatch.setattr(ceiling, "_launch_us", lambda device: 2.0)
    yield kept
    ceiling._second.cache_clear()


def test_a_beaten_ceiling_is_measured_once_more_and_the_better_one_kept(
    busy: Ceilings, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = measured_again(busy, CPU, "copy_gbps", "1024")
    assert found.copy_gbps == {"1024": 8.0, "4096": 9.0}
    assert found.matmul_tflops == {"fp32": 0.07}
    assert measured_ceilings(CPU) == found
    monkeypatch.setattr(ceiling, "_copy_rate", lambda device, size: pytest.fail("a third time"))
    assert measured_again(found, CPU, "copy_gbps", "1024") == found
    found = measured_again(found, CPU, "matmul_tflops", "fp32")
    found = measured_again(found, CPU, "launch_us")
    assert (found.matmul_tflops, found.launch_us) == ({"fp32": 0.5}, 2.0)
    assert measured_ceilings(CPU) == found


def test_a_second_measurement_that_reads_worse_changes_nothing(busy: Ceilings) -> None:
    assert measured_again(busy, CPU, "copy_gbps", "4096") == busy == measured_ceilings(CPU)


def test_what_another_process_corrected_meanwhile_stands(busy: Ceilings, tmp_path: Path) -> None:
    (kept,) = (tmp_path / "ceilings").glob("*.json")
    kept.write_text(json.dumps(asdict(busy) | {"matmul_tflops": {"fp32": 0.6}}))
    found = measured_again(busy, CPU, "copy_gbps", "1024")
    assert found.matmul_tflops == {"fp32": 0.07}
    kept_now = measured_ceilings(CPU)
    assert (kept_now.matmul_tflops, kept_now.copy_gbps["1024"]) == ({"fp32": 0.6}, 8.0)


def test_no_memory_left_leaves_a_ceiling_as_it_is(
    busy: Ceilings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(device: torch.device, unit: str) -> float:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(ceiling, "_matmul_rate", full)
    assert measured_again(busy, CPU, "matmul_tflops", "fp32") == busy


def test_one_figure_is_measured_as_it_was_among_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ceiling.MATMUL_SIZE, "cpu", 64)
    assert ceiling._copy_rate(CPU, 1 << 16) > 0
    assert ceiling._matmul_rate(CPU, "fp64") > 0


def test_ceilings_of_a_busy_machine_are_measured_again_when_it_is_quiet(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def measures(gbps: float, tflops: float, waited: float, load: float) -> None:
        found = {"_copy_gbps": {"1": gbps}, "_matmul_tflops": {"fp32": tflops}, "_launch_us": 3.0}
        for name, value in found.items():
            monkeypatch.setattr(ceiling, name, lambda device, value=value: value)
        monkeypatch.setattr(ceiling, "waiting_share", lambda: nullcontext(lambda: waited))
        state = MachineState(None, load, cores=2)
        monkeypatch.setattr(ceiling, "machine_state", lambda device: state)

    monkeypatch.setattr(cache, "folder", lambda: tmp_path)
    measures(0.05, 0.01, waited=0.8, load=8.0)
    kept = measured_ceilings(CPU)
    assert kept.busy
    measures(9.0, 0.1, waited=0.8, load=8.0)
    assert measured_ceilings(CPU) == kept  # a second look at a busy machine says no more
    measures(9.0, 0.005, waited=0.5, load=0.4)
    better = measured_ceilings(CPU)
    assert (better.copy_gbps, better.matmul_tflops, better.busy) == (
        {"1": 9.0},
        {"fp32": 0.01},
        True,
    )
    measures(9.5, 0.009, waited=0.5, load=0.4)  # a share of the cores is all that there is
    settled = measured_ceilings(CPU)
    assert (settled.copy_gbps, settled.matmul_tflops) == ({"1": 9.5}, {"fp32": 0.01})
    assert not settled.busy
    measures(20.0, 1.0, waited=0.0, load=0.1)
    assert measured_ceilings(CPU) == settled


@pytest.mark.parametrize("damage", ["", "{}", "[1]", '{"device": 1'])
def test_a_damaged_file_is_measured_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, damage: str
) -> None:
    monkeypatch.setattr(cache, "folder", lambda: tmp_path)
    for name, value in (("_copy_gbps", {"1": 5.0}), ("_matmul_tflops", {}), ("_launch_us", 1.0)):
        monkeypatch.setattr(ceiling, name, lambda device, value=value: value)
    measured_ceilings(CPU)
    (kept,) = (tmp_path / "ceilings").glob("*.json")
    kept.write_text(damage)
    assert measured_ceilings(CPU).copy_gbps == {"1": 5.0}


def test_ceilings_that_cannot_be_kept_are_still_returned(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "ceilings").write_text("in the way")
    monkeypatch.setattr(cache, "folder", lambda: tmp_path)
    for name, value in (("_copy_gbps", {"1": 5.0}), ("_matmul_tflops", {}), ("_launch_us", 1.0)):
        monkeypatch.setattr(ceiling, name, lambda device, value=value: value)
    assert measured_ceilings(CPU).copy_gbps == {"1": 5.0}


@pytest.mark.gpu
def test_every_variant_overwrites_all_of_its_output_on_cuda() -> None:
    check_every_variant_overwrites_all_of_its_output(torch.device("cuda", 0))


@pytest.mark.gpu
@pytest.mark.timing
def test_measured_ceilings_of_a_gpu_are_plausible() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    found = measured_ceilings(device, refresh=True)
    sizes = sorted(found.copy_gbps, key=int)
    assert found.copy_gbps[sizes[0]] < found.copy_gbps[sizes[-1]]
    assert 100 < found.best_gbps < 10_000
    rates = found.matmul_tflops
    assert rates["fp32"] < rates["bf16"] and rates["tf32"] < 1.1 * rates["bf16"]
    assert 1 < found.launch_us < 100


@pytest.mark.gpu
@pytest.mark.timing
def test_streaming_beats_or_meets_pytorch_on_a_gpu() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    for bytes_read, bytes_written in ((1 << 28, 1 << 28), (1 << 29, 1 << 28)):
        ways = variants(bytes_read, bytes_written, device)
        times = {way.name: ceiling._time_us(way.call, device) for way in ways}
        library = min(time for name, time in times.items() if name.startswith("torch"))
        assert min(times.values()) <= library
        assert (
            min(time for name, time in times.items() if name.startswith("stream")) < 1.05 * library
        )
