"""Which way an FFN goes: the table, its files, the environment variable. No GPU is asked for anything."""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ckptfused.cli import main
from ckptfused.compat.triton import triton_version
from ckptfused.triton import tune, tuning
from ckptfused.triton.ffn.configs import CANDIDATES, candidates
from ckptfused.triton.tuning import CUBLAS, DeviceKey, ffn_choice
from tests import forks
from tests.triton.clock import Clock

H200 = DeviceKey("NVIDIA H200", (9, 0))
SHAPE = (16384, 4096, 14336, "swiglu", torch.bfloat16, H200)
TILE = CANDIDATES["sm_90"][1].name


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CKPTFUSED_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CKPTFUSED_FFN", raising=False)
    monkeypatch.setattr(tuning, "_has_triton", lambda: True)
    tuning.reload()
    yield
    tuning.reload()


def tuned(choice: str, shape: tuple = SHAPE, **more: object) -> None:
    n, c, f, act, dtype, device = shape
    entry = {"choice": choice, "triton": TILE, "cublas_ms": 12.5, "triton_ms": 11.25} | more
    tuning.save(tuning.shape_key(n, c, f, act, dtype, device), entry)
    tuning.reload()


def test_cublas_where_nothing_was_measured() -> None:
    choice, reason = ffn_choice(*SHAPE)
    assert choice == CUBLAS and reason.startswith("not measured")


def test_the_reason_is_the_command_that_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    _, reason = ffn_choice(*SHAPE)
    called: list[tuple[object, ...]] = []

    def measured(*shape: object) -> dict[str, object]:
        called.append(shape)
        return {"choice": CUBLAS, "all_ms": {CUBLAS: {"forward": 1.0}}}

    monkeypatch.setattr(tune, "tune_ffn", measured)
    command = reason.partition("python -m ckptfused ")[2].split()
    assert main(command) == 0 and called == [(*SHAPE[:-1], 21)]


