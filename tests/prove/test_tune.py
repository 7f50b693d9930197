"""``fuselab bench --tune``: every candidate is tried and verified, the fastest right one saved."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_operators import clamped, operator
from torch import Tensor
from tuned_operator import OP, candidates

from fuselab.cli.main import run
from fuselab.device.ceiling import Ceilings
from fuselab.errors import ArgumentError, UnknownNameError
from fuselab.measure import cpu_timer
from fuselab.op import FusedOp
from fuselab.prove import bench_run
from fuselab.prove import tune as tuner
from fuselab.prove.tune import Tried, TunedCase, Tuning, tune
from fuselab.report import tables
from fuselab.runtime import dispatch, tuning
from fuselab.runtime.tuning import Config

CEILINGS = Ceilings("test", "test", "none", "2026-01-01T00:00:00+00:00", {"1048576": 20.0}, {}, 1.0)
OPERATOR_FILE = Path(__file__).with_name("tuned_operator.py")
SMALL, LARGE, WRONG, RAISES = candidates()


@pytest.fixture(autouse=True)
def short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Choices go to a folder of the test's own; one thread, and no flush of the cache."""
    monkeypatch.setenv("FUSELAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tuner, "measured_ceilings", lambda device: CEILINGS)
    monkeypatch.setattr(bench_run, "measured_again", lambda ceilings, *figure: ceilings)
    monkeypatch.setattr(cpu_timer, "flush_cache", lambda: None)
    tuning.forget(OP.name)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    tuning.forget(OP.name)


def tuned(op: FusedOp = OP, **options: Any) -> Tuning:
    return tune(op, **({"device": "cpu", "budget_s": 0.05, "cases": ["4099"]} | options))


def test_every_candidate_is_tried_and_a_wrong_one_never_chosen() -> None:
    found = tuned(backward=True)
    assert [(case.implementation, case.key) for case in found.cases] == [
        ("plain", "float32 any size"),
        ("plain_backward", "any size"),
    ]
    for case in found.cases:
        tried = {one.config: one for one in case.tried}
        assert {config: one.status for config, one in tried.items()} == {
            SMALL: "ok",
            LARGE: "ok",
            WRONG: "wrong",
            RAISES: "failed",
        }
        assert tried[SMALL].is_default and not tried[LARGE].is_default
        assert sum(one.is_chosen for one in case.tried) == 1
        assert tried[SMALL].is_chosen or tried[LARGE].is_chosen
        for one in (tried[SMALL], tried[LARGE]):
            assert one.low_us and one.median_us and one.high_us
            assert one.low_us <= one.median_us <= one.high_us
            assert one.ceiling_share and case.ceiling_us
            assert one.registers is None  # plain PyTorch: no launch of ours
        assert tried[RAISES].reason == "ValueError: range() arg 3 must not be zero"
    assert len(found.wrong) == 2 and "gradient 0" in found.wrong[1]


def test_the_choice_is_saved_and_obeyed() -> None:
    found = tuned(command="fuselab bench tuned_operator.py --tune")
    (case,) = found.cases
    chosen = next(one.config for one in case.tried if one.is_chosen)
    assert found.file == tuning.user_file(tuning.device_name(OP.name, "plain") or "")
    entry = json.loads(found.file.read_text())["operators"][OP.name]["plain"][case.key]
    assert Config(**entry["config"]) == chosen
    assert entry["cases"] == ["4099, float32"]
    assert entry["command"] == "fuselab bench tuned_operator.py --tune"
    assert entry["versions"]["torch"] == torch.__version__
    assert tuning.chosen(OP.name, "plain", case.key, candidates()) == chosen


def test_shipped_choices_are_saved_beside_the_operator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = tmp_path / "package" / "tuned" / "cpu.json"
    monkeypatch.setattr(tuning, "shipped_file", lambda op, device: shipped)
    assert tuned(ship=True).file == shipped
    assert OP.name in shipped.read_text()


def timed(name: str, **times: Sequence[float]) -> TunedCase:
    """A case in which configurations, the default first, took these times (none: wrong)."""
    by_config = {Config(is_=config): values for config, values in times.items()}
    tried = [
        Tried(config, "ok" if values else "wrong", None, 1.0)
        for config, values in by_config.items()
    ]
    tried[0] = replace(tried[0], is_default=True)
    return TunedCase(name, "float32", "plain", "k", None, tried, by_config)


ROUNDS = 24


@pytest.mark.parametrize(
    ("cases", "chosen"),
    [
        ([{"default": 10.0, "faster": 8.0, "fastest": 7.0}], "fastest"),
        ([{"default": 10.0, "hardly": 9.95}], "default"),  # within the verdict's band
        ([{"default": 10.0, "wrong": None, "faster": 8.0}], "faster"),
        ([{"default": None, "slow": 12.0}], "slow"),
        ([{"default": None, "wrong": None}], None),
        # One key, two sizes: what one of them finds slower than the default is out.
        ([{"default": 10, "one": 5, "both": 8}, {"default": 10, "one": 11, "both": 9}], "both"),
        ([{"default": 10, "one": 5}, {"default": 10, "one": 11}], "default"),
        ([{"default": 10, "one": 5, "two": 9}, {"default": 10, "one": None, "two": 9}], "two"),
    ],
)
def test_the_fastest_right_one_over_all_cases_of_a_key(
    cases: list[dict[str, float | None]], chosen: str | None
) -> None:
    def rounds(value: float | None) -> list[float]:
        return (
            [] if value is None else [value * (1 + 0.001 * (place % 3)) for place in range(ROUNDS)]
        )

    listed = [
        timed(str(number), **{name: rounds(value) for name, value in times.items()})
        for number, times in enumerate(cases)
    ]
    config, maybe = tuner._fastest(listed)
    assert config == (None if chosen is None else Config(is_=chosen))
    assert maybe is None


def test_cases_of_one_key_may_have_different_defaults() -> None:
    first, second = (timed(name, default=[10.0] * 24, common=[8.0] * 24) for name in ("1", "2"))
    other = {Config(is_="other"): [7.9] * 24, Config(is_="common"): [8.0] * 24}
    second = replace(second, tried=[Tried(Config(is_="other"), "ok")], times_us=other)
    # Within the verdict's band of the second's default, and faster than the first's.
    assert tuner._fastest([first, second]) == (Config(is_="common"), None)
    alone = replace(second, times_us=other | {Config(is_="common"): [9.0] * 24})
    assert tuner._fastest([first, alone]) == (None, None)  # each keeps its own rule


def test_too_few_rounds_keep_the_default_and_say_so() -> None:
    config, maybe = tuner._fastest([timed("8x8", default=[10.0] * 4, faster=[5.0] * 4)])
    assert (config, maybe) == (Config(is_="default"), Config(is_="faster"))


def test_a_launcher_that_asks_for_nothing_is_skipped_with_the_reason() -> None:
    op = operator("asks_for_nothing", clamped=clamped)
    op = replace(op, configs={"clamped": candidates})
    found = tuned(op, cases=["64x64"])
    assert found.cases == [] and not found.file.exists()
    assert (
        "its launcher must ask tuning.chosen() with one key here, and asks with none"
        in (found.skipped[0])
    )


def test_what_cannot_be_tuned_is_one_sentence() -> None:
    with pytest.raises(ArgumentError, match=r"has nothing to tune: its FusedOp\.configs is empty"):
        tuned(operator("no_configs", clamped=clamped))
    with pytest.raises(UnknownNameError) as refused:
        tuned(implementations=["tritn"])
    assert (refused.value.kind, refused.value.name) == ("tunable implementation", "tritn")
    with pytest.raises(UnknownNameError) as refused:
        tuned(cases=["4100"])
    assert (refused.value.kind, refused.value.name) == ("case", "4100")
    of_backward = replace(OP, configs={"plain_backward": candidates})
    with pytest.raises(ArgumentError, match=r"nothing to tune but plain_backward.*--backward"):
        tuned(of_backward)
    on_gpu = replace(
        OP, implementations={"plain": replace(OP.implementations["plain"], device="cuda")}
    )
    with pytest.raises(
        ArgumentError, match=r"nothing to tune on cpu: .* of plain, plain_backward, on cuda"
    ):
        tuned(on_gpu)
    dispatch.operator(OP)


def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fuselab.measure.fresh.allocation_is_pinned", lambda: True)


def test_command_prints_what_it_tried_in_80_columns_and_writes_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    in_process(monkeypatch)
    target = tmp_path / "tune.json"
    arguments = ["bench", str(OPERATOR_FILE), "--tune", "--device", "cpu", "--budget", "0.05"]
    assert run([*arguments, "--case", "4099", "--json", str(target)]) == 1  # tile=7 is wrong
    screen = capsys.readouterr()
    assert max(map(len, screen.out.splitlines())) <= 80
    written = json.loads(target.read_text())
    assert (written["schema"], written["verb"]) == (1, "tune")
    for case in written["cases"]:
        assert "times_us" not in case
        for tried in case["tried"]:
            assert f"tile={tried['config']['tile']}" in screen.out
    # The last four of 4099 are missing with tiles of 7; the worst of them is named.
    said = " ".join(screen.out.split())
    assert re.search(r"tile=7 WRONG: output row 0 of 1 is off by .* column 409[5-8] is 0,", said)
    assert "tile=0 FAILED: ValueError" in screen.out
    assert "saved in" in screen.out and "--json" not in written["command"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["softmax", "--ship"], "--ship says where --tune saves; add --tune"),
        (["softmax", "--tune", "--quick"], "--tune goes without --plot, --against and --quick"),
        (["{own}", "--tune", "--provider", "triton"], "nothing to tune on cpu"),
        (["{own}", "--tune", "--provider", "cuda"], "unknown tunable implementation 'cuda'"),
    ],
)
def test_wrong_calls_say_one_sentence(
    arguments: list[str],
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    in_process(monkeypatch)
    own = Path(__file__).parents[2] / "examples" / "own_triton_op.py"
    filled = [argument.format(own=own) for argument in arguments]
    assert run(["bench", *filled, "--device", "cpu"]) == 2
    (sentence,) = [
        line for line in capsys.readouterr().err.splitlines() if line.startswith("fuselab: ")
    ]
    assert said in sentence


def test_the_table_shows_registers_and_spills() -> None:
    config = Config(threads=1024, elements=32, blocks=2, cluster=8, path="resident")
    tried = [
        Tried(config, "ok", None, 12.345, 12.0, 12.5, 0.98, 128, 16, 49152, True, False),
        Tried(Config(threads=32), "ok", None, 10.0, 9.9, 10.1, 1.0, 32, 0, 0, False, True),
    ]
    case = TunedCase("4096x4096", "bfloat16", "cuda_backward", "bfloat16 4096", 9.9, tried, {})
    found = Tuning(
        "fuselab::softmax", {"device_name": "H200", "torch": "2"}, "", Path("f"), [case], [], []
    )
    console = tables.console(color=False)
    with console.capture() as capture:
        console.print(tables.tuning_table(found))
    lines = capture.get().splitlines()
    assert max(map(len, lines)) <= 80
    (best, *_), (default, *_) = (
        [line for line in lines if word in line] for word in ("chosen", "default")
    )
    assert best.split() == ["threads=32", "10.00", "1.0", "0.8100", "100.0", "32", "0", "chosen"]
    assert "128!" in default and "49152" in default
    assert lines.index(best) < lines.index(default)


@pytest.mark.gpu
def test_a_triton_operator_is_tuned_on_a_gpu() -> None:
    from fuselab.prove.load import load_op

    op = load_op(str(Path(__file__).parents[2] / "examples" / "own_triton_op.py"))
    found = tune(op, device="cuda", budget_s=0.2, backward=True, cases=["1024x1024"])
    assert [case.implementation for case in found.cases] == ["triton", "triton_backward"]
    for case in found.cases:
        assert [one.status for one in case.tried] == ["ok"] * 5
        assert all(one.registers and one.local_bytes == 0 for one in case.tried)
    x = torch.randn(1024, 1024, device="cuda")
    function = dispatch.operator(op)
    expected: Tensor = torch.relu(x) ** 2
    assert torch.equal(function(x, implementation="triton"), expected)
