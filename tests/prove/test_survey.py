"""``fuselab bench --survey``: what counts as a loss, what is kept, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_operators import lazy, operator, scaled_relu, scaled_relu_backward
from torch import Tensor

from fuselab.cli.main import run
from fuselab.device.ceiling import Ceilings
from fuselab.errors import ArgumentError, UnknownNameError
from fuselab.measure import fresh, interleave
from fuselab.measure.timer import Call
from fuselab.op import Draw, FusedOp, Implementation, Inputs
from fuselab.prove import bench_run, survey_space
from fuselab.prove import survey as survey_module
from fuselab.prove.survey import FILE, survey
from fuselab.prove.survey_result import Survey, geometric_mean, survey_from
from fuselab.report import survey_plot, survey_text
from fuselab.runtime import surveyed_choice

# A streaming kernel that is never slower than what is timed beside it cannot be exceeded.
CEILINGS = Ceilings(
    device="test",
    torch="test",
    driver="none",
    measured="2026-01-01T00:00:00+00:00",
    copy_gbps={"1048576": 20.0},
    matmul_tflops={"fp32": 0.2},
    launch_us=1.0,
)


class Clock:
    """Time that passes only in the operator's own functions: microseconds since the start."""

    def __init__(self) -> None:
        self.now_us = 0.0

    def taking(self, us: Callable[[], float]) -> Callable[..., Tensor]:
        """Return ``scaled_relu`` as a function that takes so long."""

        def slowed(input: Tensor, scale: float = 2.0) -> Tensor:
            self.now_us += us()
            return scaled_relu(input, scale)

        return slowed


class FakeTimer:
    """A timer by the fake clock; a call that takes none of its time takes 1 us."""

    calls, method, page_faults_per_call = 1, "fake clock", None

    def __init__(self, clock: Clock, call: Call) -> None:
        self._clock, self._call = clock, call

    def sample(self) -> float:
        before = self._clock.now_us
        self._call()
        return self._clock.now_us - before or 1.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    """Known ceilings, small calls, and a fake clock for the device and the host."""
    clock = Clock()
    monkeypatch.setitem(survey_space.MOST_BYTES, "cpu", 100_000)
    monkeypatch.setattr(survey_module, "measured_ceilings", lambda device: CEILINGS)
    monkeypatch.setattr(bench_run, "measured_again", lambda ceilings, *figure: ceilings)
    monkeypatch.setattr(interleave, "timer", lambda call, device, **how: FakeTimer(clock, call))
    monkeypatch.setattr(interleave, "HostTimer", lambda call, device: FakeTimer(clock, call))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield clock
    torch.set_num_threads(threads)


def draw(source: Draw) -> Inputs:
    return Inputs((source.tensor(source.size(), source.size()),))


def timed(clock: Clock, ours: Callable[[], float], eager: float = 10.0) -> FusedOp:
    """Return an operator whose reference takes ``eager`` us and whose kernel takes ``ours()``."""
    plain = operator("timed", plain=scaled_relu)
    kernel = clock.taking(ours)

    def reference(input: Tensor, scale: float = 2.0) -> Tensor:
        clock.now_us += eager
        return scaled_relu(input, scale)

    return replace(
        plain,
        reference=reference,
        implementations={"plain": Implementation("cpu", kernel, scaled_relu_backward)},
        draw=draw,
        dtypes=(torch.float32, torch.float64),
        cost=plain.cost,
    )


# The budget is spent at once: a survey's verdicts have their rounds whatever it is.
ON_CPU: dict[str, Any] = {"device": "cpu", "providers": ["plain"], "budget_s": 1e-6}


def test_a_slower_kernel_loses_at_every_point_with_the_command_that_repeats_it(
    clock: Clock,
) -> None:
    op = timed(clock, lambda: 20.0)
    found = survey(op, points=3, seed=4, named="my_op.py", **ON_CPU)
    assert [point.index for point in found.points] == [0, 1, 2]
    assert [point.dtype for point in found.points] == ["float32"] * 3
    assert [point.takes for point in found.points] == [{"forward": "plain"}] * 3
    for one in found.losing:
        assert one.versus is not None and one.versus.against == "eager"
        assert (one.versus.speedup, one.versus.low, one.versus.high) == (0.5, 0.5, 0.5)
    summary = found.to_json()["summary"]["forward"]
    assert (summary["points"], summary["slower"], summary["faster"]) == (3, 3, 0)
    assert summary["speedup"] == summary["least_speedup"] == 0.5
    assert summary["eager_host_ratio"] == 0.5
    assert found.failures == []
    command = "fuselab bench my_op.py --survey --seed 4 --point 2 --provider plain"
    assert [one["command"] for one in found.to_json()["losing"]][2] == command
    text = survey_text.survey_text(found)
    assert command in text and "auto: 3 SLOWER" in text and "auto is SLOWER here" in text
    table = [line for line in text.splitlines() if "fuselab bench" not in line]
    assert max(map(len, table)) <= 80


