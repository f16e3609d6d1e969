"""The README's examples run as they stand."""

import pathlib
import re

README = (pathlib.Path(__file__).parents[1] / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
LIBRARY, LINEN, NNX = BLOCKS


def loss_printed_by(code: str, capsys) -> float:
    exec(compile(code, "README.md", "exec"), {"__name__": "readme"})
    return float(re.search(r"loss ([\d.]+)", capsys.readouterr().out).group(1))


def with_model(model: str) -> str:
    """The library example with its model replaced by another block of the README."""
    imports, rest = LIBRARY.split("def init_fn", 1)
    data, train = rest.split("x = jax.random", 1)[1].split("mesh =", 1)
    assert "optimizer" not in data
    return f"{imports}x = jax.random{data}\n{model}\nmesh ={train}"


def test_the_library_example_learns(capsys):
    assert loss_printed_by(LIBRARY, capsys) < 0.1


def test_a_linen_module_learns_through_the_same_builder(capsys):
    assert loss_printed_by(with_model(LINEN), capsys) < 0.1


def test_an_nnx_module_learns_through_the_same_builder(capsys):
    assert loss_printed_by(with_model(NNX), capsys) < 0.1
