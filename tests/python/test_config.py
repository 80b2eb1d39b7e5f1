"""Configurations are those of the C library: its files, variables, keys and sentences."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from refit._c.config import Config, load_config, make_config
from refit.errors import ConfigError, InputOutputError, InvalidError, NotFoundError


def keys() -> list[str]:
    return [one.key for one in Config().options()]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    made = tmp_path / "a.yaml"
    made.write_text("offload: {batch: 3, copy_threads: 3, touch_threads: 3}\n")
    return made


def test_all_options_are_there(root: Path) -> None:
    text = (root / "configs" / "refit.yaml").read_text()
    assert len(keys()) > 40
    for key in keys():
        assert f"{key.split('.')[-1]}:" in text
    assert [key for key, _ in Config().items()] == keys()
    assert len({key.replace(".", "_") for key in keys()}) == len(keys())


@pytest.mark.parametrize("key", keys())
@pytest.mark.parametrize("as_python_has_it", [False, True])
def test_every_option_is_set_by_its_keyword(key: str, as_python_has_it: bool) -> None:
    option = next(one for one in Config().options() if one.key == key)
    assert option.help
    assert option.origin == "default"
    value = Config().get(key) if as_python_has_it else option.value
    config = load_config(environment=False, **{key.replace(".", "_"): value})
    assert config == Config()
    assert config[key.replace(".", "_")] == config.get(key) == Config()[key]
    assert next(one for one in config.options() if one.key == key).origin == "explicit"


@pytest.mark.parametrize(
    ("given", "key", "expected"),
    [
        ({"offload_slab_bytes": 1 << 30}, "offload.slab_bytes", 1 << 30),
        ({"offload_slab_bytes": "512MiB"}, "offload.slab_bytes", 512 << 20),
        ({"offload_slab_bytes": float(1 << 28)}, "offload.slab_bytes", 1 << 28),
        ({"offload_slab_bytes": np.int64(1 << 27)}, "offload.slab_bytes", 1 << 27),
        ({"offload_slab_bytes": np.float32(1 << 26)}, "offload.slab_bytes", 1 << 26),
        ({"offload": {"slab_bytes": "2GiB", "pin": "off"}}, "offload.slab_bytes", 2 << 30),
        ({"offload": {"slab_bytes": "2GiB", "pin": "off"}}, "offload.pin", "off"),
        ({"offload_budget_share": 0.25}, "offload.budget_share", 0.25),
        ({"offload_budget_share": "0.25"}, "offload.budget_share", 0.25),
        ({"offload_budget_share": np.float64(0.25)}, "offload.budget_share", 0.25),
        ({"offload_budget_share": 0.001}, "offload.budget_share", 0.001),  # not as a power of ten
        ({"offload_timeout_ms": 1500}, "offload.timeout_ms", 1500),
        ({"offload_numa": "interleave"}, "offload.numa", "interleave"),
        ({"offload_numa": 3}, "offload.numa", 3),
        ({"offload_numa": "auto"}, "offload.numa", "auto"),
        ({"offload": {"numa": False}}, "offload.numa", "off"),  # YAML 1.1 makes False of off
        ({"broadcast_shm": False}, "broadcast.shm", "off"),
        ({"broadcast_insecure": True}, "broadcast.insecure", True),
        ({"broadcast_insecure": False}, "broadcast.insecure", False),
        ({"device": "host"}, "device", "host"),
    ],
)
def test_values_may_be_given_as_python_has_them(
    given: dict[str, Any], key: str, expected: Any
) -> None:
    found = load_config(environment=False, **given)[key]
    assert type(found) is type(expected)
    assert found == (pytest.approx(expected) if type(expected) is float else expected)


def test_none_leaves_an_option_as_it_is(file: Path) -> None:
    for given in ({"offload_batch": None}, {"offload": {"batch": None}}, {"offload": None}):
        assert load_config(file, **given)["offload.batch"] == 3  # type: ignore[arg-type]


def test_each_layer_goes_over_the_one_before(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REFIT_OFFLOAD_COPY_THREADS", "4")
    monkeypatch.setenv("REFIT_OFFLOAD_TOUCH_THREADS", "4")
    config = load_config(file, offload_touch_threads=5)
    origins = {one.key: one.origin for one in config.options()}
    assert (config["offload.batch"], origins["offload.batch"]) == (3, "file")
    assert (config["offload.copy_threads"], origins["offload.copy_threads"]) == (4, "environment")
    assert (config["offload.touch_threads"], origins["offload.touch_threads"]) == (5, "explicit")
    assert origins["offload.verify"] == "default"
    assert load_config(file, environment=False)["offload.copy_threads"] == 3


@pytest.mark.parametrize("name", ["refit.yaml", "grpo.yaml", "ppo.yaml"])
def test_files_are_those_of_c(root: Path, name: str) -> None:
    config = load_config(root / "configs" / name)
    assert all(one.origin == "file" for one in config.options())
    if name == "refit.yaml":
        assert config == Config()


@pytest.mark.parametrize(
    ("overrides", "kind", "part"),
    [
        ({"offload_slab_byte": 1}, NotFoundError, "the nearest is offload_slab_bytes"),
        ({"slab_bytes": 1}, NotFoundError, "the nearest is offload_slab_bytes"),
        ({"pin": "off"}, NotFoundError, "the nearest is offload_pin"),
        ({"bind": "node"}, NotFoundError, "no option bind: refit.load_config().options() has"),
        ({"use_pinned_offload": 1}, NotFoundError, "nearest is use_pinned_optimizer_offload"),
        ({"offload": {"slab_byte": 1}}, NotFoundError, "the nearest is offload.slab_bytes"),
        ({"offload": {"slab_bytes": {"x": 1}}}, NotFoundError, "no option"),
        ({"offload": {"pinned": 1}}, NotFoundError, "the nearest is offload.pin"),
        ({"offload.slab_byte": 1}, NotFoundError, "the nearest is offload.slab_bytes"),
        ({"offload": 3}, NotFoundError, "there is no option offload: it is a section"),
        ({"offload_slab_byte": None}, NotFoundError, "the nearest is offload_slab_bytes"),
        ({"offload": {"slab_byte": None}}, NotFoundError, "the nearest is offload.slab_bytes"),
        ({"offload_budget_share": 4e-10}, ConfigError, "4e-10: of a number, 9 digits"),
        ({"offload_rate_limit": 1e-10}, ConfigError, "9 digits"),  # 0 would be no limit
        ({"offload_rate_limit": -1e-10}, ConfigError, "9 digits"),
        ({"offload_batch": 0}, ConfigError, "offload.batch"),
        ({"offload_batch": -1}, ConfigError, "offload.batch"),
        ({"offload_batch": 1.5}, ConfigError, "offload.batch"),
        ({"offload_batch": float("nan")}, ConfigError, "offload.batch"),
        ({"offload_batch": 1 << 70}, ConfigError, "offload.batch"),
        ({"broadcast_shm": True}, ConfigError, "broadcast.shm"),
        ({"offload_pin": "sometimes"}, ConfigError, "auto|require|prefer|off"),
        ({"use_pinned_optimizer_offload": "yes"}, ConfigError, "use_pinned_optimizer_offload"),
        ({"offload_batch": [1]}, InvalidError, "cannot be a list"),
        ({"offload_batch": b"1"}, InvalidError, "cannot be a bytes"),
        ({"device": "host\0cuda"}, InvalidError, "NUL"),
        ({"de\0vice": "host"}, InvalidError, "NUL"),
        ({"device": "h" * 64}, ConfigError, "device"),
        ({"broadcast_commit": "quorum"}, ConfigError, "quorum"),
        ({"": 1}, NotFoundError, "no option"),
    ],
)
def test_wrong_values_are_refused_with_the_librarys_sentence(
    overrides: dict[str, Any], kind: type[Exception], part: str
) -> None:
    with pytest.raises(kind) as caught:
        load_config(environment=False, **overrides)
    assert part in str(caught.value)


def test_unknown_key_is_refused_by_get() -> None:
    with pytest.raises(NotFoundError, match=r"the nearest is offload\.slab_bytes"):
        Config().get("offload.slab_byte")
    with pytest.raises(NotFoundError, match="the nearest is offload_slab_bytes"):
        Config().get("offload_slab_byte")
    with pytest.raises(NotFoundError, match="takes a mapping"):
        Config().get("offload")
    with pytest.raises(InvalidError, match="NUL"):
        Config().get("de\0vice")


@pytest.mark.parametrize("name", ["lr", "foo", "model", "optimizer", "grad", "learning_rate", ""])
def test_no_option_is_suggested_where_none_is_near(name: str) -> None:
    with pytest.raises(NotFoundError) as caught:
        make_config(None, {name: 1})
    assert "nearest" not in str(caught.value)
    assert "options() has them all" in str(caught.value)


def test_unknown_variable_is_refused_with_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REFIT_OFFLOAD_BATCHES", "1")
    with pytest.raises(ConfigError, match="the nearest is REFIT_OFFLOAD_BATCH"):
        load_config()
    assert load_config(environment=False) == Config()


def test_the_variable_of_the_library_is_not_an_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REFIT_LIBRARY", "/opt/refit/librefit.so")
    assert load_config() == Config()


def test_wrong_files_are_refused_with_line_and_column(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("offload:\n  slab_byte: 1GiB\n")
    with pytest.raises(ConfigError, match=r"a\.yaml:2:3: .*offload\.slab_bytes"):
        load_config(file)
    with pytest.raises(InputOutputError) as caught:
        load_config(tmp_path / "missing.yaml")
    assert caught.value.errno == 2
    with pytest.raises(InvalidError, match="a path has a NUL"):
        load_config("a\0b.yaml")


def test_make_config_takes_what_constructors_are_given(file: Path) -> None:
    config = load_config(file)
    assert make_config(config) is config
    nested = {"offload": {"batch": 3, "copy_threads": 3, "touch_threads": 3}}
    flat = {f"offload.{name}": 3 for name in nested["offload"]}
    for one in (config, file, str(file), nested, flat):
        assert make_config(one, {}) == config
        changed = make_config(one, {"offload_batch": 4, "device": "host"})
        assert (changed["offload.batch"], changed["device"]) == (4, "host")
    assert config["offload.batch"] == 3
    assert make_config(None) == Config()
    assert make_config() == Config()


def test_make_config_asks_once_all_layers_are_there() -> None:
    config = make_config({"broadcast": {"commit": "quorum"}}, {"broadcast_quorum": 2})
    assert config["broadcast.quorum"] == 2


def test_names_of_parameters_are_not_keys_of_a_mapping() -> None:
    for name in ("path", "environment", "self", "config"):
        with pytest.raises(NotFoundError, match=name):
            make_config({name: "x"})


@pytest.mark.parametrize("wrong", [3, ["a"], b"a.yaml"])
def test_make_config_refuses_what_is_none_of_them(wrong: Any) -> None:
    with pytest.raises(InvalidError, match="config is of type"):
        make_config(wrong)


def test_replace_makes_another_one() -> None:
    first = load_config(environment=False, offload_batch=7)
    second = first.replace(device="host")
    assert (first["device"], second["device"]) == ("auto", "host")
    assert second["offload.batch"] == 7
    assert first != second
    assert hash(first) == hash(load_config(environment=False, offload_batch=7))
    with pytest.raises(ConfigError):
        first.replace(offload_batch=0)
    assert first["offload.batch"] == 7


def test_it_says_what_differs_from_the_defaults() -> None:
    assert repr(Config()) == "Config()"
    config = load_config(environment=False, offload_slab_bytes=1 << 29)
    assert repr(config) == "Config(offload.slab_bytes='512MiB')"
    assert config != "Config()"


def test_pickling_keeps_values_and_origins(file: Path) -> None:
    config = load_config(file, device="host")
    again = pickle.loads(pickle.dumps(config))
    assert again == config
    assert again.options() == config.options()


def test_pickle_of_another_version_is_refused() -> None:
    make, (data,) = Config().__reduce__()
    with pytest.raises(InvalidError, match="another version"):
        make(data[:-1])
