"""Profile: the split adds up, tables hold what ran, loops and TARGETs record the same way."""

import io
import json
import logging
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.profiler import record_function

from fuselab.cli.profile import _tensors_of
from fuselab.errors import ArgumentError, OutputError, TargetError
from fuselab.inspect import compare, explain_runner, targets
from fuselab.inspect.explain import Request
from fuselab.inspect.profile import parse_schedule, profile, profile_target
from fuselab.inspect.step_memory import NO_LINE
from fuselab.inspect.step_split import claim, union
from fuselab.inspect.target_prints import muted
from fuselab.inspect.wall_time import wall_times
from fuselab.measure import machine_state
from fuselab.report.compare_text import compare_text
from fuselab.report.profile_text import profile_text
from fuselab.report.result import read_result

TARGETS = Path(__file__).parent / "targets"
SINS = str(TARGETS / "sins.py")


def row(rows, name):
    return next(row for row in rows if row.name == name)


@pytest.fixture(scope="module")
def trained():
    return profile_target(
        targets.load(str(TARGETS / "linear_relu.py")), backward=True, schedule=(0, 1, 4, 1)
    )


def test_split_adds_up_to_the_step(trained):
    split = trained.split
    assert min(split.compute_us, split.memory_us, split.overhead_us, split.data_us) >= 0
    assert split.compute_us + split.memory_us + split.overhead_us + split.data_us == (
        pytest.approx(trained.step_us, rel=1e-9)
    )
    facts = trained.describe()
    assert sum(facts["split"].values()) == pytest.approx(facts["step_us"], rel=1e-3)


def test_every_call_is_counted_per_step(trained):
    assert trained.steps == 4
    assert trained.matched == 1.0
    operators = trained.tables.operators
    assert row(operators, "aten::addmm").calls == 2
    assert row(operators, "aten::mm").calls == 3
    assert set(row(operators, "aten::addmm").shapes) == {"8 4x6 6x8", "1 4x8 8x1"}
    for operator in operators:
        assert operator.self_cpu_us <= operator.cpu_us + 1e-6
    assert sum(operator.share for operator in operators) <= 1


def test_ranges_modules_and_lines(trained):
    names = {found.name for found in trained.tables.ranges}
    assert names == {"copy data", "forward", "loss", "backward"}
    lines = {found.name: found for found in trained.tables.lines}
    assert set(lines) == {"linear_relu.py:14", "linear_relu.py:15"}
    assert lines["linear_relu.py:14"].text == "hidden = torch.relu(self.first(input))"
    assert all(0 < line.backward_us < line.total_us for line in lines.values())
    modules = {found.name: found for found in trained.tables.modules}
    assert set(modules) == {"Model", "Model.first", "Model.second"}
    parts = sum(module.total_us for name, module in modules.items() if name != "Model")
    own = modules["Model"].share * trained.step_us
    assert modules["Model"].total_us == pytest.approx(parts + own)


def test_an_operator_that_calls_itself_is_counted_once():
    """Check that ``abs``, which calls itself with an output, has its memory and shapes once."""
    input = torch.randn(300, 100)
    with profile(schedule=(0, 1, 3, 1)) as recorder:
        for _ in range(4):
            input.abs()
            recorder.step()
    found = row(recorder.result.tables.operators, "aten::abs")
    assert (found.calls, found.allocated_bytes, found.shapes) == (1, 120_000, ["300x100"])


def test_the_shapes_that_cost_most_come_first():
    small, large = torch.randn(2), torch.randn(2000, 2000)
    with profile(schedule=(0, 1, 3, 1)) as recorder:
        for _ in range(4):
            torch.exp(small)
            torch.exp(large)
            recorder.step()
    assert row(recorder.result.tables.operators, "aten::exp").shapes == ["2000x2000", "2"]


