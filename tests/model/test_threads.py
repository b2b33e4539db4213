"""The number of threads does not change a bit of the logits."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from noise_model import noise_checkpoint

PROGRAM = """
import hashlib
from forebay.engine.llm import LLM
import torch
torch.set_num_threads({threads})
logits = LLM({model!r}, encoder_tokens={chunk}).score([(i * i * 31 + 7 * i) % 3900 + 64 for i in range(120)])
print(hashlib.sha256(logits.numpy().tobytes()).hexdigest())
"""


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="other BLAS libraries make no such promise")
def test_logits_do_not_depend_on_the_number_of_threads() -> None:
    environment = {k: v for k, v in os.environ.items() if k not in ("MKL_CBWR", "OMP_NUM_THREADS")}
    digests = set()
    for threads, chunk in ((1, 512), (2, 512), (2, 7)):
        program = PROGRAM.format(model=str(noise_checkpoint()), threads=threads, chunk=chunk)
        done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
        digests.add(done.stdout.strip())
    assert len(digests) == 1
