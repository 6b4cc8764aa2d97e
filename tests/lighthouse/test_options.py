"""The options of a lighthouse that torchLoom starts for a job."""

from __future__ import annotations

import argparse
from pathlib import Path

from torchloom.core.torchft.replica_groups import ADDRESS, FOLDER, split_job
from torchloom.lighthouse.options import add_options, read_options
from torchloom.protocol.job_spec import Task, Torchft


def test_the_words_of_a_lighthouse_are_those_that_it_understands() -> None:
    argv = dict(split_job("mnist", Task(argv=("a.py",), torchft=Torchft(replicas=2, min_replicas=2))))[
        "mnist:lighthouse"
    ].argv
    known = {ADDRESS: "n1:5000", FOLDER: "/kept"}
    parser = argparse.ArgumentParser()
    add_options(parser)
    options = read_options(parser.parse_args([known.get(word, word) for word in argv[2:]]))
    assert (options.job, options.bind, options.min_replicas, options.folder) == ("mnist", "n1:5000", 2, Path("/kept"))
    assert (options.heartbeat_timeout_ms, options.join_timeout_ms) == (5_000, 10_000)