def test_a_module_without_others_has_one_time(trained):
    """Check that the screen shows a module's own time and its total by the same rounding."""
    facts = trained.describe()
    facts["step_us"] = 1e6 / 3  # a share of it, rounded to four digits, has other digits
    module = next(found for found in facts["modules"] if found["name"] == "Model.first")
    module.update(cpu_us=31850.0, total_us=31850.0, share=0.1209)
    line = next(one for one in profile_text(facts).splitlines() if one.startswith(" Model.first"))
    assert line.split()[1:5] == ["31.8", "ms", "31.8", "ms"]


def test_forward_only_has_no_backward():
    found = profile_target(targets.load(str(TARGETS / "linear_relu.py")), schedule=(0, 1, 2, 1))
    assert {r.name for r in found.tables.ranges} == {"copy data", "forward"}
    assert all(line.backward_us == 0 for line in found.tables.lines)


def test_peak_memory_is_exact():
    def step():
        first = torch.ones(1000, 1000)
        second = first.neg()
        del first
        return second.abs()

    with profile(schedule=(0, 1, 1, 1)) as p:
        for _ in range(2):
            step()
            p.step()
    memory = p.result.tables.memory
    assert memory.peak_bytes == 8_000_000
    assert memory.allocated_bytes == 12_000_000
    assert max(level for _, level in memory.timeline) == 8_000_000


def test_a_users_loop_with_its_own_ranges_and_a_repeat():
    model = nn.Linear(8, 8)
    steps = 0
    with profile(schedule=(1, 1, 2, 2), name="mine") as p:
        for _ in range(11):  # 3 more than the schedule takes
            with record_function("encode"):
                model(torch.ones(2, 8))
            steps += 1
            p.step()
    found = p.result
    assert found.name == "mine" and found.steps == 4 and len(found.traces) == 2
    assert row(found.tables.ranges, "encode").calls == 1
    assert row(found.tables.operators, "aten::addmm").calls == 1
    assert any(line.name.startswith("test_profile.py:") for line in found.tables.lines)


def test_a_loop_that_is_too_short_says_so():
    with profile(schedule=(1, 1, 3, 1)) as p:
        torch.ones(1)
        p.step()
    with pytest.raises(TargetError, match="made 1 steps, and this schedule needs 3"):
        _ = p.result


def test_a_started_but_unfinished_step_does_not_count():
    with profile(schedule=(0, 1, 3, 1)) as p:
        for _ in range(3):
            torch.ones(4).sum()
            p.step()
        torch.ones(4).prod()
    assert p.result.steps == 2
    assert all(r.name != "aten::prod" for r in p.result.tables.operators)


@pytest.mark.parametrize(
    "text", ["1,1,3", "a,1,1,1", "1,0,1,1", "1,1,0,1", "1,1,1,0", "1,1,1,-1", ""]
)
def test_schedules_that_make_no_sense(text):
    with pytest.raises(ArgumentError, match="schedule"):
        parse_schedule(text)


def test_mistakes_of_a_target():
    source = (TARGETS / "sins.py").read_text().splitlines()
    line = 1 + next(i for i, text in enumerate(source) if "raise ValueError" in text)
    words = rf"raises raised when it ran: ValueError: \[bold\]no such thing \(sins.py:{line}\)\.$"
    with pytest.raises(TargetError, match=words):
        profile_target(targets.load(f"{SINS}:raises"))
    with pytest.raises(TargetError, match=r"^\w+ returns nothing.*no backward to run"):
        profile_target(targets.load(f"{SINS}:looks_up"), backward=True)


def test_hostile_range_names_stay_data():
    found = profile_target(targets.load(f"{SINS}:hostile"), schedule=(0, 1, 1, 1))
    assert row(found.tables.ranges, "[red]<script>alert(1)</script>[/red]").calls == 1


def test_traces_are_written_whole(trained, tmp_path):
    trained.save_trace(tmp_path / "trace.json")
    names = {
        event["name"] for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    }
    assert {"aten::addmm", "forward", "backward"} <= names
    trained.save_tensorboard(tmp_path / "board")
    (written,) = (tmp_path / "board").iterdir()
    assert written.name.endswith(".pt.trace.json")


