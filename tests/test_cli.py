"""The command line answers first, keeps stdout clean, and turns a user's mistake into one line."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from ssd.asked import Asked
from ssd.cli import run
from ssd.options import Axes, plans_to_run
from ssd.specs import Plan, Prediction, Profile, Texts
from tests import handmade
from tests.plans import heed_interrupts

TYPED = ["--mode", "ssd", "--num-speculative-tokens", "3", "--fan-out", "1,1,1,2"]


@pytest.fixture(scope="module")
def pair(tiny_pair):
    return tiny_pair


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    path = tmp_path_factory.mktemp("machine") / "machine.json"
    handmade.HERE.save(path)
    return str(path)


@pytest.fixture(scope="module")
def common(pair, machine):
    return ["--target", pair[0], "--draft", pair[1], "--hardware", machine]


@pytest.fixture(scope="module")
def saved(pair, tmp_path_factory):
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    handmade.plan(pair, handmade.SSD, (handmade.AR, handmade.sd())).save(path)
    return str(path)


def cli(*words: str, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "ssd.cli", *words], capture_output=True, text=True, timeout=120, **options)


def error(capsys, *words: str) -> str:
    """Run, expect the exit code of a user's mistake and one line on stderr; return the line."""
    assert run(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    return err


def test_help_comes_without_torch_and_at_once():
    program = "import sys, ssd.cli; ssd.cli.run(['--help']); print(sorted({'torch', 'transformers', 'pydantic'} & set(sys.modules)))"
    spent = []
    # Half a second is the aim; a loaded machine may take longer, and now and then much longer.
    while not spent or (min(spent) > 3 and len(spent) < 5):
        begin = time.monotonic()
        answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
        spent.append(time.monotonic() - begin)
    assert answer.stdout.endswith("[]\n")
    assert min(spent) < 3
    for command in ("plan", "profile", "bench", "generate", "distill", "train-pair"):
        assert command in answer.stdout


def test_version(capsys):
    assert run(["--version"]) == 0
    assert re.match(r"ssd \S+", capsys.readouterr().out)


def test_generate_gives_the_text_on_stdout_and_one_line_of_metrics_on_stderr(common):
    answer = cli("generate", "hello", *common, *TYPED, "--output-tokens", "12")
    assert answer.returncode == 0
    assert "Loading weights" not in answer.stdout + answer.stderr
    line = answer.stderr.splitlines()[-1]
    assert re.search(
        r"^ssd; [\d.]+ tokens/s; speed against AR: see ssd bench; hit rate \d+%, acceptance \d+%, mean acceptance length [\d.]+; draft ok$",
        line,
    )
    plain = cli("generate", "hello", *common, "--mode", "sd", "--k", "2", "--output-tokens", "12")
    assert plain.stdout == answer.stdout
    assert "hit rate" not in plain.stderr


@pytest.mark.slow
def test_generate_takes_sampling_options_and_a_seed_repeats_the_text(saved, capsys):
    options = ["--temperature", "0.9", "--top-k", "20", "--top-p", "0.9", "--min-p", "0.01", "--repetition-penalty", "1.1", "--seed", "3"]
    texts = []
    for extra in ([], [], ["--seed", "4"], ["--temperature", "0"]):
        assert run(["generate", "hello", "--plan", saved, "--output-tokens", "12", *options, *extra]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert len(set(texts)) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--temperature", "-1"], "temperature=-1.0: input should be greater than or equal to 0"),
        (["--top-p", "0"], "top_p=0.0: input should be greater than 0"),
        (["--seed", "-3"], "seed=-3: input should be greater than or equal to 0"),
        (["--output-tokens", "0"], "max_tokens=0: input should be greater than or equal to 1"),
        (["--stop", ""], "stop=('',) holds an empty one: leave it out"),
    ],
)
def test_a_mistaken_sampling_option_is_named(saved, capsys, options, message):
    assert run(["generate", "hello", "--plan", saved, *options]) == 2
    assert message in capsys.readouterr().err