def test_a_point_alone_is_the_point_of_the_whole(clock: Clock) -> None:
    op = timed(clock, lambda: 5.0)
    whole = survey(op, points=3, seed=4, **ON_CPU)
    alone = survey(op, only=[2], seed=4, **ON_CPU)
    assert [point.title for point in alone.points] == [whole.points[2].title]
    assert alone.points[0].moved_bytes == whole.points[2].moved_bytes
    assert whole.losing == [] and whole.to_json()["summary"]["forward"]["faster"] == 3
    text = survey_text.survey_text(whole)
    assert "auto: 3 FASTER" in text and "auto is SLOWER at no point." in text


def test_worst_times_losing_points_again_and_those_times_count(clock: Clock) -> None:
    slow_for = 2

    def ours() -> float:
        return 20.0 if len(points_seen) <= slow_for else 5.0

    points_seen: list[str] = []
    op = timed(clock, ours)
    found = survey(op, points=3, worst=True, progress=points_seen.append, **ON_CPU)
    again = [line for line in points_seen if " again" in line]
    assert len(again) == slow_for and again[0].startswith("timed: point 0 again, float32 ")
    assert [bool(point.again) for point in found.points] == [True, True, False]
    assert found.losing == []
    assert [one.is_again for one in found.judged()] == [True, True, False]
    (first,) = found.points[0].groups
    auto = next(record for record in first.records if record.provider == "auto")
    assert auto.vs_best_peer is not None and auto.vs_best_peer.outcome == "SLOWER"
    assert found.to_json()["summary"]["forward"]["speedup"] == 2.0
    assert "; 2 of the points were timed again" in survey_text.survey_text(found)


def test_an_implementation_that_auto_passes_over_is_counted(clock: Clock) -> None:
    op = timed(clock, lambda: 20.0)
    faster = Implementation("cpu", clock.taking(lambda: 2.0), scaled_relu_backward)
    op = replace(op, implementations={**op.implementations, "faster": faster})
    found = survey(op, points=1, **{**ON_CPU, "providers": ["plain", "faster"]})
    (one,) = found.judged()
    assert one.faster is not None and one.faster.provider == "faster"
    row = next(
        line for line in survey_text.survey_text(found).splitlines() if line.startswith("faster ")
    )
    assert row.split() == ["faster", "1", "5.000", "0", "1"]


def test_a_survey_continues_where_it_stopped(clock: Clock, tmp_path: Path) -> None:
    op, lines = timed(clock, lambda: 20.0), list[str]()
    options = {**ON_CPU, "folder": tmp_path / "kept", "seed": 1}
    first = survey(op, points=2, **options)
    more = survey(op, points=4, progress=lines.append, **options)
    assert [line.split(",")[0] for line in lines] == ["timed: point 2", "timed: point 3"]
    assert list(more.points[:2]) == list(first.points) and len(more.points) == 4
    payload = json.loads((tmp_path / "kept" / FILE).read_text())
    assert payload["verb"] == "survey" and payload["schema"] == 1
    assert survey_from(payload) == more


