"""``fuselab.bench``: who is timed, who is rejected, and what every view of a result says."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from bench_operators import Remembering, case, clamped, lazy, operator, raising, scaled_relu
from gallery import in_place, lookup, remainder, wrong_arguments
from torch import Tensor

import fuselab
from fuselab import ops
from fuselab.cli.main import run
from fuselab.device.ceiling import Ceilings, measured_ceilings
from fuselab.errors import ArgumentError, BuildError, DeviceError, UnknownNameError
from fuselab.measure import cpu_timer
from fuselab.measure.statistics import significant
from fuselab.measure.verdict import verdict
from fuselab.op import Case, Cost, FusedOp, Implementation, Inputs
from fuselab.prove import bench as bench_module
from fuselab.prove import bench_run
from fuselab.prove.bench import bench
from fuselab.prove.bench_result import Bench, Ceiling, Group, Record
from fuselab.prove.bench_work import CaseArguments
from fuselab.report import tables
from fuselab.runtime import fallback

CEILINGS = Ceilings(
    device="test",
    torch="test",
    driver="none",
    measured="2026-01-01T00:00:00+00:00",
    copy_gbps={"1048576": 20.0},
    matmul_tflops={"fp32": 0.2},
    launch_us=1.0,
)
FAST: dict[str, Any] = {"device": "cpu", "budget_s": 0.02, "quick": True}


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Known ceilings, no flush of the cache (5 ms per call), one thread (two wait for each other
    on a busy machine): these tests look at results, not at times."""
    monkeypatch.setattr(bench_module, "measured_ceilings", lambda device: CEILINGS)
    monkeypatch.setattr(bench_run, "measured_again", lambda ceilings, *figure: ceilings)
    monkeypatch.setattr(cpu_timer, "flush_cache", lambda: None)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def honest() -> FusedOp:
    return operator("honest", clamped=clamped)


def rows(group: Group) -> dict[str, Record]:
    return {record.provider: record for record in group.records}


def only_group(op: FusedOp, **options: Any) -> Group:
    (group,) = bench(op, cases=["64x64"], **FAST, **options).groups
    return group


def test_every_row_of_an_honest_operator_is_whole(honest: FusedOp) -> None:
    group = only_group(honest, providers=["clamp", "clamped", "auto"])
    assert (group.case, group.dtype, group.phase) == ("64x64", "float32", "forward")
    assert group.bytes_moved == 2 * 64 * 64 * 4
    assert group.ceiling is not None and group.ceiling.bound == "memory"
    assert list(rows(group)) == ["eager", "clamp", "clamped", "auto"]
    for record in group.records:
        assert record.status == "ok" and record.reason is None
        assert record.median_us and record.low_us and record.high_us and record.host_us
        assert 0 < record.low_us <= record.median_us <= record.high_us
        assert record.rounds >= 6 and record.calls_per_round >= 1
        assert record.gbps == pytest.approx(2 * 64 * 64 * 4 / record.median_us / 1000, rel=1e-3)
        assert record.tflops == pytest.approx(2 * 64 * 64 / record.median_us / 1e6, rel=1e-3)
        assert record.ceiling_share == pytest.approx(
            group.ceiling.median_us / record.median_us, rel=2e-3
        )
        assert record.peak_bytes is not None and record.peak_bytes >= 64 * 64 * 4
        assert record.joules is None
    assert rows(group)["eager"].vs_eager is None
    against = rows(group)["clamped"].vs_best_peer
    assert against is not None and against.against in ("eager", "clamp")
    assert rows(group)["auto"].note == "auto takes clamped"


def test_wrong_lazy_and_broken_implementations_are_never_timed() -> None:
    op = operator(
        "rejected", clamped=clamped, lazy=lazy, remembering=Remembering(), raising=raising
    )
    result = bench(op, cases=["64x64"], providers=[*op.implementations], **FAST)
    found = rows(result.groups[0])
    assert {name: record.status for name, record in found.items()} == {
        "eager": "ok",
        "clamped": "ok",
        "lazy": "wrong",
        "remembering": "wrong",
        "raising": "failed",
    }
    assert "after timing: output row" in (found["remembering"].reason or "")
    assert found["raising"].reason == "RuntimeError: out of registers"
    assert all(found[name].median_us is None for name in ("lazy", "remembering", "raising"))
    assert [line.split(": ")[1] for line in result.failures] == [
        "lazy wrong",
        "remembering wrong",
        "raising failed",
    ]