def test_the_command_keeps_what_it_measures(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """On a made-up GPU, whose clock this is: the tile takes three quarters of cuBLAS's time."""
    paths = ("forward", "replaying backward", "keeping forward", "kept backward")
    times = {CUBLAS: dict.fromkeys(paths, 4.0), TILE: dict.fromkeys(paths, 3.0)}
    found = SimpleNamespace(
        measure=lambda n, c, f, act, dtype, tiles, rounds: {
            "choice": TILE, "triton": TILE, "cublas_ms": 16.0, "triton_ms": 12.0, "all_ms": times, "rounds": rounds
        }
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "ckptfused.triton.ffn.measure", found)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(tuning, "_device", lambda device: H200)
    sizes = ["--rows", "16384", "--width", "4096", "--hidden", "14336", "--rounds", "5"]
    assert main(["tune", *sizes]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].split()[0] == "milliseconds" and said[0].endswith("kept backward")
    assert [line.split() for line in said[1:3]] == [[CUBLAS, *["4.000"] * 4], [TILE, *["3.000"] * 4]]
    assert said[3] == f"chosen: {TILE}, from the next process on. Kept in {tuning.cache_file()}"
    tuning.reload()
    assert ffn_choice(*SHAPE) == (TILE, "measured: cuBLAS 16.000 ms, Triton 12.000 ms")
    (key,) = json.loads(tuning.cache_file().read_text())["entries"]
    assert "H200" in key and torch.__version__ in key and f"triton {triton_version()}" in key
    monkeypatch.setattr(tuning, "triton_version", lambda: "another")
    assert ffn_choice(*SHAPE)[0] == CUBLAS


def test_the_command_says_in_one_sentence_what_it_lacks(capsys: pytest.CaptureFixture) -> None:
    sizes = ["--rows", "64", "--width", "64", "--hidden"]
    if not torch.cuda.is_available():
        assert main(["tune", *sizes, "64"]) != 0
        assert capsys.readouterr().err == (
            "ckptfused tune: expected an NVIDIA GPU, whose kernels are timed, got a machine where PyTorch finds none\n"
        )
    assert main(["tune", *sizes, "63"]) != 0
    assert capsys.readouterr().err == (
        "ckptfused tune: --width and --hidden: expected multiples of 16, got 64 and 63\n"
    )
    assert not tuning.cache_file().exists()


@pytest.mark.parametrize(
    ("own", "shared", "folder"), [("mine", "all", "mine"), ("", "all", "all/ckptfused"), ("", "", ".cache/ckptfused")]
)
def test_where_the_users_table_is(own: str, shared: str, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTFUSED_CACHE", own)
    monkeypatch.setenv("XDG_CACHE_HOME", shared)
    assert tuning.cache_file() == (Path.home() if not own + shared else Path()) / folder / "ffn_tuned.json"


@pytest.mark.parametrize("choice", [CUBLAS, TILE])
def test_round_trip(choice: str) -> None:
    tuned(choice)
    assert ffn_choice(*SHAPE) == (choice, "measured: cuBLAS 12.500 ms, Triton 11.250 ms")


def test_nearly_as_many_rows_are_the_same_entry() -> None:
    tuned(TILE)
    _, *rest = SHAPE
    assert [ffn_choice(n, *rest)[0] for n in (8192, 8193, 16000, 16384, 16385)] == [CUBLAS, TILE, TILE, TILE, CUBLAS]
    assert ffn_choice(0, *rest)[0] == CUBLAS


def test_another_shape_type_or_device_is_another_entry() -> None:
    tuned(TILE)
    n, c, f, act, dtype, device = SHAPE
    others = (
        (n, c + 64, f, act, dtype, device), (n, c, f + 64, act, dtype, device), (n, c, f, "geglu", dtype, device),
        (n, c, f, act, torch.float16, device), (n, c, f, act, dtype, DeviceKey("NVIDIA H100", (9, 0))),
    )  # fmt: skip
    assert all(ffn_choice(*other)[0] == CUBLAS for other in others)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wide_types_stay_with_cublas(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTFUSED_FFN", "triton")
    choice, reason = ffn_choice(64, 64, 64, "swiglu", dtype, H200)
    assert choice == CUBLAS and "bfloat16 and float16" in reason


@pytest.mark.parametrize(("c", "f"), [(100, 64), (64, 37)])
def test_odd_widths_stay_with_cublas(c: int, f: int) -> None:
    choice, reason = ffn_choice(64, c, f, "swiglu", torch.bfloat16, H200)
    assert choice == CUBLAS and "multiples of 16" in reason


def test_cpu_and_old_gpus() -> None:
    *shape, _ = SHAPE
    assert ffn_choice(*shape, "cpu")[0] == CUBLAS
    assert ffn_choice(*shape, DeviceKey("Tesla V100", (7, 0)))[0] == CUBLAS


def test_environment_forces(monkeypatch: pytest.MonkeyPatch) -> None:
    tuned(TILE)
    monkeypatch.setenv("CKPTFUSED_FFN", "cublas")
    tuning.reload()
    assert ffn_choice(*SHAPE) == (CUBLAS, "CKPTFUSED_FFN=cublas")
    monkeypatch.setenv("CKPTFUSED_FFN", "triton")
    assert ffn_choice(*SHAPE)[0] == CUBLAS, "read once"
    tuning.reload()
    assert ffn_choice(*SHAPE)[0] == TILE
    other = (1024, 1024, 4096, "gelu", torch.float16, H200)
    assert ffn_choice(*other)[0] == CANDIDATES["sm_90"][0].name
    tuned(CUBLAS, triton="a tile of old")
    assert ffn_choice(*SHAPE)[0] == CANDIDATES["sm_90"][0].name


def test_environment_forces_what_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTFUSED_FFN", "triton")
    monkeypatch.setattr(tuning, "_has_triton", lambda: False)
    with pytest.raises(RuntimeError, match="not installed"):
        ffn_choice(*SHAPE)
    monkeypatch.setenv("CKPTFUSED_FFN", "fast")
    tuning.reload()
    with pytest.raises(ValueError, match="expected cublas or triton, got 'fast'"):
        ffn_choice(*SHAPE)


def test_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "_has_triton", lambda: False)
    tuned(TILE)
    assert ffn_choice(*SHAPE) == (CUBLAS, "Triton is not installed")


def test_a_tile_that_is_no_more() -> None:
    tuned("m1n1k1w1s1")
    choice, reason = ffn_choice(*SHAPE)
    assert choice == CUBLAS and "m1n1k1w1s1" in reason


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b'{"format": 1, "entries": {}}',  # of other measurements
        b'{"format": 2}',
        b'{"format": 2, "entries": {"a": 1}}',
        b"\xff\xfe",
    ],
)
def test_corrupt_cache_is_ignored_and_mended(content: bytes) -> None:
    path = tuning.cache_file()
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    with pytest.warns(UserWarning, match="not a table of tuned shapes"):
        assert ffn_choice(*SHAPE)[0] == CUBLAS
    with pytest.warns(UserWarning, match="not a table of tuned shapes"):
        tuned(TILE)
    assert ffn_choice(*SHAPE)[0] == TILE