def test_generate_as_json_prints_json_only(saved, capsys):
    assert run(["generate", "hello", "--plan", saved, "--output-tokens", "5", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert len(answer["output"]["token_ids"]) <= 5
    assert answer["plan"]["mode"] == "ssd"
    assert answer["draft"] == "ok"


def test_a_plan_typed_by_hand_can_be_saved_and_used_again(common, tmp_path, capsys):
    path = tmp_path / "plan.json"
    assert run(["generate", "a", *common, *TYPED, "--output-tokens", "2", "--save", str(path)]) == 0
    plan = Plan.load(path)
    assert (plan.num_speculative_tokens, plan.fan_out_hit, plan.fan_out_miss) == (3, (1, 1, 1, 2), (1, 1, 1, 2))
    assert (plan.placement.target, plan.placement.draft) == (handmade.ALONE, handmade.BOTH[1:])
    assert run(["generate", "a", "--plan", str(path)]) == 0


def test_bench_prints_the_answer_then_the_table_with_speed_against_ar_first(saved, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("ssd.prompts.prompts", lambda kind, count, tokenizer: ["a", "hello"][:count])
    out = tmp_path / "bench.json"
    assert run(["bench", "--plan", saved, "--num-prompts", "2", "--output-tokens", "6", "--warmup", "0", "--out", str(out)]) == 0
    text = capsys.readouterr().out
    assert text.index("vs AR") < text.index("tokens/s  ") < text.index("Serving Benchmark Result")
    assert re.search(r"One prompt at a time, greedy. (Speculation is slower than AR here|The )", text)
    found = json.loads(out.read_text())["set_up"]
    assert found["prompts"] == ["a", "hello"]
    assert found["command"].startswith("ssd bench --plan ")
    assert run(["bench", "--compare", str(out), str(out)]) == 0
    text = capsys.readouterr().out
    assert "1.00x" in text
    assert "What else differs:\n  nothing" in text
    assert "--compare: measures nothing" in error(capsys, "bench", "--compare", str(out), str(out), "--batch-size", "2")


def test_bench_runs_over_lists_on_one_engine_and_as_json_prints_json_only(common, capsys, monkeypatch):
    monkeypatch.setattr("ssd.prompts.prompts", lambda kind, count, tokenizer: ["abc", "hello"])
    words = ["--mode", "ssd", "-K", "1,2", "--budget", "2,3", "--batch-size", "1,2", "--prompt-tokens", "4", "--temperature", "0,1"]
    assert run(["bench", *common, *words, "--output-tokens", "4", "--warmup", "0", "--json"]) == 0
    cells = json.loads(capsys.readouterr().out)["cells"]
    points = [(cell["setting"]["batch_size"], cell["setting"]["prompt_tokens"], cell["setting"]["temperature"]) for cell in cells]
    assert points == [(1, 4, 0), (2, 4, 0), (1, 4, 1), (2, 4, 1)]
    for cell in cells:
        ran = [row["configuration"] for row in cell["rows"]]
        budgets = [(one["num_speculative_tokens"], one["budget"]) for one in ran if one["mode"] == "ssd"]
        assert budgets == [(1, 2), (1, 3), (2, 2), (2, 3)]
        assert {one["num_speculative_tokens"] for one in ran if one["mode"] == "sd"} == {1, 2}
        assert all(
            row["speedup_vs_ar"] and row["speedup_vs_sd_equal_devices"] for row in cell["rows"] if row["configuration"]["mode"] == "ssd"
        )


def test_bench_takes_a_saved_plan_to_other_batches_without_its_predictions(saved, tmp_path):
    told = Prediction(
        tokens_per_second=1.0,
        speedup_vs_ar=1.0,
        speedup_vs_ar_equal_devices=1.0,
        mean_acceptance_length=1.0,
        verify_seconds=0.1,
        method="theory",
    )
    plan = Plan.load(saved)
    others = tuple(one.model_copy(update={"predicted": told}) for one in plan.alternatives)
    plan.model_copy(update={"predicted": told, "alternatives": others}).save(tmp_path / "plan.json")
    plans = plans_to_run(Asked(plan=tmp_path / "plan.json"), Axes.typed("1,2", None, None, None, "0"))
    assert [one.workload.batch_size for one in plans] == [1, 2]
    assert [[way.predicted for way in (one, *one.alternatives)] for one in plans] == [[told] * 3, [None] * 3]


def test_bench_measures_this_machine_once_for_the_heaviest_point(common, saved, monkeypatch):
    asked = []
    plan = Plan.load(saved)
    profile = Profile(
        hardware="two cores",
        models=plan.models,
        texts=(Texts(prompt_set="code", draft_acceptance_rate=0.8, acceptance_source="measured"),),
        forwards=(),
        prefill_seconds_per_token=0.1,
        link_seconds=0.0,
        overhead_seconds=0.0,
    )
    monkeypatch.setattr("ssd.profiler.profile", lambda machine, pair, load, **_: asked.append(load.batch_size) or profile)

    def planned(machine, pair, workload, profile, **_):
        return plan.model_copy(update={"workload": workload, "profile": profile})

    monkeypatch.setattr("ssd.planner.plan", planned)
    target, draft, machine = common[1], common[3], common[5]
    plans = plans_to_run(Asked(target=target, draft=[draft], hardware=machine), Axes.typed("1,8,2", None, None, None, "0"))
    assert asked == [8]
    assert [(one.workload.batch_size, one.profile) for one in plans] == [(1, profile), (8, profile), (2, profile)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--batch-size", "1,x"], "--batch-size='1,x': write numbers of 0 or more with commas, each once, such as 1,2,4"),
        (["--batch-size", "2,2"], "--batch-size='2,2': write numbers"),
        (["--batch-size", "0"], "batch_size=0: input should be greater than or equal to 1"),
        (["--temperature", "0,inf"], "--temperature='0,inf': write numbers of 0 or more with commas, each once, such as 0,1"),
        (["-K", "2"], "--plan settles --num-speculative-tokens already"),
        (["--against", "vllm"], "against='vllm' is unknown: use transformers or llama.cpp"),
        (["--against", "llama.cpp"], "is no .gguf file, and llama.cpp reads nothing else"),
        (["--batch-size", "1,9"], "prompts has 8 for workload.batch_size=9"),
        (["--batch-size", "1,2", "--save", "x.json"], "--save: there are 2 plans, one for each point of the grid"),
    ],
)
def test_a_mistaken_option_of_bench_is_named(saved, capsys, options, message):
    assert message in error(capsys, "bench", "--plan", saved, *options)


def test_plan_prints_the_explanation_and_saves_json(saved, capsys, tmp_path):
    copy = tmp_path / "copy.json"
    assert run(["plan", "--plan", saved, "--save", str(copy)]) == 0
    assert capsys.readouterr().out == Plan.load(saved).explain() + "\n"
    assert Plan.load(copy) == Plan.load(saved)
    assert run(["plan", "--plan", saved, "--json"]) == 0
    assert Plan.model_validate_json(capsys.readouterr().out) == Plan.load(saved)


def test_plan_asks_the_planner_with_what_was_typed(common, monkeypatch, capsys, saved):
    asked = {}
    monkeypatch.setattr("ssd.planner.plan", lambda *pair, **rest: asked.update(rest, pair=pair) or Plan.load(saved))
    monkeypatch.setattr("ssd.profiler.profile", lambda *_, **__: "measured")
    words = [
        "--mode",
        "sd",
        "--objective",
        "throughput",
        "--prompt-tokens",
        "7",
        "--output-tokens",
        "9",
        "--batch-size",
        "8",
        "--prompt-set",
        "chat",
        "--dtype",
        "float32",
    ]
    assert run(["plan", *common, *words, "--max-model-len", "50"]) == 0
    hardware, models = asked["pair"]
    assert hardware == handmade.HERE
    assert (models.dtype, models.max_model_len) == ("float32", 50)
    load = asked["workload"]
    assert (load.prompt_tokens, load.output_tokens, load.batch_size, load.prompt_set) == (7, 9, 8, "chat")
    assert (asked["mode"], asked["objective"], asked["profile"]) == ("sd", "throughput", "measured")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["plan", "--target", "embedded/nothing"], "is not in the package: it has embedded/target and embedded/draft"),
        (["plan", "--bogus"], "No such option: --bogus"),
        (["plan", "--target", "t", "--mode", "warp"], "--mode='warp' is unknown: use ar, sd or ssd"),
        (["plan", "--target", "t", "--objective", "fame"], "--objective='fame' is unknown: use latency, throughput or cost"),
        (["plan", "--target", "t", "--dtype", "int3"], "dtype='int3': input should be 'auto', 'float32' or 'bfloat16'"),
        (["plan", "--target", "t", "--prompt-tokens", "0"], "prompt_tokens=0: input should be greater than or equal to 1"),
        (["plan", "--target", "t", "--batch-size", "0"], "batch_size=0: input should be greater than or equal to 1"),
        (["plan", "--target", "t", "--batch-size", "257"], "batch_size=257: input should be less than or equal to 256"),
        (["plan", "--plan", "p.json", "--batch-size", "2"], "--plan settles --batch-size already: leave one or the other out"),
        (["plan", "--plan", "no.json"], "--plan: path='no.json' cannot be read (No such file or directory)"),
        (["generate"], "Missing argument"),
        (["generate", "x", "--target", "t", "--hardware", "5xH100-SXM"], "--hardware='5xH100-SXM' is another machine"),
        (["generate", "x", "--target", "t", "--k", "3"], "--mode=None with --num-speculative-tokens=3"),
        (
            ["generate", "x", "--target", "t", "--mode", "ssd", "--k", "1"],
            "--fan-out is missing: --mode ssd with --num-speculative-tokens=1 needs",
        ),
        (["generate", "x", "--target", "t", "--mode", "ssd", "--k", "1", "--fan-out", "1,b"], "--fan-out='1,b' is no list of counts"),
        (["generate", "x", "--target", "t", "--mode", "ssd", "--k", "1", "--fan-out", "1"], "fan_out_hit=(1,) has 1 entries"),
        (["generate", "x", "--target", "t", "--mode", "sd", "--k", "1", "--fan-out", "1,1"], "mode='sd' has no cache"),
        (["generate", "x", "--mode", "ssd", "--k", "1", "--budget", "4", "--fan-out", "1,1"], "budget=4 chooses the outcomes anew"),
        (["generate", "x", "--mode", "ssd", "--k", "1", "--budget", "4", "--building", "slow"], "building='slow'"),
        (["generate", "x", "--mode", "ssd", "--k", "1", "--budget", "4", "--backup", "oracle"], "backup='oracle'"),
        (["generate", "x", "--budget", "4"], "a configuration typed by hand needs --mode sd or ssd"),
        (["generate", "x", "--target", "t", "--mode", "sd", "--k", "1", "--objective", "cost"], "--objective guides the planner"),
        (["generate", "x", "--target", "t", "--mode", "sd", "--k", "1"], "models.draft is missing"),
        (["profile", "--temperature", "0,hot"], "--temperature='0,hot': write numbers of 0 or more with commas, each once, such as 0,1"),
        (["profile", "--prompt-set", "code,prose"], "prompt_set='prose': input should be 'code', 'chat' or 'library'"),
        (["profile", "--draft", "a", "--draft", "b"], "--draft is given 2 times: only the planner chooses among drafts"),
        (["validate", "--draft", "a", "--draft", "b"], "--draft is given 2 times: only the planner chooses among drafts"),
        (
            ["generate", "x", "--target", "/no/such/folder", "--draft", "d", "--mode", "sd", "--k", "1"],
            "target='/no/such/folder': no such folder",
        ),
    ],
)
def test_a_mistake_is_one_line_with_the_option_the_value_and_the_remedy(words, message, capsys, machine):
    if "--target" in words and "--hardware" not in words:
        words = [*words, "--hardware", machine]
    assert message in error(capsys, *words)