def test_auto_goes_by_a_survey_that_chose(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FUSELAB_CACHE", str(tmp_path))
    monkeypatch.setitem(survey_space.TINY_BYTES, "cpu", 10_000)
    op = timed(clock, lambda: 20.0)
    faster = Implementation("cpu", clock.taking(lambda: 2.0), scaled_relu_backward)
    op = replace(op, implementations={**op.implementations, "faster": faster})
    options = {**ON_CPU, "providers": ["plain", "faster"]}
    found = survey(op, points=4, **options)
    judged_by_device = [one for one in found.judged() if one.group.verdicts_by == "device time"]
    choices = found.choices()
    assert 0 < len(choices["points"]) == len(judged_by_device) < 4
    us = {"reference": (10.0,) * 3, "plain": (20.0,) * 3, "faster": (2.0,) * 3}
    assert all(point["us"] == us for point in choices["points"])
    surveyed_choice.write(op, torch.device("cpu"), choices)
    again = survey(op, only=[judged_by_device[0].point.index], **options)
    assert again.points[0].takes == {"forward": "faster"}
    (one,) = again.judged()
    record = one.record("auto")
    assert record is not None and record.note == "auto takes faster, which a survey found faster"
    assert one.versus is not None and one.versus.speedup == 5.0
    surveyed_choice.forget()


def test_what_is_above_the_limit_is_listed_and_is_no_failure(clock: Clock) -> None:
    found = survey(timed(clock, lambda: 5.0), points=1, **ON_CPU)
    assert found.above_limit == []
    (group,) = found.points[0].groups
    records = [
        replace(one, is_above_limit=one.provider == "plain", ceiling_share=1.2)
        for one in group.records
    ]
    point = replace(found.points[0], groups=(replace(group, records=records),))
    found = replace(found, points=[point])
    assert found.above_limit == ["point 0, forward: plain at 120 % of the limit"]
    assert found.failures == []
    assert "above the limit, to be explained:" in survey_text.survey_text(found)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"seed": 2}, "holds a survey made with seed 1, not 2; give another folder."),
        ({"backward": True}, "made with backward False, not True;"),
        ({"providers": ["eager"]}, "made with asked providers plain, not eager;"),
    ],
)
def test_a_folder_of_another_survey_is_refused(
    clock: Clock, tmp_path: Path, change: dict[str, Any], sentence: str
) -> None:
    options = {**ON_CPU, "folder": tmp_path, "seed": 1, "points": 1}
    op = timed(clock, lambda: 20.0)
    survey(op, **options)
    before = (tmp_path / FILE).read_bytes()
    with pytest.raises(ArgumentError) as error:
        survey(op, **{**options, **change})
    assert sentence in str(error.value)
    with pytest.raises(ArgumentError) as error:
        survey(replace(op, name="bench_tests::another"), **options)
    assert "made with operator bench_tests::timed, not bench_tests::another;" in str(error.value)
    assert (tmp_path / FILE).read_bytes() == before


def test_a_file_that_is_no_survey_is_refused(clock: Clock, tmp_path: Path) -> None:
    for text in ("{", "[]", '{"verb": "bench"}'):
        (tmp_path / FILE).write_text(text)
        with pytest.raises(ArgumentError) as error:
            survey(timed(clock, lambda: 20.0), points=1, folder=tmp_path, **ON_CPU)
        assert "is no survey that can be continued" in str(error.value)
        assert (tmp_path / FILE).read_text() == text


def test_a_wrong_result_fails_with_the_point_named(clock: Clock) -> None:
    op = timed(clock, lambda: 5.0)
    wrong = Implementation("cpu", lazy, scaled_relu_backward)
    op = replace(op, implementations={"wrong": wrong})
    found = survey(op, points=1, **{**ON_CPU, "providers": ["wrong"]})
    title = found.points[0].title
    assert [line.split(" wrong: ")[0] for line in found.failures] == [
        f"point 0 ({title}, float32, forward): wrong",
        f"point 0 ({title}, float32, forward): auto",
    ]
    (one,) = found.judged()
    assert one.versus is None and "not timed" in survey_text.survey_text(found)


def test_a_call_that_the_reference_refuses_is_listed(clock: Clock) -> None:
    def refusing(input: Tensor, scale: float = 2.0) -> Tensor:
        if input.device.type == "meta" or input.numel() < 2000:
            return scaled_relu(input, scale)
        raise RuntimeError("fewer elements are needed")

    op = replace(timed(clock, lambda: 5.0), reference=refusing)
    found = survey(op, points=4, **ON_CPU)
    refused = [point for point in found.points if point.refused is not None]
    assert 0 < len(refused) < 4
    assert refused[0].refused == "RuntimeError: fewer elements are needed"
    assert "not taken, RuntimeError: fewer elements" in survey_text.survey_text(found)
    assert found.failures == []
    only = survey(op, only=[refused[0].index], **ON_CPU)
    assert only.failures == ["no point could be timed: RuntimeError: fewer elements are needed"]


def test_forward_and_backward_are_judged_apart(clock: Clock) -> None:
    found = survey(timed(clock, lambda: 5.0), points=1, backward=True, **ON_CPU)
    assert found.phases == ["forward", "forward+backward"]
    assert set(found.points[0].takes) == set(found.phases)
    assert " --backward" in found.command_of(found.points[0])


