"""The Python that the pages show runs as it stands there, in one process of its own."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

_STATE = """
import jax, jax.numpy as jnp, numpy as np
state, steps = {"params": jnp.zeros(8)}, 7
"""
_LOOP = """
class Loader:
    n = calls = 0
    def __next__(self): self.n += 1; self.calls += 1; return jnp.float32(self.n)
    def state(self): return self.n
    def restore(self, n): self.n = n
loader = Loader()
init_state = jax.jit(lambda: {"params": jnp.zeros(8)})
train_step = jax.jit(lambda state, batch: ({"params": state["params"] + batch}, batch))
"""
_STEP = """
train = train_step = lambda state: {"params": state["params"] + 1}
"""


def block(page: str, containing: str) -> str:
    blocks: list[str] = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(encoding="utf-8"), re.S | re.M)
    return next(text for text in blocks if containing in text)


def run(code: str, folder: Path, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env={"JAX_PLATFORMS": "cpu", "PYTHONPATH": ":".join(sys.path), **environment},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_five_lines_train_save_and_continue(tmp_path: Path) -> None:
    code = f"{_STATE}{_LOOP}{block('README.md', 'session.step(')}\nprint(step, float(state['params'][0]), loader.calls)"
    every = {"GRACEPOINT_SAVE_EVERY_STEPS": "5"}
    assert run(code, tmp_path, **every) == "7 28.0 7\n"
    # From step 5 on, with the loader where it was then.
    assert run(code, tmp_path, **every) == "7 28.0 2\n"


@pytest.mark.parametrize("page", ["docs/training-loop.md", "examples/transformer/README.md"])
def test_the_five_lines_are_the_same_on_all_pages(page: str) -> None:
    first, other = (ast.dump(ast.parse(block(each, "session.step("))) for each in ("README.md", page))
    assert other == first


def test_saving_and_restoring_as_the_page_shows_it(tmp_path: Path) -> None:
    shown = block("docs/checkpoint.md", "AsyncCheckpointer") + block("docs/checkpoint.md", "RestoreOptions")
    code = f"{_STATE}{_STEP}{shown}\nprint(step, sorted(state), type(arrays['params']).__name__)"
    assert run(code.replace('"/data/', f'"{tmp_path}/'), tmp_path) == "7 ['ema', 'params'] ndarray\n"
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} >= {"init", "small", "epoch-1", "epoch-2"}


def test_data_of_an_elastic_job_continues_at_the_next_record(tmp_path: Path) -> None:
    code = f"""{block("docs/elastic.md", "open_at")}
before = loader(4)
used = [int(record) for _ in range(3) for record in next(before)]
after = loader(6)
after.set_state(before.get_state())
used += [int(record) for record in next(after)]
print(len(set(used)), after.changed)
"""
    assert run(code, tmp_path) == "18 global batch: 4 -> 6, batch of a process: 4 -> 6\n"