def test_a_place_that_cannot_be_written_is_one_sentence(trained, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="file/inside"):
        trained.save_tensorboard(tmp_path / "file" / "inside")
    with pytest.raises(OutputError, match="cannot write"):
        trained.save_trace(tmp_path / "missing" / "trace.json")


def test_optimizer_and_loss_of_the_file(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        (TARGETS / "linear_relu.py").read_text()
        + "\n\ndef get_loss(output):\n    return output.square().mean()\n"
        + "\n\ndef get_optimizer(module):\n"
        + "    return torch.optim.SGD(module.parameters(), lr=0.1)\n"
    )
    found = profile_target(targets.load(str(file)), backward=True, schedule=(0, 1, 1, 1))
    assert "optimizer" in {r.name for r in found.tables.ranges}
    assert row(found.tables.operators, "aten::mean").calls == 1


def test_compare_orders_by_what_changed(trained):
    after = trained.describe()
    before = json.loads(json.dumps(after))
    before["step_us"] = 10_000.0
    before["operators"][0]["share"] = 0.9
    name = before["operators"][0]["name"]
    before["operators"][1]["name"] = "aten::gone"
    changed = compare.compare(before, after)
    assert changed["step_us"] == [10_000.0, after["step_us"]]
    assert changed["operators"][0]["name"] == name
    assert changed["operators"][0]["share"] == [0.9, after["operators"][0]["share"]]
    gone = next(r for r in changed["operators"] if r["name"] == "aten::gone")
    assert gone["share"][1] is None and gone["us"][1] is None


def lines_of(file, **texts):
    """Return rows of lines: their number, with an n before it, and text; each later one faster."""
    return [
        {
            "name": f"{file}:{number[1:]}",
            "share": 0.5 - 0.1 * place,
            "text": text,
            "file": f"/code/{file}",
            "line_number": int(number[1:]),
        }
        for place, (number, text) in enumerate(texts.items())
    ]


@pytest.mark.parametrize(
    ("file", "after", "expected"),
    [
        # The first is edited, the second moved, a third is new; they stand in another file.
        (
            "new.py",
            {"n4": "y = f(x)", "n6": "return y.sum()", "n9": "return z"},
            {"new.py:4": "old.py:4", "new.py:6": "old.py:5", "new.py:9": None},
        ),
        ("old.py", {"n1": "y = x", "n2": "return y.sum()"}, {"old.py:1": "old.py:4"}),
        # A line that is gone shares no row with another one of its number.
        ("old.py", {"n5": "return x.sum()"}, {"old.py:5": None, "old.py:5 (before)": "old.py:5"}),
    ],
)
def test_compare_pairs_lines_by_their_text(file, after, expected):
    sides = facts_of_wall(10), facts_of_wall(10)
    sides[0]["lines"] = lines_of("old.py", n4="y = x", n5="return y.sum()")
    sides[1]["lines"] = lines_of(file, **after)
    found = {row["name"]: row["before_name"] for row in compare.compare(*sides)["lines"]}
    assert {name: found[name] for name in expected} == expected
    text = compare_text({**compare.compare(*sides), "busy_share": [None, None]}, "old.py")
    assert ("old.py:5 → new.py:6" in text) is (file == "new.py")


def facts_of_wall(us, *, spread=0.01, rounds=12, device="cpu 1"):
    return {
        "step_us": us,
        "split": {},
        "memory": None,
        "busy_share": None,
        "device": "cpu",
        "device_name": device,
        **{table: [] for table in compare.TABLES},
        "wall": {
            "us": us,
            "low_us": us * (1 - spread),
            "high_us": us * (1 + spread),
            "rounds_us": [us] * rounds,
            "machine": {"clock_mhz": 3000.0, "load": 0.5, "cores": 2},
        },
    }


