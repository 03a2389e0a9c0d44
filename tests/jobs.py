"""Jobs of several processes without their start-up: forked from this one, which has imported everything."""

from __future__ import annotations

import multiprocessing as mp
import os
import socket
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def run_job(number: int, work: Callable[[], Any], folder: Path) -> list[Any]:
    """Call a function in so many processes, as torchrun would; return by rank what it gave, or the error that it ended with."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = mp.get_context("fork")
    processes = [context.Process(target=_run, args=(rank, number, port, work, folder)) for rank in range(number)]
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(timeout=120)
        alive = [rank for rank, process in enumerate(processes) if process.is_alive()]
    finally:
        for process in processes:
            process.kill()
    assert not alive, f"these processes hang: {alive}"
    return [torch.load(folder / f"result{rank}.pt", weights_only=False) for rank in range(number)]


def _run(rank: int, number: int, port: int, work: Callable[[], Any], folder: Path) -> None:
    names = {"LOCAL_RANK": rank, "NODE_RANK": 0, "WORLD_SIZE": number, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in names.items()}
    torch.set_num_threads(1)
    result: Any
    try:
        result = work()
    except Exception as error:
        traceback.print_exc()  # pytest shows it where the test fails
        result = error
    torch.save(result, folder / f"result{rank}.pt")
    if dist.is_initialized() and not isinstance(result, Exception):
        dist.destroy_process_group()
    os._exit(0)  # what this process inherited is not its to clean up