def test_a_saved_plan_leaves_no_room_for_options_that_it_settles(saved, capsys):
    assert "--plan settles --draft, --mode already" in error(capsys, "generate", "x", "--plan", saved, "--draft", "d", "--mode", "ar")
    assert "--output-tokens: --plan settles it" in error(capsys, "plan", "--plan", saved, "--output-tokens", "5")


def test_a_plan_for_another_machine_is_not_run_here(pair, tmp_path, capsys):
    plan = handmade.plan(pair)
    plan.model_copy(update={"hardware": plan.hardware.model_copy(update={"is_local": False, "name": "the moon"})}).save(
        tmp_path / "moon.json"
    )
    assert "hardware 'the moon', not for this machine" in error(capsys, "generate", "x", "--plan", str(tmp_path / "moon.json"))


def test_a_file_that_is_no_plan_is_named(tmp_path, capsys):
    path = tmp_path / "plan.json"
    path.write_text("{")
    assert "is not a Plan that was saved: Invalid JSON" in error(capsys, "plan", "--plan", str(path))
    path.write_text('{"mood": "ssd"}')
    line = error(capsys, "plan", "--plan", str(path))
    assert "Plan has no option 'mood': did you mean 'mode'?" in line
    assert "http" not in line
    assert "Value error" not in line