def test_an_operator_that_writes_over_its_input_is_timed_on_a_copy_of_its_own() -> None:
    inputs: list[Tensor] = []

    def write(input: Tensor, bias: Tensor, scale: float) -> None:
        inputs.append(input)
        in_place.forward(input, bias, scale)

    op = in_place.make_op("benched", forward=write)
    (group,) = bench(op, cases=["16x64"], providers=["plain"], **FAST).groups
    assert [record.status for record in group.records] == ["ok", "ok"]
    addresses = {input.data_ptr() for input in inputs}
    assert 2 <= len(addresses) < len(inputs) / 4  # the timed one, and a fresh one per verification
    op = in_place.make_op("benched", forward=lambda input, bias, scale: None)
    (group,) = bench(op, cases=["16x64"], providers=["plain"], **FAST).groups
    assert rows(group)["plain"].status == "wrong"


def test_sequences_and_integers_are_timed_and_verified() -> None:
    result = bench(lookup.make_op("benched_lookup"), providers=["plain"], backward=True, **FAST)
    assert [[record.status for record in group.records] for group in result.groups[:1]] == [
        ["ok", "ok"]
    ]
    result = bench(
        remainder.make_op("benched_remainder"), providers=["plain", "torchscript"], **FAST
    )
    assert [record.status for record in result.groups[0].records] == ["ok"] * 3
    wrong = wrong_arguments.repeated_ids_overwrite("cpu")
    result = bench(wrong, providers=["plain"], backward=True, **FAST)
    assert [rows(group)["plain"].status for group in result.groups] == ["ok", "wrong", "wrong"]
    assert "gradient 0" in (rows(result.groups[1])["plain"].reason or "")


def test_a_wrong_forward_does_not_win_forward_and_backward() -> None:
    op = operator("lazy_forward", lazy=lazy)
    result = bench(op, cases=["64x64"], providers=["lazy"], backward=True, **FAST)
    assert [group.phase for group in result.groups] == ["forward", "backward", "forward+backward"]
    assert [rows(group)["lazy"].status for group in result.groups] == ["wrong"] * 3


def halved_gradient(
    needs: Sequence[bool], grad_output: Tensor, input: Tensor, scale: float
) -> tuple[Tensor | None, ...]:
    return (grad_output * scale * (input > 0) / 2,)


def test_a_wrong_gradient_is_found_and_named() -> None:
    honest = operator("halved", clamped=clamped)
    op = replace(
        honest, implementations={"halved": Implementation("cpu", clamped, halved_gradient)}
    )
    result = bench(op, cases=["64x64"], providers=["halved"], backward=True, **FAST)
    forward, backward, both = (rows(group)["halved"] for group in result.groups)
    assert forward.status == "ok"
    assert backward.status == both.status == "wrong"
    assert (both.reason or "").startswith("gradient 0 row")