def test_compiled_code_serves_several_shapes(clock: Clock) -> None:
    from torch._dynamo.utils import counters

    counters.clear()
    op = operator("compiled", plain=scaled_relu)
    op = replace(op, draw=draw, dtypes=(torch.float32,))
    found = survey(op, points=3, device="cpu", budget_s=0.02)
    for one in found.judged():
        record = one.record("compile")
        assert record is not None and record.status == "ok"
    assert counters["stats"]["unique_graphs"] in (1, 2)  # a width of 1 has a graph of its own


def test_the_plot_has_a_panel_for_each_phase(clock: Clock, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    op = timed(clock, lambda: 20.0)
    found = survey(op, points=2, backward=True, **ON_CPU)
    survey_plot.survey_plot(found, tmp_path / "survey.svg")
    text = (tmp_path / "survey.svg").read_text()
    assert text.count("<!-- bytes moved at least -->") == 2
    assert "<!-- forward+backward -->" in text and "<!-- SLOWER -->" in text
    with pytest.raises(ArgumentError) as error:
        survey_plot.survey_plot(replace(found, points=[]), tmp_path / "none.svg")
    assert str(error.value) == "there is nothing to plot: no point was timed."


def test_the_geometric_mean() -> None:
    assert geometric_mean([2.0, 0.5]) == 1.0
    assert geometric_mean([1.0, 10.0, 100.0]) == 10.0
    assert geometric_mean([]) is None


def test_bad_arguments_are_refused() -> None:
    op = operator("refused", plain=scaled_relu)
    integer = replace(op, gradient=None, cost_backward=None)
    cases: list[tuple[FusedOp, dict[str, Any], type[Exception]]] = [
        (op, {"points": 0}, ArgumentError),
        (op, {"only": [-1]}, ArgumentError),
        (op, {"budget_s": 0.0}, ArgumentError),
        (op, {"providers": ["nobody"]}, UnknownNameError),
        (op, {"dtypes": [torch.int8]}, UnknownNameError),
        (integer, {"backward": True}, ArgumentError),
    ]
    for one, options, kind in cases:
        with pytest.raises(kind):
            survey(one, device="cpu", **options)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["sofmax", "--survey"], "unknown operator 'sofmax'"),
        (["softmax", "--survey", "--points", "0"], "a survey of 0 points has nothing to time"),
        (["softmax", "--survey", "--point", "-3"], "there is no point -3"),
        (["softmax", "--survey", "--tune"], "--survey goes without --tune"),
        (["softmax", "--survey", "--case", "4x4"], "--survey goes without --case"),
        (["softmax", "--survey", "--points", "2", "--point", "1"], "give one."),
        (["softmax", "--points", "2"], "belong to --survey"),
        (["softmax", "--worst"], "belong to --survey"),
        (["softmax", "--choose"], "belong to --survey"),
        (["softmax", "--survey", "--plot", "survey.gif"], "a plot is written as"),
        (["softmax", "--survey", "--output", "/dev/null"], "is a file; give a folder"),
        (["hash_indices", "--survey", "--backward"], "defines no gradient"),
    ],
)
def test_a_wrong_call_is_one_sentence_and_status_2(
    words: list[str],
    sentence: str,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in fresh.PINNED_ALLOCATION.items():
        monkeypatch.setenv(name, value)
    assert run(["bench", *words, "--device", "cpu"]) == 2
    printed = capfd.readouterr()
    assert printed.out == "" and sentence in printed.err
    assert len(printed.err.strip().splitlines()) == 1 and printed.err.startswith("fuselab: ")


def test_the_command_prints_and_writes(
    clock: Clock,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in fresh.PINNED_ALLOCATION.items():
        monkeypatch.setenv(name, value)
    words = ["bench", "square", "--survey", "--points", "2", "--seed", "3", "--dtype", "float32"]
    words += ["--provider", "eager", "--budget", "0.01", "--device", "cpu"]
    json_file, folder = tmp_path / "survey.json", tmp_path / "kept"
    assert run([*words, "--json", str(json_file), "-o", str(folder)]) == 0
    assert "2 points of seed 3, float32" in capfd.readouterr().out
    found = survey_from(json.loads(json_file.read_text()))
    assert isinstance(found, Survey) and [point.index for point in found.points] == [0, 1]
    assert json.loads((folder / FILE).read_text()) == json.loads(json_file.read_text())