def test_a_result_that_cannot_be_written_is_a_mistake_too(saved, capsys):
    assert "cannot be written" in error(capsys, "plan", "--plan", saved, "--save", "/no/such/folder/plan.json")


def test_a_failure_that_is_not_the_users_is_one_line_and_exit_code_1(saved, capsys, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("the draft's process did not start: it rains")

    monkeypatch.setattr("ssd.engine.engine.Engine.from_plan", fail)
    assert run(["generate", "x", "--plan", saved]) == 1
    assert capsys.readouterr().err == "error: the draft's process did not start: it rains\n"


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="looks for processes in /proc")
def test_ctrl_c_is_quiet_and_leaves_no_process(saved, monkeypatch):
    program = "import sys, ssd.cli, ssd.engine.scheduler as s, time; r = s.Scheduler.step; " + (
        "s.Scheduler.step = lambda *a: (time.sleep(.3), r(*a))[1]; ssd.cli.main()"
    )
    words = [sys.executable, "-c", program, "generate", "hello", "--plan", saved, "--output-tokens", "80"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=heed_interrupts)
    assert process.stdout is not None
    process.stdout.read(1)
    children = descendants(process.pid)
    assert children
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert "error" not in err
    assert not [child for child in children if os.path.exists(f"/proc/{child}")]


