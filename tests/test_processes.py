from __future__ import annotations

import multiprocessing as mp
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fulgurite.errors import UserError
from fulgurite.processes import Poll, of_each_process, of_first
from tests.jobs import run_job


def test_one_process_is_alone() -> None:
    assert of_each_process({"a": 1}) == [{"a": 1}]


def test_a_group_of_one(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        assert of_each_process([3]) == [[3]]
    finally:
        dist.destroy_process_group()


def test_poll_of_one_process_answers_at_once(tmp_path: Path) -> None:
    poll = Poll()
    assert [poll.ask(answer) for answer in (0, 30, 0)] == [0, 30, 0]


def ask(rank: int, folder: Path, answers: Any) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    poll = Poll()
    wishes = [[0, 0, 7, 7, 0], [0, 3, 3, 0, 0]][rank]
    answers.put((rank, [poll.ask(wish) for wish in wishes]))
    dist.barrier()
    dist.destroy_process_group()


def test_poll_of_two_processes_answers_both_alike_in_the_next_call(tmp_path: Path) -> None:
    context = mp.get_context("spawn")
    answers = context.Queue()
    processes = [context.Process(target=ask, args=(rank, tmp_path, answers)) for rank in range(2)]
    for process in processes:
        process.start()
    found = dict(answers.get(timeout=60) for _ in processes)
    for process in processes:
        process.join()
    assert found == {0: [0, 0, 3, 7, 7], 1: [0, 0, 3, 7, 7]}


def of_the_first() -> int:
    return of_first(lambda: 7 + int(os.environ["LOCAL_RANK"]))


def refuse_on_the_first() -> None:
    def refuse() -> None:
        raise UserError("no such file")

    of_first(refuse)


def in_a_group(work: Callable[[], Any]) -> Any:
    dist.init_process_group("gloo", rank=int(os.environ["LOCAL_RANK"]), world_size=2)
    return work()


def test_what_the_first_gets_or_is_refused_is_for_all(tmp_path: Path) -> None:
    assert run_job(2, partial(in_a_group, of_the_first), tmp_path) == [7, 7]
    errors = run_job(2, partial(in_a_group, refuse_on_the_first), tmp_path)
    assert [(type(error), str(error)) for error in errors] == [(UserError, "no such file")] * 2


def test_of_first_needs_no_job() -> None:
    assert of_first(lambda: 7) == 7