def test_compare_says_that_two_targets_are_not_called_alike(tmp_path):
    facts = []
    for name, size in (("before", 5), ("after", 6)):
        file = tmp_path / f"{name}.py"
        file.write_text(
            "import torch\n\n\ndef f(x, pair):\n    return x\n\n\n"
            f"def get_inputs():\n    return [torch.ones(4, {size}), [torch.tensor(2), 3.0]]\n"
        )
        held = _tensors_of(targets.load(str(file)))
        facts.append({**facts_of_wall(9), "arguments": held})
    assert facts[0]["arguments"] == ["4x5 float32", "0-d int64"]
    different, same = (compare.compare(facts[0], other) for other in (facts[1], facts[0]))
    said = " ".join(compare_text({**different, "busy_share": [None, None]}, "before.py").split())
    assert (
        "not the same call: before with 4x5 float32, 0-d int64; after with 4x6 float32, 0-d int64"
        in said
    )
    assert "same call" not in compare_text({**same, "busy_share": [None, None]}, "before.py")
    older = {key: value for key, value in facts[0].items() if key != "arguments"}
    assert "same call" not in compare_text(compare.compare(older, facts[1]), "before.json")


@pytest.mark.parametrize(
    ("before", "after", "outcome"),
    [
        ({}, {"us": 50}, "FASTER"),
        ({}, {"us": 200}, "SLOWER"),
        ({}, {"us": 101}, "SAME"),
        ({}, {"us": 96}, "UNCLEAR"),
        ({"spread": 0.5}, {"us": 80}, "UNCLEAR"),
        ({"rounds": 9}, {"us": 50}, "UNCLEAR"),
    ],
)
def test_two_runs_are_told_apart_only_beyond_their_intervals(before, after, outcome):
    found = compare.compare(facts_of_wall(100, **before), facts_of_wall(**after))["verdict"]
    assert found["outcome"] == outcome
    assert found["speedup"] == pytest.approx(100 / after["us"])
    assert found["low"] <= found["speedup"] <= found["high"]


def test_runs_in_turn_are_judged_round_by_round():
    before, after = facts_of_wall(100), facts_of_wall(100)
    before["wall"]["rounds_us"] = [100.0 + 40 * n for n in range(12)]
    after["wall"]["rounds_us"] = [us / 1.1 for us in before["wall"]["rounds_us"]]
    found = compare.compare(before, after, interleaved=True)["verdict"]
    assert (found["outcome"], found["rounds"]) == ("FASTER", 12)
    assert found["speedup"] == pytest.approx(1.1)


def test_other_devices_and_runs_without_rounds_have_no_verdict():
    assert compare.compare(facts_of_wall(9), facts_of_wall(9, device="b"))["verdict"] is None
    older = {**facts_of_wall(9), "wall": None}
    found = compare.compare(older, facts_of_wall(9))
    assert found["verdict"] is None
    text = compare_text(found | {"split": {}}, "b.json")
    assert "no verdict: only one average of a side is known" in text.replace("\n ", " ")


def test_one_range_only():
    target = targets.load(str(TARGETS / "linear_relu.py"))
    found = profile_target(target, backward=True, schedule=(0, 1, 2, 1), within="backward")
    assert {r.name for r in found.tables.ranges} == {"backward"}
    names = {r.name for r in found.tables.operators}
    assert "aten::mm" in names and "aten::addmm" not in names
    assert found.describe()["within"] == "backward"
    lines = {r.name for r in found.tables.memory.lines}
    assert lines and all(name.endswith(" backward") or name == NO_LINE for name in lines)
    with pytest.raises(ArgumentError, match="the step has: backward, copy data, forward, loss"):
        profile_target(target, backward=True, schedule=(0, 1, 1, 1), within="none")


def test_compare_refuses_what_is_no_profile(tmp_path):
    for text in ("{", "[]", '{"verb": "bench", "schema": 1}'):
        (tmp_path / "x.json").write_text(text)
        with pytest.raises(ArgumentError):
            read_result(tmp_path / "x.json", "profile")
    with pytest.raises(ArgumentError, match="cannot read"):
        read_result(tmp_path / "missing.json", "profile")