def test_cache_keeps_other_entries_and_leaves_no_scraps() -> None:
    other = (1024, *SHAPE[1:])
    tuned(TILE)
    tuned(CUBLAS, other)
    assert ffn_choice(*SHAPE)[0] == TILE and ffn_choice(*other)[1].startswith("measured")
    path = tuning.cache_file()
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_failed_write_leaves_the_old_table(monkeypatch: pytest.MonkeyPatch) -> None:
    tuned(TILE)
    with pytest.raises(TypeError):
        tuning.save("key", {"choice": object()})
    tuning.reload()
    assert ffn_choice(*SHAPE)[0] == TILE
    path = tuning.cache_file()
    assert [p.name for p in path.parent.iterdir()] == [path.name]


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_unreadable_cache_is_ignored() -> None:
    tuned(TILE)
    tuning.cache_file().chmod(0)
    with pytest.warns(UserWarning, match="not a table"):
        assert ffn_choice(*SHAPE)[0] == CUBLAS
    tuning.cache_file().chmod(stat.S_IRUSR | stat.S_IWUSR)


def test_config_for() -> None:
    *shape, device = SHAPE
    assert tuning.config_for("", *shape, device) == CANDIDATES["sm_90"][0]
    assert tuning.config_for(TILE, *shape, device).name == TILE
    tuned(TILE)
    assert tuning.config_for("", *shape, device).name == TILE
    with pytest.raises(ValueError, match="config: expected one of"):
        tuning.config_for("cublas", *shape, device)
    with pytest.raises(RuntimeError, match="no tiles"):
        tuning.config_for("", *shape, "cpu")


def test_names_are_unique() -> None:
    for capability in ((8, 0), (8, 6), (9, 0), (12, 0)):
        names = [tile.name for tile in candidates(capability)]
        assert names and len(set(names)) == len(names)


def test_tune_needs_a_gpu_and_half_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="bfloat16 or float16"):
        tune.tune_ffn(64, 64, 64, "swiglu", torch.float32)
    monkeypatch.setattr(tuning, "_device", lambda device: None)
    with pytest.raises(RuntimeError, match="NVIDIA GPU"):
        tune.tune_ffn(64, 64, 64, "swiglu", torch.bfloat16)


def test_imports_without_triton() -> None:
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import ckptfused, torch\n"
        "from ckptfused.triton import tune, tuning\n"
        "print(tuning.ffn_choice(64, 64, 64, 'swiglu', torch.bfloat16, 'cpu')[0])"
    )
    run = forks.python(code)
    assert run.stdout.strip() == CUBLAS, run.stderr


def of_paths(*ms: float) -> dict[str, float]:
    from ckptfused.triton.ffn.measure import FORWARD_PATH, KEEPING, KEPT, REPLAYING

    return dict(zip((FORWARD_PATH, REPLAYING, KEEPING, KEPT), ms, strict=True))


