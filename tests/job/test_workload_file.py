"""Files with several jobs: which ones they are, how they are read, and TOML with a table for each job."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchloom.errors import BadInput
from torchloom.job.workload import BadWorkload, Workload
from torchloom.job.workload_file import is_workload, read_workload
from torchloom.job.workload_plan import PlanOptions

FIXTURE = Path(__file__).parent.parent / "fixtures" / "workload.csv"


def read(folder: Path, text: str, **options: object) -> Workload:
    path = folder / "mine.toml"
    path.write_text(text)
    assert is_workload(path)
    return read_workload(path, PlanOptions(str(folder), **options))  # type: ignore[arg-type]


def test_a_file_with_one_job_is_no_workload(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('job = "a"\nscript = "a.py"')
    (tmp_path / "b.toml").write_text("[[job")
    assert not is_workload(tmp_path / "a.toml")
    assert not is_workload(tmp_path / "b.toml")
    assert not is_workload(tmp_path / "missing.toml")
    assert is_workload(tmp_path / "missing.csv")


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="cannot be read: No such file"):
        read_workload(tmp_path / "missing.csv", PlanOptions(""))
    (tmp_path / "a.csv").write_bytes(b"\xff\xfe")
    with pytest.raises(BadInput, match="is not UTF-8 text"):
        read_workload(tmp_path / "a.csv", PlanOptions(""))


def test_a_refusal_of_rows_says_how_many_problems_there_are(tmp_path: Path) -> None:
    (tmp_path / "w.csv").write_text(FIXTURE.read_text().replace(", 500,", ", 0,"))
    with pytest.raises(BadWorkload, match=r"w\.csv has 3 problems, and nothing of it is submitted"):
        read_workload(tmp_path / "w.csv", PlanOptions(""))


def test_tables_say_what_a_job_file_says_and_when_a_job_arrives(tmp_path: Path) -> None:
    workload = read(
        tmp_path,
        """
        [[job]]
        job = "late"
        script = "a.py"
        arrival_time = 60
        weight = 2.0
        checkpoint_dir = "runs/a"

        [[job]]
        script = "b.py"
        args = ["--x"]
        devices = [[0, 1], [0, 1]]
        master = "n1"
        port = 5000

        [[job]]
        script = "c.py"
        devices = '["0" "0"]'
        after = "late"
        """,
        time_scale=10,
    )
    assert [(job.job, job.row, job.arrival) for job in workload.jobs] == [
        ("mine-2", 2, 0.0), ("mine-3", 3, 0.0), ("late", 1, 6.0),
    ]  # fmt: skip
    second, third, late = (job.task for job in workload.jobs)
    assert (late.weight, late.delay, late.share, late.groups) == (2.0, 6.0, False, ())
    assert (second.argv, second.port, second.share) == (("b.py", "--x"), 5000, True)
    assert [(group.node, group.devices) for group in second.groups] == [("n1", (0, 1)), (None, (0, 1))]
    assert (third.after, len(third.groups)) == ("late", 2)


def test_a_prefix_is_for_names_and_for_what_waits_for_them(tmp_path: Path) -> None:
    text = '[[job]]\njob = "a"\nscript = "a.py"\n[[job]]\nscript = "b.py"\nafter = "a"'
    first, second = read(tmp_path, text, prefix="x").jobs
    assert (first.job, second.job, second.task.after) == ("x-a", "x-mine-2", "x-a")


def test_a_name_that_stands_there_twice_is_made_unique_with_a_warning(tmp_path: Path) -> None:
    workload = read(tmp_path, "".join(f'[[job]]\njob = "{name}"\nscript = "a.py"\n' for name in ("a", "a-2", "a")))
    assert [job.job for job in workload.jobs] == ["a", "a-2", "a-3"]
    assert [(warning.row, warning.column) for warning in workload.warnings] == [(3, "job")]
    assert "this one is called a-3" in workload.warnings[0].text


@pytest.mark.parametrize(
    ("line", "column", "said"),
    [
        ("arrival_time = -1", "", "Expected `float` >= 0.0 - at `arrival_time`"),
        ("arrival_time = inf", "", "Expected `float` <= 100000000.0 - at `arrival_time`"),
        ("port = 70000", "", "Expected `int` <= 65535 - at `port`"),
        ('devices = "x"', "", "'x' is not a device"),
        ("devices = [[0], 1]", "", "mixed"),
        ("devices = 0.5", "", "something else than devices"),
        ("devices = [0]\nnnodes = 2", "", "devices say how many ranks"),
        ("devices = [0]\n[job.torchft]", "", "devices say how many ranks"),
        ('master = "n1"', "", "master without devices"),
        ('devices = {n2 = [0]}\nmaster = "n1"', "", "master n1 is not among the nodes"),
        ('after = "b"', "after", "there is no job b before it in the file"),
        ('after = "!"', "", "after = '!' is not the name of a job"),
        ("arival_time = 1", "", "the job: there is no setting 'arival_time'"),
        ('checkpoint_dir = "runs/first"', "checkpoint_dir", "runs/first is also the folder of job 1"),
    ],
)
def test_a_bad_table_is_named_by_its_number(tmp_path: Path, line: str, column: str, said: str) -> None:
    first = '[[job]]\njob = "a"\nscript = "a.py"\ncheckpoint_dir = "runs/first"\n'
    with pytest.raises(BadWorkload) as refused:
        read(tmp_path, f'{first}[[job]]\nscript = "b.py"\n{line}\n')
    assert [(problem.row, problem.column) for problem in refused.value.problems] == [(2, column)]
    assert said in refused.value.problems[0].text


def test_two_tables_on_one_port_that_can_overlap_are_refused(tmp_path: Path) -> None:
    table = '[[job]]\nscript = "a.py"\nport = 5000\n'
    with pytest.raises(BadWorkload) as refused:
        read(tmp_path, table * 2)
    assert refused.value.problems[0].column == "port"
    assert len(read(tmp_path, f'{table}job = "a"\n{table}after = "a"').jobs) == 2


def test_an_empty_list_of_jobs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="has no jobs"):
        read(tmp_path, "job = []")


def test_options_for_rows_are_refused_for_tables(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="says itself what its jobs run"):
        read(tmp_path, '[[job]]\nscript = "a.py"', arguments=("--x",))