def test_tiny_cases_are_decided_by_host_time(
    honest: FusedOp, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[tuple[float, float]] = []

    def noted(ours: list[float], theirs: list[float]) -> Any:
        compared.append((significant(median(ours)), significant(median(theirs))))
        return verdict(ours, theirs)

    monkeypatch.setattr(bench_run, "verdict", noted)
    op = replace(honest, cases=[case(4, 4, "bench", "tiny"), case(4, 8, "bench")])
    result = bench(op, providers=["clamp"], **FAST)
    assert [group.verdicts_by for group in result.groups] == ["host time", "device time"]
    tiny = rows(result.groups[0])
    comparison = tiny["clamp"].vs_eager
    assert comparison is not None and comparison.speedup > 0
    assert (tiny["clamp"].host_us, tiny["eager"].host_us) in compared
    wide = rows(result.groups[1])
    assert (wide["clamp"].median_us, wide["eager"].median_us) in compared


def test_backward_phases_carry_their_own_cost(honest: FusedOp) -> None:
    result = bench(honest, cases=["64x64"], providers=["clamped"], backward=True, **FAST)
    size = 64 * 64 * 4
    assert [group.bytes_moved for group in result.groups] == [2 * size, 3 * size, 5 * size]
    assert all(rows(group)["clamped"].status == "ok" for group in result.groups)


def test_an_implementation_that_refuses_is_unsupported_not_failed(honest: FusedOp) -> None:
    picky = Implementation("cpu", clamped, None, supports=lambda *args: "needs a multiple of 128")
    elsewhere = Implementation("cuda", clamped)
    op = replace(honest, implementations={"picky": picky, "elsewhere": elsewhere})
    result = bench(op, cases=["64x64"], providers=["picky", "elsewhere", "auto"], **FAST)
    found = rows(result.groups[0])
    assert (found["picky"].status, found["picky"].reason) == (
        "unsupported",
        "needs a multiple of 128",
    )
    assert found["elsewhere"].status == "unsupported"
    assert "not a result of ours" in (found["auto"].note or "")
    assert result.failures == []


def test_other_libraries_are_timed_where_they_are_installed(honest: FusedOp) -> None:
    def absent() -> None:
        raise ModuleNotFoundError("No module named 'absent'")

    op = replace(honest, libraries={"theirs": lambda: scaled_relu, "absent": absent})
    (group,) = bench(op, providers=["theirs", "absent"], **FAST).groups[:1]
    assert rows(group)["theirs"].status == "ok"
    assert rows(group)["theirs"].kind == "peer"
    assert rows(group)["absent"].status == "unavailable"
    assert rows(group)["absent"].reason == "ModuleNotFoundError: No module named 'absent'"


def test_torchscript_and_compile_are_verified_like_everyone(honest: FusedOp) -> None:
    group = only_group(honest, providers=["torchscript", "compile"])
    assert {record.provider: record.status for record in group.records} == {
        "eager": "ok",
        "torchscript": "ok",
        "compile": "ok",
    }


def reads_a_table(input: Tensor, scale: float = 2.0) -> Tensor:
    return {"relu": torch.relu}["relu"](input) * scale  # no script can hold a table of functions


def test_what_does_not_script_is_traced(honest: FusedOp) -> None:
    op = replace(honest, reference=reads_a_table)
    result = bench(op, cases=["64x64"], providers=["torchscript"], backward=True, **FAST)
    assert [rows(group)["torchscript"].status for group in result.groups] == ["ok"] * 3


def test_more_than_the_ceiling_is_explained() -> None:
    from fuselab.prove.bench_run import _explain

    assert _explain(1.03) is None and _explain(None) is None
    assert (_explain(1.04) or "").startswith("above the limit: ")


@pytest.mark.parametrize(
    ("low_us", "high_us", "is_above"),
    [(104.0, 100.0, True), (103.0, 100.0, False), (19.0, 1.0, False), (None, 1.0, False)],
)
def test_a_time_is_above_the_limit_beyond_both_intervals(
    low_us: float | None, high_us: float, is_above: bool
) -> None:
    """A limit of less than 20 us is mostly a call."""
    ceiling = Ceiling("memory", "copy", 110.0, 1.0, low_us)
    assert bench_run._is_above(ceiling, high_us) is is_above
    assert bench_run._is_above(None, high_us) is False


def test_an_implementation_above_the_limit_is_a_failure(
    honest: FusedOp, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At 0.2 TFLOP/s the declared work takes 0.3 s, however fast the machine is."""
    timed, seeds = bench_run.Run._timed, []
    monkeypatch.setattr(
        bench_run.Run, "_timed", lambda self, seed: seeds.append(seed) or timed(self, seed)
    )
    op = replace(honest, cost=lambda input, scale: Cost(1 << 14, 1 << 14, 1 << 36))
    result = bench(op, cases=["64x64"], providers=["clamp", "clamped"], **FAST)
    assert seeds == [0, 1, 2]  # each time above the limit
    (line,) = result.failures
    assert line.startswith("64x64, float32, forward: clamped at ") and "above the limit:" in line
    assert rows(result.groups[0])["clamp"].is_above_limit  # a peer: a remark beside the table
    seeds.clear()
    result = bench(honest, cases=["64x64"], providers=["clamp", "clamped"], **FAST)
    assert result.failures == [] and seeds == [0]


def test_default_cases_are_those_that_fit_and_quick_takes_three(honest: FusedOp) -> None:
    more = replace(honest, cases=[*(case(size, 8, "bench") for size in range(1, 8)), *honest.cases])
    result = bench(more, providers=["eager"], **FAST)
    assert [group.case for group in result.groups] == ["1x8", "5x8", "2048x1024"]
    assert result.skipped == ["1048576x1024, float32: a huge case, timed on CUDA only"]


def test_a_case_without_room_is_skipped_and_said_so(
    honest: FusedOp, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_module.os, "sysconf", lambda name: 1 << 12)  # 16 MiB, half of it ours
    result = bench(honest, providers=["eager"], cases=["512x512", "64x64"], **FAST)
    assert [group.case for group in result.groups] == ["64x64"]
    assert result.skipped == [
        "512x512, float32: needs about 0.0 GiB to be timed and verified, 0.0 GiB are free for it"
    ]


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"providers": ["clampd"]}, UnknownNameError, "unknown provider 'clampd'.*'clamped'"),
        ({"cases": ["64x65"]}, UnknownNameError, "unknown case '64x65'.*'64x64'"),
        ({"dtypes": [torch.int32]}, UnknownNameError, "unknown dtype 'int32'.*float32"),
        ({"budget_s": 0.0}, ArgumentError, "must be above 0"),
    ],
)
def test_names_and_numbers_that_cannot_be_are_refused(
    honest: FusedOp, options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        bench(honest, device="cpu", **options)


def test_a_backward_without_a_gradient_is_refused(honest: FusedOp) -> None:
    with pytest.raises(ArgumentError, match="defines no gradient"):
        bench(replace(honest, gradient=None), device="cpu", backward=True)


def test_what_runs_on_no_such_device_is_refused_by_name(honest: FusedOp) -> None:
    elsewhere = Implementation("cuda", clamped)
    op = replace(honest, implementations={**honest.implementations, "elsewhere": elsewhere})
    with pytest.raises(DeviceError, match=r"elsewhere of .* would run on cuda, .* is cpu"):
        bench(op, cases=["64x64"], providers=["elsewhere", "eager"], **FAST)


def test_the_public_name_is_this_function() -> None:
    assert fuselab.bench is bench


OPERATOR_FILE = """
import sys
sys.path.insert(0, {folder!r})
from bench_operators import clamped, lazy, operator
OP = operator({name!r}, {implementation}={implementation})
"""


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs ``fuselab bench`` on an operator file, in this process."""
    monkeypatch.setattr("fuselab.measure.fresh.allocation_is_pinned", lambda: True)

    def execute(implementation: str, *words: str) -> int:
        file = tmp_path / f"{implementation}.py"
        name = f"cli_{implementation}"
        folder = str(Path(__file__).parent)
        file.write_text(
            OPERATOR_FILE.format(folder=folder, name=name, implementation=implementation)
        )
        fixed = ("--device", "cpu", "--case", "64x64", "--budget", "0.02", "--quick")
        return run(["bench", str(file), *fixed, "--provider", implementation, *words])

    return execute


def test_screen_and_json_agree_to_the_digit(
    command: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = tmp_path / "result.json"
    assert command("clamped", "--json", str(written)) == 0
    screen, progress = capsys.readouterr()
    assert progress == "cli_clamped: 64x64, float32, forward\n"
    assert max(len(line) for line in screen.splitlines()) <= 80
    payload = json.loads(written.read_text())
    assert (payload["schema"], payload["verb"]) == (1, "bench")
    assert payload["operator"] == "bench_tests::cli_clamped"
    assert payload["environment"]["torch"] == torch.__version__
    (group,) = payload["groups"]
    assert [record["provider"] for record in group["records"]] == ["eager", "clamped"]
    for record in group["records"]:
        line = next(
            line.split() for line in screen.splitlines() if line.split()[:1] == [record["provider"]]
        )
        shown = [float(word) for word in (line[1], line[3], line[4])]
        assert shown == [record["median_us"], record["host_us"], record["gbps"]]
        assert math.isclose(float(line[5]), 100 * record["ceiling_share"], rel_tol=1e-12)
        if record["vs_eager"]:
            assert line[6:8] == [
                f"{record['vs_eager']['speedup']:.3f}",
                record["vs_eager"]["outcome"],
            ]


def test_a_wrong_implementation_makes_the_status_1(
    command: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("lazy") == 1
    screen = capsys.readouterr().out
    assert "lazy WRONG: output row" in screen


def test_a_plot_is_written_and_a_wrong_suffix_refused_before_anything_runs(
    command: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn = tmp_path / "plot.svg"
    assert command("clamped", "--plot", str(drawn)) == 0
    assert "<svg" in drawn.read_text()
    capsys.readouterr()
    assert command("clamped", "--plot", str(tmp_path / "plot.jpeg")) == 2
    screen = capsys.readouterr()
    assert screen.err.count("\n") == 1 and ".png, .svg" in screen.err and screen.out == ""


def test_against_an_earlier_result_says_what_became_slower(
    command: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    earlier = tmp_path / "earlier.json"
    assert command("clamped", "--json", str(earlier)) == 0
    payload = json.loads(earlier.read_text())
    for record in payload["groups"][0]["records"]:
        for key in ("median_us", "low_us", "high_us"):
            record[key] /= 1000 if record["provider"] == "clamped" else 0.001
    earlier.write_text(json.dumps(payload))
    capsys.readouterr()
    after = tmp_path / "after.json"
    assert command("clamped", "--against", str(earlier), "--json", str(after)) == 1
    assert "1 FASTER, 1 SLOWER" in capsys.readouterr().out
    changes = json.loads(after.read_text())["against"]["changes"]
    assert {change["provider"]: change["outcome"] for change in changes} == {
        "eager": "FASTER",
        "clamped": "SLOWER",
    }


@pytest.mark.parametrize("text", [None, "not json", "[]", '{"verb": "check"}'])
def test_an_unreadable_earlier_result_is_one_sentence(
    command: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None
) -> None:
    earlier = tmp_path / "earlier.json"
    if text is not None:
        earlier.write_text(text)
    assert command("clamped", "--against", str(earlier)) == 2
    screen = capsys.readouterr()
    assert screen.out == "" and screen.err.count("\n") == 1
    assert "earlier.json" in screen.err and "bench --json" in screen.err


def test_without_pinned_allocation_the_verb_runs_in_a_fresh_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[Any] = []

    def run_pinned(module: str, arguments: Sequence[str]) -> int:
        asked.append((module, list(arguments)))
        return 1

    monkeypatch.setattr("fuselab.measure.fresh.allocation_is_pinned", lambda: False)
    monkeypatch.setattr("fuselab.measure.fresh.run_pinned", run_pinned)
    words = [
        "bench",
        "softmax",
        "--provider",
        "eager,auto",
        "--case",
        "a",
        "--case",
        "b",
        "--quick",
    ]
    assert run([*words, "--device", "cpu", "--budget", "0.5"]) == 1
    ((module, arguments),) = asked
    assert module == "fuselab"
    assert arguments == [
        *("bench", "softmax", "--provider", "eager,auto", "--case", "a", "--case", "b"),
        *("--quick", "--budget", "0.5", "--seed", "0", "--device", "cpu"),
    ]


def test_the_table_of_a_gpu_fits_80_columns() -> None:
    record = Record(
        provider="compile-max-autotune",
        kind="compile",
        status="ok",
        median_us=123400.0,
        low_us=0.01234,
        high_us=999900.0,
        host_us=1234.0,
        gbps=0.001234,
        tflops=0.0001234,
        ceiling_share=1.234,
        explain="123% of the ceiling: more than the device can stream",
        peak_bytes=123456789,
        joules=0.1234,
    )
    group = Group("262144x1024", "bfloat16", "forward+backward", 1, 1, 1, "fp32", None, [record])
    environment = {"device_name": "NVIDIA H200", "torch": "2.11.0", "triton": "3.6.0"}
    result = Bench("a::b", environment, {}, {}, [group], [], ["busy " * 40])
    screen = tables.console()
    with screen.capture() as captured:
        screen.print(tables.bench_table(result))
    assert max(len(line) for line in captured.get().splitlines()) <= 80
    assert "mJ per call: compile-max-autotune 123.4" in captured.get()


@pytest.mark.parametrize("rate", [0.4, 1e6])
def test_a_kept_rate_that_was_beaten_is_measured_again_first(
    honest: FusedOp, monkeypatch: pytest.MonkeyPatch, rate: float
) -> None:
    asked = []

    def measured_again(known: Ceilings, device: torch.device, figure: str, key: str) -> Ceilings:
        asked.append((figure, key))
        return replace(known, **{figure: {key: rate if figure == "matmul_tflops" else 99.0}})

    monkeypatch.setattr(bench_run, "measured_again", measured_again)
    monkeypatch.setattr(
        bench_module,
        "measured_ceilings",
        lambda device: replace(CEILINGS, copy_gbps={"1048576": 1e-6}),
    )
    op = replace(honest, cost=lambda input, scale: Cost(1 << 14, 1 << 14, 1 << 36))
    result = bench(op, cases=["64x64"], providers=["clamp"], **FAST)
    (group,) = result.groups
    assert group.ceiling is not None
    if rate == 0.4:  # still beaten: 0.17 s of arithmetic, said to be so
        assert asked == [("matmul_tflops", "fp32")]
        assert (group.ceiling.bound, group.ceiling.median_us) == ("compute", 171800.0)
        assert rows(group)["clamp"].explain is not None
    else:  # no longer the limit, and of the two copies this run's own was the faster
        assert asked == [("matmul_tflops", "fp32"), ("copy_gbps", "1048576")]
        assert group.ceiling.bound == "memory"
        assert result.ceilings["copy_gbps"] == {"1048576": 99.0}
    assert result.ceilings["matmul_tflops"] == {"fp32": rate}


@pytest.mark.gpu
@pytest.mark.timing
def test_bench_on_cuda_measures_what_the_cpu_cannot(
    honest: FusedOp, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_module, "measured_ceilings", measured_ceilings)  # this device's own
    # 64 MiB in and 64 MiB out: 8 MiB lie in the second-level cache, where shares pass 1.1.
    honest = replace(honest, cases=(case(16384, 1024, "bench"),))
    (group,) = bench(honest, providers=["clamp", "compile"], device="cuda", budget_s=1.0).groups
    found = rows(group)
    assert all(record.status == "ok" for record in group.records)
    shares = {name: record.ceiling_share for name, record in found.items()}
    assert all(share is not None and share > 0 for share in shares.values()), shares
    # Eager's two kernels move every byte twice.
    assert shares["eager"] < 0.75 and shares["compile"] < 1.1, shares
    assert found["eager"].peak_bytes == 2 * 16384 * 1024 * 4
    assert found["eager"].method == "CUDA events, cold L2"
    faster = found["compile"].vs_eager
    assert faster is not None and faster.outcome == "FASTER"  # one kernel instead of two


def never_builds(input: Tensor, scale: float) -> Tensor:
    raise BuildError("no such instruction")


def test_an_implementation_that_fell_back_before_fails_here() -> None:
    op = operator("unbuilt", unbuilt=never_builds)
    with pytest.warns(fallback.FallbackWarning):
        fuselab.operator(op)(torch.ones(2, 2), implementation="unbuilt")
    group = only_group(op, providers=["unbuilt"])
    record = rows(group)["unbuilt"]
    assert (record.status, record.reason) == ("failed", "BuildError: no such instruction")
    assert record.median_us is None


def test_strict_holds_in_the_threads_that_run_backwards() -> None:
    from threading import Thread

    seen: list[bool] = []
    with fallback.strict():
        thread = Thread(target=lambda: seen.append(fallback.is_strict()))
        thread.start()
        thread.join()
    assert seen == [True] and not fallback.is_strict()


def test_made_arguments_are_drawn_once_and_handed_out_as_copies_with_their_layout() -> None:
    drawn = []

    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
        drawn.append(generator.initial_seed())
        value = torch.randn(4, 6, generator=generator)
        return Inputs((value.t(), value.t()[:1].expand(6, 4)))

    op = replace(ops.contract("add"), cases=(Case("transposed", make),))
    made = CaseArguments(op, op.cases[0], torch.device("cpu"), torch.float32)
    made.keeps = True  # as on a GPU
    first = made(0)
    kept = [tensor.clone() for tensor in first]
    first[0].zero_()
    again, other = made(0), made(1)
    assert drawn == [0, 1]
    assert all(torch.equal(*pair) for pair in zip(again, kept, strict=True))
    assert [tensor.stride() for tensor in again] == [(1, 6), (0, 6)]
    assert not torch.equal(other[0], kept[0])