@pytest.mark.parametrize(
    ("tiles", "choice", "best", "no_faster"),
    [
        ({"a": (4, 4, 4, 4), "b": (3, 3, 3, 3)}, "b", "b", []),
        ({}, CUBLAS, None, []),
        # As quick is not faster, on any path.
        ({"a": (5, 5, 5, 5)}, CUBLAS, "a", ["forward", "replaying backward", "keeping forward", "kept backward"]),
        ({"a": (1, 1, 1, 5)}, CUBLAS, "a", ["kept backward"]),
        # Quicker by far in all, but not on one path.
        ({"a": (6, 1, 1, 1)}, CUBLAS, "a", ["forward"]),
        ({"a": (1, 6, 1, 1)}, CUBLAS, "a", ["replaying backward"]),
        ({"a": (1, 1, 6, 1)}, CUBLAS, "a", ["keeping forward"]),
        ({"a": (1, 1, 1, 6)}, CUBLAS, "a", ["kept backward"]),
        # A tile that is faster everywhere goes before one that is quicker in all.
        ({"a": (1, 1, 1, 6), "b": (4.5, 4.5, 4.5, 4.5)}, "b", "b", []),
        # No tile is faster everywhere: forced, it is the quickest in all.
        ({"a": (6, 4, 4, 4), "b": (1, 6, 6, 1)}, CUBLAS, "b", ["replaying backward", "keeping forward"]),
    ],
)
def test_one_choice_that_no_path_pays_for(
    tiles: dict[str, tuple[float, ...]], choice: str, best: str | None, no_faster: list[str]
) -> None:
    pytest.importorskip("triton")
    from ckptfused.triton.ffn.measure import entry_of

    times = {name: of_paths(*ms) for name, ms in {CUBLAS: (5, 5, 5, 5), **tiles}.items()}
    entry = entry_of(times)
    assert (entry["choice"], entry["triton"], entry["no_faster"]) == (choice, best, no_faster)
    assert entry["cublas_ms"] == 20 and entry["all_ms"] == times
    assert entry["triton_ms"] == (None if best is None else sum(times[best].values()))
    json.dumps(entry)


def test_reason_names_the_paths_that_are_no_faster() -> None:
    tuned(CUBLAS, no_faster=["kept backward"])
    assert ffn_choice(*SHAPE) == (
        CUBLAS, "measured: cuBLAS 12.500 ms, Triton 11.250 ms, no faster: kept backward"
    )  # fmt: skip


def test_times_are_in_turns_and_not_of_the_flush(clock: Clock) -> None:
    pytest.importorskip("triton")
    from ckptfused.triton.ffn.measure import interleaved

    order: list[str] = []

    def run(name: str, ms: float) -> Callable[[], list[torch.Tensor]]:
        def go() -> list[torch.Tensor]:
            order.append(name)
            clock.now += ms
            return []

        return go

    ways = {CUBLAS: {"a": run("a", 3.0), "b": run("b", 4.0)}, "tile": {"a": run("t", 8.0)}}
    assert interleaved(ways, 5, run("flush", 64.0)) == {CUBLAS: {"a": 3.0, "b": 4.0}, "tile": {"a": 8.0}}
    assert order == ["flush", "a", "flush", "b", "flush", "t"] * (3 + 5)


def test_wrong() -> None:
    pytest.importorskip("triton")
    from ckptfused.triton.ffn.measure import worse_than_cublas

    true = {"h": {"": torch.linspace(1, 2, 64, dtype=torch.float64)}}
    cublas = {"h": {path: true["h"][""].bfloat16() for path in ("a", "b")}}
    assert worse_than_cublas(cublas, cublas, true, torch.bfloat16) == ""
    for off, message in ((1.1, "h of the b: relative error"), (torch.nan, "relative error nan"), (1.002, "in bits")):
        other = {"h": cublas["h"] | {"b": (true["h"][""] * off).bfloat16()}}
        assert message in worse_than_cublas(other, cublas, true, torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_tune_on_the_gpu_at_hand() -> None:
    pytest.importorskip("triton")
    shape = (512, 256, 512, "swiglu", torch.bfloat16)
    entry = tune.tune_ffn(*shape, rounds=3)
    tuning.reload()
    assert ffn_choice(*shape, "cuda")[0] == entry["choice"]
    assert entry["triton"] in {tile.name for tile in candidates(torch.cuda.get_device_capability())}, "all left out"