def descendants(parent: int) -> list[int]:
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat") as stat:
                if int(stat.read().rsplit(")", 1)[1].split()[1]) == parent:
                    found.append(int(name))
        except OSError:
            continue
    return found


def test_profile_writes_what_planning_reads(common, tmp_path, monkeypatch, capsys):
    from ssd.specs import Models

    found = Profile(
        hardware="two cores",
        models=Models(target="t"),
        texts=(Texts(prompt_set="code", draft_acceptance_rate=0.8, acceptance_source="measured"),),
        forwards=(),
        prefill_seconds_per_token=0.1,
        link_seconds=0.0,
        overhead_seconds=0.0,
    )
    asked = {}
    monkeypatch.setattr("ssd.profiler.profile", lambda *_, **options: asked.update(options) or found)
    path = tmp_path / "profile.json"
    assert run(["profile", *common, "--save", str(path), "--temperature", "0,0.7", "--prompt-set", "chat,code"]) == 0
    assert (asked["temperatures"], asked["prompt_sets"]) == ((0, 0.7), ("chat", "code"))
    assert found.explain() in (told := capsys.readouterr().out)
    assert "code prompts at temperature 0: acceptance 80% (measured)" in told
    assert Profile.load(path) == found
    assert run(["profile", *common]) == 0
    assert Profile.model_validate_json(capsys.readouterr().out) == found
