"""The one place where anything is compiled: a process of its own, `python -m headrace.runner.compile_worker FOLDER`, at low priority.

It gets a `Job` (pickled, from its own parent, over the pipe that is its stdin), then the number of a bucket on each line, and answers each with
one line of JSON: the package's file, or the error. It holds shapes instead of weights. When its stdin ends it ends, compilers, temporary files and
all, whatever has become of the parent.

The step is exported to one graph, and AOTInductor makes a library of it that calls the kernels one after the other without Python between
them. Weights stay out of the package; who loads it lends them.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import struct
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from headrace.kernels import cpu
from headrace.runner.buckets import Bucket
from headrace.runner.step_module import StepModule, StepShape, example_inputs, materialize

# What changes the code that comes out. Vector instructions are taken from the processor's flags instead of by compiling probes.
FLAGS: dict[str, Any] = {
    "aot_inductor.compile_wrapper_opt_level": "O0",  # it calls operators and computes nothing
    "aot_inductor.enable_line_tables": False,
    "aot_inductor.package_constants_in_so": False,
    "aot_inductor.precompile_headers": False,
    "cpp.vec_isa_ok": True,
    "freezing": False,
    "max_autotune": False,
}
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    module: StepModule  # a skeleton
    shape: StepShape
    buckets: tuple[Bucket, ...]
    kernels: cpu.CpuKernels
    nice: int  # how far the process gives way to others, 0 to 19


def keep_torchs_own(operators: Iterable[torch._ops.OpOverload]) -> None:
    """From now on compiled code calls these instead of writing them anew, so that their results are the eager ones to the last bit.

    Changes the compiler of this process.
    """
    from torch._inductor import decomposition, lowering

    for operator in operators:
        decomposition.decompositions.pop(operator, None)
        lowering.lowerings.pop(operator, None)
        lowering.make_fallback(operator, warn=False)


def compile_package(module: StepModule, shape: StepShape, bucket: Bucket, target: Path) -> Path:
    """Writes the AOTInductor package of one bucket. Raises whatever export and the compilers raise."""
    from torch._inductor import aoti_compile_and_package

    keep_torchs_own((torch.ops.aten.gelu.default, torch.ops.aten.silu.default))  # functions that two compilers round differently
    inputs = example_inputs(module, bucket, shape)
    blocks = torch.export.Dim("blocks", min=2)
    *step, caches = inputs
    open_sizes = (*(None for _ in step), [({0: blocks}, {0: blocks}) for _ in caches])
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own deprecations
        program = torch.export.export(module, inputs, dynamic_shapes=open_sizes, strict=False)
        return Path(aoti_compile_and_package(program, package_path=str(target), inductor_configs=_known_flags()))


def _known_flags() -> dict[str, Any]:
    """Those of FLAGS that this version of torch has."""
    from torch._inductor import config

    known = config.to_dict()

    return {name: value for name, value in FLAGS.items() if name in known}


def send_job(stream: BinaryIO, job: Job) -> None:
    data = pickle.dumps(job)
    stream.write(_LENGTH.pack(len(data)) + data)
    stream.flush()


def _receive_job(stream: BinaryIO) -> Job | None:
    """None where the parent has gone before it was whole."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    data = stream.read(length)
    return pickle.loads(data) if len(data) == length else None


def _run(job: Job, folder: str, numbers: Iterable[int], answers: BinaryIO) -> None:
    module = materialize(job.module)
    for number in numbers:
        bucket = job.buckets[number]
        begin = time.monotonic()
        answer: dict[str, Any] = {"bucket": number}
        try:
            answer["file"] = str(compile_package(module, job.shape, bucket, Path(folder) / f"{bucket.name}.pt2"))
        except Exception as error:  # of the compiler, the exporter, the disk: the service lives without
            answer["error"] = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"[:500]
        answer["seconds"] = time.monotonic() - begin
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()


def main(folder: str) -> None:
    """`folder`: where packages and all temporary files are written."""
    orders = sys.stdin.buffer
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what compilers print is no answer
    job = _receive_job(orders)
    if job is None:
        return end_with(folder)
    os.nice(job.nice)
    torch.set_num_threads(1)
    cpu.use_libraries(job.kernels)
    waiting: list[int] = []
    arrived = threading.Condition()
    threading.Thread(target=_read, args=(orders, waiting, arrived, folder), daemon=True).start()

    def numbers() -> Iterable[int]:
        while True:
            with arrived:
                arrived.wait_for(lambda: waiting)
                number = waiting.pop(0)
            yield number

    return _run(job, folder, numbers(), answers)


def _read(orders: BinaryIO, waiting: list[int], arrived: threading.Condition, folder: str) -> None:
    """Takes orders while a compiler runs, and ends everything when the parent is gone."""
    for line in orders:
        with arrived:
            waiting.append(int(line))
            arrived.notify()
    end_with(folder)


def end_with(folder: str) -> None:
    """Ends this process and its compilers, which have a group of their own, and removes the folder that all of them write to.

    A shell outside of the group does it: nobody in the group may write any more when the folder goes.
    """
    script = 'kill -KILL "-$1"; for try in 1 2 3 4 5 6 7 8 9; do rm -rf -- "$2" && break; sleep 0.1; done'
    try:
        subprocess.Popen(["sh", "-c", script, "sh", str(os.getpgid(0)), folder], start_new_session=True, stderr=subprocess.DEVNULL).wait()
    finally:
        os.killpg(os.getpgid(0), signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1])