def test_claim_gives_every_instant_to_the_first_class_that_covers_it():
    first, second, third = [(0, 4), (3, 6)], [(5, 10)], [(-5, 100)]
    assert claim([first, second, third], 0, 20) == [6, 4, 10]
    assert claim([[], [(25, 30)], []], 0, 20) == [0, 0, 0]
    assert union([(5, 6), (0, 2), (2, 3), (5, 5)]) == [(0, 3), (5, 6)]


def test_the_screen_says_that_other_work_slows_the_step_down(trained):
    facts = trained.describe()
    machine = {"clock_mhz": 2100, "load": 2.9, "cores": 2, "waited_share": 0.02}
    wall = {"us": 10.0, "low_us": 9.0, "high_us": 11.0, "rounds_us": [10.0] * 10}
    quiet = {**facts, "waited_share": 0.1, "wall": {**wall, "machine": machine}}
    rounds = {**quiet, "wall": {**wall, "machine": {**machine, "waited_share": 0.481}}}
    assert "the machine is busy" not in profile_text(quiet)
    assert "the machine is busy: for 48.1 % of the time" in profile_text(rounds)
    steps = {**facts, "waited_share": 0.513}  # a script has no rounds
    assert "the machine is busy: for 51.3 % of the time" in profile_text(steps)
    assert max(map(len, profile_text(steps).splitlines())) <= 80


PRINTS = """
import torch

def scaled(input):
    print("biggest", input.max())
    return input * 2

def get_inputs():
    return [torch.ones(4)]
"""


def test_what_a_target_prints_is_shown_once(tmp_path, capsys, monkeypatch):
    (tmp_path / "prints.py").write_text(PRINTS)
    target = targets.load(str(tmp_path / "prints.py"))
    profile_target(target, schedule=(1, 1, 3, 2))
    assert capsys.readouterr().out == "biggest tensor(1.)\n"
    wall_times({"now": target}, backward=False, budget_s=0.0)
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(explain_runner, "_explained", lambda target, *_: target.run())
    asked = Request(target.spec, "cpu", None, False, False, "default")
    explain_runner.explain(asked, lambda words: None)
    assert capsys.readouterr().out == "biggest tensor(1.)\n"


LOGS = """
import logging
import torch

log = logging.getLogger("my_model")
log.setLevel(logging.INFO)

def scaled(input):
    log.warning("biggest %s", input.max())
    return input * 2

def get_inputs():
    return [torch.ones(4)]
"""


@pytest.mark.parametrize("own_handler", [False, True])
def test_what_a_target_logs_on_the_screen_is_shown_once(own_handler, tmp_path, capsys, monkeypatch):
    (tmp_path / "logs.py").write_text(LOGS)
    logger = logging.getLogger("my_model")
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # pytest's own
    kept = logging.StreamHandler(io.StringIO())
    handlers = [logging.StreamHandler(), kept] if own_handler else []
    monkeypatch.setattr(logger, "handlers", handlers)
    target = targets.load(str(tmp_path / "logs.py"))
    profile_target(target, schedule=(1, 1, 3, 2))
    assert capsys.readouterr().err == "biggest tensor(1.)\n"
    with muted():
        logger.warning("unheard")
        logging.getLogger("fuselab.asked").warning("heard")
    assert capsys.readouterr().err == "heard\n"
    if own_handler:  # what does not go to the screen hears every step
        assert kept.stream.getvalue().count("biggest") == 10  # two repeats of 5 steps
    logger.warning("heard again")
    assert capsys.readouterr().err == "heard again\n"


def test_a_profile_knows_how_long_its_process_waited_for_a_core(monkeypatch):
    accounts = iter([(100, 0), (400, 100), (400, 100), (500, 200)])  # ran and waited, in ns
    monkeypatch.setattr(machine_state, "_scheduled_ns", lambda: next(accounts))
    with profile(schedule=(0, 1, 1, 2)) as recorder:
        for _ in range(4):
            torch.ones(3)
            recorder.step()
    assert recorder.result.describe()["waited_share"] == 0.375  # of 0.25 and 0.5
